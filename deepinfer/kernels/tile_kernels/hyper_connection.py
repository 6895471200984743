"""mHC in one launch: hyper_connection.cu for few tokens, hyper_connection_many.cu for many."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, CompileError, Kernel
from deepinfer.kernels.deep_select.top_k import is_hopper

logger = logging.getLogger(__name__)

HC, SUMS, THREADS = 4, 26, 256
MOST_TOKENS = 64  # of the kernel for few: more are faster with the tensor cores
CLUSTER = 8  # the largest that every card takes
MANY_CLUSTER, MANY_TOKENS = 4, 32  # of the kernel for many


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


def tokens_of_a_cluster(n: int) -> int:
    """One as long as all tokens' clusters fit on the card, more to share the weights' way from the L2 cache."""
    return 1 if n <= 8 else 2 if n <= 16 else 4


def build(dim: int, cluster: int, tokens: int) -> Build:
    defines: dict[str, int | str] = {"DIM": dim, "CLUSTER": cluster, "TOKENS": tokens}
    return Build("mix", Path(__file__).parent / "hyper_connection.cu", defines)


def build_many(dim: int, after_sub_layer: bool, name: str = "mix_many") -> Build:
    defines: dict[str, int | str] = {"DIM": dim, "CLUSTER": MANY_CLUSTER, "TOKENS": MANY_TOKENS}
    defines["POST"] = int(after_sub_layer)
    return Build(name, Path(__file__).parent / "hyper_connection_many.cu", defines)


def build_arrange(dim: int) -> Build:
    return build_many(dim, True, "arrange")


def builds() -> list[Build]:
    """What the engine launches for V4.1-Flash: for `deepinfer kernels warmup`."""
    few = [build(5120, CLUSTER, tokens) for tokens in (1, 2, 4)]
    return [*few, *(build_many(5120, after_sub_layer) for after_sub_layer in (False, True)), build_arrange(5120)]


def shared_bytes(dim: int, cluster: int, tokens: int) -> int:
    """Shared memory of a block, as the kernel lays it out."""
    return tokens * (HC + 1) * dim // cluster * 2 + (cluster + 1) * tokens * SUMS * 4


def shared_bytes_many(dim: int) -> int:
    """Shared memory of a block, as the kernel lays it out."""
    sums = 28 + THREADS // 32 * 32 // MANY_TOKENS // 2 * SUMS + SUMS - 1 + MANY_CLUSTER  # of a token
    return MANY_TOKENS * (dim // MANY_CLUSTER * 2 + 16 + 4 * sums)


@cache
def _kernels(dim: int, cluster: int, device: int) -> dict[int, Kernel]:
    """Kernels by tokens of a cluster, loaded, as a graph's capture cannot do that. Empty if one does not compile."""
    kernels = {}
    for tokens in (1, 2, 4):
        kernel = Kernel(build(dim, cluster, tokens), shared_bytes(dim, cluster, tokens))
        try:
            kernel.load()
        except CompileError as error:
            logger.warning("mHC runs in Triton: %s", error)
            return {}
        kernels[tokens] = kernel
    return kernels


@cache
def _kernels_for_many(dim: int, after_sub_layer: bool, device: int) -> tuple[Kernel, Kernel] | None:
    """`arrange` and `mix_many`, loaded; None if they do not compile."""
    arrange, mix = Kernel(build_arrange(dim)), Kernel(build_many(dim, after_sub_layer), shared_bytes_many(dim))
    try:
        arrange.load()
        mix.load()
    except CompileError as error:
        logger.warning("mHC runs in Triton: %s", error)
        return None
    return arrange, mix


class _ArrangeParams(ctypes.Structure):
    _fields_ = [("fn", ctypes.c_void_p), ("arranged", ctypes.c_void_p)]


def arrange_parameters(fn: Tensor, arranged: Tensor) -> _ArrangeParams:
    """Arguments of `arrange`: fn float32 [24, 4 * dim] to as many bytes."""
    return _ArrangeParams(fn.data_ptr(), arranged.data_ptr())


def arrange_blocks(dim: int) -> int:
    return -(-HC * dim * 3 // THREADS)  # 8 weights a thread


def parameters(
    h: Tensor,
    mix: tuple[Tensor, Tensor, Tensor] | None,
    p_prev: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    constants: tuple[int, float, float],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> _Params:
    """Arguments of the kernel; all tensors contiguous."""
    pointers = [None if t is None else t.data_ptr() for t in (h, *(mix or (None,) * 3), p_prev, *weights, *outputs)]
    return _Params(*pointers, h.shape[0], *constants)


def mix_streams(
    h: Tensor,
    mix: tuple[Tensor, Tensor, Tensor] | None,
    p_prev: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    constants: tuple[int, float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """(h', x, pre, post, comb) of `hc_post_pre`, or of `hc_pre` without mix = (y, post, comb): then h' is h.

    weights: fn, scale, base, norm_weight; constants: sinkhorn_iters, hc_eps, rms_eps. All contiguous; h, y and
    norm_weight BF16, the rest float32. None where the kernels do not run: other cards than Hopper, no compiler, other
    types, not 4 streams.
    """
    n, hc, dim = h.shape
    narrow = (h, weights[3]) if mix is None else (h, weights[3], mix[0])
    if hc != HC or n == 0 or any(t.dtype is not torch.bfloat16 or t.data_ptr() % 16 for t in narrow):
        return None
    if mix is not None and any(t.dtype is not torch.float32 for t in mix[1:]):
        return None
    if not h.is_cuda or not is_hopper(h.device.index):
        return None
    after = h if mix is None else torch.empty_like(h)
    x = torch.empty(n, dim, dtype=h.dtype, device=h.device)
    pre, post, comb = (torch.empty(n, *shape, device=h.device) for shape in ((HC,), (HC,), (HC, HC)))
    outputs = after, x, pre, post, comb
    if n > MOST_TOKENS:
        many = _kernels_for_many(dim, mix is not None, h.device.index) if dim % (32 * MANY_CLUSTER) == 0 else None
        if many is None:
            return None
        arranged = torch.empty_like(weights[0])
        many[0].launch(
            (arrange_blocks(dim), 1, 1), (THREADS, 1, 1), arrange_parameters(weights[0], arranged), starts_early=True
        )
        arguments = parameters(h, mix, p_prev, (arranged, *weights[1:]), constants, outputs)
        many[1].launch((MANY_CLUSTER, -(-n // MANY_TOKENS), 1), (THREADS, 1, 1), arguments, starts_early=True)
        return outputs
    kernels = _kernels(dim, CLUSTER, h.device.index) if dim % (4 * CLUSTER) == 0 else {}
    if not kernels:
        return None
    tokens = tokens_of_a_cluster(n)
    arguments = parameters(h, mix, p_prev, weights, constants, outputs)
    kernels[tokens].launch((CLUSTER, -(-n // tokens), 1), (THREADS, 1, 1), arguments, starts_early=True)
    return outputs
