"""A counter and a histogram that cost next to nothing a token; the library's own take locks at every call.

Used in the server's event loop only, where they are also collected.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class FastCounter(Collector):
    """`name` is without `_total`; `labels` are those of its only sample."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry):
        self._name, self._text, self._labels = name, text, dict(labels)
        self._value = 0.0
        registry.register(self)

    def inc(self, amount: float = 1.0) -> None:
        self._value += amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), self._value)
        yield family


class FastHistogram(Collector):
    """Counts of values up to each of `bounds` (rising) and beyond the last; `labels` as with FastCounter."""

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry, bounds: Sequence[float]
    ):
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        names = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)  # type: ignore[arg-type]
        yield family
