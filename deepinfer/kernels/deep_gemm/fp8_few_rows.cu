// out [M, N] BF16 = x [M, K] w [N, K]^T for few rows x, both E4M3; scales of x for 1 x 128 values, of w one a row.
//
// Bound by the bandwidth of the weights: they are the rows of the tensor cores' product (64 a block), the rows of x its
// columns (TOKENS). One warp feeds tiles of 128 columns into a ring of STAGES buffers, four multiply. The K_PARTS blocks of
// a cluster divide the columns and add up through distributed shared memory in the order of their ranks, so that all
// processors read equally much, whatever M is: a row's result does not depend on the others. Two blocks live on a processor.
//
// With programmatic dependent launch the ring is filled with weights while the kernel before, which makes x, still runs.
// Macros: TOKENS (8, 16, 32, 64), STAGES, K_PARTS (1 to 8).

#include "products.cuh"
#include "tma.cuh"

#define ROWS 64
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
    const float* w_scales;  // [N]
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

DEVICE void feed(const TensorMap* w_map, const TensorMap* x_map, const TensorMap* scale_map, u32 shared, u32 full, u32 empty,
                 int row, int k_begin, int k_end) {
    const int ahead = min(STAGES, k_end - k_begin);
    for (int i = 0; i < ahead; i++) {
        barrier_expect(full + i * 8, STAGE_BYTES + SCALE_BYTES);
        load_box(shared + i * STAGE_BYTES, w_map, (k_begin + i) * 128, row, full + i * 8);
    }
    wait_for_previous_kernel();
    for (int i = 0; i < ahead; i++) {
        load_box(shared + i * STAGE_BYTES + W_BYTES, x_map, (k_begin + i) * 128, 0, full + i * 8);
        load_box(shared + SCALES + i * SCALE_ROOM, scale_map, 0, k_begin + i, full + i * 8);
    }
    Ring ring;
    for (int k = k_begin + STAGES; k < k_end; k++, ring.next()) {
        const u32 arrived = full + ring.stage * 8, target = shared + ring.stage * STAGE_BYTES;
        barrier_wait(empty + ring.stage * 8, ring.parity);
        barrier_expect(arrived, STAGE_BYTES + SCALE_BYTES);
        load_box(target, w_map, k * 128, row, arrived);
        load_box(target + W_BYTES, x_map, k * 128, 0, arrived);
        load_box(shared + SCALES + ring.stage * SCALE_ROOM, scale_map, 0, k, arrived);
    }
}

DEVICE void multiply_range(float (&total)[SUMS], u32 shared, u32 full, u32 empty, int k_begin, int k_end, int lane) {
    Ring ring;
    float sum[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
    for (int k = k_begin; k < k_end; k++, ring.next()) {
        barrier_wait(full + ring.stage * 8, ring.parity);
        const u64 w = matrix_descriptor(shared + ring.stage * STAGE_BYTES);
        const u64 x = matrix_descriptor(shared + ring.stage * STAGE_BYTES + W_BYTES);
        fence_registers(sum);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) multiply(sum, w + 2 * i, x + 2 * i, i);
        wgmma_commit();
        const u32 scales = shared + SCALES + ring.stage * SCALE_ROOM + lane % 4 * 8;
        float2 scale[TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) scale[j] = load_float2(scales + 32 * j);
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

// Results of two rows of w and the tokens 8 j + 2 (lane % 4) and the next.
DEVICE void write(const Params& p, float4 x, int j, int row, int lane) {
    const int token = 8 * j + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = row + 8 * i;
        if (at >= p.n) continue;
        const float scale = __ldg(p.w_scales + at);
        const u32 pair = pack_bf16((i ? x.z : x.x) * scale, (i ? x.w : x.y) * scale);
        u8* target = p.out + token * p.out_stride + at * 2;
        if (token < p.m) *(u16*)target = (u16)pair;
        if (token + 1 < p.m) *(u16*)(target + p.out_stride) = (u16)(pair >> 16);
    }
}

extern "C" __global__ void __launch_bounds__(160)
#if K_PARTS > 1
    __cluster_dims__(K_PARTS, 1, 1)
#endif
    fp8_few_rows(const __grid_constant__ Params p, const __grid_constant__ TensorMap w_map,
                 const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap scale_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    if (threadIdx.x == 128) {
        prefetch_map(&w_map);
        prefetch_map(&x_map);
        prefetch_map(&scale_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 4);  // warps that read the buffer
        }
        barrier_fence_init();
    }
    __syncthreads();
    const int part = K_PARTS > 1 ? cluster_rank() : 0, blocks = (p.k + 127) / 128;
    const int first = blockIdx.x / K_PARTS * ROWS;
    const int k_begin = blocks * part / K_PARTS, k_end = blocks * (part + 1) / K_PARTS;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp == 4) {
        if (elect_one()) feed(&w_map, &x_map, &scale_map, shared, full, empty, first, k_begin, k_end);
#if K_PARTS > 1
        __syncwarp();
        cluster_sync();
        cluster_sync();
#endif
        return;
    }
    float total[SUMS];
    multiply_range(total, shared, full, empty, k_begin, k_end, lane);
    const int row = first + warp * 16 + lane / 4;
#if K_PARTS > 1
    const u32 own = shared + threadIdx.x * 16;
    named_sync(1, 128);  // the ring's memory is free
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + j * 2048), "f"(total[4 * j]),
                     "f"(total[4 * j + 1]), "f"(total[4 * j + 2]), "f"(total[4 * j + 3])
                     : "memory");
    cluster_sync();
    for (int j = part; j < SUMS / 4; j += K_PARTS) {
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < K_PARTS; i++) {
            const float4 y = load_peer(own + j * 2048, i);
            x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        write(p, x, j, row, lane);
    }
    cluster_sync();  // the sums have been read
#else
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++)
        write(p, make_float4(total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]), j, row, lane);
#endif
}
