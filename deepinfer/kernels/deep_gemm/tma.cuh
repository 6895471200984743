// The bulk copy engine and what clusters of two blocks need around it.
#pragma once

#include "../deep_jit/hopper.cuh"

struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
}

// True in one lane of a warp; with it the compiler knows that one lane alone issues copies.
DEVICE bool elect_one() {
    u32 chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen;
}

// A box of a matrix to shared memory, zeros outside the matrix; `barrier` of this block counts its bytes.
DEVICE void load_box(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"((u64)map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same box to the same place in both blocks of a cluster; each block's own barrier counts the bytes.
DEVICE void load_box_to_both(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"((u64)map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3)
        : "memory");
}

// A box from shared memory to a matrix, what is inside of it. Stores since the last commit are one group.
DEVICE void store_box(const TensorMap* map, u32 source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"((u64)map), "r"(column),
                 "r"(row), "r"(source)
                 : "memory");
}
// Four 8 x 8 matrices of 16-bit values, two of a row in each lane's word; lane l points at row l % 8 of matrix l / 8.
DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
// The same with each matrix transposed: a lane's two values are neighbours of a column of the memory's rows.
DEVICE void store_matrices_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// Programmatic dependent launch: the next kernel of the stream may start now; what the one before wrote is there.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE float4 load_peer(u32 address, u32 rank) {
    float4 x;
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(address), "r"(rank)
        : "memory");
    return x;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
