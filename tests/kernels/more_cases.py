"""Inputs of the operations around the products: casts, order of the experts' pairs, windows, lengths of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from deepinfer.kernels.reference.casts import cast_groups as cast_reference
from deepinfer.kernels.reference.int8 import arrange, quantize_rows

Case = tuple[Any, ...]
GROUPS = ((1, 32), (1, 16), (1, 128), (32, 32), (16, 64), (16, 1), (5, 1))  # rows x columns of a scale


def normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def linear_fp8(g: torch.Generator) -> Iterator[Case]:
    for n, k, columns in ((0, 32, 8), (1, 384, 1024), (3, 64, 33), (7, 192, 50), (40, 96, 24), (3000, 96, 40)):
        values = torch.randint(0, 256, (columns, k), generator=g, dtype=torch.uint8)
        values[values % 128 == 127] = 0  # NaN: once below
        scales = torch.randint(110, 135, (-(-columns // 32), k // 32), generator=g, dtype=torch.uint8)
        yield normal(g, n, k), values, scales
    values = torch.zeros(8, 64, dtype=torch.uint8)
    values[1, 40], values[2, 3] = 127, 255
    yield normal(g, 2, 64), values, torch.full((1, 2), 127, dtype=torch.uint8)


def grouped_linear(g: torch.Generator) -> Iterator[Case]:
    for n, groups, k, columns in ((0, 2, 32, 8), (1, 2, 512, 128), (6, 3, 33, 5), (7, 1, 64, 50), (300, 2, 96, 24)):
        yield normal(g, n, groups, k), normal(g, groups, columns, k)
        yield normal(g, n, groups, k), normal(g, groups, columns, k).bfloat16()
    yield normal(g, 5, 2, 96)[:, :, 32:], normal(g, 2, 17, 64)
    yield normal(g, 3000, 2, 96), normal(g, 2, 8, 96).bfloat16()


def grouped_linear_fp8(g: torch.Generator) -> Iterator[Case]:
    for (x, values, scales), groups in zip(linear_fp8(g), (2, 2, 3, 5, 3, 4, 2), strict=True):
        yield normal(g, len(x), groups, x.shape[1]), values, scales


def rows_to_cast(g: torch.Generator, n: int, dim: int) -> torch.Tensor:
    """Zeros, ties of the formats, huge and tiny values, a NaN and an infinity among ordinary rows."""
    rows = normal(g, n, dim) * 10.0 ** torch.randint(-6, 4, (n, 1), generator=g)
    special = (
        torch.zeros(dim), -torch.zeros(dim), normal(g, dim) * 1e30, normal(g, dim) * 1e-38,
        torch.arange(dim).remainder(17).sub(8) * 0.25, torch.full((dim,), 448.0), torch.arange(dim) * 0.0625 + 448,
    )  # fmt: skip
    for i, row in enumerate(special[: max(n - 2, 0)]):
        rows[i] = row
    if n > 2:
        rows[-1, dim // 3], rows[-2, 5] = torch.nan, -torch.inf
    return rows


def cast_groups(g: torch.Generator) -> Iterator[Case]:
    for values, scales, group in product(("e4m3", "e2m1"), ("ue8m0", "e4m3", "float32"), GROUPS):
        for n in (0, 1, 37):
            yield rows_to_cast(g, n, 128), values, scales, *group
    for values, scales in (("e4m3", "float32"), ("e4m3", "ue8m0")):
        yield rows_to_cast(g, 130, 256), values, scales, 128, 128
        yield rows_to_cast(g, 130, 256), values, scales, 128, 1
        yield rows_to_cast(g, 9, 384), values, scales, 1, 384
        yield rows_to_cast(g, 700, 64), values, scales, 300, 32
        yield rows_to_cast(g, 600, 64), values, scales, 600, 1


def uncast_groups(g: torch.Generator) -> Iterator[Case]:
    for x, values, scales, *group in cast_groups(g):
        codes, stored = cast_reference.reference(x, values, scales, *group)
        yield codes, stored, values, scales, *group, torch.float32


def norm_cast(g: torch.Generator) -> Iterator[Case]:
    for n, dim in ((0, 64), (1, 384), (7, 64), (65, 512)):
        yield normal(g, n, dim) * 3, normal(g, dim), 1e-6


def swiglu_cast(g: torch.Generator) -> Iterator[Case]:
    for n, inner in ((0, 64), (1, 128), (9, 64)):
        yield normal(g, n, 2 * inner) * 8, 10.0


def rope_cast(g: torch.Generator) -> Iterator[Case]:
    for n, heads, dim, pairs in ((0, 2, 64, 8), (1, 8, 128, 16), (5, 3, 64, 32)):
        for inverse in (False, True):
            angle = normal(g, n, pairs) * 10
            yield normal(g, n, heads, dim), angle.cos(), angle.sin(), inverse


def chosen_experts(g: torch.Generator, n: int, experts: int, k: int) -> torch.Tensor:
    return torch.rand(n, experts, generator=g).argsort(1)[:, :k].int()


def expert_order(g: torch.Generator) -> Iterator[Case]:
    for n, experts, k in ((0, 8, 2), (1, 24, 4), (50, 24, 6), (700, 384, 6), (3000, 8, 2)):
        yield chosen_experts(g, n, experts, k), experts


def expand_rows(g: torch.Generator) -> Iterator[Case]:
    for n, dim, k in ((0, 64, 2), (1, 384, 4), (40, 96, 3)):
        yield normal(g, n, dim), torch.randperm(n * k, generator=g).int(), k


def reduce_rows(g: torch.Generator) -> Iterator[Case]:
    for n, dim, k in ((0, 64, 2), (1, 384, 4), (40, 96, 3)):
        places = torch.randperm(n * k, generator=g).int().view(n, k)
        yield normal(g, n * k, dim), places, torch.rand(n, k, generator=g)


def top_k(g: torch.Generator) -> Iterator[Case]:
    for n, width, k in ((0, 10, 3), (3, 7, 10), (5, 300, 20), (2, 9000, 512)):
        scores = normal(g, n, width).mul(4).round() if width < 9000 else normal(g, n, width)
        scores[:, ::5] = torch.where(scores[:, ::5] > 0, -torch.inf, -0.0)
        ends = torch.randint(0, width + 3, (n,), generator=g).int()
        for by_value in (False, True):
            yield scores, k, ends, by_value, "raise"
            yield scores.masked_fill(scores == 4, torch.nan), k, None, by_value, "ignore"


def window_slots(g: torch.Generator) -> Iterator[Case]:
    for n, window, ring in ((0, 128, 134), (1, 128, 134), (50, 5, 9), (7, 16, 16)):
        positions = torch.randint(0, 300, (n,), generator=g)
        yield positions, torch.randint(0, 60, (n,), generator=g).int(), window, ring


def choose_draft_lengths(g: torch.Generator) -> Iterator[Case]:
    for n, drafts, stops in product((1, 3, 17, 64), (1, 5), (False, True)):
        survival = torch.rand(n, drafts, generator=g, dtype=torch.float64).cumprod(1)
        survival[torch.rand(n, generator=g) < 0.2] = 0.0
        room = torch.randint(0, drafts + 1, (n,), generator=g)
        steps = 5 + torch.rand(n * drafts + 1, generator=g, dtype=torch.float64).mul(0.3).cumsum(0)
        for times in (steps, torch.full_like(steps, 7.0)):
            yield survival, room, times, stops


def int8_weight(g: torch.Generator, columns: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize_rows(normal(g, columns, k))
    return arrange(values), scales


def linear_int8(g: torch.Generator) -> Iterator[Case]:
    for n, k, columns in ((0, 64, 32), (1, 4, 16), (5, 384, 160), (7, 60, 80), (64, 100, 256)):
        x = normal(g, n, k + 8)[:, :k] * torch.rand(n, 1, generator=g).mul(20).exp()
        x[3:4] = 0.0
        x[4:5, k // 2] = torch.nan
        x[5:6, 0] = -torch.inf
        yield x, *int8_weight(g, columns, k)


def chain_drafts(g: torch.Generator) -> Iterator[Case]:
    for n, drafts, columns, k in ((0, 5, 32, 8), (1, 5, 16, 64), (3, 1, 512, 12), (11, 4, 48, 64)):
        base = normal(g, n, drafts, columns).mul(2).round()  # ties, with a term of the token before that is often 0
        embed = normal(g, columns, k) * (torch.rand(columns, 1, generator=g) < 0.5)
        base[1:2, :, ::3] = torch.nan
        base[2:3, 0] = torch.nan
        base[3:4, :, 5] = torch.inf
        base[4:5] = -torch.inf
        yield base, embed, *int8_weight(g, columns, k), torch.randint(0, columns, (n,), generator=g)


MORE = {
    f.__name__: f
    for f in (
        cast_groups,
        chain_drafts,
        choose_draft_lengths,
        expand_rows,
        expert_order,
        grouped_linear,
        grouped_linear_fp8,
        linear_fp8,
        linear_int8,
        norm_cast,
        reduce_rows,
        rope_cast,
        swiglu_cast,
        top_k,
        uncast_groups,
        window_slots,
    )
}
MORE_EXACT = {
    "cast_groups", "choose_draft_lengths", "expand_rows", "expert_order", "linear_int8", "top_k", "uncast_groups",
    "window_slots",
}  # fmt: skip
