// How the attention kernel hands shared memory from one group of threads to another, and nothing else: for racecheck, which
// reports some of it as races (test_sanitizers.py).
#include "../../deepinfer/kernels/deep_gemm/tma.cuh"

// Two groups that take turns: store, arrive; wait, load. NAMED 0: at mbarriers, an arrival a thread, as the kernel does it;
// 1: at named barriers, as in the PTX manual's example of barrier.arrive.
extern "C" __global__ void take_turns(float2* out, int rounds) {
    __shared__ float2 forth[128], back[128];
    __shared__ u64 memory[2];
    const int thread = threadIdx.x % 128;
    const u32 first = shared_address(memory), second = first + 8;
    if (threadIdx.x == 0) barrier_init(first, 128), barrier_init(second, 128), barrier_fence_init();
    __syncthreads();
    float2 mine = make_float2(thread, 1.0f);
    for (int round = 0; round < rounds; round++) {
        if (threadIdx.x < 128) {
            forth[thread] = mine;
#if NAMED
            named_arrive(1, 256), named_sync(2, 256);
#else
            barrier_arrive(first), barrier_wait(second, round & 1);
#endif
            mine.x += back[thread].y;
        } else {
#if NAMED
            named_sync(1, 256);
#else
            barrier_wait(first, round & 1);
#endif
            mine.y += forth[thread].x;
            back[thread] = mine;
#if NAMED
            named_arrive(2, 256);
#else
            barrier_arrive(second);
#endif
        }
    }
    out[threadIdx.x] = mine;
}

// The block waits for what comes into its memory, then the cluster meets, then a peer stores to the same place. COPIES 0: it
// comes by ordinary stores; 1: by the copy engine, as attention's query does; 2: by copies of each thread, as its BF16 keys do.
extern "C" __global__ void __cluster_dims__(2, 1, 1) copies_then_peers(const uint4* source, uint4* out, int rounds) {
    __shared__ __align__(128) uint4 place[128];
    __shared__ u64 memory;
    const u32 barrier = shared_address(&memory), here = shared_address(place + threadIdx.x), rank = cluster_rank();
    if (threadIdx.x == 0) barrier_init(barrier, COPIES == 1 ? 1 : 128), barrier_fence_init();
    cluster_sync();
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(1 - rank));
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int round = 0; round < rounds; round++) {
#if COPIES == 2
        copy_16(here, source + threadIdx.x, true, keep_policy());
        barrier_arrive_on_copies(barrier);
#elif COPIES == 1
        __syncthreads();  // all have read what is replaced
        if (threadIdx.x == 0) {
            fence_to_copies();
            barrier_expect(barrier, sizeof place);
            load_bytes(shared_address(place), source, sizeof place, barrier);
        }
#else
        place[threadIdx.x] = source[threadIdx.x];
        barrier_arrive(barrier);
#endif
        barrier_wait(barrier, round & 1);
        sum.x += place[threadIdx.x].x;
        cluster_sync();
        asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(there), "r"(sum.x), "r"(rank) : "memory");
        cluster_sync();
        sum.y += place[threadIdx.x].y;
    }
    out[blockIdx.x * 128 + threadIdx.x] = sum;
}
