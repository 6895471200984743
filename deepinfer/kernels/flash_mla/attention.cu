// Token-level sparse attention on Hopper: 64 heads of one query token a block, keys gathered row by row, keys = values.
//
// Two consumer warpgroups and one that fills key tiles of 64 rows. Tiles go in pairs (0, 1): group 0 scores tile 0, group
// 1 tile 1, and each owns 256 of the 512 output columns, so that both read both tiles as values. Probabilities travel
// through shared memory in register layout. Group 1 is half a pair behind: its products run during the softmax of group
// 0 and the other way round (the "seesaw" of FlashMLA's published design). Half a tile (256 columns) is refilled as soon
// as its last reader is done: with 64 KiB of queries there is room for two tiles only.
//
// Specialised by macros: HEADS, WINDOW_FORMAT, WINDOW_PAGE, LATENT_FORMAT, LATENT_PAGE (rows.cuh), SPLIT (blocks that share
// a token's keys: a cluster), Q_NORM, ROPE, OUT_FP8.

#include "epilogue.cuh"
#include "query.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

#define BLOCK_HEADS 64
#define BLOCKS_A_TOKEN (HEADS / BLOCK_HEADS)
#define UNPACKS (WINDOW_FORMAT > ROWS_BF16 || LATENT_FORMAT > ROWS_BF16)
#define PACKED_ONLY (WINDOW_FORMAT != ROWS_BF16 && LATENT_FORMAT != ROWS_BF16)
#define LATENT_OR_ANY (LATENT_FORMAT == ROWS_NONE ? ROWS_BF16 : LATENT_FORMAT)
#define KEY_SCALE (PACKED_ONLY ? UNPACK_SCALE : 1.0f)  // keys in shared memory are the true ones over this
#define LOG2_E 1.4426950408889634f
#define LAZY 8.0f
#define LOWEST -1e30f  // a finite "no maximum yet"

// Byte offsets in shared memory.
#define KEYS 0  // two tiles of two halves
#define QUERY (4 * HALF_TILE_BYTES)
#define PROBABILITIES (QUERY + 65536)            // of tile 0 and tile 1, 16 words a thread
#define BIAS (PROBABILITIES + 2 * 8192)          // float [2][64]: 0, or -inf for a key that is none
#define MAXIMUM (BIAS + 512)                     // float [2][64]: the rows' maximum after tile 0 and after tile 1
#define SUMS (MAXIMUM + 512)                     // float [2][64]
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

enum NamedBarrier { PROBABILITIES_0 = 1, PROBABILITIES_1, SUMS_READY, QUERY_READY };

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
    DEVICE void load(PackedRow& raw, const Params& p, int i, int half) const {
        int lane = threadIdx.x % 8;
        if (window) load_row<WINDOW_FORMAT, WINDOW_PAGE>(raw, p.window, rows.slot[i], half, lane);
        else load_row<LATENT_OR_ANY, LATENT_PAGE>(raw, p.latent, rows.slot[i], half, lane);
    }
    DEVICE void store(const PackedRow& raw, const Params& p, int i, u32 target, int half) const {
        int lane = threadIdx.x % 8;
        if (window) store_row<WINDOW_FORMAT, WINDOW_PAGE, PACKED_ONLY>(raw, p.window, rows.slot[i], target, half, lane);
        else store_row<LATENT_OR_ANY, LATENT_PAGE, PACKED_ONLY>(raw, p.latent, rows.slot[i], target, half, lane);
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

// Packed rows come through registers, one half tile ahead. That covers the latency of L2, not that of memory: so all of a
// token's rows are fetched into L2 when its turn comes.
DEVICE void prefetch_rows(const Params& p, const Tiles& tiles, int token) {
    if (!UNPACKS) return;
    const int row = threadIdx.x % 128 / 2, part = threadIdx.x % 2;
#pragma unroll 4
    for (int tile = 0; tile < tiles.count; tile++) {
        const int at = tiles.first + tile;
        const bool window = LATENT_FORMAT == ROWS_NONE || at < tiles.window;
        const RowSource& source = window ? p.window : p.latent;
        const int slot = slot_at(source, token, (window ? at : at - tiles.window) * 64 + row);
        const int bytes = window ? ROW_BYTES(WINDOW_FORMAT) : ROW_BYTES(LATENT_FORMAT);
        if (slot < 0) continue;
        const u8* start = window ? row_address<WINDOW_PAGE>(source, slot) : row_address<LATENT_PAGE>(source, slot);
        for (int i = part * 128; i < bytes + 127; i += 256) prefetch_to_l2(start + min(i, bytes - 1));
    }
}

DEVICE void produce(const Params& p, const TensorMap& query_map, const Barriers& barriers, u8* shared, int first_item,
                    int items, int step, int rank) {
    const int lane = threadIdx.x % 8, row = threadIdx.x % 128 / 8;
    const u32 keys = shared_address(shared + KEYS) + row * 128 + ((lane ^ row % 8) << 4);
    const Tiles tiles(p, rank);
    u32 parity = 1, query_parity = !QUERY_IS_CHANGED;  // at parity 1 the first wait returns at once: nothing is in use
    for (int item = first_item; item < items; item += step) {
        const int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
        Filling next[2];
        next[0].find(p, tiles, token, 0);
        next[1].find(p, tiles, token, 1);
        if (!QUERY_IS_CHANGED || item != first_item) {
            barrier_wait(barriers.query_free(), query_parity);
            query_parity ^= 1;
            const u32 target = shared_address(shared + QUERY);
            if (QUERY_IS_CHANGED) change_query<128>(p.query, p.angles, token, head, target, barriers.query_ready());
            else copy_query(query_map, token, head, target, barriers.query_ready());
        }
        PackedRow raw[ROWS_A_THREAD];
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++) next[0].load(raw[i], p, i, 0);
        prefetch_rows(p, tiles, token);
        const int later = item + step;
        if (later < items) prefetch_query(p.query, later / BLOCKS_A_TOKEN, later % BLOCKS_A_TOKEN * BLOCK_HEADS);
        for (int pair = 0; pair < tiles.pairs(); pair++) {
            const Filling now[2] = {next[0], next[1]};
            const bool more = pair + 1 < tiles.pairs();
            if (more) {  // early: the slots' latency passes behind the copies
                next[0].find(p, tiles, token, 2 * pair + 2);
                next[1].find(p, tiles, token, 2 * pair + 3);
            }
            // In the order in which the consumers need and free halves: (0, 0), (1, 1), (0, 1), (1, 0).
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int tile = i % 2, half = i == 1 || i == 2, half_after = i < 2;
                const Filling& following = i < 3 ? now[1 - tile] : next[0];
                const u32 target = keys + (tile * 2 + half) * HALF_TILE_BYTES, ready = barriers.ready(tile, half);
                barrier_wait(barriers.free(tile, half), parity);
                if (tile == half) now[tile].write_bias((float*)(shared + BIAS) + tile * 64, ready);
#pragma unroll
                for (int j = 0; j < ROWS_A_THREAD; j++) {
                    now[tile].store(raw[j], p, j, target + j * 2048, half);
                    if (i < 3 || more) following.load(raw[j], p, j, half_after);
                }
                now[tile].announce_half(ready);
            }
            parity ^= 1;
        }
    }
}

// ------------------------------------------------------------------ consumers

// s += query x keys^T over one half of the 512 dimensions.
DEVICE void score_half(float (&s)[32], u32 query, u32 keys, int half, bool first) {
    query = hidden(query), keys = hidden(keys);
    if (first) fence_registers(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const u32 offset = (half * HALF_TILE_BYTES + k / 4 * SUB_TILE_BYTES + k % 4 * 32) / 16;
        wgmma_64x64(s, DESCRIPTOR_UPPER | query + offset, DESCRIPTOR_UPPER | keys + offset, !(first && k == 0));
    }
    wgmma_commit();
}

// o += probabilities [64 x 64] x values [64 x 256].
DEVICE void add_values(float (&o)[128], u32 (&probabilities)[16], u32 values) {
    values = hidden(values);
    fence_registers(probabilities);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 a[4] = {probabilities[4 * k], probabilities[4 * k + 1], probabilities[4 * k + 2], probabilities[4 * k + 3]};
        wgmma_64x256(o, a, DESCRIPTOR_UPPER | values + k * 2048 / 16);
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

// What a thread of a consumer group keeps of two rows: r and r + 8. Logits are in units of log 2.
struct Softmax {
    float maximum[2], sum[2];

    // A row's maximum follows a new one only if that is LAZY above it: numerators up to 2^LAZY are as good, and most
    // tiles then need no rescaling. Returns the factor for what was summed before.
    DEVICE float raise(int i, float top) {
        float next = top > maximum[i] + LAZY ? top : maximum[i];
        return move(i, next);
    }
    DEVICE float move(int i, float next) {
        float factor = exp2_fast(maximum[i] - next);
        maximum[i] = next;
        sum[i] *= factor;
        return factor;
    }
    // s: products to numerators; absent keys have a bias of -inf.
    DEVICE void step(float (&s)[32], const float* bias, float scale, int c, float (&factor)[2]) {
        float top[2] = {LOWEST, LOWEST};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 b = *(const float2*)(bias + 8 * j + 2 * c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[4 * j + i] = fmaf(s[4 * j + i], scale, i % 2 ? b.y : b.x);
                top[i / 2] = fmaxf(top[i / 2], s[4 * j + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) factor[i] = raise(i, quad_max(top[i]));
#pragma unroll
        for (int j = 0; j < 32; j++) {
            s[j] = exp2_fast(s[j] - maximum[j / 2 % 2]);
            sum[j / 2 % 2] += s[j];
        }
    }
};

DEVICE void rescale(float (&o)[128], const float (&factor)[2]) {
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < 128; j++) o[j] *= factor[j / 2 % 2];
    }
    fence_registers(o);
}

// Probabilities as the left operand of a product: words 4 k .. 4 k + 3 are those of keys 16 k .. 16 k + 15.
DEVICE void pack_probabilities(const float (&s)[32], u32 (&words)[16]) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
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

DEVICE void put_maximum(float* target, const Softmax& softmax, int row, int c) {
    if (c == 0) target[row] = softmax.maximum[0], target[row + 8] = softmax.maximum[1];
}

// Scores of the group's own tile, left running: the half that arrives first comes first.
template <int GROUP_ID>
DEVICE void score_tile(float (&s)[32], u32 query, u32 keys, const Barriers& barriers, u32 parity) {
    barrier_wait(barriers.ready(GROUP_ID, GROUP_ID), parity);
    score_half(s, query, keys, GROUP_ID, true);
    barrier_wait(barriers.ready(GROUP_ID, 1 - GROUP_ID), parity);
    score_half(s, query, keys, 1 - GROUP_ID, false);
}
DEVICE void wait_for_query(const Barriers& barriers, u32& query_parity) {
    barrier_wait(barriers.query_ready(), query_parity);
    query_parity ^= 1;
}

#include "combine.cuh"

template <int GROUP_ID>
DEVICE void consume(const Params& p, const Barriers& barriers, u8* shared, int first_item, int items, int step, int rank) {
    const int thread = threadIdx.x % 128, lane = thread % 32, c = lane % 4, row = thread / 32 * 16 + lane / 4;
    const float scale = p.scale * LOG2_E * KEY_SCALE;
    float* shared_maximum = (float*)(shared + MAXIMUM);
    const float* bias = (const float*)(shared + BIAS) + GROUP_ID * 64;
    u8* mine = shared + PROBABILITIES + GROUP_ID * 8192 + thread * 16;
    u8* other = shared + PROBABILITIES + (1 - GROUP_ID) * 8192 + thread * 16;
    const u32 keys = shared_address(shared + KEYS);
    const u32 query = tile_word(shared_address(shared + QUERY), 0);
    const u32 my_keys = tile_word(keys + GROUP_ID * 2 * HALF_TILE_BYTES, 0);
    const u32 values_0 = tile_word(keys + GROUP_ID * HALF_TILE_BYTES, SUB_TILE_BYTES);
    const u32 values_1 = tile_word(keys + (2 + GROUP_ID) * HALF_TILE_BYTES, SUB_TILE_BYTES);
    const Tiles tiles(p, rank);
    const int pairs = tiles.pairs();
    u32 parity = 0, query_parity = 0;

    float o[128], s[32], factor[2];
    u32 words[16];
    if (QUERY_IS_CHANGED) {
        const int token = first_item / BLOCKS_A_TOKEN, head = first_item % BLOCKS_A_TOKEN * BLOCK_HEADS;
        change_query<256>(p.query, p.angles, token, head, shared_address(shared + QUERY), 0);
        named_sync(QUERY_READY, 256);
    }
    if (GROUP_ID == 0) {
        if (!QUERY_IS_CHANGED) wait_for_query(barriers, query_parity);
        score_tile<0>(s, query, my_keys, barriers, parity);
        wgmma_wait<0>();
        fence_registers(s);
    }
    for (int item = first_item; item < items; item += step) {
        const int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
        Softmax softmax;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sink = fminf(__ldg(p.sink + head + row + 8 * i) * LOG2_E, -LOWEST);
            softmax.maximum[i] = fmaxf(sink, LOWEST);
            // One thread of the row's eight counts the sink.
            softmax.sum[i] = GROUP_ID == 0 && c == 0 && rank == 0 ? exp2_fast(sink - softmax.maximum[i]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        if (GROUP_ID == 0) {
            for (int pair = 0; pair < pairs; pair++) {
                if (pair == pairs - 1) arrive_warp(barriers.query_free(), lane);
                softmax.step(s, bias, scale, c, factor);
                pack_probabilities(s, words);
                put_words(mine, words);
                put_maximum(shared_maximum, softmax, row, c);
                named_arrive(PROBABILITIES_0, 256);
                rescale(o, factor);
                add_values(o, words, values_0);

                named_sync(PROBABILITIES_1, 256);
                wgmma_wait<0>();
                fence_registers(o);
                arrive_warp(barriers.free(0, 0), lane);
                factor[0] = softmax.move(0, shared_maximum[64 + row]);
                factor[1] = softmax.move(1, shared_maximum[64 + row + 8]);
                rescale(o, factor);
                get_words(other, words);
                barrier_wait(barriers.ready(1, 0), parity);
                add_values(o, words, values_1);
                parity ^= 1;
                if (pair + 1 < pairs) {
                    barrier_wait(barriers.ready(0, 0), parity);
                    score_half(s, query, my_keys, 0, true);
                    wgmma_wait<1>();
                    arrive_warp(barriers.free(1, 0), lane);
                    barrier_wait(barriers.ready(0, 1), parity);
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
                if (pair == 0 && !(QUERY_IS_CHANGED && item == first_item)) wait_for_query(barriers, query_parity);
                score_tile<1>(s, query, my_keys, barriers, parity);
                named_sync(PROBABILITIES_0, 256);  // tile 0's values while our scores are on their way
                factor[0] = softmax.move(0, shared_maximum[row]);
                factor[1] = softmax.move(1, shared_maximum[row + 8]);
                rescale(o, factor);
                get_words(other, words);
                barrier_wait(barriers.ready(0, 1), parity);
                add_values(o, words, values_0);
                wgmma_wait<1>();
                fence_registers(s);
                if (pair == pairs - 1) arrive_warp(barriers.query_free(), lane);
                softmax.step(s, bias, scale, c, factor);
                u32 next_words[16];
                pack_probabilities(s, next_words);
                put_words(mine, next_words);
                put_maximum(shared_maximum + 64, softmax, row, c);
                named_arrive(PROBABILITIES_1, 256);

                wgmma_wait<0>();
                fence_registers(o);
                arrive_warp(barriers.free(0, 1), lane);
                rescale(o, factor);
                add_values(o, next_words, values_1);
                wgmma_wait<0>();
                fence_registers(o);
                arrive_warp(barriers.free(1, 1), lane);
                parity ^= 1;
            }
        }

        if (GROUP_ID == 0 && item + step < items) {  // the next token's first scores run while this one is written
            wait_for_query(barriers, query_parity);
            score_tile<0>(s, query, my_keys, barriers, parity);
            write_output<GROUP_ID>(o, softmax.maximum, softmax.sum, p.out, token, head, p.angles, shared, rank);
            wgmma_wait<0>();
            fence_registers(s);
        } else {
            write_output<GROUP_ID>(o, softmax.maximum, softmax.sum, p.out, token, head, p.angles, shared, rank);
        }
    }
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(384, 1) 
sparse_attention(const __grid_constant__ Params p, const __grid_constant__ TensorMap query_map) {
    extern __shared__ __align__(1024) u8 shared[];
    const Barriers barriers = {shared_address(shared + BARRIERS)};
    if (threadIdx.x == 0) {
        barrier_init(barriers.query_ready(), QUERY_ARRIVALS);
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
    // Of the launch's 384 x 168 registers, the consumers get more: 2 x 128 x 208 + 128 x 88.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the same for a warp
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(88));
        produce(p, query_map, barriers, shared, first, items, step, rank);
        if (SPLIT > 1) cluster_sync_twice();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(208));
        if (group == 0) consume<0>(p, barriers, shared, first, items, step, rank);
        else consume<1>(p, barriers, shared, first, items, step, rank);
    }
}
