// deep_gemm's products.cuh on a CPU (hopper_on_host.cuh): those of FP8 operands, a in registers.
#pragma once

#include "../deep_jit/hopper.cuh"

// d [64 x N] (+)= a [64 x 32] b [N x 32]^T; `a` is read from its thread's registers when the product takes place.
static void multiply_now(float* d, int count, const u32* a, u64 b, bool adds) {
    const u8* memory = fibers[current].block->memory.data();
    const u32 right = (b & 0x3FFF) << 4;
    static float table[256];
    if (table[1] == 0) for (int i = 0; i < 256; i++) table[i] = from_e4m3(i);
    const int lane = threadIdx.x % 32, c = lane % 4, quad = lane & ~3;
    for (int half = 0; half < 2; half++) {
        float row[32];
        exchange(a[half] | (u64)a[2 + half] << 32, [&](u64* all) {
            for (int from = 0; from < 4; from++)
                for (int i = 0; i < 8; i++) row[i / 4 * 16 + 4 * from + i % 4] = table[all[quad + from] >> 8 * i & 0xFF];
            return 0;
        });
        for (int j = 0; j < count / 4; j++) {
            for (int i = 0; i < 2; i++) {
                const u32 token = 8 * j + 2 * c + i;
                float sum = 0;
                for (u32 k = 0; k < 32; k++) sum += row[k] * table[memory[swizzled(right + token * 128 + k)]];
                float& target = d[4 * j + 2 * half + i];
                target = adds ? target + sum : sum;
            }
        }
    }
}
template <int COUNT>
static void multiply(float (&d)[COUNT], const u32 (&a)[4], u64 b, int adds) {
    float* target = d;
    const u32* left = a;
    running[current].open.push_back([=] { multiply_now(target, COUNT, left, b, adds != 0); });
    if (!adds) for (float& x : d) x = NAN;  // not to be read yet
}
template <int COUNT>
static void multiply_new(float (&d)[COUNT], const u32 (&a)[4], u64 b) { multiply(d, a, b, 0); }
