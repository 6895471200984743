// Gate of a mixture of experts: sqrt-softplus scores, the k experts with the largest score plus bias, and their gates.
//
// A warp takes a row. The k-th largest of its lanes' maxima is a lower bound that hardly more than k experts reach; those
// go to a lane each, which counts how many are ahead of its own. Of equal experts the first are chosen.
//
// Macros: EXPERTS, and CLUSTER = 1 for cluster.cuh.
#include "cluster.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define OWN ((EXPERTS + 31) / 32)  // experts of a lane: lane, lane + 32, ...
#define ALL 0xFFFFFFFFu

struct GateParams {
    const float* logits;  // [rows, EXPERTS]
    const float* bias;    // [EXPERTS] or [rows, EXPERTS]
    int* chosen;          // [rows, k]
    float* gates;
    int rows;
    int k;
    int bias_stride;
    int blocks;
    int normalise;
    float scaling;
};

// sqrt(log(1 + exp(x))). log1p(e) = 2 atanh(e / (2 + e)), here with e <= 1: the series is exact to float32.
DEVICE float score_of(float x) {
    float e = fast_exp(-fabsf(x));
    float s = e * fast_reciprocal(2.0f + e);
    float q = s * s;
    float series = 1 + q * (1 / 3.0f + q * (1 / 5.0f + q * (1 / 7.0f + q * (1 / 9.0f + q * (1 / 11.0f + q * (1 / 13.0f))))));
    float soft = x > 20.0f ? x : fmaxf(x, 0.0f) + 2 * s * series;
    return fast_sqrt(soft);
}

// Ordered as the floats are, above 0; NaN is above all.
DEVICE u32 key_of(float x) {
    u32 bits = plain_float(__float_as_uint(x));
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

KERNEL(THREADS, 4) gate(const GateParams p) {
    SHARED_MEMORY(memory);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint2* list = reinterpret_cast<uint2*>(memory) + 32 * warp;  // (key, expert) of those that reach the bound
    float bias[OWN];
    u32 key[OWN];
    follow_launch_before();
    if (p.bias_stride == 0) {
#pragma unroll
        for (int i = 0; i < OWN; i++) bias[i] = lane + 32 * i < EXPERTS ? p.bias[lane + 32 * i] : 0;
    }
    for (int row = blockIdx.x * WARPS + warp; row < p.rows; row += p.blocks * WARPS) {
        const float* logits = p.logits + static_cast<long long>(row) * EXPERTS;
        if (p.bias_stride != 0) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                int expert = lane + 32 * i;
                bias[i] = expert < EXPERTS ? p.bias[static_cast<long long>(row) * p.bias_stride + expert] : 0;
            }
        }
        float x[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) x[i] = lane + 32 * i < EXPERTS ? logits[lane + 32 * i] : 0;
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            key[i] = lane + 32 * i < EXPERTS ? key_of(score_of(x[i]) + bias[i]) : 0;
            largest = max(largest, key[i]);
        }
        u32 bound = 0;
        for (int i = 0; i < p.k; i++) {
            bound = __reduce_max_sync(ALL, largest);
            if (lane == __ffs(__ballot_sync(ALL, largest == bound)) - 1) largest = 0;
        }
        bound = max(bound, 1u);
        int count = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32 reach = __ballot_sync(ALL, key[i] >= bound);
            if (reach != 0) {
                int place = count + __popc(reach & (1u << lane) - 1);
                if (key[i] >= bound && place < 32) list[place] = {key[i], static_cast<u32>(lane + 32 * i)};
                count += __popc(reach);
            }
        }
        __syncwarp();
        int rank = lane, expert = 0;
        if (count <= 32) {
            uint2 own = lane < count ? list[lane] : uint2{0, 0};
            expert = own.y;
            rank = 0;
            for (int i = 0; i < count; i++) rank += list[i].x + (i < lane) > own.x;  // keys are below the largest number
        } else {  // many equal ones: the best, k times
            for (int i = 0; i < p.k; i++) {
                u32 best = 0, at = ALL;
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    if (key[j] > best) best = key[j], at = lane + 32 * j;
                }
                u32 most = __reduce_max_sync(ALL, best);
                u32 first = __reduce_min_sync(ALL, best == most ? at : ALL);
                if (lane == i) expert = first;
#pragma unroll
                for (int j = 0; j < OWN; j++) key[j] = lane + 32 * j == first ? 0 : key[j];
            }
        }
        bool chosen = rank < p.k;
        float gate = chosen ? score_of(logits[expert]) : 0;
        if (p.normalise) {
            float sum = gate;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
            gate = gate / (sum + 1e-20f);
        }
        if (chosen) {
            p.chosen[row * p.k + rank] = expert;
            p.gates[row * p.k + rank] = gate * p.scaling;
        }
        __syncwarp();
    }
}
