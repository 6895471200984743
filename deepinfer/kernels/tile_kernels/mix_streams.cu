// mHC of many tokens: post-mix, mix-in and products with `fn` in one pass over the streams.
//
// A block keeps `fn` for SLICE of the DIM columns of every stream in shared memory, as two BF16 terms of each weight, and
// its warps take 16 tokens at a time, each by itself: a warp loads 32 * TOGETHER columns of the streams, mixes them in
// registers in the layout of the tensor cores' operands, stores them, and multiplies them with `fn`.
//
// The 16 slices' warps of the same 16 tokens run at about the same time. When they are done with the next ones, each
// takes one of the tokens: it adds the slices' shares of products and squares in their order, runs Sinkhorn in registers
// and norms the mix-in, which is still in the L2 cache. So every row moves once between card and memory. A warp waits for
// those of the other slices, so all blocks must run at a time: at most one a multiprocessor, in a cooperative launch.
//
// Macros: DIM, SLICE = DIM / 16, THREADS, TOGETHER, POST (else the streams are mixed in as they are), CLUSTER = 1.
#include "../deep_select/cluster.cuh"
#include "sinkhorn.cuh"

#define WARPS (THREADS / 32)
#define TILES (MIXES / 8)
#define PADDED 32     // floats of a token's share: products, then sums of squares of the streams and of the mix-in
#define TOKENS 16     // of a warp, and slices
#define STEPS (SLICE / 32)  // of 32 columns

struct StreamParams {
    const u16* h;  // [rows, HC, DIM]
    const u16* y;  // [rows, DIM]
    const float* post;
    const float* comb;
    const float* p_prev;
    const float* fn;  // [MIXES, HC * DIM]
    const float* scale;
    const float* base;
    const u16* norm_weight;
    u16* after;      // the post-mixed streams
    u16* x;          // at first their sum weighted by p_prev
    float* new_pre;
    float* new_post;
    float* new_comb;
    float* shares;   // [TOKENS, rows, PADDED]
    u32* arrived;    // [rows / TOKENS] slices that are done, 0 at first
    int rows;
    int blocks;  // of a slice
    int iterations;
    float hc_eps;
    float rms_eps;
};

struct Streams {
    uint4 h[2][HC], y[2];  // 8 columns of two tokens
};

struct Weights {
    float comb[HC][HC], post[HC], p_prev[HC];
};

DEVICE u32& word_of(uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }
DEVICE float low_of(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// 32 columns for each of `streams`, one next to the other: memory likes long pieces of a row.
DEVICE void load_streams(const StreamParams& p, long long row, int column, int token, Streams (&streams)[TOGETHER]) {
#pragma unroll
    for (int j = 0; j < HC; j++) {
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            streams[i].h[token][j] = load_vector(p.h + (row * HC + j) * DIM + column + 32 * i);
        }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
        if (POST) streams[i].y[token] = load_vector(p.y + row * DIM + column + 32 * i);
    }
}

DEVICE void store_streams(
    const StreamParams& p, long long row, int column, int token, const Streams& streams, uint4 mixed
) {
#pragma unroll
    for (int j = 0; j < HC; j++) {
        if (POST) store_vector(p.after + (row * HC + j) * DIM + column, streams.h[token][j]);
    }
    store_vector(p.x + row * DIM + column, mixed);
}

// Post-mixed streams take the place of those before; the mix-in; adds to the sums of their squares.
DEVICE uint4 mix(const Weights& w, int token, Streams& streams, float& squares, float& of_mixed) {
    uint4 mixed;
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float low[HC], high[HC], total_low = 0, total_high = 0, y_low = 0, y_high = 0;
#pragma unroll
        for (int i = 0; i < HC; i++) {
            u32 word = word_of(streams.h[token][i], pair);
            low[i] = low_of(word), high[i] = high_of(word);
        }
        if (POST) y_low = low_of(word_of(streams.y[token], pair)), y_high = high_of(word_of(streams.y[token], pair));
#pragma unroll
        for (int j = 0; j < HC; j++) {
            float a = low[j], b = high[j];
            if (POST) {
                a = w.post[j] * y_low, b = w.post[j] * y_high;
#pragma unroll
                for (int i = 0; i < HC; i++) a += w.comb[i][j] * low[i], b += w.comb[i][j] * high[i];
                u32 packed = pack_bf16(a, b);
                word_of(streams.h[token][j], pair) = packed;
                a = low_of(packed), b = high_of(packed);
            }
            total_low += w.p_prev[j] * a, total_high += w.p_prev[j] * b;
            squares += a * a;
            squares += b * b;
        }
        u32 total = pack_bf16(total_low, total_high);
        word_of(mixed, pair) = total;
        of_mixed += low_of(total) * low_of(total);
        of_mixed += high_of(total) * high_of(total);
    }
    return mixed;
}

DEVICE void load_weights(const StreamParams& p, long long row, Weights& w) {
    float4 p_prev = *reinterpret_cast<const float4*>(p.p_prev + row * HC);
    w.p_prev[0] = p_prev.x, w.p_prev[1] = p_prev.y, w.p_prev[2] = p_prev.z, w.p_prev[3] = p_prev.w;
    if (!POST) return;
    const float4* comb = reinterpret_cast<const float4*>(p.comb + row * HC * HC);
#pragma unroll
    for (int i = 0; i < HC; i++) {
        float4 line = comb[i];
        w.comb[i][0] = line.x, w.comb[i][1] = line.y, w.comb[i][2] = line.z, w.comb[i][3] = line.w;
    }
    float4 post = *reinterpret_cast<const float4*>(p.post + row * HC);
    w.post[0] = post.x, w.post[1] = post.y, w.post[2] = post.z, w.post[3] = post.w;
}

// `fn` of this block's columns as the tensor cores take it: [HC, STEPS, TILES, high and low terms, lane] vectors. A lane has
// columns 8 (lane % 4) to + 7 of 32, for mix lane / 4 of 8: any order of columns will do that streams have as well.
DEVICE void keep_weights(const StreamParams& p, int slice, uint4* weights) {
#pragma unroll 5
    for (int i = threadIdx.x; i < HC * STEPS * TILES * 32; i += THREADS) {
        int lane = i % 32, tile = i / 32 % TILES, step = i / 32 / TILES % STEPS, stream = i / 32 / TILES / STEPS;
        int column = slice * SLICE + step * 32 + lane % 4 * 8;
        const float* source = p.fn + (tile * 8 + lane / 4) * (HC * DIM) + stream * DIM + column;
        float4 left = reinterpret_cast<const float4*>(source)[0], right = reinterpret_cast<const float4*>(source)[1];
        float value[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
        uint4 high, low;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float first = value[2 * j], second = value[2 * j + 1];
            u32 pair = pack_bf16(first, second);
            word_of(high, j) = pair;
            word_of(low, j) = pack_bf16(first - low_of(pair), second - high_of(pair));
        }
        uint4* target = weights + (i / 32 * 2) * 32 + lane;
        target[0] = high, target[32] = low;
    }
}

// Coefficients and normed mix-in of a token, by a warp, once all slices have arrived.
DEVICE void finish(const StreamParams& p, int first, int slice) {
    int lane = threadIdx.x % 32;
    long long row = first + slice;
    if (lane == 0) {
        while (load_acquired(p.arrived + first / TOKENS) < TOKENS) {
        }
    }
    __syncwarp();
    if (row >= p.rows) return;
    float share[TOKENS], sum = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        share[i] = lane < MIXES + 2 ? load_shared_by_all(p.shares + (i * p.rows + row) * PADDED + lane) : 0;
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++) sum += share[i];
    float squares = __shfl_sync(ALL, sum, MIXES), of_mixed = __shfl_sync(ALL, sum, MIXES + 1);
    float factor = rsqrtf(of_mixed / DIM + p.rms_eps);
    u16* x = p.x + row * DIM;
    for (int at = lane * 8; at < DIM; at += 4 * 256) {
        uint4 value[4], weight[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i * 256 >= DIM) continue;
            value[i] = load_shared_by_all(x + at + i * 256);
            weight[i] = *reinterpret_cast<const uint4*>(p.norm_weight + at + i * 256);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i * 256 >= DIM) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 pair = word_of(value[i], j), by = word_of(weight[i], j);
                word_of(value[i], j) =
                    pack_bf16(low_of(by) * (low_of(pair) * factor), high_of(by) * (high_of(pair) * factor));
            }
            store_vector(x + at + i * 256, value[i]);
        }
    }
    Coefficients to = {p.scale, p.base, p.new_pre + row * HC, p.new_post + row * HC, p.new_comb + row * HC * HC};
    coefficients(to, sum * rsqrtf(squares / (HC * DIM) + p.rms_eps), p.iterations, p.hc_eps);
}

KERNEL(THREADS, 1) mix_streams(const StreamParams p) {
    SHARED_MEMORY(memory);
    uint4* weights = reinterpret_cast<uint4*>(memory);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane / 4, quarter = lane % 4;
    int slice = blockIdx.x % (DIM / SLICE), block = blockIdx.x / (DIM / SLICE);
    int stride = p.blocks * WARPS * TOKENS;
    int first = (warp * p.blocks + block) * TOKENS, before = -1;
    follow_launch_before();
    keep_weights(p, slice, weights);
    __syncthreads();
    Streams streams[TOGETHER];
    Weights of_tokens[2];
    for (; first < p.rows; first += stride) {
        int row[2] = {first + own, first + own + 8};
#pragma unroll
        for (int t = 0; t < 2; t++) load_weights(p, min(row[t], p.rows - 1), of_tokens[t]);
        float products[TILES][4], squares[2] = {0, 0}, of_mixed[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < TILES; i++) products[i][0] = products[i][1] = products[i][2] = products[i][3] = 0;
#pragma unroll 1
        for (int step = 0; step < STEPS; step += TOGETHER) {
            int column = slice * SLICE + step * 32 + quarter * 8;
#pragma unroll
            for (int t = 0; t < 2; t++) load_streams(p, min(row[t], p.rows - 1), column, t, streams);
            __syncwarp();  // the compiler moves no load behind it
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    uint4 mixed = mix(of_tokens[t], t, streams[i], squares[t], of_mixed[t]);
                    if (row[t] < p.rows) store_streams(p, row[t], column + 32 * i, t, streams[i], mixed);
                }
#pragma unroll
                for (int j = 0; j < HC; j++) {
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        const uint4* source = weights + ((j * STEPS + step + i) * TILES + tile) * 64 + lane;
                        uint4 high = source[0], low = source[32];
                        uint4 a = streams[i].h[0][j], b = streams[i].h[1][j];
                        multiply_bf16(products[tile], a.x, b.x, a.y, b.y, high.x, high.y);
                        multiply_bf16(products[tile], a.z, b.z, a.w, b.w, high.z, high.w);
                        multiply_bf16(products[tile], a.x, b.x, a.y, b.y, low.x, low.y);
                        multiply_bf16(products[tile], a.z, b.z, a.w, b.w, low.z, low.w);
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            squares[t] += __shfl_xor_sync(ALL, squares[t], 1);
            squares[t] += __shfl_xor_sync(ALL, squares[t], 2);
            of_mixed[t] += __shfl_xor_sync(ALL, of_mixed[t], 1);
            of_mixed[t] += __shfl_xor_sync(ALL, of_mixed[t], 2);
            if (row[t] >= p.rows) continue;
            float* share = p.shares + (static_cast<long long>(slice) * p.rows + row[t]) * PADDED;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float2 pair = {products[tile][2 * t], products[tile][2 * t + 1]};
                *reinterpret_cast<float2*>(share + tile * 8 + quarter * 2) = pair;
            }
            float2 sums = {squares[t], of_mixed[t]};
            if (quarter == 0) *reinterpret_cast<float2*>(share + MIXES) = sums;
        }
        __syncwarp();
        if (lane == 0) add_released(p.arrived + first / TOKENS);
        if (before >= 0) finish(p, before, slice);
        before = first;
    }
    if (before >= 0) finish(p, before, slice);
}
