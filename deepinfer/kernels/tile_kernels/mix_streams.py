"""mHC of many tokens in one launch: launches mix_streams.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_select.top_k import is_hopper
from deepinfer.kernels.tile_kernels.hyper_connection import HC, Mix, Weights

SLICES, TOKENS, PADDED, THREADS = 16, 16, 32, 256
FEWEST = 160  # tokens; Triton is faster with fewer


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("h", "y", "post", "comb", "p_prev", "fn", "scale", "base")),
        *((name, ctypes.c_void_p) for name in ("norm_weight", "after", "x", "new_pre", "new_post", "new_comb")),
        ("shares", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "blocks", "iterations")),
        ("hc_eps", ctypes.c_float),
        ("rms_eps", ctypes.c_float),
    ]


def build(dim: int, post: bool) -> Build:
    width = dim // SLICES
    shape = {"DIM": dim, "SLICE": width, "THREADS": THREADS, "TOGETHER": 2 if width % 64 == 0 else 1}
    defines: dict[str, int | str] = {**shape, "POST": int(post), "CLUSTER": 1}
    return Build("mix_streams", Path(__file__).parent / "mix_streams.cu", defines)


def builds() -> list[Build]:
    """What the engine launches for V4.1-Flash: for `deepinfer kernels warmup`."""
    return [build(5120, post) for post in (False, True)]


def shared_bytes(dim: int) -> int:
    """`fn` of a slice, as two BF16 terms."""
    return HC * (2 + HC) * HC * dim // SLICES * 4


@cache
def _kernel(dim: int, post: bool, device: int) -> Kernel | None:
    kernel = Kernel(build(dim, post), shared_bytes(dim))
    return kernel if kernel.try_load("mHC of many tokens runs in Triton") else None


@cache
def _blocks_of_a_slice(device: int) -> int:
    """So many that all blocks run at a time, one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count // SLICES


def parameters(
    h: Tensor, mix: Mix | None, p_prev: Tensor, weights: Weights, constants: tuple[int, float, float],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], scratch: tuple[Tensor, Tensor], blocks: int,
) -> _Params:  # fmt: skip
    """Arguments of the kernel; all tensors contiguous. scratch: shares and arrived, the latter zeros."""
    tensors = (h, *(mix or (None,) * 3), p_prev, *weights, *outputs, *scratch)
    return _Params(*(None if t is None else t.data_ptr() for t in tensors), h.shape[0], blocks, *constants)


def scratch(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shares of all slices, and how many slices are done with 16 tokens."""
    shares = torch.empty(SLICES, n, PADDED, device=device)
    return shares, torch.zeros(-(-n // TOKENS), dtype=torch.int32, device=device)


def mix_many(
    h: Tensor, mix: Mix | None, p_prev: Tensor, weights: Weights, constants: tuple[int, float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """`mix_few` of many tokens. None where the kernel does not run, as there; columns in multiples of 512."""
    n, hc, dim = h.shape
    narrow = (h, weights[3]) if mix is None else (h, weights[3], mix[0])
    if hc != HC or not n or dim % (32 * SLICES) or dim > 8192 or any(t.dtype is not torch.bfloat16 for t in narrow):
        return None
    if mix is not None and any(t.dtype is not torch.float32 for t in mix[1:]):
        return None
    if not h.is_cuda or not is_hopper(h.device.index) or _blocks_of_a_slice(h.device.index) == 0:
        return None
    kernel = _kernel(dim, mix is not None, h.device.index)
    if kernel is None:
        return None
    after = h if mix is None else torch.empty_like(h)
    x = torch.empty(n, dim, dtype=h.dtype, device=h.device)
    pre, post, comb = (torch.empty(n, *shape, device=h.device) for shape in ((HC,), (HC,), (HC, HC)))
    outputs, blocks = (after, x, pre, post, comb), min(_blocks_of_a_slice(h.device.index), -(-n // TOKENS))
    arguments = parameters(h, mix, p_prev, weights, constants, outputs, scratch(n, h.device), blocks)
    kernel.launch((SLICES * blocks, 1, 1), (THREADS, 1, 1), arguments, all_at_once=True)
    return outputs
