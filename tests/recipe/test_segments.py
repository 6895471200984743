"""Cutting long texts and remembering segments must never change a token ID."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer
from deepinfer.recipe import Tokenizer, encode_prompt, render_chat
from deepinfer.recipe.segments import PIECE_CHARS, SegmentCache, can_be_cut, cut

PARTS = st.sampled_from(
    [
        "a",
        "Zb",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        ".",
        "...",
        "'s",
        "12345",
        "日本",
        "かな",
        "é",
        "e\u0301",
        "👩\u200d👧",
        "x = y",
        " the cat",
        "\n    return",
        "<think>",
        "｜DSML｜",
        "\u00a0",
        "\u2028",
        "_",
        "(",
    ]
)


@given(text=st.lists(PARTS | st.text(max_size=3), min_size=1, max_size=60).map("".join), size=st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_pieces_give_the_ids_of_the_whole(
    nano_tokenizer: Tokenizer, tokenizer_of_vectors: Tokenizer | None, text: str, size: int
) -> None:
    pieces = cut(text, size)
    assert "".join(pieces) == text and all(len(piece) >= size for piece in pieces[:-1])
    for tokenizer in filter(None, (nano_tokenizer, tokenizer_of_vectors)):
        assert [i for piece in pieces for i in tokenizer.encode_text(piece)] == tokenizer.encode_text(text)


def test_a_long_message_is_cut_and_keeps_its_ids(nano_tokenizer: Tokenizer) -> None:
    text = "def f(x):\n    return x + 1  # comment λ\n\nSome prose, with 12345 numbers and 日本語.\n" * 2000
    assert len(cut(text)) > 5 and min(map(len, cut(text)[:-1])) >= PIECE_CHARS
    assert nano_tokenizer.encode_texts([text]) == [nano_tokenizer.encode_text(text)]


def test_other_ways_of_splitting_words_are_not_cut(small_definition: dict) -> None:
    path = Path(deepinfer.__file__).parent / "checkpoints" / "nano" / "tokenizer.json"
    nano = json.loads(path.read_text(encoding="utf-8"))
    assert can_be_cut(nano) and not can_be_cut(small_definition)
    assert not can_be_cut({**nano, "normalizer": {"type": "NFC"}})
    assert not can_be_cut({**nano, "pre_tokenizer": None})


def test_only_the_tail_of_a_longer_conversation_is_encoded(
    small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = small_tokenizer._encode_pieces
    monkeypatch.setattr(small_tokenizer, "_encode_pieces", lambda texts: encoded.extend(texts) or encode(texts))
    history = [{"role": "user", "content": "first question"}, {"role": "assistant", "content": "first answer"}]
    encode_prompt(render_chat(history), small_tokenizer)
    assert {"first question", "first answer"} <= set(encoded)
    encoded.clear()
    longer = render_chat([*history, {"role": "user", "content": "second question"}])
    token_ids = encode_prompt(longer, small_tokenizer)
    assert encoded == ["second question"]
    assert small_tokenizer.decode(token_ids) == longer.text


def test_memory_is_bounded() -> None:
    calls: list[list[str]] = []

    def encode(texts: list[str]) -> list[list[int]]:
        calls.append(texts)
        return [[len(text)] for text in texts]

    cache = SegmentCache(limit=10)
    assert cache.encode(["aaaa", "bbb", "aaaa"], encode) == [[4], [3], [4]]
    assert cache.encode(["aaaa"], encode) == [[4]]
    assert cache.encode(["cccc"], encode) == [[4]]  # pushes out "bbb", the one not used for longest
    assert cache.encode(["aaaa", "bbb", "x" * 11, "x" * 11], encode) == [[4], [3], [11], [11]]
    assert calls == [["aaaa", "bbb"], ["cccc"], ["bbb", "x" * 11]]
