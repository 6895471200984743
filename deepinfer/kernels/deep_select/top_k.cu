// Exact top-k of rows of floats, by one cluster of CLUSTER blocks a row.
//
// A bound first: a row is cut into groups of 8 values, and the k-th largest of the groups' maxima is a lower bound of the
// k-th largest value, and a close one. Only the few values above it (the candidates) take part in a radix select, whose
// histograms lie in shared memory and are added up across the cluster. Chosen positions go into a bitmap, from which they
// are written in ascending order; of equal values the first are chosen. Without a list long enough for its candidates a
// block reads its values again instead, so that any input gives the exact result.
//
// Macros: BF16 (values are BF16, else float32), ALIGNED (rows start at multiples of 16 bytes), CLUSTER.

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 512
#define GROUP 8
#define BINS 2048
#define LIST 1024
#define LOWEST 0x007FFFFFu  // ordered bits of -inf
#define FINAL_SHIFT (BF16 ? 10 : 0)  // bits that BF16 values do not have

struct Params {
    const void* scores;
    int* out;              // [rows, k]
    const long long* row_k;  // how many of each row, or null: k
    long long row_stride;  // in values
    int width;
    int k;
    int segment;  // values of a block, a multiple of 32
};

struct Shared {
    u32 maxima[BINS];
    u32 first[BINS];
    u32 second[BINS];
    u32 third[BINS];
    u32 list_key[LIST];
    u32 list_position[LIST];
    u64 warp_sums[THREADS / 32];
    u32 totals[2];  // chosen for certain, equal to the threshold
    u32 digit;
    u32 above;
    u32 found;
    u32 count;
};

__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
#if CLUSTER > 1
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
#else
    return address;
#endif
}

__device__ __forceinline__ uint4 load_remote4(u32 address) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_remote(u32 address) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Orders as the floats do; both zeros are equal, NaN is above all.
__device__ __forceinline__ u32 ordered(u32 bits) {
    if ((bits << 1) == 0) bits = 0;
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0xFFFFFFFFu;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ void unpack(uint4 v, u32* bits) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (BF16) {
            bits[2 * i] = words[i] << 16;
            bits[2 * i + 1] = words[i] & 0xFFFF0000u;
        } else {
            bits[i] = words[i];
        }
    }
}

// Ordered bits of the values at first .. first + 7 of a row, 0 past its end.
__device__ __forceinline__ void load_group(const void* row, int first, int width, u32* key) {
    u32 bits[GROUP];
    bool whole = ALIGNED && first + GROUP <= width;
    if (whole) {
        const uint4* vector = reinterpret_cast<const uint4*>(static_cast<const char*>(row) + first * (BF16 ? 2ll : 4ll));
        unpack(vector[0], bits);
        if (!BF16) unpack(vector[1], bits + 4);
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        if (whole) {
            key[i] = ordered(bits[i]);
        } else {
            int at = first + i;
            u32 value = 0;
            if (at < width) {
                value = BF16 ? static_cast<u32>(static_cast<const unsigned short*>(row)[at]) << 16
                             : static_cast<const u32*>(row)[at];
            }
            key[i] = at < width ? ordered(value) : 0;
        }
    }
}

// Inclusive sum over the threads of the block, of two counts packed in 64 bits.
__device__ u64 inclusive_sum(u64 value, Shared& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u64 other = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) s.warp_sums[warp] = value;
    __syncthreads();
    u64 before = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) before += i < warp ? s.warp_sums[i] : 0;
    return value + before;
}

// The bin with the wanted-th largest of what the cluster's histograms counted, and how many lie in higher bins.
// s.found is 0 if there are fewer.
__device__ void find_bin(const u32* histogram, u32 wanted, Shared& s) {
    if (threadIdx.x == 0) s.found = 0;
    u32 base = BINS - 4 * (threadIdx.x + 1);
    u32 address = shared_address(histogram + base);
    u32 bins[4] = {0, 0, 0, 0};
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
        uint4 part = load_remote4(remote(address, rank));
        bins[0] += part.x, bins[1] += part.y, bins[2] += part.z, bins[3] += part.w;
    }
    u32 own = bins[0] + bins[1] + bins[2] + bins[3];
    u32 end = static_cast<u32>(inclusive_sum(own, s));
    u32 above = end - own;
    if (above < wanted && wanted <= end) {
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            if (above < wanted && wanted <= above + bins[i]) {
                s.digit = base + i;
                s.above = above;
                s.found = 1;
                above = wanted;  // ends the search
            } else {
                above += bins[i];
            }
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
top_k(const Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    u32* chosen_bits = reinterpret_cast<u32*>(memory + sizeof(Shared));
    int words = p.segment / 32;
    u32* equal_bits = chosen_bits + words;
    int thread = threadIdx.x;
    u32 block = blockIdx.x % CLUSTER;
    long long row_index = blockIdx.y;
    const char* row = static_cast<const char*>(p.scores) + row_index * p.row_stride * (BF16 ? 2 : 4);
    int* out = p.out + row_index * p.k;
    int begin = block * p.segment;
    int end = min(begin + p.segment, p.width);
    u32 wanted = p.k;
    if (p.row_k != nullptr && p.row_k[row_index] < p.k) wanted = static_cast<u32>(max(p.row_k[row_index], 1ll));

    for (int i = thread; i < 4 * BINS; i += THREADS) s.maxima[i] = 0;  // all four histograms
    for (int i = thread; i < 2 * words; i += THREADS) chosen_bits[i] = 0;
    if (thread == 0) s.count = 0;
    __syncthreads();

    u32 key[GROUP];
    for (int first = begin + thread * GROUP; first < end; first += THREADS * GROUP) {
        load_group(row, first, end, key);
        u32 largest = key[0];
#pragma unroll
        for (int i = 1; i < GROUP; i++) largest = max(largest, key[i]);
        if (largest > LOWEST) atomicAdd(&s.maxima[largest >> 21], 1u);
    }
    cluster_sync();
    find_bin(s.maxima, wanted, s);
    u32 bound = s.found ? max(s.digit << 21, LOWEST + 1) : LOWEST + 1;

    for (int first = begin + thread * GROUP; first < end; first += THREADS * GROUP) {
        load_group(row, first, end, key);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (key[i] < bound) continue;
            atomicAdd(&s.first[key[i] >> 21], 1u);
            u32 place = atomicAdd(&s.count, 1u);
            if (place < LIST) {
                s.list_key[place] = key[i];
                s.list_position[place] = first + i - begin;
            }
        }
    }
    cluster_sync();
    u32 listed = s.count;

// BODY sees `k` and `position` of every candidate: from the list, or read again if that was too short. (A macro because
// NVRTC takes a lambda for a host function.)
#define FOR_EACH_CANDIDATE(BODY)                                                          \
    if (listed <= LIST) {                                                                 \
        for (u32 i = thread; i < listed; i += THREADS) {                                  \
            u32 k = s.list_key[i], position = s.list_position[i];                         \
            BODY                                                                          \
        }                                                                                 \
    } else {                                                                              \
        for (int first = begin + thread * GROUP; first < end; first += THREADS * GROUP) { \
            load_group(row, first, end, key);                                             \
            for (int i = 0; i < GROUP; i++) {                                             \
                u32 k = key[i], position = first + i - begin;                             \
                if (k >= bound) {                                                         \
                    BODY                                                                  \
                }                                                                         \
            }                                                                             \
        }                                                                                 \
    }

    // threshold: leading bits of the wanted-th largest value; equal_wanted of those that share them are chosen.
    u32 threshold = 0, equal_wanted = wanted;
    find_bin(s.first, equal_wanted, s);
    bool all = !s.found;  // fewer than wanted values above -inf
    if (!all) {
        threshold = s.digit;
        equal_wanted -= s.above;
        u32 prefix = threshold;
        FOR_EACH_CANDIDATE(if (k >> 21 == prefix) atomicAdd(&s.second[k >> 10 & 2047], 1u); (void)position;)
    }
    cluster_sync();
    if (!all) {
        find_bin(s.second, equal_wanted, s);
        threshold = threshold << 11 | s.digit;
        equal_wanted -= s.above;
#if !BF16
        u32 prefix = threshold;
        FOR_EACH_CANDIDATE(if (k >> 10 == prefix) atomicAdd(&s.third[k & 1023], 1u); (void)position;)
#endif
    }
#if !BF16
    cluster_sync();
    if (!all) {
        find_bin(s.third, equal_wanted, s);
        threshold = threshold << 10 | s.digit;
        equal_wanted -= s.above;
    }
#endif
    FOR_EACH_CANDIDATE({
        u32 leading = k >> FINAL_SHIFT;
        u32 bit = 1u << position % 32;
        if (all || leading > threshold) atomicOr(&chosen_bits[position / 32], bit);
        else if (leading == threshold) atomicOr(&equal_bits[position / 32], bit);
    })
    __syncthreads();

    int words_each = (words + THREADS - 1) / THREADS;
    int first_word = min(thread * words_each, words), last_word = min(first_word + words_each, words);
    u64 own = 0;
    for (int w = first_word; w < last_word; w++) {
        own += static_cast<u64>(__popc(equal_bits[w])) << 32 | __popc(chosen_bits[w]);
    }
    u64 sum = inclusive_sum(own, s);
    if (thread == THREADS - 1) {
        s.totals[0] = static_cast<u32>(sum);
        s.totals[1] = static_cast<u32>(sum >> 32);
    }
    cluster_sync();
    u32 chosen_before = 0, equal_before = 0, chosen_all = 0, equal_all = 0;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
        u32 chosen = load_remote(remote(shared_address(&s.totals[0]), rank));
        u32 equal = load_remote(remote(shared_address(&s.totals[1]), rank));
        if (rank < block) chosen_before += chosen, equal_before += equal;
        chosen_all += chosen, equal_all += equal;
    }
    sum -= own;
    u32 equal_seen = equal_before + static_cast<u32>(sum >> 32);
    u32 place = chosen_before + static_cast<u32>(sum) + min(equal_seen, equal_wanted);
    for (int w = first_word; w < last_word; w++) {
        u32 bits = chosen_bits[w], equal = equal_bits[w];
        while (equal != 0 && equal_seen < equal_wanted) {
            bits |= equal & -equal;
            equal &= equal - 1;
            equal_seen++;
        }
        for (; bits != 0; bits &= bits - 1) out[place++] = begin + 32 * w + __ffs(bits) - 1;
    }
    if (block == CLUSTER - 1) {
        u32 total = chosen_all + min(equal_all, equal_wanted);
        for (u32 i = total + thread; i < p.k; i += THREADS) out[i] = -1;
    }
    cluster_sync();  // nobody leaves while another block still reads its totals
}
