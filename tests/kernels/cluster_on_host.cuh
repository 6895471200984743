// deep_select's cluster.cuh on a CPU: the threads of a cluster are fibers that take turns at barriers and warp functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <csetjmp>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x, y; };
using std::max;
using std::min;
static u32 min(u32 a, int b) { return std::min(a, (u32)b); }
static u32 max(u32 a, int b) { return std::max(a, (u32)b); }

#define DEVICE inline
#define __restrict__
#define KERNEL(threads, blocks) static void
#define CLUSTER_DIMS
#define SHARED_MEMORY(name) u8* name = fibers[current].block->memory.data()

struct Barrier {
    int size = 0, arrived = 0;
    u32 generation = 0;
};
struct Block { std::vector<u8> memory; Barrier barrier; };
struct Warp { Barrier barrier; u64 slots[32]; };
struct Fiber {
    ucontext_t context;
    jmp_buf place;  // once started: a jump costs no system call, a switch of contexts does
    bool started = false;
    std::vector<u8> stack;
    Block* block;
    Warp* warp;
    int thread, rank;
    bool done = false;
    u32 arrived_generation = 0;
    Barrier* awaited = nullptr;  // not worth a switch before its generation changes
    u32 awaited_generation = 0;
};
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static std::vector<Warp> warps;
static Barrier cluster_barrier;
static int current;
static jmp_buf scheduler;
static Index threadIdx, blockIdx, gridDim;  // blocks of a cluster along x, clusters along y
static int cluster_size;

static float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
static float fast_exp(float x) { return std::exp(x); }
static float fast_log2(float x) { return std::log2(x); }
static float larger_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }
static float fast_reciprocal(float x) { return 1 / x; }
static float fast_sqrt(float x) { return std::sqrt(x); }

static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static u32 round_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

// The nearest of E4M3's numbers, ties to the even code.
static u32 round_e4m3(float x) {
    if (std::isnan(x)) return 0x7F;
    u32 sign = std::signbit(x) ? 0x80 : 0, exponent = 0;
    double size = std::min(std::fabs((double)x), 448.0), unit = std::ldexp(1.0, -9);
    while (size >= 16 * unit) unit *= 2, exponent++;
    return sign | (u32)(exponent * 8 + std::nearbyint(size / unit));
}
static u32 pack_e4m3(float low, float high) { return round_e4m3(low) | round_e4m3(high) << 8; }

static void widen_e4m3(u32 codes, float* value) {
    for (int i = 0; i < 4; i++) {
        u32 code = codes >> 8 * i & 255, exponent = code >> 3 & 15;
        float size = std::ldexp(exponent ? 8 + code % 8 : code % 8, (exponent ? exponent : 1) - 10);
        value[i] = code % 128 == 127 ? NAN : code >= 128 ? -size : size;
    }
}
static void yield() {
    if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

static u32 arrive(Barrier& barrier) {
    u32 generation = barrier.generation;
    if (++barrier.arrived == barrier.size) barrier.arrived = 0, barrier.generation++;
    return generation;
}
static void wait(Barrier& barrier, u32 generation) {
    if (barrier.generation != generation) return;
    fibers[current].awaited = &barrier, fibers[current].awaited_generation = generation;
    yield();
    fibers[current].awaited = nullptr;
}
static void sync(Barrier& barrier) { wait(barrier, arrive(barrier)); }
static void __syncthreads() { sync(fibers[current].block->barrier); }
static void cluster_sync() { cluster_size > 1 ? sync(cluster_barrier) : __syncthreads(); }
static void cluster_arrive() { fibers[current].arrived_generation = arrive(cluster_barrier); }
static void cluster_wait() { wait(cluster_barrier, fibers[current].arrived_generation); }

// Every lane gives a value and sees those of all.
template <class F>
static auto exchange(u64 value, F&& combine) {
    Warp& warp = *fibers[current].warp;
    warp.slots[threadIdx.x % 32] = value;
    sync(warp.barrier);
    auto result = combine(warp.slots);
    sync(warp.barrier);
    return result;
}
template <class T>
static T __shfl_up_sync(u32, T value, int step) {
    int lane = threadIdx.x % 32;
    return exchange(value, [=](u64* all) { return (T)all[lane >= step ? lane - step : lane]; });
}
static u32 __reduce_add_sync(u32, u32 value) {
    return exchange(value, [](u64* all) { u32 sum = 0; for (int i = 0; i < 32; i++) sum += all[i]; return sum; });
}
static u32 __reduce_max_sync(u32, u32 value) {
    return exchange(value, [](u64* all) { return (u32)*std::max_element(all, all + 32); });
}
static u32 __reduce_min_sync(u32, u32 value) {
    return exchange(value, [](u64* all) { return (u32)*std::min_element(all, all + 32); });
}
static u32 __match_any_sync(u32, u32 value) {
    return exchange(value, [=](u64* all) { u32 m = 0; for (int i = 0; i < 32; i++) m |= (all[i] == value) << i; return m; });
}

static u32 __ballot_sync(u32, bool value) {
    return exchange(value, [](u64* all) { u32 m = 0; for (int i = 0; i < 32; i++) m |= (u32)all[i] << i; return m; });
}
static u32 __shfl_sync(u32, u32 value, int lane) {
    return exchange(value, [=](u64* all) { return (u32)all[lane]; });
}
static long long __shfl_sync(u32, long long value, int lane) {
    return exchange(value, [=](u64* all) { return (long long)all[lane]; });
}
static float __shfl_sync(u32, float value, int lane) {
    return __uint_as_float(exchange(__float_as_uint(value), [=](u64* all) { return (u32)all[lane]; }));
}
static u32 __shfl_xor_sync(u32, u32 value, int mask) {
    int lane = threadIdx.x % 32 ^ mask;
    return exchange(value, [=](u64* all) { return (u32)all[lane]; });
}
static float __shfl_xor_sync(u32, float value, int mask) {
    u32 bits = __float_as_uint(value);
    int lane = threadIdx.x % 32 ^ mask;
    return __uint_as_float(exchange(bits, [=](u64* all) { return (u32)all[lane]; }));
}
static void add_released(u32* at) { ++*at; }
static u32 load_acquired(const u32* at) { u32 value = *at; yield(); return value; }
static float load_shared_by_all(const float* at) { return *at; }
static uint4 load_shared_by_all(const u16* at) { uint4 v; memcpy(&v, at, 16); return v; }
static uint4 load_vector(const u16* at) { uint4 v; memcpy(&v, at, 16); return v; }
static void store_vector(u16* at, uint4 v) { memcpy(at, &v, 16); }
static void multiply_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u64 words[3][32], own[3] = {a0 | (u64)a1 << 32, a2 | (u64)a3 << 32, b0 | (u64)b1 << 32};
    for (int i = 0; i < 3; i++) exchange(own[i], [&](u64* all) { memcpy(words[i], all, sizeof(words[i])); return 0; });
    auto number = [&](int i, int lane, int word, int half) {
        return __uint_as_float((u32)(words[i][lane] >> word * 32) >> half * 16 << 16);
    };
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) {
            float a = number(k / 8, lane / 4 * 4 + k % 8 / 2, i / 2, k % 2);
            c[i] += a * number(2, (lane % 4 * 2 + i % 2) * 4 + k % 8 / 2, k / 8, k % 2);
        }
    }
}
static void __syncwarp() { sync(fibers[current].warp->barrier); }

static u32 atomicAdd(u32* at, u32 value) { u32 old = *at; *at += value; return old; }
static u32 atomicOr(u32* at, u32 value) { u32 old = *at; *at |= value; return old; }
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
static u32 __vminu2(u32 a, u32 b) { return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16; }

// An address in shared memory: its offset, in the upper bits the block's rank.
static u32 shared_address(const void* pointer) {
    Fiber& fiber = fibers[current];
    return (u32)((const u8*)pointer - fiber.block->memory.data()) | (u32)fiber.rank << 24;
}
static u32 remote(u32 address, u32 rank) { return (address & 0xFFFFFF) | rank << 24; }
static u8* place(u32 address) { return &blocks[address >> 24].memory.at(address & 0xFFFFFF); }
static u32 load_remote(u32 address) { u32 v; memcpy(&v, place(address), 4); return v; }
static uint4 load_remote4(u32 address) { uint4 v; memcpy(&v, place(address), 16); return v; }
static void store_remote(u32 address, u32 value) { memcpy(place(address), &value, 4); }
static void add_remote(u32 address, u32 value) { u32 old; memcpy(&old, place(address), 4); store_remote(address, old + value); }
static void store_remote2(u32 address, u32 a, u32 b) { store_remote(address, a), store_remote(address + 4, b); }

static u32 plain_float(u32 x) { return (x & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFFFFFF : x == 0x80000000 ? 0 : x; }
static void follow_launch_before() {}
static void keep_order() {}
static u32 hardware_place() { return 3; }
static u32 larger_half(u32 a, u32 b) {
    float x = __uint_as_float(a << 16), y = __uint_as_float(b << 16);
    return std::isnan(x) ? (std::isnan(y) ? 0x7FFF : b) : x < y ? b : a;
}
static u32 larger_bf16(u32 a, u32 b) { return larger_half(a & 0xFFFF, b & 0xFFFF) | larger_half(a >> 16, b >> 16) << 16; }
static u32 reaches_bf16(u32 a, u32 b) {
    bool low = __uint_as_float(a << 16) >= __uint_as_float(b << 16);
    bool high = __uint_as_float(a & 0xFFFF0000) >= __uint_as_float(b & 0xFFFF0000);
    return (low ? 0xFFFF : 0) | (high ? 0xFFFF0000 : 0);
}
static u32 upper_halves(u32 low, u32 high) { return low >> 16 | (high & 0xFFFF0000); }
static u32 __funnelshift_l(u32 low, u32 high, int step) { return high << step | low >> (32 - step); }
static int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }

static std::mt19937* shuffles = nullptr;  // where threads should take turns in a random order, and get ahead of each other
static std::function<void()> body;
static void enter() {
    fibers[current].started = true;
    body();
    fibers[current].done = true;
    yield();
}

// Runs `kernel` as `rows` clusters of `ranks` blocks, one after the other. False if threads wait for each other for ever.
static bool run(int ranks, int rows, int threads, int shared_bytes, const std::function<void()>& kernel) {
    body = kernel, cluster_size = ranks, gridDim = {ranks, rows};
    for (int row = 0; row < rows; row++) {
        fibers = std::vector<Fiber>(ranks * threads);
        blocks = std::vector<Block>(ranks);
        warps = std::vector<Warp>(ranks * threads / 32);
        cluster_barrier = {ranks * threads};
        for (auto& block : blocks) block.memory.assign(shared_bytes, 0xA5), block.barrier = {threads};
        for (auto& warp : warps) warp.barrier = {32};
        for (int i = 0; i < ranks * threads; i++) {
            Fiber& fiber = fibers[i];
            fiber.stack.resize(32768);
            fiber.block = &blocks[i / threads], fiber.warp = &warps[i / 32];
            fiber.thread = i % threads, fiber.rank = i / threads;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, enter, 0);
        }
        std::vector<int> order(fibers.size());
        std::iota(order.begin(), order.end(), 0);
        std::vector<bool> is_slow(fibers.size() / 128 + 1);  // groups of 128 threads that seldom have a turn, for some rounds
        bool alive = true, moves = true;
        for (int round = 0; alive; round++) {
            if (!moves) return false;
            alive = moves = false;
            if (shuffles != nullptr) {
                std::shuffle(order.begin(), order.end(), *shuffles);
                if (round % 32 == 0) for (auto&& group : is_slow) group = (*shuffles)() % 2;
            }
            for (int next : order) {
                current = next;
                Fiber& fiber = fibers[current];
                if (fiber.done) continue;
                alive = true;
                if (fiber.awaited && fiber.awaited->generation == fiber.awaited_generation) continue;
                moves = true;
                if (is_slow[current / 128] && (*shuffles)() % 16 != 0) continue;
                threadIdx = {fiber.thread, 0}, blockIdx = {fiber.rank, row};
                if (_setjmp(scheduler) != 0) continue;
                if (fiber.started) _longjmp(fiber.place, 1);
                setcontext(&fiber.context);
            }
        }
    }
    return true;
}
