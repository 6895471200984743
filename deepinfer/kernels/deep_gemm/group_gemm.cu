// Products in BF16 or FP8 x FP8, dense or for groups of rows: out[rows of group e] = x[rows of group e] w[e]^T, BF16.
//
// As in moe_gemm.cu the weights are the rows of the tensor cores' product and x its columns, so that groups of few rows waste
// little; here both come from shared memory. One warp feeds pieces of 128 bytes a row into a ring of STAGES buffers, two
// warpgroups multiply half of the ROWS weight rows each. BF16 sums stay in the tensor cores' accumulators. Sums of 128 FP8
// products are scaled (x: 1 x 128, weights: 128 x 128, or one a row at the end) and added up in FP32 registers; while one
// warpgroup does so, the other's products run. No sum depends on what else is in the launch.
//
// Macros: BF16, ROWS (128, 256), MAX_TOKENS (32, 128), STAGES, ROW_SCALES (not BF16: one scale a weight row).

#define GROUPS 2
#define WAVES (ROWS / 128)  // products of 64 rows of a warpgroup
#define MATH_THREADS (GROUPS * 128)
#define THREADS (MATH_THREADS + 128)

#include "products.cuh"
#include "tma.cuh"

#define PIECE (BF16 ? 64 : 128)  // columns of a stage
#define W_BYTES (ROWS * 128)
#define X_BYTES (MAX_TOKENS * 128)
#define X_SCALES (W_BYTES + X_BYTES)
#define STAGE_BYTES ((X_SCALES + (BF16 ? 0 : MAX_TOKENS * 4) + 1023) / 1024 * 1024)
#define STAGED_TOKENS (MAX_TOKENS < 64 ? MAX_TOKENS : 64)  // of the result, on their way out
#define STAGING (STAGES * STAGE_BYTES)
#define TABLES (STAGING + GROUPS * STAGED_TOKENS * 128)
#define BARRIERS (TABLES + TABLES_BYTES)

struct Params {
    const float* w_scales;       // [groups, ceil(N / 128), K / 128], or [groups, N] with ROW_SCALES
    const int *begins, *counts;  // rows of x of each group; null: all rows are the only group's
    u8* out;
    long long out_stride;        // bytes
    int tokens, experts, row_blocks, k_blocks, columns;  // rows of x; columns of the result, which are a weight's rows
};

#define TOKEN_STEP 16
#include "moe_tiles.cuh"

static_assert(BARRIERS + STAGES * 16 <= 232448, "more shared memory than a block has");

struct Ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Columns of a product that holds `tokens`: sizes that multiply_tile is made for.
DEVICE int product_size(int tokens) { return tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : 128; }

DEVICE void feed(const Params& p, const TensorMap* w_map, const TensorMap* x_map, const TensorMap* scale_map,
                 const Tiles& tiles, u32 shared, u32 full, u32 empty) {
    Ring ring;
    for (int index = blockIdx.x; index < tiles.total; index += gridDim.x) {
        const Tile tile = tiles.of(p, index);
        if (tile.tokens <= 0) continue;
        const int size = product_size(tile.tokens), row = tile.expert * p.columns + tile.row_block * ROWS;
        for (int k = 0; k < p.k_blocks; k++, ring.next()) {
            const u32 arrived = full + ring.stage * 8, target = shared + ring.stage * STAGE_BYTES;
            barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
            barrier_expect(arrived, W_BYTES + size * 128 + (BF16 ? 0 : MAX_TOKENS * 4));
            load_box(target, w_map, k * PIECE, row, arrived);
            for (int token = 0; token < size; token += 16)
                load_box(target + W_BYTES + token * 128, x_map, k * PIECE, tile.first + token, arrived);
            if (!BF16) load_box(target + X_SCALES, scale_map, tile.first, k, arrived);
        }
    }
}

struct Place {
    int group, warp, lane, c;
};

// BF16 rows of the result, through the group's staging: [tokens, 64 columns], swizzled.
template <int N>
DEVICE void write_tile(const float (&total)[WAVES][N / 2], const Params& p, const Tile& tile, u32 shared, const Place& at) {
    const u32 staging = shared + STAGING + at.group * STAGED_TOKENS * 128;
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int w = 0; w < WAVES; w++) {
        const int row = tile.row_block * ROWS + (at.group * WAVES + w) * 64;
        float scales[2] = {1.0f, 1.0f};
#if !BF16 && ROW_SCALES
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int feature = row + at.warp * 16 + at.lane / 4 + 8 * i;
            if (feature < p.columns) scales[i] = __ldg(p.w_scales + (long long)tile.expert * p.columns + feature);
        }
#endif
#pragma unroll
        for (int part = 0; part < N; part += STAGED_TOKENS) {
            named_sync(1 + at.group, 128);  // the buffer was read
#pragma unroll
            for (int j = 0; j < (N < STAGED_TOKENS ? N : STAGED_TOKENS) / 8; j += 2) {
                const float* x = total[w] + part / 2 + 4 * j;
                const int token = 8 * (j + at.lane / 16) + at.lane % 8, chunk = at.warp * 2 + at.lane / 8 % 2;
                store_matrices_transposed(staging + token * 128 + ((chunk ^ token % 8) << 4),
                                          pack_bf16(x[0] * scales[0], x[1] * scales[0]),
                                          pack_bf16(x[2] * scales[1], x[3] * scales[1]),
                                          pack_bf16(x[4] * scales[0], x[5] * scales[0]),
                                          pack_bf16(x[6] * scales[1], x[7] * scales[1]));
            }
            named_sync(1 + at.group, 128);
            const int column = row + thread % 8 * 8, tokens = min(tile.tokens - part, STAGED_TOKENS);
            for (int token = thread / 8; token < tokens && column < p.columns; token += 16) {
                const uint4 x = load_words(staging + token * 128 + ((thread % 8 ^ token % 8) << 4));
                if (part + token < tile.skip) continue;
                store_global(p.out + (tile.first + part + token) * p.out_stride + column * 2, x.x, x.y, x.z, x.w);
            }
        }
    }
}

template <int N>
DEVICE void multiply_tile(const Params& p, const Tile& tile, u32 shared, u32 full, u32 empty, Ring& ring, const Place& at) {
    float total[WAVES][N / 2];
#pragma unroll
    for (int w = 0; w < WAVES; w++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[w][i] = 0.0f;
    const u64 own_rows = matrix_descriptor(shared + at.group * WAVES * 64 * 128), x_base = matrix_descriptor(shared + W_BYTES);
    auto release = [&](int stage) {
        __syncwarp();
        if (at.lane == 0) barrier_arrive(empty + stage * 8);
    };
#if BF16
    int before = 0;
    for (int k = 0; k < p.k_blocks; k++, ring.next()) {
        barrier_wait(full + ring.stage * 8, ring.parity);
        const u64 w_rows = own_rows + (ring.stage * STAGE_BYTES >> 4), x = x_base + (ring.stage * STAGE_BYTES >> 4);
#pragma unroll
        for (int w = 0; w < WAVES; w++) fence_registers(total[w]);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int w = 0; w < WAVES; w++) multiply_wide(total[w], w_rows + (w * 64 * 128 >> 4) + 2 * s, x + 2 * s, 1);
        wgmma_commit();
#pragma unroll
        for (int w = 0; w < WAVES; w++) fence_registers(total[w]);
        wgmma_wait<1>();
        if (k > 0) release(before);
        before = ring.stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int w = 0; w < WAVES; w++) fence_registers(total[w]);
    release(before);
#else
    float sum[N / 2];
#if !ROW_SCALES
    const int blocks = (p.columns + 127) / 128, block = (tile.row_block * ROWS + at.group * WAVES * 64) / 128;
    const float* w_scales = p.w_scales + ((long long)tile.expert * blocks + min(block, blocks - 1)) * p.k_blocks;
    float scale_ahead = __ldg(w_scales);
#endif
    for (int k = 0; k < p.k_blocks; k++, ring.next()) {
        float w_scale = 1.0f;
#if !ROW_SCALES
        w_scale = scale_ahead;
        scale_ahead = __ldg(w_scales + min(k + 1, p.k_blocks - 1));
#endif
        barrier_wait(full + ring.stage * 8, ring.parity);
        const u64 w_rows = own_rows + (ring.stage * STAGE_BYTES >> 4), x = x_base + (ring.stage * STAGE_BYTES >> 4);
        const u32 x_scales = shared + ring.stage * STAGE_BYTES + X_SCALES + 8 * at.c;
#pragma unroll
        for (int w = 0; w < WAVES; w++) {
            fence_registers(sum);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++) multiply(sum, w_rows + (w * 64 * 128 >> 4) + 2 * s, x + 2 * s, s);
            wgmma_commit();
            fence_registers(sum);
            wgmma_wait<0>();
            fence_registers(sum);
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                float2 scale = load_float2(x_scales + 32 * j);
                scale.x *= w_scale, scale.y *= w_scale;
                total[w][4 * j] += sum[4 * j] * scale.x;
                total[w][4 * j + 1] += sum[4 * j + 1] * scale.y;
                total[w][4 * j + 2] += sum[4 * j + 2] * scale.x;
                total[w][4 * j + 3] += sum[4 * j + 3] * scale.y;
            }
        }
        release(ring.stage);
    }
#endif
    write_tile<N>(total, p, tile, shared, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    group_gemm(const __grid_constant__ Params p, const __grid_constant__ TensorMap w_map,
               const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap scale_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(&w_map);
        prefetch_map(&x_map);
        if (!BF16) prefetch_map(&scale_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, GROUPS * 4);  // warps that read the buffer
        }
        barrier_fence_init();
    }
    const Tiles tiles(p, (int*)(memory + TABLES), (int*)(memory + STAGING));
    if (threadIdx.x >= MATH_THREADS) {
        fewer_registers<24>();
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == GROUPS * 4 && elect_one())
            feed(p, &w_map, &x_map, &scale_map, tiles, shared, full, empty);
        return;
    }
    more_registers<240>();
    Ring ring;
    Place at;
    at.group = __shfl_sync(~0u, threadIdx.x / 128, 0), at.warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    at.lane = threadIdx.x % 32, at.c = at.lane % 4;
    for (int index = blockIdx.x; index < tiles.total; index += gridDim.x) {
        const Tile tile = tiles.of(p, index);
        if (tile.tokens <= 0) continue;
        __syncwarp();
        switch (product_size(tile.tokens)) {
            case 16: multiply_tile<16>(p, tile, shared, full, empty, ring, at); break;
            case 32: multiply_tile<32>(p, tile, shared, full, empty, ring, at); break;
#if MAX_TOKENS > 32
            case 64: multiply_tile<64>(p, tile, shared, full, empty, ring, at); break;
            default: multiply_tile<128>(p, tile, shared, full, empty, ring, at); break;
#endif
        }
    }
}
