"""mHC residual streams: post-mix, pre-mix with Sinkhorn's iterations, and both in one launch. One block a row.

h [n, hc, dim] of `dtype`, coefficients float32; dim is a multiple of 32.
"""

from typing import Any

import tilelang.ascend.language as T

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
        with T.Kernel(n) as row:
            own, output = T.alloc_shared((1, hc, dim), dtype), T.alloc_shared((1, dim), dtype)
            posts, shares = T.alloc_shared((1, hc), "float32"), T.alloc_shared((1, hc, hc), "float32")
            T.copy(h[row, 0, 0], own)
            T.copy(y[row, 0], output)
            T.copy(post[row, 0], posts)
            T.copy(comb[row, 0, 0], shares)
            with T.SimtVF(threads=threads_for(dim)):
                bodies.hc_post(own, output, posts, shares, own, 0, 0, hc, dim)
            T.copy(own, out[row, 0, 0])

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
        with T.Kernel(n) as row:
            own = T.alloc_shared((1, hc, dim), dtype)
            u, c = T.alloc_shared((mixes,), "float32"), T.alloc_shared((hc, hc), "float32")
            c_next = T.alloc_shared((hc, hc), "float32")
            result = T.alloc_shared((1, dim), dtype)
            T.copy(h[row, 0, 0], own)
            with T.SimtVF(threads=threads_for(dim)):
                bodies.products(own, fn, u, 0, hc, dim, rms_eps)
                bodies.coefficients(u, scale, base, c, c_next, pre, post, comb, row, hc, iterations, hc_eps)
                bodies.mix_in(own, p_prev, norm_weight, result, 0, row, 0, hc, dim, rms_eps, dtype)
            T.copy(result, x[row, 0])

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
        with T.Kernel(n) as row:
            own, output = T.alloc_shared((1, hc, dim), dtype), T.alloc_shared((1, dim), dtype)
            posts, shares = T.alloc_shared((1, hc), "float32"), T.alloc_shared((1, hc, hc), "float32")
            u, c = T.alloc_shared((mixes,), "float32"), T.alloc_shared((hc, hc), "float32")
            c_next = T.alloc_shared((hc, hc), "float32")
            result = T.alloc_shared((1, dim), dtype)
            T.copy(h[row, 0, 0], own)
            T.copy(y[row, 0], output)
            T.copy(post_in[row, 0], posts)
            T.copy(comb_in[row, 0, 0], shares)
            with T.SimtVF(threads=threads_for(dim)):
                bodies.hc_post(own, output, posts, shares, own, 0, 0, hc, dim)
                bodies.products(own, fn, u, 0, hc, dim, rms_eps)
                bodies.coefficients(u, scale, base, c, c_next, pre, post, comb, row, hc, iterations, hc_eps)
                bodies.mix_in(own, p_prev, norm_weight, result, 0, row, 0, hc, dim, rms_eps, dtype)
            T.copy(own, streams[row, 0, 0])
            T.copy(result, x[row, 0])

    return hc_post_pre
