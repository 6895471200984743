// Sorts the (token, slot) pairs of a mixture of experts by expert, in one block: rows of each expert, and for each row its
// token, pair and gate. The order within an expert varies; results of the products do not depend on it.

#include "../deep_jit/hopper.cuh"
#include "tma.cuh"

#define THREADS 1024
#define MAX_EXPERTS 1024

extern "C" __global__ void __launch_bounds__(THREADS)
    moe_route(const int* chosen, const float* gates, int* begins, int* counts, int* tokens, int* pairs, float* sorted_gates,
              int num_pairs, int slots, int experts) {
    __shared__ int count[MAX_EXPERTS], next[MAX_EXPERTS], warp_sums[32];
    let_next_kernel_start();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    count[thread] = 0;
    __syncthreads();
    for (int i = thread; i < num_pairs; i += THREADS) atomicAdd(count + chosen[i], 1);
    __syncthreads();
    const int own = count[thread];
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int got = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += got;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = sum - own;
    for (int w = 0; w < warp; w++) before += warp_sums[w];
    next[thread] = before;
    if (thread < experts) begins[thread] = before, counts[thread] = own;
    __syncthreads();
    for (int i = thread; i < num_pairs; i += THREADS) {
        const int row = atomicAdd(next + chosen[i], 1);
        tokens[row] = i / slots, pairs[row] = i, sorted_gates[row] = gates[i];
    }
}
