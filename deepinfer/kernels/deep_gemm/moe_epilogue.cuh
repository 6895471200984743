// What becomes of a tile's sums in moe_gemm.cu: SwiGLU as E4M3 with its scales (GATE_UP), or rows in BF16.
#pragma once

#include "fp4_weights.cuh"
#include "moe_tiles.cuh"

struct Place {
    int group, warp, lane, c;

    // The same place, hidden from the compiler, which would compute what follows from it once for all tiles, and keep it in
    // registers that the products need.
    DEVICE Place anew() const {
        Place place = {group, warp, (int)hidden(lane), 0};
        place.c = place.lane % 4;
        return place;
    }
};

// What a tile's epilogue needs of memory, asked for before its products run.
struct Ahead {
    float row_scales[2];
    int note;  // of one token of this thread: its gate's bits (GATE_UP), or its row of the result

    DEVICE Ahead(const Params& p, const Tile& tile, const Place& at) {
        const long long rows = ((long long)tile.expert * p.row_blocks + tile.row_block) * TILE_ROWS;
#pragma unroll
        for (int i = 0; i < 2; i++)
            row_scales[i] = __ldg(p.row_scales + rows + at.group * 64 + at.warp * 16 + at.lane / 4 + 8 * i);
        // No branches on the thread here: behind them the compiler keeps no warp-wide values in uniform registers.
        note = tile.first + min((int)(GATE_UP ? threadIdx.x : threadIdx.x % 128), tile.tokens - 1);
        if (GATE_UP) note = __float_as_int(__ldg(p.gates + note));
        else if (p.out_rows) note = __ldg(p.out_rows + note);
    }
};

#if GATE_UP
template <int N>
DEVICE void write_tile(float (&total)[N / 2], const Params& p, const Tile& tile, const Ahead& ahead, u32 shared,
                       const Place& place) {
    const Place at = place.anew();
    const u32 staging = shared + STAGING, maxima = shared + MAXIMA, factors = shared + FACTORS, gates = shared + NOTES;
    const int thread = (at.group * 4 + at.warp) * 32 + at.lane;
    if (thread < N) store_float(gates + thread * 4, __int_as_float(ahead.note));
    named_sync(1, MATH_THREADS);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {  // total[i] of the first N / 4 becomes the result of the token
        const int token = i / 2 * 8 + 2 * at.c + i % 2;
        // FP32 until the cast to E4M3: what BF16 moves across a boundary of E4M3 is off by a whole step of E4M3.
        float g = total[i / 2 * 4 + i % 2] * ahead.row_scales[0];
        float u = total[i / 2 * 4 + 2 + i % 2] * ahead.row_scales[1];
        g = g > p.limit ? p.limit : g;  // NaN stays NaN
        u = u > p.limit ? p.limit : u < -p.limit ? -p.limit : u;
        float z = load_float(gates + token * 4) * (__fdividef(g, 1.0f + __expf(-g)) * u);
        total[i] = z;
        float amax = fabsf(z);
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 4));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 8));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 16));
        if (at.lane / 4 == 0) store_float(maxima + ((at.group * 4 + at.warp) * MAX_TOKENS + token) * 4, amax);
    }
    named_sync(1, MATH_THREADS);
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
        if (thread >= tile.skip && thread < tile.tokens)
            p.out_scales[(long long)tile.row_block * p.out_scales_stride + tile.first + thread] = power_of_two(top);
    }
    named_sync(1, MATH_THREADS);
#pragma unroll
    for (int i = 0; i < N / 4; i += 2) {
        const int token = i / 2 * 8 + 2 * at.c;
        const u32 factor = factors + (at.group * MAX_TOKENS + token) * 8;
        const float2 first = load_float2(factor), second = load_float2(factor + 8);
        const float2 rounded = unpack_e4m3(pack_e4m3(total[i] * first.x, total[i + 1] * second.x));
        const u32 pair = pack_e4m3(rounded.x * first.y, rounded.y * second.y);
        // Feature 32 group + 8 warp + lane / 4 in the order of fp4_weights.cuh.
        const int column = at.warp * 32 + at.lane / 16 * 16 + at.group * 4 + at.lane / 4 % 4;
        const u32 target = staging + token * STAGING_ROW + column;
        store_byte(target, pair & 0xFF);
        store_byte(target + STAGING_ROW, pair >> 8);
    }
    named_sync(1, MATH_THREADS);
    for (int token = thread / 8; token < tile.tokens; token += MATH_THREADS / 8) {
        const uint4 x = load_words(staging + token * STAGING_ROW + thread % 8 * 16);
        u8* target = p.out + (tile.first + token) * p.out_stride + tile.row_block * 128 + thread % 8 * 16;
        const bool inside = token >= tile.skip && tile.row_block * 128 + thread % 8 * 16 < p.columns;
        if (inside) store_global(target, x.x, x.y, x.z, x.w);
    }
}
#else
template <int N>
DEVICE void write_tile(float (&total)[N / 2], const Params& p, const Tile& tile, const Ahead& ahead, u32 shared,
                       const Place& place) {
    const Place at = place.anew();
    const u32 staging = shared + STAGING + at.group * MAX_TOKENS * 128;  // [tokens, 64 features], swizzled like x
    const u32 out_rows = shared + NOTES + at.group * MAX_TOKENS * 4;
    const int thread = at.warp * 32 + at.lane;
    const float upper = ahead.row_scales[0], lower = ahead.row_scales[1];
    named_sync(1 + at.group, 128);  // the buffer was read
    if (thread < N) store_float(out_rows + thread * 4, __int_as_float(ahead.note));
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {  // 16 tokens: four transposed blocks of 8 features x 8 tokens
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int first = 4 * (j + i < N / 8 ? j + i : j);  // the last 8 of 56 or 72 tokens are alone
            words[2 * i] = pack_bf16(total[first] * upper, total[first + 1] * upper);
            words[2 * i + 1] = pack_bf16(total[first + 2] * lower, total[first + 3] * lower);
        }
        const int token = 8 * (j + at.lane / 16) + at.lane % 8, chunk = at.warp * 2 + at.lane / 8 % 2;
        store_matrices_transposed(staging + token * 128 + ((chunk ^ token % 8) << 4), words[0], words[1], words[2],
                                  words[3]);
    }
    named_sync(1 + at.group, 128);
    const int column = tile.row_block * TILE_ROWS + at.group * 64 + thread % 8 * 8;
    if (column >= p.columns) return;
    for (int token = thread / 8; token < tile.tokens; token += 16) {
        const uint4 x = load_words(staging + token * 128 + ((thread % 8 ^ token % 8) << 4));
        const long long target = __float_as_int(load_float(out_rows + token * 4));
        if (token >= tile.skip) store_global(p.out + target * p.out_stride + column * 2, x.x, x.y, x.z, x.w);
    }
}
#endif
