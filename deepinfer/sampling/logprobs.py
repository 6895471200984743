"""Log probabilities of the chosen tokens and of the most likely ones, from the model's own logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.outputs import TokenLogprob
from deepinfer.sampling.types import SampledSequence


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], sequences: Sequence[SampledSequence]
) -> list[TokenLogprob | None]:
    """One entry a row of logits float32 [R, V]; None where the request did not ask.

    With force_topk the softmax is over that many largest logits; a token outside gets -inf.
    """
    result: list[TokenLogprob | None] = [None] * len(sequences)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, seq in enumerate(sequences):
        if seq.params.logprobs is not None:
            groups.setdefault((seq.params.force_topk or 0, seq.params.logprobs), []).append(row)
    for (force_topk, num_top), rows in groups.items():
        chosen = torch.tensor([token_ids[row] for row in rows], device=logits.device)
        for row, entry in zip(rows, _group_logprobs(logits[rows], chosen, force_topk, num_top), strict=True):
            result[row] = entry
    return result


def _group_logprobs(logits: Tensor, chosen: Tensor, force_topk: int, num_top: int) -> list[TokenLogprob]:
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
    logprobs = (chosen_logit - normaliser)[:, 0].tolist()
    top_logprobs, top_ids = (top - normaliser)[:, :num_top].tolist(), ids[:, :num_top].tolist()
    return [
        TokenLogprob(token_id, logprob, list(zip(row_ids, row_logprobs, strict=True)))
        for token_id, logprob, row_ids, row_logprobs in zip(
            chosen.tolist(), logprobs, top_ids, top_logprobs, strict=True
        )
    ]
