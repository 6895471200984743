"""What the configurations of V4 and V4.1 have in common: names and defaults of the public config.json."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.config.parts import RopeScaling


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Fields of both text models (spec: model, sections 1 and 12). Each model's own class checks them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    moe_intermediate_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int = 128
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    norm_topk_prob: bool = True
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int = 0

    @property
    def hc_mix_size(self) -> int:
        """Rows of hc_*_fn: pre, post and the hc x hc combination."""
        return self.hc_mult * (2 + self.hc_mult)
