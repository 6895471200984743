// out [M, N] BF16 = x [M, K] w [N, K]^T for few rows x, both E4M3; scales of x for 1 x 128 values, of w one a row or one for
// 128 x 128 (BLOCK_SCALES).
//
// Bound by the bandwidth of the weights: they are the rows of the tensor cores' product (128 a tile), the rows of x its
// columns (TOKENS). One warp feeds pieces of 128 x 128 weights into a ring of STAGES buffers, two warpgroups multiply 64
// rows each. The pieces of all tiles are one sequence, of which every block takes an equal run. Where a run ends within a
// tile, the block leaves its sums in memory; the block with the tile's last piece adds up what the others left, in their
// order. A run is worked on from its last tile to its first, so that nobody waits long for sums. Nothing of this depends on
// M: a row's result does not depend on the others.
//
// With programmatic dependent launch the ring is filled with weights while the kernel before, which makes x, still runs.
// Macros: TOKENS (8, 16, 32, 64, 128), BLOCK_SCALES, STAGES.

#include "products.cuh"
#include "tma.cuh"

#define ROWS 128
#define THREADS 256  // that multiply
#define SUMS (TOKENS / 2)
#define W_BYTES (ROWS * 128)
#define X_BYTES (TOKENS * 128)
#define SCALE_BYTES (TOKENS * 4)
#define SCALE_ROOM ((SCALE_BYTES + 127) / 128 * 128)
#define STAGE_BYTES (W_BYTES + X_BYTES)
#define SCALES (STAGES * STAGE_BYTES)
#define BARRIERS (SCALES + STAGES * SCALE_ROOM)

struct Params {
    u8* out;
    const float* w_scales;  // [N], or [ceil(N / 128), ceil(K / 128)]
    float4* left;           // [blocks, SUMS / 4, THREADS]: sums of unfinished tiles
    int* flags;             // [blocks]: 1 while there are some; 0 before and after the launch
    long long out_stride;   // bytes
    int m, n, k;
};

struct Ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// First piece of a block's run.
DEVICE int run_begin(const Params& p, u32 block) {
    const u32 pieces = (p.n + ROWS - 1) / ROWS * ((p.k + 127) / 128);  // times blocks: below 2^32
    return pieces * block / gridDim.x;
}

// The tiles of this block's run, last one first: pieces k_begin to k_end of each.
struct Walk {
    int k_blocks, begin, at, tile = 0, k_begin = 0, k_end = 0;
    DEVICE Walk(const Params& p)
        : k_blocks((p.k + 127) / 128), begin(run_begin(p, blockIdx.x)), at(run_begin(p, blockIdx.x + 1)) {}
    DEVICE bool next() {
        if (at <= begin) return false;
        tile = (at - 1) / k_blocks;
        const int first = max(begin, tile * k_blocks);
        k_begin = first - tile * k_blocks, k_end = at - tile * k_blocks, at = first;
        return true;
    }
    DEVICE void next_piece() {  // of the feeder: k_begin is the piece
        if (++k_begin >= k_end) next();
    }
};

DEVICE void feed(const Params& p, const TensorMap* w_map, const TensorMap* x_map, const TensorMap* scale_map, u32 shared,
                 u32 full, u32 empty) {
    Walk weights(p), tokens(p);
    const int pieces = weights.at - weights.begin, ahead = min(STAGES, pieces);
    weights.next(), tokens.next();
    auto load_weights = [&](int stage) {
        barrier_expect(full + stage * 8, STAGE_BYTES + SCALE_BYTES);
        load_box(shared + stage * STAGE_BYTES, w_map, weights.k_begin * 128, weights.tile * ROWS, full + stage * 8);
        weights.next_piece();
    };
    auto load_tokens = [&](int stage) {
        load_box(shared + stage * STAGE_BYTES + W_BYTES, x_map, tokens.k_begin * 128, 0, full + stage * 8);
        load_box(shared + SCALES + stage * SCALE_ROOM, scale_map, 0, tokens.k_begin, full + stage * 8);
        tokens.next_piece();
    };
    for (int i = 0; i < ahead; i++) load_weights(i);
    wait_for_previous_kernel();
    for (int i = 0; i < ahead; i++) load_tokens(i);
    Ring ring;
    for (int i = ahead; i < pieces; i++, ring.next()) {
        barrier_wait(empty + ring.stage * 8, ring.parity);
        load_weights(ring.stage);
        load_tokens(ring.stage);
    }
}

DEVICE void multiply_pieces(float (&total)[SUMS], const Params& p, const Walk& walk, u32 shared, u32 full, u32 empty,
                            Ring& ring, int group, int lane) {
    float sum[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
    const float* w_scales = p.w_scales + walk.tile * walk.k_blocks;
    float w_scale = 1.0f, w_scale_ahead = BLOCK_SCALES ? __ldg(w_scales + walk.k_begin) : 1.0f;
    for (int k = walk.k_begin; k < walk.k_end; k++, ring.next()) {
        w_scale = w_scale_ahead;
        if (BLOCK_SCALES) w_scale_ahead = __ldg(w_scales + min(k + 1, walk.k_end - 1));
        barrier_wait(full + ring.stage * 8, ring.parity);
        const u64 w = matrix_descriptor(shared + ring.stage * STAGE_BYTES + group * 64 * 128);
        const u64 x = matrix_descriptor(shared + ring.stage * STAGE_BYTES + W_BYTES);
        fence_registers(sum);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) multiply(sum, w + 2 * j, x + 2 * j, j);
        wgmma_commit();
        const u32 scales = shared + SCALES + ring.stage * SCALE_ROOM + lane % 4 * 8;
        float2 scale[TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            scale[j] = load_float2(scales + 32 * j);
            if (BLOCK_SCALES) scale[j].x *= w_scale, scale[j].y *= w_scale;
        }
        fence_registers(sum);
        wgmma_wait<0>();
        fence_registers(sum);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + ring.stage * 8);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            total[4 * j] += sum[4 * j] * scale[j].x;
            total[4 * j + 1] += sum[4 * j + 1] * scale[j].y;
            total[4 * j + 2] += sum[4 * j + 2] * scale[j].x;
            total[4 * j + 3] += sum[4 * j + 3] * scale[j].y;
        }
    }
}

// Leaves the sums for the block that finishes the tile.
DEVICE void leave(const Params& p, const float (&total)[SUMS]) {
    float4* own = p.left + (long long)blockIdx.x * (SUMS / 4) * THREADS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++)
        own[j * THREADS] = make_float4(total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]);
    named_sync(1, THREADS);  // the release covers what all threads stored before
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(p.flags + blockIdx.x) : "memory");
}

// Adds what the blocks before left of this tile: theirs first, in their order.
DEVICE void add_left(const Params& p, float (&total)[SUMS], int first_piece) {
    int first = blockIdx.x;
    while (first > 0 && run_begin(p, first) > first_piece) first--;
    const int parts = blockIdx.x - first, thread = threadIdx.x;
    if (thread < parts) {  // all wait at the same time; a grid has fewer blocks than a block has threads
        int flag = 0;
        while (!flag) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(flag) : "l"(p.flags + first + thread) : "memory");
    }
    named_sync(1, THREADS);
    const float4* theirs = p.left + (long long)first * (SUMS / 4) * THREADS + thread;
    float sum[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
    constexpr int AT_ONCE = TOKENS > 64 ? 1 : 3;
#pragma unroll AT_ONCE
    for (int part = 0; part < parts; part++, theirs += (SUMS / 4) * THREADS) {
#pragma unroll
        for (int j = 0; j < SUMS / 4; j++) {
            const float4 x = __ldcg(theirs + j * THREADS);
            sum[4 * j] += x.x, sum[4 * j + 1] += x.y, sum[4 * j + 2] += x.z, sum[4 * j + 3] += x.w;
        }
    }
    if (thread < parts) p.flags[first + thread] = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = sum[i] + total[i];
}

// This thread's results: rows `row` and 8 further of w, tokens 8 j + 2 (lane % 4) and the next.
DEVICE void write(const Params& p, const float (&total)[SUMS], int row, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = row + 8 * i;
        if (at >= p.n) continue;
        const float scale = BLOCK_SCALES ? 1.0f : __ldg(p.w_scales + at);
#pragma unroll
        for (int j = 0; j < SUMS / 4; j++) {
            const int token = 8 * j + 2 * (lane % 4);
            const u32 pair = pack_bf16(total[4 * j + 2 * i] * scale, total[4 * j + 2 * i + 1] * scale);
            u8* target = p.out + token * p.out_stride + at * 2;
            if (token < p.m) *(u16*)target = (u16)pair;
            if (token + 1 < p.m) *(u16*)(target + p.out_stride) = (u16)(pair >> 16);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    fp8_few_rows(const __grid_constant__ Params p, const __grid_constant__ TensorMap w_map,
                 const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap scale_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    if (threadIdx.x == THREADS) {
        prefetch_map(&w_map);
        prefetch_map(&x_map);
        prefetch_map(&scale_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, THREADS / 32);  // warps that read the buffer
        }
        barrier_fence_init();
    }
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp == THREADS / 32) {
        if (elect_one()) feed(p, &w_map, &x_map, &scale_map, shared, full, empty);
        return;
    }
    wait_for_previous_kernel();  // what it did to the flags is there
    Ring ring;
    Walk walk(p);
    while (walk.next()) {
        float total[SUMS];
        multiply_pieces(total, p, walk, shared, full, empty, ring, warp / 4, lane);
        if (walk.k_end < walk.k_blocks) {
            leave(p, total);
            continue;
        }
        if (walk.k_begin > 0) add_left(p, total, walk.tile * walk.k_blocks);
        write(p, total, walk.tile * ROWS + warp * 16 + lane / 4, lane);
    }
}
