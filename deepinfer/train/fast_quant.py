"""The round trips of `deepinfer.kernels.reference.quant`, written so that `torch.compile` fuses them into one pass.

Same values (a test compares them), different means: exponents are read from float bits instead of `frexp`, and
everything is computed in float32. `straight_through` gives the rounding an identity gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def _groups(x: Tensor, group: int) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // group, group))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent for int32 exponents -126..127, built from bits."""
    return ((exponent + 127) << 23).view(torch.float32)


def _ceil_log2(x: Tensor) -> Tensor:
    """Smallest n with 2**n >= x for positive normal float32 x."""
    return ((x.view(torch.int32) + 0x7FFFFF) >> 23) - 127


def _ceil_log2_sixth(x: Tensor) -> Tensor:
    """Smallest n with 6 * 2**n >= x: 6 is 1.5 * 2**2, so the carry happens above mantissa 1.5."""
    return ((x.view(torch.int32) + 0x3FFFFF) >> 23) - 129


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    m = x.abs()
    half = (m > 0.25).float() + (m >= 0.75).float() + (m > 1.25).float() + (m >= 1.75).float()
    value = 0.5 * half + (m > 2.5).float() + (m >= 3.5).float() + 2.0 * (m > 5.0).float()
    return torch.copysign(value, x)


def fp8_rows(x: Tensor, group: int = 32, smallest: float = 1e-4) -> Tensor:
    """E4M3 with a power-of-two scale per `group` values: window latents, Engram rows. float32 [..., K]."""
    g = _groups(x.float(), group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(smallest)
    scale = _power_of_two(_ceil_log2(amax * (1.0 / E4M3_MAX)))
    return (_e4m3(g / scale) * scale).flatten(-2)


def mxfp4_rows(x: Tensor, group: int = 32) -> Tensor:
    """E2M1 with a power-of-two scale per `group` values: index keys and queries, routed experts. float32 [..., K]."""
    g = _groups(x.float(), group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-120)
    scale = _power_of_two(_ceil_log2_sixth(amax))
    return (_e2m1(g / scale) * scale).flatten(-2)


def nvfp4_rows(x: Tensor, group: int = 16) -> Tensor:
    """E2M1 with an E4M3 scale per `group` values: compressed KV. float32 [..., K]."""
    g = _groups(x.float(), group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = _e4m3(amax / E2M1_MAX)
    return (_e2m1(g / scale) * scale).flatten(-2)


def fp8_blocks(x: Tensor, block: int = 32) -> Tensor:
    """E4M3 with a power-of-two scale per 32 x 32 block. float32 [..., O, K], both multiples of 32."""
    g = x.float().unflatten(-1, (x.shape[-1] // block, block)).unflatten(-3, (x.shape[-2] // block, block))
    amax = g.abs().amax((-3, -1), keepdim=True).clamp_min(1e-30)
    scale = _power_of_two(_ceil_log2(amax * (1.0 / E4M3_MAX)))
    return (_e4m3(g / scale) * scale).reshape(x.shape)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` in the forward pass, the gradient of x in the backward pass."""
    return x + (rounded - x).detach()
