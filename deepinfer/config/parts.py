"""The pieces of a model configuration: layer plans, rope scaling, the image tower (spec: model, section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ValueError naming the config key unless `condition` holds."""
    if not condition:
        raise ValueError(f"config: {name} is {value!r}, allowed: {allowed}")


class LayerMode(Enum):
    """What a layer's attention computes itself and what it borrows from its owners."""

    SWA = "swa"  # sliding window only
    FULL = "full"  # writes compressed KV and index keys, selects for itself
    REINDEX = "reindex"  # reads its owner's KV and index keys, selects again with its own index queries
    REUSE = "reuse"  # reads its owner's KV with its index owner's selection


@dataclass(frozen=True)
class LayerPlan:
    """The sharing relations of one layer, derived from the config."""

    layer_id: int
    mode: LayerMode
    compress_ratio: int  # 0: no compressed KV
    kv_owner: int  # layer whose compressed KV is read; -1 for SWA
    index_owner: int  # layer whose selection is used; -1 for SWA
    writes_candidates: bool  # keeps the candidate blocks of its own scores
    reads_candidates: bool  # may select only inside the candidate blocks
    has_engram: bool

    @property
    def is_kv_source(self) -> bool:
        return self.mode is LayerMode.FULL

    @property
    def is_index_source(self) -> bool:
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters; applied to every rotation of a layer whose compress ratio is above 0."""

    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536
    rope_type: str = "yarn"


@dataclass(frozen=True)
class VisionConfig:
    """The image tower (spec: model, section 9)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None
