"""How much of a prompt one prefill step takes: a budget of tokens, optionally of time, and whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np

MIN_OBSERVATIONS = 8  # steps before the fitted cost is trusted
MIN_CHUNK = 16  # tokens that a step takes whatever they cost: a budget too small must not stop the engine
MAX_ASKED = 1024  # prompt tokens of a step that are asked how likely they were
ASKED_BYTES = 256 << 20  # most that their rows of logits may take, each as wide as the vocabulary
MAX_CHUNK = 32_768  # tokens, as in the production balancer
DECAY = 0.99  # weight of the past at each new step, so that the fit follows the machine


def most_asked(vocab_size: int) -> int:
    """Prompt tokens that a step may ask about: each takes a row of float32 logits."""
    return max(1, min(MAX_ASKED, ASKED_BYTES // (4 * vocab_size)))


def image_spans(token_ids: Sequence[int], image_token_id: int) -> tuple[tuple[int, int], ...]:
    """Runs of image_token_id in a prompt as (first position, position after the last)."""
    if image_token_id < 0 or image_token_id not in token_ids:
        return ()
    spans, position = [], 0
    for is_image, run in groupby(token_ids, key=image_token_id.__eq__):
        length = sum(1 for _ in run)
        if is_image:
            spans.append((position, position + length))
        position += length
    return tuple(spans)


def chunk_size(
    start: int, length: int, limit: int, budget: int, spans: Sequence[tuple[int, int]], is_first: bool
) -> int:
    """Tokens of a sequence that the step takes: at most `limit`, and never a part of an image.

    A chunk ends in front of an image that does not fit. One that starts the chunk is taken whole if the step has room
    for it, or if the sequence is the first of the step, which then goes over its budget.

    Args:
        start: tokens in the cache.
        length: tokens of the sequence.
        limit: most tokens to take, >= 1.
        budget: tokens that the step has room for, >= limit.
        spans: the prompt's images.
        is_first: whether the step is empty so far.

    Returns 0 if the sequence has to wait for a step of its own.
    """
    end = min(length, start + limit)
    for first, after in spans:
        if first < end < after:
            if first > start:
                return first - start
            return after - start if is_first or after - start <= budget else 0
    return end - start


class PrefillCost:
    """Milliseconds of a prefill step, fitted to those that ran: base + per_token * q + per_pair * q * (c + q / 2).

    q are a sequence's tokens in the step and c those in the cache before: attention pairs each query with the keys up
    to itself (the production prefill balancer's cost(q, c), system spec). The fit is least squares with non-negative
    coefficients, and older steps count less.
    """

    def __init__(self) -> None:
        self.base = self.per_token = self.per_pair = 0.0
        self.num_observed = 0
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to plan with it."""
        return self.num_observed >= MIN_OBSERVATIONS

    def observe(self, starts: Sequence[int], counts: Sequence[int], milliseconds: float) -> None:
        """A step took this long: sequence i computed counts[i] tokens after starts[i]."""
        q, c = np.asarray(counts, float), np.asarray(starts, float)
        features = np.array([1.0, q.sum(), (q * (c + q / 2)).sum()])
        self._normal = DECAY * self._normal + np.outer(features, features)
        self._moment = DECAY * self._moment + milliseconds * features
        self.num_observed += 1
        self.base, self.per_token, self.per_pair = self._fit()

    def milliseconds(self, start: int, count: int) -> float:
        """What `count` tokens after `start` add to a step."""
        return count * (self.per_token + self.per_pair * (start + count / 2))

    def largest_chunk(self, start: int, milliseconds: float) -> int:
        """Most tokens after `start` that add no more than this: the positive root of the quadratic."""
        a, b = self.per_pair / 2, self.per_token + self.per_pair * start
        if milliseconds <= 0:
            return 0
        denominator = b + math.sqrt(b * b + 4 * a * milliseconds)  # this form of the root stays exact as a nears 0
        return int(min(2 * milliseconds / denominator, MAX_CHUNK)) if denominator else MAX_CHUNK

    def _fit(self) -> tuple[float, float, float]:
        """Least squares over the features whose coefficient is not negative."""
        scale = 1 / np.sqrt(np.maximum(np.diag(self._normal), 1e-12))  # features differ by orders of magnitude
        active = [0, 1, 2]
        while active:
            normal = self._normal[np.ix_(active, active)] * np.outer(scale[active], scale[active])
            found = np.linalg.lstsq(normal, self._moment[active] * scale[active], rcond=1e-10)[0] * scale[active]
            if found.min() >= 0:
                break
            active.remove(active[int(found.argmin())])
        coefficients = np.zeros(3)
        if active:
            coefficients[active] = found
        return float(coefficients[0]), float(coefficients[1]), float(coefficients[2])


class StepBudget:
    """What one prefill step may still take. Tokens only, until the cost of time is known.

    asked: most tokens whose log-probabilities are wanted (see `most_asked`).
    """

    def __init__(
        self, tokens: int, chunk_limit: int, cost: PrefillCost, milliseconds: float | None, asked: int = MAX_ASKED
    ):
        self.tokens = tokens
        self.asked = asked
        self.is_empty = True
        self._chunk_limit = chunk_limit
        self._cost = cost
        self._milliseconds = milliseconds - cost.base if milliseconds is not None and cost.is_known else None

    def take(self, start: int, length: int, spans: Sequence[tuple[int, int]], asks: bool = False) -> int:
        """Tokens of a sequence (see `chunk_size`) for this step; 0 if they have to wait for the next one.

        asks: whether their log-probabilities are wanted.
        """
        limit = min(self._chunk_limit, self.tokens, self.asked if asks else MAX_CHUNK)
        if self._milliseconds is not None:
            affordable = self._cost.largest_chunk(start, self._milliseconds)
            limit = min(limit, max(affordable, MIN_CHUNK) if self.is_empty else affordable)
        if limit <= 0:
            return 0
        count = chunk_size(start, length, limit, self.tokens, spans, self.is_empty)
        self.tokens = max(0, self.tokens - count)
        self.asked = max(0, self.asked - count) if asks else self.asked
        if self._milliseconds is not None:
            self._milliseconds -= self._cost.milliseconds(start, count)
        self.is_empty = self.is_empty and count == 0
        return count
