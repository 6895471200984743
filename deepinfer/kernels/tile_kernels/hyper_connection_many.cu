// mHC for many tokens in one launch: post-mix, products with `fn` on the tensor cores, coefficients and the normed mix-in.
//
// A cluster takes TOKENS tokens, each block DIM / CLUSTER columns of their streams, so that `fn` is read once for TOKENS
// tokens and every other row once in all. A warp takes 32 tokens and 32 columns at a time: what its threads post-mix is
// what the tensor cores take as rows of 16 tokens, with the columns in another order, in which `fn` was arranged before.
// The mix-in waits in shared memory for its norm. Float32 weights are two BF16 terms (16 bits).
//
// Macros: DIM, CLUSTER, TOKENS (32 or 64), POST (0: the streams are taken as they are).
#include "mix.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define OWN (DIM / CLUSTER)         // columns of a block
#define HALVES (TOKENS / 32)
#define GROUPS (WARPS / HALVES)     // of warps with the same tokens
#define PITCH (OWN * 2 + 16)        // bytes of a token's mix-in: tokens start in different banks
#define SUMS (MIXES + 2)            // products, squares of the streams, and of the mix-in
#define FACTORS 28                  // of a token: post, comb, p_prev, and 4 that keep tokens in different banks
#define FRAGMENTS (HC * (DIM / 32) * 6 * 32)  // of fn, 16 bytes each

DEVICE float low_half(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

struct ArrangeParams {
    const float* fn;  // [MIXES, HC * DIM]
    uint4* arranged;  // [stream, 32 columns, 8 mixes, term, lane] of 8 BF16 numbers
};

// fn as the threads of `mix_many` take it.
KERNEL(THREADS, 4) arrange(const ArrangeParams p) {
    follow_launch_before();
    int at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= FRAGMENTS / 2) return;
    int lane = at % 32, mix = at / 32 % 3 * 8 + lane / 4, columns = at / 96;
    const float* source = p.fn + mix * (HC * DIM) + columns * 32 + lane % 4 * 8;
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float first = source[2 * i], second = source[2 * i + 1];
        high[i] = pack_bf16(first, second);
        low[i] = pack_bf16(first - low_half(high[i]), second - high_half(high[i]));
    }
    int target = (columns * 6 + at / 32 % 3 * 2) * 32 + lane;
    p.arranged[target] = {high[0], high[1], high[2], high[3]};
    p.arranged[target + 32] = {low[0], low[1], low[2], low[3]};
}

// Post-mix of two columns of a token: the streams, and their sum weighted by p_prev. Adds up squares of both.
DEVICE u32 mix_pair(const float (&factor)[FACTORS], const u32 (&h)[HC], u32 y, u32 (&after)[HC], float (&squares)[2]) {
    float total[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < HC; j++) {
#if POST
        float value[2] = {factor[j] * low_half(y), factor[j] * high_half(y)};
#pragma unroll
        for (int i = 0; i < HC; i++) {
            value[0] += factor[HC + i * HC + j] * low_half(h[i]);
            value[1] += factor[HC + i * HC + j] * high_half(h[i]);
        }
        after[j] = pack_bf16(value[0], value[1]);
#else
        after[j] = h[j];
#endif
        float rounded[2] = {low_half(after[j]), high_half(after[j])};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            total[e] += factor[HC + HC * HC + j] * rounded[e];
            squares[0] += rounded[e] * rounded[e];
        }
    }
    u32 mixed = pack_bf16(total[0], total[1]);
    squares[1] += low_half(mixed) * low_half(mixed) + high_half(mixed) * high_half(mixed);
    return mixed;
}

KERNEL(THREADS, 2) CLUSTER_DIMS mix_many(const MixParams p) {
    SHARED_MEMORY(memory);
    u8* mixed = memory;                                                    // [TOKENS] rows of PITCH bytes
    float* factors = reinterpret_cast<float*>(memory + TOKENS * PITCH);    // [TOKENS, FACTORS]
    float* own = factors + TOKENS * FACTORS;                               // [GROUPS / 2, TOKENS, SUMS]
    float* products = own + GROUPS / 2 * TOKENS * SUMS;                    // [CLUSTER, TOKENS / CLUSTER, MIXES + 1]
    float* norms = products + TOKENS * (MIXES + 1);                        // [CLUSTER, TOKENS]
    const uint4* arranged = reinterpret_cast<const uint4*>(p.fn);
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int half = warp % HALVES, group = warp / HALVES;
    u32 rank = blockIdx.x % CLUSTER;
    int first_row = blockIdx.y * TOKENS;
    cluster_arrive();
    follow_launch_before();
    for (int i = thread; i < TOKENS * FACTORS; i += THREADS) {
        int row = min(first_row + i / FACTORS, p.rows - 1), at = i % FACTORS;
        float value = 0;
        if (at >= HC + HC * HC && at < 2 * HC + HC * HC) value = p.p_prev[row * HC + at - HC - HC * HC];
#if POST
        if (at < HC) value = p.post[row * HC + at];
        else if (at < HC + HC * HC) value = p.comb[row * HC * HC + at - HC];
#endif
        factors[i] = value;
    }
    __syncthreads();

    float sums[2][3][4], squares[2][2][2];
#pragma unroll
    for (int i = 0; i < 2 * 3 * 4; i++) sums[i / 12][i / 4 % 3][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) squares[i / 4][i / 2 % 2][i % 2] = 0;
    for (int block = group; block < OWN / 32; block += GROUPS) {
        int column = rank * OWN + block * 32 + lane % 4 * 8;
        u32 after[2][HC][2][4];  // rows of the tensor cores: tile of 16 tokens, stream, 16 columns
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            uint4 h[2][HC], y[2];
#pragma unroll
            for (int part = 0; part < 2; part++) {
                int row = min(first_row + half * 32 + tile * 16 + part * 8 + lane / 4, p.rows - 1);
                const u16* source = p.h + static_cast<long long>(row) * (HC * DIM) + column;
#pragma unroll
                for (int j = 0; j < HC; j++) h[part][j] = load_streaming(source + j * DIM);
#if POST
                y[part] = load_streaming(p.y + static_cast<long long>(row) * DIM + column);
#else
                y[part] = h[part][0];
#endif
            }
#pragma unroll
            for (int part = 0; part < 2; part++) {
                int token = half * 32 + tile * 16 + part * 8 + lane / 4;
                float factor[FACTORS];
#pragma unroll
                for (int i = 0; i < FACTORS - 4; i += 4) {
                    float4 four = *reinterpret_cast<const float4*>(factors + token * FACTORS + i);
                    factor[i] = four.x, factor[i + 1] = four.y, factor[i + 2] = four.z, factor[i + 3] = four.w;
                }
                u32 mix_in[4];
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    u32 streams[HC], results[HC];
#pragma unroll
                    for (int j = 0; j < HC; j++) streams[j] = reinterpret_cast<const u32*>(&h[part][j])[pair];
                    u32 output = reinterpret_cast<const u32*>(&y[part])[pair];
                    mix_in[pair] = mix_pair(factor, streams, output, results, squares[tile][part]);
#pragma unroll
                    for (int j = 0; j < HC; j++) after[tile][j][pair / 2][pair % 2 * 2 + part] = results[j];
                }
                *reinterpret_cast<uint4*>(mixed + token * PITCH + (column - rank * OWN) * 2) =
                    {mix_in[0], mix_in[1], mix_in[2], mix_in[3]};
#if POST
                if (first_row + token < p.rows) {
                    u16* target = p.after + static_cast<long long>(first_row + token) * (HC * DIM) + column;
#pragma unroll
                    for (int j = 0; j < HC; j++) {
                        *reinterpret_cast<uint4*>(target + j * DIM) = {
                            after[tile][j][0][part], after[tile][j][0][2 + part],
                            after[tile][j][1][part], after[tile][j][1][2 + part]};
                    }
                }
#endif
            }
        }
#pragma unroll
        for (int j = 0; j < HC; j++) {
            const uint4* weights = arranged + (j * (DIM / 32) + rank * (OWN / 32) + block) * 6 * 32 + lane;
#pragma unroll
            for (int i = 0; i < 6; i++) {
                uint4 term = weights[i * 32];
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    multiply_bf16(sums[tile][i / 2], after[tile][j][0], term.x, term.y);
                    multiply_bf16(sums[tile][i / 2], after[tile][j][1], term.z, term.w);
                }
            }
        }
    }

    // Shares of the block's warps, added in the order of their groups: the upper half of them first leaves its own.
#pragma unroll
    for (int round = 0; round < 2; round++) {
        __syncthreads();
        if (group / (GROUPS / 2) != 1 - round) continue;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                int token = half * 32 + tile * 16 + part * 8 + lane / 4;
                float* target = own + (group % (GROUPS / 2) * TOKENS + token) * SUMS;
#pragma unroll
                for (int i = 0; i < 6; i++) {
                    float* sum = target + i / 2 * 8 + lane % 4 * 2 + i % 2;
                    float value = sums[tile][i / 2][part * 2 + i % 2];
                    *sum = round == 0 ? value : value + *sum;
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float value = squares[tile][part][i];
                    value += __shfl_xor_sync(ALL, value, 1);
                    value += __shfl_xor_sync(ALL, value, 2);
                    if (lane % 4 == 0) target[MIXES + i] = round == 0 ? value : value + target[MIXES + i];
                }
            }
        }
    }
    __syncthreads();
    cluster_wait();
    for (int i = thread; i < TOKENS * SUMS; i += THREADS) {
        int token = i / SUMS, sum = i % SUMS, owner = token % CLUSTER;
        float value = 0;
#pragma unroll
        for (int g = 0; g < GROUPS / 2; g++) value += own[(g * TOKENS + token) * SUMS + sum];
        if (sum <= MIXES) {
            u32 target = shared_address(products + (rank * (TOKENS / CLUSTER) + token / CLUSTER) * (MIXES + 1) + sum);
            store_remote(remote(target, owner), __float_as_uint(value));
        } else {
            u32 target = shared_address(norms + rank * TOKENS + token);
#pragma unroll
            for (int other = 0; other < CLUSTER; other++) store_remote(remote(target, other), __float_as_uint(value));
        }
    }
    cluster_sync();

    for (int token = rank + warp * CLUSTER; token < TOKENS && first_row + token < p.rows; token += WARPS * CLUSTER) {
        float product = 0, square = 0;
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) {
            const float* part = products + (other * (TOKENS / CLUSTER) + token / CLUSTER) * (MIXES + 1);
            product += part[min(lane, MIXES - 1)];
            square += part[MIXES];
        }
        coefficients(p, product, square, first_row + token);
    }
    for (int token = warp; token < TOKENS && first_row + token < p.rows; token += WARPS) {
        float total = 0;
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) total += norms[other * TOKENS + token];
        float factor = rsqrtf(total / DIM + p.rms_eps);
        for (int at = lane * 4; at < OWN; at += 128) {
            float value[4], weight[4];
            widen(*reinterpret_cast<const uint2*>(mixed + token * PITCH + at * 2), value);
            widen(*reinterpret_cast<const uint2*>(p.norm_weight + rank * OWN + at), weight);
#pragma unroll
            for (int e = 0; e < 4; e++) value[e] = weight[e] * (value[e] * factor);
            *reinterpret_cast<uint2*>(p.x + static_cast<long long>(first_row + token) * DIM + rank * OWN + at) = narrow(value);
        }
    }
}
