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

#include "producer.cuh"
#include "softmax.cuh"

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

// Copied rows (cp.async) are written through the generic proxy, products read through the asynchronous one. A group waits
// for its own tile alone: for the other's, the other has, before it handed over its probabilities.
DEVICE void wait_for_half(u32 ready, u32 parity) {
    barrier_wait(ready, parity);
    if (COPIES_ROWS) fence_to_copies();
}

// Scores of the group's own tile, left running: the half that arrives first comes first.
template <int GROUP_ID>
DEVICE void score_tile(float (&s)[32], u32 query, u32 keys, const Barriers& barriers, u32 parity) {
    wait_for_half(barriers.ready(GROUP_ID, GROUP_ID), parity);
    score_half(s, query, keys, GROUP_ID, true);
    wait_for_half(barriers.ready(GROUP_ID, 1 - GROUP_ID), parity);
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
                add_values(o, words, values_1);
                parity ^= 1;
                if (pair + 1 < pairs) {
                    wait_for_half(barriers.ready(0, 0), parity);
                    score_half(s, query, my_keys, 0, true);
                    wgmma_wait<1>();
                    arrive_warp(barriers.free(1, 0), lane);
                    wait_for_half(barriers.ready(0, 1), parity);
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

        const bool more = SPLIT == 1 && item + step < items;  // a cluster has one item
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
            cluster_sync();
            cluster_sync();
        }
    } else {
        more_registers<208>();
        if (group == 0) consume<0>(p, barriers, shared, first, items, step, rank);
        else consume<1>(p, barriers, shared, first, items, step, rank);
    }
}
