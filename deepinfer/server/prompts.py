"""From a request of any chat protocol to the prompt's token IDs, by deepinfer.recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.recipe import ConversationRequest, ConversionOptions, Prompt, encode_prompt, render
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.sizes import check_text
from deepinfer.server.state import ServerState

Convert = Callable[[dict[str, Any], ConversionOptions], ConversationRequest]
# Checked by the server's own request classes, in its own terms.
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options")


@dataclass
class PreparedPrompt:
    """A request up to the point where the engine takes over."""

    conversation: ConversationRequest
    prompt: Prompt
    token_ids: list[int]

    def with_output(
        self, stop: list[str], include_stop: bool | None = None, is_structured: bool = False
    ) -> ConversationRequest:
        """The conversation, its output read as this server does: it ends at these strings, and no reply is empty.

        `is_structured`: a grammar that is no part of the conversation holds the answer to a format.
        """
        conversation = self.conversation.conversation
        parsing = replace(
            self.conversation.parsing,
            stop_sequences=tuple(stop),
            include_stop_string=bool(include_stop),
            answer_open_reasoning=True,
            answer_has_format=is_structured or conversation.json_schema is not None or conversation.regex is not None,
        )
        return replace(self.conversation, parsing=parsing)


def prepare(state: ServerState, raw: dict[str, Any], convert: Convert, param: str) -> PreparedPrompt:
    """Body to token IDs.  ApiError 400 naming the field (`param` where recipe names none) for whatever it refuses."""
    name = state.text.name
    options = ConversionOptions(
        {name: state.text.model_version}, default_thinking=state.default_thinking, enforces_calls=True
    )
    body = {key: value for key, value in raw.items() if key not in _LIMITS} | {"model": name}
    try:
        conversation = convert(body, options)
        check_promises(conversation, param)
        prompt = render(conversation.conversation, conversation.model_version)
        check_text(state.text, prompt.text, param)
        return PreparedPrompt(conversation, prompt, encode_prompt(prompt, state.text.tokenizer))
    except ValueError as error:
        raise from_value_error(error, param) from None


def check_promises(request: ConversationRequest, param: str) -> None:
    """Refuse what recipe can write into a prompt but nothing here can keep yet."""
    for message in request.conversation.messages:
        for part in message.content:
            if not isinstance(part, str):
                refused = "images are not supported: only text is read so far"
                raise ApiError(refused, param=part.path.lstrip(".") or param, code="unsupported_parameter")
