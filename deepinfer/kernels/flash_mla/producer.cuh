// The warpgroup that fills key tiles, half a tile at a time, in the order in which the consumers need and free halves.
#pragma once

#include "layout.cuh"

// Where a producer's thread writes in the first half tile.
struct Targets {
    u32 copies, chunks;  // BF16: its chunk of row t / 8; packed: the first of its four chunks of its first row
    DEVICE explicit Targets(u32 keys) {
        const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 8, unit = thread / 8 % 4;
        copies = keys + thread / 8 * 128 + ((thread ^ thread / 8) % 8 << 4);
        chunks = keys + unit / 2 * SUB_TILE_BYTES + row * 128 + ((unit % 2 * 4 ^ row % 8) << 4);
    }
};

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
