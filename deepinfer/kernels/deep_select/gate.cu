// Gate of a mixture of experts: sqrt-softplus scores, the k experts with the largest score plus bias, and their gates.
//
// A warp takes a row. Three special functions an expert give its score to within `margin`. The k-th largest of the lanes'
// maxima is then a lower bound that hardly more than k experts reach; those go to a lane each, which finds the exact score
// and counts how many are ahead of its own. Rows with infinities, NaN or many equal experts take the exact score of all.
// Of equal experts the first are chosen.
//
// Macros: EXPERTS, K, and CLUSTER = 1 for cluster.cuh.
#include "cluster.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define OWN ((EXPERTS + 31) / 32)  // experts of a lane: lane, lane + 32, ...
#define ALL 0xFFFFFFFFu

struct GateParams {
    const float* logits;  // [rows, EXPERTS]
    const float* bias;    // [EXPERTS] or [rows, EXPERTS]
    int* chosen;          // [rows, K]
    float* gates;
    int rows;
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

// score_of within 1e-3, infinite above 88: the logarithm loses what 1 + e rounds away.
DEVICE float near_score(float x) { return 0.8325546112f * fast_sqrt(fabsf(fast_log2(1.0f + fast_exp(x)))); }

struct Choice {
    int rank;  // of the lane's expert; K and more are not chosen
    int expert;
    float score;
};

// The best, k times.
DEVICE Choice choose_among_all(const float* logits, const float* bias) {
    int lane = threadIdx.x % 32;
    u32 key[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = lane + 32 * i;
        key[i] = expert < EXPERTS ? key_of(score_of(logits[expert]) + bias[expert]) : 0;
    }
    Choice own = {lane, 0, 0};
    for (int i = 0; i < K; i++) {
        u32 best = 0, at = ALL;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            if (key[j] > best) best = key[j], at = lane + 32 * j;
        }
        u32 most = __reduce_max_sync(ALL, best);
        u32 first = __reduce_min_sync(ALL, best == most ? at : ALL);
        if (lane == i) own.expert = first;
#pragma unroll
        for (int j = 0; j < OWN; j++) key[j] = lane + 32 * j == first ? 0 : key[j];
    }
    own.score = score_of(logits[own.expert]);
    return own;
}

KERNEL(THREADS, 4) gate(const GateParams p) {
    SHARED_MEMORY(memory);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32* list = reinterpret_cast<u32*>(memory) + 32 * warp;  // experts that reach the bound
    float bias[OWN], x[OWN], near[OWN];
    int row = blockIdx.x * WARPS + warp;
    follow_launch_before();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        bool inside = lane + 32 * i < EXPERTS;
        x[i] = inside && row < p.rows ? p.logits[static_cast<long long>(row) * EXPERTS + lane + 32 * i] : 0;
        bias[i] = inside && p.bias_stride == 0 ? p.bias[lane + 32 * i] : 0;
    }
    for (; row < p.rows; row += p.blocks * WARPS) {
        const float* logits = p.logits + static_cast<long long>(row) * EXPERTS;
        const float* row_bias = p.bias + static_cast<long long>(row) * p.bias_stride;
        if (p.bias_stride != 0) {
#pragma unroll
            for (int i = 0; i < OWN; i++) bias[i] = lane + 32 * i < EXPERTS ? row_bias[lane + 32 * i] : 0;
        }
        float largest = __uint_as_float(0xFF800000u);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            near[i] = lane + 32 * i < EXPERTS ? near_score(x[i]) + bias[i] : __uint_as_float(0xFF800000u);
            largest = larger_or_nan(largest, near[i]);
        }
        if (row + p.blocks * WARPS < p.rows) {  // the next row is on its way meanwhile
            const float* next = logits + static_cast<long long>(p.blocks) * WARPS * EXPERTS;
#pragma unroll
            for (int i = 0; i < OWN; i++) x[i] = lane + 32 * i < EXPERTS ? next[lane + 32 * i] : 0;
        }
        u32 bits = __float_as_uint(largest);
        u32 key = bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
        u32 most = __reduce_max_sync(ALL, key), bound = most;
#pragma unroll
        for (int i = 1; i < K; i++) {
            if (key == bound) key = 0;
            bound = __reduce_max_sync(ALL, key);
        }
        int count = 33;
        if (most < 0xFF800000u && bound > 0x007FFFFFu) {  // all finite
            float least = __uint_as_float(bound >> 31 ? bound & 0x7FFFFFFFu : ~bound);
            least -= 4e-3f + fabsf(least) * 1e-6f;
            u32 reach = 0;
#pragma unroll
            for (int i = 0; i < OWN; i++) reach |= near[i] >= least ? 1u << i : 0;
            count = 0;
            for (u32 lanes = __ballot_sync(ALL, reach != 0); lanes != 0; lanes = __ballot_sync(ALL, reach != 0)) {
                int place = count + __popc(lanes & (1u << lane) - 1);
                if (reach != 0 && place < 32) list[place] = lane + 32 * (__ffs(reach) - 1);
                reach &= reach - 1;
                count += __popc(lanes);
            }
            __syncwarp();
        }
        Choice own;
        if (count <= 32) {
            own.expert = lane < count ? list[lane] : 0;
            own.score = score_of(logits[own.expert]);
            u32 exact = lane < count ? key_of(own.score + row_bias[own.expert]) : 0;
            own.rank = 32;
            u32 left = exact;
#pragma unroll
            for (int i = 0; i < K; i++) {
                u32 best = __reduce_max_sync(ALL, left);
                if (left == best) own.rank = i, left = 0;
            }
            if (__popc(__ballot_sync(ALL, own.rank < K)) != K) {  // equal ones
                own.rank = exact != 0 ? 0 : 32;
                for (int i = 0; i < count; i++) {
                    u32 other = __shfl_sync(ALL, exact, i), expert = __shfl_sync(ALL, static_cast<u32>(own.expert), i);
                    own.rank += other > exact || (other == exact && expert < static_cast<u32>(own.expert));
                }
            }
        } else {
            own = choose_among_all(logits, row_bias);
        }
        bool chosen = own.rank < K;
        float gate = chosen ? own.score : 0;
        if (p.normalise) {
            float sum = gate;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
            gate = gate / (sum + 1e-20f);
        }
        if (chosen) {
            p.chosen[row * K + own.rank] = own.expert;
            p.gates[row * K + own.rank] = gate * p.scaling;
        }
        __syncwarp();
    }
}
