"""What a value of config.json may be: types by the annotations of the dataclass fields, ranges by name.

Every function raises ValueError in one line that names the key and the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.config.model import ModelConfig

INT_LIMIT = 2**63
MAX_BUCKETS = 2**31 - 1  # of one Engram head; its primes are searched from here
MAX_ENGRAM_HEADS = 256
NGRAM_SIZES = range(2, 5)  # the hash has multipliers for four tokens

# Most that a key may be: far above any model, and small enough that nothing overflows or hangs before it is refused.
LIMITS: dict[str, int | float] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "num_hidden_layers": 1 << 12,
    "moe_intermediate_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "head_dim": 1 << 14,
    "q_lora_rank": 1 << 17,
    "o_lora_rank": 1 << 17,
    "n_routed_experts": 1 << 16,
    "index_n_heads": 1 << 12,
    "index_head_dim": 1 << 14,
    "index_topk": 1 << 20,
    "sliding_window": 1 << 20,
    "candidate_topk_blocks": 1 << 30,
    "candidate_block_size": 1 << 20,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
    "engram_head_dim": 1 << 14,
    "num_nextn_predict_layers": 1 << 10,
    "dspark_block_size": 1 << 10,
    "dspark_markov_rank": 1 << 17,
    "dspark_n_routed_experts": 1 << 16,
    "sparse_ratio": 1 << 10,
    "heavy_ratio": 1 << 10,
    "patch_size": 1 << 10,
    "downsample_ratio": 1 << 6,
    "max_image_tokens": 1 << 20,
    "min_pixels": 1 << 40,
    "routed_scaling_factor": 1e4,
    "swiglu_limit": 1e30,
    "rms_norm_eps": 1.0,
    "hc_eps": 1.0,
    "initializer_range": 1e4,
    "rope_theta": 1e15,
    "compress_rope_theta": 1e15,
    "factor": 1e6,
    "beta_fast": 1e6,
    "beta_slow": 1e6,
    "max_wh_ratio": 1e6,
}


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ValueError naming the config key unless `condition` holds."""
    if not condition:
        raise ValueError(f"config: {name} is {value!r}, allowed: {allowed}")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < INT_LIMIT


def is_number(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


TYPES = {
    "int": (is_integer, "an integer"),
    "float": (is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "tuple[int, ...]": (
        lambda value: isinstance(value, tuple) and all(map(is_integer, value)),
        "a list of integers",
    ),
}


def check_types(config: Any, prefix: str = "") -> None:
    """Every field of a config dataclass has the type of its annotation; numbers are finite and within LIMITS."""
    for field in fields(config):
        kind = str(field.type)
        optional = kind.endswith(" | None")
        value = getattr(config, field.name)
        if kind.removesuffix(" | None") in TYPES and not (optional and value is None):
            fits, allowed = TYPES[kind.removesuffix(" | None")]
            require(fits(value), prefix + field.name, value, allowed + (" or null" if optional else ""))
            limit = LIMITS.get(field.name)
            require(limit is None or value <= limit, prefix + field.name, value, f"at most {limit}")


def check_object(value: Any, name: str) -> dict[str, Any]:
    """`value`, which must be a JSON object."""
    require(isinstance(value, dict), name, value, "an object")
    return value


def check_positive(config: Any, names: Iterable[str], prefix: str = "") -> None:
    """Fields that must be above 0; their types have been checked."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, prefix + name, value, f"a positive {'integer' if isinstance(value, int) else 'number'}")


def check_equal(config: Any, values: dict[str, Any], prefix: str = "") -> None:
    """Keys that have one value only in the models served here."""
    for name, allowed in values.items():
        value = config.get(name, allowed) if isinstance(config, dict) else getattr(config, name)
        shown = str(allowed).lower() if isinstance(allowed, bool) else repr(allowed)
        require(type(value) is type(allowed) and value == allowed, prefix + name, value, shown)


def check_token_ids(config: Any, names: Iterable[str]) -> None:
    """Fields that hold a token id."""
    for name in names:
        value = getattr(config, name)
        require(0 <= value < config.vocab_size, name, value, f"0..{config.vocab_size - 1} (below vocab_size)")


def check_layer_ids(config: Any, name: str) -> None:
    """A field that holds layer ids."""
    ids = getattr(config, name)
    require(list(ids) == sorted(set(ids)), name, list(ids), "strictly increasing layer ids")
    for layer_id in ids:
        require(0 <= layer_id < config.num_hidden_layers, name, layer_id, f"0..{config.num_hidden_layers - 1}")


def check_common(config: Any) -> None:
    """What DeepSeek-V4 and V4.1 share: dimensions, constants and the relations between them."""
    check_positive(
        config,
        "vocab_size hidden_size num_hidden_layers moe_intermediate_size num_attention_heads head_dim qk_rope_head_dim "
        "q_lora_rank o_lora_rank o_groups n_routed_experts num_experts_per_tok index_n_heads index_head_dim index_topk "
        "sliding_window hc_mult hc_sinkhorn_iters max_position_embeddings rms_norm_eps hc_eps swiglu_limit "
        "routed_scaling_factor rope_theta compress_rope_theta".split(),
    )
    check_equal(
        config,
        {
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "n_shared_experts": 1,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    )
    for name in ("rope_theta", "compress_rope_theta"):
        require(getattr(config, name) > 1, name, getattr(config, name), "a number above 1")
    positions = config.max_position_embeddings
    require(positions >= 2, "max_position_embeddings", positions, "at least 2: one of the prompt, one of the answer")
    experts, heads = config.n_routed_experts, config.num_attention_heads
    require(
        config.num_experts_per_tok <= experts,
        "num_experts_per_tok",
        config.num_experts_per_tok,
        f"at most n_routed_experts = {experts}",
    )
    require(heads % config.o_groups == 0, "o_groups", config.o_groups, f"a divisor of num_attention_heads = {heads}")


# ------------------------------------------------------------------ DeepSeek-V4.1


def check_model(config: ModelConfig) -> None:
    """Everything about a V4.1 config except the plan of its layers."""
    check_types(config)
    check_common(config)
    check_token_ids(config, ("bos_token_id", "eos_token_id", "pad_token_id"))
    image = config.image_token_id
    require(-1 <= image < config.vocab_size, "image_token_id", image, f"-1 (none) or 0..{config.vocab_size - 1}")
    require(config.initializer_range >= 0, "initializer_range", config.initializer_range, "a number >= 0")
    require(config.weight_block_size == 32, "weight_block_size", config.weight_block_size, "32")
    require(
        config.qk_rope_head_dim % 2 == 0 and config.qk_rope_head_dim <= min(config.head_dim, config.index_head_dim),
        "qk_rope_head_dim",
        config.qk_rope_head_dim,
        "even and at most head_dim and index_head_dim",
    )
    for name in ("head_dim", "index_head_dim", "hidden_size", "q_lora_rank", "moe_intermediate_size"):
        require(getattr(config, name) % 32 == 0, name, getattr(config, name), "a multiple of 32 (quantisation block)")
    require(
        config.o_groups * config.o_lora_rank % 32 == 0,
        "o_lora_rank",
        config.o_lora_rank,
        "o_groups * o_lora_rank % 32 == 0",
    )
    _check_sharing(config)
    _check_engram(config)
    _check_draft(config)


def _check_sharing(config: ModelConfig) -> None:
    drafts = config.num_nextn_predict_layers
    require(drafts >= 0, "num_nextn_predict_layers", drafts, "a non-negative integer")
    expected = config.num_hidden_layers + drafts
    require(
        len(config.compress_ratios) == expected,
        "compress_ratios",
        f"{len(config.compress_ratios)} entries",
        f"{expected} entries (num_hidden_layers + num_nextn_predict_layers)",
    )
    for layer_id, ratio in enumerate(config.compress_ratios):
        require(ratio in (0, 1, 2), f"compress_ratios[{layer_id}]", ratio, "0, 1 or 2")
        if layer_id >= config.num_hidden_layers:
            require(ratio == 0, f"compress_ratios[{layer_id}]", ratio, "0 (draft layer)")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        check_layer_ids(config, name)
        for layer_id in getattr(config, name):
            ratio = config.compress_ratios[layer_id]
            require(ratio > 0, name, layer_id, "layers whose compress_ratios entry is above 0")
    for layer_id in config.kv_source_layer_ids:
        present = layer_id in config.index_source_layer_ids
        require(present, "kv_source_layer_ids", layer_id, "also in index_source_layer_ids")
    check_positive(config, ("candidate_topk_blocks", "candidate_block_size"))
    source = config.candidate_source_layer_id
    if source >= 0:
        require(
            source in config.index_source_layer_ids,
            "candidate_source_layer_id",
            source,
            f"negative, or one of index_source_layer_ids {list(config.index_source_layer_ids)}",
        )
        # Decoder depth is stated by no key: the three places that imply it must agree.
        require(
            source == config.num_encoder_layers,
            "candidate_source_layer_id",
            source,
            f"the last kv_source_layer_ids entry {config.num_encoder_layers}",
        )


def _check_engram(config: ModelConfig) -> None:
    require(
        len(config.engram_num_embeddings) == len(config.engram_layer_ids),
        "engram_num_embeddings",
        list(config.engram_num_embeddings),
        f"one entry for each of engram_layer_ids {list(config.engram_layer_ids)}",
    )
    if not config.engram_layer_ids:
        return
    check_layer_ids(config, "engram_layer_ids")
    check_token_ids(config, ("engram_pad_token_id",))
    for name, allowed in (
        ("engram_max_ngram_size", NGRAM_SIZES),
        ("engram_n_heads", range(1, MAX_ENGRAM_HEADS + 1)),
        ("engram_vocab_size", range(1, MAX_BUCKETS + 1)),
        ("engram_compressed_vocab_size", range(1, config.vocab_size + 1)),
    ):
        require(getattr(config, name) in allowed, name, getattr(config, name), f"{allowed[0]}..{allowed[-1]}")
    width = config.engram_head_dim
    require(width > 0 and width % 32 == 0, "engram_head_dim", width, "a positive multiple of 32")
    for layer_id, rows, primes in zip(
        config.engram_layer_ids, config.engram_num_embeddings, config.engram_primes, strict=True
    ):
        require(
            sum(primes) == rows,
            f"engram_num_embeddings (layer {layer_id})",
            rows,
            f"the sum of its primes, {sum(primes)}",
        )


def _check_draft(config: ModelConfig) -> None:
    if not config.num_nextn_predict_layers:
        return
    check_positive(
        config, "dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok".split()
    )
    chosen, experts = config.dspark_num_experts_per_tok, config.dspark_n_routed_experts
    require(chosen <= experts, "dspark_num_experts_per_tok", chosen, f"at most dspark_n_routed_experts = {experts}")
    check_layer_ids(config, "dspark_target_layer_ids")
    require(len(config.dspark_target_layer_ids) > 0, "dspark_target_layer_ids", [], "at least one layer id")
    check_token_ids(config, ("dspark_noise_token_id",))
