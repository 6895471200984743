"""Sampling parameters of one request, validated when they are made."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from deepinfer.errors import shown
from deepinfer.structured.constraint import Constraint

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_N = 128
MAX_PATTERN_SIZE, MAX_PATTERN_COUNT = 64, 10_000
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**63 - 1  # of tokens; what the engine's int64 holds
MAX_PRIORITY = 2**31 - 1
REPETITION_PENALTIES = (0.01, 100.0)  # far beyond any use; every logit edited with one of them is a finite float32


@dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
    """An output that ends with `min_count` times the same pattern of so many tokens repeats itself (vLLM's fields).

    Raises ValueError naming the field.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_pattern_size", 1, MAX_PATTERN_SIZE),
            ("min_pattern_size", 1, MAX_PATTERN_SIZE),
            ("min_count", 2, MAX_PATTERN_COUNT),
        ):
            _check_int(f"repetition_detection.{name}", getattr(self, name), low, high)
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("repetition_detection.min_pattern_size must be at most max_pattern_size")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Filters act in this order: penalties, logit_bias, allowed_token_ids, bad words, min_tokens, force_topk,
    temperature, top_k, top_p, min_p.

    Attributes:
        max_tokens: most tokens to generate; None means up to the end of the context. 0: none, the prompt alone is of
            interest (prompt_logprobs) and may fill the context.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p.
        top_k: keep the top_k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one.
        presence_penalty: subtracted from the logit of every token already generated.
        frequency_penalty: subtracted once per occurrence in the generated tokens.
        repetition_penalty: divides positive (multiplies negative) logits of tokens seen in prompt or output;
            0.01 to 100.
        seed: same seed, same draws, whatever else is in the batch; None draws one from the engine's seed, which is
            random unless EngineConfig.seed is set.
        stop_token_ids: finish with reason "stop" after any of these.
        ignore_eos: go on after an end-of-sequence token.
        min_tokens: end-of-sequence and stop_token_ids are impossible before this many tokens.
        logprobs: None, or the number of most likely tokens to report beside the chosen one.
            They are log-softmax of the model's own logits, before penalties and temperature.
        logprob_token_ids: report these tokens beside each chosen one, in this order, and not the most likely ones; None
            leaves it to `logprobs`. At most 128.
        prompt_logprobs: the same as `logprobs` for the tokens of the prompt, but the first, which nothing predicts. All
            layers run for the whole prompt then, whatever EngineConfig.yoco_prefill_truncation_mode says.
        force_topk: restrict the softmax (and the logprobs) to this many largest logits.
        golden_token_ids: teacher forcing: these tokens are "chosen" whatever the logits say, and generation
            ends with the list (reason "length"); end-of-sequence tokens inside it do not stop.
        n: number of independent completions; completion i is what a request with `seed` + i gives.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        allowed_token_ids: only these tokens can be chosen; None allows all.
        bad_words_token_ids: sequences of token ids that must not appear in the output: the last token of each is
            impossible after the others.
        repetition_detection: end with reason "stop" (stop reason "repetition_detected") once the output repeats itself
            like this; a mapping of the fields will do.
        thinking_token_budget: most tokens of reasoning, with which the output begins; None: no limit. From then on the
            `thinking_end_token_ids` are forced, one after the other, unless the last of them is there already.
        thinking_end_token_ids: what ends reasoning, the end-of-thinking token last.
        stop: strings that end the output; applied by the text layer, the engine never sees text.
        priority: lower goes first, in the queue and when the cache runs short; a level is worth a minute of waiting.
        deadline_seconds: end the request with reason "abort" (stop reason "deadline") this long after its arrival,
            with the tokens that it has by then; None: it may take as long as it takes.
        so_args: structured output, {"schema_type": ..., "schema": ...}: a format that the output cannot violate (see
            structured.constraint.Constraint and docs/structured_output.md). The output ends with its structure.

    Raises:
        ValueError: naming the field and the allowed values.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    force_topk: int | None = None
    golden_token_ids: Sequence[int] | None = None
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    repetition_detection: RepetitionDetection | Mapping[str, int] | None = None
    thinking_token_budget: int | None = None
    thinking_end_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    priority: int = 0
    deadline_seconds: float | None = None
    so_args: Mapping[str, Any] | None = None

    # Derived once, because the sampler asks at every step.
    is_greedy: bool = field(init=False, repr=False, compare=False)
    has_penalties: bool = field(init=False, repr=False, compare=False)
    edits_logits: bool = field(init=False, repr=False, compare=False)
    gives_tokens: bool = field(init=False, repr=False, compare=False)  # some are taken whatever the logits say

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        _check_float("temperature", self.temperature, 0.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {shown(self.ignore_eos)}")
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logprob_token_ids is not None:
            ids = _token_ids("logprob_token_ids", self.logprob_token_ids)
            if not 1 <= len(set(ids)) == len(ids) <= MAX_LOGPROB_TOKEN_IDS:
                raise ValueError(f"logprob_token_ids must be 1 to {MAX_LOGPROB_TOKEN_IDS} different token ids")
            self._normalise("logprob_token_ids", ids)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.force_topk is not None:
            _check_int("force_topk", self.force_topk, 1)
        _check_int("n", self.n, 1, MAX_N)
        self._normalise("top_k", max(self.top_k, 0))
        self._normalise("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.golden_token_ids is not None:
            self._normalise("golden_token_ids", _token_ids("golden_token_ids", self.golden_token_ids))
            if not self.golden_token_ids:
                raise ValueError("golden_token_ids must not be empty")
        self._normalise("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._normalise("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty")
        self._normalise("bad_words_token_ids", _bad_words(self.bad_words_token_ids))
        if self.repetition_detection is not None:
            self._normalise("repetition_detection", _repetition_detection(self.repetition_detection))
        ends = _token_ids("thinking_end_token_ids", self.thinking_end_token_ids)
        self._normalise("thinking_end_token_ids", ends)
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0)
            if not ends:
                raise ValueError("thinking_token_budget needs thinking_end_token_ids: what is forced at its end")
        self._normalise("stop", _stop_strings(self.stop))
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.deadline_seconds is not None:
            _check_float("deadline_seconds", self.deadline_seconds, 0.0, low_open=True)
        if self.so_args is not None:
            self._normalise("so_args", Constraint.from_so_args(self.so_args).so_args())
            if self.golden_token_ids is not None:
                raise ValueError("golden_token_ids cannot be combined with so_args: both say what the tokens are")
            if self.ignore_eos:
                raise ValueError("ignore_eos cannot be combined with so_args: a structure has an end")
        if self.thinking_token_budget is not None:
            self._check_thinking()
        self._normalise("is_greedy", self.temperature == 0 or self.golden_token_ids is not None)
        self._normalise("gives_tokens", self.golden_token_ids is not None or self.thinking_token_budget is not None)
        has_penalties = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        self._normalise("has_penalties", has_penalties)
        selects = self.allowed_token_ids is not None or bool(self.bad_words_token_ids)
        self._normalise("edits_logits", has_penalties or selects or bool(self.logit_bias) or self.min_tokens > 0)

    def _check_thinking(self) -> None:
        """What else says what tokens are must agree with the end of thinking."""
        if self.golden_token_ids is not None:
            raise ValueError("thinking_token_budget cannot be combined with golden_token_ids: both force tokens")
        if self.so_args is None:
            return
        structure, ends = Constraint.from_so_args(self.so_args), tuple(self.thinking_end_token_ids)
        begins = structure.trigger_token_ids if structure.bound_token_id is None else (structure.bound_token_id,)
        if not begins or ends[-len(begins) :] != begins:
            raise ValueError(
                "thinking_token_budget cannot be combined with so_args unless the grammar begins behind "
                "thinking_end_token_ids: these must end with its bound_token_id, or else its trigger_token_ids"
            )

    def _normalise(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id named by these parameters is outside [0, vocab_size)."""
        named: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "golden_token_ids": self.golden_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "thinking_end_token_ids": self.thinking_end_token_ids,
            "bad_words_token_ids": [token_id for word in self.bad_words_token_ids for token_id in word],
        }
        if self.so_args is not None:
            named |= Constraint.from_so_args(self.so_args).token_ids
        for name, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not low <= value <= (MAX_COUNT if high is None else high)
    ):
        allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        if high is None and isinstance(value, int) and value > MAX_COUNT:
            allowed += " and below 2**63"
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


def _check_float(name: str, value: object, low: float, high: float | None = None, low_open: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    # Comparisons alone, so that NaN, infinities and integers beyond any float never pass.
    limit = sys.float_info.max if high is None else high
    if not (ok and low <= value <= limit and not (low_open and value == low)):  # type: ignore[operator]
        allowed = f"{'>' if low_open else '>='} {low}" + ("" if high is None else f" and <= {high}")
        raise ValueError(f"{name} must be a finite number {allowed}, got {shown(value)}")


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence | set | frozenset):
        raise ValueError(f"{name} must be a list of token ids, got {shown(values)}")
    for value in values:
        _check_int(name, value, 0)
    return tuple(values)


def _bad_words(words: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise ValueError(f"bad_words_token_ids must be a list of lists of token ids, got {shown(words)}")
    listed = tuple(_token_ids("bad_words_token_ids", word) for word in words)
    if not all(listed):
        raise ValueError("bad_words_token_ids must not hold an empty word")
    return listed


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    for token_id, value in bias.items():
        _check_int("logit_bias key", token_id, 0)
        _check_float("logit_bias value", value, -100.0, 100.0)
    return dict(bias)


def _repetition_detection(asked: object) -> RepetitionDetection:
    if isinstance(asked, RepetitionDetection):
        return asked
    required, allowed = {"max_pattern_size", "min_count"}, {field.name for field in fields(RepetitionDetection)}
    if not isinstance(asked, Mapping) or not required <= asked.keys() <= allowed:
        raise ValueError(f"repetition_detection must have max_pattern_size and min_count, got {shown(asked)}")
    return RepetitionDetection(**asked)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop must be a non-empty string or a list of them, got {shown(stop)}")
    return tuple(strings)
