"""Random operands of matrix products, and how far a result may be off: shared by the tests of deep_gemm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

gpu = pytest.mark.gpu
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
E4M3 = torch.float8_e4m3fn
# Tensor cores add FP8 products with 14 bits or so; results are rounded to BF16 (2^-9).
TOLERANCE = 4e-3


def relative_error(result: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(result.float()).all()
    return ((result.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def quantize(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """E4M3 with one scale for `rows` x 128 values."""
    m, k = x.shape
    blocks = torch.nn.functional.pad(x, (0, -k % 128, 0, -m % rows)).unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-30) / 448
    values = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:m, :k]
    return values.to(E4M3).contiguous(), scales.contiguous()


def dequantize(values: Tensor, scales: Tensor, rows: int = 1) -> Tensor:
    wide = scales.double().repeat_interleave(rows, 0)[: values.shape[0]]
    return values.double() * wide.repeat_interleave(128, 1)[:, : values.shape[1]]


def random_matrix(g: torch.Generator, m: int, k: int, spread: float, device: str = "cuda") -> Tensor:
    """Rows and pieces of 128 columns of very different size."""
    x = torch.randn(m, k, generator=g) * torch.exp(spread * torch.randn(m, 1, generator=g))
    pieces = torch.exp(spread * torch.randn(m, -(-k // 128), generator=g))
    return (x * pieces.repeat_interleave(128, 1)[:, :k]).to(device)


def ranges(counts: Sequence[int], room: int | None = None) -> tuple[Tensor, Tensor, int]:
    """begins, counts and the rows of x; contiguous, or each expert with `room` rows."""
    count = torch.tensor(counts, dtype=torch.int32)
    begins = count.cumsum(0) - count if room is None else torch.arange(len(counts)) * room
    total = int(count.sum()) if room is None else room * len(counts)
    return begins.int().cuda(), count.cuda(), total
