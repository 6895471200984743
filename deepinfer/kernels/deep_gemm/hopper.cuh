// Hopper instructions in plain PTX: barriers, named barriers, numbers, what a warpgroup's product needs. No headers needed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ------------------------------------------------------------------ mbarriers: wait(parity) returns when that phase ended

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and `bytes` of bulk copies to wait for beside it.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at the barrier at this address in block `rank` of the cluster.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @done bra.uni over;\n bra.uni again;\nover:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ------------------------------------------------------------------ memory

DEVICE float load_float(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
DEVICE float2 load_float2(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}
DEVICE uint4 load_words(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
DEVICE void store_float(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEVICE void store_global(void* target, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ------------------------------------------------------------------ numbers

DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 word;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(selector));
    return word;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE float low_bf16(u32 word) { return __uint_as_float(word << 16); }
DEVICE float high_bf16(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }
DEVICE float round_bf16(float x) { return low_bf16(pack_bf16(x, 0.0f)); }
DEVICE u16 pack_e4m3(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE float2 unpack_e4m3(u16 pair) {
    float2 x;
    asm("{\n.reg .b32 halves;\n.reg .b16 low, high;\n"
        "cvt.rn.f16x2.e4m3x2 halves, %2;\nmov.b32 {low, high}, halves;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "h"(pair));
    return x;
}
// UE8M0 of the smallest power of two p with amax <= 448 p; amax of at least 1e-4 counts.
DEVICE u32 scale_exponent(float amax) {
    u32 bits = __float_as_uint(fmaxf(amax, 1e-4f) * (1.0f / 448.0f));
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0);
}
DEVICE float power_of_two(int exponent) { return exponent <= 0 ? 0.0f : __uint_as_float(exponent << 23); }  // of UE8M0

// ------------------------------------------------------------------ wgmma (operands swizzled in 128 bytes)

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A matrix with the summed dimension contiguous: [8 rows of 128 bytes, swizzled] every 1024 bytes.
DEVICE u64 matrix_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// The compiler moves no computation of these registers across: a running product may be using them.
template <int REGISTERS>
DEVICE void fence_registers(u32 (&d)[REGISTERS]) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) asm volatile("" : "+r"(d[i])::"memory");
}
template <int REGISTERS>
DEVICE void fence_registers(float (&d)[REGISTERS]) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int REGISTERS>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
