// Grouped products of a mixture of experts: for each expert, its MXFP4 weights times the FP8 rows of its tokens.
//
// The weights are the rows of the tensor cores' product and come from registers, widened there; tokens are its columns, so
// that few tokens waste little. One warp feeds tiles of 128 columns into a ring with the bulk copy engine, four warpgroups
// share the weight rows. A tile has 256 weight rows and up to MAX_TOKENS tokens of one expert; blocks are persistent. For few
// tokens a warpgroup widens the weights of the next product and scales the sums of the one before (1 x 128) while one runs.
// For many that takes more registers than there are: each warpgroup does all in turn, and four warps a scheduler overlap. The
// weights' row scales follow at the end. With programmatic dependent launch weights are on their way while the kernel before
// still makes the tokens; it must not make the routing.
//
// GATE_UP: rows are 8 of w1 and 8 of w3 in turn; the result is SwiGLU, clamped, times the token's gate, as E4M3 rounded in
// groups of 32 and scaled 1 x 128. Else the result is BF16.
// Macros: GATE_UP, STAGES, MAX_TOKENS (32 or 80).

#define GROUPS 4  // warpgroups that multiply 64 rows each
#define MATH_THREADS (GROUPS * 128)
#define THREADS (MATH_THREADS + 128)
#define TOKEN_STEP 8

#include "fp4_weights.cuh"
#include "products.cuh"
#include "tma.cuh"

#define X_BYTES (MAX_TOKENS * 128)
#define X_SCALES (X_BYTES + TILE_BYTES)  // in a stage: tokens, weights, scales of 128 tokens
#define STAGE_BYTES ((X_SCALES + 512 + 1023) / 1024 * 1024)
#define STAGING (STAGES * STAGE_BYTES)
#define STAGING_ROW 144                  // bytes a token, padded against bank conflicts; only with GATE_UP
#if GATE_UP
#define MAXIMA STAGING                                  // [16 warps' features, tokens], before the result takes the room
#define FACTORS (STAGING + MAX_TOKENS * STAGING_ROW)    // [4 groups of 32, tokens] of two floats
#define NOTES (FACTORS + 4 * MAX_TOKENS * 8)
#else
#define NOTES (STAGING + GROUPS * MAX_TOKENS * 128)     // [GROUPS, tokens]
#endif
struct Params {
    const u8* weights;        // [experts, row blocks, k blocks] tiles
    const float* row_scales;  // [experts, row blocks x 256]
    const int *begins, *counts;  // rows of x of each expert; null: all rows are the only expert's
    const int* out_rows;      // row of the result for a row of x, or null; not with GATE_UP
    const float* gates;       // of rows of x; GATE_UP
    u8* out;
    float* out_scales;        // [columns / 128, out_scales_stride]; GATE_UP
    long long out_stride;     // bytes
    int out_scales_stride;
    int tokens, experts, row_blocks, k_blocks, columns;  // rows of x; columns of the result
    float limit;
};

#include "moe_tiles.cuh"
#include "moe_epilogue.cuh"

#define TABLES (NOTES + GROUPS * MAX_TOKENS * 4)
#define BARRIERS (TABLES + TABLES_BYTES)
static_assert(BARRIERS + STAGES * 16 <= 232448, "more shared memory than a block has");

struct Ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Columns of a product that holds `tokens`: sizes that multiply_tile is made for.
DEVICE int product_size(int tokens) {
    return tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 48 ? 48 : (tokens + 7) / 8 * 8;
}

DEVICE void feed(const Params& p, const TensorMap* x_map, const TensorMap* scale_map, const Tiles& tiles, u32 shared,
                 u32 full, u32 empty) {
    Ring ring;
    bool waited = false;
    for (int index = blockIdx.x; index < tiles.total; index += gridDim.x) {
        const Tile tile = tiles.of(p, index);
        if (tile.tokens <= 0) continue;
        const int size = product_size(tile.tokens);
        const u8* weights = p.weights + ((long long)tile.expert * p.row_blocks + tile.row_block) * p.k_blocks * TILE_BYTES;
        auto load_weights = [&](int k, int stage) {
            barrier_expect(full + stage * 8, TILE_BYTES + size * 128 + 512);
            load_bytes(shared + stage * STAGE_BYTES + X_BYTES, weights + (long long)k * TILE_BYTES, TILE_BYTES, full + stage * 8);
        };
        auto load_tokens = [&](int k, int stage) {
            const u32 arrived = full + stage * 8, target = shared + stage * STAGE_BYTES;
#pragma unroll 1
            for (int row = 0; row < size; row += 8) load_box(target + row * 128, x_map, k * 128, tile.first + row, arrived);
            load_box(target + X_SCALES, scale_map, tile.first, k, arrived);
        };
        int k = 0;
        if (!waited) {  // the kernel before makes the tokens: weights need not wait for it
            const int ahead = min(STAGES, p.k_blocks);
            for (int i = 0; i < ahead; i++) load_weights(i, i);
            wait_for_previous_kernel();
            waited = true;
            for (; k < ahead; k++, ring.next()) load_tokens(k, k);
        }
        for (; k < p.k_blocks; k++, ring.next()) {
            barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
            load_weights(k, ring.stage);
            load_tokens(k, ring.stage);
        }
    }
    if (!waited) wait_for_previous_kernel();  // this kernel ends after it
}

// This warp has read the buffer. Without a branch: behind one the compiler keeps no warp-wide values in uniform registers.
DEVICE void release_buffer(u32 release, int lane) {
    __syncwarp();
    barrier_arrive_if(lane == 0, release);
}

// Scales of the tokens 8 j + 2 c and the next.
template <int COUNT>
DEVICE void load_scales(float2 (&scales)[COUNT], u32 at) {
#pragma unroll
    for (int j = 0; j < COUNT; j++) scales[j] = load_float2(at + 32 * j);
}
// Sums of 128 columns of K, scaled.
template <int SUMS>
DEVICE void add_scaled(float (&total)[SUMS], const float (&sum)[SUMS], const float2 (&scales)[SUMS / 4]) {
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++) {
        total[4 * j] += sum[4 * j] * scales[j].x;
        total[4 * j + 1] += sum[4 * j + 1] * scales[j].y;
        total[4 * j + 2] += sum[4 * j + 2] * scales[j].x;
        total[4 * j + 3] += sum[4 * j + 3] * scales[j].y;
    }
}

// This warpgroup's rows of a stage's weights, as operands.
DEVICE void widen_rows(u32 shared, const Ring& ring, const Place& at, u32 (&a)[4][4]) {
    widen(load_codes(shared + ring.stage * STAGE_BYTES + X_BYTES, at.group, at.warp, at.lane), a);
#pragma unroll
    for (int s = 0; s < 4; s++) fence_registers(a[s]);
}

template <int SUMS>
DEVICE void start_product(float (&sum)[SUMS], u32 (&a)[4][4], u64 x) {
#pragma unroll
    for (int s = 0; s < 4; s++) fence_registers(a[s]);
    wgmma_fence();
    multiply_new(sum, a[0], x);
#pragma unroll
    for (int s = 1; s < 4; s++) multiply(sum, a[s], x + 2 * s, 1);
    wgmma_commit();
}

template <int SUMS>
DEVICE void wait_for_product(float (&sum)[SUMS], u32 (&a)[4][4]) {
    fence_registers(sum);
    wgmma_wait<0>();
    fence_registers(sum);
#pragma unroll
    for (int s = 0; s < 4; s++) fence_registers(a[s]);
}

template <int N>
DEVICE void multiply_tile(const Params& p, const Tile& tile, u32 shared, u32 full, u32 empty, Ring& ring, const Place& at) {
    const Ahead ahead(p, tile, at);
    float total[N / 2], sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = 0.0f;
    float2 scales[N / 8];
#if MAX_TOKENS > 32
    u32 a[4][4];
    for (int k = 0; k < p.k_blocks; k++, ring.next()) {
        const u32 stage = shared + ring.stage * STAGE_BYTES;
        barrier_wait(full + ring.stage * 8, ring.parity);
        widen_rows(shared, ring, at, a);
        start_product(sum, a, matrix_descriptor(stage));
        wait_for_product(sum, a);
        load_scales(scales, stage + X_SCALES + 8 * at.c);
        add_scaled(total, sum, scales);
        release_buffer(empty + ring.stage * 8, at.lane);
    }
#else
    u32 a[2][4][4];
    barrier_wait(full + ring.stage * 8, ring.parity);
    widen_rows(shared, ring, at, a[0]);
    for (int first = 0; first < p.k_blocks; first += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (first + i >= p.k_blocks) break;
            const u32 stage = shared + ring.stage * STAGE_BYTES, release = empty + ring.stage * 8;
            start_product(sum, a[i], matrix_descriptor(stage));
            ring.next();
            if (first + i + 1 < p.k_blocks) {
                barrier_wait(full + ring.stage * 8, ring.parity);
                widen_rows(shared, ring, at, a[1 - i]);
            }
            load_scales(scales, stage + X_SCALES + 8 * at.c);
            wait_for_product(sum, a[i]);
            add_scaled(total, sum, scales);
            release_buffer(release, at.lane);
        }
    }
#endif
    write_tile<N>(total, p, tile, ahead, shared, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_gemm(const __grid_constant__ Params p, const __grid_constant__ TensorMap x_map,
             const __grid_constant__ TensorMap scale_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    let_next_kernel_start();  // as soon as processors are free
    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(&x_map);
        prefetch_map(&scale_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, GROUPS * 4);  // warps that read the buffer
        }
        barrier_fence_init();
    }
    const Tiles tiles(p, (int*)(memory + TABLES), (int*)(memory + STAGING));
    if (threadIdx.x >= MATH_THREADS) {
        fewer_registers<32>();  // what the others take must have been given
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == GROUPS * 4 && elect_one())
            feed(p, &x_map, &scale_map, tiles, shared, full, empty);
        return;
    }
    more_registers<112>();
    Ring ring;
    Place at;
    at.group = __shfl_sync(~0u, threadIdx.x / 128, 0), at.warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    at.lane = hidden(threadIdx.x % 32), at.c = at.lane % 4;  // hidden: asked for once, not in every step
    for (int index = blockIdx.x; index < tiles.total; index += gridDim.x) {
        const Tile tile = tiles.of(p, index);
        if (tile.tokens <= 0) continue;
        __syncwarp();
        switch (product_size(tile.tokens)) {
            case 16: multiply_tile<16>(p, tile, shared, full, empty, ring, at); break;
#if MAX_TOKENS <= 32
            default: multiply_tile<32>(p, tile, shared, full, empty, ring, at); break;
#else
            case 32: multiply_tile<32>(p, tile, shared, full, empty, ring, at); break;
            case 48: multiply_tile<48>(p, tile, shared, full, empty, ring, at); break;
            case 56: multiply_tile<56>(p, tile, shared, full, empty, ring, at); break;
            case 64: multiply_tile<64>(p, tile, shared, full, empty, ring, at); break;
            case 72: multiply_tile<72>(p, tile, shared, full, empty, ring, at); break;
            default: multiply_tile<80>(p, tile, shared, full, empty, ring, at); break;
#endif
        }
    }
}
