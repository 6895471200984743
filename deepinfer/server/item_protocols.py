"""Bodies of POST /v1/responses and /v1/messages: what the server checks itself; the rest is recipe's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from deepinfer.recipe import apply_patch
from deepinfer.server.errors import ApiError
from deepinfer.server.protocol import MAX_STOP, NOT_IN_ITEMS, NOT_SAMPLED, SamplingRequest, ThinkingBudget

_NOT_RESPONSES: dict[str, tuple[tuple, str]] = (
    NOT_SAMPLED
    | NOT_IN_ITEMS
    | {
        "n": ((1,), "a response is one answer; ask several times"),
        "max_tokens": ((), "use max_output_tokens"),
        "logprobs": ((False,), 'use "include": ["message.output_text.logprobs"] and top_logprobs'),
        "conversation": ((), "use previous_response_id"),
        "prompt": ((), "prompt templates are not stored here; send instructions and input"),
        "max_tool_calls": ((), "there are no tools in the server"),
        "truncation": (("disabled",), "shorten the input before sending it"),
    }
)
_NOT_MESSAGES: dict[str, tuple[tuple, str]] = (
    NOT_SAMPLED
    | NOT_IN_ITEMS
    | {
        "n": ((1,), "a message is one answer; ask several times"),
        "stop": ((), "use stop_sequences"),
        "thinking_token_budget": ((), "use thinking.budget_tokens"),
        "logprobs": ((False,), "the protocol has none; use /v1/chat/completions"),
        "mcp_servers": (([],), "there are no tools in the server"),
        "container": ((), "there are no tools in the server"),
        "context_management": ((), "shorten the messages before sending them"),
    }
)
_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses.  Besides OpenAI's fields: vLLM's sampling extras and `stop`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = _NOT_RESPONSES

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    thinking_token_budget: ThinkingBudget | None = None  # vLLM's
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None

    @property
    def limit(self) -> int | None:
        """Raises ValueError for a value that allows no token."""
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens must be an integer >= 1, got {self.max_output_tokens}")
        return self.max_output_tokens

    @property
    def logprob_count(self) -> int | None:
        asked = self.top_logprobs is not None or _INCLUDES[0] in (self.include or ())
        return (self.top_logprobs or 0) if asked else None

    def check_promises(self) -> None:
        """ApiError 400 naming a field whose value is known but cannot be kept."""
        for value in self.include or ():
            if value not in _INCLUDES:
                message = f"include may hold {' and '.join(_INCLUDES)}, got {value[:200]!r}"
                raise ApiError(message, param="include", code="unsupported_parameter")
        if self.background and self.stream:
            message = "background is not supported together with stream: poll GET /v1/responses/{id}"
            raise ApiError(message, param="background", code="unsupported_parameter")
        if self.background and self.store is False:
            raise ApiError("background needs store: nobody could get the response", param="background")
        for number, tool in enumerate(self.tools or ()):
            wanted = tool.get("format")
            if tool.get("type") != "custom" or tool.get("name") == apply_patch.NAME:  # whose format the model knows
                continue
            if isinstance(wanted, dict) and wanted.get("type") == "grammar":
                message = f"tools[{number}].format: the input of a custom tool cannot be held to a grammar"
                raise ApiError(message, param=f"tools[{number}].format", code="unsupported_parameter")
        for number, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if item.get("type") == "item_reference":
                message = "item_reference is not supported: send the item, or previous_response_id"
                raise ApiError(message, param=f"input[{number}]", code="unsupported_parameter")


class MessagesRequest(SamplingRequest):
    """POST /v1/messages and /v1/messages/count_tokens.  Besides Anthropic's fields: vLLM's sampling extras."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = _NOT_MESSAGES

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    stop_sequences: list[str] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # what output_config.format was called
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # checked by recipe

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning."""
        return (self.thinking or {}).get("budget_tokens")

    @property
    def format_field(self) -> str:
        """Where the request says what the answer must be."""
        return "output_config.format" if self.output_format is None else "output_format"

    def check_promises(self) -> None:
        """ApiError 400 naming a field whose value is known but cannot be kept."""
        if self.output_format is not None and (self.output_config or {}).get("format") is not None:
            message = "output_config.format and output_format cannot both say what the answer must be"
            raise ApiError(message, param="output_format")
        if not isinstance((self.tool_choice or {}).get("disable_parallel_tool_use", False), bool):
            message = "tool_choice.disable_parallel_tool_use must be true or false"
            raise ApiError(message, param="tool_choice.disable_parallel_tool_use")
        if len(self.stop_sequences or ()) > MAX_STOP or not all(self.stop_sequences or ()):
            message = f"stop_sequences must hold at most {MAX_STOP} strings, none of them empty"
            raise ApiError(message, param="stop_sequences")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ApiError(f"max_tokens must be an integer >= 1, got {self.max_tokens}", param="max_tokens")
