"""Exact rejection sampling of drafts that were drawn themselves (Leviathan et al. and Chen et al., 2023).

A draft x of the distribution p_d is accepted with probability min(1, p(x) / p_d(x)); where it is not, the token is
drawn from what is left, max(p - p_d, 0). Either way it is distributed like p, whatever p_d is; and what is left never
holds a draft that was refused, so a row's token equals its draft exactly if it was accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation

GOLDEN_RATIO = 0x9E3779B97F4A7C15
ACCEPTANCE = 0x5DEECE66D1CE4E5B  # which random numbers of a seed: one stream for accepting, one for what is left
REMAINDER = 0x2545F4914F6CDD1D
TINY = torch.finfo(torch.float32).tiny
LEAST_REMAINDER = 1e-8  # weight below which p and p_d are the same, but for rounding


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def uniform_numbers(seeds: Tensor, counters: Tensor) -> Tensor:
    """float64 [n] in [0, 1), a function of (seed, counter): splitmix64, as in reference/sampling.py; int64 [n] each."""

    def shifted(z: Tensor, by: int) -> Tensor:  # a logical shift, of the bits of uint64
        return (z >> by) & ((1 << (64 - by)) - 1)

    def mix(z: Tensor) -> Tensor:
        z = z + _signed(GOLDEN_RATIO)
        z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
        z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
        return z ^ shifted(z, 31)

    return shifted(mix(mix(seeds) + counters * _signed(GOLDEN_RATIO)), 24).to(torch.float64) * 2.0**-40


@operation
def token_probabilities(
    logits: Tensor, temperature: Tensor, num_candidates: Tensor, top_p: Tensor, min_p: Tensor, filters: bool
) -> Tensor:
    """The distribution that draw_tokens draws from, float32 [R, V]: arguments as there.

    filters: whether a row has a top_p below 1 or fewer candidates than V; known to the host, and saves a sort.
    """
    largest = logits.max(-1, keepdim=True)
    heat = temperature.clamp_min(TINY).to(logits.dtype).unsqueeze(1)
    weights = ((logits - largest.values) / heat).exp()
    if filters:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(weights.shape[1], device=weights.device)
        ordered = torch.where(rank < num_candidates.unsqueeze(1), ordered, 0.0)
        ends = ordered.cumsum(-1, dtype=torch.float64)
        # Weight of what is more likely; equally likely tokens are inside or outside together.
        first = torch.searchsorted(-ordered, -ordered)
        above = torch.where(first > 0, ends.gather(1, (first - 1).clamp_min(0)), 0.0)
        allowed = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(1) * ends[:, -1:]
        ordered = torch.where((above < allowed) | (first == 0), ordered, 0.0)
        weights = torch.zeros_like(weights).scatter_(1, order, ordered)
    weights = torch.where(weights < min_p.to(weights.dtype).unsqueeze(1), 0.0, weights)
    certain = torch.zeros_like(weights).scatter_(1, largest.indices, 1.0)
    return torch.where((temperature > 0).unsqueeze(1), weights / weights.sum(-1, keepdim=True), certain)


@operation
def accept_or_resample(target: Tensor, draft: Tensor, drafts: Tensor, seeds: Tensor, counters: Tensor) -> Tensor:
    """A token a row, distributed like `target`, and the row's draft if that is accepted -> int64 [R].

    target and draft float32 [R, V]: the distribution wanted, and the one that drafts int64 [R] were drawn from; seeds
    and counters int64 [R].
    """
    rows = drafts.unsqueeze(1)
    accepts = uniform_numbers(seeds ^ ACCEPTANCE, counters) * draft.gather(1, rows)[:, 0] < target.gather(1, rows)[:, 0]
    remainder = (target - draft).clamp_min(0)
    is_empty = remainder.sum(-1, keepdim=True) < LEAST_REMAINDER
    ends = torch.where(is_empty, target, remainder).cumsum(-1, dtype=torch.float64)
    wanted = uniform_numbers(seeds ^ REMAINDER, counters).unsqueeze(1) * ends[:, -1:]
    other = torch.searchsorted(ends, wanted, right=True)[:, 0].clamp_max(target.shape[1] - 1)
    return torch.where(accepts, drafts, other)
