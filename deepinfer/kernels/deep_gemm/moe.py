"""The routed experts over MXFP4 weights: route, quantise in expert order, gate and up, down, sum over the slots."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.activations import quantize_rows
from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights
from deepinfer.kernels.deep_gemm.moe_gemm import MAX_EXPERTS, grouped_gate_up, grouped_gemm
from deepinfer.kernels.deep_jit import Build, Kernel

FOLDER = Path(__file__).parent
THREADS = 1024


def builds() -> list[Build]:
    """Routing and the last sum."""
    return [Build(name, FOLDER / f"{name}.cu") for name in ("moe_route", "moe_sum")]


@cache
def _kernel(index: int = 0) -> Kernel:
    return Kernel(builds()[index])


def load() -> None:
    """Compile and load the routing kernel on the current device. Raises CompileError or DriverError."""
    _kernel().load()


def route(chosen: Tensor, gates: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pairs by expert: begins int32 [E], counts int32 [E], and by row: token int32, pair int32, gate float32 [N * k].

    chosen int32 [N, k] below `experts`, gates float32 [N, k]; nothing is copied to the host. Raises ValueError.
    """
    if chosen.dtype != torch.int32 or gates.dtype != torch.float32 or gates.shape != chosen.shape:
        raise ValueError(f"chosen must be int32 and gates float32 [N, k], got {chosen.dtype} and {gates.dtype}")
    if experts > MAX_EXPERTS:
        raise ValueError(f"at most {MAX_EXPERTS} experts, got {experts}")
    count = chosen.numel()
    chosen, gates = chosen.contiguous(), gates.contiguous()
    tables = torch.empty(2, experts, dtype=torch.int32, device=chosen.device)
    rows = torch.empty(2, count, dtype=torch.int32, device=chosen.device)
    sorted_gates = torch.empty(count, device=chosen.device)
    pointers = (chosen, gates, tables[0], tables[1], rows[0], rows[1], sorted_gates)
    numbers = (count, chosen.shape[1], experts)
    arguments = [ctypes.c_void_p(t.data_ptr()) for t in pointers] + [ctypes.c_int(number) for number in numbers]
    _kernel().launch((1, 1, 1), (THREADS, 1, 1), *arguments)
    return tables[0], tables[1], rows[0], rows[1], sorted_gates


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    limit: float,
    other: Tensor | None = None,
) -> Tensor:
    """sum over the chosen experts of gate * SwiGLU expert, as `moe_experts_fp4` with quantised activations.

    x BF16 [N, D], chosen int32 [N, k], gates float32 [N, k], w13 arranged with gate_up, w2 without -> float32 [N, D];
    or with `other`, BF16 [N, D] that is added to it, BF16. Slots are added in their order: the result does not depend
    on the batch. Raises ValueError.
    """
    n, dim = x.shape
    slots = chosen.shape[1]
    if not n:
        return torch.zeros(n, dim, device=x.device) if other is None else other
    begins, counts, tokens, pairs, sorted_gates = route(chosen, gates, w13.tiles.shape[0])
    values, scales = quantize_rows(x, rows=tokens, starts_early=True, ordered=True)
    z, z_scales = grouped_gate_up(values, scales, begins, counts, w13, sorted_gates, limit, starts_early=True)
    parts = torch.empty(n * slots, dim, dtype=torch.bfloat16, device=x.device)
    grouped_gemm(z, z_scales, begins, counts, w2, parts, pairs, starts_early=True)
    return parts.view(n, slots, dim).sum(1, dtype=torch.float32) if other is None else _sum(parts, other, slots)


def _sum(parts: Tensor, other: Tensor, slots: int) -> Tensor:
    """parts BF16 [N * slots, D] summed over the slots, plus other BF16 [N, D]; in float32, rounded once."""
    n, dim = other.shape
    if other.dtype != torch.bfloat16 or other.stride(1) != 1 or other.stride(0) % 8 or other.data_ptr() % 16:
        raise ValueError(f"other must be bfloat16 [{n}, {dim}] with rows 16 bytes aligned, got {other.dtype}")
    out = torch.empty(n, dim, dtype=torch.bfloat16, device=other.device)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (parts, other, out)]
    numbers = [ctypes.c_int(slots), ctypes.c_int(dim), ctypes.c_int64(other.stride(0) * 2)]
    _kernel(1).launch((-(-dim // 1024), n, 1), (128, 1, 1), *pointers, *numbers, starts_early=True)
    return out
