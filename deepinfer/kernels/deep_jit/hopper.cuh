// Hopper instructions in plain PTX, for all CUDA C++ kernels: barriers, memory, numbers, what a warpgroup's product needs.
// No headers needed.
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
// Arrives where `arrives`, without a branch.
DEVICE void barrier_arrive_if(bool arrives, u32 barrier) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
                 "r"((u32)arrives)
                 : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @done bra.uni over;\n bra.uni again;\nover:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
// Arrives once all cp.async that this thread has issued are in shared memory.
DEVICE void barrier_arrive_on_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ------------------------------------------------------------------ named barriers between warpgroups

DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Whether any thread's flag is set; a barrier of all `threads` as well.
DEVICE bool named_any(int id, int threads, bool flag) {
    u32 any;
    asm volatile(
        "{\n .reg .pred one, all;\n setp.ne.u32 one, %3, 0;\n"
        " barrier.cta.red.or.aligned.pred all, %1, %2, one;\n selp.u32 %0, 1, 0, all;\n}"
        : "=r"(any) : "r"(id), "r"(threads), "r"((u32)flag) : "memory");
    return any;
}

// What this thread stored in shared memory becomes visible to the copy engine and the tensor cores.
DEVICE void fence_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ------------------------------------------------------------------ memory

// How long L2 should keep what is read: a policy for `copy_16` and bulk copies.
DEVICE u64 keep_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 read_once_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// 16 bytes to shared memory; zeros when not `valid` (the source is not read).
DEVICE void copy_16(u32 target, const void* source, bool valid, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
DEVICE void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
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
DEVICE u32 load_word(u32 at) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
DEVICE u32 load_byte(u32 at) {
    u32 x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
DEVICE void store_byte(u32 at, u32 x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE void store_float(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEVICE void store_global(void* target, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_shared(u32 target, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Written once, not read here: L2 may drop it first.
DEVICE void store_global_once(void* target, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ------------------------------------------------------------------ bulk copies

// `bytes` of contiguous memory, both ends multiples of 16.
DEVICE void load_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
// The same from shared memory. Stores since the last commit are one group.
DEVICE void store_bytes(void* target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
                 : "memory");
}
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when at most PENDING of this thread's groups still read shared memory.
template <int PENDING>
DEVICE void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit values, two of a row in each lane's word; lane l points at row l % 8 of matrix l / 8.
DEVICE uint4 load_matrices(u32 at) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

// ------------------------------------------------------------------ numbers

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 word;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(selector));
    return word;
}
// a | b & MASK, in one instruction that the compiler does not take apart.
template <u32 MASK>
DEVICE u32 or_masked(u32 a, u32 b) {
    u32 word;
    asm("lop3.b32 %0, %1, %2, %3, 0xF8;" : "=r"(word) : "r"(a), "r"(b), "n"(MASK));
    return word;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE u32 multiply_bf16(u32 a, u32 b) {  // two products; subnormal numbers are kept
    u32 word;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
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

// A matrix in tiles of 64 columns: [8 rows of 128 bytes, swizzled] every 1024 bytes. Upper word of its descriptor; the
// lower one is `tile_word(address, stride)`, to which offsets in 16 bytes may be added.
#define DESCRIPTOR_UPPER ((u64)(1024 >> 4) << 32 | 1ull << 62)

// `stride` is the distance of two tiles along the columns; only an operand whose columns are not the summed dimension
// uses it. The word is hidden from the compiler, which would keep the descriptors of a whole loop in registers.
DEVICE u32 tile_word(u32 address, u32 stride) { return (address & 0x3FFFF) >> 4 | (stride >> 4) << 16; }
DEVICE u32 hidden(u32 word) {
    asm volatile("" : "+r"(word));
    return word;
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

// Registers of this warpgroup from here on.
template <int REGISTERS>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
