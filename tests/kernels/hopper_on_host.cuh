// What the producer of kernels/flash_mla needs of deep_jit/hopper.cuh, on a CPU: each of its 128 threads is one, and a wait for the
// consumers is a wait for each other.
#pragma once

#include <algorithm>
#include <atomic>
#include <pthread.h>
#include <cmath>
#include <cstdint>
#include <cstring>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define __align__(bytes) alignas(bytes)
#define DESCRIPTOR_UPPER 0ull

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct { int x; } static thread_local threadIdx;
using std::max;
using std::min;

template <class T>
static T __ldg(const T* address) { T value; memcpy(&value, address, sizeof value); return value; }
static float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 bytes = a | (u64)b << 32;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return result;
}
template <class T>
static T __shfl_xor_sync(u32, T value, int) { return value; }
static bool __any_sync(u32, bool any) { return any; }
static void __syncwarp() {}
static float rsqrtf(float x) { return 1 / std::sqrt(x); }

static u8 shared_memory[240 * 1024];
static u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - shared_memory); }
static std::atomic<int> arrivals[16];  // at barriers 8 bytes apart, from `first_barrier` on
static u32 first_barrier;
static void barrier_arrive(u32 barrier) { arrivals[(barrier - first_barrier) / 8]++; }
static void barrier_arrive_on_copies(u32 barrier) { barrier_arrive(barrier); }
static pthread_barrier_t together;
static void barrier_wait(u32, u32) { pthread_barrier_wait(&together); }
static void barrier_init(u32, u32) {}
static void barrier_expect(u32, u32) {}
static u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
static void named_sync(int, int) {}
static void named_arrive(int, int) {}
static void wait_for_copies() {}
static bool named_any(int, int, bool any) { return any; }
static void fence_to_copies() {}
static u64 keep_policy() { return 0; }
static u64 read_once_policy() { return 0; }
static void copy_16(u32 target, const void* source, bool valid, u64) {
    if (valid) memcpy(shared_memory + target, source, 16);
    else memset(shared_memory + target, 0, 16);
}
static const u8 *readable[2][2];  // first and one past the last byte of each cache
static std::atomic<bool> prefetched_outside;
static void prefetch_to_l2(const void* address) {
    const u8* at = (const u8*)address;
    bool inside = false;
    for (auto& range : readable) inside |= range[0] <= at && at < range[1];
    if (!inside) prefetched_outside = true;
}
static void store_shared(u32 target, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(shared_memory + target, words, 16);
}
static void store_global_once(void*, u32, u32, u32, u32) {}
static float exp2_fast(float x) { return std::exp2(x); }
static float low_bf16(u32 word) { return __uint_as_float(word << 16); }
static float high_bf16(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }
static u32 round_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
static u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b)); }
static u16 pack_e4m3(float, float) { return 0; }
static u32 tile_word(u32, u32) { return 0; }
static u32 hidden(u32 word) { return word; }
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int PENDING>
static void wgmma_wait() {}
template <class T, int COUNT>
static void fence_registers(T (&)[COUNT]) {}
