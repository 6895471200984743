"""FP8, FP4 and E8M0 formats in plain PyTorch (spec: model, sections 2, 3 and 7).

Round trips (`*_round_trip`) return what a reader of the stored value would see, in the dtype of the input; `pack_*`
and `unpack_*` move between values and stored bytes. A round trip and pack + unpack agree exactly.

A group of values that has no finite scale, because one of them is NaN or (but for NVFP4, which saturates) infinite,
gets the scale NaN and reads back as NaN altogether: a fault shows instead of turning into plausible numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NAN_EXPONENT = 128  # the E8M0 byte 255
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ceil_log2(x: Tensor) -> Tensor:
    """Smallest integer n with 2**n >= x, for positive finite x; exact (reads the float's exponent), int32."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def exp2_int(n: Tensor, dtype: torch.dtype) -> Tensor:
    """2**n for integer n, exact."""
    return torch.ldexp(torch.ones_like(n, dtype=dtype), n)


def e8m0_value(exponent_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """2**(byte - 127) of E8M0 bytes (uint8); 255 is NaN."""
    return _scale(exponent_bytes.int() - 127, dtype)


def _scale(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exp2_int(exponent, dtype).masked_fill(exponent == NAN_EXPONENT, torch.nan)


def _exponent(amax: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), exponent, NAN_EXPONENT)


def _groups(x: Tensor, group: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def e4m3_round(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 value (ties to even), clamped to +-448; dtype kept."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float32).to(torch.float8_e4m3fn).to(x.dtype)


def e2m1_code(x: Tensor) -> Tensor:
    """Nearest E2M1 code (uint8, bit 3 = sign), ties to the even code, clamped to +-6."""
    magnitude = x.abs()
    # Midpoints between neighbours; a tie goes up exactly where the upper code is even.
    code = (
        (magnitude > 0.25).to(torch.uint8)
        + (magnitude >= 0.75).to(torch.uint8)
        + (magnitude > 1.25).to(torch.uint8)
        + (magnitude >= 1.75).to(torch.uint8)
        + (magnitude > 2.5).to(torch.uint8)
        + (magnitude >= 3.5).to(torch.uint8)
        + (magnitude > 5.0).to(torch.uint8)
    )
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_value(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of E2M1 codes (0..15)."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=dtype, device=code.device)
    return table[code.long()]


def e2m1_round(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 value; same rule as `e2m1_code`, without the table look-up."""
    return e2m1_value(e2m1_code(x), x.dtype)


# ------------------------------------------------------------------ scales, one per group of the last dimension


def fp8_group_exponent(x: Tensor, group: int = 32) -> Tensor:
    """Power-of-two exponent of the FP8 scale of each group: ceil(log2(max(amax, 1e-4) / 448)); int32 [..., K/group]."""
    amax = _groups(x, group).abs().amax(-1).clamp_min(1e-4).to(torch.float32)
    return _exponent(amax, ceil_log2(amax * (1.0 / E4M3_MAX)))


def mxfp4_group_exponent(x: Tensor, group: int = 32) -> Tensor:
    """Power-of-two exponent of the index-key FP4 scale: ceil(log2(max(amax, 6 * 2^-126) / 6)); int32 [..., K/group]."""
    amax = _groups(x, group).abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-126).to(torch.float32)
    return _exponent(amax, ceil_log2(amax / E2M1_MAX))


def nvfp4_group_scale(x: Tensor, group: int = 16) -> Tensor:
    """E4M3 scale of the main-KV FP4 format: e4m3(max(amax, 6 * 2^-9) / 6), dtype of x, [..., K/group]."""
    amax = _groups(x, group).abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-9)
    return e4m3_round(amax / E2M1_MAX)


# ------------------------------------------------------------------ round trips


def fp8_round_trip(x: Tensor, group: int = 32) -> Tensor:
    """E4M3 with one power-of-two scale per `group` values: activations and the SWA cache. [..., K] -> [..., K]."""
    scale = _scale(fp8_group_exponent(x, group), x.dtype).unsqueeze(-1)
    return (e4m3_round(_groups(x, group) / scale) * scale).reshape(x.shape)


def mxfp4_round_trip(x: Tensor, group: int = 32) -> Tensor:
    """E2M1 with one power-of-two scale per `group` values: index keys and index queries."""
    scale = _scale(mxfp4_group_exponent(x, group), x.dtype).unsqueeze(-1)
    return (e2m1_round(_groups(x, group) / scale) * scale).reshape(x.shape)


def nvfp4_round_trip(x: Tensor, group: int = 16) -> Tensor:
    """E2M1 with one E4M3 scale per `group` values: main compressed KV."""
    scale = nvfp4_group_scale(x, group).unsqueeze(-1)
    return (e2m1_round(_groups(x, group) / scale) * scale).reshape(x.shape)


# ------------------------------------------------------------------ stored bytes of cache rows


def _scaled(x: Tensor, scale: Tensor, group: int) -> Tensor:
    """x over its groups' scales, [..., K/group, group]; 0 where the scale is NaN, which says all."""
    return (_groups(x, group) / scale.unsqueeze(-1)).nan_to_num(nan=0.0)


def pack_nibbles(code: Tensor) -> Tensor:
    """Two codes a byte, low nibble = even index. uint8 [..., K] -> uint8 [..., K/2]."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_fp8_row(x: Tensor, group: int = 32) -> Tensor:
    """SWA row: K bytes of E4M3, then K/32 bytes of UE8M0. float [..., K] -> uint8 [..., K + K/32]."""
    exponent = fp8_group_exponent(x, group)
    values = _scaled(x, _scale(exponent, x.dtype), group)
    values = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float32).reshape(x.shape).to(torch.float8_e4m3fn)
    return torch.cat((values.view(torch.uint8), (exponent + 127).to(torch.uint8)), dim=-1)


def unpack_fp8_row(row: Tensor, dim: int, dtype: torch.dtype, group: int = 32) -> Tensor:
    """Inverse of `pack_fp8_row`: uint8 [..., dim + dim/32] -> [..., dim]."""
    values = row[..., :dim].contiguous().view(torch.float8_e4m3fn).to(dtype)
    scale = e8m0_value(row[..., dim:], dtype).unsqueeze(-1)
    return (_groups(values, group) * scale).reshape(values.shape)


def pack_mxfp4_row(x: Tensor, group: int = 32) -> Tensor:
    """Index-key row: K/2 bytes of E2M1 pairs, then K/32 bytes of UE8M0."""
    exponent = mxfp4_group_exponent(x, group)
    code = e2m1_code(_scaled(x, _scale(exponent, x.dtype), group)).reshape(x.shape)
    return torch.cat((pack_nibbles(code), (exponent + 127).to(torch.uint8)), dim=-1)


def unpack_mxfp4_row(row: Tensor, dim: int, dtype: torch.dtype, group: int = 32) -> Tensor:
    """Inverse of `pack_mxfp4_row`: uint8 [..., dim/2 + dim/32] -> [..., dim]."""
    values = e2m1_value(unpack_nibbles(row[..., : dim // 2]), dtype)
    scale = e8m0_value(row[..., dim // 2 :], dtype).unsqueeze(-1)
    return (_groups(values, group) * scale).reshape(values.shape)


def pack_nvfp4_row(x: Tensor, group: int = 16) -> Tensor:
    """Main-KV row: K/2 bytes of E2M1 pairs, then K/16 bytes of E4M3 scales."""
    scale = nvfp4_group_scale(x, group)
    code = e2m1_code(_scaled(x, scale, group)).reshape(x.shape)
    scale_bytes = scale.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((pack_nibbles(code), scale_bytes), dim=-1)


def unpack_nvfp4_row(row: Tensor, dim: int, dtype: torch.dtype, group: int = 16) -> Tensor:
    """Inverse of `pack_nvfp4_row`: uint8 [..., dim/2 + dim/16] -> [..., dim]."""
    values = e2m1_value(unpack_nibbles(row[..., : dim // 2]), dtype)
    scale = row[..., dim // 2 :].contiguous().view(torch.float8_e4m3fn).to(dtype).unsqueeze(-1)
    return (_groups(values, group) * scale).reshape(values.shape)


# ------------------------------------------------------------------ weights


# On a CPU, PyTorch converts float8 eight times slower than NumPy looks the values up.
_E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
_E2M1_TABLE = e2m1_value(unpack_nibbles(torch.arange(256, dtype=torch.uint8).unsqueeze(1)), torch.float32).numpy()
_E2M1_TABLE = _E2M1_TABLE.view(np.float64).ravel()  # two values at once


def _e4m3_value(values: Tensor) -> Tensor:
    """Float32 values of float8_e4m3fn ones, in new memory."""
    if values.device.type != "cpu":
        return values.float()
    return torch.from_numpy(_E4M3_TABLE.take(values.view(torch.uint8).numpy()))


def _e2m1_pairs(packed: Tensor) -> Tensor:
    """Float32 values [..., K] of packed E2M1 pairs uint8 [..., K/2], in new memory."""
    if packed.device.type != "cpu":
        return e2m1_value(unpack_nibbles(packed), torch.float32)
    return torch.from_numpy(_E2M1_TABLE.take(packed.numpy()).view(np.float32))


def quantize_fp8_weight(weight: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """[O, K] -> E4M3 [O, K] and E8M0 bytes [ceil(O/32), K/32]: one power-of-two scale per 32 x 32 block."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, -rows % block))
    blocks = padded.reshape(-1, block, cols // block, block)
    exponent = ceil_log2(blocks.abs().amax((1, 3)).clamp_min(1e-30) * (1.0 / E4M3_MAX)).clamp(-127, 127)
    scaled = blocks / exp2_int(exponent, torch.float32)[:, None, :, None]
    values = scaled.clamp(-E4M3_MAX, E4M3_MAX).reshape(padded.shape)[:rows].to(torch.float8_e4m3fn)
    return values, (exponent + 127).to(torch.uint8)


def dequantize_fp8_weight(values: Tensor, scale_bytes: Tensor, dtype: torch.dtype, block: int = 32) -> Tensor:
    """Inverse of `quantize_fp8_weight`; exact in BF16 and wider."""
    scale = e8m0_value(scale_bytes.view(torch.uint8), torch.float32)
    scale = scale.repeat_interleave(block, 0)[: values.shape[0]]
    return _groups(_e4m3_value(values), block).mul_(scale.unsqueeze(-1)).reshape(values.shape).to(dtype)


def quantize_fp4_weight(weight: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """[O, K] -> packed E2M1 int8 [O, K/2] and E8M0 bytes [O, K/32]: one scale per row and 32 columns."""
    exponent = mxfp4_group_exponent(weight.float(), group).clamp(-127, 127)
    code = e2m1_code(_groups(weight.float(), group) / exp2_int(exponent, torch.float32).unsqueeze(-1))
    return pack_nibbles(code.reshape(weight.shape)).view(torch.int8), (exponent + 127).to(torch.uint8)


def dequantize_fp4_weight(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype, group: int = 32) -> Tensor:
    """Inverse of `quantize_fp4_weight`; exact in BF16 and wider."""
    values = _e2m1_pairs(packed.view(torch.uint8))
    scale = e8m0_value(scale_bytes.view(torch.uint8), torch.float32).unsqueeze(-1)
    return _groups(values, group).mul_(scale).reshape(values.shape).to(dtype)
