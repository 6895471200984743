// MXFP4 weights on their way from memory to the tensor cores: codes of four bits become E4M3 in registers, exactly.
//
// The layout is made by fp4_weights.py. A tile is 256 rows x 128 columns: for each 64 rows, warp and half (rows lane / 4 and
// 8 further) 16 bytes a lane, a word for 32 columns; then for each row four bytes, one for 32 columns. A word's low half
// holds the magnitudes of columns 4 c + 0..3 and its high half those of 16 + 4 c + 0..3 (c = lane % 4), three bits in a
// nibble; the nibbles' top bits are the signs, where they have to be shifted least. A scale is 2^(t - 5) times the row's own.
//
// What the products take as columns 32 s + 16 u + 4 c + i are columns 32 c + 8 s + 4 u + i of the matrix, in the weights and
// in the tokens. All columns of a thread are then of one group of 32, with one table of magnitudes.
#pragma once

#include "../deep_jit/hopper.cuh"

#define TILE_ROWS 256
#define TILE_CODES (TILE_ROWS * 64)
#define TILE_BYTES (TILE_CODES + TILE_ROWS * 4)

// E4M3 of {0, 0.5, 1, 1.5} and {2, 3, 4, 6} times 2^(-6 - i), where they are subnormal; rounded from 2^-9 on.
__constant__ uint2 small_magnitudes[8] = {{0x0C080400, 0x1C181410}, {0x06040200, 0x14100C08}, {0x03020100, 0x0C080604},
                                          {0x02010000, 0x06040302}, {0x01000000, 0x03020201}, {0x00000000, 0x02010100},
                                          {0x00000000, 0x01000000}, {0x00000000, 0x00000000}};

// E4M3 of the eight magnitudes times 2^(t - 5), t below 12: {0, 0.5, 1, 1.5} and {2, 3, 4, 6}.
DEVICE uint2 scaled_magnitudes(u32 t) { return make_uint2(0x14100800u + t * 0x08080800u, 0x24201C18u + t * 0x08080808u); }

struct Codes {
    u32 words[2][4];  // of the two rows, one for each product of 32 columns
    u32 scales[2];    // of this thread's columns
};

DEVICE Codes load_codes(u32 tile, int rows_64, int warp, int lane) {
    Codes codes;
    u32 at = tile + rows_64 * 4096 + warp * 1024 + lane * 16;
    u32 scales = tile + TILE_CODES + (rows_64 * 64 + warp * 16 + lane / 4) * 4 + lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 words = load_words(at + half * 512);
        codes.words[half][0] = words.x, codes.words[half][1] = words.y;
        codes.words[half][2] = words.z, codes.words[half][3] = words.w;
        codes.scales[half] = load_byte(scales + half * 32);
    }
    return codes;
}

// E4M3 of these magnitudes, negative where the bytes of `signs` have their top bit.
DEVICE u32 with_signs(u32 magnitudes, u32 signs) { return or_masked<0x80808080u>(magnitudes, signs); }
// The permutation looks at the lower 16 bits of its selector only.
DEVICE void widen_word(u32 word, uint2 magnitudes, u32& low, u32& high) {
    const u32 selectors = word & 0x77777777u;
    low = with_signs(permute(magnitudes.x, magnitudes.y, selectors), word);
    high = with_signs(permute(magnitudes.x, magnitudes.y, selectors >> 16), word << 4);
}

// Eight magnitudes of a group of 32. A group far below its row's largest is rare: no branch, it is read from memory.
DEVICE uint2 group_magnitudes(u32 t) {
    uint2 magnitudes = scaled_magnitudes(t);
    if (t & 0x80) magnitudes = small_magnitudes[t & 7];
    return magnitudes;
}

// Operands of four products of 32 columns.
DEVICE void widen(const Codes& codes, u32 (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint2 magnitudes = group_magnitudes(codes.scales[half]);
#pragma unroll
        for (int s = 0; s < 4; s++) widen_word(codes.words[half][s], magnitudes, a[s][half], a[s][2 + half]);
    }
}
