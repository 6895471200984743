// flash_mla/instructions.cuh on a CPU (hopper_on_host.cuh): the query's copies, a cluster's memory, BF16 products.
#pragma once

#include <array>

#include "../deep_jit/hopper.cuh"

struct alignas(64) TensorMap { const u8* base; long long token_stride, head_stride; u8 unused[104]; };
static void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
    const u8* source = map.base + z * map.token_stride + y * map.head_stride + x * 2;
    const long long stride = map.head_stride;
    send(barrier, 8192, [=] {
        for (int row = 0; row < 64; row++)
            for (int chunk = 0; chunk < 8; chunk++)
                memcpy(place(swizzled(target + row * 128 + chunk * 16)), source + row * stride + chunk * 16, 16);
    });
}

static u32 peer_address(u32 address, int rank) { return remote(address, rank); }
static void store_peer(u32 address, float a) { store_float(address, a); }
static void store_peer(u32 address, float a, float b, float c, float d) {
    float four[4] = {a, b, c, d};
    memcpy(place(address), four, 16);
}

static float value_at(u32 address) {
    u16 bits;
    memcpy(&bits, fibers[current].block->memory.data() + swizzled(address), 2);
    return __uint_as_float((u32)bits << 16);
}
// Row `row` and number k of an operand whose summed dimension is contiguous.
static u32 along(u64 descriptor, int row, int k) { return ((descriptor & 0x3FFF) << 4) + row / 8 * 1024 + row % 8 * 128 + k * 2; }
// Row k and column `column` of one in tiles of 64 columns.
static u32 across(u64 descriptor, int k, int column) {
    return ((descriptor & 0x3FFF) << 4) + column / 64 * ((descriptor >> 16 & 0x3FFF) << 4) + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2;
}

static void multiply_64x64(float (&d)[32], u64 a, u64 b, int accumulate) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float left[2][16];
    for (int k = 0; k < 16; k++) left[0][k] = value_at(along(a, row, k)), left[1][k] = value_at(along(a, row + 8, k));
    for (int j = 0; j < 16; j++) {
        const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
        float sum[2] = {};
        for (int k = 0; k < 16; k++) {
            const float right = value_at(along(b, column, k));
            sum[0] += left[0][k] * right, sum[1] += left[1][k] * right;
        }
        for (int i = 0; i < 2; i++) {
            float& target = d[j / 2 * 4 + i * 2 + j % 2];
            target = (accumulate ? target : 0) + sum[i];
        }
    }
}

static void multiply_64x256(float (&d)[128], const std::array<u32, 4>& a, u64 b) {
    const int lane = threadIdx.x % 32, quad = lane & ~3;
    float left[2][16];  // rows r and r + 8; a quad has a row's sixteen numbers
    for (int half = 0; half < 2; half++)
        exchange(a[2 * half] | (u64)a[2 * half + 1] << 32, [&](u64* all) {
            for (int c = 0; c < 4; c++)
                for (int i = 0; i < 2; i++) {
                    const u32 word = all[quad + c] >> 32 * i;
                    left[i][half * 8 + c * 2] = low_bf16(word), left[i][half * 8 + c * 2 + 1] = high_bf16(word);
                }
            return 0;
        });
    for (int j = 0; j < 64; j++) {
        const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
        float sum[2] = {};
        for (int k = 0; k < 16; k++) {
            const float right = value_at(across(b, k, column));
            sum[0] += left[0][k] * right, sum[1] += left[1][k] * right;
        }
        for (int i = 0; i < 2; i++) d[j / 2 * 4 + i * 2 + j % 2] += sum[i];
    }
}

static void wgmma_64x64(float (&d)[32], u64 a, u64 b, int accumulate) {
    running[current].open.push_back([&d, a, b, accumulate] { multiply_64x64(d, a, b, accumulate); });
}
static void wgmma_64x256(float (&d)[128], const u32 (&a)[4], u64 b) {
    std::array<u32, 4> words = {a[0], a[1], a[2], a[3]};
    running[current].open.push_back([&d, words, b] { multiply_64x256(d, words, b); });
}
