// The producer's side: cache rows of 512 values -> BF16 key tiles in shared memory, 64 keys x 512 in two halves of 256.
//
// A half is 4 sub-tiles of [64 keys x 64 values], rows of 128 bytes, 16-byte chunks swizzled by the row (chunk ^ row % 8).
// 128 threads fill it. BF16: thread t copies chunk t % 8 of rows t / 8 + 16 i in every sub-tile. Packed: a warp's 8 x 4
// threads take 8 rows x 4 units of 32 values, twice along the rows and twice along the half; either way the 8 threads
// that store at once write 8 different chunks, and no bank twice.
#pragma once

#include "../deep_jit/hopper.cuh"

#define ROWS_NONE 0
#define ROWS_BF16 1   // 1,024 bytes
#define ROWS_FP8 2    // 512 of E4M3, then 16 of UE8M0 (one for 32 values)
#define ROWS_NVFP4 3  // 256 of E2M1 pairs, then 32 of E4M3 (one for 16 values)

#define HALF_TILE_BYTES 32768
#define SUB_TILE_BYTES 8192
#define ROWS_A_THREAD(format) ((format) == ROWS_BF16 ? 4 : 2)

// Packed rows are widened times 2^-16, so that a product of two scales stays in range; see KEY_SCALE in attention.cu.
#define UNPACK_SCALE 65536.0f
#define NAN_PAIR 0x7FC07FC0u

struct RowSource {
    const u8* base;
    long long page_stride, row_stride;  // bytes
    const int* slots;                   // [tokens, count]; -1: no row
    long long slots_stride;
    int count;
};

// PAGE rows a page; 0: one page holds all.
template <int PAGE>
DEVICE const u8* row_address(const RowSource& source, int slot) {
    if (PAGE == 0) return source.base + slot * source.row_stride;
    return source.base + slot / (PAGE ? PAGE : 1) * source.page_stride + slot % (PAGE ? PAGE : 1) * source.row_stride;
}

DEVICE int slot_at(const RowSource& source, int token, int position) {
    return position < source.count ? __ldg(source.slots + token * source.slots_stride + position) : -1;
}

// Row of a tile that is a thread's number i.
template <int FORMAT>
DEVICE int tile_row(int i) {
    const int thread = threadIdx.x % 128;
    return FORMAT == ROWS_BF16 ? thread / 8 + 16 * i : thread / 32 * 16 + thread % 8 + 8 * i;
}

// 32 values of a packed row as they are in memory, and their scales.
struct Unit {
    uint4 words[2];
    u32 scales;
};

// A thread's two units of half a row: numbers `thread / 8 % 4` and 4 further.
template <int FORMAT>
DEVICE void load_units(Unit (&units)[2], const u8* row, int half) {
    const int unit = threadIdx.x / 8 % 4;
    if (FORMAT == ROWS_FP8) {
        row += half * 256 + unit * 32;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            units[j].words[0] = __ldg((const uint4*)(row + j * 128));
            units[j].words[1] = __ldg((const uint4*)(row + j * 128 + 16));
        }
        row += 512 - half * 248 - unit * 31;
#pragma unroll
        for (int j = 0; j < 2; j++) units[j].scales = __ldg(row + j * 4);
    } else {
        row += half * 128 + unit * 16;
#pragma unroll
        for (int j = 0; j < 2; j++) units[j].words[0] = __ldg((const uint4*)(row + j * 64));
        row += 256 - half * 112 - unit * 14;
#pragma unroll
        for (int j = 0; j < 2; j++) units[j].scales = __ldg((const u16*)(row + j * 8));
    }
}

// E4M3 at the top of a BF16's exponent and mantissa is the value x 2^-120, subnormal numbers included.
DEVICE u32 widen_e4m3(u32 bytes, u32 selector, u32 scale) {
    u32 top = permute(bytes, 0, selector);
    return multiply_bf16((top >> 4 & 0x07F007F0u) | (top & 0x80008000u), scale);
}

// Two of 2^(e - 127 + 120 - 16). A scale beyond 2^23 counts as NaN.
DEVICE u32 fp8_scale(u32 exponent) { return exponent > 150 ? NAN_PAIR : (exponent + 104) * 0x00800080u; }

// Two of the scale times 2^(126 - 16); E4M3 at the top of a BF16's exponent and mantissa is the scale x 2^-120.
DEVICE u32 nvfp4_scale(u32 byte) {
    u32 scale = byte == 0x7F ? NAN_PAIR : byte * 0x00100010u;
    return multiply_bf16(multiply_bf16(scale, 0x7B807B80u), 0x76807680u);
}

// Eight values of E2M1: at the bottom of a BF16's exponent they are the values x 2^-126.
DEVICE void widen_e2m1(u32 x, u32 scale, u32 (&words)[4]) {
    u32 a = multiply_bf16((x << 6 & 0x01C001C0u) | (x << 12 & 0x80008000u), scale);  // values 0 and 4
    u32 b = multiply_bf16((x << 2 & 0x01C001C0u) | (x << 8 & 0x80008000u), scale);   // 1 and 5
    u32 c = multiply_bf16((x >> 2 & 0x01C001C0u) | (x << 4 & 0x80008000u), scale);   // 2 and 6
    u32 d = multiply_bf16((x >> 6 & 0x01C001C0u) | (x & 0x80008000u), scale);        // 3 and 7
    words[0] = permute(a, b, 0x5410);
    words[1] = permute(c, d, 0x5410);
    words[2] = permute(a, b, 0x7632);
    words[3] = permute(c, d, 0x7632);
}

// The four chunks of a unit times 2^-16 (SCALED) or as they are; chunk k goes to target[k] + offset. A scale of NaN makes
// its values NaN.
template <int FORMAT, bool SCALED>
DEVICE void store_unit(const Unit& unit, const u32 (&target)[4], u32 offset) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint4& four = unit.words[FORMAT == ROWS_FP8 ? k / 2 : 0];
        u32 words[4];
        if (FORMAT == ROWS_FP8) {
            const u32 scale = fp8_scale(unit.scales);
            const u32 low = k % 2 ? four.z : four.x, high = k % 2 ? four.w : four.y;
            words[0] = widen_e4m3(low, 0x1404, scale);
            words[1] = widen_e4m3(low, 0x3424, scale);
            words[2] = widen_e4m3(high, 0x1404, scale);
            words[3] = widen_e4m3(high, 0x3424, scale);
        } else {
            const u32 scale = nvfp4_scale(k < 2 ? unit.scales & 0xFF : unit.scales >> 8);
            widen_e2m1(k == 0 ? four.x : k == 1 ? four.y : k == 2 ? four.z : four.w, scale, words);
        }
        if (!SCALED) {
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = multiply_bf16(words[w], 0x47804780u);  // 2^16
        }
        store_shared(target[k] + offset, words[0], words[1], words[2], words[3]);
    }
}

// Half of a BF16 row; zeros where there is none.
DEVICE void copy_half_row(u32 target, const u8* row, bool present, int half, u64 policy) {
    row += half * 512 + threadIdx.x % 8 * 16;
#pragma unroll
    for (int t = 0; t < 4; t++) copy_16(target + t * SUB_TILE_BYTES, row + t * 128, present, policy);
}
