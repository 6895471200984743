"""Histograms that an engine counts among its totals, numbers by name, and that a server's metrics show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TotalsHistogram:
    """`bounds` ascend; values above the last one are counted, too. Its totals begin with `name`."""

    name: str
    bounds: tuple[float, ...]

    def observe(self, totals: dict[str, float], value: float) -> None:
        """Count one value into `totals`."""
        at = bisect_left(self.bounds, value)
        for total, more in ((self._bucket(at), 1), (f"{self.name}_sum", value)):
            totals[total] = totals.get(total, 0.0) + more

    def buckets(self, totals: Mapping[str, float]) -> list[float]:
        """Values at or below each bound and, last, all of them."""
        counts, count = [], 0.0
        for at in range(len(self.bounds) + 1):
            count += totals.get(self._bucket(at), 0.0)
            counts.append(count)
        return counts

    def sum(self, totals: Mapping[str, float]) -> float:
        """Of all values that were counted."""
        return totals.get(f"{self.name}_sum", 0.0)

    def _bucket(self, at: int) -> str:
        return f"{self.name}_up_to_{self.bounds[at]:g}" if at < len(self.bounds) else f"{self.name}_above"


STEP_TOKENS = TotalsHistogram("step_tokens", (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))  # vLLM's
