// What the indexer's logits take, made of what the engine has.
//
// mqa_queries: BF16 queries [tokens, HEADS, 128] -> E4M3 under one scale a head (exact for values that an FP4 round trip
// left), the scales folded into the heads' weights. FP4_ORDER: columns in the order of keys that are widened in registers
// (mqa_logits.cu). A block is a token, eight threads a head.
//
// mqa_keys: MXFP4 keys of pages -> E4M3 [sequences x width, 128] under one scale a key; keys that no row of the sequence
// sees are left out. Eight threads a key.
// Macros: FP4_ORDER, HEADS.

#include "fp4_weights.cuh"

extern "C" __global__ void __launch_bounds__(HEADS * 8)
    mqa_queries(const u8* iq, const void* weights, int weights_are_bf16, u8* out, float* out_weights) {
    const int head = threadIdx.x / 8, lane = threadIdx.x % 8;
    const long long row = (long long)blockIdx.x * HEADS + head;
    const uint4* at = (const uint4*)(iq + row * 256 + lane * 32);  // 16 values
    const uint4 raw[2] = {at[0], at[1]};
    const u32 words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) amax = fmaxf(amax, fmaxf(fabsf(low_bf16(words[i])), fabsf(high_bf16(words[i]))));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    const u32 exponent = scale_exponent(amax);
    const float inverse = power_of_two(254 - exponent);
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        packed[i] = pack_e4m3(low_bf16(words[2 * i]) * inverse, high_bf16(words[2 * i]) * inverse) |
                    (u32)pack_e4m3(low_bf16(words[2 * i + 1]) * inverse, high_bf16(words[2 * i + 1]) * inverse) << 16;
    u8* target = out + row * 128;
#if FP4_ORDER
    // Columns 8 c + 0..3 of a group of 32 stand at 4 c, 8 c + 4..7 at 16 + 4 c; this thread has c = 2 (lane % 2) and the next.
    u8* group = target + lane / 2 * 32 + lane % 2 * 8;
    *(uint2*)group = make_uint2(packed[0], packed[2]);
    *(uint2*)(group + 16) = make_uint2(packed[1], packed[3]);
#else
    store_global(target + lane * 16, packed[0], packed[1], packed[2], packed[3]);
#endif
    if (lane == 0) {
        const float weight = weights_are_bf16 ? low_bf16(((const u16*)weights)[row]) : ((const float*)weights)[row];
        out_weights[row] = weight * power_of_two(exponent);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    mqa_keys(const u8* cache, const int* tables, const int* most, u8* keys, float* scales, int sequences, int width, int entries,
             int table_stride, long long page_stride) {
    const int lane = threadIdx.x % 8, position = blockIdx.x * 32 + threadIdx.x / 8, sequence = blockIdx.y;
    if (position >= width || position >= most[sequence]) return;
    const int page = tables[(long long)sequence * table_stride + position / entries];
    const u8* row = cache + page * page_stride + position % entries * 68;
    const uint2 codes = make_uint2(*(const u32*)(row + lane * 8), *(const u32*)(row + lane * 8 + 4));
    const u32 exponents = *(const u32*)(row + 64);
    int top = 0;
#pragma unroll
    for (int s = 0; s < 4; s++) top = max(top, (int)(exponents >> 8 * s & 255));
    const int t = 11 - top + (int)(exponents >> lane / 2 * 8 & 255);
    uint2 magnitudes = scaled_magnitudes(t);
    if (t < 0) magnitudes = small_magnitudes[min(-1 - t, 7)];
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 word = i ? codes.y : codes.x, shifted = word << 4, selectors = word & 0x77777777u;
        packed[2 * i] = permute(magnitudes.x, magnitudes.y, selectors) | (permute(word, shifted, 0x9D8C) & 0x80808080u);
        packed[2 * i + 1] =
            permute(magnitudes.x, magnitudes.y, selectors >> 16) | (permute(word, shifted, 0xBFAE) & 0x80808080u);
    }
    const long long key = (long long)sequence * width + position;
    store_global(keys + key * 128 + lane * 16, packed[0], packed[1], packed[2], packed[3]);
    if (lane == 0) scales[key] = top == 255 ? __int_as_float(0x7FC00000) : __int_as_float(max(top - 6, 0) << 23);
}
