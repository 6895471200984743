// D [M, N] BF16 = A [M, K] B [N, K]^T, both E4M3; scales of A for 1 x 128 values, of B for 128 x 128 (or one a row).
//
// A block is one warpgroup that feeds and two that multiply. The feeder copies tiles of 128 columns into a ring of STAGES
// buffers with the bulk copy engine; the two blocks of a cluster share one operand's tile and each copies half of it to
// both. The tensor cores' sums of 128 products (their accumulators are narrower than FP32) are scaled and added to FP32
// sums in registers; while one warpgroup does so, the other's products run. Blocks are persistent and walk the tiles in
// bands, so that what the running blocks read stays in L2. Method: DeepGEMM (github.com/deepseek-ai/DeepGEMM).
//
// K_PARTS > 1 is for few tiles: the blocks of a cluster divide the columns K of one tile, and add up their sums through
// distributed shared memory in the order of their ranks.
//
// Macros: BLOCK_M (64, 128, 256), BLOCK_N, STAGES, CLUSTER (1, 2), SHARE_A (the cluster's blocks have the same rows of A,
// else of B), K_PARTS (1 to 8; with CLUSTER 1), BAND (cluster tiles), B_ROW_SCALES, FEEDER_REGISTERS, MATH_REGISTERS.

#include "products.cuh"
#include "tma.cuh"

#define BLOCK_K 128
#define GROUPS 2                                       // warpgroups that multiply
#define SPLIT_N (BLOCK_M == 64)                        // they divide the columns of the tile, else its rows
#define PRODUCT_N (SPLIT_N ? BLOCK_N / 2 : BLOCK_N)    // columns of one product
#define WAVES (SPLIT_N ? 1 : BLOCK_M / 128)            // products of 64 rows of one warpgroup
#define SUMS (PRODUCT_N / 2)
// Products at once, where a warpgroup has one for a piece of K.
#define IN_FLIGHT (SUMS <= 20 ? 3 : SUMS <= 64 ? 2 : 1)
#define A_BYTES (BLOCK_M * BLOCK_K)
#define B_BYTES (BLOCK_N * BLOCK_K)
#define SCALE_BYTES (BLOCK_M * 4)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define SCALES (STAGES * STAGE_BYTES)
#define STAGING ((SCALES + STAGES * SCALE_BYTES + 1023) / 1024 * 1024)  // for each warp, BUFFERS pieces of 16 x 32 results
#define BUFFERS 3
#define BARRIERS (STAGING + (K_PARTS > 1 ? 0 : GROUPS * 4 * BUFFERS * 1024))
#define A_PARTS (CLUSTER == 2 && SHARE_A ? 2 : 1)      // blocks that copy a part of the A tile
#define B_PARTS (CLUSTER == 2 && !SHARE_A ? 2 : 1)
#define CLUSTER_M (BLOCK_M * B_PARTS)                  // rows and columns of a cluster's two tiles together
#define CLUSTER_N (BLOCK_N * A_PARTS)
#define SPANS (!B_ROW_SCALES && 128 % BLOCK_N != 0)    // a tile's columns have two scales of B

struct Params {
    u8* out;               // BF16 [M, N]
    const float* b_scales; // [ceil(N / 128), ceil(K / 128)], or [N]
    long long out_stride;  // bytes
    int m, n, k;
};

// Tile of a cluster: bands of BAND tiles along m, n in order within a band, m fastest.
DEVICE void tile_of(int index, int m_tiles, int n_tiles, int& m, int& n) {
    int band = index / (BAND * n_tiles), within = index - band * BAND * n_tiles;
    int height = min(BAND, m_tiles - band * BAND);
    m = band * BAND + within % height;
    n = within / height;
}

struct Ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// This block's pieces of 128 columns of K.
DEVICE void k_range(const Params& p, int rank, int& begin, int& end) {
    const int blocks = (p.k + BLOCK_K - 1) / BLOCK_K;
    begin = K_PARTS > 1 ? blocks * rank / K_PARTS : 0;
    end = K_PARTS > 1 ? blocks * (rank + 1) / K_PARTS : blocks;
}

DEVICE void feed(const Params& p, const TensorMap* a_map, const TensorMap* b_map, const TensorMap* scale_map, u32 shared,
                 u32 full, u32 empty, int rank, int first, int step, int m_tiles, int n_tiles) {
    Ring ring;
    int k_begin, k_end;
    k_range(p, rank, k_begin, k_end);
    for (int index = first; index < m_tiles * n_tiles; index += step) {
        int m, n;
        tile_of(index, m_tiles, n_tiles, m, n);
        int row = m * CLUSTER_M + (B_PARTS == 2 ? rank * BLOCK_M : 0);
        int column = n * CLUSTER_N + (A_PARTS == 2 ? rank * BLOCK_N : 0);
        for (int k = k_begin; k < k_end; k++, ring.next()) {
            barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
            u32 arrived = full + ring.stage * 8, a = shared + ring.stage * STAGE_BYTES, b = a + A_BYTES;
            u32 scales = shared + SCALES + ring.stage * SCALE_BYTES;
            barrier_expect(arrived, A_BYTES + B_BYTES + SCALE_BYTES);
            if (A_PARTS == 2) {
                int part = rank * (BLOCK_M / 2);
                load_box_to_both(a + part * BLOCK_K, a_map, k * BLOCK_K, row + part, arrived);
                load_box_to_both(scales + part * 4, scale_map, row + part, k, arrived);
            } else {
                load_box(a, a_map, k * BLOCK_K, row, arrived);
                load_box(scales, scale_map, row, k, arrived);
            }
            if (B_PARTS == 2) {
                int part = rank * (BLOCK_N / 2);
                load_box_to_both(b + part * BLOCK_K, b_map, k * BLOCK_K, column + part, arrived);
            } else {
                load_box(b, b_map, k * BLOCK_K, column, arrived);
            }
        }
    }
    if (CLUSTER == 2)  // the peer's arrivals must have come before this block may end
        for (int i = 0; i < STAGES; i++, ring.next()) barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
}

// 16 rows of a warp, columns from `column` on. Pieces of 32 columns go through the warp's own buffers to the copy engine,
// which writes them while the warp goes on; what is left of a tile's columns is written directly.
DEVICE void write_sums(float (&sum)[SUMS], const Params& p, const TensorMap* out_map, u32 buffers, int& piece, int row,
                       int column, int lane) {
    const int c = lane % 4;
#if B_ROW_SCALES
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++) {
        int at = column + 8 * j + 2 * c;
        float2 scale = at < p.n ? __ldg((const float2*)(p.b_scales + at)) : make_float2(0, 0);
        sum[4 * j] *= scale.x, sum[4 * j + 2] *= scale.x;
        sum[4 * j + 1] *= scale.y, sum[4 * j + 3] *= scale.y;
    }
#endif
    const int target_row = lane % 16;  // the row of a 16-byte chunk that this lane points the store at
#pragma unroll
    for (int group = 0; group < SUMS / 16; group++) {
        const u32 buffer = buffers + piece * 1024;
        const bool leader = elect_one();
        if (leader) store_wait_read<BUFFERS - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const float* x = sum + 16 * group + 4 * j;
            const u32 chunk = (j + lane / 16) ^ (target_row / 2 % 4);
            store_matrices(buffer + target_row * 64 + chunk * 16, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                           pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
        }
        fence_to_copies();
        __syncwarp();
        if (leader) {
            store_box(out_map, buffer, column + 32 * group, row);
            store_commit();
        }
        piece = piece == BUFFERS - 1 ? 0 : piece + 1;
    }
#if SUMS % 16
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at_row = row + lane / 4 + 8 * i;
#pragma unroll
        for (int j = SUMS / 16 * 4; j < SUMS / 4; j++) {
            const int at = column + 8 * j + 2 * c;
            if (at_row < p.m && at < p.n)
                *(u32*)(p.out + at_row * p.out_stride + at * 2) = pack_bf16(sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
        }
    }
#endif
}

#if K_PARTS > 1
// Each block adds up its share of the tile's columns, from all blocks of the cluster; the ring's memory is free by then.
DEVICE void add_parts(const float (&sum)[SUMS], const Params& p, u32 shared, int rank, int row, int column, int c) {
    const u32 own = shared + threadIdx.x * 16;
    named_sync(1, GROUPS * 128);
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + j * GROUPS * 128 * 16), "f"(sum[4 * j]),
                     "f"(sum[4 * j + 1]), "f"(sum[4 * j + 2]), "f"(sum[4 * j + 3])
                     : "memory");
    cluster_sync();
    for (int j = rank; j < SUMS / 4; j += K_PARTS) {
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int part = 0; part < K_PARTS; part++) {
            const float4 x = load_peer(own + j * GROUPS * 128 * 16, part);
            total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
        }
        const int at = column + 8 * j + 2 * c;
        if (at < p.n) {
#if B_ROW_SCALES
            const float2 scale = __ldg((const float2*)(p.b_scales + at));
            total.x *= scale.x, total.z *= scale.x;
            total.y *= scale.y, total.w *= scale.y;
#endif
            if (row < p.m) *(u32*)(p.out + row * p.out_stride + at * 2) = pack_bf16(total.x, total.y);
            if (row + 8 < p.m) *(u32*)(p.out + (row + 8) * p.out_stride + at * 2) = pack_bf16(total.z, total.w);
        }
    }
}
#endif

// Scales of B for a tile's columns, loaded one piece of 128 columns of K ahead.
struct ScalesOfB {
    struct Pair {
        float first, second;  // of the columns before and from `former` on
        int former;
    };
#if B_ROW_SCALES
    DEVICE ScalesOfB(const Params&, int, int) {}
    DEVICE Pair next(int, int) { return {1.0f, 1.0f, 128}; }
#else
    const float *at, *at_second;
    Pair ahead;
    // Columns outside the matrix have sums of zeros: any scale is right, the last one of the matrix is in memory.
    DEVICE ScalesOfB(const Params& p, int column, int k) {
        const int last = (p.n - 1) / 128, k_blocks = (p.k + BLOCK_K - 1) / BLOCK_K;
        k = min(k, k_blocks - 1);
        at = p.b_scales + min(column / 128, last) * k_blocks;
        at_second = p.b_scales + min(column / 128 + 1, last) * k_blocks;
        ahead = {__ldg(at + k), SPANS ? __ldg(at_second + k) : 0.0f, 128 - column % 128};
    }
    DEVICE Pair next(int k, int k_end) {
        const Pair now = ahead;
        k = min(k + 1, k_end - 1);
        ahead.first = __ldg(at + k);
        if (SPANS) ahead.second = __ldg(at_second + k);
        return now;
    }
#endif
};

DEVICE void add_scaled(float (&total)[SUMS], const float (&sum)[SUMS], float upper, float lower, ScalesOfB::Pair b) {
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++) {
        const float scale = !SPANS || 8 * j < b.former ? b.first : b.second;
        const float up = upper * scale, low = lower * scale;
        total[4 * j] += sum[4 * j] * up;
        total[4 * j + 1] += sum[4 * j + 1] * up;
        total[4 * j + 2] += sum[4 * j + 2] * low;
        total[4 * j + 3] += sum[4 * j + 3] * low;
    }
}

// A warp no longer needs a buffer: whoever copies into it may.
DEVICE void release(u32 empty, int lane) {
    if (CLUSTER == 1 && lane == 0) barrier_arrive(empty);
    if (CLUSTER == 2 && lane < 2) barrier_arrive_at(empty, lane);
}

DEVICE void multiply_tiles(const Params& p, const TensorMap* out_map, u32 shared, u32 full, u32 empty, int rank, int first,
                           int step, int m_tiles, int n_tiles) {
    Ring ring;
    int k_begin, k_end;
    k_range(p, rank, k_begin, k_end);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int lane = threadIdx.x % 32, c = lane % 4;
    const int group_row = SPLIT_N ? 0 : group * 64, group_column = SPLIT_N ? group * PRODUCT_N : 0;
    const int thread_row = group_row + warp * 16 + lane / 4;
#if K_PARTS == 1
    const u32 buffers = shared + STAGING + (group * 4 + warp) * BUFFERS * 1024;
    int piece = 0;
#endif
    const u64 a_base = matrix_descriptor(shared + group_row * BLOCK_K);
    const u64 b_base = matrix_descriptor(shared + A_BYTES + group_column * BLOCK_K);
    for (int index = first; index < m_tiles * n_tiles; index += step) {
        int m, n;
        tile_of(index, m_tiles, n_tiles, m, n);
        const int row = m * CLUSTER_M + (B_PARTS == 2 ? rank * BLOCK_M : 0);
        const int column = n * CLUSTER_N + (A_PARTS == 2 ? rank * BLOCK_N : 0) + group_column;
        float total[WAVES][SUMS];
#pragma unroll
        for (int w = 0; w < WAVES; w++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) total[w][i] = 0.0f;
        ScalesOfB scales_of_b(p, column, k_begin);
#if WAVES == 1
        // Products of IN_FLIGHT pieces of K: sums of one are added up while the next run. Past the end the last piece is
        // multiplied again and counts nothing.
        float sum[IN_FLIGHT][SUMS];
        for (int k = k_begin; k < k_end; k += IN_FLIGHT) {
            float upper[IN_FLIGHT], lower[IN_FLIGHT];
            int stages[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                if (k + i < k_end) {
                    if (i > 0) ring.next();
                    barrier_wait(full + ring.stage * 8, ring.parity);
                }
                stages[i] = ring.stage;
                const u32 scales = shared + SCALES + ring.stage * SCALE_BYTES + thread_row * 4;
                upper[i] = k + i < k_end ? load_float(scales) : 0.0f;
                lower[i] = k + i < k_end ? load_float(scales + 32) : 0.0f;
                fence_registers(sum[i]);
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                const u64 a = a_base + (stages[i] * STAGE_BYTES >> 4), b = b_base + (stages[i] * STAGE_BYTES >> 4);
#pragma unroll
                for (int j = 0; j < BLOCK_K / 32; j++) multiply(sum[i], a + 2 * j, b + 2 * j, j);
                wgmma_commit();
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                if (i == IN_FLIGHT - 1) wgmma_wait<0>();
                else if (i == IN_FLIGHT - 2) wgmma_wait<1>();
                else wgmma_wait<2>();
                fence_registers(sum[i]);
                if (i < IN_FLIGHT - 1 && k + i + 1 < k_end) release(empty + stages[i] * 8, lane);
                if (i == IN_FLIGHT - 1) release(empty + ring.stage * 8, lane);
                add_scaled(total[0], sum[i], upper[i], lower[i], scales_of_b.next(k + i, k_end));
            }
            ring.next();
        }
#else
        float sum[SUMS];
        for (int k = k_begin; k < k_end; k++, ring.next()) {
            barrier_wait(full + ring.stage * 8, ring.parity);
            const u64 a = a_base + (ring.stage * STAGE_BYTES >> 4), b = b_base + (ring.stage * STAGE_BYTES >> 4);
            const u32 scales = shared + SCALES + ring.stage * SCALE_BYTES + thread_row * 4;
            const ScalesOfB::Pair scale_b = scales_of_b.next(k, k_end);
#pragma unroll
            for (int w = 0; w < WAVES; w++) {
                // Rows of this thread, loaded before the buffer may be given back.
                const float upper = load_float(scales + w * 512), lower = load_float(scales + w * 512 + 32);
                fence_registers(sum);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < BLOCK_K / 32; i++) multiply(sum, a + (w * 128 * BLOCK_K >> 4) + 2 * i, b + 2 * i, i);
                wgmma_commit();
                fence_registers(sum);
                wgmma_wait<0>();
                fence_registers(sum);
                if (w == WAVES - 1) release(empty + ring.stage * 8, lane);
                add_scaled(total[w], sum, upper, lower, scale_b);
            }
        }
#endif
#if K_PARTS > 1
        add_parts(total[0], p, shared, rank, row + thread_row, column, c);
#else
#pragma unroll
        for (int w = 0; w < WAVES; w++)
            write_sums(total[w], p, out_map, buffers, piece, row + group_row + warp * 16 + w * 128, column, lane);
#endif
    }
#if K_PARTS == 1
    if (elect_one()) store_wait_read<0>();  // the buffers must live until they are read
#endif
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
#if CLUSTER * K_PARTS > 1
    __cluster_dims__(CLUSTER * K_PARTS, 1, 1)
#endif
    fp8_gemm(const __grid_constant__ Params p, const __grid_constant__ TensorMap a_map,
             const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap scale_map,
             const __grid_constant__ TensorMap out_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    if (threadIdx.x == GROUPS * 128) {
        prefetch_map(&a_map);
        prefetch_map(&b_map);
        prefetch_map(&scale_map);
        prefetch_map(&out_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, CLUSTER * GROUPS * 4);  // warps that read the buffer
        }
        barrier_fence_init();
    }
    if (CLUSTER == 2) cluster_sync();
    else __syncthreads();
    const int rank = CLUSTER * K_PARTS > 1 ? cluster_rank() : 0;
    const int first = blockIdx.x / (CLUSTER * K_PARTS), step = gridDim.x / (CLUSTER * K_PARTS);
    const int m_tiles = (p.m + CLUSTER_M - 1) / CLUSTER_M, n_tiles = (p.n + CLUSTER_N - 1) / CLUSTER_N;
    if (threadIdx.x >= GROUPS * 128) {
        fewer_registers<FEEDER_REGISTERS>();
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == GROUPS * 4 && elect_one())
            feed(p, &a_map, &b_map, &scale_map, shared, full, empty, rank, first, step, m_tiles, n_tiles);
    } else {
        more_registers<MATH_REGISTERS>();
        multiply_tiles(p, &out_map, shared, full, empty, rank, first, step, m_tiles, n_tiles);
    }
#if K_PARTS > 1
    __syncwarp();
    if (threadIdx.x >= GROUPS * 128) cluster_sync();  // the sums are there
    cluster_sync();                                   // and have been read
#endif
}
