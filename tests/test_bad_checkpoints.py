"""A checkpoint folder that is malformed or contradicts itself is refused when it is loaded, in one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM
from deepinfer.config.engine import EngineConfig
from deepinfer.llm import load_tokenizer
from deepinfer.models.registry import load_model
from deepinfer.server.text_engine import load_text_engine
from tests.checkpoints import write_tiny_checkpoint, write_tokenizer
from tests.models.test_deepseek_v4_config import V4_FLASH

NOT_OBJECTS: dict[str, bytes] = {
    "null": b"null",
    "list": b"[]",
    "nested": b"[" * 100_000,
    "not-utf8": b'{"model_type": "\xff"}',
    "long-integer": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "model_type-list": b'{"model_type": []}',
    "model_type-object": b'{"model_type": {}}',
    "model_type-unknown": b'{"model_type": "gpt2"}',
}
INDEXES: dict[str, bytes] = {
    "null": b"null",
    "nested": b"[" * 100_000,
    "not-utf8": b'{"weight_map": "\xff"}',
    "long-integer": b'{"weight_map": ' + b"9" * 5000 + b"}",
    "long-name": json.dumps({"weight_map": {"norm.weight": "x" * 5000}}).encode(),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def checkpoint(source: Path, tmp_path: Path) -> Path:
    """A copy whose weights are links."""
    return Path(shutil.copytree(source, tmp_path / "tiny", copy_function=link_or_copy))


def link_or_copy(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy(source, target)


def edit(path: Path, **values: Any) -> None:
    """Sets top-level keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def assert_refused(checkpoint: Path, start: str) -> None:
    """By the Python API and by the server alike."""
    for load in (lambda: LLM(checkpoint), lambda: load_text_engine(str(checkpoint), EngineConfig())):
        with pytest.raises(ValueError) as error:
            load()
        assert str(error.value).startswith(start) and "\n" not in str(error.value), str(error.value)[:300]


@pytest.mark.parametrize("name", NOT_OBJECTS)
def test_config_json(checkpoint: Path, name: str) -> None:
    (checkpoint / "config.json").write_bytes(NOT_OBJECTS[name])
    assert_refused(checkpoint, "config: ")
    with pytest.raises(ValueError, match="^config: "):
        load_model(checkpoint, torch.float32)


@pytest.mark.parametrize("name", INDEXES)
def test_the_index_of_the_weights(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_bytes(INDEXES[name])
    assert_refused(checkpoint, "model: ")


def test_tokenizer_json_where_only_the_model_reads_it(checkpoint: Path) -> None:
    """Engram's token map is made without the text layer."""
    (checkpoint / "tokenizer.json").write_text("[" * 1000)
    with pytest.raises(ValueError, match=r"^tokenizer: .*tokenizer\.json: cannot be read"):
        load_model(checkpoint, torch.float32)
    write_tokenizer(checkpoint / "tokenizer.json", vocab_size=520)
    with pytest.raises(ValueError, match=r"^tokenizer: .*a token has ID 5\d\d, but the model's vocab_size is 512"):
        load_model(checkpoint, torch.float32)


@pytest.mark.parametrize("role", ["bos", "eos", "pad"])
def test_control_tokens_of_config_and_tokenizer_must_agree(checkpoint: Path, role: str) -> None:
    edit(checkpoint / "config.json", **{f"{role}_token_id": 7})
    assert_refused(checkpoint, f"config: {role}_token_id is 7, but tokenizer.json's {role} token has ID ")


def test_more_tokens_than_the_model_has(checkpoint: Path) -> None:
    write_tokenizer(checkpoint / "tokenizer.json", vocab_size=520)
    assert_refused(checkpoint, "tokenizer: token ")


def test_more_tokens_than_a_model_without_engram_has(tmp_path: Path) -> None:
    """The tokenizer of DeepSeek-V4, checked against its config alone."""
    write_tokenizer(tmp_path / "tokenizer.json", vocab_size=512)
    (tmp_path / "config.json").write_text(json.dumps({**V4_FLASH, "vocab_size": 512}))
    assert load_tokenizer(tmp_path).model_version == "v4"
    for changes, start in (
        ({"vocab_size": 500}, "tokenizer: token "),
        ({"bos_token_id": 5}, "config: bos_token_id is 5, "),
        ({"eos_token_id": [5, 6]}, "config: eos_token_id is 5, 6, "),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**V4_FLASH, "vocab_size": 512, **changes}))
        with pytest.raises(ValueError) as error:
            load_tokenizer(tmp_path)
        assert str(error.value).startswith(start)


@pytest.mark.parametrize("model", [None, 5, 1.5, b"nano", [], "x" * 5000, "a\0b", "", Path("/nowhere")])
def test_a_model_that_is_no_folder(model: Any) -> None:
    with pytest.raises(ValueError, match=r"^model must be 'nano' or a local folder with a config\.json and weights"):
        LLM(model)
