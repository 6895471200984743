"""Casts to FP8 and FP4 with a scale for each group, their inverse, and casts behind the operation before them.

A group of values whose scale is not finite reads back as NaN (E4M3 scales saturate instead, as in reference/quant.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.kernels.reference import quant
from deepinfer.kernels.reference.basic import rms_norm, rope, swiglu
from deepinfer.kernels.registry import operation

MOST = {"e4m3": quant.E4M3_MAX, "e2m1": quant.E2M1_MAX}


def _blocks(x: Tensor, group_rows: int, group_columns: int) -> Tensor:
    """x [N, K] as [ceil(N / group_rows), group_rows, K / group_columns, group_columns], the last rows zeros."""
    padded = pad(x, (0, 0, 0, -len(x) % group_rows))
    return padded.unflatten(1, (-1, group_columns)).unflatten(0, (-1, group_rows))


def _scale(amax: Tensor, values: str, scales: str) -> tuple[Tensor, Tensor]:
    """Scale of each group in the dtype of amax, and what is stored of it."""
    most = torch.full_like(amax, MOST[values])  # a GPU would multiply by the inverse of a number
    if scales == "float32":
        scale = (amax.float().clamp_min(1e-4) / most.float()).masked_fill(~amax.isfinite(), torch.nan)
        return scale, scale
    if scales == "e4m3":
        scale = quant.e4m3_round(amax.clamp_min(MOST[values] * 2.0**-9) / most)
        return scale, scale.float().to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(scale.isnan(), 0x7F)
    group = amax.unsqueeze(-1)
    exponent = (quant.fp8_group_exponent if values == "e4m3" else quant.mxfp4_group_exponent)(group, 1)[..., 0]
    stored = (exponent + 127).to(torch.uint8)
    return quant.e8m0_value(stored, amax.dtype), stored


@operation
def cast_groups(x: Tensor, values: str, scales: str, group_rows: int, group_columns: int) -> tuple[Tensor, Tensor]:
    """x [N, K] in FP8 or FP4, one scale for a block of group_rows x group_columns: per token (1 x K, or part of it),
    per block, or per channel (some rows x 1).

    values 'e4m3' -> uint8 [N, K], 'e2m1' -> pairs, the even column low, uint8 [N, K / 2]; scales [ceil(N / group_rows),
    K / group_columns]: 'float32', or uint8 of 'ue8m0' or 'e4m3'.
    """
    blocks = _blocks(x, group_rows, group_columns)
    scale, stored = _scale(blocks.abs().amax((1, 3)), values, scales)
    wide = scale[:, None, :, None]
    quotient = (blocks / wide).to(torch.promote_types(x.dtype, torch.float32) if scales == "float32" else x.dtype)
    quotient = quotient.nan_to_num(nan=0.0).flatten(2).flatten(0, 1)[: len(x)]
    if values == "e4m3":
        codes = quotient.clamp(-quant.E4M3_MAX, quant.E4M3_MAX).float().to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = quant.pack_nibbles(quant.e2m1_code(quotient))
    return codes, stored


@operation
def uncast_groups(
    codes: Tensor, stored: Tensor, values: str, scales: str, group_rows: int, group_columns: int, dtype: torch.dtype
) -> Tensor:
    """Inverse of `cast_groups` -> `dtype` [N, K]."""
    if values == "e4m3":
        numbers = codes.view(torch.float8_e4m3fn).float()
    else:
        numbers = quant.e2m1_value(quant.unpack_nibbles(codes), torch.float32)
    if scales == "ue8m0":
        stored = quant.e8m0_value(stored, torch.float32)
    elif scales == "e4m3":
        stored = stored.view(torch.float8_e4m3fn).float()
    wide = stored.repeat_interleave(group_rows, 0)[: len(codes)].repeat_interleave(group_columns, 1)
    return (numbers * wide).to(dtype)


@operation
def norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x [N, K] in E4M3 -> uint8 [N, K] and UE8M0 scales of 32 values, uint8 [N, K / 32]."""
    return cast_groups.reference(rms_norm.reference(x, weight, eps), "e4m3", "ue8m0", 1, 32)


@operation
def swiglu_cast(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`swiglu` of gate_up [N, 2I] in E4M3 -> uint8 [N, I] and UE8M0 scales of 32 values, uint8 [N, I / 32]."""
    return cast_groups.reference(swiglu.reference(gate_up, limit), "e4m3", "ue8m0", 1, 32)


@operation
def rope_cast(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """`rope` of x [N, H, d] in E4M3 -> uint8 [N, H * d] and UE8M0 scales of 32 values, uint8 [N, H * d / 32]."""
    return cast_groups.reference(rope.reference(x, cos, sin, inverse).flatten(1), "e4m3", "ue8m0", 1, 32)
