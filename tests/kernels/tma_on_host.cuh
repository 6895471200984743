// deep_gemm's tma.cuh on a CPU (hopper_on_host.cuh).
#pragma once

#include "../deep_jit/hopper.cuh"

struct alignas(64) TensorMap {
    u64 base, rows, columns, stride, box_rows, box_columns, size, swizzled;  // stride in bytes, columns of `size` bytes
    u64 unused[8];
};
static void load_box(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    const int width = map->box_columns * map->size;
    send(barrier, map->box_rows * width, [=] {
        for (int r = 0; r < (int)map->box_rows; r++) {
            for (int b = 0; b < width; b++) {
                const long long y = row + r, x = column + b / (int)map->size;
                const bool inside = y >= 0 && y < (long long)map->rows && x >= 0 && x < (long long)map->columns;
                const u32 at = target + r * width + b;
                const u8* from = (const u8*)map->base + y * map->stride + column * map->size + b;
                *place(map->swizzled ? swizzled(at) : at) = inside ? *from : 0;
            }
        }
    });
}
static void load_box_to_both(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    for (u32 rank = 0; rank < 2; rank++) load_box(remote(target, rank), map, column, row, remote(barrier, rank));
}
static void prefetch_map(const TensorMap*) {}
static bool elect_one() { return threadIdx.x % 32 == 0; }
static void let_next_kernel_start() {}
static void wait_for_previous_kernel() {}
static void store_matrices_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    // Lane l points at row l % 8 of matrix l / 8; it holds elements (l % 4 * 2, +1) of column l / 4 of each, transposed.
    const u32 words[4] = {a, b, c, d};
    for (int m = 0; m < 4; m++) {
        u32 all[32], rows[32];
        for (int lane = 0; lane < 32; lane++) all[lane] = __shfl_sync(~0u, words[m], lane), rows[lane] = __shfl_sync(~0u, at, lane);
        if (threadIdx.x % 32 == 0)
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 2; i++) {
                    const u16 value = (u16)(all[lane] >> 16 * i);
                    memcpy(place(rows[8 * m + lane % 4 * 2 + i] + lane / 4 * 2), &value, 2);
                }
        __syncwarp();
    }
}
