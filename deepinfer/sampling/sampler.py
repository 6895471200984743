"""Choose one token a row: greedy rows by argmax, the others by inverse-CDF draws inside their candidates.

Rows are grouped by how many candidates they keep, so the result of a row depends on its own logits and parameters
only, never on its batch mates. Nothing is ever sorted: top_k and force_topk are a selection, and top_p is rejection
sampling (the idea of FlashInfer's sorting-free sampler): draw, and draw again above that token if it lies outside.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.outputs import TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.sampling.penalties import edit_logits
from deepinfer.sampling.random import uniforms
from deepinfer.sampling.types import SampledSequence

BLOCK = 128  # a draw finds the block of candidates first, then the candidate in it
TINY = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class SamplerOutput:
    """One entry a row. `invalid_rows` had no finite largest logit: their tokens mean nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    invalid_rows: list[int]


def sample(logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: Collection[int] = ()) -> SamplerOutput:
    """Next token of each sequence from logits float32 [R, V] (not modified), R = len(sequences)."""
    edited = edit_logits(logits, sequences, eos_token_ids)
    best, tokens = edited.max(dim=-1)  # the first of equal largest logits
    groups: dict[int, list[int]] = {}
    for row, seq in enumerate(sequences):
        if not seq.params.is_greedy:
            groups.setdefault(_num_candidates(seq.params, logits.shape[1]), []).append(row)
    for width, rows in groups.items():
        group_logits = edited if len(rows) == len(sequences) else edited[rows]
        tokens[rows] = _draw(group_logits, best[rows, None], width, [sequences[row] for row in rows])
    token_ids = tokens.tolist()
    for row, seq in enumerate(sequences):
        if seq.params.golden_token_ids is not None:
            token_ids[row] = seq.params.golden_token_ids[seq.num_output_tokens]
    is_valid = torch.isfinite(best).tolist()
    invalid_rows = [] if all(is_valid) else [row for row, valid in enumerate(is_valid) if not valid]
    return SamplerOutput(token_ids, token_logprobs(logits, token_ids, sequences), invalid_rows)


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k or vocab_size, params.force_topk or vocab_size, vocab_size)


def _draw(logits: Tensor, best: Tensor, width: int, sequences: Sequence[SampledSequence]) -> Tensor:
    """One token [G] among the `width` largest logits of each row [G, V]; best is the largest [G, 1]."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    params = [seq.params for seq in sequences]
    # Through the index map of top-k if it drops any token.
    values, ids = logits.topk(width, sorted=False) if width < logits.shape[1] else (logits, None)
    # A temperature that float32 rounds to zero would divide 0 by 0.
    temperature = column([max(p.temperature, TINY) for p in params])
    weights = (values - best).div_(temperature).exp_()  # unnormalised; the most likely token weighs 1
    allowed_above = None  # weight of more likely tokens from which on a token lies outside the nucleus
    if any(p.top_p < 1 for p in params):
        share = column([p.top_p if p.top_p < 1 else torch.inf for p in params], torch.float64)
        allowed_above = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < column([p.min_p for p in params]), 0.0)
    choice = _draw_in_nucleus(weights, allowed_above, sequences)
    return choice if ids is None else ids.gather(1, choice[:, None])[:, 0]


def _draw_in_nucleus(weights: Tensor, allowed_above: Tensor | None, sequences: Sequence[SampledSequence]) -> Tensor:
    """Index [G] in proportion to weights [G, W], among those with less than allowed_above [G, 1] of weight above them.

    Draws again where the first draw lies outside; a row's attempts use uniform numbers of their own.
    """
    choice = torch.empty(len(sequences), dtype=torch.int64, device=weights.device)
    pending = torch.arange(len(sequences), device=weights.device)
    for attempt in count():
        rows = pending.tolist() if attempt else range(len(sequences))
        seeds = [sequences[row].seed for row in rows]
        counters = [sequences[row].num_output_tokens + (attempt << 40) for row in rows]
        drawn = _inverse_cdf(weights, torch.from_numpy(uniforms(seeds, counters)).to(weights.device)[:, None])
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
