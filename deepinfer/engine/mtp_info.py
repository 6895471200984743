"""MTPInfoPool: what a round of drafts is to the sampler, rows that are used again in every round.

A step with drafts has 1 + K rows of logits for a sequence, and the sampler asks each row what it asks a sequence
(SampledSequence): its parameters, its tokens, its grammar. These answers differ from round to round in nothing but the
drafts, so each state slot keeps its rows, and they are made anew only when another sequence comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from deepinfer.engine.sequence import Sequence
from deepinfer.observability.memory import StaleReadError
from deepinfer.params import SamplingParams
from deepinfer.sampling.types import SampledSequence
from deepinfer.structured.matcher import Matcher


class MTPInfo:
    """One sequence's part of a round: the drafts that the step verifies and the rows, of its last token and of each."""

    __slots__ = ("sequence", "drafts", "length", "rows")

    def __init__(self, sequence: Sequence, num_drafts: int) -> None:
        self.sequence = sequence
        self.drafts: list[int] = []
        self.length = 0  # tokens of the sequence in this round
        self.rows: list[SampledSequence] = [DraftRow(self, position) for position in range(num_drafts + 1)]


class DraftRow:
    """A SampledSequence: the sequence with the first `position` drafts behind it.

    The host may know fewer drafts than the device has: its tokens then end with the last one known. Once the sequence
    has other tokens than in its round, they raise StaleReadError.
    """

    __slots__ = ("info", "position", "params", "seed", "num_prompt_tokens", "constraint", "drafts")

    def __init__(self, info: MTPInfo, position: int) -> None:
        self.info = info
        self.position = position
        self.params: SamplingParams = info.sequence.params
        self.seed: int = info.sequence.seed
        self.num_prompt_tokens: int = info.sequence.num_prompt_tokens
        self.constraint: Matcher | None = None  # of the first row, which fills the masks of the others, too
        self.drafts: SequenceOf[int] = ()  # of the first row

    @property
    def token_ids(self) -> array:
        """int64, prompt, output and the drafts in front of this row. Raises StaleReadError."""
        info = self.info
        if len(info.sequence.token_ids) != info.length:
            raise StaleReadError("a row of drafts was read after its round was over")
        if self.position == 0:
            return info.sequence.token_ids
        return info.sequence.token_ids + array("q", info.drafts[: self.position])

    @property
    def num_output_tokens(self) -> int:
        """What it would be if the drafts in front of this row were output."""
        return self.info.length - self.num_prompt_tokens + self.position


class MTPInfoPool:
    """The rows of every state slot.

    Args:
        num_slots: state slots, null slot included.
        num_drafts: K, most drafts of a sequence.
    """

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._infos: list[MTPInfo | None] = [None] * num_slots

    def rows(
        self, sequences: SequenceOf[Sequence], slots: SequenceOf[int], num_drafts: SequenceOf[int]
    ) -> list[SampledSequence]:
        """One entry a row of logits: each sequence, whose state slot this was, and then its drafts.

        They may be read until their sequences get tokens; a sequence without drafts stands for itself.
        """
        rows: list[SampledSequence] = []
        infos = self._infos
        for seq, slot, count in zip(sequences, slots, num_drafts, strict=True):
            if count == 0:
                rows.append(seq)
                continue
            info = infos[slot]
            if info is None or info.sequence is not seq:
                info = infos[slot] = MTPInfo(seq, self._num_drafts)
            info.drafts = drafts = seq.next_drafts[:count]
            info.length = len(seq.token_ids)
            first = info.rows[0]
            first.constraint = seq.constraint if seq.finish_reason is None else None
            first.drafts = drafts
            rows += info.rows[: count + 1]
        return rows
