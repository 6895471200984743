"""From a request of any chat protocol to the prompt's token IDs, by deepinfer.recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.params import SamplingParams
from deepinfer.recipe import ConversationRequest, ConversionOptions, Prompt, RequestError, encode_prompt, render
from deepinfer.recipe.detokenizer import SILENT_ROLES
from deepinfer.recipe.fields import parse_body
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.sizes import check_text
from deepinfer.server.state import ServerState
from deepinfer.server.structure import STRUCTURE_FIELDS

Convert = Callable[[dict[str, Any], ConversionOptions], ConversationRequest]
# Checked by the server's own request classes, in its own terms.
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options")
_NOT_OF_RECIPE = frozenset((*_LIMITS, *STRUCTURE_FIELDS))


@dataclass
class PreparedPrompt:
    """A request up to the point where the engine takes over."""

    conversation: ConversationRequest
    prompt: Prompt
    token_ids: list[int]

    def with_output(
        self,
        stop: list[str],
        include_stop: bool | None = None,
        is_structured: bool = False,
        silent_roles: tuple[str, ...] = SILENT_ROLES,
    ) -> ConversationRequest:
        """The conversation, its output read as this server does: it ends at these strings, and no reply is empty.

        `is_structured`: a grammar that is no part of the conversation holds the answer to a format.
        """
        conversation = self.conversation.conversation
        parsing = replace(
            self.conversation.parsing,
            stop_sequences=tuple(stop),
            include_stop_string=bool(include_stop),
            silent_roles=silent_roles,
            answer_open_reasoning=True,
            answer_has_format=is_structured or conversation.json_schema is not None or conversation.regex is not None,
        )
        return replace(self.conversation, parsing=parsing)


def with_thinking_budget(
    state: ServerState, params: SamplingParams, budget: int | None, conversation: ConversationRequest
) -> SamplingParams:
    """The parameters with so many tokens of reasoning at most, if the output begins with reasoning.

    One that the limit of the whole output, or the context, makes idle is left out.  ApiError 400 for what it cannot be
    combined with.
    """
    most = state.text.max_model_len if params.max_tokens is None else params.max_tokens
    if budget is None or budget >= most or not conversation.parsing.begins_with_reasoning:
        return params
    ends = (state.text.tokenizer.control_ids["think_end"],)
    try:
        return replace(params, thinking_token_budget=budget, thinking_end_token_ids=ends)
    except ValueError as error:
        raise from_value_error(error) from None


def prepare(state: ServerState, raw: dict[str, Any], convert: Convert, param: str) -> PreparedPrompt:
    """Body to token IDs.  ApiError 400 naming the field (`param` where recipe names none) for whatever it refuses."""
    name = state.text.name
    options = ConversionOptions(
        {name: state.text.model_version}, default_thinking=state.default_thinking, enforces_calls=True
    )
    body = {key: value for key, value in raw.items() if key not in _NOT_OF_RECIPE} | {"model": name}
    try:
        conversation = convert(body, options)
        check_promises(conversation, param)
        if not conversation.conversation.tools and requires_call(raw.get("tool_choice")):
            raise ApiError("tool_choice requires a tool call, and there are no tools", param="tool_choice")
        prompt = render(conversation.conversation, conversation.model_version)
        check_text(state.text, prompt.text, param)
        return PreparedPrompt(conversation, prompt, encode_prompt(prompt, state.text.tokenizer))
    except ValueError as error:
        names_field = isinstance(error, RequestError) and error.param
        raise from_value_error(error, param if names_field else unreadable_field(body) or param) from None


def unreadable_field(body: dict[str, Any]) -> str | None:
    """The field whose value recipe cannot read: nested too deeply, a number out of range."""
    for name, value in body.items():
        try:
            parse_body({name: value}, "")
        except ValueError:
            return name[:200]
    return None


def requires_call(tool_choice: Any) -> bool:
    """Whether a call must come, in the words of any of the protocols."""
    kind = tool_choice.get("type") if isinstance(tool_choice, dict) else tool_choice
    return kind in ("required", "any", "tool", "function", "custom")


def check_promises(request: ConversationRequest, param: str) -> None:
    """Refuse what recipe can write into a prompt but nothing here can keep yet."""
    for message in request.conversation.messages:
        for part in message.content:
            if not isinstance(part, str):
                refused = "images are not supported: only text is read so far"
                raise ApiError(refused, param=part.path.lstrip(".") or param, code="unsupported_parameter")
