"""mHC residual streams: post-mix, pre-mix with Sinkhorn's iterations, and both in one launch. One block a row.

h [n, hc, dim] of `dtype`, coefficients float32; dim is a multiple of 32.
"""

from typing import Any

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies import hyper_connection as bodies
from deepinfer.kernels.tilelang_ops.bodies import threads_for


def hc_post_tl(dim: int, hc: int = 4, dtype: str = "bfloat16") -> Any:
    """`hc_post` of h, y [n, dim], post [n, hc] and comb [n, hc, hc]."""
    n = T.dynamic("n")

    @T.prim_func
    def hc_post(
        h: T.Tensor((n, hc, dim), dtype),
        y: T.Tensor((n, dim), dtype),
        post: T.Tensor((n, hc), "float32"),
        comb: T.Tensor((n, hc, hc), "float32"),
        out: T.Tensor((n, hc, dim), dtype),
    ):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            bodies.hc_post(h, y, post, comb, out, row, row, hc, dim)

    return hc_post


def hc_pre_tl(
    dim: int, hc: int, iterations: int, hc_eps: float, rms_eps: float, norm_dtype: str, dtype: str = "bfloat16"
) -> Any:
    """`hc_pre` of h and p_prev [n, hc], fn [hc * (2 + hc), hc * dim], scale [3], base, norm_weight [dim]."""
    n, mixes = T.dynamic("n"), hc * (2 + hc)

    @T.prim_func
    def hc_pre(
        h: T.Tensor((n, hc, dim), dtype),
        p_prev: T.Tensor((n, hc), "float32"),
        fn: T.Tensor((mixes, hc * dim), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((mixes,), "float32"),
        norm_weight: T.Tensor((dim,), norm_dtype),
        x: T.Tensor((n, dim), dtype),
        pre: T.Tensor((n, hc), "float32"),
        post: T.Tensor((n, hc), "float32"),
        comb: T.Tensor((n, hc, hc), "float32"),
    ):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            u, c = T.alloc_shared((mixes,), "float32"), T.alloc_shared((hc, hc), "float32")
            c_next = T.alloc_shared((hc, hc), "float32")
            bodies.products(h, fn, u, row, hc, dim, rms_eps)
            bodies.coefficients(u, scale, base, c, c_next, pre, post, comb, row, hc, iterations, hc_eps)
            bodies.mix_in(h, p_prev, norm_weight, x, row, row, row, hc, dim, rms_eps, dtype)

    return hc_pre


def hc_post_pre_tl(
    dim: int, hc: int, iterations: int, hc_eps: float, rms_eps: float, norm_dtype: str, dtype: str = "bfloat16"
) -> Any:
    """`hc_post_pre`: `hc_post` by post_in and comb_in to `streams`, then `hc_pre` of those."""
    n, mixes = T.dynamic("n"), hc * (2 + hc)

    @T.prim_func
    def hc_post_pre(
        h: T.Tensor((n, hc, dim), dtype),
        y: T.Tensor((n, dim), dtype),
        post_in: T.Tensor((n, hc), "float32"),
        comb_in: T.Tensor((n, hc, hc), "float32"),
        p_prev: T.Tensor((n, hc), "float32"),
        fn: T.Tensor((mixes, hc * dim), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((mixes,), "float32"),
        norm_weight: T.Tensor((dim,), norm_dtype),
        streams: T.Tensor((n, hc, dim), dtype),
        x: T.Tensor((n, dim), dtype),
        pre: T.Tensor((n, hc), "float32"),
        post: T.Tensor((n, hc), "float32"),
        comb: T.Tensor((n, hc, hc), "float32"),
    ):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            mixed = T.alloc_shared((1, hc, dim), dtype)
            u, c = T.alloc_shared((mixes,), "float32"), T.alloc_shared((hc, hc), "float32")
            c_next = T.alloc_shared((hc, hc), "float32")
            bodies.hc_post(h, y, post_in, comb_in, mixed, row, 0, hc, dim)
            T.copy(mixed[0, :, :], streams[row, :, :])
            bodies.products(mixed, fn, u, 0, hc, dim, rms_eps)
            bodies.coefficients(u, scale, base, c, c_next, pre, post, comb, row, hc, iterations, hc_eps)
            bodies.mix_in(mixed, p_prev, norm_weight, x, 0, row, row, hc, dim, rms_eps, dtype)

    return hc_post_pre
