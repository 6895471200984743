"""How likely the tokens of a prompt were: asked of the rows of prefill steps, chunk by chunk, each token once.

Position p of a prompt predicts its token p + 1, which is known. So a prefill step also wants the logits of such rows,
of requests that ask (SamplingParams.prompt_logprobs), and their figures are computed behind the step. A sequence that
is preempted amid its prompt and computed again does not ask again.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.outputs import TokenLogprob
from deepinfer.sampling.logprobs import LogprobGroup, launch_prompt_logprobs, read_logprobs
from deepinfer.sampling.transfer import Download, upload


def logits_rows(batch: ScheduledBatch) -> np.ndarray:
    """Rows of a prefill step whose logits are wanted, int64 [R]: for prompt tokens, and where a token is drawn."""
    parts, begin = [], 0
    for seq, count, asked, is_drawn in _wanted(batch):
        parts.append(np.arange(asked.start, asked.stop) + (begin - seq.num_computed))
        begin += count
        if is_drawn:
            parts.append(np.array([begin - 1]))
    return np.concatenate(parts).astype(np.int64)


def _wanted(batch: ScheduledBatch) -> Iterator[tuple[Sequence, int, range, bool]]:
    """Sequences of a prefill step in the order of its rows of logits, and how many tokens of each are computed.

    With those of their positions that predict a prompt token which was not asked for yet, and whether a token is drawn
    behind the last.
    """
    for seq, count in zip(batch.sequences, batch.num_tokens, strict=True):
        start, end = max(seq.num_computed, seq.num_prompt_asked), seq.num_computed + count
        yield seq, count, range(start, max(start, min(end, seq.num_prompt_tokens - 1))), end == len(seq)


@dataclass(slots=True)
class LaunchedPromptLogprobs:
    """Figures of prompt tokens on their way. `read` waits for them and gives them to their sequences."""

    sequences: list[Sequence]
    counts: list[int]  # tokens of each
    token_ids: np.ndarray
    groups: list[LogprobGroup]
    download: Download

    def read(self) -> None:
        """Wait for the figures and append them to `Sequence.prompt_logprobs`."""
        entries: dict[int, TokenLogprob] = {}
        token_ids, values = self.token_ids.tolist(), iter(self.download.read())
        for group in self.groups:
            entries |= read_logprobs(group, token_ids, [next(values) for _ in group.tensors])
        row = 0
        for seq, count in zip(self.sequences, self.counts, strict=True):
            assert seq.prompt_logprobs is not None
            seq.prompt_logprobs += [entries[row + i] for i in range(count)]
            row += count


def split_logits(batch: ScheduledBatch, logits: Tensor) -> tuple[Tensor, LaunchedPromptLogprobs | None]:
    """Split logits float32 [R, V] of `logits_rows`: those to draw from, and the figures of prompt tokens, if any.

    Call it once for a launched prefill step, in front of `Scheduler.advance`.
    """
    if not any(seq.asks_prompt_logprobs for seq in batch.sequences):
        return logits, None
    sequences: list[Sequence] = []
    counts, asked_rows, drawn_rows, targets = [], list[int](), [], list[int]()
    row = 0
    for seq, _, asked, is_drawn in _wanted(batch):
        if asked:
            sequences.append(seq)
            counts.append(len(asked))
            asked_rows += range(row, row + len(asked))
            targets += seq.token_ids[asked.start + 1 : asked.stop + 1]
            seq.num_prompt_asked = asked.stop
            row += len(asked)
        if is_drawn:
            drawn_rows.append(row)
            row += 1
    if not asked_rows:
        return logits, None
    params = [seq.params for seq, count in zip(sequences, counts, strict=True) for _ in range(count)]
    token_ids = np.array(targets, np.int64)
    groups = launch_prompt_logprobs(_select(logits, asked_rows), token_ids, params)
    download = Download([tensor for group in groups for tensor in group.tensors])
    return _select(logits, drawn_rows), LaunchedPromptLogprobs(sequences, counts, token_ids, groups, download)


def _select(logits: Tensor, rows: SequenceOf[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[upload(np.array(rows, np.int64), logits.device)]
