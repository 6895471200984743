// Rows of activations as the products read them: E4M3 rounded with one power-of-two scale for 32 values, then brought to the
// largest of four scales, so that 128 values have one. That second step is exact but for values that become subnormal: they
// change by at most 2^-10 of a step where the largest value is above 224.
//
// Eight threads make 128 values of one row. Macros: FROM_FP8: the input is E4M3 with UE8M0 scales already, else BF16.
// ORDERED: the columns of 128 values take the order of fp4_weights.py's ordered_columns; rows have whole pieces of 128.

#include "../deep_jit/hopper.cuh"
#include "tma.cuh"

struct Params {
    const u8* x;           // rows of BF16 or E4M3
    const u8* scale_bytes; // UE8M0 [., K / 32] of E4M3 rows
    const int* rows;       // row of x for each row of the result, or null
    u8* out;               // E4M3 [M, K]
    float* out_scales;     // [K / 128, out_scales_stride]
    long long x_stride, scale_stride;  // bytes
    int out_scales_stride, m, k;
};

extern "C" __global__ void __launch_bounds__(256) quantize_rows(const __grid_constant__ Params p) {
    wait_for_previous_kernel();
    let_next_kernel_start();  // it waits for these results itself, and sees all that came before
    const int k_blocks = (p.k + 127) / 128, lane = threadIdx.x % 8;
    const long long item = blockIdx.x * 32ll + threadIdx.x / 8;
    const int row = (int)(item / k_blocks), k_block = (int)(item - (long long)row * k_blocks);
    const int column = k_block * 128 + lane * 16;
    const bool inside = row < p.m && column < p.k;  // K is a multiple of 16
    const long long source = inside ? (p.rows ? p.rows[row] : row) : 0;
    float v[16];
    int exponent = 0;
#if FROM_FP8
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (inside) {
        raw = *(const uint4*)(p.x + source * p.x_stride + column);
        exponent = p.scale_bytes[source * p.scale_stride + column / 32];
    }
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 two = unpack_e4m3((u16)(words[i / 2] >> 16 * (i % 2)));
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
#else
    uint4 raw[2] = {};
    if (inside) {
        const uint4* at = (const uint4*)(p.x + source * p.x_stride + column * 2);
        raw[0] = at[0], raw[1] = at[1];
    }
    const u32 words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[2 * i] = low_bf16(words[i]), v[2 * i + 1] = high_bf16(words[i]);
        amax = fmaxf(amax, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    exponent = scale_exponent(amax);
    const float inverse = power_of_two(254 - exponent);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 two = unpack_e4m3(pack_e4m3(v[2 * i] * inverse, v[2 * i + 1] * inverse));
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
#endif
    int top = exponent;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
    const float factor = power_of_two(127 + exponent - top);
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        packed[i] = pack_e4m3(v[4 * i] * factor, v[4 * i + 1] * factor) |
                    (u32)pack_e4m3(v[4 * i + 2] * factor, v[4 * i + 3] * factor) << 16;
#if ORDERED
    // The word of columns 32 c + 8 s + 4 u + 0..3 goes to 32 s + 16 u + 4 c: c = lane / 2, s = 2 (lane % 2) + i / 2, u = i % 2.
    u8* target = p.out + ((long long)row * k_blocks + k_block) * 128 + lane % 2 * 64 + lane / 2 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (row < p.m) *(u32*)(target + i / 2 * 32 + i % 2 * 16) = packed[i];
#else
    if (inside) store_global(p.out + (long long)row * p.k + column, packed[0], packed[1], packed[2], packed[3]);
#endif
    if (row < p.m && lane == 0) {
        float scale = top == 255 ? __uint_as_float(0x7FC00000u) : top == 0 ? 0x1p-127f : power_of_two(top);
        p.out_scales[(long long)k_block * p.out_scales_stride + row] = scale;
    }
}
