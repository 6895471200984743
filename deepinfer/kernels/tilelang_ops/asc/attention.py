"""Sparse attention: vector cores gather and unpack keys and do the softmax, the cube multiplies.

Rows come one by one to the Unified Buffer. The cube takes right operands that are transposed alone, so that the keys of
a tile go to L1 twice: as they are for the scores, transposed as values. 16 heads, as many as the buffer has room for.
"""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import caches
from deepinfer.kernels.tilelang_ops.bodies.attention import LOWEST, Rows, row_of, row_value

THREADS = 128
KEYS = 16  # at once
MOST_HEADS = 16


def sparse_attention_tl(
    heads: int,
    dim: int,
    scale: float,
    window: int,
    selected: int,
    window_rows: tuple,
    latent_rows: tuple,
    dtype: str = "bfloat16",
) -> Any:
    """`sparse_attention` of q [n, heads, dim] over int32 slots [n, window] and [n, selected] of two caches (`Rows`)."""
    n, window_pages, latent_pages = T.dynamic("n"), T.dynamic("window_pages"), T.dynamic("latent_pages")
    near, far = Rows(*window_rows), Rows(*latent_rows)
    block = min(heads, MOST_HEADS)
    parts = heads // block

    @T.macro
    def attend(rows, cache, slots, token, count, query, result, best, total):
        width = caches.row_size(rows.row_format, dim)
        packed, these = T.alloc_shared((KEYS, 1, width), rows.stored), T.alloc_shared((1, KEYS), "int32")
        keys, values = T.alloc_shared((KEYS, dim), dtype), T.alloc_shared((dim, KEYS), dtype)
        cube_keys, cube_values = T.alloc_l1((KEYS, dim), dtype), T.alloc_l1((dim, KEYS), dtype)
        cube_scores, scores = T.alloc_l0c((block, KEYS), "float32"), T.alloc_shared((block, KEYS), "float32")
        weights, cube_weights = T.alloc_shared((block, KEYS), dtype), T.alloc_l1((block, KEYS), dtype)
        cube_more, more = T.alloc_l0c((block, dim), "float32"), T.alloc_shared((block, dim), "float32")
        fade = T.alloc_shared((1, block), "float32")
        for tile in T.serial(T.ceildiv(count, KEYS)):
            T.copy(slots[token, tile * KEYS], these)
            for i in T.serial(KEYS):
                slot = T.max(slots[token, T.min(tile * KEYS + i, count - 1)], 0)
                T.copy(cache[slot // rows.size, slot % rows.size, 0], packed[i : i + 1, 0:1, 0:width])
            with T.SimtVF(threads=THREADS):
                for i in T.Parallel(KEYS):
                    if tile * KEYS + i >= count:
                        these[0, i] = caches.NONE
                for i, j in T.Parallel(KEYS, dim):
                    keys[i, j] = row_value(rows, packed, row_of(i), j, dim)
                    if these[0, i] < 0:
                        keys[i, j] = 0.0
                for i, j in T.Parallel(KEYS, dim):
                    values[j, i] = keys[i, j]
            T.copy(keys, cube_keys)
            T.copy(values, cube_values)
            T.gemm(query, cube_keys, cube_scores, transpose_B=True, clear_accum=True)
            T.copy(cube_scores, scores)
            with T.SimtVF(threads=THREADS):
                for h in T.Parallel(block):  # a thread has the few keys of a head
                    top = T.alloc_var("float32", init=best[0, h])
                    for i in T.serial(KEYS):
                        top = T.if_then_else(these[0, i] >= 0, T.max(top, scores[h, i] * scale), top)
                    fade[0, h] = T.exp(best[0, h] - top)
                    best[0, h] = top
                    total[0, h] = total[0, h] * fade[0, h]
                    for i in T.serial(KEYS):
                        weight = T.if_then_else(these[0, i] >= 0, T.exp(scores[h, i] * scale - best[0, h]), 0.0)
                        total[0, h] = total[0, h] + weight
                        weights[h, i] = weight
            T.copy(weights, cube_weights)
            T.gemm(cube_weights, cube_values, cube_more, transpose_B=True, clear_accum=True)
            T.copy(cube_more, more)
            with T.SimtVF(threads=THREADS):
                for h, j in T.Parallel(block, dim):
                    result[h, j] = result[h, j] * fade[0, h] + more[h, j]

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((n, heads, dim), dtype),
        window_cache: near.tensor(window_pages, dim),
        window_slots: T.Tensor((n, window), "int32"),
        latent_cache: far.tensor(latent_pages, dim),
        latent_slots: T.Tensor((n, selected), "int32"),
        sink: T.Tensor((1, heads), "float32"),
        out: T.Tensor((n, heads, dim), dtype),
    ):
        with T.Kernel(n * parts) as index:
            token, head = index // parts, index % parts * block
            query, rounded = T.alloc_l1((block, dim), dtype), T.alloc_shared((block, dim), dtype)
            result = T.alloc_shared((block, dim), "float32")
            best, total = T.alloc_shared((1, block), "float32"), T.alloc_shared((1, block), "float32")
            T.copy(q[token, head : head + block, 0:dim], query)
            T.copy(sink[0, head], best)
            with T.SimtVF(threads=THREADS):
                for h in T.Parallel(block):
                    total[0, h] = T.exp(best[0, h] - T.max(best[0, h], LOWEST))
                    best[0, h] = T.max(best[0, h], LOWEST)
                for h, j in T.Parallel(block, dim):
                    result[h, j] = 0.0
            attend(near, window_cache, window_slots, token, window, query, result, best, total)
            attend(far, latent_cache, latent_slots, token, selected, query, result, best, total)
            with T.SimtVF(threads=THREADS):
                for h, j in T.Parallel(block, dim):
                    rounded[h, j] = T.if_then_else(total[0, h] == 0.0, 0.0, result[h, j] / total[0, h])
            T.copy(rounded, out[token, head : head + block, 0:dim])

    return sparse_attention
