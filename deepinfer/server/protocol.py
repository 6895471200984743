"""Request bodies.  Unknown fields are ignored; fields that are known but not supported are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from deepinfer.params import SamplingParams

MAX_CHOICES = 128  # n
MAX_STOP = 16
# A long list of faults would cost more than it tells.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

# field -> (values that change nothing and are therefore accepted, why anything else is refused)
NOT_SAMPLED: dict[str, tuple[tuple, str]] = {
    "best_of": ((1,), "ask for n answers and choose among them"),
    "use_beam_search": ((False,), "only sampling and greedy decoding exist"),
    "length_penalty": ((1.0,), "it only matters to beam search"),
    "prompt_logprobs": ((0, False), "log-probabilities are computed for generated tokens only"),
    "bad_words": (([],), "use logit_bias with token IDs"),
    "allowed_token_ids": (([],), "use logit_bias with token IDs"),
    "guided_json": ((), "structured output is not enforced yet"),
    "guided_regex": ((), "structured output is not enforced yet"),
    "guided_choice": ((), "structured output is not enforced yet"),
    "guided_grammar": ((), "structured output is not enforced yet"),
    "structured_outputs": ((), "structured output is not enforced yet"),
    "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
    "return_tokens_as_token_ids": ((False,), "ask for return_token_ids"),
    "logprob_token_ids": (([],), "ask for logprobs"),
    "priority": ((0,), "requests are served in order of arrival"),
    "cache_salt": ((), "there is no prefix cache to salt"),
    "kv_transfer_params": ((), "this server runs prefill and decode in one process"),
    "skip_special_tokens": ((True,), "control tokens never appear in the text; ask for return_token_ids"),
}
_NOT_CHAT = NOT_SAMPLED | {
    "response_format": (({"type": "text"},), 'only {"type": "text"} can be guaranteed so far'),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "parallel_tool_calls": ((True,), "how many calls to make is the model's decision"),
    "include_reasoning": ((True,), "reasoning comes in a field of its own that can be ignored"),
    "thinking_token_budget": ((), "use max_tokens"),
    "verbosity": (("medium",), "say it in the messages"),
    "audio": ((), "only text is generated"),
    "modalities": ((["text"],), "only text is generated"),
    "prediction": ((), "predicted outputs do not exist here"),
    "web_search_options": ((), "there is no search tool in the server"),
    "store": ((False,), "answers are not stored"),
    "chat_template": ((), "the prompt format belongs to the model"),
    "documents": (([],), "put documents into the messages"),
    "echo": ((False,), "only /v1/completions can repeat its prompt"),
    "continue_final_message": ((False,), 'mark the last assistant message with "prefix": true'),
    "add_generation_prompt": ((True,), "the answer always starts a new assistant turn"),
}
_NOT_COMPLETION = NOT_SAMPLED | {
    "suffix": (("",), "the model completes text at its end only"),
    "response_format": (({"type": "text"},), "structured output is not enforced yet"),
}


# Request fields that SamplingParams has under the same name.
_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "ignore_eos", "min_tokens", "force_topk", "golden_token_ids",
)  # fmt: skip


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingRequest(BaseModel):
    """Fields that both endpoints share: OpenAI's, and vLLM's extras.  None means: the default of SamplingParams."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    force_topk: int | None = None  # this engine's own, like the next one
    golden_token_ids: TokenIds | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """vLLM's extension: usage so far in every chunk."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def stop_strings(self) -> list[str]:
        """Raises ValueError for an empty stop string or more than MAX_STOP."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stop) > MAX_STOP:
            raise ValueError(f"stop must hold at most {MAX_STOP} strings, got {len(stop)}")
        if not all(stop):
            raise ValueError("stop must not hold an empty string")
        return stop

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters.  Raises ValueError naming the field."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        if self.stop_token_ids:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            given["logit_bias"] = _token_bias(self.logit_bias)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ValueError("logit_bias must map token IDs (as decimal strings) to numbers") from None


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions.  Messages, tools and thinking options are checked by deepinfer.recipe."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = _NOT_CHAT

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int | None:
        """max_completion_tokens, or its older name.  Raises ValueError for a value that allows no token."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_completion_tokens < 1:
            raise ValueError(f"max_completion_tokens must be an integer >= 1, got {self.max_completion_tokens}")
        return self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """The field that `limit` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = _NOT_COMPLETION

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    add_special_tokens: bool | None = None  # False leaves out the begin-of-sequence token before text prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or chat messages rendered as the chat endpoint would."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: TokenIds
