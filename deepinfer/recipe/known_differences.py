"""Vectors of the public library whose weaker answer we do not repeat, each with the reason (recipe spec, 6).

A vector that is not named here must agree in every field.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """``fields``: what of the vector is not compared; ``supported``: the library refuses this request, we accept it."""

    reason: str
    fields: tuple[str, ...] = ()
    supported: bool = False


RENDER_DIFFERENCES: dict[str, Difference] = {
    "chat_developer_role": Difference("developer is a system message under its newer name", supported=True),
    "chat_n_0": Difference("refused in words that do not claim that only n = 1 works", fields=("message",)),
    "chat_n_2": Difference("several choices are supported", supported=True),
    "responses_mixed_items": Difference("refusal parts of the history are text of the turn", supported=True),
    "responses_other_custom_tool": Difference("custom tools become functions with one text input", supported=True),
}

_NO_STRING_ATTRIBUTE = "a parameter without string attribute is a string; the library garbles the arguments"
_CUT_CHARACTER = "tokens whose bytes make no whole character are counted too"

PARSE_DIFFERENCES: dict[str, Difference] = {
    "chat_no_string_attr": Difference(
        _NO_STRING_ATTRIBUTE,
        fields=("expected_events_per_push[2]", "expected_response.choices[0].message.tool_calls[0].function.arguments"),
    ),
    "chat_tokens_incomplete_tail": Difference(
        _CUT_CHARACTER,
        fields=(
            "expected_events_per_push[3][0].data.usage.completion_tokens",
            "expected_events_per_push[3][0].data.usage.total_tokens",
            "expected_response.usage.completion_tokens",
            "expected_response.usage.total_tokens",
        ),
    ),
}
