// mHC for few tokens in one launch: post-mix, products with `fn`, coefficients and the normed mix-in.
//
// A cluster takes TOKENS tokens, each block DIM / CLUSTER columns of their streams. The blocks send each other their
// shares of the products and sums of squares; then every block norms its columns, and one a token runs Sinkhorn. Sums are
// added in a fixed order that does not depend on TOKENS, so a token's result does not depend on its batch.
//
// Macros: DIM, CLUSTER, TOKENS.
#include "../deep_select/cluster.cuh"
#include "sinkhorn.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define SUMS (MIXES + 2)       // products, three a warp, then the squares of the streams, and of the mix-in
#define OWN (DIM / CLUSTER)    // columns of a block
#define QUADS (OWN / 4)
#define STEPS ((HC * QUADS + 31) / 32)  // of a warp over all columns of a block
#define AHEAD (STEPS < 5 ? STEPS : 5)   // steps whose weights are on their way before the streams are

struct MixParams {
    const u16* h;  // [rows, HC, DIM]
    const u16* y;  // [rows, DIM], or null: h is mixed in as it is
    const float* post;
    const float* comb;
    const float* p_prev;
    const float* fn;  // [MIXES, HC * DIM]
    const float* scale;
    const float* base;
    const u16* norm_weight;
    u16* after;  // the post-mixed streams
    u16* x;
    float* new_pre;
    float* new_post;
    float* new_comb;
    int rows;
    int iterations;
    float hc_eps;
    float rms_eps;
};

DEVICE void widen(uint2 packed, float (&value)[4]) {
    value[0] = __uint_as_float(packed.x << 16), value[1] = __uint_as_float(packed.x & 0xFFFF0000u);
    value[2] = __uint_as_float(packed.y << 16), value[3] = __uint_as_float(packed.y & 0xFFFF0000u);
}

DEVICE uint2 narrow(const float (&value)[4]) {
    uint2 packed = {pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3])};
    return packed;
}

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

// Weights of this lane's quad of columns in `step`, for mix 3 warp + i.
DEVICE uint4 load_weights(const MixParams& p, u32 rank, int step, int i) {
    int quad = step * 32 + threadIdx.x % 32, mix = threadIdx.x / 32 * 3 + i;
    uint4 none = {0, 0, 0, 0};
    if (quad >= HC * QUADS) return none;
    return *reinterpret_cast<const uint4*>(p.fn + (mix * HC + quad / QUADS) * DIM + rank * OWN + quad % QUADS * 4);
}

// Coefficients of a token out of the sums of all blocks, by a warp.
DEVICE void coefficients_of(const MixParams& p, const float* sums, int token, long long row) {
    float product = 0, squares = 0;
    for (int other = 0; other < CLUSTER; other++) {
        const float* part = sums + (other * TOKENS + token) * SUMS;
        product += part[min(threadIdx.x % 32, MIXES - 1)];
        squares += part[MIXES];
    }
    Coefficients to = {p.scale, p.base, p.new_pre + row * HC, p.new_post + row * HC, p.new_comb + row * HC * HC};
    coefficients(to, product * rsqrtf(squares / (HC * DIM) + p.rms_eps), p.iterations, p.hc_eps);
}

KERNEL(THREADS, 1) CLUSTER_DIMS mix(const MixParams p) {
    SHARED_MEMORY(memory);
    uint2* streams = reinterpret_cast<uint2*>(memory);          // [TOKENS, HC, QUADS]
    uint2* mixed = streams + TOKENS * HC * QUADS;               // [TOKENS, QUADS]
    float* own = reinterpret_cast<float*>(mixed + TOKENS * QUADS);  // [TOKENS, SUMS]
    float* sums = own + TOKENS * SUMS;                          // [CLUSTER, TOKENS, SUMS]
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 rank = blockIdx.x % CLUSTER;
    int first_row = blockIdx.y * TOKENS;
    cluster_arrive();
    follow_launch_before();
    uint4 ahead[AHEAD][3];
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
#pragma unroll
        for (int i = 0; i < 3; i++) ahead[step][i] = load_weights(p, rank, step, i);
    }

    for (int q = thread; q < TOKENS * QUADS; q += THREADS) {
        int token = q / QUADS, quad = q % QUADS, row = first_row + token;
        uint2 nothing = {0, 0};
        if (row >= p.rows) {
#pragma unroll
            for (int j = 0; j < HC; j++) streams[(token * HC + j) * QUADS + quad] = nothing;
            mixed[q] = nothing;
            continue;
        }
        long long at = static_cast<long long>(row) * HC * DIM + rank * OWN + quad * 4;
        float h[HC][4], y[4], total[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < HC; j++) widen(*reinterpret_cast<const uint2*>(p.h + at + j * DIM), h[j]);
        if (p.y != nullptr) {
            widen(*reinterpret_cast<const uint2*>(p.y + static_cast<long long>(row) * DIM + rank * OWN + quad * 4), y);
        }
#pragma unroll
        for (int j = 0; j < HC; j++) {
            float value[4];
#pragma unroll
            for (int e = 0; e < 4; e++) value[e] = h[j][e];
            if (p.y != nullptr) {
                float post = p.post[row * HC + j];
#pragma unroll
                for (int e = 0; e < 4; e++) value[e] = post * y[e];
#pragma unroll
                for (int i = 0; i < HC; i++) {
                    float share = p.comb[(row * HC + i) * HC + j];
#pragma unroll
                    for (int e = 0; e < 4; e++) value[e] += share * h[i][e];
                }
            }
            uint2 packed = narrow(value);
            if (p.y != nullptr) *reinterpret_cast<uint2*>(p.after + at + j * DIM) = packed;
            streams[(token * HC + j) * QUADS + quad] = packed;
            widen(packed, value);
            float weight = p.p_prev[row * HC + j];
#pragma unroll
            for (int e = 0; e < 4; e++) total[e] += weight * value[e];
        }
        mixed[q] = narrow(total);
    }
    __syncthreads();

    float products[3][TOKENS], squares[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) products[0][t] = products[1][t] = products[2][t] = squares[t] = 0;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        int quad = step * 32 + lane;
        float weights[3][4];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            uint4 bits = step < AHEAD ? ahead[step < AHEAD ? step : 0][i] : load_weights(p, rank, step, i);
            weights[i][0] = __uint_as_float(bits.x), weights[i][1] = __uint_as_float(bits.y);
            weights[i][2] = __uint_as_float(bits.z), weights[i][3] = __uint_as_float(bits.w);
        }
        if (quad >= HC * QUADS) continue;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float value[4];
            widen(streams[t * HC * QUADS + quad], value);
#pragma unroll
            for (int e = 0; e < 4; e++) {
#pragma unroll
                for (int i = 0; i < 3; i++) products[i][t] += value[e] * weights[i][e];
                squares[t] += value[e] * value[e];
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            float sum = warp_sum(products[i][t]);
            if (lane == 0) own[t * SUMS + warp * 3 + i] = sum;
        }
        if (warp == 0) {
            float sum = warp_sum(squares[t]);
            if (lane == 0) own[t * SUMS + MIXES] = sum;
        } else if (warp == 1) {
            float sum = 0;
            for (int quad = lane; quad < QUADS; quad += 32) {
                float value[4];
                widen(mixed[t * QUADS + quad], value);
#pragma unroll
                for (int e = 0; e < 4; e++) sum += value[e] * value[e];
            }
            sum = warp_sum(sum);
            if (lane == 0) own[t * SUMS + MIXES + 1] = sum;
        }
    }
    cluster_wait();
    __syncthreads();
    if (thread < TOKENS * SUMS) {
        u32 target = shared_address(sums + rank * TOKENS * SUMS + thread);
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) {
            store_remote(remote(target, other), __float_as_uint(own[thread]));
        }
    }
    cluster_sync();

    int token = rank;  // the one whose coefficients this block finds
    if (warp == WARPS - 1 && token < TOKENS && first_row + token < p.rows) {
        coefficients_of(p, sums, token, first_row + token);
    }
    for (int q = thread; q < TOKENS * QUADS; q += THREADS) {
        int token = q / QUADS, quad = q % QUADS, row = first_row + token;
        if (row >= p.rows) continue;
        float total = 0, value[4], weight[4];
        for (int other = 0; other < CLUSTER; other++) total += sums[(other * TOKENS + token) * SUMS + MIXES + 1];
        float factor = rsqrtf(total / DIM + p.rms_eps);
        widen(mixed[q], value);
        widen(*reinterpret_cast<const uint2*>(p.norm_weight + rank * OWN + quad * 4), weight);
#pragma unroll
        for (int e = 0; e < 4; e++) value[e] = weight[e] * (value[e] * factor);
        *reinterpret_cast<uint2*>(p.x + static_cast<long long>(row) * DIM + rank * OWN + quad * 4) = narrow(value);
    }
}
