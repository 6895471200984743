// The bulk copy engine and what clusters of two blocks need around it.
#pragma once

#include "hopper.cuh"

struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
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

// `bytes` of contiguous memory, both ends multiples of 16.
DEVICE void load_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

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
