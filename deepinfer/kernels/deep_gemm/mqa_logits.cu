// Logits of the lightning indexer: out[t, s] = scale[s] x sum over heads of w[t, h] x relu(q[t, h] . k[s]), q and k in E4M3.
//
// Keys are the rows of the tensor cores' product, the heads of TOKENS tokens its columns; PRODUCTS of them keep a tile of 128
// keys busy. One warpgroup feeds query and key tiles with the bulk copy engine, two multiply 64 keys each: while one product
// runs, the sums of the one before are rectified, weighted and added up over the heads in registers.
//
// FP4: keys are rows of 68 bytes, 64 of E2M1 pairs and four UE8M0 scales (the engine's cache), widened in registers. The
// eight codes of a word are columns 8 c + 0..7 of a group of 32, which the product takes for 4 c + 0..3 and 16 + 4 c + 0..3:
// the query's columns come in that order too. A key takes its largest scale; codes far below it are rounded.
//
// PAGED 0: keys [S, 128] and scales [S]; token t sees the keys of [starts[t], ends[t]); work is cut into tiles of
// TOKENS x PRODUCTS tokens and chunks of keys; with RELATIVE column 0 of a token is its first key. PAGED 1: TOKENS x PRODUCTS tokens of each sequence, its keys in pages of PAGE
// (FP8: 64 rows of 128 bytes, then 64 float scales); token t sees ends[t] keys; each block gets an equal run of all tiles.
// Macros: PAGED, RELATIVE (not PAGED), FP4 (only PAGED), PAGE (64, 128), HEADS, TOKENS, PRODUCTS, STAGES.

#include "fp4_weights.cuh"
#include "products.cuh"
#include "tma.cuh"

#define KEYS 128
#define COLUMNS (HEADS * TOKENS)
#define QUERY_TOKENS (TOKENS * PRODUCTS)
#define QUERY_BYTES (QUERY_TOKENS * HEADS * 128)
#define ROW_BYTES (FP4 ? 68 : 128)
#define KEY_BYTES (KEYS * ROW_BYTES)
#define KEY_SCALES (2 * QUERY_BYTES + STAGES * KEY_BYTES)
#define BARRIERS (KEY_SCALES + STAGES * KEYS * 4)
#define STARTS (BARRIERS + (2 * STAGES + 4) * 8)
#define MAX_SEQUENCES 1024
#define PAGE_ROWS 66  // of 128 bytes: an FP8 page's keys and their scales
#define CLEANED 4096  // columns that a block cleans at a time; PAGED

#define MINUS_INFINITY __int_as_float(0xFF800000)

struct Params {
    const float* weights;     // [tokens, HEADS]
    const int *starts, *ends;
    float* out;               // [tokens, out_stride]
    const u8* pages;          // PAGED
    const int* block_table;   // [sequences, table_stride]; PAGED
    long long out_stride, page_stride;  // page_stride: bytes; FP4
    int tokens, keys, chunk, table_stride;  // chunk: key tiles of one piece of work
    int clean;                // write -inf where no token of a tile sees a key
    int width;                // columns of out; RELATIVE
};

struct Ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

#include "mqa_work.cuh"

DEVICE void feed(const Params& p, const TensorMap* query_map, const TensorMap* key_map, const TensorMap* scale_map,
                 const int* starts, u32 shared) {
    const u32 full = shared + BARRIERS, empty = full + STAGES * 8;
    const u32 query_full = empty + STAGES * 8, query_empty = query_full + 16;
    Ring ring, queries;
    Walk walk(p, starts);
    for (Work work; walk.next(p, work);) {
        const Work seen = seen_part(p, work);
        if (seen.first >= seen.end) continue;
        barrier_wait(query_empty + queries.stage * 8, queries.parity ^ 1);
        barrier_expect(query_full + queries.stage * 8, QUERY_BYTES);
        load_box(shared + queries.stage * QUERY_BYTES, query_map, 0, work.token * HEADS, query_full + queries.stage * 8);
        queries.next(2);
        for (int tile = seen.first; tile < seen.end; tile++, ring.next(STAGES)) {
            const u32 arrived = full + ring.stage * 8, target = shared + 2 * QUERY_BYTES + ring.stage * KEY_BYTES;
            [[maybe_unused]] const u32 scales = shared + KEY_SCALES + ring.stage * KEYS * 4;
            barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
            barrier_expect(arrived, KEY_BYTES + (FP4 ? 0 : KEYS * 4));
#if PAGED
            const int* table = p.block_table + (long long)work.sequence * p.table_stride;
            for (int i = 0; i < KEYS / PAGE; i++) {  // past the last key: the first page of the tile again
                const int at = tile * (KEYS / PAGE) + i, page = __ldg(table + (at * PAGE < seen.keys ? at : at - i));
#if FP4
                load_bytes(target + i * PAGE * ROW_BYTES, p.pages + page * p.page_stride, PAGE * ROW_BYTES, arrived);
#else
                load_box(target + i * PAGE * 128, key_map, 0, page * PAGE_ROWS, arrived);
                load_bytes(scales + i * PAGE * 4, p.pages + ((long long)page * PAGE_ROWS + PAGE) * 128, PAGE * 4, arrived);
#endif
            }
#else
            load_box(target, key_map, 0, tile * KEYS, arrived);
            load_box(scales, scale_map, tile * KEYS, 0, arrived);
#endif
        }
    }
}

#if FP4
// Keys `at` and 8 rows further, as operands of four products; returns the scales of the two.
DEVICE float2 widen_keys(u32 at, int c, u32 (&a)[4][4]) {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = at + half * 8 * ROW_BYTES, exponents = load_word(row + 64);
        int e[4], top = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) e[s] = permute(exponents, 0, 0x4440 + s), top = max(top, e[s]);
        scale[half] = top == 255 ? __int_as_float(0x7FC00000) : __int_as_float(max(top - 6, 0) << 23);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const u32 word = load_word(row + s * 16 + c * 4);
            const int t = 11 - top + e[s];
            uint2 magnitudes = scaled_magnitudes(t);
            if (t < 0) magnitudes = small_magnitudes[min(-1 - t, 7)];
            const u32 shifted = word << 4, selectors = word & 0x77777777u;
            const u32 low_signs = permute(word, shifted, 0x9D8C), high_signs = permute(word, shifted, 0xBFAE);
            a[s][half] = with_signs(permute(magnitudes.x, magnitudes.y, selectors), low_signs);
            a[s][2 + half] = with_signs(permute(magnitudes.x, magnitudes.y, selectors >> 16), high_signs);
        }
    }
    return make_float2(scale[0], scale[1]);
}
#endif

// Sums over the heads of one product: sum[t][i] of token t and row i (8 further for i = 1), this lane's columns only.
DEVICE void weigh(const float (&d)[COLUMNS / 2], const float (&w)[TOKENS][HEADS / 4], float (&sum)[TOKENS][2]) {
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
        for (int j = 0; j < HEADS / 8; j++) {
            const int at = 4 * (t * (HEADS / 8) + j);
            sum[t][0] += fmaxf(d[at], 0.0f) * w[t][2 * j];
            sum[t][1] += fmaxf(d[at + 2], 0.0f) * w[t][2 * j];
            sum[t][0] += fmaxf(d[at + 1], 0.0f) * w[t][2 * j + 1];
            sum[t][1] += fmaxf(d[at + 3], 0.0f) * w[t][2 * j + 1];
        }
    }
}

#define OUTS ((TOKENS + 1) / 2)  // logits of a product that a lane writes

// What a lane writes of its product: key `row` (in a tile) of every second token.
struct Target {
    float* out[OUTS];  // of key 0 of tile 0
    int start[OUTS], end[OUTS];
    DEVICE void set(const Params& p, int first_token, int row, int c) {
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            const int own = 2 * i + c / 2, token = min(first_token + own, p.tokens - 1);
            const bool exists = own < TOKENS && first_token + own < p.tokens;
            start[i] = PAGED ? 0 : __ldg(p.starts + token);
            end[i] = __ldg(p.ends + token);
            out[i] = exists ? p.out + token * p.out_stride + row - (RELATIVE ? start[i] : 0) : nullptr;
        }
    }
};

// Adds up over the quad: an even lane gets the upper row, an odd one the lower; lanes 0 and 1 the even tokens, 2 and 3 the
// odd ones. `all`: every token sees every key of the tile.
DEVICE void write_logits(float (&sum)[TOKENS][2], const Params& p, const Target& target, int tile, int row, bool all, float scale,
                         int c) {
    float half[TOKENS + 1];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        half[t] = (c & 1 ? sum[t][1] : sum[t][0]) + __shfl_xor_sync(~0u, c & 1 ? sum[t][0] : sum[t][1], 1);
    half[TOKENS] = 0.0f;
#pragma unroll
    for (int i = 0; i < OUTS; i++) {
        const float even = half[2 * i], odd = half[2 * i + 1];
        const float x = ((c & 2 ? odd : even) + __shfl_xor_sync(~0u, c & 2 ? even : odd, 2)) * scale;
        float* out = target.out[i] + tile * KEYS;
        if (all && TOKENS % 2 == 0) {
            *out = x;
            continue;
        }
        const int key = tile * KEYS + row, column = RELATIVE ? key - target.start[i] : key;
        const bool seen = key >= target.start[i] && key < target.end[i];
        if (target.out[i] && column >= 0 && column < (RELATIVE ? p.width : p.keys)) *out = seen ? x : MINUS_INFINITY;
    }
}

DEVICE void multiply_keys(const Params& p, const int* starts, u32 shared) {
    const u32 full = shared + BARRIERS, empty = full + STAGES * 8;
    const u32 query_full = empty + STAGES * 8, query_empty = query_full + 16;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int lane = threadIdx.x % 32, c = lane % 4, row = group * 64 + warp * 16 + lane / 4 + c % 2 * 8;
    Ring ring, queries;
    Walk walk(p, starts);
    for (Work work; walk.next(p, work);) {
        const Work seen = seen_part(p, work);
        if (!PAGED && p.clean) {
#pragma unroll
            for (int j = 0; j < QUERY_TOKENS; j++) {
                const int t = work.token + j;
                float* target = p.out + t * p.out_stride;
                const int first = RELATIVE ? __ldg(p.starts + min(t, p.tokens - 1)) : 0;
                const int last = t >= p.tokens ? 0 : RELATIVE ? first + p.width : p.keys;
                for (int i = max(work.first * KEYS, first) + threadIdx.x; i < min(work.end * KEYS, last); i += 256)
                    if (i < seen.first * KEYS || i >= seen.end * KEYS) target[i - first] = MINUS_INFINITY;
            }
        }
        if (seen.first >= seen.end) continue;
        float w[PRODUCTS][TOKENS][HEADS / 4];
        Target target[PRODUCTS];
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) target[i].set(p, work.token + i * TOKENS, row, c);
#pragma unroll
        for (int i = 0; i < QUERY_TOKENS; i++) {
            const int token = min(work.token + i, p.tokens - 1);
#pragma unroll
            for (int j = 0; j < HEADS / 8; j++) {
                const float2 two = __ldg((const float2*)(p.weights + (long long)token * HEADS + 8 * j + 2 * c));
                w[i / TOKENS][i % TOKENS][2 * j] = two.x, w[i / TOKENS][i % TOKENS][2 * j + 1] = two.y;
            }
        }
        barrier_wait(query_full + queries.stage * 8, queries.parity);
        const u64 query = matrix_descriptor(shared + queries.stage * QUERY_BYTES);
#if !FP4
        const u64 keys = matrix_descriptor(shared + 2 * QUERY_BYTES + group * 64 * 128);
#endif
        float d[PRODUCTS][COLUMNS / 2];
        for (int tile = seen.first; tile < seen.end; tile++, ring.next(STAGES)) {
            const bool all = tile * KEYS >= seen.all_first && (tile + 1) * KEYS <= seen.all_end;
            barrier_wait(full + ring.stage * 8, ring.parity);
#if FP4
            u32 a[4][4];
            const u32 own_key = (group * 64 + warp * 16 + lane / 4) * ROW_BYTES;
            const float2 scales = widen_keys(shared + 2 * QUERY_BYTES + ring.stage * KEY_BYTES + own_key, c, a);
            const float scale = c % 2 ? scales.y : scales.x;
#pragma unroll
            for (int s = 0; s < 4; s++) fence_registers(a[s]);
#else
            const float scale = load_float(shared + KEY_SCALES + (ring.stage * KEYS + row) * 4);
            const u64 tile_keys = keys + (ring.stage * KEY_BYTES >> 4);
#endif
#pragma unroll
            for (int i = 0; i < PRODUCTS; i++) fence_registers(d[i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < PRODUCTS; i++) {
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const u64 columns = query + (i * COLUMNS * 128 >> 4) + 2 * s;
#if FP4
                    multiply(d[i], a[s], columns, s);
#else
                    multiply(d[i], tile_keys + 2 * s, columns, s);
#endif
                }
                wgmma_commit();
            }
#pragma unroll
            for (int i = 0; i < PRODUCTS; i++) {
                if (i == PRODUCTS - 1) wgmma_wait<0>();
                else wgmma_wait<1>();
                fence_registers(d[i]);
#if FP4
                if (i == PRODUCTS - 1)
#pragma unroll
                    for (int s = 0; s < 4; s++) fence_registers(a[s]);
#endif
                if (i == PRODUCTS - 1 && lane == 0) barrier_arrive(empty + ring.stage * 8);
                float sum[TOKENS][2];
                weigh(d[i], w[i], sum);
                write_logits(sum, p, target[i], tile, row, all, scale, c);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(query_empty + queries.stage * 8);
        queries.next(2);
    }
#if PAGED
    if (!p.clean) return;
    const int pieces = (p.keys + CLEANED - 1) / CLEANED;
    for (int item = blockIdx.x; item < p.tokens * pieces; item += gridDim.x) {  // behind the last tile of a sequence
        const int token = item / pieces, sequence = token / QUERY_TOKENS, first = (item - token * pieces) * CLEANED;
        const int written = (starts[sequence + 1] - starts[sequence]) * KEYS;
        for (int i = max(first, written) + threadIdx.x; i < min(first + CLEANED, p.keys); i += 256)
            p.out[token * p.out_stride + i] = MINUS_INFINITY;
    }
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1)
    mqa_logits(const __grid_constant__ Params p, const __grid_constant__ TensorMap query_map,
               const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap scale_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    int* starts = (int*)(memory + STARTS);
    if (threadIdx.x == 256) {
        prefetch_map(&query_map);
        prefetch_map(&key_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 8);  // warps that read the buffer
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(empty + STAGES * 8 + i * 8, 1);
            barrier_init(empty + STAGES * 8 + 16 + i * 8, 8);
        }
        barrier_fence_init();
    }
#if PAGED
    count_tiles(p, starts);
#else
    __syncthreads();
#endif
    if (threadIdx.x >= 256) {
        fewer_registers<40>();
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == 8 && elect_one())
            feed(p, &query_map, &key_map, &scale_map, starts, shared);
    } else {
        more_registers<232>();
        multiply_keys(p, starts, shared);
    }
}
