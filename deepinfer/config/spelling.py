"""Reading config.json: its nested form, and the flat inference/config.json with other names for the same keys."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from deepinfer.config.checks import check_object, require
from deepinfer.config.parts import RopeScaling, VisionConfig

Part = TypeVar("Part", RopeScaling, VisionConfig)

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


# The only quantisation there is: FP8 weights in 32 x 32 blocks, FP4 experts, power-of-two scales.
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
FLAT_QUANTIZATION = ("scale_fmt", "expert_dtype")  # inference/config.json has these without the object around them


def read_config(path: str | Path) -> dict[str, Any]:
    """The object in config.json at `path` (a file or the folder that holds it).

    Raises:
        ValueError: there is no such file, or it holds no JSON object; the message names the file.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model: no config.json at {path}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"config: {path} is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: {path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"config: {path} holds {type(raw).__name__}, allowed: a JSON object")
    return raw


def model_type(raw: dict[str, Any]) -> str | None:
    """`model_type`; inference/config.json has none and is known by its spelling of the draft layers."""
    kind = raw.get("model_type", "deepseek_v41" if "n_mtp_layers" in raw else None)
    require(kind is None or isinstance(kind, str), "model_type", kind, "a string")
    return kind


def build(kind: type[Part], raw: dict[str, Any], prefix: str) -> Part:
    """A nested part of the config from its object, whose further keys are ignored. Missing keys are named."""
    for f in fields(kind):
        if f.name not in raw and f.default is MISSING:
            raise ValueError(f"config: key {prefix + f.name!r} is missing")
    known = {f.name for f in fields(kind)}
    return kind(**{key: value for key, value in raw.items() if key in known})


def text_and_vision(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The text model's object and the image tower's, if there is one."""
    if "text_config" in raw:
        vision = raw.get("vision_config")
        text = check_object(raw["text_config"], "text_config")
        return text, None if vision is None else check_object(vision, "vision_config")
    flat = {FLAT_VISION_SPELLING[k]: v for k, v in raw.items() if k in FLAT_VISION_SPELLING}
    return raw, flat or None


def quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """`quantization_config` with the keys that config.json has, or those that the flat form has at its top level."""
    if raw.get("quantization_config") is not None:
        return check_object(raw["quantization_config"], "quantization_config")
    if "text_config" in raw:
        return {}
    return {key: raw[key] for key in FLAT_QUANTIZATION if key in raw}


def rope_scaling(text: dict[str, Any]) -> RopeScaling:
    """YaRN's parameters, from `rope_scaling` or from the flat form's keys."""
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
    raw = check_object(raw, "rope_scaling")
    kind = raw.get("rope_type", raw.get("type", "yarn"))
    require(kind == "yarn", "rope_scaling.rope_type", kind, "'yarn'")
    return build(RopeScaling, raw, "rope_scaling.")
