"""Products in INT8: for drafts alone, which may be a little wrong. What the target computes never goes through here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.registry import operation

COLUMNS, DEPTH = 16, 4  # of a weight, what one instruction multiplies: so are its values arranged


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] -> int8 values, and float32 scales [N] with row = values * scale; NaN where a row is not finite."""
    largest = x.float().abs().amax(-1)
    scales = torch.where(largest < torch.inf, largest / 127, torch.nan)
    values = x.float() / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    return values.nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8), scales


def arrange(values: Tensor) -> Tensor:
    """int8 [O, K] -> uint8 [O / 16, K / 4, 16, 4], each value plus 128: 16 columns side by side, 4 values of each."""
    tiles = values.unflatten(0, (-1, COLUMNS)).unflatten(2, (-1, DEPTH)).transpose(1, 2)
    return (tiles.to(torch.int16) + 128).to(torch.uint8).contiguous()


@operation
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x float32 [N, K], its rows rounded to INT8, times a weight of `arrange` with scales float32 [O].

    -> float32 [N, O]. Sums are exact: K is at most 65,536.
    """
    values = weight.transpose(1, 2).flatten(2).flatten(0, 1).double() - 128
    rounded, x_scales = quantize_rows(x)
    return (rounded.double() @ values.T).float() * (x_scales.unsqueeze(1) * scales)


@operation
def chain_drafts(base: Tensor, embed: Tensor, weight: Tensor, scales: Tensor, tokens: Tensor) -> Tensor:
    """The most likely drafts behind tokens int64 [S], each with a term of the token in front of it (spec: model, 8).

    base float32 [S, B, V]: logits without that term; embed float32 [V, R]; weight and scales as `linear_int8` takes
    them, of V columns. NaN is never drafted. -> int64 [S, B]
    """
    drafts = []
    for i in range(base.shape[1]):
        logits = base[:, i] + linear_int8.reference(F.embedding(tokens, embed), weight, scales)
        tokens = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(-1)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)
