// deep_jit/hopper.cuh and flash_mla/instructions.cuh on a CPU: barriers, copies and products for the fibers of
// cluster_on_host.cuh. Copies by threads land when they are waited for, so that a wait that is missing shows.
#pragma once

#define CLUSTER SPLIT
#include "cluster_on_host.cuh"
#undef CLUSTER
#include <array>
#include <deque>
#include <map>

#define __align__(bytes) alignas(bytes)
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define DESCRIPTOR_UPPER 0ull

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// The launch: a cluster is a row of blocks for the fibers; the kernel counts blocks in a line.
static Index gridDim;
#define blockIdx (Index{blockIdx.y * SPLIT + blockIdx.x, 0})

template <class T>
static T __ldg(const T* address) { T value; memcpy(&value, address, sizeof value); return value; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static int __shfl_sync(u32, int value, int lane) { return __shfl_sync(~0u, (u32)value, lane); }
static u32 __shfl_xor_sync(u32, u32 value, int mask) { return __float_as_uint(__shfl_xor_sync(~0u, __uint_as_float(value), mask)); }
static bool __any_sync(u32, bool any) { return __ballot_sync(~0u, any) != 0; }

// ------------------------------------------------------------------ barriers

struct Phased : Barrier { long long bytes = 0; };  // an mbarrier: `size` arrivals and all bytes that were announced
static std::map<u32, Phased> phased;
static void end_phase(Phased& barrier) {
    if (barrier.arrived == barrier.size && barrier.bytes == 0) barrier.arrived = 0, barrier.generation++;
}
static void barrier_init(u32 at, u32 arrivals) { phased[at] = Phased{{(int)arrivals}}; }
static void barrier_fence_init() {}
static void barrier_arrive(u32 at) {
    Phased& barrier = phased.at(at);
    barrier.arrived++;
    end_phase(barrier);
}
static void barrier_expect(u32 at, u32 bytes) { phased.at(at).bytes += bytes, barrier_arrive(at); }
static void barrier_wait(u32 at, u32 parity) {
    Phased& barrier = phased.at(at);
    if ((barrier.generation & 1) == parity) wait(barrier, barrier.generation);
}

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
static std::map<int, std::vector<std::pair<u8*, uint4>>> on_their_way;  // copies by fiber
static void copy_16(u32 target, const void* source, bool valid, u64) {
    uint4 four = {};
    if (valid) memcpy(&four, source, 16);
    on_their_way[current].push_back({place(target), four});
}
static void wait_for_copies() {
    for (auto& [target, four] : on_their_way[current]) memcpy(target, &four, 16);
    on_their_way[current].clear();
}
static void barrier_arrive_on_copies(u32 at) { wait_for_copies(), barrier_arrive(at); }
static void store_shared(u32 target, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(place(target), words, 16);
}
static void store_global_once(void* target, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(target, words, 16);
}

static u32 peer_address(u32 address, int rank) { return remote(address, rank); }
static void store_peer(u32 address, float a) { memcpy(place(address), &a, 4); }
static void store_peer(u32 address, float a, float b, float c, float d) {
    float four[4] = {a, b, c, d};
    memcpy(place(address), four, 16);
}

static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
struct alignas(64) TensorMap { const u8* base; long long token_stride, head_stride; u8 unused[104]; };
static void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
    for (int row = 0; row < 64; row++)
        for (int chunk = 0; chunk < 8; chunk++) {
            const u8* source = map.base + z * map.token_stride + (y + row) * map.head_stride + x * 2 + chunk * 16;
            memcpy(place(swizzled(target + row * 128 + chunk * 16)), source, 16);
        }
    phased.at(barrier).bytes -= 8192;
    end_phase(phased.at(barrier));
}

// ------------------------------------------------------------------ numbers

static float exp2_fast(float x) { return std::exp2(x); }
static u32 permute(u32 a, u32 b, u32 selector) {
    u64 bytes = a | (u64)b << 32;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return result;
}
static float low_bf16(u32 word) { return __uint_as_float(word << 16); }
static float high_bf16(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }
static u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b)); }
static u32 round_e4m3(float x) {
    u32 sign = std::signbit(x) ? 0x80 : 0;
    float size = std::min(std::fabs(x), 448.0f);
    if (std::isnan(x)) return 0x7F;
    int exponent = std::max(std::ilogb(size), -6);  // of a value of 0 too
    if (size == 0) return sign;
    u32 steps = (u32)std::nearbyint(std::ldexp(size, 3 - exponent));  // 8 to 16, fewer when subnormal
    return sign | (exponent + 6) * 8 + steps;                           // 8 steps carry into the exponent
}
static u16 pack_e4m3(float low, float high) { return round_e4m3(low) | round_e4m3(high) << 8; }

// ------------------------------------------------------------------ products

static u32 tile_word(u32 address, u32 stride) { return (address & 0x3FFFF) >> 4 | (stride >> 4) << 16; }
static u32 hidden(u32 word) { return word; }
static void wgmma_fence() {}
// A product reads its operands and adds to its sums when its thread waits for it: a tile given up too early shows.
struct Running { std::deque<std::vector<std::function<void()>>> groups; std::vector<std::function<void()>> open; };
static std::map<int, Running> running;  // by fiber
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

static float value_at(u32 address) {
    u16 bits;
    memcpy(&bits, fibers[current].block->memory.data() + swizzled(address), 2);
    return __uint_as_float((u32)bits << 16);
}
// Row `row` and number k of an operand whose summed dimension is contiguous.
static u32 along(u64 descriptor, int row, int k) { return ((descriptor & 0x3FFF) << 4) + row / 8 * 1024 + row % 8 * 128 + k * 2; }
// Row k and column `column` of one in tiles of 64 columns.
static u32 across(u64 descriptor, int k, int column) {
    return ((descriptor & 0x3FFF) << 4) + column / 64 * ((descriptor >> 16 & 0x3FFF) << 4) + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2;
}

static void multiply_64x64(float (&d)[32], u64 a, u64 b, int accumulate) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float left[2][16];
    for (int k = 0; k < 16; k++) left[0][k] = value_at(along(a, row, k)), left[1][k] = value_at(along(a, row + 8, k));
    for (int j = 0; j < 16; j++) {
        const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
        float sum[2] = {};
        for (int k = 0; k < 16; k++) {
            const float right = value_at(along(b, column, k));
            sum[0] += left[0][k] * right, sum[1] += left[1][k] * right;
        }
        for (int i = 0; i < 2; i++) {
            float& target = d[j / 2 * 4 + i * 2 + j % 2];
            target = (accumulate ? target : 0) + sum[i];
        }
    }
}

static void multiply_64x256(float (&d)[128], const std::array<u32, 4>& a, u64 b) {
    const int lane = threadIdx.x % 32, quad = lane & ~3;
    float left[2][16];  // rows r and r + 8; a quad has a row's sixteen numbers
    for (int half = 0; half < 2; half++)
        exchange(a[2 * half] | (u64)a[2 * half + 1] << 32, [&](u64* all) {
            for (int c = 0; c < 4; c++)
                for (int i = 0; i < 2; i++) {
                    const u32 word = all[quad + c] >> 32 * i;
                    left[i][half * 8 + c * 2] = low_bf16(word), left[i][half * 8 + c * 2 + 1] = high_bf16(word);
                }
            return 0;
        });
    for (int j = 0; j < 64; j++) {
        const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
        float sum[2] = {};
        for (int k = 0; k < 16; k++) {
            const float right = value_at(across(b, k, column));
            sum[0] += left[0][k] * right, sum[1] += left[1][k] * right;
        }
        for (int i = 0; i < 2; i++) d[j / 2 * 4 + i * 2 + j % 2] += sum[i];
    }
}

static void wgmma_64x64(float (&d)[32], u64 a, u64 b, int accumulate) {
    running[current].open.push_back([&d, a, b, accumulate] { multiply_64x64(d, a, b, accumulate); });
}
static void wgmma_64x256(float (&d)[128], const u32 (&a)[4], u64 b) {
    std::array<u32, 4> words = {a[0], a[1], a[2], a[3]};
    running[current].open.push_back([&d, words, b] { multiply_64x256(d, words, b); });
}
