"""Configuration of DeepSeek-V4: the keys of its public config.json and what is derived (spec: model, section 12).

`ModelConfigV4.from_dict` accepts the released spelling (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and the
one that `transformers` saves (`layer_types` with `compress_rates`, `mlp_layer_types`, `rope_parameters`). Everything
that can be wrong is checked here, at start-up, with an error that names the key.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer.config.backbone import BackboneConfig
from deepinfer.config.checks import (
    check_common,
    check_equal,
    check_object,
    check_positive,
    check_token_ids,
    check_types,
    is_integer,
    is_number,
    require,
)
from deepinfer.config.parts import RopeScaling
from deepinfer.config.spelling import build, read_config


class AttentionKind(Enum):
    """What a layer attends to beside its sliding window."""

    SLIDING = "sliding_attention"  # nothing
    SPARSE = "compressed_sparse_attention"  # CSA: the entries its indexer selects; groups overlap
    HEAVY = "heavily_compressed_attention"  # HCA: every entry of its much longer groups


RATIO_KINDS = {0: AttentionKind.SLIDING, 4: AttentionKind.SPARSE, 128: AttentionKind.HEAVY}


@dataclass(frozen=True)
class LayerPlanV4:
    """One layer: its attention and how its tokens find their experts."""

    layer_id: int
    kind: AttentionKind
    compress_ratio: int  # tokens per compressed entry; 0: no compressed KV
    hash_routing: bool  # experts by token id (`tid2eid`) instead of by the largest score

    @property
    def group_span(self) -> int:
        """Tokens pooled into one entry: an overlapping group also reads the group before it."""
        return self.compress_ratio * (2 if self.kind is AttentionKind.SPARSE else 1)

    @property
    def num_series(self) -> int:
        """Key-value series a token contributes: 2 where groups overlap (for the next group, for its own), else 1."""
        return 2 if self.kind is AttentionKind.SPARSE else 1


@dataclass(frozen=True, kw_only=True)
class ModelConfigV4(BackboneConfig):
    """Text model of DeepSeek-V4. Field names are those of the public config.json, except where noted."""

    attention_kinds: tuple[AttentionKind, ...]  # from `compress_ratios` or `layer_types`, one a layer
    hash_layers: tuple[bool, ...]  # from `num_hash_layers` or `mlp_layer_types`, one a layer
    sparse_ratio: int = 4  # `compress_rates`
    heavy_ratio: int = 128
    rms_norm_eps: float = 1e-6
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = (1,)  # `eos_token_id`, a number or a list
    quantized: bool = False  # a `quantization_config` is present

    # ---------------------------------------------------------------- reading

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfigV4:
        """Build from a parsed config.json.

        Raises:
            ValueError: a key is missing, has a wrong type or contradicts another one; the message names it.
        """
        check_object(raw, "config.json")
        known = {f.name: f for f in fields(cls)}
        derived = "attention_kinds hash_layers rope_scaling quantized sparse_ratio heavy_ratio eos_token_ids".split()
        values = {key: value for key, value in raw.items() if key in known and key not in derived}
        if "qk_rope_head_dim" not in values and raw.get("partial_rotary_factor") and "head_dim" in raw:
            values["qk_rope_head_dim"] = _rotated(raw)
        for f in known.values():
            required = f.default is MISSING and f.default_factory is MISSING and f.name not in derived
            if required and f.name not in values:
                raise ValueError(f"config: key {f.name!r} is missing")
        check_equal(raw, {"num_key_value_heads": 1})
        num_layers = values["num_hidden_layers"]
        require(is_integer(num_layers), "num_hidden_layers", num_layers, "an integer")
        rates = check_object(raw.get("compress_rates") or {}, "compress_rates")
        values["sparse_ratio"] = rates.get(AttentionKind.SPARSE.value, 4)
        values["heavy_ratio"] = rates.get(AttentionKind.HEAVY.value, 128)
        values["attention_kinds"] = _attention_kinds(raw, num_layers)
        values["hash_layers"] = _hash_layers(raw, num_layers)
        values["rope_scaling"] = _rope_scaling(raw)
        values["eos_token_ids"] = _eos_token_ids(raw)
        if raw.get("quantization_config") is not None:
            check_object(raw["quantization_config"], "quantization_config")
            values["quantized"] = True
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfigV4:
        """Read `config.json` at `path` (a file or the folder that holds it)."""
        return cls.from_dict(read_config(path))

    # ---------------------------------------------------------------- derived

    @cached_property
    def layers(self) -> tuple[LayerPlanV4, ...]:
        """Every layer's plan."""
        ratios = {
            AttentionKind.SLIDING: 0,
            AttentionKind.SPARSE: self.sparse_ratio,
            AttentionKind.HEAVY: self.heavy_ratio,
        }
        pairs = zip(self.attention_kinds, self.hash_layers, strict=True)
        return tuple(LayerPlanV4(i, kind, ratios.get(kind, 0), hashed) for i, (kind, hashed) in enumerate(pairs))

    # ---------------------------------------------------------------- checks

    def __post_init__(self) -> None:
        check_types(self)
        check_common(self)
        check_positive(self, ("sparse_ratio", "heavy_ratio"))
        check_equal(self, {"norm_topk_prob": True, "mlp_bias": False})
        check_token_ids(self, ("bos_token_id",))
        for token_id in self.eos_token_ids:
            require(0 <= token_id < self.vocab_size, "eos_token_id", token_id, f"0..{self.vocab_size - 1}")
        dim, head_dim = self.qk_rope_head_dim, self.head_dim
        require(dim <= head_dim, "qk_rope_head_dim", dim, f"at most head_dim = {head_dim}")
        require(
            dim % 2 == 0 and dim <= self.index_head_dim,
            "qk_rope_head_dim",
            dim,
            f"even and at most index_head_dim = {self.index_head_dim}",
        )
        for name in ("attention_kinds", "hash_layers"):
            length = len(getattr(self, name))
            require(length == self.num_hidden_layers, name, f"{length} entries", f"{self.num_hidden_layers} entries")


def _rotated(raw: dict[str, Any]) -> int:
    """Rotated dimensions of a head, from transformers' share of them."""
    share, head_dim = raw["partial_rotary_factor"], raw["head_dim"]
    require(is_number(share) and 0 < share <= 1, "partial_rotary_factor", share, "a number in (0, 1]")
    require(is_integer(head_dim), "head_dim", head_dim, "an integer")
    return int(head_dim * share)


def _attention_kinds(raw: dict[str, Any], num_layers: int) -> tuple[AttentionKind, ...]:
    """`layer_types`, or `compress_ratios` (0, 4, 128) whose entries after the last layer belong to draft blocks."""
    name = "compress_ratios" if raw.get("layer_types") is None else "layer_types"
    entries = raw.get(name)
    if entries is None:
        raise ValueError("config: key 'compress_ratios' is missing")
    require(isinstance(entries, list) and len(entries) >= num_layers, name, entries, f"a list of {num_layers} entries")
    kinds = RATIO_KINDS if name == "compress_ratios" else {kind.value: kind for kind in AttentionKind}
    for layer_id, entry in enumerate(entries[:num_layers]):
        known = type(entry) in (int, str) and entry in kinds
        require(known, f"{name}[{layer_id}]", entry, ", ".join(map(str, kinds)))
    return tuple(kinds[entry] for entry in entries[:num_layers])


def _hash_layers(raw: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """`mlp_layer_types`, or the first `num_hash_layers` layers."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        count = raw.get("num_hash_layers")
        if count is None:
            raise ValueError("config: key 'num_hash_layers' is missing")
        require(is_integer(count) and count >= 0, "num_hash_layers", count, "a non-negative integer")
        return tuple(layer_id < count for layer_id in range(num_layers))
    require(
        isinstance(kinds, list) and len(kinds) >= num_layers,
        "mlp_layer_types",
        kinds,
        f"a list of {num_layers} entries",
    )
    for layer_id, entry in enumerate(kinds[:num_layers]):
        require(entry in ("hash_moe", "moe"), f"mlp_layer_types[{layer_id}]", entry, "'hash_moe' or 'moe'")
    return tuple(entry == "hash_moe" for entry in kinds[:num_layers])


def _eos_token_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id", 1)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    require(all(type(i) is int for i in ids), "eos_token_id", value, "a token id or a list of them")
    return tuple(ids)


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling:
    """YaRN of the layers with compressed KV: `rope_scaling`, or `rope_parameters` (nested in `compress`, or flat)."""
    name = "rope_scaling" if raw.get("rope_scaling") is not None else "rope_parameters"
    scaling = check_object(raw.get(name) or {}, name)
    if name == "rope_parameters":
        scaling = check_object(scaling.get("compress", scaling), f"{name}.compress")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeScaling(factor=1.0)
    require(kind == "yarn", f"{name}.rope_type", kind, "'yarn' or 'default'")
    factor = scaling.get("attention_factor", 1.0)
    require(factor in (None, 1.0), f"{name}.attention_factor", factor, "1.0")
    return build(RopeScaling, scaling, f"{name}.")
