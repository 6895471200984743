// What the roles of the attention kernel share: shared memory, parameters, barriers, the tiles of keys.
#pragma once

#define BLOCK_HEADS 64
#define BLOCKS_A_TOKEN (HEADS / BLOCK_HEADS)

#include "rows.cuh"
#include "query.cuh"
#include "epilogue.cuh"

#define UNPACKS (WINDOW_FORMAT > ROWS_BF16 || LATENT_FORMAT > ROWS_BF16)
#define COPIES_ROWS (WINDOW_FORMAT == ROWS_BF16 || LATENT_FORMAT == ROWS_BF16)
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
#define SHARES QUERY                             // from the query on, when it is done with: what peers send of their sums
#define SHARES_BYTES ((SPLIT - 1) * (256 / SPLIT) * 512)
#define PEER_STATES (SPLIT == 4 ? SHARES + SHARES_BYTES : SUMS + 512)  // float [SPLIT][2][64]: every block's maximum and sum
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
