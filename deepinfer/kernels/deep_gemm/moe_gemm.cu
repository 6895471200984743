// Grouped products of a mixture of experts: for each expert, its MXFP4 weights times the FP8 rows of its tokens.
//
// The weights are the rows of the tensor cores' product and come from registers, widened there; tokens are its columns, so
// that few tokens waste little. One warpgroup feeds tiles of 128 columns into a ring with the bulk copy engine, GROUPS share
// the weight rows: two for many tokens, four for few, where widening takes longest and more warps hide its latencies. A tile
// has 256 weight rows and up to MAX_TOKENS tokens of one expert; blocks are persistent. Scales
// of the tokens (1 x 128) are applied to the tensor cores' sums, those of the weights' rows at the end. With programmatic
// dependent launch weights are on their way while the kernel before still makes the tokens; it must not make the routing.
//
// GATE_UP: rows are 8 of w1 and 8 of w3 in turn; the result is SwiGLU, clamped, times the token's gate, as E4M3 rounded in
// groups of 32 and scaled 1 x 128. Else the result is BF16.
// Macros: GATE_UP, STAGES, GROUPS (2, 4), MAX_TOKENS (96 or less, with 4 GROUPS at most 32).

#include "fp4_weights.cuh"
#include "products.cuh"
#include "tma.cuh"

#define MAX_EXPERTS 1024
#define WAVES (4 / GROUPS)  // products of 64 rows of a group
#define MATH_THREADS (GROUPS * 128)
#define THREADS (MATH_THREADS + 128)
#define X_BYTES (MAX_TOKENS * 128)
#define X_SCALES (X_BYTES + TILE_BYTES)  // in a stage: tokens, weights, scales of 128 tokens
#define STAGE_BYTES ((X_SCALES + 512 + 1023) / 1024 * 1024)
#define STAGING (STAGES * STAGE_BYTES)
#define STAGING_ROW 144                  // bytes a token, padded against bank conflicts; only with GATE_UP
#if GATE_UP
#define MAXIMA (STAGING + MAX_TOKENS * STAGING_ROW)     // [16 warps' features, tokens]
#define FACTORS (MAXIMA + 16 * MAX_TOKENS * 4)          // [4 groups of 32, tokens] of two floats
#define STARTS (FACTORS + 4 * MAX_TOKENS * 8)
#else
#define STARTS (STAGING + GROUPS * MAX_TOKENS * 128)
#endif
#define BARRIERS (STARTS + (MAX_EXPERTS + 8) * 4)

struct Params {
    const u8* weights;        // [experts, row blocks, k blocks] tiles
    const float* row_scales;  // [experts, row blocks x 256]
    const int *begins, *counts;  // rows of x of each expert
    const int* out_rows;      // row of the result for a row of x, or null; not with GATE_UP
    const float* gates;       // of rows of x; GATE_UP
    u8* out;
    float* out_scales;        // [columns / 128, out_scales_stride]; GATE_UP
    long long out_stride;     // bytes
    int out_scales_stride;
    int experts, row_blocks, k_blocks, columns;  // columns of the result
    float limit;
};

struct Ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Tile {
    int expert, row_block, first, tokens;
};

// starts[e]: tiles of tokens of the experts before e. Each of the block's threads takes some neighbouring experts.
DEVICE void count_tiles(const Params& p, int* starts, int* warp_sums) {
    const int each = (p.experts + THREADS - 1) / THREADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int own = 0;
    for (int i = 0; i < each; i++) {
        int e = threadIdx.x * each + i;
        if (e < p.experts) own += (p.counts[e] + MAX_TOKENS - 1) / MAX_TOKENS;
    }
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int got = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += got;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = sum - own;
    for (int w = 0; w < warp; w++) before += warp_sums[w];
    for (int i = 0; i < each; i++) {
        int e = threadIdx.x * each + i;
        if (e < p.experts) {
            starts[e] = before;
            before += (p.counts[e] + MAX_TOKENS - 1) / MAX_TOKENS;
            if (e == p.experts - 1) starts[p.experts] = before;
        }
    }
    __syncthreads();
}

DEVICE Tile tile_of(const Params& p, const int* starts, int index) {
    Tile tile;
    const int at = index / p.row_blocks;
    tile.row_block = index - at * p.row_blocks;
    int low = 0, high = p.experts;  // starts[low] <= at < starts[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (starts[middle] <= at) low = middle;
        else high = middle;
    }
    tile.expert = low;
    const int tiles = starts[low + 1] - starts[low], count = p.counts[low];
    const int each = ((count + tiles - 1) / tiles + 15) / 16 * 16, first = (at - starts[low]) * each;
    tile.first = p.begins[low] + first;
    tile.tokens = min(each, count - first);
    return tile;
}

// Columns of a product that holds `tokens`: sizes that multiply_tile is made for.
DEVICE int product_size(int tokens) { return tokens <= 16 ? 16 : tokens <= 32 ? 32 : (tokens + 15) / 16 * 16; }

DEVICE void feed(const Params& p, const TensorMap* x_map, const TensorMap* scale_map, const int* starts, u32 shared,
                 u32 full, u32 empty) {
    Ring ring;
    const int tiles = starts[p.experts] * p.row_blocks;
    bool waited = false;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_of(p, starts, index);
        if (tile.tokens <= 0) continue;
        const int size = product_size(tile.tokens);
        const u8* weights = p.weights + ((long long)tile.expert * p.row_blocks + tile.row_block) * p.k_blocks * TILE_BYTES;
        auto load_weights = [&](int k, int stage) {
            barrier_expect(full + stage * 8, TILE_BYTES + size * 128 + 512);
            load_bytes(shared + stage * STAGE_BYTES + X_BYTES, weights + (long long)k * TILE_BYTES, TILE_BYTES, full + stage * 8);
        };
        auto load_tokens = [&](int k, int stage) {
            const u32 arrived = full + stage * 8, target = shared + stage * STAGE_BYTES;
            for (int row = 0; row < size; row += 16)
                load_box(target + row * 128, x_map, k * 128, tile.first + row, arrived);
            load_box(target + X_SCALES, scale_map, tile.first & ~3, k, arrived);  // starts at a multiple of 16 bytes
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

struct Place {
    int group, warp, lane, c;
};

#if GATE_UP
template <int N>
DEVICE void write_tile(float (&total)[WAVES][N / 2], const Params& p, const Tile& tile, u32 shared, const Place& at) {
    const u32 staging = shared + STAGING, maxima = shared + MAXIMA, factors = shared + FACTORS;
    const float* row_scales = p.row_scales + ((long long)tile.expert * p.row_blocks + tile.row_block) * TILE_ROWS;
#pragma unroll
    for (int w = 0; w < WAVES; w++) {
        const int rows_64 = at.group * WAVES + w, row = rows_64 * 64 + at.warp * 16 + at.lane / 4;
        const float scale_1 = __ldg(row_scales + row), scale_3 = __ldg(row_scales + row + 8);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {  // total[i] of the first N / 4 becomes the result of the token
            const int token = i / 2 * 8 + 2 * at.c + i % 2;
            const float gate = token < tile.tokens ? __ldg(p.gates + tile.first + token) : 0.0f;
            // FP32 until the cast to E4M3: what BF16 moves across a boundary of E4M3 is off by a whole step of E4M3.
            float g = total[w][i / 2 * 4 + i % 2] * scale_1, u = total[w][i / 2 * 4 + 2 + i % 2] * scale_3;
            g = g > p.limit ? p.limit : g;  // NaN stays NaN
            u = u > p.limit ? p.limit : u < -p.limit ? -p.limit : u;
            float z = token < tile.tokens ? gate * (g / (1.0f + __expf(-g)) * u) : 0.0f;
            total[w][i] = z;
            float amax = fabsf(z);
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 4));
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 8));
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 16));
            if (at.lane / 4 == 0) store_float(maxima + ((rows_64 * 4 + at.warp) * MAX_TOKENS + token) * 4, amax);
        }
    }
    named_sync(1, MATH_THREADS);
    const int thread = threadIdx.x;
    if (thread < N) {
        u32 exponents[4], top = 0;
#pragma unroll
        for (int group = 0; group < 4; group++) {
            float amax = 0.0f;
            for (int i = 0; i < 4; i++) amax = fmaxf(amax, load_float(maxima + ((group * 4 + i) * MAX_TOKENS + thread) * 4));
            exponents[group] = scale_exponent(amax);
            top = max(top, exponents[group]);
        }
#pragma unroll
        for (int group = 0; group < 4; group++) {
            const u32 target = factors + (group * MAX_TOKENS + thread) * 8;
            store_float(target, power_of_two(254 - exponents[group]));
            store_float(target + 4, power_of_two(127 + (int)exponents[group] - (int)top));
        }
        if (thread < tile.tokens)
            p.out_scales[(long long)tile.row_block * p.out_scales_stride + tile.first + thread] = power_of_two(top);
    }
    named_sync(1, MATH_THREADS);
#pragma unroll
    for (int w = 0; w < WAVES; w++) {
        const int rows_64 = at.group * WAVES + w;
#pragma unroll
        for (int i = 0; i < N / 4; i += 2) {
            const int token = i / 2 * 8 + 2 * at.c;
            const u32 factor = factors + (rows_64 * MAX_TOKENS + token) * 8;
            const float2 first = load_float2(factor), second = load_float2(factor + 8);
            const float2 rounded = unpack_e4m3(pack_e4m3(total[w][i] * first.x, total[w][i + 1] * second.x));
            const u32 pair = pack_e4m3(rounded.x * first.y, rounded.y * second.y);
            const u32 target = staging + token * STAGING_ROW + rows_64 * 32 + at.warp * 8 + at.lane / 4;
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(target), "r"(pair & 0xFF) : "memory");
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(target + STAGING_ROW), "r"(pair >> 8) : "memory");
        }
    }
    named_sync(1, MATH_THREADS);
    for (int token = thread / 8; token < tile.tokens; token += MATH_THREADS / 8) {
        const uint4 x = load_words(staging + token * STAGING_ROW + thread % 8 * 16);
        u8* target = p.out + (tile.first + token) * p.out_stride + tile.row_block * 128 + thread % 8 * 16;
        if (tile.row_block * 128 + thread % 8 * 16 < p.columns) store_global(target, x.x, x.y, x.z, x.w);
    }
}
#else
template <int N>
DEVICE void write_tile(float (&total)[WAVES][N / 2], const Params& p, const Tile& tile, u32 shared, const Place& at) {
    const u32 staging = shared + STAGING + at.group * MAX_TOKENS * 128;  // [tokens, 64 features], swizzled like x
    const float* row_scales = p.row_scales + ((long long)tile.expert * p.row_blocks + tile.row_block) * TILE_ROWS;
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int w = 0; w < WAVES; w++) {
        const int rows_64 = at.group * WAVES + w, row = rows_64 * 64 + at.warp * 16 + at.lane / 4;
        const float upper = __ldg(row_scales + row), lower = __ldg(row_scales + row + 8);
        named_sync(1 + at.group, 128);  // the buffer was read
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {  // 16 tokens: four transposed blocks of 8 features x 8 tokens
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                words[2 * i] = pack_bf16(total[w][4 * (j + i)] * upper, total[w][4 * (j + i) + 1] * upper);
                words[2 * i + 1] = pack_bf16(total[w][4 * (j + i) + 2] * lower, total[w][4 * (j + i) + 3] * lower);
            }
            const int token = 8 * (j + at.lane / 16) + at.lane % 8, chunk = at.warp * 2 + at.lane / 8 % 2;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             staging + token * 128 + ((chunk ^ token % 8) << 4)),
                         "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        }
        named_sync(1 + at.group, 128);
        const int column = tile.row_block * TILE_ROWS + rows_64 * 64 + thread % 8 * 8;
        for (int token = thread / 8; token < tile.tokens; token += 16) {
            const uint4 x = load_words(staging + token * 128 + ((thread % 8 ^ token % 8) << 4));
            const long long target = p.out_rows ? __ldg(p.out_rows + tile.first + token) : tile.first + token;
            if (column < p.columns) store_global(p.out + target * p.out_stride + column * 2, x.x, x.y, x.z, x.w);
        }
    }
}
#endif

template <int N>
DEVICE void multiply_tile(const Params& p, const Tile& tile, u32 shared, u32 full, u32 empty, Ring& ring, const Place& at) {
    float total[WAVES][N / 2], sum[N / 2];
    u32 a[2][4][4];  // of this product and the next
#pragma unroll
    for (int w = 0; w < WAVES; w++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[w][i] = 0.0f;
    barrier_wait(full + ring.stage * 8, ring.parity);
    widen(load_codes(shared + ring.stage * STAGE_BYTES + X_BYTES, at.group * WAVES, at.warp, at.lane), a[0]);
    for (int first = 0; first < p.k_blocks * WAVES; first += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int w = i % WAVES;
            const bool last_wave = w == WAVES - 1, more = first + i + 1 < p.k_blocks * WAVES;
            if (WAVES == 1 && first + i >= p.k_blocks) break;
            const u32 stage = shared + ring.stage * STAGE_BYTES, release = empty + ring.stage * 8;
            const u32 scales = stage + X_SCALES + ((tile.first & 3) + 2 * at.c) * 4;
            const u64 x = matrix_descriptor(stage);
            fence_registers(sum);
#pragma unroll
            for (int s = 0; s < 4; s++) fence_registers(a[i][s]);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++) multiply(sum, a[i][s], x + 2 * s, s);
            wgmma_commit();
            if (!last_wave) {  // the next operand is widened while the product runs
                widen(load_codes(stage + X_BYTES, at.group * WAVES + w + 1, at.warp, at.lane), a[1 - i]);
            } else {
                ring.next();
                if (more) {
                    barrier_wait(full + ring.stage * 8, ring.parity);
                    const u32 codes = shared + ring.stage * STAGE_BYTES + X_BYTES;
                    widen(load_codes(codes, at.group * WAVES, at.warp, at.lane), a[1 - i]);
                }
            }
            fence_registers(sum);
#pragma unroll
            for (int s = 0; s < 4; s++) fence_registers(a[1 - i][s]);  // widened before the wait
            wgmma_wait<0>();
            fence_registers(sum);
#pragma unroll
            for (int s = 0; s < 4; s++) fence_registers(a[i][s]);
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                const float first = load_float(scales + 32 * j), second = load_float(scales + 32 * j + 4);
                total[w][4 * j] += sum[4 * j] * first;
                total[w][4 * j + 1] += sum[4 * j + 1] * second;
                total[w][4 * j + 2] += sum[4 * j + 2] * first;
                total[w][4 * j + 3] += sum[4 * j + 3] * second;
            }
            if (last_wave) {
                __syncwarp();
                if (at.lane == 0) barrier_arrive(release);
            }
        }
    }
    write_tile<N>(total, p, tile, shared, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_gemm(const __grid_constant__ Params p, const __grid_constant__ TensorMap x_map,
             const __grid_constant__ TensorMap scale_map) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + STAGES * 8;
    int* starts = (int*)(memory + STARTS);
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
    count_tiles(p, starts, (int*)(memory + STAGING));
    if (threadIdx.x >= MATH_THREADS) {
        fewer_registers<24>();
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == GROUPS * 4 && elect_one())
            feed(p, &x_map, &scale_map, starts, shared, full, empty);
        return;
    }
    more_registers<GROUPS == 2 ? 240 : 112>();
    Ring ring;
    Place at;
    at.group = __shfl_sync(~0u, threadIdx.x / 128, 0), at.warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    at.lane = threadIdx.x % 32, at.c = at.lane % 4;
    const int tiles = starts[p.experts] * p.row_blocks;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_of(p, starts, index);
        if (tile.tokens <= 0) continue;
        __syncwarp();
        switch (product_size(tile.tokens)) {
            case 16: multiply_tile<16>(p, tile, shared, full, empty, ring, at); break;
            case 32: multiply_tile<32>(p, tile, shared, full, empty, ring, at); break;
#if MAX_TOKENS > 32
            case 48: multiply_tile<48>(p, tile, shared, full, empty, ring, at); break;
            case 64: multiply_tile<64>(p, tile, shared, full, empty, ring, at); break;
            case 80: multiply_tile<80>(p, tile, shared, full, empty, ring, at); break;
            default: multiply_tile<96>(p, tile, shared, full, empty, ring, at); break;
#endif
        }
    }
}
