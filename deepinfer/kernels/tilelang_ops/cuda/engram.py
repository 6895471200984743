"""Engram: table rows of n-grams, and the gate of what was read into the streams. Rows are read by `load_rows`."""

from typing import Any

import tilelang.language as T

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
        with T.Kernel(n, threads=THREADS) as row:
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
        with T.Kernel(n, hc, threads=threads_for(dim)) as (row, stream):
            is_alive = T.cast(alive[row if has_alive else 0], "float32")
            engram.engram_gate(h, kv, weight, is_alive, out, row, stream, stream * dim, hc * dim, dim, eps)

    return engram_gate
