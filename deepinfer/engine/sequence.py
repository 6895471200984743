"""One token sequence in the engine, and the request that owns n of them."""

import sys
from array import array
from collections.abc import Collection, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from deepinfer.engine.order import queue_order
from deepinfer.engine.repetition import RepetitionDetector
from deepinfer.engine.state_slots import NULL_SLOT
from deepinfer.outputs import FinishReason, RequestMetrics, TokenLogprob
from deepinfer.params import RepetitionDetection, SamplingParams
from deepinfer.structured.matcher import Matcher


class Sequence:
    """Prompt and output tokens of one completion, and what it holds in the caches.

    `token_ids` (int64) and `block_table` (int32) are arrays, not lists: batches copy them without boxing.
    The cache holds the first `num_computed` tokens; the last token of a decoding sequence is not in it yet.
    `num_pending` tokens at most were sampled on the device after those in `token_ids` and have not been read yet: one a
    step, and with speculation as many more as drafts may have been accepted. Counts that matter to the next step
    (`num_tokens`, `num_computed`) include them; `Scheduler.settle` takes back what did not come.
    Speculation: the device has drafts for the next step if `has_drafts`; `next_drafts` are those of the latest step
    that the host has read.
    While it is swapped out, `host_blocks` (int32) are the rows of the host pool that hold its cache (swap.py).
    `constraint` is the grammar that the output obeys, `detector` ends one that repeats itself.
    `prompt_logprobs` are collected until the first token is out, if they were asked for; the figures of the first
    `num_prompt_asked` positions are there or on their way (prompt_logprobs.py).
    `order` is its place in the waiting queue (order.py); `image_spans` are the prompt's images, which no chunk cuts.
    """

    __slots__ = (
        "request_id", "index", "arrival", "order", "params", "seed", "metrics", "num_prompt_tokens", "max_num_tokens",
        "token_ids", "image_spans", "block_table", "host_blocks", "state_slot", "num_computed", "num_pending",
        "finish_reason", "stop_reason", "constraint", "has_drafts", "next_drafts", "prompt_logprobs",
        "num_prompt_asked", "detector",
    )  # fmt: skip

    drafts: SequenceOf[int] = ()  # those that a step verifies have rows of their own

    def __init__(
        self,
        request_id: str,
        index: int,
        arrival: int,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        seed: int,
        metrics: RequestMetrics,
        max_model_len: int = sys.maxsize,
        image_spans: SequenceOf[tuple[int, int]] = (),
        constraint: Matcher | None = None,
    ):
        self.request_id = request_id
        self.index = index
        self.arrival = arrival
        self.order = queue_order(metrics.arrival_time, params.priority, arrival)
        self.params = params
        self.seed = seed
        self.metrics = metrics
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(self.max_num_tokens, self.num_prompt_tokens + params.max_tokens)
        if params.golden_token_ids is not None:
            self.max_num_tokens = min(self.max_num_tokens, self.num_prompt_tokens + len(params.golden_token_ids))
        self.token_ids = array("q", prompt_token_ids)
        self.image_spans = image_spans
        self.block_table = array("i")
        self.host_blocks = array("i")
        self.state_slot = NULL_SLOT
        self.num_computed = 0
        self.num_pending = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.constraint = constraint
        detection = params.repetition_detection
        self.detector = RepetitionDetector(detection) if isinstance(detection, RepetitionDetection) else None
        self.has_drafts = False
        self.next_drafts: list[int] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.num_prompt_asked = self.num_prompt_tokens  # all: nothing is wanted

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether some tokens of the prompt have to be asked about yet."""
        return self.num_prompt_asked < self.num_prompt_tokens - 1

    def want_prompt_logprobs(self) -> None:
        """Call before it is queued."""
        self.prompt_logprobs = [None]  # nothing predicts the first token
        self.num_prompt_asked = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """All tokens, those included that were sampled and not read yet."""
        return len(self.token_ids) + self.num_pending

    @property
    def is_full(self) -> bool:
        """Whether the pending tokens bring it to its length limit, whatever they are."""
        return len(self.token_ids) + (self.num_pending > 0) >= self.max_num_tokens

    def append(self, token_id: int, eos_token_ids: Collection[int]) -> None:
        """Add a generated token, which was pending, and set finish_reason if it ends the sequence."""
        self.token_ids.append(token_id)
        self.num_pending -= 1
        if self.constraint is not None:
            self.constraint.accept(token_id)
        params = self.params
        if params.golden_token_ids is None:  # before min_tokens the sampler makes these tokens impossible
            if token_id in params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
                return
            if token_id in eos_token_ids and not params.ignore_eos:
                self.finish_reason = "stop"
                return
            if self.detector is not None and self.detector.repeats(self.token_ids, self.num_prompt_tokens):
                self.finish_reason, self.stop_reason = "stop", "repetition_detected"
                return
        if len(self.token_ids) >= self.max_num_tokens:
            self.finish_reason = "length"

    def extend(self, token_ids: list[int], eos_token_ids: Set[int]) -> int:
        """`append` generated tokens up to the one that ends the sequence; returns how many."""
        if len(self.token_ids) >= self.max_num_tokens:  # none were wanted
            self.finish_reason = "length"
            return 0
        if len(token_ids) > 1 and self.constraint is None and self._goes_on_after(token_ids, eos_token_ids):
            self.token_ids.extend(token_ids)
            self.num_pending -= len(token_ids)
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            self.append(token_id, eos_token_ids)
            if self.finish_reason is not None:
                return count
        return len(token_ids)

    def _goes_on_after(self, token_ids: list[int], eos_token_ids: Set[int]) -> bool:
        """Whether it surely does; with stop tokens of its own or given ones they are looked at one by one."""
        params = self.params
        has_own_ends = params.stop_token_ids or params.golden_token_ids is not None or self.detector is not None
        fits = len(self.token_ids) + len(token_ids) < self.max_num_tokens
        return fits and not has_own_ends and eos_token_ids.isdisjoint(token_ids)


@dataclass(slots=True)
class Request:
    """A request as the caller knows it: n sequences with one id."""

    request_id: str
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all its completions have ended."""
        return all(seq.finish_reason is not None for seq in self.sequences)
