// Casts of BF16 numbers to E4M3 with a power of two for 32 of them, behind a norm, a gated activation or a rotation.
//
// A thread has 8 adjacent numbers, four threads a group. What is cast is rounded to BF16 first, as if both were apart.
//
// Macros: UE8M0 = 1, CLUSTER = 1, THREADS, BLOCKS (on a multiprocessor), WIDTH (of a row of the result); for the rotation
// HEAD (values of a head) and PAIRS (that turn, at its end).
#include "casts.cuh"

#define ACROSS (WIDTH / 8)  // vectors of a row

struct FusedParams {
    const u16* x;
    const u16* weight;
    const float* cos;  // [rows, PAIRS]
    const float* sin;
    u8* codes;   // [rows, WIDTH]
    u8* scales;  // [rows, WIDTH / 32]
    long long stride;
    long long head_stride;
    int rows;
    float value;  // epsilon of the norm, limit of the activation, sign of the rotation
};

DEVICE void widen(uint4 words, float (&value)[8]) {
    value[0] = low_of(words.x), value[1] = high_of(words.x), value[2] = low_of(words.y), value[3] = high_of(words.y);
    value[4] = low_of(words.z), value[5] = high_of(words.z), value[6] = low_of(words.w), value[7] = high_of(words.w);
}

DEVICE uint4 narrow(const float (&value)[8]) {
    uint4 words = {pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]), pack_bf16(value[4], value[5]),
                   pack_bf16(value[6], value[7])};
    return words;
}

// Codes and scale of vector number `at` of the result; all lanes of a group are alive or none.
DEVICE void store_group(const FusedParams& p, uint4 words, u32 at, bool alive) {
    u32 largest = larger_half_of(largest_of(words));
    largest = max(largest, __shfl_xor_sync(ALL, largest, 1));
    largest = max(largest, __shfl_xor_sync(ALL, largest, 2));
    Scale s = scale_of(largest);
    if (!alive) return;
    uint2 codes = {codes_of(words.x, words.y, s), codes_of(words.z, words.w, s)};
    reinterpret_cast<uint2*>(p.codes)[at] = codes;
    if (at % 4 == 0) p.scales[at / 4] = s.stored;
}

#define OWN ((ACROSS + THREADS - 1) / THREADS)  // vectors of a thread

// A block takes a row.
KERNEL(THREADS, BLOCKS) norm_cast(const FusedParams p) {
    SHARED_MEMORY(memory);
    float* of_warps = reinterpret_cast<float*>(memory);
    int thread = threadIdx.x;
    u32 row = blockIdx.x;
    follow_launch_before();
    uint4 words[OWN], weights[OWN], none = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int at = thread + i * THREADS;
        words[i] = at < ACROSS ? load_vector(p.x + row * p.stride + 8 * at) : none;
        weights[i] = at < ACROSS ? load_vector(p.weight + 8 * at) : none;
    }
    float sum = 0, value[8], weight[8];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        widen(words[i], value);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += value[j] * value[j];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (thread % 32 == 0) of_warps[thread / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum += of_warps[i];
    float factor = rsqrtf(sum / WIDTH + p.value);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int at = thread + i * THREADS;
        widen(words[i], value);
        widen(weights[i], weight);
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = weight[j] * (value[j] * factor);
        store_group(p, narrow(value), row * ACROSS + at, at < ACROSS);
    }
}

#define AT_ONCE 2  // vectors of a thread whose loads are on their way together

KERNEL(THREADS, BLOCKS) swiglu_cast(const FusedParams p) {
    uint4 gates[AT_ONCE], ups[AT_ONCE], none = {0, 0, 0, 0};
    u32 first = blockIdx.x * AT_ONCE * THREADS + threadIdx.x, vectors = p.rows * ACROSS;
    follow_launch_before();
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        u32 at = first + i * THREADS;
        const u16* source = p.x + at / ACROSS * p.stride + at % ACROSS * 8;
        gates[i] = at < vectors ? load_vector(source) : none;
        ups[i] = at < vectors ? load_vector(source + WIDTH) : none;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        float gate[8], up[8];
        widen(gates[i], gate);
        widen(ups[i], up);
#pragma unroll
        for (int j = 0; j < 8; j++) {  // NaN stays
            float g = gate[j] > p.value ? p.value : gate[j];
            float u = up[j] > p.value ? p.value : up[j] < -p.value ? -p.value : up[j];
            gate[j] = g * fast_reciprocal(1.0f + fast_exp(-g)) * u;
        }
        store_group(p, narrow(gate), first + i * THREADS, first + i * THREADS < vectors);
    }
}

#ifdef HEAD
#define PLAIN ((HEAD - 2 * PAIRS) / 8)  // vectors of a head that do not turn

KERNEL(THREADS, BLOCKS) rope_cast(const FusedParams p) {
    const int at_once = 4;
    uint4 words[at_once], none = {0, 0, 0, 0};
    u32 first = blockIdx.x * at_once * THREADS + threadIdx.x, vectors = p.rows * ACROSS;
    follow_launch_before();
#pragma unroll
    for (int i = 0; i < at_once; i++) {
        u32 at = first + i * THREADS, within = at % ACROSS, head = within / (HEAD / 8);
        const u16* source = p.x + at / ACROSS * p.stride + head * p.head_stride + within % (HEAD / 8) * 8;
        words[i] = at < vectors ? load_vector(source) : none;
    }
#pragma unroll
    for (int i = 0; i < at_once; i++) {
        u32 at = first + i * THREADS;
        int turned = static_cast<int>(at % (HEAD / 8)) - PLAIN;
        if (turned >= 0 && at < vectors) {
            long long pair = at / ACROSS * static_cast<long long>(PAIRS) + turned * 4;
            float4 c = *reinterpret_cast<const float4*>(p.cos + pair), s = *reinterpret_cast<const float4*>(p.sin + pair);
            float value[8], cosine[4] = {c.x, c.y, c.z, c.w};
            float sine[4] = {s.x * p.value, s.y * p.value, s.z * p.value, s.w * p.value};
            widen(words[i], value);
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                float even = value[j], odd = value[j + 1];
                value[j] = even * cosine[j / 2] - odd * sine[j / 2];
                value[j + 1] = even * sine[j / 2] + odd * cosine[j / 2];
            }
            words[i] = narrow(value);
        }
        store_group(p, words[i], at, at < vectors);
    }
}
#endif
