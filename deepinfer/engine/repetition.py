"""Outputs that go round in circles: the same few tokens again and again (SamplingParams.repetition_detection)."""

from __future__ import annotations

from array import array

from deepinfer.params import RepetitionDetection


class RepetitionDetector:
    """For every pattern length: how many of the latest tokens equal the one so many places before."""

    def __init__(self, asked: RepetitionDetection) -> None:
        self._sizes = range(asked.min_pattern_size, asked.max_pattern_size + 1)
        self._count = asked.min_count
        self._runs = [0] * len(self._sizes)

    def repeats(self, token_ids: array, begin: int) -> bool:
        """Whether token_ids[begin:] ends with min_count times the same pattern. Call it for every new token."""
        length, last = len(token_ids) - begin, token_ids[-1]
        for i, size in enumerate(self._sizes):
            self._runs[i] = self._runs[i] + 1 if length > size and token_ids[-1 - size] == last else 0
            if self._runs[i] >= size * (self._count - 1):
                return True
        return False
