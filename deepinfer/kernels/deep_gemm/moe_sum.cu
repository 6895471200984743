// out [N, D] = the sum of a token's slots, in their order, plus what else the layer adds; FP32 sums, rounded once to BF16.

#include "../deep_jit/hopper.cuh"
#include "tma.cuh"

extern "C" __global__ void __launch_bounds__(128)
    moe_sum(const u8* parts, const u8* other, u8* out, int slots, int dim, long long other_stride) {
    wait_for_previous_kernel();
    const int token = blockIdx.y, column = (blockIdx.x * 128 + threadIdx.x) * 8;
    if (column >= dim) return;
    float sum[8] = {};
    auto add = [&](const u8* at) {
        const uint4 x = *(const uint4*)at;
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) sum[2 * i] += low_bf16(words[i]), sum[2 * i + 1] += high_bf16(words[i]);
    };
#pragma unroll 2
    for (int slot = 0; slot < slots; slot++) add(parts + (((long long)token * slots + slot) * dim + column) * 2);
    add(other + token * other_stride + column * 2);
    store_global(out + ((long long)token * dim + column) * 2, pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                 pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
}
