"""Log probabilities of the chosen tokens and of the most likely ones, from the model's own logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.outputs import TokenLogprob
from deepinfer.sampling.transfer import upload
from deepinfer.sampling.types import SampledSequence


@dataclass(slots=True)
class LogprobGroup:
    """Rows that want the same figures: `chosen` float32 [G], `top` float32 [G, n] and `top_ids` int64 [G, n]."""

    rows: list[int]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.chosen, self.top, self.top_ids]


def launch_logprobs(logits: Tensor, token_ids: Tensor, sequences: Sequence[SampledSequence]) -> list[LogprobGroup]:
    """The figures of the rows of logits float32 [R, V] that ask for them, on the device; token_ids int64 [R].

    With force_topk the softmax is over that many largest logits; a token outside gets -inf.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for row, seq in enumerate(sequences):
        if seq.params.logprobs is not None:
            groups.setdefault((seq.params.force_topk or 0, seq.params.logprobs), []).append(row)
    launched = []
    for (force_topk, num_top), rows in groups.items():
        if len(rows) < len(sequences):
            index = upload(np.array(rows), logits.device)
            launched.append(LogprobGroup(rows, *_group(logits[index], token_ids[index], force_topk, num_top)))
        else:
            launched.append(LogprobGroup(rows, *_group(logits, token_ids, force_topk, num_top)))
    return launched


def _group(logits: Tensor, chosen: Tensor, force_topk: int, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    vocab_size = logits.shape[1]
    chosen_logit = logits.gather(1, chosen[:, None])
    num_kept = min(force_topk, vocab_size) if force_topk else vocab_size
    if num_kept < vocab_size:
        top, ids = logits.topk(num_kept)
        normaliser = top.logsumexp(-1, keepdim=True)
        is_kept = (ids == chosen[:, None]).any(-1, keepdim=True)
        chosen_logit = chosen_logit.masked_fill(~is_kept, -torch.inf)
    else:
        top, ids = logits.topk(min(num_top, vocab_size))
        normaliser = logits.logsumexp(-1, keepdim=True)
    return (chosen_logit - normaliser)[:, 0], (top - normaliser)[:, :num_top], ids[:, :num_top]


def read_logprobs(group: LogprobGroup, token_ids: list[int], values: list[Tensor]) -> dict[int, TokenLogprob]:
    """Row -> entry, from `values`, the group's tensors on the host; token_ids of all rows."""
    chosen, top, top_ids = (value.tolist() for value in values)
    return {
        row: TokenLogprob(token_ids[row], logprob, list(zip(row_ids, row_logprobs, strict=True)))
        for row, logprob, row_logprobs, row_ids in zip(group.rows, chosen, top, top_ids, strict=True)
    }
