// Casts of BF16 rows to E4M3, every value read once.
//
// cast_lines: a scale for GROUP adjacent values of a row; LANES threads keep them in registers.
// cast_tiles: a scale for ROWS rows of COLUMNS columns, which a block of threads keeps in registers.
// cast_channels: a scale for each column of the rows of a cluster's blocks, which keep them in registers and send each
// other their maxima.
//
// Macros: UE8M0, CLUSTER, THREADS, BLOCKS (on a multiprocessor); GROUP, LANES, WIDTH (of a row); or ROWS (of a block),
// COLUMNS, CHANNELS.
#include "casts.cuh"

struct CastParams {
    const u16* x;
    u8* codes;
    void* scales;  // float32, or bytes
    long long stride;
    int lines;  // rows * WIDTH / GROUP
    int rows, width, height;  // of x, and rows that share a scale
};

DEVICE void store_scale(void* scales, long long at, u32 stored) {
    if (UE8M0) static_cast<u8*>(scales)[at] = stored;
    else static_cast<u32*>(scales)[at] = stored;
}

DEVICE uint2 codes_of_vector(uint4 words, const Scale& s) {
    uint2 codes = {codes_of(words.x, words.y, s), codes_of(words.z, words.w, s)};
    return codes;
}

#ifdef GROUP
#define VECTORS ((GROUP / 8 + LANES - 1) / LANES)

KERNEL(THREADS, BLOCKS) cast_lines(const CastParams p) {
    SHARED_MEMORY(memory);
    u32* of_warps = reinterpret_cast<u32*>(memory);
    int thread = threadIdx.x, lane = thread % LANES;
    int line = blockIdx.x * (THREADS / LANES) + thread / LANES;
    bool alive = line < p.lines;
    int row = line / (WIDTH / GROUP), part = line % (WIDTH / GROUP);
    const u16* source = p.x + row * p.stride + part * GROUP;
    follow_launch_before();
    uint4 words[VECTORS];
    u32 largest = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        uint4 none = {0, 0, 0, 0};
        int at = lane + v * LANES;
        words[v] = alive && at < GROUP / 8 ? *reinterpret_cast<const uint4*>(source + 8 * at) : none;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) largest = __vmaxu2(largest, largest_of(words[v]));
    largest = larger_half_of(largest);
    if (LANES >= 32) {
        largest = __reduce_max_sync(ALL, largest);
    } else {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) largest = max(largest, __shfl_xor_sync(ALL, largest, step));
    }
    if (LANES > 32) {
        if (thread % 32 == 0) of_warps[thread / 32] = largest;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LANES / 32; i++) largest = max(largest, of_warps[thread / LANES * (LANES / 32) + i]);
    }
    if (!alive) return;
    Scale s = scale_of(largest);
    if (lane == 0) store_scale(p.scales, line, s.stored);
    uint2* target = reinterpret_cast<uint2*>(p.codes + static_cast<long long>(line) * GROUP);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = lane + v * LANES;
        if (at < GROUP / 8) target[at] = codes_of_vector(words[v], s);
    }
}

#else
#define ACROSS (COLUMNS / 8)     // threads of a row
#define AT_ONCE (THREADS / ACROSS)  // rows
#define VECTORS (ROWS / AT_ONCE)
#define WARPS (THREADS / 32)
#define PAIRS (COLUMNS / 2)

#if CHANNELS
DEVICE void widen_sizes(uint4 words, u32 (&largest)[4]) {
    largest[0] = __vmaxu2(largest[0], sizes(words.x)), largest[1] = __vmaxu2(largest[1], sizes(words.y));
    largest[2] = __vmaxu2(largest[2], sizes(words.z)), largest[3] = __vmaxu2(largest[3], sizes(words.w));
}

// What 8 columns are cast with.
struct Columns {
    float scale[8], inverse[8];
    u32 keep[4];

    DEVICE u32 codes(u32 pair, int i) const {
        u32 kept = pair & keep[i];
        return pack_e4m3(quotient(low_of(kept), scale[2 * i], inverse[2 * i]),
                         quotient(high_of(kept), scale[2 * i + 1], inverse[2 * i + 1]));
    }
    DEVICE uint2 codes(uint4 words) const {
        uint2 result = {codes(words.x, 0) | codes(words.y, 1) << 16, codes(words.z, 2) | codes(words.w, 3) << 16};
        return result;
    }
};

KERNEL(THREADS, BLOCKS) CLUSTER_DIMS cast_channels(const CastParams p) {
    SHARED_MEMORY(memory);
    u32* of_warps = reinterpret_cast<u32*>(memory);  // [WARPS, PAIRS]
    u32* of_blocks = of_warps + WARPS * PAIRS;       // [CLUSTER, PAIRS]
    float* scales = reinterpret_cast<float*>(of_blocks + CLUSTER * PAIRS);  // [COLUMNS]
    float* inverses = scales + COLUMNS;
    u32* keeps = reinterpret_cast<u32*>(inverses + COLUMNS);
    int thread = threadIdx.x, column = thread % ACROSS * 8;
    u32 rank = blockIdx.x % CLUSTER;
    int strips = p.width / COLUMNS, strip = blockIdx.y % strips, group = blockIdx.y / strips;
    int first = group * p.height + rank * ROWS + thread / ACROSS;
    int end = min(group * p.height + p.height, p.rows);
    const u16* source = p.x + first * p.stride + strip * COLUMNS + column;
    cluster_arrive();
    follow_launch_before();
    uint4 words[VECTORS], none = {0, 0, 0, 0};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) words[v] = first + v * AT_ONCE < end ? load_vector(source + v * AT_ONCE * p.stride) : none;
    u32 largest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) widen_sizes(words[v], largest);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int step = ACROSS; step < 32; step *= 2) {
            largest[i] = __vmaxu2(largest[i], __shfl_xor_sync(ALL, largest[i], step));
        }
        if (thread % 32 < ACROSS) of_warps[thread / 32 * PAIRS + column / 2 + i] = largest[i];
    }
    __syncthreads();
    cluster_wait();
    if (thread < PAIRS) {
        u32 own = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) own = __vmaxu2(own, of_warps[i * PAIRS + thread]);
        u32 address = shared_address(of_blocks + rank * PAIRS + thread);
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) store_remote(remote(address, other), own);
    }
    cluster_sync();
    if (thread < COLUMNS) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < CLUSTER; i++) most = max(most, of_blocks[i * PAIRS + thread / 2] >> thread % 2 * 16 & 0xFFFF);
        Scale s = scale_of(most);
        scales[thread] = s.scale, inverses[thread] = s.inverse;
        reinterpret_cast<u16*>(keeps)[thread] = s.keep;
        if (rank == 0) store_scale(p.scales, static_cast<long long>(group) * p.width + strip * COLUMNS + thread, s.stored);
    }
    __syncthreads();
    Columns columns;
#pragma unroll
    for (int i = 0; i < 8; i++) columns.scale[i] = scales[column + i], columns.inverse[i] = inverses[column + i];
#pragma unroll
    for (int i = 0; i < 4; i++) columns.keep[i] = keeps[column / 2 + i];
    u8* target = p.codes + static_cast<long long>(first) * p.width + strip * COLUMNS + column;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        uint2* at = reinterpret_cast<uint2*>(target + static_cast<long long>(v * AT_ONCE) * p.width);
        if (first + v * AT_ONCE < end) *at = columns.codes(words[v]);
    }
}

#else
KERNEL(THREADS, BLOCKS) cast_tiles(const CastParams p) {
    SHARED_MEMORY(memory);
    u32* of_warps = reinterpret_cast<u32*>(memory);
    int thread = threadIdx.x;
    int strips = p.width / COLUMNS, strip = blockIdx.y % strips, group = blockIdx.y / strips;
    int first = group * p.height + thread / ACROSS, end = min(group * p.height + p.height, p.rows);
    int column = strip * COLUMNS + thread % ACROSS * 8;
    const u16* source = p.x + first * p.stride + column;
    follow_launch_before();
    uint4 words[VECTORS], none = {0, 0, 0, 0};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) words[v] = first + v * AT_ONCE < end ? load_vector(source + v * AT_ONCE * p.stride) : none;
    u32 largest = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) largest = __vmaxu2(largest, largest_of(words[v]));
    largest = __reduce_max_sync(ALL, larger_half_of(largest));
    if (thread % 32 == 0) of_warps[thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) largest = max(largest, of_warps[i]);
    Scale s = scale_of(largest);
    if (thread == 0) store_scale(p.scales, static_cast<long long>(group) * strips + strip, s.stored);
    u8* target = p.codes + static_cast<long long>(first) * p.width + column;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        uint2* at = reinterpret_cast<uint2*>(target + static_cast<long long>(v * AT_ONCE) * p.width);
        if (first + v * AT_ONCE < end) *at = codes_of_vector(words[v], s);
    }
}
#endif
#endif
