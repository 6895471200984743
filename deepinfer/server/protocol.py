"""Request bodies.  Unknown fields are ignored; fields that are known but not supported are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from deepinfer.params import SamplingParams
from deepinfer.recipe.detokenizer import SILENT_ROLES
from deepinfer.server.errors import ApiError

if TYPE_CHECKING:
    from deepinfer.server.state import ServerState

MAX_CHOICES = 128  # n
MAX_STOP = 16
MAX_BAD_WORDS = 256
# A long list of faults would cost more than it tells.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
ThinkingBudget = Annotated[int, Field(ge=0)]  # tokens
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/=+-]{1,128}$")]
Texts = Annotated[list[str], Field(fail_fast=True)]


def _check_schema(value: Any) -> Any:
    if not isinstance(value, str | dict | bool):
        raise PydanticCustomError("json_schema", "must be a JSON Schema: an object, or its JSON text")
    return value


JsonSchema = Annotated[str | dict[str, Any] | bool, BeforeValidator(_check_schema)]

_UNITS = "this server runs the whole model in one process"

# field -> (values that change nothing and are therefore accepted, why anything else is refused)
NOT_SAMPLED: dict[str, tuple[tuple, str]] = {
    "best_of": ((1,), "ask for n answers and choose among them"),
    "use_beam_search": ((False,), "only sampling and greedy decoding exist"),
    "length_penalty": ((1.0,), "it only matters to beam search"),
    "logits_processors": (([],), "use logit_bias with token IDs"),
    "custom_logit_processor": (("",), "use logit_bias with token IDs"),
    "guided_whitespace_pattern": ((), "JSON is written with the whitespace that the model chooses"),
    "guided_decoding_backend": (("auto",), "the server's own options say what enforces structured output"),
    "stop_regex": (("", []), "use stop strings"),
    "extra_key": ((), "there is no prefix cache to divide"),
    "kv_transfer_params": ((), _UNITS),
    "data_parallel_rank": ((0,), _UNITS),
    "lora_path": ((), "there are no adapters"),
    "return_hidden_states": ((False,), "only tokens and log-probabilities are returned"),
    "return_routed_experts": ((False,), "only tokens and log-probabilities are returned"),
    "routed_experts_prompt_start": ((), "only tokens and log-probabilities are returned"),
    "no_stop_trim": ((False,), "ask for include_stop_str_in_output"),
}
# For the two protocols of items, which have no use for these.
NOT_IN_ITEMS: dict[str, tuple[tuple, str]] = {
    "prompt_logprobs": ((0, False), "use /v1/chat/completions"),
    "logprob_token_ids": (([],), "use /v1/chat/completions"),
    "repetition_detection": ((), "use /v1/chat/completions"),
    "return_token_ids": ((False,), "use /v1/chat/completions"),
    "return_prompt_text": ((False,), "use the render route"),
    "skip_special_tokens": ((True,), "use /v1/chat/completions"),
    "return_tokens_as_token_ids": ((False,), "use /v1/chat/completions"),
    "truncate_prompt_tokens": ((), "shorten the input before sending it"),
    "include_reasoning": ((True,), "reasoning comes in an item of its own that can be ignored"),
    "priority": ((0,), "use /v1/chat/completions"),
    "deadline_seconds": ((), "use /v1/chat/completions"),
    "separate_reasoning": ((True,), "reasoning always comes in an item of its own"),
    "response_format": (({"type": "text"},), "use the protocol's own field"),
    "max_completion_tokens": ((), "use the protocol's own limit"),
    "chat_template": ((), "the prompt format belongs to the model"),
    "chat_template_kwargs": (({},), "use the protocol's own field for thinking"),
    "documents": (([],), "put documents into the input"),
    "echo": ((False,), "only /v1/completions can repeat its prompt"),
    "continue_final_message": ((False,), "use /v1/chat/completions"),
    "add_generation_prompt": ((True,), "use /v1/chat/completions"),
}
_NOT_CHAT = NOT_SAMPLED | {
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "separate_reasoning": ((True,), "reasoning always comes in a field of its own"),
    "stream_reasoning": ((True,), "reasoning is streamed like the answer"),
    "verbosity": (("medium",), "say it in the messages"),
    "audio": ((), "only text is generated"),
    "modalities": ((["text"],), "only text is generated"),
    "mm_processor_kwargs": (({},), "only text is read so far"),
    "prediction": ((), "predicted outputs do not exist here"),
    "web_search_options": ((), "there is no search tool in the server"),
    "store": ((False,), "answers are not stored"),
    "truncate_prompt_tokens": ((), "a chat without its beginning is another one; shorten the messages"),
    "chat_template": ((), "the prompt format belongs to the model, and what parses its output relies on it"),
    "add_special_tokens": ((False,), "the prompt format belongs to the model"),
    "documents": (([],), "the prompt format of the model has none; put them into the messages"),
}
_NOT_COMPLETION = NOT_SAMPLED | {
    "suffix": (("",), "the model completes text at its end only"),
    "thinking_token_budget": ((), "a completion has no reasoning of its own; use /v1/chat/completions"),
}


# Request fields that SamplingParams has under the same name.
_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "ignore_eos", "min_tokens", "force_topk", "golden_token_ids", "repetition_detection", "priority",
    "deadline_seconds",
)  # fmt: skip


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`, and vLLM's usage in every chunk."""

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
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logprob_token_ids: TokenIds | None = None  # whose log-probabilities to report, in place of the most likely ones
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[Texts, Field(max_length=MAX_BAD_WORDS)] | None = None
    repetition_detection: dict[str, int] | None = None  # see SamplingParams
    force_topk: int | None = None  # this engine's own, like the next one
    golden_token_ids: TokenIds | None = None
    guided_json: JsonSchema | None = None  # structured output, as vLLM calls it
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: JsonSchema | None = None  # the same, as SGLang calls it
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    so_args: dict[str, Any] | None = None  # this engine's own
    priority: int | None = None
    deadline_seconds: float | None = None  # this engine's own
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens as "token_id:42"
    request_id: RequestName | None = None
    rid: RequestName | None = None  # the same, as SGLang calls it
    skip_special_tokens: bool | None = None  # False: the text has those that begin, end and pad sequences, too
    stream_interval: Annotated[int, Field(ge=1, le=1024)] | None = None  # tokens that an event waits for
    # Requests of different salts share no cached prefix. No two requests share one here, whatever their salts.
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    session_id: str | None = None  # both are for a router's or a log's eyes
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """vLLM's extension: usage so far in every chunk."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def name(self) -> str | None:
        """What the client calls this request."""
        return self.request_id or self.rid

    @property
    def stop_strings(self) -> list[str]:
        """Raises ValueError for an empty stop string or more than MAX_STOP."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stop) > MAX_STOP:
            raise ValueError(f"stop must hold at most {MAX_STOP} strings, got {len(stop)}")
        if not all(stop):
            raise ValueError("stop must not hold an empty string")
        return stop

    @property
    def silent_roles(self) -> tuple[str, ...]:
        """Control tokens without text. The one that ends the answer is a stop: in the text only where those are."""
        if self.skip_special_tokens is not False:
            return SILENT_ROLES
        return () if self.ignore_eos or self.include_stop_str_in_output else ("eos",)

    @property
    def prompt_logprob_count(self) -> int | None:
        return self.prompt_logprobs

    @property
    def is_echo_alone(self) -> bool:
        """Whether the prompt comes back and nothing behind it: what scores a text asks so, in OpenAI's older way."""
        return False

    def sampling_params(self, max_tokens: int | None, logprobs: int | None, state: ServerState) -> SamplingParams:
        """The engine's parameters; the model's own where the request says nothing.  Raises ValueError naming the field.

        A bad word is banned in the spelling of its tokens, with and without a space before it.
        """
        if max_tokens == 0 and not self.is_echo_alone:
            raise ValueError("max_tokens must be an integer >= 1, got 0")
        given: dict[str, Any] = {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        given = state.sampling_defaults | given
        if self.stop_token_ids:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logprob_token_ids:
            given["logprob_token_ids"] = tuple(self.logprob_token_ids)
        if self.allowed_token_ids:
            given["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.bad_words:
            words = [word.lstrip() for word in self.bad_words]
            if not all(words):
                raise ValueError("bad_words must not hold an empty word")
            spelled = state.text.tokenizer.encode_texts([*words, *(" " + word for word in words)])
            given["bad_words_token_ids"] = tuple({tuple(token_ids) for token_ids in spelled})
        if self.logit_bias:
            given["logit_bias"] = _token_bias(self.logit_bias)
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=self.prompt_logprob_count, **given
        )


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
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # False leaves it out of the answer; the model thinks all the same
    continue_final_message: bool | None = None  # the last message is the beginning of the answer
    add_generation_prompt: bool | None = None
    echo: bool | None = None  # the answer begins with the message that it continues
    thinking_token_budget: ThinkingBudget | None = None  # most tokens of reasoning

    @property
    def continues(self) -> bool:
        """Whether the answer goes on from the last message.  ApiError 400 for what contradicts itself."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true"
            raise ApiError(message, param="continue_final_message")
        if self.add_generation_prompt is False and not self.continue_final_message:
            message = "add_generation_prompt may be false only with continue_final_message: else nobody's turn begins"
            raise ApiError(message, param="add_generation_prompt", code="unsupported_parameter")
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            message = "continue_final_message needs an assistant message at the end of messages"
            raise ApiError(message, param="continue_final_message")
        return bool(self.continue_final_message)

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
        return (self.top_logprobs or 0) if self.logprobs or self.logprob_token_ids else None

    @property
    def prompt_logprob_count(self) -> int | None:
        """ApiError 400 for a stream: its chunks have no place for those of the prompt."""
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs", code="unsupported_parameter")
        return self.prompt_logprobs


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = _NOT_COMPLETION

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    response_format: dict[str, Any] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # False leaves out the begin-of-sequence token before text prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # keep so many; -1: what the context holds
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped

    @property
    def is_echo_alone(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs

    @property
    def prompt_logprob_count(self) -> int | None:
        """How many of the likeliest tokens to report for each of the prompt; None: nothing of the prompt."""
        echoed = self.logprob_count if self.echo else None
        counts = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)

    def truncate(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """The part of a prompt that `truncate_prompt_tokens` keeps; -1 leaves room for the answer asked for."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return token_ids
        keep = max_model_len - (self.max_tokens or 1) if keep == -1 else keep
        return token_ids[:keep] if self.truncation_side == "right" else token_ids[max(0, len(token_ids) - keep) :]


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
