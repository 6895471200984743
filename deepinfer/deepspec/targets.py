"""The models that drafts are trained for, frozen: a V4.1 checkpoint, or any causal model that `transformers` loads.

A target gives, for whole rows of tokens, its *taps* (hidden states of a few layers, side by side) and its final normed
hidden states, of which `head` makes logits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.spelling import model_type, read_config
from deepinfer.models.draft_calibration import CALIBRATION_NAME
from deepinfer.models.loader import INDEX_NAME, is_text, load_weights
from deepinfer.models.reference import Weights
from deepinfer.train.export import token_map_of
from deepinfer.train.fast_model import FastModel

HEAD_NAME = "model-draft.safetensors"  # the file of a V4.1 head that was trained here
HASHED_BYTES = 1 << 20


@dataclass(frozen=True)
class Shape:
    """What a draft must know of its target."""

    hidden_size: int
    vocab_size: int
    num_taps: int


class Target(Protocol):
    """A frozen target on one device."""

    shape: Shape
    embed: Tensor  # [V, D]
    head: Tensor  # float32 [V, D]

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [R, T] -> taps [R, T, num_taps * D], final normed hidden states [R, T, D]."""
        ...


class V41Target:
    """A checkpoint of the V4.1 architecture, taps at its dspark_target_layer_ids. Rows have at most `length` tokens."""

    def __init__(self, folder: Path, length: int, device: str) -> None:
        config = ModelConfig.from_file(folder)
        if not config.dspark_target_layer_ids:
            raise ValueError("config: dspark_target_layer_ids is empty, a draft head reads at least one layer")
        self.config = config
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.weights: Weights = load_weights(folder, config, dtype, device, include=is_text)
        self.token_map, self.length, self.device = token_map_of(folder, config), length, device
        self._models: dict[int, FastModel] = {}  # by length of the rows
        self.embed, self.head = self.weights["embed.weight"], self.weights["head.weight"].float()
        self.shape = Shape(config.hidden_size, config.vocab_size, len(config.dspark_target_layer_ids))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        if length > self.length:
            raise ValueError(f"length: {length}, allowed: at most {self.length}")
        if length not in self._models:
            taps = self.config.dspark_target_layer_ids
            self._models[length] = FastModel(
                self.config, self.token_map, length, self.device, tap_layers=taps, flex=False
            )
        hidden, info = self._models[length].hidden(self.weights, tokens, train=False)
        return torch.cat(info.taps, dim=-1), hidden


class HuggingFaceTarget:
    """A local causal language model of `transformers`, taps at the outputs of `tap_layers`."""

    def __init__(self, folder: Path, device: str, tap_layers: tuple[int, ...] = ()) -> None:
        self.model = load_causal_model(folder, device)
        depth = self.model.config.num_hidden_layers
        self.tap_layers = tap_layers or spread_layers(depth)
        for layer in self.tap_layers:
            if not 0 <= layer < depth:
                raise ValueError(f"tap_layers: {layer}, allowed: 0..{depth - 1}")
        self.embed = self.model.get_input_embeddings().weight
        self.head = self.model.get_output_embeddings().weight.float()
        self.shape = Shape(self.embed.shape[1], self.embed.shape[0], len(self.tap_layers))
        self._check_head(folder)

    @torch.no_grad()
    def _check_head(self, folder: Path) -> None:
        """Drafts take logits to be the final states times the head: a model that scales or caps them is refused."""
        tokens = torch.arange(8, device=self.embed.device).unsqueeze(0)
        logits = self.model(tokens, use_cache=False).logits.float()
        ours = self(tokens)[1].float() @ self.head.T
        if (ours - logits).norm() > 0.05 * logits.norm():
            raise ValueError(
                f"target: {folder} does more than multiply its last states by its head, allowed: only that"
            )

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
        return torch.cat([states[layer + 1] for layer in self.tap_layers], dim=-1), states[-1]


def load_causal_model(folder: Path, device: str) -> Any:
    """A frozen model of `transformers`, float32 on a CPU and BF16 elsewhere.

    Raises:
        ValueError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # noqa: BLE001  every library below it has errors of its own for a folder that is no model
        raise ValueError(f"target: {folder} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    return model.to(device).eval().requires_grad_(False)


def spread_layers(depth: int, count: int = 3) -> tuple[int, ...]:
    """`count` layers from the second to the last but one, evenly spread; all of a shallower model."""
    if depth <= count:
        return tuple(range(depth))
    first, last = 1, max(depth - 2, 1)
    return tuple(sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)}))


def is_v41(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is of the V4.1 architecture."""
    return model_type(read_config(folder)) == "deepseek_v41"


def fingerprint(folder: Path) -> str:
    """A name for what is in a checkpoint: its config, tokenizer and the ends of its weight files, but not its draft."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        if path.name in (HEAD_NAME, INDEX_NAME, CALIBRATION_NAME):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(HASHED_BYTES))
            file.seek(max(size - HASHED_BYTES, 0))
            digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()[:16]


def load_target(folder: Path, length: int, device: str) -> V41Target | HuggingFaceTarget:
    """The target in `folder` for rows of `length` tokens.

    Raises:
        ValueError: there is no model that can be loaded.
    """
    return V41Target(folder, length, device) if is_v41(folder) else HuggingFaceTarget(folder, device)


def target_shape(folder: Path) -> Shape:
    """What `load_target` would find there, read from the config alone.

    Raises:
        ValueError: there is no config that can be read.
    """
    if is_v41(folder):
        config = ModelConfig.from_file(folder)
        return Shape(config.hidden_size, config.vocab_size, len(config.dspark_target_layer_ids))
    from transformers import AutoConfig

    try:
        other: Any = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        return Shape(other.hidden_size, other.vocab_size, len(spread_layers(other.num_hidden_layers)))
    except Exception as error:  # noqa: BLE001  as above
        raise ValueError(f"target: {folder} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
