"""Between training masters and checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.models.layers.engram_map import compressed_token_map
from deepinfer.models.loader import load_weights
from deepinfer.models.writer import write_checkpoint
from deepinfer.train.parameters import initial_masters, masters_from_weights, parameter_kinds, with_image_biases

SHARD_BYTES = 15 * 2**20


def export(out: Path, config: ModelConfig, masters: dict[str, Tensor], tokenizer: Path) -> None:
    """Quantise the masters and write the public format with the tokenizer files beside it; a draft head is left out."""
    weights: dict[str, Tensor] = {}
    for kind in parameter_kinds(config):
        weights.update(zip(kind.names, masters[kind.name].detach().float().cpu().unbind(0), strict=True))
    write_checkpoint(out, config.with_draft_layers(0), with_image_biases(weights), SHARD_BYTES, tokenizer)


def starting_masters(config: ModelConfig, checkpoint: Path | None, seed: int) -> dict[str, Tensor]:
    """Masters from an exported checkpoint, or random ones."""
    if checkpoint is None:
        return initial_masters(config, seed)
    return masters_from_weights(config, load_weights(checkpoint, config, torch.float32))


def token_map_of(folder: Path, config: ModelConfig) -> Tensor:
    """int64 [vocab]: the Engram token map of the tokenizer in `folder`.

    Raises:
        ValueError: the tokenizer does not fit the config.
    """
    token_map = compressed_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    if len(token_map) != config.vocab_size:
        raise ValueError(f"vocab_size: {config.vocab_size}, the tokenizer has {len(token_map)} tokens")
    if int(token_map.max()) + 1 != config.engram_compressed_vocab_size:
        keys = int(token_map.max()) + 1
        raise ValueError(
            f"engram_compressed_vocab_size: {config.engram_compressed_vocab_size}, the tokenizer has {keys}"
        )
    return torch.from_numpy(token_map).long()
