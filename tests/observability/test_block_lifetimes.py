"""Lifetimes of cache blocks against a log of everything that happened to them."""

from __future__ import annotations

import math
import random
from array import array
from itertools import pairwise

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.block_manager import BlockManager
from deepinfer.engine.engine import Engine
from deepinfer.observability.block_lifetimes import EVERY, IDLE, LIFETIME, REUSE_GAP, BlockLifetimes
from deepinfer.observability.histograms import TotalsHistogram
from deepinfer.params import SamplingParams
from tests.engine.toy_model import ToyRunner


def counted(histogram: TotalsHistogram, values: list[float]) -> tuple[list[int], float]:
    bounds = (*histogram.bounds, math.inf)
    return [sum(value <= bound for value in values) for bound in bounds], pytest.approx(sum(values))


@pytest.mark.parametrize("seed", range(5))
def test_equal_a_log_of_all_events(seed: int) -> None:
    rng, now, totals = random.Random(seed), 0.0, {}
    manager = BlockManager(200, 4, BlockLifetimes(totals, lambda: now))
    tables: list[array] = []
    log: dict[int, list[tuple[str, float]]] = {}  # by block: "new", "share", "idle"
    for _ in range(3000):
        now += 10 ** rng.uniform(-4, 2)
        kind = rng.random()
        if kind < 0.4 and manager.num_free >= 20:
            tables.append(array("i", manager.allocate(rng.randint(1, 20))))
            for block in tables[-1]:
                log.setdefault(block, []).append(("new", now))
        elif kind < 0.5 and tables:
            prefix = rng.choice(tables)[: rng.randint(1, 5)]
            for block in prefix:
                manager.share(block)
                log[block].append(("share", now))
            tables.append(prefix)
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            for block in table:
                if not any(block in other for other in tables):
                    log[block].append(("idle", now))
            manager.release(table)
    lifetimes, idle, gaps = [], [], []
    for block, events in log.items():
        if block % EVERY == 1:
            born = 0.0
            for (_, before), (kind, time) in pairwise(events):
                if kind == "share":
                    gaps.append(time - before)
            for kind, time in events:
                if kind == "new":
                    if born:
                        lifetimes.append(time - born)
                    born = time
            idle += [b - a for (was, a), (kind, b) in pairwise(events) if kind == "new" and was == "idle"]
    assert len(lifetimes) > 20 and gaps
    for histogram, values in ((LIFETIME, lifetimes), (IDLE, idle), (REUSE_GAP, gaps)):
        assert (histogram.buckets(totals), histogram.sum(totals)) == counted(histogram, values)


def test_an_engine_counts_them_among_its_totals() -> None:
    """Requests follow one another through a pool of 4 blocks, each with 2: a block is filled by every second one."""
    engine = Engine(ToyRunner(5, 8, 1), EngineConfig(block_size=8, num_blocks=5, max_num_seqs=1))
    for number in range(9):
        engine.add_request(str(number), [1] * 9, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    totals = engine.observer.stats.totals
    assert LIFETIME.buckets(totals)[-1] == IDLE.buckets(totals)[-1] == 4  # block 1: requests 0, 2, 4, 6, 8
    assert 0 <= IDLE.sum(totals) <= LIFETIME.sum(totals)
