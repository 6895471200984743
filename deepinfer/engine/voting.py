"""Data-parallel engines in lockstep: a vote decides whether the whole group prefills or decodes next.

With experts spread over a group, every rank must run every step, with an empty batch if it has nothing to do, and all
must run the same kind. Asking each other costs time, so they only do it at points that they reach together (system
spec, "Rules"; the intervals are DeepInfer's):

- an ALL point every 70 decode steps: prefill if every rank has prefill work, so that none runs an empty step;
- an ANY point every 100: prefill if some rank has, so that an isolated one never waits longer.

The group stays at a point for as many prefill steps as the vote grants, up to MAX_PREFILLS_AT_A_POINT: an endless
stream of short prompts may not hold up those that decode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

MAX_PREFILLS_AT_A_POINT = 32
Batch = TypeVar("Batch")


class Group(Protocol):
    """The ranks that run their steps together."""

    def allreduce_min(self, value: int) -> int:
        """The smallest value that any rank passed; returns once all have called it."""
        ...


class StepKind(Enum):
    """What a data-parallel group does in its next step."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"  # no rank has anything to do


@dataclass
class Lockstep:
    """One rank's view of its group. All ranks must be made with the same intervals, in decode steps."""

    group: Group
    all_interval: int = 70
    any_interval: int = 100
    decode_step: int = 0
    prefills_here: int = 0  # since the latest decode step

    def next_step(
        self,
        wants_prefill: Callable[[], bool],
        prefill: Callable[[], Batch | None],
        decode: Callable[[], Batch | None],
    ) -> tuple[StepKind, Batch | None]:
        """What the group does next, the same on every rank, and this rank's part in it (None: an empty batch).

        Args:
            wants_prefill: whether there are prompts to work on and cache below the watermark. A guess: `prefill` may
                still come up empty.
            prefill: schedules a prefill step.
            decode: schedules a decode step.
        """
        is_any_point = self.decode_step > 0 and self.decode_step % self.any_interval == 0
        is_point = is_any_point or self.decode_step % self.all_interval == 0
        if is_point and self.prefills_here < MAX_PREFILLS_AT_A_POINT:
            vote = self._any if is_any_point else self._all
            if vote(wants_prefill()):
                batch = prefill()
                # The second vote: if every rank came up empty, prefilling again would fail again, for ever.
                if self._any(batch is not None):
                    self.prefills_here += 1
                    return StepKind.PREFILL, batch
        batch = decode()
        if not is_point or self._any(batch is not None):
            self.decode_step += 1
            self.prefills_here = 0
            return StepKind.DECODE, batch
        # Nobody decodes, so a prefill holds up nobody: one rank's wish is enough, whatever the point.
        if self._any(wants_prefill()):
            batch = prefill()
            if self._any(batch is not None):
                return StepKind.PREFILL, batch
        return StepKind.IDLE, None

    def _any(self, yes: bool) -> bool:
        return self.group.allreduce_min(0 if yes else 1) == 0

    def _all(self, yes: bool) -> bool:
        return self.group.allreduce_min(1 if yes else 0) == 1
