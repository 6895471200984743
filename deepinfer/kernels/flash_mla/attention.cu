// Token-level sparse attention on Hopper: 64 heads of one query token a block, keys gathered row by row, keys = values.
//
// Two consumer warpgroups and one that fills key tiles of 64 rows. The tiles go in pairs (0, 1): group 0 scores tile 0,
// group 1 tile 1, and each owns 256 of the 512 output columns, so that both read both tiles as values. The running
// maximum passes 0 -> 1 -> 0, each group rescaling its own sums; probabilities travel through shared memory in register
// layout. While one group is in its softmax the other multiplies. (The schedule is FlashMLA's "seesaw".) Half a tile
// (256 columns) is refilled as soon as its last reader is done.
//
// Specialised by macros: HEADS, WINDOW_FORMAT, WINDOW_PAGE, LATENT_FORMAT, LATENT_PAGE (rows.cuh), SPLIT (blocks that share
// a token's keys: a cluster), Q_NORM, ROPE, OUT_FP8.

#include "epilogue.cuh"
#include "query.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

#define BLOCK_HEADS 64
#define BLOCKS_A_TOKEN (HEADS / BLOCK_HEADS)
#define PACKED_ONLY (WINDOW_FORMAT != ROWS_BF16 && LATENT_FORMAT != ROWS_BF16)
#define LATENT_OR_ANY (LATENT_FORMAT == ROWS_NONE ? ROWS_BF16 : LATENT_FORMAT)
#define KEY_SCALE (PACKED_ONLY ? UNPACK_SCALE : 1.0f)  // keys in shared memory are the true ones over this
#define LOG2_E 1.4426950408889634f
#define LOWEST -1e30f  // a finite "no maximum yet"

// Byte offsets in shared memory.
#define KEYS 0  // two tiles of two halves
#define QUERY (4 * HALF_TILE_BYTES)
#define PROBABILITIES (QUERY + 65536)            // of tile 0 and tile 1, 16 words a thread
#define BIAS (PROBABILITIES + 2 * 8192)          // float [2][64]: 0, or -inf for a key that is none
#define MAXIMUM (BIAS + 512)                     // float [64]
#define SUMS (MAXIMUM + 256)                     // float [2][64]
#define PEER_STATES (SUMS + 512)                 // float [SPLIT][2][64]: maximum and sum of every block of the cluster
#define BARRIERS (PEER_STATES + SPLIT * 512)
#define SHARED_BYTES (BARRIERS + 128)

struct Params {
    Query query;
    RowSource window, latent;
    const float* sink;  // [HEADS]
    Angles angles;
    Output out;
    float scale;
    int tokens;
};

enum NamedBarrier { MAXIMUM_0 = 1, MAXIMUM_1, PROBABILITIES_0, PROBABILITIES_1, SUMS_READY, GROUP };

struct Barriers {
    u32 base;
    DEVICE u32 query_ready() const { return base; }
    DEVICE u32 query_free() const { return base + 8; }
    DEVICE u32 ready(int tile, int half) const { return base + 16 + (tile * 2 + half) * 8; }
    DEVICE u32 free(int tile, int half) const { return base + 48 + (tile * 2 + half) * 8; }
};

// The tiles of 64 keys that this block reads: the window's come first.
struct Tiles {
    int window, first, count;
    DEVICE Tiles(const Params& p, int rank) {
        window = (p.window.count + 63) / 64;
        int all = window + (LATENT_FORMAT == ROWS_NONE ? 0 : (p.latent.count + 63) / 64);
        first = all * rank / SPLIT;
        count = all * (rank + 1) / SPLIT - first;
    }
    DEVICE int pairs() const { return count > 1 ? (count + 1) / 2 : 1; }
};

DEVICE void arrive_warp(u32 barrier, int lane) {  // 8 or 4 arrivals, one a warp
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

// ------------------------------------------------------------------ producer

// A tile that is being filled: its rows, and which cache they come from.
struct Filling {
    Rows rows;
    bool window;

    DEVICE void find(const Params& p, const Tiles& tiles, int token, int tile) {
        int row = threadIdx.x % 128 / 8;
        bool beyond = tile >= tiles.count;
        tile += tiles.first;
        window = LATENT_FORMAT == ROWS_NONE || tile < tiles.window;
        if (window) rows.find(p.window, token, beyond ? p.window.count : tile * 64 + row);
        else rows.find(p.latent, token, beyond ? p.latent.count : (tile - tiles.window) * 64 + row);
    }
    DEVICE void load(PackedRow (&raw)[2], const Params& p, int first, int half) const {
        int lane = threadIdx.x % 8;
        if (window) load_two<WINDOW_FORMAT, WINDOW_PAGE>(raw, p.window, rows, first, half, lane);
        else load_two<LATENT_OR_ANY, LATENT_PAGE>(raw, p.latent, rows, first, half, lane);
    }
    DEVICE void store(const PackedRow (&raw)[2], const Params& p, int first, u32 target, int half) const {
        int lane = threadIdx.x % 8;
        if (window) store_two<WINDOW_FORMAT, WINDOW_PAGE, PACKED_ONLY>(raw, p.window, rows, first, target, half, lane);
        else store_two<LATENT_OR_ANY, LATENT_PAGE, PACKED_ONLY>(raw, p.latent, rows, first, target, half, lane);
    }
    // With the first half of a tile comes what is added to its 64 logits.
    DEVICE void write_bias(float* bias, u32 ready) const {
        if (threadIdx.x % 8) return;
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++)
            bias[threadIdx.x % 128 / 8 + 16 * i] = rows.slot[i] >= 0 ? 0.0f : -__int_as_float(0x7F800000);
        barrier_arrive(ready);
    }
    DEVICE void announce_half(u32 ready) const {
        if (window) announce<WINDOW_FORMAT>(ready);
        else announce<LATENT_OR_ANY>(ready);
    }
};

DEVICE void produce(const Params& p, const Barriers& barriers, u8* shared, int first_item, int items, int step, int rank) {
    const int lane = threadIdx.x % 8, row = threadIdx.x % 128 / 8;
    const u32 keys = shared_address(shared + KEYS) + row * 128 + ((lane ^ row % 8) << 4);
    const Tiles tiles(p, rank);
    u32 parity = 1, query_parity = 1;  // the first wait for a free tile returns at once
    for (int item = first_item; item < items; item += step) {
        int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
        Filling next[2];
        next[0].find(p, tiles, token, 0);
        next[1].find(p, tiles, token, 1);
        barrier_wait(barriers.query_free(), query_parity);
        query_parity ^= 1;
        load_query(p.query, p.angles, token, head, shared_address(shared + QUERY), barriers.query_ready());
        PackedRow early[2], late[2];
        next[0].load(early, p, 0, 0);
        for (int pair = 0; pair < tiles.pairs(); pair++) {
            Filling now[2] = {next[0], next[1]};
            const bool more = pair + 1 < tiles.pairs();
            if (more) {  // early: the slots' latency passes behind the copies
                next[0].find(p, tiles, token, 2 * pair + 2);
                next[1].find(p, tiles, token, 2 * pair + 3);
            }
            // In the order in which the consumers need and free them: (0, 0), (1, 1), (0, 1), (1, 0).
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int tile = i % 2, half = i == 1 || i == 2;
                const u32 target = keys + (tile * 2 + half) * HALF_TILE_BYTES, ready = barriers.ready(tile, half);
                now[tile].load(late, p, 2, half);
                barrier_wait(barriers.free(tile, half), parity);
                if (i < 2) now[tile].write_bias((float*)(shared + BIAS) + tile * 64, ready);
                now[tile].store(early, p, 0, target, half);
                if (i < 3) now[1 - tile].load(early, p, 0, i == 0 || i == 1);
                else if (more) next[0].load(early, p, 0, 0);
                now[tile].store(late, p, 2, target, half);
                now[tile].announce_half(ready);
            }
            parity ^= 1;
        }
    }
}

// ------------------------------------------------------------------ consumers

// s += query x keys^T over one half of the 512 dimensions.
DEVICE void score_half(float (&s)[32], u64 query, u64 keys, int half, bool first) {
    if (first) fence_registers(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16; k++) {
        int offset = k / 4 * SUB_TILE_BYTES + k % 4 * 32;
        wgmma_64x64(s, query + (half * HALF_TILE_BYTES + offset) / 16, keys + (half * HALF_TILE_BYTES + offset) / 16,
                    !(first && k == 0));
    }
    wgmma_commit();
}

// o += probabilities [64 x 64] x values [64 x 256].
DEVICE void add_values(float (&o)[128], u32 (&probabilities)[16], u64 values) {
    fence_registers(probabilities);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 a[4] = {probabilities[4 * k], probabilities[4 * k + 1], probabilities[4 * k + 2], probabilities[4 * k + 3]};
        wgmma_64x256(o, a, values + k * 2048 / 16);
    }
    wgmma_commit();
}

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What a thread of a consumer group keeps of two rows: r and r + 8.
struct Softmax {
    float maximum[2], sum[2];

    // s becomes logits (log 2) with absent keys at -inf; returns the rows' maxima.
    DEVICE void logits(float (&s)[32], const float* bias, float scale, int c, float (&top)[2]) {
        top[0] = top[1] = LOWEST;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 b = *(const float2*)(bias + 8 * j + 2 * c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[4 * j + i] = fmaf(s[4 * j + i], scale, i % 2 ? b.y : b.x);
                top[i / 2] = fmaxf(top[i / 2], s[4 * j + i]);
            }
        }
        top[0] = quad_max(top[0]);
        top[1] = quad_max(top[1]);
    }
    // s becomes exp2(s - maximum); the sums follow the new maximum. Returns the factors for the output's rows.
    DEVICE void step(float (&s)[32], const float (&next)[2], float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[i] = exp2_fast(maximum[i] - next[i]);
            maximum[i] = next[i];
            sum[i] *= factor[i];
        }
#pragma unroll
        for (int j = 0; j < 32; j++) {
            s[j] = exp2_fast(s[j] - maximum[j / 2 % 2]);
            sum[j / 2 % 2] += s[j];
        }
    }
};

DEVICE void rescale(float (&o)[128], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < 128; j++) o[j] *= factor[j / 2 % 2];
}

// Probabilities as the left operand of a product: words 4 k .. 4 k + 3 are those of keys 16 k .. 16 k + 15.
DEVICE void pack_probabilities(const float (&s)[32], const float (&factor)[2], u32 (&words)[16]) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack_bf16(s[2 * j] * factor[j % 2], s[2 * j + 1] * factor[j % 2]);
}

DEVICE void put_words(u8* target, const u32 (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint4*)(target + i * 2048) = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}
DEVICE void get_words(const u8* source, u32 (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 four = *(const uint4*)(source + i * 2048);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
}

#include "combine.cuh"

template <int GROUP_ID>
DEVICE void consume(const Params& p, const Barriers& barriers, u8* shared, int first_item, int items, int step, int rank) {
    const int thread = threadIdx.x % 128, lane = thread % 32, c = lane % 4, row = thread / 32 * 16 + lane / 4;
    const float scale = p.scale * LOG2_E * KEY_SCALE;
    const float one[2] = {1.0f, 1.0f};
    float* shared_maximum = (float*)(shared + MAXIMUM);
    float* sums = (float*)(shared + SUMS);
    const float* bias = (const float*)(shared + BIAS) + GROUP_ID * 64;
    u8* mine = shared + PROBABILITIES + GROUP_ID * 8192 + thread * 16;
    u8* other = shared + PROBABILITIES + (1 - GROUP_ID) * 8192 + thread * 16;
    const u32 keys = shared_address(shared + KEYS);
    const u64 query = matrix_descriptor(shared_address(shared + QUERY), 0);
    const u64 my_keys = matrix_descriptor(keys + GROUP_ID * 2 * HALF_TILE_BYTES, 0);
    const u64 values_0 = matrix_descriptor(keys + GROUP_ID * HALF_TILE_BYTES, SUB_TILE_BYTES);
    const u64 values_1 = matrix_descriptor(keys + (2 + GROUP_ID) * HALF_TILE_BYTES, SUB_TILE_BYTES);
    const Tiles tiles(p, rank);
    const int pairs = tiles.pairs();
    u32 parity = 0, query_parity = 0;

    for (int item = first_item; item < items; item += step) {
        const int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
        Softmax softmax;
        float o[128], s[32], factor[2];
        u32 words[16];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sink = fminf(__ldg(p.sink + head + row + 8 * i) * LOG2_E, -LOWEST);
            softmax.maximum[i] = fmaxf(sink, LOWEST);
            // One thread of the row's eight counts the sink.
            softmax.sum[i] = GROUP_ID == 0 && c == 0 && rank == 0 ? exp2_fast(sink - softmax.maximum[i]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        barrier_wait(barriers.query_ready(), query_parity);
        query_parity ^= 1;

        if (GROUP_ID == 0) {
            for (int pair = 0; pair < pairs; pair++) {
                if (pair == 0) {
                    barrier_wait(barriers.ready(0, 0), parity);
                    fence_to_matrix_units();
                    score_half(s, query, my_keys, 0, true);
                    barrier_wait(barriers.ready(0, 1), parity);
                    fence_to_matrix_units();
                    score_half(s, query, my_keys, 1, false);
                    wgmma_wait<0>();
                    fence_registers(s);
                }
                if (pair == pairs - 1) arrive_warp(barriers.query_free(), lane);
                float top[2];
                softmax.logits(s, bias, scale, c, top);
                top[0] = fmaxf(top[0], softmax.maximum[0]);
                top[1] = fmaxf(top[1], softmax.maximum[1]);
                softmax.step(s, top, factor);
                if (c == 0) {
                    shared_maximum[row] = top[0];
                    shared_maximum[row + 8] = top[1];
                }
                named_arrive(MAXIMUM_0, 256);
                rescale(o, factor);
                fence_registers(o);
                pack_probabilities(s, one, words);
                add_values(o, words, values_0);

                named_sync(MAXIMUM_1, 256);
                float next[2] = {shared_maximum[row], shared_maximum[row + 8]};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    factor[i] = exp2_fast(softmax.maximum[i] - next[i]);
                    softmax.maximum[i] = next[i];
                    softmax.sum[i] *= factor[i];
                }
                u32 rescaled[16];
                pack_probabilities(s, factor, rescaled);
                put_words(mine, rescaled);
                named_arrive(PROBABILITIES_0, 256);

                wgmma_wait<0>();
                fence_registers(o);
                arrive_warp(barriers.free(0, 0), lane);
                rescale(o, factor);
                fence_registers(o);
                named_sync(PROBABILITIES_1, 256);
                get_words(other, words);
                barrier_wait(barriers.ready(1, 0), parity);
                fence_to_matrix_units();
                add_values(o, words, values_1);
                parity ^= 1;
                if (pair + 1 < pairs) {
                    barrier_wait(barriers.ready(0, 0), parity);
                    fence_to_matrix_units();
                    score_half(s, query, my_keys, 0, true);
                    wgmma_wait<1>();
                    arrive_warp(barriers.free(1, 0), lane);
                    barrier_wait(barriers.ready(0, 1), parity);
                    fence_to_matrix_units();
                    score_half(s, query, my_keys, 1, false);
                    wgmma_wait<0>();
                    fence_registers(s);
                    fence_registers(o);
                } else {
                    wgmma_wait<0>();
                    fence_registers(o);
                    arrive_warp(barriers.free(1, 0), lane);
                }
            }
        } else {
            for (int pair = 0; pair < pairs; pair++) {
                barrier_wait(barriers.ready(1, 1), parity);
                fence_to_matrix_units();
                score_half(s, query, my_keys, 1, true);
                barrier_wait(barriers.ready(1, 0), parity);
                fence_to_matrix_units();
                score_half(s, query, my_keys, 0, false);
                wgmma_wait<0>();
                fence_registers(s);
                if (pair == pairs - 1) arrive_warp(barriers.query_free(), lane);
                float top[2];
                softmax.logits(s, bias, scale, c, top);
                named_sync(MAXIMUM_0, 256);
                top[0] = fmaxf(top[0], shared_maximum[row]);
                top[1] = fmaxf(top[1], shared_maximum[row + 8]);
                __syncwarp();
                if (c == 0) {
                    shared_maximum[row] = top[0];
                    shared_maximum[row + 8] = top[1];
                }
                named_arrive(MAXIMUM_1, 256);
                softmax.step(s, top, factor);
                rescale(o, factor);
                fence_registers(o);
                pack_probabilities(s, one, words);
                add_values(o, words, values_1);
                put_words(mine, words);
                named_arrive(PROBABILITIES_1, 256);

                named_sync(PROBABILITIES_0, 256);
                u32 theirs[16];
                get_words(other, theirs);
                barrier_wait(barriers.ready(0, 1), parity);
                fence_to_matrix_units();
                add_values(o, theirs, values_0);
                wgmma_wait<1>();
                arrive_warp(barriers.free(1, 1), lane);
                wgmma_wait<0>();
                fence_registers(o);
                arrive_warp(barriers.free(0, 1), lane);
                parity ^= 1;
            }
        }

        float total[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            softmax.sum[i] = quad_sum(softmax.sum[i]);
            if (c == 0) sums[GROUP_ID * 64 + row + 8 * i] = softmax.sum[i];
        }
        named_sync(SUMS_READY, 256);
#pragma unroll
        for (int i = 0; i < 2; i++) total[i] = sums[row + 8 * i] + sums[64 + row + 8 * i];
        write_output<GROUP_ID>(o, softmax.maximum, total, p.out, token, head, p.angles, shared, rank);
    }
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(384, 1) sparse_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const Barriers barriers = {shared_address(shared + BARRIERS)};
    if (threadIdx.x == 0) {
        barrier_init(barriers.query_ready(), 128);
        barrier_init(barriers.query_free(), 8);
        for (int tile = 0; tile < 2; tile++) {
            for (int half = 0; half < 2; half++) {
                barrier_init(barriers.ready(tile, half), 128 + (tile == half ? 16 : 0));  // the bias arrives with it
                barrier_init(barriers.free(tile, half), 4);
            }
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int rank = blockIdx.x % SPLIT, items = p.tokens * BLOCKS_A_TOKEN;
    const int first = blockIdx.x / SPLIT, step = gridDim.x / SPLIT;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the same for a warp
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(p, barriers, shared, first, items, step, rank);
        if (SPLIT > 1) cluster_sync_twice();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        if (group == 0) consume<0>(p, barriers, shared, first, items, step, rank);
        else consume<1>(p, barriers, shared, first, items, step, rank);
    }
}
