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

#define BLOCK_HEADS 64
#define BLOCKS_A_TOKEN (HEADS / BLOCK_HEADS)

#include "rows.cuh"
#include "query.cuh"
#include "epilogue.cuh"
#include "wgmma.cuh"

#define UNPACKS (WINDOW_FORMAT > ROWS_BF16 || LATENT_FORMAT > ROWS_BF16)
#define PACKED_ONLY (WINDOW_FORMAT != ROWS_BF16 && LATENT_FORMAT != ROWS_BF16)
#define LATENT_OR_ANY (LATENT_FORMAT == ROWS_NONE ? WINDOW_FORMAT : LATENT_FORMAT)
#define BIAS_THREADS 32
#define SLOTS (WINDOW_FORMAT == ROWS_BF16 || LATENT_FORMAT == ROWS_BF16 ? 4 : 2)
#define KEY_SCALE (PACKED_ONLY ? UNPACK_SCALE : 1.0f)  // keys in shared memory are the true ones over this
#define LOG2_E 1.4426950408889634f
#define LAZY 8.0f
#define LOWEST -1e30f  // a finite "no maximum yet"

// Byte offsets in shared memory.
#define KEYS 0  // two tiles of two halves
#define QUERY (4 * HALF_TILE_BYTES)
#define PROBABILITIES (QUERY + 65536)            // of tile 0 and tile 1, 16 words a thread
#define BIAS (PROBABILITIES + 2 * 8192)          // float [2][64]: 0, or -inf for a key that is none
#define MAXIMUM (BIAS + 512)                     // float2 [2][128]: of a thread's rows, after tile 0 and after tile 1
#define SUMS (MAXIMUM + 2048)                    // float [2][64]
#define PEER_STATES (SUMS + 512)                 // float [SPLIT][2][64]: maximum and sum of every block of the cluster
#define QUERY_FACTORS (PEER_STATES + SPLIT * 512)  // float [64]
#define BARRIERS (QUERY_FACTORS + 256)
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

// Those that end in 0 have a second one for the other group behind them.
enum NamedBarrier { SUMS_0 = 1, QUERY_0 = 3, RESCALE_0 = 5 };

struct Barriers {
    u32 base;
    DEVICE u32 query_ready() const { return base; }
    DEVICE u32 query_free() const { return base + 8; }
    DEVICE u32 ready(int tile, int half) const { return base + 16 + (tile * 2 + half) * 8; }
    DEVICE u32 free(int tile, int half) const { return base + 48 + (tile * 2 + half) * 8; }
    // From one consumer group to the other, thread by thread: named barriers are not followed by racecheck.
    DEVICE u32 probabilities(int tile) const { return base + 80 + tile * 8; }
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

// Where a producer's thread writes in the first half tile.
struct Targets {
    u32 copies, chunks;  // BF16: its chunk of row t / 8; packed: the first of its four chunks of its first row
    DEVICE explicit Targets(u32 keys) {
        const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 8, unit = thread / 8 % 4;
        copies = keys + thread / 8 * 128 + ((thread ^ thread / 8) % 8 << 4);
        chunks = keys + unit / 2 * SUB_TILE_BYTES + row * 128 + ((unit % 2 * 4 ^ row % 8) << 4);
    }
};

// Both groups wait for each other. Each at a barrier of its own: one that is waited for in two places of the code is not
// understood by compute-sanitizer.
template <int GROUP_ID>
DEVICE void meet(int first) {
    named_arrive(first + 1 - GROUP_ID, 256);
    named_sync(first + GROUP_ID, 256);
}

DEVICE void arrive_warp(u32 barrier, int lane) {  // 8 or 4 arrivals, one a warp
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

// ------------------------------------------------------------------ producer

// A pair of tiles of an item; pairs of all items of this block follow each other.
struct Pair {
    int item, index;
    DEVICE Pair next(int pairs, int step) const {
        return index + 1 < pairs ? Pair{item, index + 1} : Pair{item + step, 0};
    }
};

// A thread's rows of one tile: their slots (-1: no row), and which cache they are in.
struct Rows {
    int slot[SLOTS];
    bool window;

    DEVICE void find(const Params& p, const Tiles& tiles, const Pair& pair, int items, int index) {
        const int token = pair.item / BLOCKS_A_TOKEN, tile = pair.index * 2 + index;
        const bool beyond = tile >= tiles.count || pair.item >= items;
        const int at = tiles.first + tile;
        window = LATENT_FORMAT == ROWS_NONE || at < tiles.window;
        if (window) find_in<WINDOW_FORMAT>(p.window, token, beyond ? p.window.count : at * 64);
        else find_in<LATENT_OR_ANY>(p.latent, token, beyond ? p.latent.count : (at - tiles.window) * 64);
    }
    template <int FORMAT>
    DEVICE void find_in(const RowSource& source, int token, int first) {
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD(FORMAT); i++) slot[i] = slot_at(source, token, first + tile_row<FORMAT>(i));
    }
    // Row i's packed bytes of one half, to registers.
    DEVICE void load(Unit (&units)[2], const Params& p, int i, int half) const {
        if (window) load_from<WINDOW_FORMAT, WINDOW_PAGE>(units, p.window, i, half);
        else load_from<LATENT_OR_ANY, LATENT_PAGE>(units, p.latent, i, half);
    }
    template <int FORMAT, int PAGE>
    DEVICE void load_from(Unit (&units)[2], const RowSource& source, int i, int half) const {
        if (FORMAT == ROWS_BF16) return;
        units[0] = units[1] = Unit{};
        if (slot[i] >= 0) load_units<FORMAT>(units, row_address<PAGE>(source, slot[i]), half);
    }
    // What is added to the 64 logits of the tile, by BIAS_THREADS threads.
    DEVICE void write_bias(float* bias, u32 ready) const {
        if (window) write_bias_of<WINDOW_FORMAT>(bias, ready);
        else write_bias_of<LATENT_OR_ANY>(bias, ready);
    }
    template <int FORMAT>
    DEVICE void write_bias_of(float* bias, u32 ready) const {
        const int part = FORMAT == ROWS_BF16 ? threadIdx.x % 8 : threadIdx.x / 8 % 4;  // of the threads that have the row
        if (part >= ROWS_A_THREAD(FORMAT) / 2) return;
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD(FORMAT); i++)
            if (i / 2 == part) bias[tile_row<FORMAT>(i)] = slot[i] >= 0 ? 0.0f : -__int_as_float(0x7F800000);
        barrier_arrive(ready);
    }
};

// Half a tile: row by row from registers, which then take the row's successor in the half that follows; or by copies.
template <int FORMAT, int PAGE>
DEVICE void fill_half(const Rows& rows, const Rows& following, Unit (&raw)[2][2], const Params& p, const RowSource& source,
                      const Targets& targets, u32 offset, int half, int half_after, u32 ready) {
    if (FORMAT == ROWS_BF16) {
        const u64 policy = keep_policy();
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD(ROWS_BF16); i++) {
            const u8* row = row_address<PAGE>(source, max(rows.slot[i], 0));
            copy_half_row(targets.copies + offset + i * 2048, row, rows.slot[i] >= 0, half, policy);
        }
        barrier_arrive_on_copies(ready);
#pragma unroll
        for (int i = 0; i < 2; i++) following.load(raw[i], p, i, half_after);
    } else {
        u32 target[4];
#pragma unroll
        for (int k = 0; k < 4; k++) target[k] = (targets.chunks ^ k << 4) + offset;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            store_unit<FORMAT, PACKED_ONLY>(raw[i][0], target, i * 1024);
            store_unit<FORMAT, PACKED_ONLY>(raw[i][1], target, i * 1024 + 2 * SUB_TILE_BYTES);
            following.load(raw[i], p, i, half_after);
        }
        fence_to_copies();
        barrier_arrive(ready);
    }
}

DEVICE void produce(const Params& p, const TensorMap& query_map, const Barriers& barriers, u8* shared, int first_item,
                    int items, int step, int rank) {
    const Targets targets(shared_address(shared + KEYS));
    const Tiles tiles(p, rank);
    const int pairs = tiles.pairs();
    u32 parity = 1, query_parity = 1;  // at parity 1 the first wait returns at once: nothing is in use
    Pair pair = {first_item, 0};
    Rows rows[2];
    rows[0].find(p, tiles, pair, items, 0);
    rows[1].find(p, tiles, pair, items, 1);
    constexpr int UNROLLED_STEPS = UNPACKS ? 1 : 4;
    Unit raw[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) rows[0].load(raw[i], p, i, 0);
    while (pair.item < items) {
        const Pair after = pair.next(pairs, step);
        Rows next[2];  // early: the slots' latency passes behind this pair
        next[0].find(p, tiles, after, items, 0);
        next[1].find(p, tiles, after, items, 1);
        if (pair.index == 0) {
            barrier_wait(barriers.query_free(), query_parity);
            query_parity ^= 1;
            copy_query(query_map, pair.item, shared_address(shared + QUERY), barriers.query_ready());
            if (pair.item + step < items) prefetch_query(p.query, pair.item + step);
        }
        // In the order in which the consumers need and free halves: (0, 0), (1, 1), (0, 1), (1, 0).
#pragma unroll (UNROLLED_STEPS)
        for (int i = 0; i < 4; i++) {
            const int tile = i & 1, half = (i ^ i >> 1) & 1, half_after = i < 2;
            const Rows now = tile ? rows[1] : rows[0], following = i == 3 ? next[0] : tile ? rows[0] : rows[1];
            const u32 offset = (tile * 2 + half) * HALF_TILE_BYTES, ready = barriers.ready(tile, half);
            barrier_wait(barriers.free(tile, half), parity);
            if (i < 2) now.write_bias((float*)(shared + BIAS) + tile * 64, ready);
            if (now.window) fill_half<WINDOW_FORMAT, WINDOW_PAGE>(now, following, raw, p, p.window, targets, offset, half, half_after, ready);
            else fill_half<LATENT_OR_ANY, LATENT_PAGE>(now, following, raw, p, p.latent, targets, offset, half, half_after, ready);
        }
        rows[0] = next[0];
        rows[1] = next[1];
        pair = after;
        parity ^= 1;
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
    DEVICE void step(float (&s)[32], const float* bias, const float (&scale)[2], int c, float (&factor)[2]) {
        float top[2] = {LOWEST, LOWEST};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 b = *(const float2*)(bias + 8 * j + 2 * c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[4 * j + i] = fmaf(s[4 * j + i], scale[i / 2], i % 2 ? b.y : b.x);
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

// All warps of a group or none: the compiler puts waits for running products into the branch.
template <int GROUP_ID>
DEVICE void rescale(float (&o)[128], const float (&factor)[2]) {
    const bool any = named_any(RESCALE_0 + GROUP_ID, 128, factor[0] != 1.0f || factor[1] != 1.0f);
    if (__any_sync(~0u, any)) {  // which tells the compiler that it is the same for a warp
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

DEVICE void put_maximum(float2* target, const Softmax& softmax) {
    *target = make_float2(softmax.maximum[0], softmax.maximum[1]);
}
DEVICE void follow_maximum(Softmax& softmax, const float2* source, float (&factor)[2]) {
    const float2 next = *source;
    factor[0] = softmax.move(0, next.x);
    factor[1] = softmax.move(1, next.y);
}

// Scores of the group's own tile, left running: the half that arrives first comes first.
template <int GROUP_ID>
DEVICE void score_tile(float (&s)[32], u32 query, u32 keys, const Barriers& barriers, u32 parity) {
    barrier_wait(barriers.ready(GROUP_ID, GROUP_ID), parity);
    score_half(s, query, keys, GROUP_ID, true);
    barrier_wait(barriers.ready(GROUP_ID, 1 - GROUP_ID), parity);
    score_half(s, query, keys, 1 - GROUP_ID, false);
}
// Both groups come here for every token, and together change its query.
template <int GROUP_ID>
DEVICE void wait_for_query(const Params& p, const Barriers& barriers, u8* shared, int item, u32& query_parity) {
    barrier_wait(barriers.query_ready(), query_parity);
    query_parity ^= 1;
    if (!QUERY_IS_CHANGED) return;
    change_query(p.angles, item / BLOCKS_A_TOKEN, shared + QUERY, (float*)(shared + QUERY_FACTORS));
    meet<GROUP_ID>(QUERY_0);
}

#include "combine.cuh"

template <int GROUP_ID>
DEVICE void consume(const Params& p, const Barriers& barriers, u8* shared, int first_item, int items, int step, int rank) {
    const int thread = threadIdx.x % 128, lane = thread % 32, c = lane % 4, row = thread / 32 * 16 + lane / 4;
    const float* query_factors = (const float*)(shared + QUERY_FACTORS);
    float2* shared_maximum = (float2*)(shared + MAXIMUM) + thread;
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
    wait_for_query<GROUP_ID>(p, barriers, shared, first_item, query_parity);
    if (GROUP_ID == 0) {
        score_tile<0>(s, query, my_keys, barriers, parity);
        wgmma_wait<0>();
        fence_registers(s);
    }
    for (int item = first_item; item < items; item += step) {
        const int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
        Softmax softmax;
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[i] = p.scale * LOG2_E * KEY_SCALE * (Q_NORM ? query_factors[row + 8 * i] : 1.0f);
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
                put_maximum(shared_maximum, softmax);
                barrier_arrive(barriers.probabilities(0));
                rescale<GROUP_ID>(o, factor);
                add_values(o, words, values_0);

                barrier_wait(barriers.probabilities(1), parity);
                wgmma_wait<0>();
                fence_registers(o);
                barrier_arrive(barriers.free(0, 0));
                follow_maximum(softmax, shared_maximum + 128, factor);
                rescale<GROUP_ID>(o, factor);
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
                score_tile<1>(s, query, my_keys, barriers, parity);
                barrier_wait(barriers.probabilities(0), parity);  // tile 0's values while our scores are on their way
                follow_maximum(softmax, shared_maximum, factor);
                rescale<GROUP_ID>(o, factor);
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
                put_maximum(shared_maximum + 128, softmax);
                barrier_arrive(barriers.probabilities(1));

                wgmma_wait<0>();
                fence_registers(o);
                arrive_warp(barriers.free(0, 1), lane);
                rescale<GROUP_ID>(o, factor);
                add_values(o, next_words, values_1);
                wgmma_wait<0>();
                fence_registers(o);
                barrier_arrive(barriers.free(1, 1));
                parity ^= 1;
            }
        }

        const bool more = item + step < items;
        if (more) wait_for_query<GROUP_ID>(p, barriers, shared, item + step, query_parity);
        if (GROUP_ID == 0 && more) {  // the next token's first scores run while this one is written
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
        barrier_init(barriers.query_ready(), 1);
        barrier_init(barriers.query_free(), 8);
        for (int tile = 0; tile < 2; tile++) {
            barrier_init(barriers.probabilities(tile), 128);
            for (int half = 0; half < 2; half++) {
                const bool with_bias = tile == half;  // which is written and read thread by thread
                barrier_init(barriers.ready(tile, half), 128 + (with_bias ? BIAS_THREADS : 0));
                barrier_init(barriers.free(tile, half), with_bias ? 128 : 4);
            }
        }
        barrier_fence_init();
    }
    __syncthreads();
    const int rank = blockIdx.x % SPLIT, items = p.tokens * BLOCKS_A_TOKEN;
    const int first = blockIdx.x / SPLIT, step = gridDim.x / SPLIT;
    // Of the launch's 384 x 168 registers, the consumers get more: 2 x 128 x 208 + 128 x 88.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the same for a warp
    if (group == 2) {
        fewer_registers<88>();
        produce(p, query_map, barriers, shared, first, items, step, rank);
        if (SPLIT > 1) {  // write_output's two meetings of the cluster
            wait_for_copies();
            cluster_sync();
            cluster_sync();
        }
    } else {
        more_registers<208>();
        if (group == 0) consume<0>(p, barriers, shared, first, items, step, rank);
        else consume<1>(p, barriers, shared, first, items, step, rank);
    }
}
