"""Log probabilities of tokens and of their alternatives, from the model's own logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.outputs import TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.sampling.transfer import upload
from deepinfer.sampling.types import SampledSequence


@dataclass(slots=True)
class LogprobGroup:
    """Rows that want the same figures.

    `chosen` float32 [G], `top` float32 [G, n] and `top_ids` int64 [G, n]; `ranks` int64 [G] of prompt tokens.
    """

    rows: list[int]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor
    ranks: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What has to be downloaded for `read_logprobs`."""
        return [self.chosen, self.top, self.top_ids, *([] if self.ranks is None else [self.ranks])]


def launch_logprobs(logits: Tensor, token_ids: Tensor, sequences: Sequence[SampledSequence]) -> list[LogprobGroup]:
    """The figures of the rows of logits float32 [R, V] that ask for them, on the device; token_ids int64 [R].

    With force_topk the softmax is over that many largest logits; a token outside gets -inf.
    """
    groups: dict[tuple[int, int, int], list[int]] = {}
    for row, seq in enumerate(sequences):
        params = seq.params
        if params.logprob_token_ids is not None:
            groups.setdefault((params.force_topk or 0, 0, len(params.logprob_token_ids)), []).append(row)
        elif params.logprobs is not None:
            groups.setdefault((params.force_topk or 0, params.logprobs, 0), []).append(row)
    launched = []
    for (force_topk, num_top, num_named), rows in groups.items():
        group_logits, chosen = _rows(logits, token_ids, rows)
        named = None
        if num_named:
            named = upload(np.array([sequences[row].params.logprob_token_ids for row in rows]), logits.device)
        launched.append(LogprobGroup(rows, *_group(group_logits, chosen, force_topk, num_top, named)))
    return launched


def launch_prompt_logprobs(
    logits: Tensor, token_ids: np.ndarray, params: Sequence[SamplingParams]
) -> list[LogprobGroup]:
    """The figures of prompt tokens int64 [R], each under its row of logits float32 [R, V] and its request's params."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, each in enumerate(params):
        groups.setdefault((each.force_topk or 0, each.prompt_logprobs or 0), []).append(row)
    targets = upload(token_ids, logits.device)
    launched = []
    for (force_topk, num_top), rows in groups.items():
        group_logits, chosen = _rows(logits, targets, rows)
        ranks = (group_logits > group_logits.gather(1, chosen[:, None])).sum(1) + 1
        launched.append(LogprobGroup(rows, *_group(group_logits, chosen, force_topk, num_top, None), ranks))
    return launched


def _rows(logits: Tensor, token_ids: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    if len(rows) == len(logits):
        return logits, token_ids
    index = upload(np.array(rows), logits.device)
    return logits[index], token_ids[index]


def _group(
    logits: Tensor, chosen: Tensor, force_topk: int, num_top: int, named: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens `chosen` int64 [G], and of the most likely ones or of those `named` int64 [G, n]."""
    vocab_size = logits.shape[1]
    num_kept = min(force_topk, vocab_size) if force_topk else vocab_size
    if num_kept < vocab_size:
        top, ids = logits.topk(num_kept)
        normaliser = top.logsumexp(-1, keepdim=True)
        kept = torch.full_like(logits, -torch.inf).scatter_(1, ids, top)
    else:
        top, ids = logits.topk(min(num_top, vocab_size))
        normaliser, kept = logits.logsumexp(-1, keepdim=True), logits
    if named is not None:
        top, ids = kept.gather(1, named), named
    else:
        top, ids = top[:, :num_top], ids[:, :num_top]
    return (kept.gather(1, chosen[:, None]) - normaliser)[:, 0], top - normaliser, ids


def read_logprobs(group: LogprobGroup, token_ids: Sequence[int], values: list[Tensor]) -> dict[int, TokenLogprob]:
    """Row -> entry, from `values`, the group's tensors on the host; token_ids of all rows."""
    chosen, top, top_ids, *ranks = (value.tolist() for value in values)
    entries = {
        row: TokenLogprob(token_ids[row], logprob, list(zip(row_ids, row_logprobs, strict=True)))
        for row, logprob, row_logprobs, row_ids in zip(group.rows, chosen, top, top_ids, strict=True)
    }
    for row, rank in zip(group.rows, ranks[0] if ranks else (), strict=False):
        entries[row].rank = rank
    return entries
