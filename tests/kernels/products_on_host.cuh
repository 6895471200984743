// deep_jit/hopper.cuh and deep_gemm's products.cuh and tma.cuh on a CPU: threads are fibers (cluster_on_host.cuh). A product
// reads its operands and writes its sums only when its threads wait for it, so that an operand given up too early is seen.
#pragma once

#include <map>

#include "cluster_on_host.cuh"

#define __global__
#define __constant__ static const
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static int grid_size;
static int block_index() { return blockIdx.y * CLUSTER + blockIdx.x; }

template <class T>
static T __ldg(const T* at) { return *at; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static int __float_as_int(float x) { return __float_as_uint(x); }
#define __expf std::exp
static bool __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
static int __shfl_sync(u32 mask, int value, int lane) { return (int)__shfl_sync(mask, (u32)value, lane); }
static int __shfl_up_sync(u32 mask, int value, int step) { return (int)__shfl_up_sync(mask, (u32)value, step); }

// ------------------------------------------------------------------ mbarriers, named barriers

struct Mbarrier { int size, left; long long bytes = 0; Barrier phase; };  // phase.generation counts
static std::map<u32, Mbarrier> mbarriers;
static void settle(Mbarrier& b) {
    if (b.left == 0 && b.bytes == 0) b.left = b.size, b.phase.generation++;
}
static void barrier_init(u32 barrier, u32 arrivals) { mbarriers[barrier] = {(int)arrivals, (int)arrivals}; }
static void barrier_fence_init() {}
static void barrier_arrive(u32 barrier) { auto& b = mbarriers.at(barrier); b.left--, settle(b); }
static void barrier_expect(u32 barrier, u32 bytes) { auto& b = mbarriers.at(barrier); b.bytes += bytes, b.left--, settle(b); }
static void barrier_arrive_at(u32 barrier, u32 rank) { barrier_arrive(remote(barrier, rank)); }
static void came(u32 barrier, u32 bytes) { auto& b = mbarriers.at(barrier); b.bytes -= bytes, settle(b); }
static void barrier_wait(u32 barrier, u32 parity) {
    Barrier& phase = mbarriers.at(barrier).phase;
    while (phase.generation % 2 == parity) wait(phase, phase.generation);
}
static std::map<std::pair<int, int>, Barrier> named;
static void named_sync(int id, int threads) {
    auto& barrier = named[{fibers[current].rank, id}];
    barrier.size = threads;
    sync(barrier);
}

// ------------------------------------------------------------------ memory and numbers

template <class T>
static T load(u32 at) { T value; memcpy(&value, place(at), sizeof value); return value; }
static float load_float(u32 at) { return load<float>(at); }
static float2 load_float2(u32 at) { return load<float2>(at); }
static uint4 load_words(u32 at) { return load<uint4>(at); }
static u32 load_word(u32 at) { return load<u32>(at); }
static void store_float(u32 at, float x) { memcpy(place(at), &x, 4); }
static void store_byte(u32 at, u32 x) { *place(at) = (u8)x; }
static void store_global(void* target, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(target, words, 16);
}
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
static float from_e4m3(u32 byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 0x7F) == 0x7F) return NAN;
    const float x = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return byte & 0x80 ? -x : x;
}
static u32 to_e4m3(float x) {  // nearest, ties to even, at most 448
    const u32 sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7F;
    x = std::min(std::fabs(x), 448.0f);
    const int exponent = std::max(x == 0 ? -6 : std::ilogb(x), -6);
    const int steps = (int)std::nearbyint(std::ldexp(x, 3 - exponent));  // 8 to 16 of a normal number
    return sign | (u32)(steps + (exponent + 6) * 8);
}
static u16 pack_e4m3(float low, float high) { return (u16)(to_e4m3(low) | to_e4m3(high) << 8); }
static float2 unpack_e4m3(u16 pair) { return {from_e4m3(pair & 0xFF), from_e4m3(pair >> 8)}; }
static u32 scale_exponent(float amax) {
    u32 bits = __float_as_uint(std::fmax(amax, 1e-4f) * (1.0f / 448.0f));
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0);
}
static float power_of_two(int exponent) { return exponent <= 0 ? 0.0f : __uint_as_float((u32)exponent << 23); }

// ------------------------------------------------------------------ copies

struct alignas(64) TensorMap {
    u64 base, rows, columns, stride, box_rows, box_columns, size, swizzled;  // stride in bytes, columns of `size` bytes
    u64 unused[8];
};
static u32 swizzle(u32 at) { return at ^ (at >> 7 & 7) << 4; }
static void load_box(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    const int width = map->box_columns * map->size;
    for (int r = 0; r < (int)map->box_rows; r++) {
        for (int b = 0; b < width; b++) {
            const long long y = row + r, x = column + b / (int)map->size;
            const bool inside = y >= 0 && y < (long long)map->rows && x >= 0 && x < (long long)map->columns;
            const u32 at = target + r * width + b;
            const u8* from = (const u8*)map->base + y * map->stride + column * map->size + b;
            *place(map->swizzled ? swizzle(at) : at) = inside ? *from : 0;
        }
    }
    came(barrier, map->box_rows * width);
}
static void load_box_to_both(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    for (u32 rank = 0; rank < 2; rank++) load_box(remote(target, rank), map, column, row, remote(barrier, rank));
}
static void load_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
    memcpy(place(target), source, bytes);
    came(barrier, bytes);
}
static void prefetch_map(const TensorMap*) {}
static bool elect_one() { return threadIdx.x % 32 == 0; }
static void let_next_kernel_start() {}
static void wait_for_previous_kernel() {}
template <int>
static void fewer_registers() {}
template <int>
static void more_registers() {}
template <class T, int COUNT>
static void fence_registers(T (&)[COUNT]) {}
static void store_matrices_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    // Lane l points at row l % 8 of matrix l / 8; it holds elements (l % 4 * 2, +1) of column l / 4 of each, transposed.
    const u32 words[4] = {a, b, c, d};
    for (int m = 0; m < 4; m++) {
        u32 all[32], rows[32];
        for (int lane = 0; lane < 32; lane++) all[lane] = __shfl_sync(~0u, words[m], lane), rows[lane] = __shfl_sync(~0u, at, lane);
        if (threadIdx.x % 32 == 0)
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 2; i++) {
                    const u16 value = (u16)(all[lane] >> 16 * i);
                    memcpy(place(rows[8 * m + lane % 4 * 2 + i] + lane / 4 * 2), &value, 2);
                }
        __syncwarp();
    }
}

// ------------------------------------------------------------------ products

static u64 matrix_descriptor(u32 address) { return address >> 4; }
struct Product { float* d; int count; const u32* a; u32 b; bool adds; };
struct Products { std::vector<std::vector<Product>> groups; std::vector<Product> open; };
static std::map<int, Products> products;  // of each fiber
static std::map<int, Barrier> warpgroups;

static void meet() {
    auto& barrier = warpgroups[current / 128 + 1000 * fibers[current].rank];
    barrier.size = 128;
    sync(barrier);
}
template <int COUNT>
static void multiply(float (&d)[COUNT], const u32 (&a)[4], u64 b, int adds) {
    products[current].open.push_back({d, COUNT, a, (u32)(b << 4), adds != 0});
    if (!adds) for (float& x : d) x = NAN;  // not to be read yet
}
static void wgmma_fence() {}
static void wgmma_commit() {
    auto& own = products[current];
    own.groups.push_back(own.open), own.open.clear();
}
static void run_product(int position) {
    const Product own = products[current].groups[0][position];
    const int lane = threadIdx.x % 32, c = lane % 4;
    static float table[256];
    if (table[1] == 0) for (int i = 0; i < 256; i++) table[i] = from_e4m3(i);
    for (int half = 0; half < 2; half++) {
        float row[32];
        for (int from = 0; from < 4; from++) {
            const u32* a = products[current - c + from].groups[0][position].a;
            for (int i = 0; i < 4; i++) {
                row[4 * from + i] = table[a[half] >> 8 * i & 0xFF];
                row[16 + 4 * from + i] = table[a[2 + half] >> 8 * i & 0xFF];
            }
        }
        for (int j = 0; j < own.count / 4; j++) {
            for (int i = 0; i < 2; i++) {
                const u32 token = 8 * j + 2 * c + i;
                float sum = 0;
                for (u32 k = 0; k < 32; k++) sum += row[k] * table[*place(swizzle(own.b + token * 128 + k))];
                float& d = own.d[4 * j + 2 * half + i];
                d = own.adds ? d + sum : sum;
            }
        }
    }
}
template <int PENDING>
static void wgmma_wait() {
    while (products[current].groups.size() > PENDING) {
        meet();
        for (int i = 0; i < (int)products[current].groups[0].size(); i++) run_product(i);
        meet();  // whoever has seen this may change its operands
        auto& groups = products[current].groups;
        groups.erase(groups.begin());
    }
}
