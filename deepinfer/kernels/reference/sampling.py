"""Drawing a token a row: greedy rows by argmax, the others by inverse-CDF draws inside their candidates.

Rows are grouped by how many candidates they keep, so the result of a row depends on its own logits and parameters
only, never on its batch mates. Nothing is ever sorted: top_k and force_topk are a selection, and top_p is rejection
sampling (the idea of FlashInfer's sorting-free sampler): draw, and draw again above that token if it lies outside.

Uniform numbers are counter-based, a function of (seed, counter) alone. The mixer is splitmix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from itertools import count
from math import exp

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.kernels.registry import operation

BLOCK = 128  # a draw finds the block of candidates first, then the candidate in it
TINY = torch.finfo(torch.float32).tiny
LOWEST = -87.0  # exp of less is no normal number of float32; no such token is ever drawn
_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 [n] in [0, 1), multiples of 2**-40 (so that u * total rounds below total); seeds, counters uint64 [n]."""
    return (_mix(_mix(seeds) + counters * np.uint64(_GOLDEN)) >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@operation
def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    num_candidates: Tensor,
    most_candidates: int,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each row of logits float32 [R, V], and the row's largest logit: if not finite, the token is void.

    All [R]: temperature, top_p and min_p float64 (temperature 0: the first of the largest logits), num_candidates int64
    in 1..V (only that many largest logits may be drawn), seeds and counters int64 (the bits of uint64).
    most_candidates: the largest of the numbers of candidates below V, 0 if none is; known to the host, so that it need
    not ask the device.
    -> token ids int64 [R], largest float32 [R].
    """
    largest, tokens = logits.max(dim=-1)
    groups: dict[int, list[int]] = {}
    for row, (heat, width) in enumerate(zip(temperature.tolist(), num_candidates.tolist(), strict=True)):
        if heat > 0:
            groups.setdefault(width, []).append(row)
    for width, rows in groups.items():
        whole = len(rows) == len(tokens)
        index = slice(None) if whole else torch.tensor(rows, device=logits.device)
        parts = [t[index] for t in (logits, largest[:, None], temperature, top_p, min_p, seeds, counters)]
        tokens[index] = _draw(width, *parts)
    return tokens, largest


def _draw(
    width: int,
    logits: Tensor,
    largest: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> Tensor:
    """One token [G] among the `width` largest logits of each row [G, V]."""
    values, ids = logits, None
    if width < logits.shape[1]:  # draw through the index map of top-k, in the order of the vocabulary
        ids = logits.topk(width, sorted=False).indices.sort().values
        values = logits.gather(1, ids)
    # A temperature that float32 rounds to zero would divide 0 by 0.
    temperature = temperature.clamp_min(TINY).to(logits.dtype)[:, None]
    # Unnormalised: the most likely token weighs 1. A CPU's exp takes many times as long where it underflows.
    weights = (values - largest).div_(temperature).clamp_min_(LOWEST).exp_()
    torch.threshold_(weights, 1.1 * exp(LOWEST), 0.0)
    allowed_above = None  # weight of more likely tokens from which on a token lies outside the nucleus
    if bool((top_p < 1).any()):
        share = torch.where(top_p < 1, top_p, torch.inf)[:, None]
        allowed_above = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    if bool(min_p.any()):
        weights.masked_fill_(weights < min_p.to(logits.dtype)[:, None], 0.0)
    choice = _draw_in_nucleus(weights, allowed_above, seeds, counters)
    return choice if ids is None else ids.gather(1, choice[:, None])[:, 0]


def _draw_in_nucleus(weights: Tensor, allowed_above: Tensor | None, seeds: Tensor, counters: Tensor) -> Tensor:
    """Index [G] in proportion to weights [G, W], among those with less than allowed_above [G, 1] of weight above them.

    Draws again where the first draw lies outside; a row's attempts use uniform numbers of their own.
    """
    seed_bits, counter_bits = (t.cpu().numpy().view(np.uint64) for t in (seeds, counters))
    choice = torch.empty(len(seeds), dtype=torch.int64, device=weights.device)
    pending = torch.arange(len(seeds), device=weights.device)
    for attempt in count():
        rows = pending.cpu().numpy() if attempt else slice(None)
        numbers = uniforms(seed_bits[rows], counter_bits[rows] + np.uint64(attempt << 40))
        drawn = _inverse_cdf(weights, torch.from_numpy(numbers).to(weights.device)[:, None])
        choice[pending] = drawn
        if allowed_above is None:
            break
        is_above = weights > weights.gather(1, drawn[:, None])
        weight_above = (weights * is_above).sum(-1, keepdim=True, dtype=torch.float64)
        outside = (weight_above >= allowed_above)[:, 0] & is_above.any(-1)
        if not bool(outside.any()):
            break
        # Whatever is less likely than a token outside the nucleus lies outside too.
        pending, allowed_above = pending[outside], allowed_above[outside]
        weights = weights[outside] * is_above[outside]
    return choice


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [G] drawn in proportion to weights float32 [G, W], from uniform float64 [G, 1] in [0, 1)."""
    size = weights.shape[1]
    blocks = pad(weights, (0, -size % BLOCK)).view(len(weights), -1, BLOCK)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    # The sum of a block rounds otherwise than its cumulative sum: stay below the latter.
    target = torch.minimum(target - start, inside[:, -1:] * (1 - 2.0**-40))
    index = block * BLOCK + torch.searchsorted(inside, target, right=True)
    return index[:, 0].clamp_(max=size - 1)  # past the end only for NaN, which is reported as invalid
