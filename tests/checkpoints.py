"""A tiny random checkpoint with a tokenizer, for tests that need a whole model folder."""

import inspect
import textwrap
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from deepinfer.models.layers.engram_map import compressed_token_map
from deepinfer.models.random_weights import random_weights
from deepinfer.models.writer import write_checkpoint
from deepinfer.recipe.control_tokens import CONTROL_TOKENS
from tests.configs import tiny_config

# Source text of the standard library fills the vocabulary up to its size.
TRAINING_TEXT = [
    inspect.getsource(textwrap),
    "The lighthouse keeper climbed the stairs every evening and lit the lamp.",
    "def add(a, b):\n    return a + b\n",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "Once upon a time there was a small engine that could read. It read the whole night.",
]


def write_tokenizer(path: Path, vocab_size: int = 512) -> None:
    """Byte-level BPE; the control tokens come first, so begin is 0, end is 1 and pad is 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(path))


def write_tiny_checkpoint(directory: Path, seed: int = 0) -> Path:
    """A model folder: 3.4M random parameters, 512 tokens of vocabulary, 1,024 tokens of context."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "tokenizer.json")
    token_map = compressed_token_map(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")))
    config = tiny_config(engram_compressed_vocab_size=int(token_map.max()) + 1)
    write_checkpoint(directory, config, random_weights(config, seed), 4 << 20, directory / "tokenizer.json")
    return directory
