"""Sparse attention: a block has all heads of a token, or 64 of them, and gathers keys row by row."""

from typing import Any

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies import caches
from deepinfer.kernels.tilelang_ops.bodies.attention import LOWEST, Rows, row_value

THREADS = 256
KEYS = 64  # at once
MOST_HEADS = 64


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

    @T.macro
    def attend(rows, cache, slots, token, count, query, result, best, total):
        keys = T.alloc_shared((KEYS, dim), dtype)
        weights = T.alloc_shared((block, KEYS), dtype)
        logits = T.alloc_fragment((block, KEYS), "float32")
        fresh = T.alloc_fragment((block,), "float32")
        fade = T.alloc_fragment((block,), "float32")
        for tile in T.serial(T.ceildiv(count, KEYS)):
            T.clear(keys)
            for i, j in T.Parallel(KEYS, dim):
                if tile * KEYS + i < count:
                    if slots[token, tile * KEYS + i] >= 0:
                        at = caches.row_at(slots[token, tile * KEYS + i], rows.size)
                        keys[i, j] = row_value(rows, cache, at, j, dim)
            T.clear(logits)
            T.gemm(query, keys, logits, transpose_B=True)
            for h, i in T.Parallel(block, KEYS):
                logits[h, i] = logits[h, i] * scale
                if tile * KEYS + i >= count:
                    logits[h, i] = -T.infinity("float32")
                else:
                    if slots[token, tile * KEYS + i] < 0:
                        logits[h, i] = -T.infinity("float32")
            T.reduce_max(logits, fresh, dim=1)
            for h in T.Parallel(block):
                fresh[h] = T.max(fresh[h], best[h])
                fade[h] = T.exp(best[h] - fresh[h])
                best[h] = fresh[h]
            for h, i in T.Parallel(block, KEYS):
                logits[h, i] = T.exp(logits[h, i] - best[h])
            T.reduce_sum(logits, fresh, dim=1)
            for h in T.Parallel(block):
                total[h] = total[h] * fade[h] + fresh[h]
            for h, j in T.Parallel(block, dim):
                result[h, j] = result[h, j] * fade[h]
            T.copy(logits, weights)
            T.gemm(weights, keys, result)

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((n, heads, dim), dtype),
        window_cache: near.tensor(window_pages, dim),
        window_slots: T.Tensor((n, window), "int32"),
        latent_cache: far.tensor(latent_pages, dim),
        latent_slots: T.Tensor((n, selected), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((n, heads, dim), dtype),
    ):
        with T.Kernel(n, heads // block, threads=THREADS) as (token, part):
            query = T.alloc_shared((block, dim), dtype)
            result = T.alloc_fragment((block, dim), "float32")
            best = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(q[token, part * block : (part + 1) * block, :], query)
            T.clear(result)
            for h in T.Parallel(block):
                best[h] = T.max(sink[part * block + h], LOWEST)
                total[h] = T.exp(sink[part * block + h] - best[h])
            attend(near, window_cache, window_slots, token, window, query, result, best, total)
            attend(far, latent_cache, latent_slots, token, selected, query, result, best, total)
            for h, j in T.Parallel(block, dim):
                out[token, part * block + h, j] = T.if_then_else(total[h] == 0.0, 0.0, result[h, j] / total[h])

    return sparse_attention
