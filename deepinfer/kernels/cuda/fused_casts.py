"""E4M3 with a power of two for 32 values, behind a norm, a gated activation or a rotation: one launch instead of two.

The result of the first operation is rounded to its dtype before it is cast, so that both are as if they were apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.basic import gated
from deepinfer.kernels.cuda.common import covered, rows_of
from deepinfer.kernels.cuda.formats import FP8, e4m3_byte, group_scale, over_power
from deepinfer.kernels.reference import casts  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend
from deepinfer.kernels.tile_kernels import casts as tile_casts

GROUP = 32
LINES = 64  # groups of a program


@triton.jit
def _store(codes, scales, x, group, alive, GROUP: tl.constexpr):
    """Lines x float32 [lines, GROUP] as groups number `group` [lines] of contiguous rows."""
    byte, _ = group_scale(x, FP8)
    at = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(scales + group, byte.to(tl.uint8), mask=alive)
    tl.store(codes + at, e4m3_byte(over_power(x, byte)), mask=alive[:, None])


@triton.jit
def _norm_cast(x, weight, codes, scales, stride, groups, eps, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    alive = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = x + row.to(tl.int64) * stride
    value = tl.load(source + at, mask=alive[:, None], other=0.0).to(tl.float32)
    total = tl.sum(tl.sum(value * value, axis=1), axis=0)
    factor = tl.rsqrt(total / (groups * GROUP) + eps)
    value = tl.load(weight + at, mask=alive[:, None], other=0.0).to(tl.float32) * (value * factor)
    _store(codes, scales, value.to(x.dtype.element_ty).to(tl.float32), row * groups + group, alive, GROUP)


@triton.jit
def _swiglu_cast(gate_up, codes, scales, stride, lines, groups, limit, LINES: tl.constexpr, GROUP: tl.constexpr):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    alive = line < lines
    row = (line // groups).to(tl.int64)
    at = (row * stride + (line % groups) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    g = tl.load(gate_up + at, mask=alive[:, None], other=0.0).to(tl.float32)
    u = tl.load(gate_up + at + groups * GROUP, mask=alive[:, None], other=0.0).to(tl.float32)
    _store(codes, scales, gated(g, u, limit).to(gate_up.dtype.element_ty).to(tl.float32), line, alive, GROUP)


@triton.jit
def _rope_cast(
    x, cos, sin, codes, scales, x_row, x_head, lines, heads, groups, pairs, sign,
    LINES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    alive = line < lines
    row, head = (line // (groups * heads)).to(tl.int64), line // groups % heads
    column = (line % groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = x + (row * x_row + head * x_head)[:, None]
    value = tl.load(source + column, mask=alive[:, None], other=0.0)
    plain = groups * GROUP - 2 * pairs
    turned = column - plain
    is_turned = (turned >= 0) & alive[:, None]
    partner = tl.load(source + plain + (turned ^ 1), mask=is_turned, other=0.0).to(tl.float32)
    pair = row[:, None] * pairs + (turned >> 1)
    c = tl.load(cos + pair, mask=is_turned, other=1.0)
    s = tl.load(sin + pair, mask=is_turned, other=0.0) * sign
    s = tl.where((turned & 1) == 0, -s, s)  # even: e c - o s; odd: o c + e s
    rotated = (value.to(tl.float32) * c + partner * s).to(value.dtype)
    _store(codes, scales, tl.where(is_turned, rotated, value).to(tl.float32), line, alive, GROUP)


def _outputs(n: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.empty(n, dim, dtype=torch.uint8, device=device)
    return codes, torch.empty(n, dim // GROUP, dtype=torch.uint8, device=device)


@backend("norm_cast", "cuda")
def norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, dim = x.shape
    if not covered(x, weight) or dim % GROUP:
        return NotImplemented
    fast = tile_casts.norm_cast(x, weight.contiguous(), eps)
    if fast is not None:
        return fast
    x, stride = rows_of(x)
    codes, scales = _outputs(n, dim, x.device)
    groups = triton.next_power_of_2(dim // GROUP)
    if n:
        _norm_cast[(n,)](
            x, weight.contiguous(), codes, scales, stride, dim // GROUP, eps,
            GROUPS=groups, GROUP=GROUP, num_warps=min(max(groups // 16, 1), 8),
        )  # fmt: skip
    return codes, scales


@backend("swiglu_cast", "cuda")
def swiglu_cast(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if not covered(gate_up) or inner % GROUP:
        return NotImplemented
    fast = tile_casts.swiglu_cast(gate_up, limit)
    if fast is not None:
        return fast
    gate_up, stride = rows_of(gate_up)
    codes, scales = _outputs(n, inner, gate_up.device)
    if n:
        _swiglu_cast[(triton.cdiv(scales.numel(), LINES),)](
            gate_up, codes, scales, stride, scales.numel(), inner // GROUP, limit, LINES=LINES, GROUP=GROUP
        )
    return codes, scales


@backend("rope_cast", "cuda")
def rope_cast(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    n, heads, dim = x.shape
    if not covered(x) or cos.dtype is not torch.float32 or sin.dtype is not torch.float32 or dim % GROUP:
        return NotImplemented
    cos, sin = cos.contiguous(), sin.contiguous()
    fast = tile_casts.rope_cast(x, cos, sin, -1.0 if inverse else 1.0)
    if fast is not None:
        return fast
    if x.stride(-1) != 1:
        x = x.contiguous()
    codes, scales = _outputs(n, heads * dim, x.device)
    if n:
        _rope_cast[(triton.cdiv(scales.numel(), LINES),)](
            x, cos, sin, codes, scales, x.stride(0), x.stride(1), scales.numel(), heads,
            dim // GROUP, cos.shape[-1], -1.0 if inverse else 1.0, LINES=LINES, GROUP=GROUP,
        )  # fmt: skip
    return codes, scales
