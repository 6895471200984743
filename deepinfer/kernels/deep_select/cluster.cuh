// The parts of Hopper that selection, gate and mHC use: clusters, their shared memory, pairs of 16-bit numbers.
#pragma once

#include "../deep_jit/hopper.cuh"

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif
#define SHARED_MEMORY(name) extern __shared__ __align__(16) u8 name[]

// The two halves of cluster_sync: another block's shared memory may be written once it has arrived for the first time.
DEVICE void cluster_arrive() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

DEVICE void cluster_wait() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

DEVICE void cluster_sync() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// The same place in the shared memory of another block of the cluster.
DEVICE u32 remote(u32 address, u32 rank) {
#if CLUSTER > 1
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
#else
    return address;
#endif
}

DEVICE uint4 load_remote4(u32 address) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(address) : "memory");
    return value;
}

DEVICE u32 load_remote(u32 address) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

DEVICE void store_remote(u32 address, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

DEVICE void store_remote2(u32 address, u32 first, u32 second) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" :: "r"(address), "r"(first), "r"(second) : "memory");
}

DEVICE void add_remote(u32 address, u32 value) {
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

// For launches that start early: the next one may start when all blocks are here, and this one goes on when the launch
// before has ended.
DEVICE void follow_launch_before() {
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

// The compiler moves no load across: fewer are on their way at a time, and fewer registers are taken.
DEVICE void keep_order() { asm volatile("" ::: "memory"); }

// Where the hardware keeps the first warp of this block, in warps of 8: differs among the blocks of a multiprocessor.
DEVICE u32 hardware_place() {
    u32 warp;
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
    return warp / 8;
}

// Every NaN becomes 0x7FFFFFFF, both zeros +0; bits of a float32 number.
DEVICE u32 plain_float(u32 bits) {
    float result;
    asm("add.rn.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(__uint_as_float(bits)));
    return __float_as_uint(result);
}

// The larger of pairs of BF16 numbers; NaN only if both are.
DEVICE u32 larger_bf16(u32 a, u32 b) {
    u32 result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// 0xFFFF in each half whose BF16 number is at least that of `bound`, else 0.
DEVICE u32 reaches_bf16(u32 pair, u32 bound) {
    u32 result;
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(bound));
    return result;
}

// Upper halves of two words.
DEVICE u32 upper_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x7632); }

// Within two units in the last place; numbers below 1e-38 are 0.
DEVICE float fast_exp(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}

// Within 2^-22, absolute between 1/2 and 2, else relative.
DEVICE float fast_log2(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// NaN if one of them is.
DEVICE float larger_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

DEVICE float fast_reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

DEVICE float fast_sqrt(float x) {
    float result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Values of four E4M3 codes.
DEVICE void widen_e4m3(u32 codes, float* value) {
    asm("{\n.reg .b16 low, high, a, b, c, d;\n.reg .b32 first, second;\n"
        "mov.b32 {low, high}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 first, low;\ncvt.rn.f16x2.e4m3x2 second, high;\n"
        "mov.b32 {a, b}, first;\nmov.b32 {c, d}, second;\n"
        "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
        : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3]) : "r"(codes));
}

// 8 BF16 numbers.
DEVICE uint4 load_vector(const u16* at) { return *reinterpret_cast<const uint4*>(at); }
DEVICE void store_vector(u16* at, uint4 v) { *reinterpret_cast<uint4*>(at) = v; }

// c [16, 8] += a [16, 16] b [16, 8] by a warp: rows lane / 4 and + 8; of a and b columns 2 (lane % 4), + 1, and + 8, + 9.
DEVICE void multiply_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Counts that blocks tell each other of what they have written.
DEVICE void add_released(u32* at) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(at) : "memory"); }

DEVICE u32 load_acquired(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// Of what another block has written: not from this multiprocessor's cache.
DEVICE float load_shared_by_all(const float* at) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}

DEVICE uint4 load_shared_by_all(const u16* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
