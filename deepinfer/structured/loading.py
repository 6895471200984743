"""The grammar compiler of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from deepinfer import envs
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.sandbox import Sandbox
from deepinfer.structured.vocabulary import Vocabulary


def load_vocabulary(path: Path, size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Of the tokenizer.json in a checkpoint folder, for a model of `size` tokens. Raises ValueError if it is bad."""
    from deepinfer.checkpoint_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    return Vocabulary(tokenizer.token_bytes, tokenizer.added_ids, tuple(eos_token_ids), size, tokenizer.encode_text)


def grammar_compiler(path: Path, size: int, eos_token_ids: Iterable[int]) -> GrammarCompiler | None:
    """None for a checkpoint without a tokenizer: it has no text that a grammar could be about."""
    if not (path / "tokenizer.json").is_file():
        return None
    ids, backend = tuple(sorted(eos_token_ids)), envs.get("DEEPINFER_GRAMMAR_BACKEND")
    sandbox = Sandbox(path, size, ids, backend, envs.get("DEEPINFER_GRAMMAR_TIMEOUT"))
    return GrammarCompiler(lambda: load_vocabulary(path, size, ids), backend, sandbox)
