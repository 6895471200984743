"""Grouped FP8 x MXFP4 products of a mixture of experts, contiguous or masked, with SwiGLU and its FP8 cast or plain."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.checks import check, check_out
from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights
from deepinfer.kernels.deep_gemm.fp8_gemm import processors, row_scales_layout
from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map

SOURCE = Path(__file__).parent / "moe_gemm.cu"
MAX_EXPERTS = 1024
SHARED_BYTES = 232_448  # of a block on Hopper
FEW_TOKENS = 16  # of an expert on average, up to which the kernel for few is the faster
THREADS = 5 * 128  # four warpgroups that multiply and one that copies


class _Params(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("out_rows", ctypes.c_void_p),
        ("gates", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_scales", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("out_scales_stride", ctypes.c_int),
        ("tokens", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("row_blocks", ctypes.c_int),
        ("k_blocks", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("limit", ctypes.c_float),
    ]


@dataclass(frozen=True)
class _Variant:
    """Gate and up or down; for few tokens an expert or for many."""

    gate_up: bool
    few: bool

    def build(self) -> Build:
        """What to compile."""
        tokens, stages = (32, 9) if self.few else (80, 7 if self.gate_up else 6)
        return Build("moe_gemm", SOURCE, {"GATE_UP": int(self.gate_up), "STAGES": stages, "MAX_TOKENS": tokens})


def builds() -> list[Build]:
    """Both products of an expert, for few tokens and for many."""
    return [_Variant(gate_up, few).build() for gate_up in (True, False) for few in (True, False)]


@cache
def _kernel(variant: _Variant) -> Kernel:
    return Kernel(variant.build(), SHARED_BYTES)


def _launch(
    x: Tensor,
    x_scales: Tensor,
    begins: Tensor | None,
    counts: Tensor | None,
    weights: ExpertWeights,
    params: _Params,
    starts_early: bool,
) -> None:
    rows, k = x.shape
    experts, row_blocks, k_blocks = weights.tiles.shape[:3]
    if k != k_blocks * 128 or x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x must be float8_e4m3fn [P, {k_blocks * 128}], got {x.dtype} {list(x.shape)}")
    if list(x_scales.shape) != [rows, k_blocks] or x_scales.dtype != torch.float32:
        raise ValueError(f"x_scales must be float32 [{rows}, {k_blocks}], got {list(x_scales.shape)}")
    for name, table in (("begins", begins), ("counts", counts)):
        if table is not None:
            check(name, table, torch.int32, [experts], x)
        elif experts != 1 or begins is not counts:
            raise ValueError(f"{name} may be None for one expert only, and with the other, got {experts} experts")
    if experts > MAX_EXPERTS:
        raise ValueError(f"at most {MAX_EXPERTS} experts, got {experts}")
    params.weights, params.row_scales = weights.tiles.data_ptr(), weights.row_scales.data_ptr()
    if begins is not None and counts is not None:
        params.begins, params.counts = begins.data_ptr(), counts.data_ptr()
    params.tokens, params.experts, params.row_blocks, params.k_blocks = rows, experts, row_blocks, k_blocks
    variant = _Variant(weights.gate_up, rows <= FEW_TOKENS * experts)
    _kernel(variant).launch(
        (processors(x.device.index), 1, 1),
        (THREADS, 1, 1),
        params,
        tensor_map(x, (8, 128), 128),
        tensor_map(row_scales_layout(x_scales).T, (1, 128), 0),
        starts_early=starts_early,
    )


def grouped_gemm(
    x: Tensor,
    x_scales: Tensor,
    begins: Tensor | None,
    counts: Tensor | None,
    weights: ExpertWeights,
    out: Tensor | None = None,
    out_rows: Tensor | None = None,
    starts_early: bool = False,
) -> Tensor:
    """Rows begins[e] .. begins[e] + counts[e] of x [P, K] times expert e's weights -> the same rows of out BF16 [P, O].

    x E4M3 in the order of `ordered_columns`, K filled up to a multiple of 128 (`quantize_rows(ordered=True)` makes it
    so); x_scales float32 [P, K / 128]; begins and counts int32 [E], nothing is copied to the host. Contiguous
    groups follow one another, masked ones begin at multiples of their room: both are ranges of rows. Rows of no expert
    are not written. begins and counts None: a dense product, with the one expert. `out_rows` int32 [P] sends row p to
    out_rows[p] of `out`. `starts_early`: the kernel before on the stream makes x and nothing else of the arguments.
    Raises ValueError.
    """
    if weights.gate_up:
        raise ValueError("weights are those of gate and up: use grouped_gate_up")
    if out is None:
        out = torch.empty(x.shape[0], weights.rows, dtype=torch.bfloat16, device=x.device)
    check_out(out, (out.shape[0] if out_rows is not None else x.shape[0], weights.rows), x)
    if out_rows is not None:
        check("out_rows", out_rows, torch.int32, [x.shape[0]], x)
    if x.shape[0]:
        params = _Params(out=out.data_ptr(), out_stride=out.stride(0) * 2, columns=weights.rows)
        params.out_rows = out_rows.data_ptr() if out_rows is not None else None
        _launch(x, x_scales, begins, counts, weights, params, starts_early)
    return out


def grouped_gate_up(
    x: Tensor,
    x_scales: Tensor,
    begins: Tensor,
    counts: Tensor,
    weights: ExpertWeights,
    gates: Tensor,
    limit: float,
    starts_early: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `grouped_gemm` by [w1 | w3], then gate * silu(min(g, limit)) * clamp(u, -limit, limit) in float32, rounded to
    E4M3 with one power-of-two scale for 32 values (spec: model, sections 3 and 6), all in one launch.

    gates float32 [P]. Returns E4M3 [P, I'], I filled up with zeros to a multiple of 128, in the order that the next
    product takes, and float32 scales [P, I' / 128]: the four scales of 128 values are made one, their largest, which
    rounds only values that become subnormal. I must be a multiple of 32. Raises ValueError.
    """
    inner, rows = weights.rows // 2, x.shape[0]
    if not weights.gate_up or inner % 32:
        raise ValueError(f"weights must be arranged with gate_up, I a multiple of 32, got I = {inner}")
    check("gates", gates, torch.float32, [rows], x)
    width = -(-inner // 128) * 128
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    out_scales = torch.empty(-(-inner // 128), -(-rows // 4) * 4, device=x.device)[:, :rows].T
    if rows:
        params = _Params(out=out.data_ptr(), out_stride=width, columns=width, limit=limit, gates=gates.data_ptr())
        params.out_scales, params.out_scales_stride = out_scales.data_ptr(), out_scales.stride(1)
        _launch(x, x_scales, begins, counts, weights, params, starts_early)
    return out, out_scales
