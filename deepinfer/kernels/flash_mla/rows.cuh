// The producer's side: cache rows of 512 values -> BF16 key tiles in shared memory, 64 keys x 512 in two halves of 256.
//
// A half is 4 sub-tiles of [64 keys x 64 values], rows of 128 bytes, 16-byte chunks swizzled by the row (chunk ^ row % 8).
// 128 threads fill it: thread t writes chunk t % 8 of rows t / 8 + 16 i in every sub-tile, which meets no bank twice.
#pragma once

#include "hopper.cuh"

#define ROWS_NONE 0
#define ROWS_BF16 1   // 1,024 bytes
#define ROWS_FP8 2    // 512 of E4M3, then 16 of UE8M0 (one for 32 values)
#define ROWS_NVFP4 3  // 256 of E2M1 pairs, then 32 of E4M3 (one for 16 values)

#define ROW_BYTES(format) ((format) == ROWS_FP8 ? 528 : (format) == ROWS_NVFP4 ? 288 : 1024)

#define HALF_TILE_BYTES 32768
#define SUB_TILE_BYTES 8192
#define ROWS_A_THREAD 4

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

// The rows of one tile that a thread reads, 16 apart; -1 where there is none.
struct Rows {
    int slot[ROWS_A_THREAD];

    DEVICE void find(const RowSource& source, int token, int first) {
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++) slot[i] = slot_at(source, token, first + 16 * i);
    }
};

DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Half of one packed row as a thread holds it: 4 groups of 8 values, chunk `lane` of each sub-tile, then their scales.
struct PackedRow {
    u32 words[10];
};

template <int FORMAT>
DEVICE void load_packed(PackedRow& raw, const u8* row, int half, int lane) {
    if (FORMAT == ROWS_FP8) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            uint2 eight = __ldg((const uint2*)(row + half * 256 + t * 64 + lane * 8));
            raw.words[2 * t] = eight.x, raw.words[2 * t + 1] = eight.y;
        }
        uint2 scales = __ldg((const uint2*)(row + 512 + half * 8));
        raw.words[8] = scales.x, raw.words[9] = scales.y;
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++) raw.words[t] = __ldg((const u32*)(row + half * 128 + t * 32 + lane * 4));
        uint4 scales = __ldg((const uint4*)(row + 256 + half * 16));
        raw.words[4] = scales.x, raw.words[5] = scales.y, raw.words[6] = scales.z, raw.words[7] = scales.w;
    }
}

// E4M3 at the top of a BF16's exponent and mantissa is the value x 2^-120, subnormal numbers included.
DEVICE u32 widen_e4m3(u32 bytes, u32 selector, u32 scale) {
    u32 top = permute(bytes, 0, selector);
    return multiply_bf16((top >> 4 & 0x07F007F0u) | (top & 0x80008000u), scale);
}

// The 8 values of sub-tile t times 2^-16, in BF16. A scale of NaN makes them NaN; so does an FP8 scale beyond 2^23.
template <int FORMAT>
DEVICE void unpack(const PackedRow& raw, int t, int lane, u32 (&words)[4]) {
    if (FORMAT == ROWS_FP8) {
        u32 exponent = permute(raw.words[8 + t / 2], 0, 0x4440 + t % 2 * 2 + lane / 4);
        u32 scale = exponent > 150 ? NAN_PAIR : (exponent + 104) * 0x00800080u;  // two of 2^(e - 127 + 120 - 16)
        words[0] = widen_e4m3(raw.words[2 * t], 0x1404, scale);
        words[1] = widen_e4m3(raw.words[2 * t], 0x3424, scale);
        words[2] = widen_e4m3(raw.words[2 * t + 1], 0x1404, scale);
        words[3] = widen_e4m3(raw.words[2 * t + 1], 0x3424, scale);
    } else {  // E2M1 at the bottom of a BF16's exponent is the value x 2^-126
        u32 byte = permute(raw.words[4 + t], 0, 0x4440 + lane / 2);
        u32 scale = byte == 0x7F ? NAN_PAIR : byte * 0x00100010u;  // two of the scale x 2^-120
        scale = multiply_bf16(multiply_bf16(scale, 0x7B807B80u), 0x76807680u);  // x 2^120 x 2^(126 - 16)
        u32 x = raw.words[t];
        u32 a = multiply_bf16((x << 6 & 0x01C001C0u) | (x << 12 & 0x80008000u), scale);  // values 0 and 4
        u32 b = multiply_bf16((x << 2 & 0x01C001C0u) | (x << 8 & 0x80008000u), scale);   // 1 and 5
        u32 c = multiply_bf16((x >> 2 & 0x01C001C0u) | (x << 4 & 0x80008000u), scale);   // 2 and 6
        u32 d = multiply_bf16((x >> 6 & 0x01C001C0u) | (x & 0x80008000u), scale);        // 3 and 7
        words[0] = permute(a, b, 0x5410);
        words[1] = permute(c, d, 0x5410);
        words[2] = permute(a, b, 0x7632);
        words[3] = permute(c, d, 0x7632);
    }
}

// One of a thread's four rows: `load_row` may run while the half tile is still in use. BF16 rows need no registers and
// are copied by `store_row`.
template <int FORMAT, int PAGE>
DEVICE void load_row(PackedRow& raw, const RowSource& source, int slot, int half, int lane) {
    if (FORMAT == ROWS_BF16) return;
    if (slot >= 0) load_packed<FORMAT>(raw, row_address<PAGE>(source, slot), half, lane);
    else raw = PackedRow{};
}

// SCALED: leave the values times 2^-16.
template <int FORMAT, int PAGE, bool SCALED>
DEVICE void store_row(const PackedRow& raw, const RowSource& source, int slot, u32 target, int half, int lane) {
    if constexpr (FORMAT == ROWS_BF16) {
        const u8* row = row_address<PAGE>(source, max(slot, 0)) + half * 512 + lane * 16;
        const u64 policy = keep_policy();
#pragma unroll
        for (int t = 0; t < 4; t++) copy_16(target + t * SUB_TILE_BYTES, row + t * 128, slot >= 0, policy);
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            u32 words[4];
            unpack<FORMAT>(raw, t, lane, words);
            if (!SCALED) {
#pragma unroll
                for (int w = 0; w < 4; w++) words[w] = multiply_bf16(words[w], 0x47804780u);  // 2^16
            }
            store_shared(target + t * SUB_TILE_BYTES, words[0], words[1], words[2], words[3]);
        }
    }
}

template <int FORMAT>
DEVICE void announce(u32 ready) {
    if (FORMAT == ROWS_BF16) {
        barrier_arrive_on_copies(ready);
    } else {
        fence_to_matrix_units();
        barrier_arrive(ready);
    }
}
