// deep_jit/hopper.cuh on a CPU: barriers, copies and products for the fibers of cluster_on_host.cuh. What is asynchronous
// happens as late as it may, when a thread waits for it, so that a wait that is missing shows; copies happen at once as well.
#pragma once

#include "cluster_on_host.cuh"
#include <deque>
#include <map>

#define __align__(bytes) alignas(bytes)
#define __global__
#define __constant__ static const
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define DESCRIPTOR_UPPER 0ull

static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Kernels here count their blocks in a line.
#define blockIdx (Index{blockIdx.y * cluster_size + blockIdx.x, 0})
#define gridDim (Index{gridDim.x * gridDim.y, 1})

template <class T>
static T __ldg(const T* address) { T value; memcpy(&value, address, sizeof value); return value; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static int __float_as_int(float x) { return __float_as_uint(x); }
#define __expf std::exp
static float __fdividef(float x, float y) { return x / y; }
static int __shfl_sync(u32, int value, int lane) { return __shfl_sync(~0u, (u32)value, lane); }
static bool __any_sync(u32, bool any) { return __ballot_sync(~0u, any) != 0; }

// ------------------------------------------------------------------ mbarriers: also count bytes of bulk copies

struct Phased {
    int size = 0, arrived = 0;
    u32 phase = 0;
    long long bytes = 0;                        // announced, not here yet
    std::vector<std::function<void()>> copies;  // on their way: they arrive when a thread waits here
    Barrier news;                               // its generation counts what a waiting thread should know of
};
static std::map<u32, Phased> phased;
static void end_phase(Phased& barrier) {
    if (barrier.arrived == barrier.size && barrier.bytes == 0) barrier.arrived = 0, barrier.phase++, barrier.news.generation++;
}
static void barrier_init(u32 at, u32 arrivals) { phased[at] = Phased{(int)arrivals}; }
static void barrier_fence_init() {}
static void barrier_arrive(u32 at) {
    phased.at(at).arrived++;
    end_phase(phased.at(at));
}
static void barrier_arrive_at(u32 at, u32 rank) { barrier_arrive(remote(at, rank)); }
static void barrier_arrive_if(bool arrives, u32 at) { if (arrives) barrier_arrive(at); }
static void barrier_expect(u32 at, u32 bytes) { phased.at(at).bytes += bytes, barrier_arrive(at); }
// What the barrier counts once it is done: at once, or when a thread waits there, as chance has it.
static void later(u32 at, std::function<void(Phased&)> arrive) {
    Phased& barrier = phased.at(at);
    if (shuffles != nullptr && (*shuffles)() % 2) return arrive(barrier), end_phase(barrier);
    barrier.news.generation++;
    barrier.copies.push_back([=, &barrier] { arrive(barrier), end_phase(barrier); });
}
// A bulk copy of `bytes`.
static void send(u32 at, u32 bytes, std::function<void()> copy) {
    later(at, [=](Phased& barrier) { copy(), barrier.bytes -= bytes; });
}
static void barrier_wait(u32 at, u32 parity) {
    Phased& barrier = phased.at(at);
    while (barrier.phase % 2 == parity) {
        const u32 generation = barrier.news.generation;
        auto copies = std::move(barrier.copies);
        barrier.copies.clear();
        for (auto& arrive : copies) arrive();
        if (barrier.phase % 2 == parity) wait(barrier.news, generation);
    }
}

// ------------------------------------------------------------------ named barriers of a block

struct Named { Barrier barrier; bool any = false, result[2] = {}; };
static std::map<int, Named> named;  // by block and number
static Named& named_at(int id, int threads) {
    Named& found = named[fibers[current].rank * 16 + id];
    found.barrier.size = threads;
    return found;
}
static void named_arrive(int id, int threads) { arrive(named_at(id, threads).barrier); }
static void named_sync(int id, int threads) { sync(named_at(id, threads).barrier); }
static bool named_any(int id, int threads, bool flag) {
    Named& found = named_at(id, threads);
    found.any |= flag;
    u32 generation = found.barrier.generation;
    if (found.barrier.arrived + 1 == threads) found.result[generation & 1] = found.any, found.any = false;
    sync(found.barrier);
    return found.result[generation & 1];
}

// ------------------------------------------------------------------ memory

static void fence_to_copies() {}
static u64 keep_policy() { return 0; }
static u64 read_once_policy() { return 0; }
static void prefetch_to_l2(const void*) {}
struct Copy { u32 target; const void* source; };
static std::map<int, std::vector<Copy>> on_their_way;  // by fiber
static void copy_16(u32 target, const void* source, bool valid, u64) {
    static const uint4 zeros = {};
    on_their_way[current].push_back({target, valid ? source : &zeros});
}
static void barrier_arrive_on_copies(u32 at) {
    const auto copies = std::move(on_their_way[current]);
    on_their_way[current].clear();
    later(at, [=](Phased& barrier) {
        for (auto& copy : copies) memcpy(place(copy.target), copy.source, 16);
        barrier.arrived++;
    });
}

template <class T>
static T load(u32 at) { T value; memcpy(&value, place(at), sizeof value); return value; }
static float load_float(u32 at) { return load<float>(at); }
static float2 load_float2(u32 at) { return load<float2>(at); }
static uint4 load_words(u32 at) { return load<uint4>(at); }
static u32 load_byte(u32 at) { return load<u8>(at); }
static u32 load_word(u32 at) { return load<u32>(at); }
static void store_float(u32 at, float x) { memcpy(place(at), &x, 4); }
static void store_byte(u32 at, u32 x) { *place(at) = (u8)x; }
static void store_global(void* target, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(target, words, 16);
}
static void store_global_once(void* target, u32 a, u32 b, u32 c, u32 d) { store_global(target, a, b, c, d); }
static void store_shared(u32 target, u32 a, u32 b, u32 c, u32 d) { store_global(place(target), a, b, c, d); }

static void load_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
    send(barrier, bytes, [=] { memcpy(place(target), source, bytes); });
}
// Stores read shared memory when their thread waits for that.
static std::map<int, std::vector<std::function<void()>>> storing;  // by fiber
static void store_bytes(void* target, u32 source, u32 bytes) {
    storing[current].push_back([=] { memcpy(target, place(source), bytes); });
}
static void store_commit() {}
template <int PENDING>
static void store_wait_read() {
    for (auto& store : storing[current]) store();
    storing[current].clear();
}

static uint4 load_matrices(u32 at) {
    u32 rows[32], words[4];
    for (int lane = 0; lane < 32; lane++) rows[lane] = __shfl_sync(~0u, at, lane);
    for (int m = 0; m < 4; m++) memcpy(&words[m], place(rows[8 * m + threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4), 4);
    return {words[0], words[1], words[2], words[3]};
}

static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// ------------------------------------------------------------------ numbers

static float exp2_fast(float x) { return std::exp2(x); }
static u32 permute(u32 a, u32 b, u32 selector) {
    u64 bytes = a | (u64)b << 32;
    u32 word = 0;
    for (int i = 0; i < 4; i++) {
        u32 at = selector >> 4 * i & 15, byte = (u32)(bytes >> at % 8 * 8 & 0xFF);
        word |= (at & 8 ? (byte & 0x80 ? 0xFFu : 0) : byte) << 8 * i;
    }
    return word;
}
template <u32 MASK>
static u32 or_masked(u32 a, u32 b) { return a | (b & MASK); }
static float low_bf16(u32 word) { return __uint_as_float(word << 16); }
static float high_bf16(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }
static u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b)); }
static float from_e4m3(u32 byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 0x7F) == 0x7F) return NAN;
    const float x = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return byte & 0x80 ? -x : x;
}
static float2 unpack_e4m3(u16 pair) { return {from_e4m3(pair & 0xFF), from_e4m3(pair >> 8)}; }
static u32 scale_exponent(float amax) {
    u32 bits = __float_as_uint(std::fmax(amax, 1e-4f) * (1.0f / 448.0f));
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0);
}
static float power_of_two(int exponent) { return exponent <= 0 ? 0.0f : __uint_as_float((u32)exponent << 23); }

// ------------------------------------------------------------------ products

static u64 matrix_descriptor(u32 address) { return (address & 0x3FFFF) >> 4; }
static u32 tile_word(u32 address, u32 stride) { return (address & 0x3FFFF) >> 4 | (stride >> 4) << 16; }
static u32 hidden(u32 word) { return word; }
// A product reads its operands and adds to its sums when its thread waits for it: an operand given up too early shows.
struct Running { std::deque<std::vector<std::function<void()>>> groups; std::vector<std::function<void()>> open; };
static std::map<int, Running> running;  // by fiber
static void wgmma_fence() {}
static void wgmma_commit() {
    Running& mine = running[current];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}
template <int PENDING>
static void wgmma_wait() {
    Running& mine = running[current];
    while (mine.groups.size() > PENDING) {
        auto group = std::move(mine.groups.front());
        mine.groups.pop_front();
        for (auto& product : group) product();
    }
}
template <class T, int COUNT>
static void fence_registers(T (&)[COUNT]) {}
template <int REGISTERS>
static void fewer_registers() {}
template <int REGISTERS>
static void more_registers() {}

// Before a launch: what the one before left.
static void forget_launch(std::mt19937* random) {
    phased.clear(), named.clear(), on_their_way.clear(), storing.clear(), running.clear();
    shuffles = random;  // threads take turns in any order
}
