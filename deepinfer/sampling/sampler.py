"""Choose one token a row: greedy rows by argmax, the others by one inverse-CDF draw inside their candidates.

Rows are grouped by how many candidates they keep, so the result of a row depends on its own logits and parameters
only, never on its batch mates, and the vocabulary is never sorted when top_k or force_topk is set.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.outputs import TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.sampling.penalties import edit_logits
from deepinfer.sampling.random import uniforms
from deepinfer.sampling.types import SampledSequence

# Candidates tried first for top_p alone; rows whose nucleus is wider fall back to a full sort.
NUCLEUS_CANDIDATES = 1024


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
    groups: dict[tuple[int, bool], list[int]] = {}
    for row, seq in enumerate(sequences):
        if not seq.params.is_greedy:
            groups.setdefault(_candidates(seq.params, logits.shape[1]), []).append(row)
    for (width, is_nucleus), rows in groups.items():
        group_logits = edited if len(rows) == len(sequences) else edited[rows]
        draw = _Draw([sequences[row] for row in rows], best[rows], logits.device)
        if is_nucleus:
            tokens[rows] = draw.from_nucleus(group_logits, width)
        elif width < logits.shape[1]:
            tokens[rows] = draw.from_top(group_logits, width)
        else:
            tokens[rows] = draw.from_all(group_logits)
    token_ids = tokens.tolist()
    for row, seq in enumerate(sequences):
        if seq.params.golden_token_ids is not None:
            token_ids[row] = seq.params.golden_token_ids[seq.num_output_tokens]
    is_valid = torch.isfinite(best).tolist()
    invalid_rows = [] if all(is_valid) else [row for row, valid in enumerate(is_valid) if not valid]
    return SamplerOutput(token_ids, token_logprobs(logits, token_ids, sequences), invalid_rows)


def _candidates(params: SamplingParams, vocab_size: int) -> tuple[int, bool]:
    """(number of most likely tokens to look at, whether top_p alone bounds them)."""
    limits = [k for k in (params.top_k, params.force_topk) if k]
    if limits and min(limits) < vocab_size:
        return min(limits), False
    if params.top_p < 1:
        return min(NUCLEUS_CANDIDATES, vocab_size), True
    return vocab_size, False


class _Draw:
    """One uniform number a row and the parameters of the rows as columns [rows, 1]."""

    def __init__(self, sequences: list[SampledSequence], best: Tensor, device: torch.device):
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        params = [seq.params for seq in sequences]
        counters = [seq.num_output_tokens for seq in sequences]
        self.best = best[:, None]
        self.temperature = column([p.temperature for p in params], torch.float32)
        self.top_p = column([p.top_p for p in params], torch.float64)
        self.min_p = column([p.min_p for p in params], torch.float32)
        self.uniform = torch.from_numpy(uniforms([s.seed for s in sequences], counters)).to(device)[:, None]

    def weights(self, logits: Tensor) -> Tensor:
        """Unnormalised probabilities; the most likely token has weight 1."""
        return torch.exp((logits - self.best) / self.temperature)

    def from_all(self, logits: Tensor) -> Tensor:
        """Any token, in vocabulary order: min_p needs no sort."""
        weights = self.weights(logits)
        weights.masked_fill_(weights < self.min_p, 0.0)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, self.uniform * cumulative[:, -1:], right=True)[:, 0]

    def from_top(self, logits: Tensor, width: int) -> Tensor:
        """One of the `width` most likely tokens, through the index map that top-k returns."""
        values, ids = logits.topk(width)
        weights = self.weights(values)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return self._from_sorted(weights, cumulative, cumulative[:, -1:], ids)

    def from_nucleus(self, logits: Tensor, width: int) -> Tensor:
        """top_p over the whole vocabulary, sorting only as far as the widest nucleus needs."""
        total = self.weights(logits).sum(-1, keepdim=True, dtype=torch.float64)
        values, ids = logits.topk(width)
        weights = self.weights(values)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        tokens = self._from_sorted(weights, cumulative, total, ids)
        too_narrow = (cumulative[:, -1:] < self.top_p * total)[:, 0]
        if width < logits.shape[1] and bool(too_narrow.any()):
            tokens = torch.where(too_narrow, self.from_nucleus(logits, logits.shape[1]), tokens)
        return tokens

    def _from_sorted(self, weights: Tensor, cumulative: Tensor, total: Tensor, ids: Tensor) -> Tensor:
        """Cut the most likely tokens to top_p of `total`, then to min_p, and draw among the rest."""
        mass_before = cumulative - weights
        keep = (mass_before < self.top_p * total) & (weights >= self.min_p)
        num_kept = keep.sum(-1, keepdim=True).clamp_(min=1)
        kept_mass = cumulative.gather(1, num_kept - 1)
        choice = torch.searchsorted(cumulative, self.uniform * kept_mass, right=True)
        return ids.gather(1, torch.minimum(choice, num_kept - 1))[:, 0]
