"""Model configuration: the keys of the public config.json and what is derived from them (spec: model, section 1).

`ModelConfig.from_dict` accepts the released `config.json` (nested `text_config`) and the flat `inference/config.json`
with its own spelling of the same keys. Everything that can be wrong is checked here, at start-up, with an error that
names the key.
"""

from __future__ import annotations

import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer.config.backbone import BackboneConfig
from deepinfer.config.checks import check_equal, check_model, check_object, require
from deepinfer.config.parts import LayerMode, LayerPlan, RopeScaling, VisionConfig
from deepinfer.config.spelling import (
    FLAT_SPELLING,
    QUANTIZATION,
    build,
    quantization,
    read_config,
    rope_scaling,
    text_and_vision,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BackboneConfig):
    """Text model of DeepSeek-V4.1. Field names are those of the public `text_config`."""

    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    rms_norm_eps: float = 1e-20
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 2
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    initializer_range: float = 0.02
    # top level of config.json
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = -1
    weight_block_size: int = 32
    vision: VisionConfig | None = None

    # ---------------------------------------------------------------- reading

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Build from a parsed config.json (nested) or inference/config.json (flat).

        Raises:
            ValueError: a key is missing, has a wrong type or contradicts another one; the message names it.
        """
        kind = check_object(raw, "config.json").get("model_type", "deepseek_v41")
        require(kind in ("deepseek_v41", "deepseek_v41_text"), "model_type", kind, "'deepseek_v41'")
        text, vision = text_and_vision(raw)
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in text.items():
            name = FLAT_SPELLING.get(key, key)
            if name in known and name not in ("vision", "rope_scaling", "weight_block_size"):
                values[name] = tuple(value) if isinstance(value, list) else value
        values["rope_scaling"] = rope_scaling(text)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            if key in raw:
                values[key] = raw[key]
        check_equal(text, {"num_key_value_heads": 1})
        check_equal(quantization(raw), QUANTIZATION, "quantization_config.")
        if vision is not None:
            values["vision"] = build(VisionConfig, vision, "vision_config.")
        for f in known.values():
            if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
                raise ValueError(f"config: key {f.name!r} is missing")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` at `path` (a file or the folder that holds it)."""
        return cls.from_dict(read_config(path))

    def to_dict(self) -> dict[str, Any]:
        """The nested form of the public config.json; `from_dict(to_dict())` gives an equal config."""
        top = {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"}
        text: dict[str, Any] = {"model_type": "deepseek_v41_text", "num_key_value_heads": 1}
        for f in fields(self):
            if f.name in top or f.name in ("vision", "weight_block_size"):
                continue
            value = getattr(self, f.name)
            if isinstance(value, RopeScaling):
                value = vars(value).copy()
            text[f.name] = list(value) if isinstance(value, tuple) else value
        raw: dict[str, Any] = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            **{key: getattr(self, key) for key in sorted(top)},
            "quantization_config": copy.deepcopy(QUANTIZATION),
            "text_config": text,
        }
        if self.vision is not None:
            raw["vision_config"] = {"model_type": "deepseek_v41_vision", **vars(self.vision)}
        return raw

    # ---------------------------------------------------------------- derived

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Sharing relations of the backbone layers (validated in __post_init__)."""
        return tuple(self._plan(layer_id) for layer_id in range(self.num_hidden_layers))

    def _plan(self, layer_id: int) -> LayerPlan:
        ratio = self.compress_ratios[layer_id]
        engram = layer_id in self.engram_layer_ids
        if ratio == 0:
            return LayerPlan(layer_id, LayerMode.SWA, 0, -1, -1, False, False, engram)
        kv_owner = max((s for s in self.kv_source_layer_ids if s <= layer_id), default=-1)
        index_owner = max((s for s in self.index_source_layer_ids if s <= layer_id), default=-1)
        if kv_owner < 0 or index_owner < 0:
            raise ValueError(
                f"config: layer {layer_id} has compress_ratios {ratio} but no kv_source_layer_ids entry at or below it"
            )
        if self.compress_ratios[kv_owner] != ratio:
            raise ValueError(
                f"config: compress_ratios of layer {layer_id} is {ratio}, its kv source {kv_owner} has "
                f"{self.compress_ratios[kv_owner]}; they must be equal"
            )
        if index_owner < kv_owner:
            raise ValueError(f"config: kv_source_layer_ids entry {kv_owner} is not in index_source_layer_ids")
        if layer_id in self.kv_source_layer_ids:
            mode = LayerMode.FULL
        elif layer_id in self.index_source_layer_ids:
            mode = LayerMode.REINDEX
        else:
            mode = LayerMode.REUSE
        source = self.candidate_source_layer_id
        is_index_source = mode is not LayerMode.REUSE
        return LayerPlan(
            layer_id,
            mode,
            ratio,
            kv_owner,
            index_owner,
            writes_candidates=source >= 0 and layer_id == source,
            reads_candidates=source >= 0 and is_index_source and layer_id > source,
            has_engram=engram,
        )

    @property
    def num_encoder_layers(self) -> int:
        """Depth of the producer half of the causal encoder-decoder: the last kv source."""
        return max(self.kv_source_layer_ids, default=self.num_hidden_layers)

    @property
    def max_backtracking_tokens(self) -> int:
        """Ring slots that an unaccepted speculative step may overwrite: drafts + 1."""
        return self.dspark_block_size + 1 if self.num_nextn_predict_layers else 1

    @property
    def ring_size(self) -> int:
        """Slots of a sliding-window ring: window + backtracking."""
        return self.sliding_window + self.max_backtracking_tokens

    def with_draft_layers(self, stages: int) -> ModelConfig:
        """The same model with `stages` draft layers; 0: without a draft head."""
        ratios = (*self.compress_ratios[: self.num_hidden_layers], *[0] * stages)
        return replace(self, num_nextn_predict_layers=stages, compress_ratios=ratios)

    def __post_init__(self) -> None:
        check_model(self)
        _ = self.layers  # derive now: a contradiction must stop the start-up, not the first request

    @cached_property
    def engram_primes(self) -> tuple[tuple[int, ...], ...]:
        """Bucket counts of each Engram layer, size-major then head (spec: model, section 4)."""
        tables = (self.engram_max_ngram_size - 1) * self.engram_n_heads
        return engram_primes(len(self.engram_layer_ids), tables, self.engram_vocab_size)


def engram_primes(num_layers: int, num_tables: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Buckets of each of `num_tables` hash tables in each Engram layer: the primes from `vocab_size` on, in turn."""
    primes, current = [], vocab_size - 1
    for _ in range(num_layers * num_tables):
        current = _next_prime(current)
        primes.append(current)
    return tuple(tuple(primes[i * num_tables : (i + 1) * num_tables]) for i in range(num_layers))


def _next_prime(n: int) -> int:
    n += 1
    while n < 2 or any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n
