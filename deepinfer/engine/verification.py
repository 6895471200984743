"""Verification: what a step with drafts asks the sampler, and what the engine learns from it (spec: model, section 8).

A sequence has a row for its last token and one for each draft after it. The target's own token is drawn at every row,
with the seed, the counter and the edits that it would have if the drafts before it were output; it is the output as far
as the drafts agree. So the tokens are those of decoding one by one, at every temperature. A drafter that draws its
drafts has them accepted by rejection sampling instead (kernels/reference/rejection.py): a row's token is then its draft
or drawn from what is left, which cannot be the draft, and the same comparison tells how far they are accepted.

Everything is launched before the host knows the tokens: how far a sequence has come, its latest token and its next
drafts stay on the device (speculation/slot_tokens.py). The host plans with the longest that each sequence may be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.mtp_info import MTPInfoPool
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence as TokenSequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.step import LaunchedStep, PlainSampling, StepTokens
from deepinfer.kernels import ops
from deepinfer.kernels.reference.speculation import NO_DRAFT
from deepinfer.models.inputs import ModelInputs
from deepinfer.params import SamplingParams
from deepinfer.sampling.sampler import (
    Choose,
    DrawParameters,
    LaunchedSample,
    draw_parameters,
    is_plain,
    launch_sample,
)
from deepinfer.sampling.transfer import Download, upload
from deepinfer.speculation.draft_lengths import draft_lengths
from deepinfer.speculation.drafter import Drafter, Round
from deepinfer.speculation.gate import DraftGate
from deepinfer.speculation.slot_scores import SlotScores
from deepinfer.speculation.slot_tokens import SlotTokens
from deepinfer.speculation.step_times import StepTimes

OLD_CHANCES = 0.6  # what the chances of the drafts before count for, beside those of all: best for nano's head


@dataclass(slots=True)
class LaunchedRound:
    """A step whose tokens are being drawn and compared with its drafts."""

    sequences: list[TokenSequence]
    slots: np.ndarray  # int64 [S]
    num_drafts: np.ndarray  # int64 [S]
    first_rows: np.ndarray
    sampled: LaunchedSample
    verified: Download | None  # accepted [S], then the next drafts [S, K] and their scores; None: no sequences
    was_read: Callable[[LaunchedRound], None]  # told what became of the drafts
    had_drafts: bool = False  # some of which it could verify
    makes_drafts: bool = False  # for the next step
    num_expected: float = 0.0  # drafts that are accepted, by what the drafter said
    accepted: np.ndarray | None = None  # int64 [S] of each sequence's drafts, once it is read
    num_verified: np.ndarray | None = None  # int64 [S], without those that there were not
    scores: np.ndarray | None = None  # of the next drafts; None: there are none

    def read(self) -> StepTokens:
        """Wait for the tokens. The drafts behind them go to the sequences."""
        sampled = self.sampled.read()
        if self.verified is None:
            return StepTokens([], [], {})
        accepted, *drafts = self.verified.read()
        self.accepted = accepted.numpy()
        self.num_verified = np.minimum(self.num_drafts, [len(seq.next_drafts) for seq in self.sequences])
        firsts = self.first_rows.tolist()
        ends = (self.first_rows + self.accepted + 1).tolist()
        token_ids = [sampled.token_ids[first:end] for first, end in zip(firsts, ends, strict=True)]
        logprobs: list = [None] * len(firsts)
        if self.sampled.groups:
            rows = (sampled.logprobs[first:end] for first, end in zip(firsts, ends, strict=True))
            logprobs = [None if of_row[0] is None else of_row for of_row in rows]
        result = StepTokens(token_ids, logprobs, {}, self.num_verified.tolist())
        for row in reversed(sampled.invalid_rows):  # the first of a sequence counts
            i = int(np.searchsorted(self.first_rows, row, "right")) - 1
            if row < ends[i]:
                result.num_valid[i] = row - firsts[i]
        next_drafts: list[list[int]] = [[] for _ in firsts]
        if drafts:
            tokens, scores = drafts
            self.scores = scores.numpy()
            next_drafts = tokens.tolist()
            if int(tokens.min()) == NO_DRAFT:
                next_drafts = [[token for token in row if token != NO_DRAFT] for row in next_drafts]
        for seq, row_drafts in zip(self.sequences, next_drafts, strict=True):
            seq.next_drafts = row_drafts
        self.was_read(self)
        return result


@dataclass(slots=True)
class PlainRound:
    """A decode step while there are no drafts and none are made: it costs what it costs without speculation."""

    sampling: PlainSampling

    def read(self) -> StepTokens:
        """Wait for the tokens."""
        return self.sampling.read()


class Speculation:
    """What an engine with drafts does beside the others.

    Args:
        drafter: makes the drafts.
        state: on the device; where decode steps take their tokens and positions from.
        step_ms: [more than max_num_seqs * (1 + K)] milliseconds of a decode step by its rows; None: every draft is
            verified that has a chance.
        draft_ms: [slots] milliseconds of making drafts, by sequences; None: nothing.
        variable_length: False: all drafts are verified.
        overlaps: the next step is planned before the drafts that it verifies are read.
    """

    def __init__(
        self,
        drafter: Drafter,
        state: SlotTokens,
        step_ms: np.ndarray | None = None,
        draft_ms: np.ndarray | None = None,
        variable_length: bool = True,
        overlaps: bool = False,
    ) -> None:
        num_slots = len(state.lengths)
        self.drafter = drafter
        self.state = state
        self.variable_length = variable_length
        self.overlaps = overlaps
        self._draws = drafter.probabilities is not None
        if step_ms is None:
            step_ms = np.ones(num_slots * (1 + drafter.num_drafts) + 1)
        self.times = StepTimes(step_ms, np.zeros(num_slots) if draft_ms is None else draft_ms, drafter.num_drafts)
        self._rows = MTPInfoPool(num_slots, drafter.num_drafts)
        self.gate = DraftGate(self.times, drafter.num_drafts)
        self._had_drafts = False  # the next step: whether there are any that it could verify
        self._makes_drafts = True  # it, for the one behind it
        self._num_expected = 0.0  # its drafts that are expected to be accepted
        self._scores = SlotScores(num_slots)
        self._new_scores: np.ndarray | None = None  # of drafts that the gate has not seen
        self._in_slot: list[TokenSequence | None] = [None] * num_slots  # whose tokens the device has
        self._is_plain = np.zeros(num_slots, bool)  # so is that sequence

    def draft_lengths(self, sequences: list[TokenSequence]) -> list[int]:
        """How many drafts of each sequence the next step verifies; never more than it could still output."""
        if self.variable_length:
            self._makes_drafts = self.gate.makes_drafts(len(sequences))
            self.drafter.expect(self._makes_drafts)
            if self._new_scores is not None:  # after it was asked: it must not depend on the drafts to verify
                self.gate.saw(self.drafter.survival(self._new_scores), len(sequences))
                self._new_scores = None
        self._num_expected = 0.0
        self._had_drafts = any(seq.has_drafts for seq in sequences)
        if not self._had_drafts:
            return [0] * len(sequences)
        most = self.drafter.num_drafts
        room = [
            min(max(seq.max_num_tokens - seq.num_tokens - 1, 0), most) if seq.has_drafts else 0 for seq in sequences
        ]
        if not self.variable_length or not any(room):
            return room
        if self.gate.takes_all:
            of_number = [0.0, *np.cumsum(self.gate.profile).tolist()]
            self._num_expected = sum(map(of_number.__getitem__, room))
            return room
        survival = self._survival(np.array([seq.state_slot for seq in sequences], np.int64))
        step_ms = self.times.by_drafts(len(sequences), self._makes_drafts)
        lengths = draft_lengths(self.gate.chances(survival), np.array(room), step_ms, self._draws)
        self._num_expected = float(survival.sum(where=np.arange(self.drafter.num_drafts) < lengths[:, None]))
        return lengths.tolist()

    def _survival(self, slots: np.ndarray) -> np.ndarray:
        """Chances [S, K] that the drafts in these slots and all before them are accepted, as far as they are known."""
        unknown = self.gate.profile
        scores, known = self._scores.of(slots)
        if scores is None:
            return np.tile(unknown, (len(slots), 1))
        survival = self.drafter.survival(scores)
        if not known.all():
            survival[~known] = unknown
        if np.isnan(survival.sum()):
            survival = np.nan_to_num(survival)  # what is no number is no chance
        if self.overlaps:  # those are the chances of the drafts before
            survival *= OLD_CHANCES
            survival += (1 - OLD_CHANCES) * unknown
        return survival

    def observe(self, step: LaunchedStep, ms: float | None) -> None:
        """A decode step has been read, so long after it began or the one in front was read (None: unknown)."""
        round = step.sampled
        if isinstance(round, PlainRound) and ms is not None:
            count = len(step.sequences)
            self.gate.observe(count, 0, count, False, False, ms)
        elif self.variable_length and isinstance(round, LaunchedRound) and round.accepted is not None:
            count, num_accepted = len(step.sequences), int(round.accepted.sum())
            if step.batch.has_drafts:
                self.gate.learn(round.num_expected, num_accepted)
            if ms is not None:
                num_drafts = sum(step.batch.num_tokens) - count
                self.gate.observe(count, num_drafts, count + num_accepted, round.had_drafts, round.makes_drafts, ms)
            if round.scores is not None and self.gate.wants_chances:
                self._new_scores = round.scores

    def _was_read(self, round: LaunchedRound) -> None:
        """Keep the scores of the next drafts, and tell the drafter what became of those before, where it matters."""
        if not self.drafter.learns and (self.gate.takes_all or not self.variable_length):
            return
        assert round.accepted is not None and round.num_verified is not None
        slots, scores = round.slots, round.scores
        held = np.array([seq.state_slot for seq in round.sequences], np.int64) == slots  # by those that were in it
        if not held.all():
            slots, scores = slots[held], None if scores is None else scores[held]
        if self.drafter.learns:
            old, known = self._scores.of(slots)
            num_verified, num_accepted = round.num_verified[held], round.accepted[held]
            judged = known & (num_verified > 0)
            if old is not None:
                self.drafter.learn(old[judged], num_verified[judged], num_accepted[judged])
        self._scores.set(slots, scores)

    def before_decode(self, batch: ScheduledBatch) -> None:
        """Give the device the tokens of sequences that come from elsewhere: the host, or another engine."""
        for seq in batch.sequences:
            if self._in_slot[seq.state_slot] is not seq:
                slot = seq.state_slot
                self._take_slot(seq)
                self.state.tokens[slot] = NO_DRAFT
                self.state.tokens[slot, 0] = seq.token_ids[-1]
                self.state.lengths[slot] = len(seq)
                self.drafter.resumed(slot, seq.token_ids)

    def prefilled(self, batch: ScheduledBatch, inputs: ModelInputs) -> None:
        """A prefill step has been launched."""
        for seq in batch.sequences:
            if self._in_slot[seq.state_slot] is not seq:
                self._take_slot(seq)
                if seq.num_computed:  # it was swapped out amid its prompt, and has come back elsewhere
                    self.drafter.resumed(seq.state_slot, seq.token_ids)
        self.drafter.prefilled(inputs)

    def _take_slot(self, seq: TokenSequence) -> None:
        self._in_slot[seq.state_slot] = seq
        self._is_plain[seq.state_slot] = is_plain(seq)
        self._scores.forget(seq.state_slot)

    def launch(
        self, step: LaunchedStep, metadata: SequenceMetadataPool, eos_token_ids: Collection[int]
    ) -> LaunchedRound | PlainRound:
        """Start drawing the tokens of a step, comparing them with the drafts, and making the next drafts."""
        sequences, is_prefill = step.sequences, step.batch.is_prefill
        if not (is_prefill or self._had_drafts or self._makes_drafts):
            return self._launch_plain(step, metadata, eos_token_ids)
        num_drafts = [0] * len(sequences) if is_prefill else [n - 1 for n in step.batch.num_tokens]
        counts = np.array(num_drafts, np.int64)
        first_rows = np.cumsum(counts + 1) - counts - 1
        choose = None
        if self._draws and counts.any():
            choose = self._rejection(step.slots, counts, any(_has_filters(seq.params) for seq in sequences))
        known = np.array([len(seq) for seq in sequences], np.int64)
        outputs = known - np.array([seq.num_prompt_tokens for seq in sequences], np.int64)
        column = np.arange(int((counts + 1).sum())) - np.repeat(first_rows, counts + 1)
        are_plain = bool(self._is_plain[step.slots].all())
        rows = sequences if are_plain else self._rows.rows(sequences, step.slots.tolist(), num_drafts)
        parameters = metadata.parameters(
            np.repeat(step.slots, counts + 1), np.repeat(outputs, counts + 1) + column, () if are_plain else rows
        )
        sampled = launch_sample(step.logits, rows, eos_token_ids, choose, parameters, step.bitmask, are_plain)
        if not sequences:
            return LaunchedRound(sequences, step.slots, counts, first_rows, sampled, None, self._was_read)
        state, device = self.state, step.logits.device
        slots, firsts, per_sequence, lengths = upload(np.stack((step.slots, first_rows, counts, known)), device)
        if is_prefill:
            state.lengths[slots] = lengths
        tokens, accepted = ops.verify_tokens(
            sampled.token_ids, state.tokens, state.lengths, slots, firsts, per_sequence
        )
        # A sequence that has failed or ended may have come further on the device than what the host kept of it: by all
        # that the step before could bring, drafts and one.
        longest = int((known + counts).max()) + 2 + self.drafter.num_drafts
        drawing = None
        if self._draws and self._makes_drafts:
            drawing, _ = draw_parameters(metadata.parameters(step.slots, outputs), step.logits.shape[1], device)
        round = Round(slots, tokens, accepted, longest, drawing)
        self.drafter.chosen(state, round)
        results: list[Tensor] = [accepted]
        for seq in sequences:
            seq.has_drafts = self._makes_drafts
        if self._makes_drafts:
            drafts = self.drafter.draft(state, round)
            state.tokens[slots, 1:] = drafts.tokens
            results += [drafts.tokens, drafts.scores]
        return LaunchedRound(
            sequences,
            step.slots,
            counts,
            first_rows,
            sampled,
            Download(results),
            self._was_read,
            self._had_drafts,
            self._makes_drafts,
            0.0 if is_prefill else self._num_expected,
        )

    def _launch_plain(
        self, step: LaunchedStep, metadata: SequenceMetadataPool, eos_token_ids: Collection[int]
    ) -> PlainRound:
        sampling = PlainSampling.launch(step, metadata, eos_token_ids, self.state)
        tokens = sampling.sampled.token_ids
        slots = upload(step.slots, tokens.device)
        self.state.lengths.scatter_add_(0, slots, torch.ones_like(slots))
        longest = max([len(seq) for seq in step.sequences]) + 2 + self.drafter.num_drafts
        self.drafter.chosen(self.state, Round(slots, tokens.unsqueeze(1), torch.zeros_like(slots), longest, None))
        return PlainRound(sampling)

    def _rejection(self, slots: np.ndarray, counts: np.ndarray, filters: bool) -> Choose:
        """Takes a draft or what is left without it; a sequence's last row, which has no draft behind it, as drawn."""
        probabilities = self.drafter.probabilities
        assert probabilities is not None
        owner = np.repeat(np.arange(len(counts)), counts + 1)
        column = np.arange(len(owner)) - (np.cumsum(counts + 1) - counts - 1)[owner]
        has_draft = column < counts[owner]
        packed = np.stack((slots[owner], np.where(has_draft, column, 0), has_draft.astype(np.int64)))

        def choose(logits: Tensor, drawing: DrawParameters, tokens: Tensor) -> Tensor:
            row_slots, columns, is_draft = upload(packed, logits.device)
            target = ops.token_probabilities(
                logits, drawing.temperature, drawing.num_candidates, drawing.top_p, drawing.min_p, filters
            )
            drafts = self.state.tokens[row_slots, 1 + columns].clamp_min(0)
            draft = probabilities[row_slots, columns]
            chosen = ops.accept_or_resample(target, draft, drafts, drawing.seeds, drawing.counters)
            return torch.where(is_draft > 0, chosen, tokens)

        return choose


def _has_filters(params: SamplingParams) -> bool:
    return params.top_p < 1 or bool(params.top_k) or params.force_topk is not None
