"""Edits of the logits that a sequence asks for: penalties, biases, allowed tokens, bad words, min_tokens."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.transfer import upload
from deepinfer.sampling.types import SampledSequence


def edit_logits(logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: Collection[int]) -> Tensor:
    """logits float32 [R, V] with the edits of each row's parameters: a copy, or `logits` itself if there are none.

    Order: repetition, frequency and presence penalties, logit_bias, allowed tokens, then bad words and min_tokens.
    """
    rows = [row for row, seq in enumerate(sequences) if seq.params.edits_logits]
    if not rows:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    penalised = [row for row in rows if sequences[row].params.has_penalties]
    if penalised:
        _apply_penalties(logits, penalised, sequences)
    biased: list[int] = []  # flat indices
    biases: list[float] = []
    banned: list[int] = []
    allowed: dict[int, Sequence[int]] = {}  # row -> its tokens
    for row in rows:
        params = sequences[row].params
        start = row * logits.shape[1]
        if params.logit_bias:
            biased += [start + token_id for token_id in params.logit_bias]
            biases += params.logit_bias.values()
        if params.allowed_token_ids is not None:
            allowed[row] = params.allowed_token_ids
        banned += [start + token_id for token_id in _ends_of_bad_words(sequences[row])]
        if sequences[row].num_output_tokens < params.min_tokens:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            banned += [start + token_id for token_id in stops]
    flat, device = logits.view(-1), logits.device
    if biased:
        flat.index_add_(0, upload(np.array(biased), device), upload(np.array(biases, np.float32), device))
    for row, token_ids in allowed.items():
        index = upload(np.array(token_ids), device)
        kept = logits[row, index]
        logits[row].fill_(-torch.inf)
        logits[row, index] = kept
    if banned:
        flat.index_fill_(0, upload(np.array(banned), device), -torch.inf)
    return logits


def _ends_of_bad_words(sequence: SampledSequence) -> list[int]:
    """Last tokens of the bad words whose other tokens the output ends with."""
    words = sequence.params.bad_words_token_ids
    if not words:
        return []
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    return [word[-1] for word in words if len(word) == 1 or tuple(output[1 - len(word) :]) == tuple(word[:-1])]


def _apply_penalties(logits: Tensor, rows: list[int], sequences: Sequence[SampledSequence]) -> None:
    """In place. Duplicated tokens need no counting: gathers write equal values, the frequency term accumulates."""
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    histories = [np.frombuffer(sequences[row].token_ids, np.int64) + row * vocab_size for row in rows]
    outputs = [h[sequences[row].num_prompt_tokens :] for row, h in zip(rows, histories, strict=True)]

    def gathered(parts: list[np.ndarray], field: str) -> tuple[Tensor, Tensor]:
        values = [getattr(sequences[row].params, field) for row in rows]
        per_token = np.repeat(np.array(values, np.float32), [len(part) for part in parts])
        return upload(np.concatenate(parts), logits.device), upload(per_token, logits.device)

    if any(sequences[row].params.repetition_penalty != 1 for row in rows):
        index, penalty = gathered(histories, "repetition_penalty")
        seen = flat[index]
        flat[index] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if any(sequences[row].params.frequency_penalty != 0 for row in rows):
        index, penalty = gathered(outputs, "frequency_penalty")
        flat.index_add_(0, index, -penalty)
    if any(sequences[row].params.presence_penalty != 0 for row in rows):
        index, penalty = gathered(outputs, "presence_penalty")
        flat[index] = flat[index] - penalty
