// Gate of a mixture of experts: sqrt-softplus scores, the k experts with the largest score plus bias, and their gates.
//
// Half a warp takes a row, so that what is done once a row is done for two at a time. Three special functions an expert
// give its score to within 0.001. The k-th largest of the lanes' maxima is then a lower bound that hardly more than k
// experts reach; those go to a lane each, which finds the exact score and counts how many are ahead of its own. Rows with
// infinities, NaN or many equal experts take the exact score of all, by a whole warp. Of equal experts the first are
// chosen.
//
// Macros: EXPERTS, K, and CLUSTER = 1 for cluster.cuh.
#include "cluster.cuh"

#define THREADS 128
#define WARPS (THREADS / 32)
#define LANES 16  // of a row
#define FOURS ((EXPERTS + 4 * LANES - 1) / (4 * LANES))  // groups of four adjacent experts of a lane
#define OWN (4 * FOURS)  // experts of a lane
#define OF_ALL ((EXPERTS + 31) / 32)  // of a lane of a whole warp: lane, lane + 32, ...
#define ALL 0xFFFFFFFFu

struct GateParams {
    const float* logits;  // [rows, EXPERTS]
    const float* bias;    // [EXPERTS] or [rows, EXPERTS]
    int* chosen;          // [rows, K]
    float* gates;
    int rows;
    int bias_stride;
    int normalise;
    float scaling;
};

// sqrt(log(1 + exp(x))). log1p(e) = 2 atanh(e / (2 + e)), here with e <= 1: the series is exact to float32.
DEVICE float score_of(float x) {
    float e = fast_exp(-fabsf(x));
    float s = e * fast_reciprocal(2.0f + e);
    float q = s * s;
    float series = 1 + q * (1 / 3.0f + q * (1 / 5.0f + q * (1 / 7.0f + q * (1 / 9.0f + q * (1 / 11.0f + q * (1 / 13.0f))))));
    float soft = x > 20.0f ? x : fmaxf(x, 0.0f) + 2 * s * series;
    return fast_sqrt(soft);
}

// Ordered as the floats are, above 0; NaN is above all.
DEVICE u32 key_of(float x) {
    u32 bits = plain_float(__float_as_uint(x));
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

// score_of within 1e-3, infinite above 88: the logarithm loses what 1 + e rounds away.
DEVICE float near_score(float x) { return 0.8325546112f * fast_sqrt(fabsf(fast_log2(1.0f + fast_exp(x)))); }

struct Choice {
    int rank;  // of the lane's expert; K and more are not chosen
    int expert;
    float score;
};

// The i-th of a lane's experts.
DEVICE int expert_of(int i) { return i / 4 * (4 * LANES) + threadIdx.x % LANES * 4 + i % 4; }

// A lane's experts of a row, `none` past the last.
DEVICE void load_own(const float* row, float none, float (&value)[OWN]) {
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
#if EXPERTS % (4 * LANES) == 0
        float4 four = *reinterpret_cast<const float4*>(row + expert_of(4 * i));
        value[4 * i] = four.x, value[4 * i + 1] = four.y, value[4 * i + 2] = four.z, value[4 * i + 3] = four.w;
#else
#pragma unroll
        for (int j = 4 * i; j < 4 * i + 4; j++) value[j] = expert_of(j) < EXPERTS ? row[expert_of(j)] : none;
#endif
    }
}

// The best, k times.
DEVICE Choice choose_among_all(const float* logits, const float* bias) {
    int lane = threadIdx.x % 32;
    u32 key[OF_ALL];
#pragma unroll
    for (int i = 0; i < OF_ALL; i++) {
        int expert = lane + 32 * i;
        key[i] = expert < EXPERTS ? key_of(score_of(logits[expert]) + bias[expert]) : 0;
    }
    Choice own = {lane, 0, 0};
    for (int i = 0; i < K; i++) {
        u32 best = 0, at = ALL;
#pragma unroll
        for (int j = 0; j < OF_ALL; j++) {
            if (key[j] > best) best = key[j], at = lane + 32 * j;
        }
        u32 most = __reduce_max_sync(ALL, best);
        u32 first = __reduce_min_sync(ALL, best == most ? at : ALL);
        if (lane == i) own.expert = first;
#pragma unroll
        for (int j = 0; j < OF_ALL; j++) key[j] = lane + 32 * j == first ? 0 : key[j];
    }
    own.score = score_of(logits[own.expert]);
    return own;
}

// Gates of the chosen ones of a row, which WIDTH lanes have.
template <int WIDTH>
DEVICE void write(const GateParams& p, int row, const Choice& own, bool listed) {
    bool chosen = listed && own.rank < K;
    float gate = chosen ? own.score : 0;
    if (p.normalise) {
        float sum = gate;
#pragma unroll
        for (int step = WIDTH / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
        gate *= fast_reciprocal(sum + 1e-20f);
    }
    if (chosen) {
        p.chosen[row * K + own.rank] = own.expert;
        p.gates[row * K + own.rank] = gate * p.scaling;
    }
}

KERNEL(THREADS, 8) gate(const GateParams p) {
    SHARED_MEMORY(memory);
    int lane = threadIdx.x % LANES, half = threadIdx.x % 32 / LANES, warp = threadIdx.x / 32;
    u32* list = reinterpret_cast<u32*>(memory) + 2 * LANES * (2 * warp + half);  // experts that reach the bound,
    u32* keys = list + LANES;  // and what they are ordered by
    float x[OWN], near[OWN];
    int pair = blockIdx.x * WARPS + warp;
    follow_launch_before();
    if (2 * pair >= p.rows) return;
    long long row = min(2 * pair + half, p.rows - 1);  // the last of an odd number by both halves
    const float* logits = p.logits + row * EXPERTS;
    const float* bias = p.bias + row * p.bias_stride;
    load_own(logits, 0, x);
    load_own(bias, __uint_as_float(0xFF800000u), near);
    float largest = __uint_as_float(0xFF800000u);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        near[i] += near_score(x[i]);
        largest = larger_or_nan(largest, near[i]);
    }
    u32 bits = __float_as_uint(largest);
    u32 key = bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
    u32 left[2] = {half == 0 ? key : 0, half == 1 ? key : 0}, most[2], bound[2];
#pragma unroll
    for (int i = 0; i < K; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bound[h] = __reduce_max_sync(ALL, left[h]);
            if (i == 0) most[h] = bound[h];
            if (left[h] == bound[h]) left[h] = 0;
        }
    }
    u32 own_most = half == 0 ? most[0] : most[1], own_bound = half == 0 ? bound[0] : bound[1], reach = 0;
    bool finite = own_most < 0xFF800000u && own_bound > 0x007FFFFFu;
    float least = __uint_as_float(own_bound >> 31 ? own_bound & 0x7FFFFFFFu : ~own_bound);
    least -= 4e-3f + fabsf(least) * 1e-6f;
#pragma unroll
    for (int i = 0; i < OWN; i++) reach = __funnelshift_l(__float_as_uint(near[i] - least), reach, 1);
    reach = finite ? ~reach << (32 - OWN) : 0;  // the first expert's is the highest bit
    // Places in the list: lanes have up to 7 experts, one of more is left to a whole warp.
    int own_count = __popc(reach), shift = LANES * half;
    u32 ones = __ballot_sync(ALL, own_count & 1) >> shift & 0xFFFF;
    u32 twos = __ballot_sync(ALL, own_count & 2) >> shift & 0xFFFF;
    u32 fours = __ballot_sync(ALL, own_count & 4) >> shift & 0xFFFF;
    u32 many = __ballot_sync(ALL, own_count > 7) >> shift & 0xFFFF;
    u32 below = (1u << lane) - 1;
    int count = __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours);
    int place = __popc(ones & below) + 2 * __popc(twos & below) + 4 * __popc(fours & below);
    bool listed = finite && many == 0 && count <= LANES;
    for (u32 left_over = listed ? reach : 0; left_over != 0; place++) {
        int i = __clz(left_over);
        list[place] = expert_of(i);
        left_over ^= 0x80000000u >> i;
    }
    __syncwarp();
    Choice own;
    bool has = listed && lane < count;
    own.expert = has ? list[lane] : 0;
    own.score = score_of(logits[own.expert]);
    u32 exact = has ? key_of(own.score + bias[own.expert]) : 0;
    keys[lane] = exact;
    __syncwarp();
    own.rank = has ? 0 : 32;
#pragma unroll
    for (int i = 0; i < LANES; i += 4) {
        uint4 others = *reinterpret_cast<const uint4*>(keys + i);
        own.rank += others.x > exact, own.rank += others.y > exact;
        own.rank += others.z > exact, own.rank += others.w > exact;
    }
    // Every rank once, or there are equal ones.
    u32 ranks = __reduce_add_sync(ALL, own.rank < K && K <= LANES ? (1u << own.rank) << shift : 0);
    bool differ = (ranks >> shift & 0xFFFF) == (1u << K % 32) - 1;
    if (__ballot_sync(ALL, listed && !differ) != 0) {
        int rank = has ? 0 : 32;
        for (int i = 0; i < LANES; i++) {
            u32 other = keys[i], expert = __shfl_sync(ALL, static_cast<u32>(own.expert), shift + i);
            rank += other > exact || (other == exact && expert < static_cast<u32>(own.expert));
        }
        own.rank = rank;
    }
    write<LANES>(p, row, own, listed);
    u32 unlisted = __ballot_sync(ALL, !listed);
#pragma unroll 1
    for (int h = 0; h < 2 && unlisted != 0; h++) {
        if ((unlisted >> LANES * h & 1) == 0) continue;
        int of_half = min(2 * pair + h, p.rows - 1);
        const float* row_logits = p.logits + static_cast<long long>(of_half) * EXPERTS;
        const float* row_bias = p.bias + static_cast<long long>(of_half) * p.bias_stride;
        write<32>(p, of_half, choose_among_all(row_logits, row_bias), true);
    }
}
