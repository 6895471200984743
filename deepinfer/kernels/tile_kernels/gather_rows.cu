// Rows of FP8 with a power of two for 32 values, gathered from a large table and widened to BF16: Engram's memory.
//
// A warp takes ROWS rows whose loads are all on their way together: 8 bytes a lane and row, the scales of all rows in one
// more. So a row's bytes are asked for at once, which is what a row far from the last one needs.
//
// Macros: ROWS (at most 16), CLUSTER = 1.
#include "../deep_select/cluster.cuh"

#define THREADS 128
#define WARPS (THREADS / 32)
#define DIM 256
#define ALL 0xFFFFFFFFu

struct GatherParams {
    const u8* table;  // rows of DIM bytes and DIM / 32 scales, 8 bytes aligned
    const long long* slots;
    u16* out;  // [count, DIM]
    int count;
    int page_size;
    long long page_stride;  // in bytes
    long long row_stride;
};

// 2^(byte - 127); NaN for 255.
DEVICE float power_of(u32 byte) {
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23);
}

KERNEL(THREADS, 8) gather_rows(const GatherParams p) {
    int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    follow_launch_before();
    if (first >= p.count) return;
    int slot = lane < ROWS && first + lane < p.count ? max(static_cast<int>(p.slots[first + lane]), 0) : 0;
    int page = slot / p.page_size;
    long long start = page * p.page_stride + (slot - page * p.page_size) * p.row_stride;
    uint2 codes[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const u8* row = p.table + __shfl_sync(ALL, start, i);
        codes[i] = *reinterpret_cast<const uint2*>(row + 8 * lane);
    }
    uint2 scales = *reinterpret_cast<const uint2*>(p.table + start + DIM);  // of row `lane`
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        u32 low = __shfl_sync(ALL, scales.x, i), high = __shfl_sync(ALL, scales.y, i);
        float scale = power_of((lane < 16 ? low : high) >> lane / 4 % 4 * 8 & 255);
        float value[8];
        widen_e4m3(codes[i].x, value);
        widen_e4m3(codes[i].y, value + 4);
        uint4 words = {pack_bf16(value[0] * scale, value[1] * scale), pack_bf16(value[2] * scale, value[3] * scale),
                       pack_bf16(value[4] * scale, value[5] * scale), pack_bf16(value[6] * scale, value[7] * scale)};
        if (first + i < p.count) store_vector(p.out + (static_cast<long long>(first) + i) * DIM + 8 * lane, words);
    }
}
