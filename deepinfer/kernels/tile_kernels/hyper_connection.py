"""mHC of few tokens in one launch: launches hyper_connection.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_select.top_k import is_hopper

HC, SUMS, THREADS = 4, 26, 256
MOST_TOKENS = 64  # more are faster in three kernels that use the tensor cores
CLUSTER = 8  # the largest that every card takes
Mix = tuple[Tensor, Tensor, Tensor]  # y, post, comb
Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # fn, scale, base, norm_weight


class _Params(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("h", "y", "post", "comb", "p_prev", "fn", "scale", "base", "norm_weight")
        ),
        *((name, ctypes.c_void_p) for name in ("after", "x", "new_pre", "new_post", "new_comb")),
        ("rows", ctypes.c_int),
        ("iterations", ctypes.c_int),
        ("hc_eps", ctypes.c_float),
        ("rms_eps", ctypes.c_float),
    ]


def cluster_of(dim: int) -> int | None:
    """Blocks that share a token's columns, each a multiple of 4 of them; None if they cannot."""
    return CLUSTER if dim % (4 * CLUSTER) == 0 else None


def tokens_of_a_cluster(n: int) -> int:
    """One as long as all tokens' clusters fit on the card, more to share the weights' way from the L2 cache."""
    return 1 if n <= 8 else 2 if n <= 16 else 4


def build(dim: int, cluster: int, tokens: int) -> Build:
    defines: dict[str, int | str] = {"DIM": dim, "CLUSTER": cluster, "TOKENS": tokens}
    return Build("mix", Path(__file__).parent / "hyper_connection.cu", defines)


def builds() -> list[Build]:
    """What the engine launches for V4.1-Flash: for `deepinfer kernels warmup`."""
    return [build(5120, CLUSTER, tokens) for tokens in (1, 2, 4)]


def shared_bytes(dim: int, cluster: int, tokens: int) -> int:
    """Shared memory of a block, as the kernel lays it out."""
    return tokens * (HC + 1) * dim // cluster * 2 + (cluster + 1) * tokens * SUMS * 4


@cache
def _kernels(dim: int, cluster: int, device: int) -> dict[int, Kernel]:
    """Kernels by tokens of a cluster, loaded, as a graph's capture cannot do that. Empty if one does not compile."""
    kernels = {}
    for tokens in (1, 2, 4):
        kernel = Kernel(build(dim, cluster, tokens), shared_bytes(dim, cluster, tokens))
        if not kernel.try_load("mHC runs in Triton"):
            return {}
        kernels[tokens] = kernel
    return kernels


def parameters(
    h: Tensor,
    mix: Mix | None,
    p_prev: Tensor,
    weights: Weights,
    constants: tuple[int, float, float],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> _Params:
    """Arguments of the kernel; all tensors contiguous."""
    pointers = [None if t is None else t.data_ptr() for t in (h, *(mix or (None,) * 3), p_prev, *weights, *outputs)]
    return _Params(*pointers, h.shape[0], *constants)


def mix_few(
    h: Tensor,
    mix: Mix | None,
    p_prev: Tensor,
    weights: Weights,
    constants: tuple[int, float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """(h', x, pre, post, comb) of `hc_post_pre`, or of `hc_pre` without mix = (y, post, comb): then h' is h.

    weights: fn, scale, base, norm_weight; constants: sinkhorn_iters, hc_eps, rms_eps. All contiguous; h, y and
    norm_weight BF16, the rest float32. None where the kernel does not run: other cards than Hopper, no compiler, other
    types, not 4 streams, many tokens.
    """
    n, hc, dim = h.shape
    cluster = cluster_of(dim)
    narrow = (h, weights[3]) if mix is None else (h, weights[3], mix[0])
    if hc != HC or not 0 < n <= MOST_TOKENS or cluster is None or any(t.dtype is not torch.bfloat16 for t in narrow):
        return None
    if mix is not None and any(t.dtype is not torch.float32 for t in mix[1:]):
        return None
    if not h.is_cuda or not is_hopper(h.device.index):
        return None
    kernels = _kernels(dim, cluster, h.device.index)
    if not kernels:
        return None
    after = h if mix is None else torch.empty_like(h)
    x = torch.empty(n, dim, dtype=h.dtype, device=h.device)
    pre, post, comb = (torch.empty(n, *shape, device=h.device) for shape in ((HC,), (HC,), (HC, HC)))
    outputs = after, x, pre, post, comb
    tokens = tokens_of_a_cluster(n)
    arguments = parameters(h, mix, p_prev, weights, constants, outputs)
    kernels[tokens].launch((cluster, -(-n // tokens), 1), (THREADS, 1, 1), arguments, starts_early=True)
    return outputs
