"""Rotary position embedding on the last dimensions of a vector, adjacent pairs (spec: model, section 3)."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config.parts import RopeScaling


class RopeConfig(Protocol):
    """What a model config says about rotations."""

    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def compress_rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> RopeScaling: ...


def rope_frequencies(config: RopeConfig, compressed: bool) -> Tensor:
    """Angle per position of each pair, float64 [qk_rope_head_dim / 2].

    `compressed` layers (ratio above 0) use `compress_rope_theta` with YaRN, whatever the length of the run; layers
    without compressed KV use plain `rope_theta`.
    """
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not compressed:
        return frequencies
    scaling = config.rope_scaling

    def correction(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def rope_table(frequencies: Tensor, num_positions: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """cos and sin of every position: [num_positions, 2, dim / 2] in `dtype`."""
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last `2 * cos.shape[-1]` dims of x; cos and sin broadcast against x[..., pairs].

    Computed in the wider of float32 and x's dtype, rounded to x's dtype. `inverse` rotates back (conjugate).
    """
    pairs = cos.shape[-1]
    split = x.shape[-1] - 2 * pairs
    compute = torch.promote_types(x.dtype, torch.float32)
    even, odd = x[..., split:].to(compute).unflatten(-1, (pairs, 2)).unbind(-1)
    if inverse:
        sin = -sin
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :split], rotated.to(x.dtype)), dim=-1)
