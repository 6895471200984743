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


_PROMPT = ("expected_prompt", "expected_special_ranges", "expected_token_ids", "other_prompt", "other_token_ids")

RENDER_DIFFERENCES: dict[str, Difference] = {
    "chat_developer_role": Difference("developer is a system message under its newer name", supported=True),
    "chat_n_0": Difference("refused in words that do not claim that only n = 1 works", fields=("message",)),
    "chat_n_2": Difference("several choices are supported", supported=True),
    "messages_assistant_prefill": Difference(
        "an assistant message at the end is continued, as the protocol means it",
        fields=(*_PROMPT, "expected_conversation.messages[1].prefix"),
    ),
    "messages_choice_any": Difference(
        "any requires a call",
        fields=(
            *_PROMPT,
            "expected_conversation.tool_choice",
            "expected_parsing_options.starts_in_tool_calls",
            "expected_inference_options.output_constraint.kind",
        ),
    ),
    "messages_document_block": Difference(
        "plain text documents are read", fields=(*_PROMPT, "expected_conversation.messages[0].content")
    ),
    "messages_redacted_thinking": Difference("redacted thinking is left out of the history", supported=True),
    "responses_mixed_items": Difference("refusal parts of the history are text of the turn", supported=True),
    "responses_other_custom_tool": Difference("custom tools become functions with one text input", supported=True),
}

_NO_STRING_ATTRIBUTE = "a parameter without string attribute is a string"
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
