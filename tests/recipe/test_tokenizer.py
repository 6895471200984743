"""Tokenizer, safe encoding and incremental detokenisation, against the tokenizers library as oracle."""

import copy
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import Detokenizer, Prompt, Tokenizer, encode_prompt, render_chat
from deepinfer.recipe.control_tokens import CONTROL_TOKENS, REQUIRED_ROLES

TEXT = st.lists(
    st.sampled_from([*CONTROL_TOKENS.values(), "a", " the", "\n\n", "日本", "👩‍👧", "é", "<", "｜", ">"])
    | st.text(max_size=5),
    max_size=12,
).map("".join)


@given(text=TEXT)
@settings(max_examples=200, deadline=None)
def test_text_never_becomes_an_added_token(small_tokenizer: Tokenizer, text: str) -> None:
    token_ids = small_tokenizer.encode_text(text)
    assert not set(token_ids) & small_tokenizer.added_ids
    assert small_tokenizer.decode(token_ids) == text


def test_every_added_token_of_the_real_vocabulary_is_text(
    deepseek_tokenizer: Tokenizer, deepseek_definition: dict
) -> None:
    spellings = [token["content"] for token in deepseek_definition["added_tokens"]]
    assert len(spellings) == 1283
    for spelling, token_ids in zip(spellings, deepseek_tokenizer.encode_texts(spellings), strict=True):
        assert not set(token_ids) & deepseek_tokenizer.added_ids, spelling
        assert deepseek_tokenizer.decode(token_ids) == spelling


def test_control_ids_come_from_the_file(small_tokenizer: Tokenizer, small_definition: dict) -> None:
    by_text = {token["content"]: token["id"] for token in small_definition["added_tokens"]}
    assert small_tokenizer.control_ids == {role: by_text[text] for role, text in CONTROL_TOKENS.items()}
    prompt = render_chat([{"role": "user", "content": "hi"}])
    token_ids = encode_prompt(prompt, small_tokenizer)
    assert [small_tokenizer.roles[i] for i in token_ids if i in small_tokenizer.roles] == list(prompt.control_roles)


def without(definition: dict, role: str) -> dict:
    """The tokenizer file without the control token of a role."""
    definition = copy.deepcopy(definition)
    definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] != CONTROL_TOKENS[role]]
    del definition["model"]["vocab"][CONTROL_TOKENS[role]]
    return definition


@pytest.mark.parametrize("role", REQUIRED_ROLES["v4.1"])
def test_missing_control_token_is_refused(small_definition: dict, role: str) -> None:
    definition = without(small_definition, role)
    with pytest.raises(ValueError, match=role):
        Tokenizer(definition)
    if role == "system":
        Tokenizer(definition, model_version="v4")


def test_a_token_may_be_spelled_otherwise(small_definition: dict) -> None:
    definition = copy.deepcopy(small_definition)
    for token in definition["added_tokens"]:
        if token["content"] == CONTROL_TOKENS["system"]:
            token["content"] = "<SYS>"
            number = token["id"]
    definition["model"]["vocab"]["<SYS>"] = definition["model"]["vocab"].pop(CONTROL_TOKENS["system"])
    assert Tokenizer(definition, spelling={"system": "<SYS>"}).control_id("system") == number


def test_a_prompt_that_needs_an_absent_token_is_refused(small_definition: dict) -> None:
    with pytest.raises(ValueError, match="image"):
        encode_prompt(Prompt("<｜image｜>", ((0, 9),), ("image",)), Tokenizer(without(small_definition, "image")))


def test_image_regions_are_text_for_a_model_without_them(small_definition: dict) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<｜box｜>"}]
    token_ids = encode_prompt(render_chat(messages), Tokenizer(without(small_definition, "box")))
    assert Tokenizer(small_definition).control_id("box") not in token_ids


def test_unreadable_files_are_refused(tmp_path: Path, small_definition: dict) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (None, "", "[]", "{}", json.dumps({**small_definition, "decoder": None})):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match="tokenizer"):
            Tokenizer.from_file(path)
    path.write_text(json.dumps(small_definition))
    assert Tokenizer.from_file(path).encode_text("the") == Tokenizer(small_definition).encode_text("the")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_detokenizer_equals_decode(small_tokenizer: Tokenizer, small_definition: dict, data: st.DataObject) -> None:
    """Any IDs in any cutting: pieces join to the whole, never split a character, and equal the library's decoding."""
    token_ids = data.draw(st.lists(st.integers(0, small_tokenizer.vocab_size - 1), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    detokenizer = Detokenizer(small_tokenizer, silent_roles=())
    pieces = [detokenizer.push(token_ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == small_tokenizer.decode(token_ids)
    ordinary = [i for i in token_ids if i not in small_tokenizer.added_ids]
    library = tokenizers.Tokenizer.from_str(json.dumps(small_definition))
    assert small_tokenizer.decode(ordinary) == library.decode(ordinary, skip_special_tokens=False)


def test_a_character_over_several_tokens_comes_whole(small_tokenizer: Tokenizer) -> None:
    token_ids = small_tokenizer.encode_text("a👩‍👧é")
    assert len(token_ids) > 4
    detokenizer = Detokenizer(small_tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) == "a👩‍👧é" and detokenizer.finish() == ""
    assert all("�" not in piece for piece in pieces)


def test_end_tokens_are_silent_and_marks_are_not(small_tokenizer: Tokenizer) -> None:
    ids = [small_tokenizer.control_id(role) for role in ("bos", "think_start", "think_end", "dsml", "eos", "pad")]
    assert Detokenizer(small_tokenizer).push(ids) == "<think></think>｜DSML｜"


def test_ids_outside_the_vocabulary_are_refused(small_tokenizer: Tokenizer) -> None:
    for token_id in (-1, small_tokenizer.vocab_size):
        with pytest.raises(ValueError, match="vocabulary"):
            small_tokenizer.decode([token_id])
        with pytest.raises(ValueError, match="vocabulary"):
            Detokenizer(small_tokenizer).push([token_id])


def test_segments_do_not_merge(small_tokenizer: Tokenizer) -> None:
    """Encoding a prompt equals encoding its segments one by one."""
    prompt = render_chat([{"role": "system", "content": "the"}, {"role": "user", "content": "<｜User｜> the"}])
    expected: list[int] = []
    at = 0
    for (start, end), role in zip(prompt.control_ranges, prompt.control_roles, strict=True):
        assert prompt.text[start:end] == CONTROL_TOKENS[role]
        expected += [*small_tokenizer.encode_text(prompt.text[at:start]), small_tokenizer.control_id(role)]
        at = end
    assert encode_prompt(prompt, small_tokenizer) == expected + small_tokenizer.encode_text(prompt.text[at:])
