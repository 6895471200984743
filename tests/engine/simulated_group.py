"""Ranks of a data-parallel group as threads of one process."""

import threading
from collections.abc import Callable
from typing import TypeVar

TIMEOUT = 30.0
Result = TypeVar("Result")


class SimulatedGroup:
    """`rank(i)` is deepinfer.engine.voting.Group for rank i. A rank that does not vote breaks all others."""

    def __init__(self, size: int):
        self.size = size
        self.num_votes = 0
        self._values = [0] * size
        self._minimum = 0
        self._all_voted = threading.Barrier(size, self._reduce, TIMEOUT)

    def _reduce(self) -> None:
        self._minimum = min(self._values)
        self.num_votes += 1

    def rank(self, index: int) -> "SimulatedRank":
        return SimulatedRank(self, index)

    def vote(self, index: int, value: int) -> int:
        self._values[index] = value
        self._all_voted.wait()
        return self._minimum  # the next vote is not counted before everybody has come back

    def run(self, program: Callable[[int], Result]) -> list[Result]:
        """program(rank) of every rank, together. Raises what a rank raised."""
        results: list[Result | None] = [None] * self.size
        errors: list[BaseException] = []

        def run_rank(index: int) -> None:
            try:
                results[index] = program(index)
            except threading.BrokenBarrierError as error:
                errors.append(error)
            except BaseException as error:
                errors.insert(0, error)
                self._all_voted.abort()

        threads = [threading.Thread(target=run_rank, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results  # type: ignore[return-value]


class SimulatedRank:
    def __init__(self, group: SimulatedGroup, index: int):
        self.group, self.index = group, index

    def allreduce_min(self, value: int) -> int:
        return self.group.vote(self.index, value)
