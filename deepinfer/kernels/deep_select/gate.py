"""Gate of a mixture of experts: launches gate.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_select.top_k import is_hopper

WARPS, ROWS = 4, 8  # of a block
SHARED_BYTES = WARPS * 64 * 4
LARGEST_K, MOST_EXPERTS = 32, 512


class _Params(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("gates", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("bias_stride", ctypes.c_int),
        ("normalise", ctypes.c_int),
        ("scaling", ctypes.c_float),
    ]


def build(experts: int, k: int) -> Build:
    return Build("gate", Path(__file__).parent / "gate.cu", {"EXPERTS": experts, "K": k, "CLUSTER": 1})


def builds() -> list[Build]:
    """What the engine launches for V4.1-Flash: for `deepinfer kernels warmup`."""
    return [build(384, 6)]


@cache
def _kernel(experts: int, k: int, device: int) -> Kernel | None:
    kernel = Kernel(build(experts, k), SHARED_BYTES)
    return kernel if kernel.try_load("the gate runs in Triton") else None


def parameters(logits: Tensor, bias: Tensor, chosen: Tensor, gates: Tensor, normalise: bool, scaling: float) -> _Params:
    """Arguments of the kernel; all tensors contiguous."""
    rows, experts = logits.shape
    return _Params(
        logits.data_ptr(), bias.data_ptr(), chosen.data_ptr(), gates.data_ptr(), rows,
        experts if bias.dim() == 2 else 0, normalise, scaling,
    )  # fmt: skip


def choose_experts(
    logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """`moe_gate` of contiguous float32 logits [N, E] and bias [E] or [N, E].

    None where the kernel does not run: other cards than Hopper, no compiler, k above 32, more than 512 experts.
    """
    n, experts = logits.shape
    if not logits.is_cuda or k > LARGEST_K or experts > MOST_EXPERTS or not is_hopper(logits.device.index):
        return None
    kernel = _kernel(experts, k, logits.device.index)
    if kernel is None:
        return None
    chosen = torch.empty(n, k, dtype=torch.int32, device=logits.device)
    gates = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    if n:
        arguments = parameters(logits, bias, chosen, gates, normalise, scaling)
        kernel.launch((-(-n // ROWS), 1, 1), (32 * WARPS, 1, 1), arguments, starts_early=True)
    return chosen, gates
