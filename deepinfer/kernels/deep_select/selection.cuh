// Parts of a selection by one block: order, positions, sums, bins.
#pragma once

// Ordered as the floats are, by their bits; both zeros are equal, NaN is 0, below all.
DEVICE u32 ordered(u32 bits) {
    bits = plain_float(bits);
    u32 key = bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
    return key == 0xFFFFFFFFu ? 0 : key;
}

// The float's bits of an `ordered` one.
DEVICE u32 bits_of(u32 key) { return key >> 31 ? key & 0x7FFFFFFFu : ~key; }

DEVICE u32 load_bits(const u8* row, int at) {
    return BF16 ? static_cast<u32>(reinterpret_cast<const u16*>(row)[at]) << 16 : reinterpret_cast<const u32*>(row)[at];
}

// The first of the 8 values that this thread has in `vector` of all chunks.
DEVICE int first_of(int vector, u32 rank) {
    int piece = (vector * WARPS + threadIdx.x / 32) * CLUSTER + rank;
    return piece * PIECE + threadIdx.x % 32 * 8;
}

// Inclusive sum over the threads of the block.
template <class T>
DEVICE T inclusive_sum(T value, Shared& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) s.warp_sums[warp] = value;
    __syncthreads();
    u64 before = lane < warp ? s.warp_sums[lane] : 0;  // both halves of a T of 64 bits are sums of their own
    value += __reduce_add_sync(0xFFFFFFFFu, static_cast<u32>(before));
    if (sizeof(T) == 8) {
        value += static_cast<T>(__reduce_add_sync(0xFFFFFFFFu, static_cast<u32>(before >> 32))) << sizeof(T) * 4;
    }
    return value;
}

// Sum over the block of a count of each warp.
DEVICE u32 block_sum(u32 warp_count, Shared& s) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = warp_count;
    __syncthreads();
    u32 lane = threadIdx.x % 32;
    return __reduce_add_sync(0xFFFFFFFFu, lane < WARPS ? static_cast<u32>(s.warp_sums[lane]) : 0);
}

// The bin (s.digit) with the wanted-th largest of what the histograms of RANKS blocks counted, EACH bins a thread;
// how many lie in higher bins (s.above) and in it (s.inside). s.found is 0 if there are fewer.
template <int RANKS, int EACH>
DEVICE void find_bin(const u32* histogram, u32 wanted, Shared& s) {
    if (RANKS > 1) __syncthreads();
    if (threadIdx.x == 0) s.found = 0;
    u32 base = EACH * (THREADS - 1 - threadIdx.x);
    u32 bins[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) bins[i] = 0;
    for (int rank = 0; rank < RANKS; rank++) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            if (EACH < 4) {
                for (int j = 0; j < EACH; j++) {
                    u32 at = shared_address(histogram + base + j);
                    bins[j] += RANKS > 1 ? load_remote(remote(at, rank)) : histogram[base + j];
                }
                continue;
            }
            uint4 part = RANKS > 1 ? load_remote4(remote(shared_address(histogram + base + i), rank))
                                   : *reinterpret_cast<const uint4*>(histogram + base + i);
            bins[i] += part.x, bins[i + 1] += part.y, bins[i + 2] += part.z, bins[i + 3] += part.w;
        }
    }
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) own += bins[i];
    u32 end = inclusive_sum(own, s);
    u32 above = end - own;
    if (above < wanted && wanted <= end) {
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--) {
            if (above < wanted && wanted <= above + bins[i]) {
                s.digit = base + i;
                s.above = above;
                s.inside = bins[i];
                s.found = 1;
                above = wanted;  // ends the search
            } else {
                above += bins[i];
            }
        }
    }
    __syncthreads();
}
