"""StatsLogger: what the engine does per second, over a sliding window; one log line every few seconds.

Everything is taken from numbers that the CPU has anyway: no figure costs a wait for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.observability.expert_record import ExpertRecord
from deepinfer.observability.histograms import STEP_TOKENS

logger = logging.getLogger("deepinfer.stats")

BUCKETS = 20


def accepted_at(position: int) -> str:
    """Name of the total that counts accepted drafts that were the `position`-th of their round, from 0."""
    return f"accepted_at_{position}"


class SlidingSum:
    """Sum and number of the values of the last `window` seconds, in BUCKETS buckets: memory never grows.

    One thread adds; any thread reads.
    """

    def __init__(self, window: float) -> None:
        self._width = window / BUCKETS
        self._numbers = [-1] * BUCKETS  # which bucket since time 0 an entry belongs to
        self._sums = [0.0] * BUCKETS
        self._counts = [0] * BUCKETS

    def add(self, value: float, now: float) -> None:
        """`now`: seconds, never less than before."""
        number = int(now / self._width)
        index = number % BUCKETS
        if self._numbers[index] != number:
            self._numbers[index], self._sums[index], self._counts[index] = number, 0.0, 0
        self._sums[index] += value
        self._counts[index] += 1

    def sum(self, now: float) -> float:
        """Of the values of the window that ends now, seconds."""
        oldest = int(now / self._width) - BUCKETS
        return sum(value for value, number in zip(self._sums, self._numbers, strict=True) if number > oldest)

    def count(self, now: float) -> int:
        """Values of the window that ends now."""
        oldest = int(now / self._width) - BUCKETS
        return sum(count for count, number in zip(self._counts, self._numbers, strict=True) if number > oldest)


@dataclass(slots=True)
class StepStats:
    """What one step did, and the engine's state after it. None: this engine does not have the feature."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_running: int
    num_waiting: int
    cache_usage: float  # share of the blocks in use, 0 to 1
    num_preemptions: int  # since the start
    flops: float | None = None
    prefix_queries: int | None = None  # prompt tokens looked up in the prefix cache in this step
    prefix_hits: int | None = None  # of them found
    drafts: int | None = None  # speculation rounds in this step
    accepted_tokens: int | None = None  # draft tokens accepted in them
    draft_tokens: int | None = None  # draft tokens verified in them
    accepted_at: Sequence[int] = ()  # accepted tokens by their position in the round
    expert_counts: np.ndarray | None = None  # int [layers, experts], tokens of each expert in this step


@dataclass(frozen=True)
class WindowStats:
    """Rates and means over the window that ends now. None: no such feature, or nothing happened."""

    prompt_throughput: float  # tokens/s
    generation_throughput: float  # tokens/s
    num_running: int
    num_waiting: int
    cache_usage: float
    num_preemptions: int  # in the window
    steps_per_second: float
    prefix_hit_rate: float | None
    accepted_length: float | None  # tokens a round, the one that the target model adds included
    moe_balance: float | None  # tokens of the busiest expert over the mean, averaged over layers; 1 is perfect
    mfu: float | None  # FLOPs done over what the device could do
    acceptance_rate: float | None = None  # of the draft tokens verified, 0 to 1
    acceptance_rates: tuple[
        float, ...
    ] = ()  # of the rounds, those in which the first draft was accepted, the second, ...


class StatsLogger:
    """Call `record` after every step; it logs `line` at most every `interval` seconds of work.

    Args:
        interval: seconds between log lines; 0 logs nothing.
        window: seconds that rates are averaged over.
        peak_flops: FLOP/s of the device, for MFU; called once, when first needed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        interval: float = 10.0,
        window: float = 10.0,
        peak_flops: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = interval
        self.totals: dict[str, float] = {}  # since the start, by the name of the sum
        self.latest = StepStats(0, 0, 0, 0, 0.0, 0)
        self.experts = ExpertRecord()
        self._window = window
        self._clock = clock
        self._started = self._last_line = self._last_step = clock()
        self._find_peak = peak_flops
        self._peak: float | None = None
        self._sums: dict[str, SlidingSum] = {}
        self._positions = 0  # drafts of a round

    def record(self, step: StepStats) -> bool:
        """Take in one step; True if a line was logged."""
        now = self._clock()
        was_idle = not self.latest.num_running and not self.latest.num_waiting
        if was_idle and now - self._last_step >= self.interval:  # a line would speak of this one step
            self._last_line = now
        self._last_step = now
        self._add("prompt", step.num_prompt_tokens, now)
        self._add("output", step.num_output_tokens, now)
        if step.num_preemptions != self.latest.num_preemptions:
            self._add("preemptions", step.num_preemptions - self.latest.num_preemptions, now)
        if step.flops is not None:
            self._add("flops", step.flops, now)
        if step.prefix_queries is not None and step.prefix_hits is not None:
            self._add("prefix_queries", step.prefix_queries, now)
            self._add("prefix_hits", step.prefix_hits, now)
        if step.drafts is not None and step.accepted_tokens is not None:
            self._add("drafts", step.drafts, now)
            self._add("accepted", step.accepted_tokens, now)
            self._add("draft_tokens", step.draft_tokens or 0, now)
            for position, number in enumerate(step.accepted_at):
                self._add(accepted_at(position), number, now)
            self._positions = max(self._positions, len(step.accepted_at))
        if step.expert_counts is not None:
            self._add("moe_balance", moe_balance(step.expert_counts), now)
            self.experts.add(step.expert_counts)
        STEP_TOKENS.observe(self.totals, step.num_prompt_tokens + step.num_output_tokens)
        self.latest = step
        if self.interval and now - self._last_line >= self.interval:
            self._last_line = now
            logger.info("%s", line(self.window()))
            return True
        return False

    def window(self) -> WindowStats:
        """Figures of the window that ends now; any thread may ask."""
        now = self._clock()
        seconds = max(min(self._window, now - self._started), 1e-9)
        steps = self._sums["output"].count(now) if "output" in self._sums else 0
        drafts = self._sum("drafts", now)
        accepted = _ratio(self._sum("accepted", now), drafts)
        balance = self._sums.get("moe_balance")
        possible = (self.peak_flops() or 0.0) * seconds if "flops" in self._sums else None
        return WindowStats(
            prompt_throughput=(self._sum("prompt", now) or 0.0) / seconds,
            generation_throughput=(self._sum("output", now) or 0.0) / seconds,
            num_running=self.latest.num_running,
            num_waiting=self.latest.num_waiting,
            cache_usage=self.latest.cache_usage,
            num_preemptions=round(self._sum("preemptions", now) or 0),
            steps_per_second=steps / seconds,
            prefix_hit_rate=_ratio(self._sum("prefix_hits", now), self._sum("prefix_queries", now)),
            accepted_length=None if accepted is None else 1 + accepted,
            moe_balance=_ratio(balance.sum(now), balance.count(now)) if balance else None,
            mfu=_ratio(self._sum("flops", now), possible),
            acceptance_rate=_ratio(self._sum("accepted", now), self._sum("draft_tokens", now)),
            acceptance_rates=tuple(
                (self._sum(accepted_at(position), now) or 0.0) / drafts for position in range(self._positions)
            )
            if drafts
            else (),
        )

    def peak_flops(self) -> float | None:
        """Of the device, operations a second, measured when it is first asked for; None: unknown."""
        if self._peak is None:
            self._peak = self._find_peak()
            self._find_peak = lambda: None
        return self._peak

    def _add(self, name: str, value: float, now: float) -> None:
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = SlidingSum(self._window)
        total.add(value, now)
        self.totals[name] = self.totals.get(name, 0.0) + value

    def _sum(self, name: str, now: float) -> float | None:
        return self._sums[name].sum(now) if name in self._sums else None


def moe_balance(counts: np.ndarray) -> float:
    """Tokens of the busiest expert over the mean, averaged over layers that ran. counts [layers, experts]."""
    means = counts.mean(axis=1)
    ran = means > 0
    return float((counts.max(axis=1)[ran] / means[ran]).mean()) if ran.any() else 1.0


def line(stats: WindowStats) -> str:
    """The log line: what every engine has, then the figures that this one has."""
    parts = [
        f"prompt {stats.prompt_throughput:.1f} tok/s",
        f"generation {stats.generation_throughput:.1f} tok/s",
        f"running {stats.num_running}",
        f"waiting {stats.num_waiting}",
        f"KV cache {stats.cache_usage:.1%}",
        f"preemptions {stats.num_preemptions}",
    ]
    if stats.prefix_hit_rate is not None:
        parts.append(f"prefix hits {stats.prefix_hit_rate:.1%}")
    if stats.accepted_length is not None:
        parts.append(f"accepted length {stats.accepted_length:.2f}")
    if stats.acceptance_rates:
        parts.append("accepted by position " + " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates))
    if stats.moe_balance is not None:
        parts.append(f"MoE balance {stats.moe_balance:.2f}")
    if stats.mfu is not None:
        parts.append(f"MFU {stats.mfu:.1%}")
    return ", ".join(parts)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
