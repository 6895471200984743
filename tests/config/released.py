"""The config of the released model, in both of its spellings."""

import json
from pathlib import Path

from deepinfer.config.model import ModelConfig

FLASH_FILE = Path(__file__).parents[2] / "deepinfer" / "config" / "deepseek_v41_flash.json"
RAW = json.loads(FLASH_FILE.read_text())
FLASH = ModelConfig.from_file(FLASH_FILE)


def flat_form(raw: dict) -> dict:
    """inference/config.json's spelling of the same values, from section 1's list of its names."""
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "moe_intermediate_size": "moe_inter_dim",
        "num_experts_per_tok": "n_activated_experts",
        "routed_scaling_factor": "route_scale",
        "scoring_func": "score_func",
        "rms_norm_eps": "norm_eps",
        "sliding_window": "window_size",
        "qk_rope_head_dim": "rope_head_dim",
        "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "engram_pad_token_id": "engram_pad_id",
        "num_nextn_predict_layers": "n_mtp_layers",
        "dspark_num_experts_per_tok": "dspark_n_activated_experts",
    }
    vision_names = {
        "num_hidden_layers": "n_layers",
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "intermediate_size": "inter_dim",
        "max_image_tokens": "max_n_token",
    }
    text = dict(raw["text_config"])
    scaling = text.pop("rope_scaling")
    flat = {names.get(key, key): value for key, value in text.items()}
    flat |= {"rope_factor": scaling["factor"], "original_seq_len": scaling["original_max_position_embeddings"]}
    flat |= {"beta_fast": scaling["beta_fast"], "beta_slow": scaling["beta_slow"], "dtype": "fp8"}
    vision = {key: value for key, value in raw["vision_config"].items() if key != "model_type"}
    flat |= {f"vision_{vision_names.get(key, key)}": value for key, value in vision.items()}
    return flat | {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
