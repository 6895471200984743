"""Beam search: the likeliest continuations of a prompt, found by keeping a few side by side.

Scores are those of Hugging Face's `generate`, the interface is vLLM's. Every round asks the model once for the
likeliest next tokens of all beams of all prompts. What asks for them keeps nothing between rounds: it is one request of
one token for each beam, which batches with everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from deepinfer.errors import shown
from deepinfer.outputs import FinishReason
from deepinfer.params import MAX_LOGPROBS

# Sequences of token ids and a count -> of each, so many likeliest next tokens (id, log-probability), best first.
Likeliest = Callable[[list[list[int]], int], list[list[tuple[int, float]]]]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: beams that are kept, and continuations that come back.
        max_tokens: most tokens of a continuation.
        ignore_eos: an end-of-sequence token does not end a beam.
        length_penalty: a continuation of n tokens scores its log-probability / n ** length_penalty: above 0 favours
            long ones, below 0 short ones.

    Raises:
        ValueError: naming the field and the allowed values.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, high in (("beam_width", MAX_LOGPROBS - 1), ("max_tokens", None)):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (high is not None and value > high):
                allowed = ">= 1" if high is None else f"in [1, {high}]"
                raise ValueError(f"{name} must be an integer {allowed}, got {shown(value)}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {shown(self.ignore_eos)}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -10 <= penalty <= 10:
            raise ValueError(f"length_penalty must be a number in [-10, 10], got {shown(penalty)}")


@dataclass(frozen=True)
class Beam:
    """A continuation. `finish_reason` is "stop" behind an end-of-sequence token, which is its last one, or "length"."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    text: str = ""

    def score(self, length_penalty: float) -> float:
        """What continuations are compared by: higher is better."""
        return _score(self.cumulative_logprob, len(self.token_ids), length_penalty)


def beam_search(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos_token_ids: Collection[int],
    max_model_len: int,
    likeliest: Likeliest,
) -> list[list[Beam]]:
    """The best continuations of each prompt, best first: `beam_width` of them, or as many as there are.

    Raises ValueError if the model cannot tell of so many tokens: those that end a sequence are looked at beside.
    """
    ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    count = params.beam_width + len(ends)
    if count > MAX_LOGPROBS:
        raise ValueError(f"beam_width must be at most {MAX_LOGPROBS - len(ends)}, got {params.beam_width}")
    searches = [_Search(list(prompt), params, ends, max_model_len - len(prompt)) for prompt in prompts]
    while running := [search for search in searches if search.beams]:
        answers = iter(likeliest([[*s.prompt, *beam.token_ids] for s in running for beam in s.beams], count))
        for search in running:
            search.advance([next(answers) for _ in search.beams])
    return [search.ended for search in searches]


@dataclass
class _Search:
    """The beams of one prompt, and the best of those that have ended."""

    prompt: list[int]
    params: BeamSearchParams
    ends: Collection[int]
    room: int  # tokens behind the prompt
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    def advance(self, candidates: list[list[tuple[int, float]]]) -> None:
        """A round: the likeliest next tokens of each beam are known."""
        width, penalty = self.params.beam_width, self.params.length_penalty
        longer: list[Beam] = []
        for beam, tokens in zip(self.beams, candidates, strict=True):
            for token_id, logprob in tokens:
                grown = Beam((*beam.token_ids, token_id), beam.cumulative_logprob + logprob)
                if token_id in self.ends:
                    self.ended.append(replace(grown, finish_reason="stop"))
                else:
                    longer.append(grown)
        longer.sort(key=lambda beam: -beam.cumulative_logprob)
        self.beams = longer[:width]
        length, limit = len(longer[0].token_ids), min(self.params.max_tokens, self.room)
        if length == limit:
            self.ended += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []
        self.ended = sorted(self.ended, key=lambda beam: -beam.score(penalty))[:width]
        if self.beams and len(self.ended) == width:  # a log-probability only falls: can the best one still win?
            best = self.beams[0].cumulative_logprob
            hope = max(_score(best, count, penalty) for count in (length + 1, limit))
            if hope <= self.ended[-1].score(penalty):
                self.beams = []


def _score(logprob: float, length: int, length_penalty: float) -> float:
    return logprob / math.pow(length, length_penalty)
