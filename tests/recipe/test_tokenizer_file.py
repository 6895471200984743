"""A malformed tokenizer.json is one line that names the file, and never costs memory for what it only claims."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.recipe import Tokenizer

BAD_FILES: dict[str, bytes] = {
    "nested": b"[" * 100_000,
    "nested-object": b'{"model":' * 100_000,
    "null": b"null",
    "list": b"[]",
    "empty": b"",
    "not-utf8": b'{"model": "\xff"}',
    "long-integer": b'{"model": ' + b"9" * 5000 + b"}",
    "no-model": b"{}",
}


def changed(*keys: str | int, to: Any) -> Callable[[dict], None]:
    """Sets an entry of the definition."""

    def change(definition: dict) -> None:
        part: Any = definition
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to

    return change


BAD_SHAPES: dict[str, Callable[[dict], None]] = {
    **{f"model={value!r}": changed("model", to=value) for value in ("BPE", None, [], {}, 5)},
    **{f"vocab={value!r}": changed("model", "vocab", to=value) for value in (None, [], "a", 5)},
    **{f"id={v!r}": changed("model", "vocab", "a", to=v) for v in ("5", 1.5, None, True, -1, 2**24, 10**9, 10**12)},
    **{f"merges={value!r}": changed("model", "merges", to=value) for value in (5, [5], [["a"]], [["zzz", "q"]])},
    **{f"added={value!r}": changed("added_tokens", to=value) for value in (None, {}, "a", [None], ["a"], [[]])},
    **{f"content={v!r}": changed("added_tokens", 0, "content", to=v) for v in (None, 5, [], "\ud800")},
    **{f"added_id={v!r}": changed("added_tokens", 0, "id", to=v) for v in (-3, "zz", "5", 1.5, None, 10**8, 10**12)},
    **{f"decoder={v!r}": changed("decoder", to=v) for v in (None, "ByteLevel", [], 5, {"type": 5})},
    **{f"decoders={v!r}": changed("decoder", to={"type": "Sequence", "decoders": v}) for v in (None, 5, ["a"], [None])},
    **{f"pre_tokenizer={v!r}": changed("pre_tokenizer", to=v) for v in ("a", 5, [], {"type": "Sequence"})},
    **{f"normalizer={v!r}": changed("normalizer", to=v) for v in ("a", 5, [1], {"type": "Sequence"})},
}


def assert_refused(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        Tokenizer.from_file(path)
    message = str(error.value)
    assert message.startswith(f"tokenizer: {path}: ") and "\n" not in message
    return message


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_no_json_object_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BAD_FILES[name])
    assert_refused(path)


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_a_part_of_a_wrong_shape_is_refused(tmp_path: Path, small_definition: dict, name: str) -> None:
    definition = copy.deepcopy(small_definition)
    BAD_SHAPES[name](definition)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    message = assert_refused(path)
    if "id=" in name:
        spelling = definition["added_tokens"][0]["content"] if name.startswith("added") else "a"
        assert repr(spelling) in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "tokenizer.json")


def test_a_model_must_have_every_token_and_the_same_control_tokens(small_tokenizer: Tokenizer) -> None:
    size = small_tokenizer.vocab_size
    ids = {role: (small_tokenizer.control_id(role),) for role in ("bos", "eos", "pad")}
    small_tokenizer.check_model(size, ids)
    small_tokenizer.check_model(size + 1000, {**ids, "eos": (5, *ids["eos"]), "unknown": (3,)})
    with pytest.raises(ValueError, match=rf"has ID {size - 1}, but the model's vocab_size is {size - 1}"):
        small_tokenizer.check_model(size - 1, ids)
    for role in ids:
        for other in ((size - 1,), ()):
            with pytest.raises(ValueError, match=rf"^config: {role}_token_id is .* {role} token has ID"):
                small_tokenizer.check_model(size, {**ids, role: other})
