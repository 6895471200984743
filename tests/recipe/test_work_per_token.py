"""Detokenising and parsing cost the same for the thousandth token as for the first: work is counted, not timed."""

from typing import Any

import pytest

from deepinfer.recipe import ChatStream, Detokenizer, Tokenizer, convert_chat_request
from deepinfer.recipe.matching import Search

TEXT = "Prose, \n\nwith 日本 👩‍👧 and <b>marks</b> that < begin > like a stop: EN, END_, </thin and so on. "


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: Any) -> list[int]:
    """Sizes of the calls of a method from here on."""
    sizes: list[int] = []
    method = getattr(owner, name)

    def call(self: Any, *args: Any) -> Any:
        sizes.append(size(*args))
        return method(self, *args)

    monkeypatch.setattr(owner, name, call)
    return sizes


@pytest.mark.parametrize("repeats", [10, 100])
def test_a_token_is_looked_up_once(nano_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, repeats: int) -> None:
    token_ids = nano_tokenizer.encode_text(TEXT * repeats)
    detokenizer = Detokenizer(nano_tokenizer)
    lookups = counted(monkeypatch, Tokenizer, "text_of", lambda token_id: 1)
    held = 0
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push([token_id]))
        held = max(held, len(detokenizer._held))
    assert "".join(pieces) == TEXT * repeats
    assert len(lookups) == len(token_ids) and held <= nano_tokenizer.longest_token


@pytest.mark.parametrize("thinking", [False, True])
def test_no_character_is_searched_again_and_again(
    nano_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, thinking: bool
) -> None:
    """Text that waits for a stop string to be complete is short, and so is what each token makes the parser look at."""
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}], "stop": ["END OF"],
            "thinking": {"type": "enabled" if thinking else "disabled"}}  # fmt: skip
    work = {}
    for repeats in (10, 100):
        stream = ChatStream(convert_chat_request(body), "ID", "MODEL", 0, nano_tokenizer)
        token_ids = nano_tokenizer.encode_text(TEXT * repeats)
        with monkeypatch.context() as patch:
            searched = counted(patch, Search, "advance", len)
            for token_id in token_ids:
                stream.push_tokens([token_id])
        assert max(searched) < 64
        work[repeats] = sum(searched) / len(token_ids)
    assert work[100] < 1.1 * work[10], work
