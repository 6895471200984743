"""What a step hands back. Every RequestOutput is a delta; `merge` joins consecutive ones."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class TokenLogprob:
    """Log probability (natural log) of one token and of its alternatives.

    `top` holds (token id, logprob), most likely first, or the request's `logprob_token_ids`. A logprob is -inf for a
    token that force_topk left out. `rank` is that of the token, 1 for the most likely one; of prompt tokens only.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    rank: int | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock; None while the event has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class EngineStats:
    """A snapshot: sequences and blocks now, tokens and preemptions since the start.

    A prompt counts when its first token is sampled, once: what preemption makes the engine recompute is not news.
    """

    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    cuda_graph_seconds: float = 0.0  # that capturing CUDA graphs took at start-up
    cuda_graph_bytes: int = 0  # of device memory that they hold


@dataclass(slots=True)
class CompletionOutput:
    """New tokens of one of the n completions of a request.

    `stop_reason` is the token id or string that stopped it, None for end-of-sequence.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str = ""  # filled by the text layer


@dataclass(slots=True)
class RequestOutput:
    """What happened to one request since its previous output: only completions with news are listed.

    `finished` is True once all n completions are; `error` says why when a finish reason is "error".
    `prompt_logprobs` come once, if they were asked for, with the first token of completion 0: an entry a prompt token,
    None for the first.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def merge(self, later: "RequestOutput") -> None:
        """Append a later delta of the same request to this one."""
        by_index = {output.index: output for output in self.outputs}
        for new in later.outputs:
            old = by_index.get(new.index)
            if old is None:
                self.outputs.append(new)
                continue
            old.token_ids.extend(new.token_ids)
            if new.logprobs is not None:
                old.logprobs = (old.logprobs or []) + new.logprobs
            old.text += new.text
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
        self.finished, self.metrics, self.error = later.finished, later.metrics, later.error
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
