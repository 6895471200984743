"""Engram: table rows of n-grams, and the gate of what was read into the streams. Rows are read by `load_rows`."""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import engram, threads_for

THREADS = 32


def engram_hash_tl(length: int, heads: int, pad: int) -> Any:
    """`engram_hash` of history int64 [n, length]."""
    n = T.dynamic("n")

    @T.prim_func
    def engram_hash(
        history: T.Tensor((n, length), "int64"),
        multipliers: T.Tensor((length,), "int64"),
        primes: T.Tensor((length - 1, heads), "int64"),
        offsets: T.Tensor((length - 1, heads), "int64"),
        out: T.Tensor((n, (length - 1) * heads), "int64"),
    ):
        with T.Kernel(n) as row:
            with T.SimtVF(threads=THREADS):
                engram.engram_hash(history, multipliers, primes, offsets, out, row, length, heads, pad)

    return engram_hash


def engram_gate_tl(hc: int, dim: int, eps: float, has_alive: bool, dtype: str = "bfloat16") -> Any:
    """`engram_gate` of h [n, hc, dim], kv [n, (hc + 1) * dim], weight [hc, dim] and alive uint8 [n] (else ones [1])."""
    n = T.dynamic("n")

    @T.prim_func
    def engram_gate(
        h: T.Tensor((n, hc, dim), dtype),
        kv: T.Tensor((n, (hc + 1) * dim), dtype),
        weight: T.Tensor((hc, dim), "float32"),
        alive: T.Tensor((n if has_alive else 1,), "uint8"),
        out: T.Tensor((n, hc, dim), dtype),
    ):
        with T.Kernel(n * hc) as index:
            row, stream = index // hc, index % hc
            streams, keys = T.alloc_shared((1, 1, dim), dtype), T.alloc_shared((1, 2 * dim), dtype)
            weights = T.alloc_shared((1, dim), "float32")
            T.copy(h[row, stream, 0], streams)
            T.copy(kv[row, stream * dim : (stream + 1) * dim], keys[0, 0:dim])
            T.copy(kv[row, hc * dim : (hc + 1) * dim], keys[0, dim : 2 * dim])
            T.copy(weight[stream, 0], weights)
            is_alive = T.cast(alive[row if has_alive else 0], "float32")
            with T.SimtVF(threads=threads_for(dim)):
                engram.engram_gate(streams, keys, weights, is_alive, streams, 0, 0, 0, dim, dim, eps)
            T.copy(streams, out[row, stream, 0])

    return engram_gate
