"""Mixture of experts around the products: gate, order of the pairs by expert, expansion and weighted sum."""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import experts as bodies
from deepinfer.kernels.tilelang_ops.bodies import threads_for

THREADS = 128
TILE = 1024  # pairs at once


def moe_gate_tl(experts: int, k: int, normalise: bool, scaling: float, bias_a_row: bool) -> Any:
    """`moe_gate` of logits float32 [n, experts] with bias float32 [n, experts], or [1, experts]."""
    n, width = T.dynamic("n"), -(-experts // 32) * 32

    @T.prim_func
    def moe_gate(
        logits: T.Tensor((n, experts), "float32"),
        bias: T.Tensor((n if bias_a_row else 1, experts), "float32"),
        chosen: T.Tensor((n, k), "int32"),
        gates: T.Tensor((n, k), "float32"),
    ):
        with T.Kernel(n) as row:
            picked, own_bias = T.alloc_shared((k,), "float32"), T.alloc_shared((1, experts), "float32")
            own = T.alloc_shared((1, experts), "float32")
            T.copy(logits[row, 0], own)
            T.copy(bias[row if bias_a_row else 0, 0], own_bias)
            found, weights = T.alloc_shared((1, k), "int32"), T.alloc_shared((1, k), "float32")
            with T.SimtVF(threads=threads_for(width)):
                bodies.moe_gate(own, own_bias, found, weights, picked, 0, 0, experts, width, k, normalise, scaling)
            T.copy(found, chosen[row, 0])
            T.copy(weights, gates[row, 0])

    return moe_gate


def expert_order_tl(experts: int) -> Any:
    """`expert_order` of chosen int32 [pairs], one block an expert."""
    pairs = T.dynamic("pairs")

    @T.prim_func
    def expert_order(
        chosen: T.Tensor((pairs,), "int32"),
        counts: T.Tensor((experts,), "int32"),
        order: T.Tensor((pairs,), "int32"),
        places: T.Tensor((pairs,), "int32"),
    ):
        with T.Kernel(experts) as expert:
            flags, scratch = T.alloc_shared((TILE,), "int32"), T.alloc_shared((TILE,), "int32")
            with T.SimtVF(threads=THREADS):
                bodies.place_pairs(chosen, counts, order, places, flags, scratch, expert, pairs, TILE)

    return expert_order


def expand_rows_tl(dim: int, k: int, dtype: str = "bfloat16") -> Any:
    """`expand_rows` of x [n, dim] in the order of pairs int32 [pairs], k of each row."""
    n, pairs = T.dynamic("n"), T.dynamic("pairs")

    @T.prim_func
    def expand_rows(
        x: T.Tensor((n, dim), dtype), order: T.Tensor((pairs,), "int32"), out: T.Tensor((pairs, dim), dtype)
    ):
        with T.Kernel(pairs) as row:
            value = T.alloc_shared((1, dim), dtype)
            T.copy(x[order[row] // k, 0], value)
            T.copy(value, out[row, 0])

    return expand_rows


def reduce_rows_tl(dim: int, k: int, dtype: str = "bfloat16") -> Any:
    """`reduce_rows` of z [pairs, dim] at places int32 [n, k], weighted by gates float32 [n, k]."""
    n, pairs = T.dynamic("n"), T.dynamic("pairs")

    @T.prim_func
    def reduce_rows(
        z: T.Tensor((pairs, dim), dtype),
        places: T.Tensor((n, k), "int32"),
        gates: T.Tensor((n, k), "float32"),
        out: T.Tensor((n, dim), dtype),
    ):
        with T.Kernel(n) as row:
            result = T.alloc_shared((1, dim), dtype)
            with T.SimtVF(threads=THREADS):
                bodies.reduce_row(z, places, gates, result, row, 0, dim, k)
            T.copy(result, out[row, 0])

    return reduce_rows
