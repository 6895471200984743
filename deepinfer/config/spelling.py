"""Reading config.json: its nested form, and the flat inference/config.json with other names for the same keys."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from deepinfer.config.parts import RopeScaling, VisionConfig, require

# inference/config.json's spelling -> config.json's spelling
FLAT_SPELLING = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "route_scale": "routed_scaling_factor",
    "score_func": "scoring_func",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "rope_head_dim": "qk_rope_head_dim",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "max_seq_len": "max_position_embeddings",
}

FLAT_VISION_SPELLING = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}


def text_and_vision(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    known_vision = {f.name for f in fields(VisionConfig)}
    if "text_config" in raw:
        vision = raw.get("vision_config")
        return raw["text_config"], {k: v for k, v in vision.items() if k in known_vision} if vision else None
    flat = {FLAT_VISION_SPELLING[k]: v for k, v in raw.items() if k in FLAT_VISION_SPELLING}
    return raw, flat or None


def rope_scaling(text: dict[str, Any]) -> RopeScaling:
    raw = text.get("rope_scaling")
    if raw is None and "rope_factor" in text:
        raw = {
            "factor": text["rope_factor"],
            "beta_fast": text.get("beta_fast", 32),
            "beta_slow": text.get("beta_slow", 1),
            "original_max_position_embeddings": text.get("original_seq_len", 65536),
        }
    if raw is None:
        return RopeScaling()
    kind = raw.get("rope_type", raw.get("type", "yarn"))
    require(kind == "yarn", "rope_scaling.rope_type", kind, "'yarn'")
    known = {f.name for f in fields(RopeScaling)}
    return RopeScaling(**{k: v for k, v in raw.items() if k in known})


def check_types(known: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        kind = known[name].type
        if kind == "int":
            require(isinstance(value, int) and not isinstance(value, bool), name, value, "an integer")
        elif kind == "float":
            require(isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number")
        elif kind.startswith("tuple"):
            ok = isinstance(value, tuple) and all(isinstance(v, int) for v in value)
            require(ok, name, value, "a list of integers")
