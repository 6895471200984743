// Writing a block's output; with SPLIT > 1 the blocks of a cluster first add up their shares of the keys.
//
// Block r writes columns [512 / SPLIT x r, ...): the others send it theirs through distributed shared memory, and it adds
// them in the order of their ranks, so that the result does not depend on timing. Values travel in register layout, to where
// the query was: racecheck follows the copy engine to a peer's store, but not the copies by threads that bring BF16 keys.
#pragma once

#define SLICE (256 / SPLIT)                             // registers a thread holds of one block's columns
#define SLICES_A_GROUP (SPLIT == 1 ? 1 : SPLIT / 2)     // slices among the 128 registers of a warpgroup
#define SLICE_REGISTERS (SPLIT == 1 ? 128 : SLICE)

// Columns of this warpgroup from register FIRST on.
template <int GROUP_ID, int FIRST, int COUNT>
DEVICE void store_columns(const float (&o)[128], const float (&inverse)[2], const Output& out, int token,
                          int head, const Angles& angles) {
    const int thread = threadIdx.x % 128, lane = thread % 32, c = lane % 4, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int group = FIRST / 16; group < (FIRST + COUNT) / 16; group++) {  // 32 columns
        const int column = GROUP_ID * 256 + group * 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = o[16 * group + 4 * (j / 2) + 2 * i + j % 2] * inverse[i];
            const int pair = ROPE ? (column - 448) / 2 : -1;  // the last 64 columns are rotated
            store_group<OUT_FP8>(v, out, (long long)token * HEADS + head + row + 8 * i, column, c, angles, token, pair);
        }
    }
}

template <int GROUP_ID, int INDEX>
DEVICE void exchange_slice(float (&o)[128], const float (&factor)[SPLIT][2], const float (&inverse)[2], const Output& out,
                           int token, int head, const Angles& angles, u8* shared, int rank, bool receive) {
    constexpr int owner = GROUP_ID * SLICES_A_GROUP + INDEX;
    const int thread = threadIdx.x % 128;
    constexpr int FIRST = INDEX * SLICE_REGISTERS;
    if (!receive && rank != owner) {
        const int place = rank < owner ? rank : rank - 1;
        u32 target = peer_address(shared_address(shared + SHARES), owner) + place * SLICE_REGISTERS * 512 + thread * 16;
#pragma unroll
        for (int i = 0; i < SLICE_REGISTERS; i += 4)
            store_peer(target + i * 512, o[FIRST + i], o[FIRST + i + 1], o[FIRST + i + 2], o[FIRST + i + 3]);
    }
    if (receive && rank == owner) {
        float mine[SLICE_REGISTERS];
#pragma unroll
        for (int i = 0; i < SLICE_REGISTERS; i++) mine[i] = o[FIRST + i], o[FIRST + i] = 0.0f;
#pragma unroll
        for (int peer = 0; peer < SPLIT; peer++) {
            const u8* source = shared + SHARES + (peer < owner ? peer : peer - 1) * SLICE_REGISTERS * 512 + thread * 16;
#pragma unroll
            for (int i = 0; i < SLICE_REGISTERS; i += 4) {
                float4 four = make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
                if (peer != owner) four = *(const float4*)(source + i * 512);
                o[FIRST + i] += four.x * factor[peer][0];
                o[FIRST + i + 1] += four.y * factor[peer][0];
                o[FIRST + i + 2] += four.z * factor[peer][1];
                o[FIRST + i + 3] += four.w * factor[peer][1];
            }
        }
        store_columns<GROUP_ID, FIRST, SLICE_REGISTERS>(o, inverse, out, token, head, angles);
    }
}

template <int GROUP_ID>
DEVICE void write_output(float (&o)[128], const float (&maximum)[2], const float (&sum)[2], const Output& out, int token,
                         int head, const Angles& angles, u8* shared, int rank) {
    const int thread = threadIdx.x % 128, lane = thread % 32, c = lane % 4, row = thread / 32 * 16 + lane / 4;
    float* sums = (float*)(shared + SUMS);  // each group has summed over its tiles
    float inverse[2], total[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = quad_sum(sum[i]);
        if (c == 0) sums[GROUP_ID * 64 + row + 8 * i] = total[i];
    }
    meet<GROUP_ID>(SUMS_0);
#pragma unroll
    for (int i = 0; i < 2; i++) total[i] = sums[row + 8 * i] + sums[64 + row + 8 * i];
#if SPLIT == 1
#pragma unroll
    for (int i = 0; i < 2; i++) inverse[i] = total[i] > 0 ? KEY_SCALE / total[i] : total[i];  // 0 keeps 0, NaN keeps NaN
    store_columns<GROUP_ID, 0, 128>(o, inverse, out, token, head, angles);
#else
    float factor[SPLIT][2] = {};
    cluster_sync();  // now every block is done with its query and probabilities
    if (GROUP_ID == 0 && c == 0) {
#pragma unroll
        for (int peer = 0; peer < SPLIT; peer++) {
            u32 target = peer_address(shared_address(shared + PEER_STATES), peer) + rank * 512 + row * 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                store_peer(target + 32 * i, maximum[i]);
                store_peer(target + 256 + 32 * i, total[i]);
            }
        }
    }
    exchange_slice<GROUP_ID, 0>(o, factor, inverse, out, token, head, angles, shared, rank, false);
    if (SLICES_A_GROUP == 2)
        exchange_slice<GROUP_ID, SLICES_A_GROUP - 1>(o, factor, inverse, out, token, head, angles, shared, rank, false);
    cluster_sync();
    const float* states = (const float*)(shared + PEER_STATES);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = LOWEST, sum = 0.0f;
#pragma unroll
        for (int peer = 0; peer < SPLIT; peer++) top = fmaxf(top, states[peer * 128 + row + 8 * i]);
#pragma unroll
        for (int peer = 0; peer < SPLIT; peer++) {
            factor[peer][i] = exp2_fast(states[peer * 128 + row + 8 * i] - top);
            sum += states[peer * 128 + 64 + row + 8 * i] * factor[peer][i];
        }
        inverse[i] = sum > 0 ? KEY_SCALE / sum : sum;
    }
    exchange_slice<GROUP_ID, 0>(o, factor, inverse, out, token, head, angles, shared, rank, true);
    if (SLICES_A_GROUP == 2)
        exchange_slice<GROUP_ID, SLICES_A_GROUP - 1>(o, factor, inverse, out, token, head, angles, shared, rank, true);
#endif
}
