"""The pieces of a model configuration: layer plans, rope scaling, the image tower (spec: model, section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deepinfer.config.checks import check_equal, check_positive, check_types, require


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

    def __post_init__(self) -> None:
        prefix = "rope_scaling."
        check_types(self, prefix)
        check_equal(self, {"rope_type": "yarn"}, prefix)
        require(self.factor >= 1, f"{prefix}factor", self.factor, "a number >= 1")
        check_positive(self, ("beta_fast", "beta_slow", "original_max_position_embeddings"), prefix)


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

    def __post_init__(self) -> None:
        prefix = "vision_config."
        check_types(self, prefix)
        check_positive(
            self,
            "num_hidden_layers hidden_size num_attention_heads intermediate_size patch_size rope_theta "
            "downsample_ratio max_image_tokens min_pixels".split(),
            prefix,
        )
        if self.max_wh_ratio is not None:
            check_positive(self, ("max_wh_ratio",), prefix)
        heads, width = self.num_attention_heads, self.hidden_size
        # A head's dimension is rotated in two halves, of rows and of columns, in pairs.
        require(width % (4 * heads) == 0, f"{prefix}hidden_size", width, f"a multiple of 4 * {heads} heads")
