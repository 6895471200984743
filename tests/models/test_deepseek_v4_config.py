"""DeepSeek-V4's config.json and tensor names: the released spelling, transformers' spelling, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.config.model_v4 import AttentionKind, ModelConfigV4
from deepinfer.config.parts import RopeScaling
from deepinfer.models.deepseek_v4_weights import collect_weights, load_weights, parameter_shapes, place_of
from deepinfer.models.registry import load_model

# The released DeepSeek-V4-Flash config.json, without keys that say nothing about the text model.
V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def test_released_config() -> None:
    config = ModelConfigV4.from_dict(V4_FLASH)
    kinds = [plan.kind for plan in config.layers]
    assert [kinds.count(kind) for kind in AttentionKind] == [2, 21, 20]
    assert kinds[:4] == [AttentionKind.SLIDING] * 2 + [AttentionKind.SPARSE, AttentionKind.HEAVY]
    assert [plan.compress_ratio for plan in config.layers[:5]] == [0, 0, 4, 128, 4]
    assert [plan.group_span for plan in config.layers[:5]] == [0, 0, 8, 128, 8]
    assert [plan.hash_routing for plan in config.layers[:5]] == [True, True, True, False, False]
    assert config.rope_scaling == RopeScaling(factor=16, original_max_position_embeddings=65536)
    assert config.quantized and config.eos_token_ids == (1,)


def test_transformers_reads_the_released_config_alike() -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.DeepseekV4Config(**V4_FLASH).to_dict()
    assert ModelConfigV4.from_dict(saved) == ModelConfigV4.from_dict(V4_FLASH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None}, "config: head_dim is None, allowed: an integer"),
        ({"compress_ratios": [0, 4, 2] + [0] * 41}, r"config: compress_ratios\[2\] is 2, allowed: 0, 4, 128"),
        ({"compress_ratios": [0, 4]}, "config: compress_ratios is .* a list of 43 entries"),
        ({"layer_types": ["full_attention"] * 43}, r"config: layer_types\[0\] is 'full_attention', allowed: sliding"),
        ({"mlp_layer_types": ["dense"] * 43}, r"config: mlp_layer_types\[0\] is 'dense'"),
        ({"num_hash_layers": -1}, "config: num_hash_layers is -1"),
        ({"scoring_func": "softmax"}, "config: scoring_func is 'softmax', allowed: 'sqrtsoftplus'"),
        ({"tie_word_embeddings": True}, "config: tie_word_embeddings is True, allowed: false"),
        ({"num_experts_per_tok": 300}, "config: num_experts_per_tok is 300, allowed: at most n_routed_experts = 256"),
        ({"o_groups": 7}, "config: o_groups is 7, allowed: a divisor of num_attention_heads = 64"),
        ({"qk_rope_head_dim": 256}, "config: qk_rope_head_dim is 256, allowed: even and at most index_head_dim = 128"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "config: rope_scaling.rope_type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1.2}}, "config: rope_scaling.attention_factor is 1.2"),
        ({"eos_token_id": "</s>"}, "config: eos_token_id is '</s>'"),
        ({"vocab_size": 0}, "config: vocab_size is 0, allowed: a positive integer"),
        ({"num_hidden_layers": "43"}, "config: num_hidden_layers is '43', allowed: an integer"),
        ({"num_hidden_layers": 10**15}, "config: compress_ratios is .* a list of"),
        ({"num_key_value_heads": 8}, "config: num_key_value_heads is 8, allowed: 1"),
        ({"norm_topk_prob": "false"}, "config: norm_topk_prob is 'false', allowed: true or false"),
        ({"norm_topk_prob": False}, "config: norm_topk_prob is False, allowed: true"),
        ({"rms_norm_eps": float("nan")}, "config: rms_norm_eps is nan, allowed: a number"),
        ({"rms_norm_eps": -1}, "config: rms_norm_eps is -1, allowed: a positive"),
        ({"swiglu_limit": -1.0}, "config: swiglu_limit is -1.0, allowed: a positive number"),
        ({"hc_sinkhorn_iters": 0}, "config: hc_sinkhorn_iters is 0, allowed: a positive integer"),
        ({"rope_theta": 0}, "config: rope_theta is 0, allowed: a positive"),
        ({"rope_scaling": "yarn"}, "config: rope_scaling is 'yarn', allowed: an object"),
        ({"rope_scaling": {"type": "yarn", "factor": "16"}}, "config: rope_scaling.factor is '16', allowed: a number"),
        ({"rope_scaling": None, "rope_parameters": [1]}, r"config: rope_parameters is \[1\], allowed: an object"),
        ({"rope_scaling": None, "rope_parameters": {"compress": 1}}, "config: rope_parameters.compress is 1"),
        ({"quantization_config": [1]}, r"config: quantization_config is \[1\], allowed: an object"),
        ({"compress_rates": [4]}, r"config: compress_rates is \[4\], allowed: an object"),
        ({"compress_ratios": [[0]] * 44}, r"config: compress_ratios\[0\] is \[0\], allowed: 0, 4, 128"),
        ({"eos_token_id": [1, 129280]}, "config: eos_token_id is 129280, allowed: 0..129279"),
        ({"bos_token_id": -1}, "config: bos_token_id is -1, allowed: 0..129279"),
    ],
    ids=str,
)
def test_wrong_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfigV4.from_dict({**V4_FLASH, **change})


def test_share_of_rotated_dimensions_is_checked() -> None:
    raw = {key: value for key, value in V4_FLASH.items() if key != "qk_rope_head_dim"}
    assert ModelConfigV4.from_dict({**raw, "partial_rotary_factor": 0.125}).qk_rope_head_dim == 64
    with pytest.raises(ValueError, match="config: partial_rotary_factor is 'half', allowed: a number"):
        ModelConfigV4.from_dict({**raw, "partial_rotary_factor": "half"})


@pytest.mark.parametrize("key", ["vocab_size", "qk_rope_head_dim", "compress_ratios", "num_hash_layers"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"config: key '{key}' is missing"):
        ModelConfigV4.from_dict({name: value for name, value in V4_FLASH.items() if name != key})


TINY = {
    **V4_FLASH,
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "quantization_config": None,
}
CONFIG = ModelConfigV4.from_dict(TINY)


def public_tensors() -> dict[str, torch.Tensor]:
    """A checkpoint in the public names: one tensor an expert, w1 and w3 apart."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(CONFIG).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("tid2eid"):
            value = torch.randint(CONFIG.n_routed_experts, shape, generator=generator)
        parts = {name: value}
        if ".w13." in name:
            gate, up = value.chunk(2, dim=-2)
            parts = {name.replace("w13", "w1"): gate, name.replace("w13", "w3"): up}
        for part, tensor in parts.items():
            if ".experts." in part:
                for expert, matrix in enumerate(tensor):
                    tensors[part.replace(".experts.", f".experts.{expert}.")] = matrix.contiguous()
            else:
                tensors[part] = tensor.contiguous()
    return tensors


def test_public_names_are_read(tmp_path: Path) -> None:
    """The names below are spelled out from the published format, not from the code."""
    tensors = public_tensors()
    assert {
        "embed.weight",
        "head.weight",
        "norm.weight",
        "hc_head_fn",
        "hc_head_base",
        "hc_head_scale",
        "layers.0.attn_norm.weight",
        "layers.0.attn.kv_norm.weight",
        "layers.0.attn.attn_sink",
        "layers.0.ffn.gate.tid2eid",
        "layers.0.hc_ffn_scale",
        "layers.1.attn.compressor.ape",
        "layers.1.attn.compressor.norm.weight",
        "layers.1.attn.compressor.wgate.weight",
        "layers.1.attn.indexer.compressor.wkv.weight",
        "layers.1.attn.indexer.weights_proj.weight",
        "layers.1.attn.indexer.wq_b.weight",
        "layers.1.ffn.gate.bias",
        "layers.2.attn.compressor.wkv.weight",
        "layers.2.ffn.experts.3.w2.weight",
        "layers.2.ffn.shared_experts.w3.weight",
    } <= tensors.keys()
    save_file({**tensors, "mtp.0.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, CONFIG)
    assert weights.keys() == parameter_shapes(CONFIG).keys()
    assert torch.equal(weights["layers.1.attn.compressor.ape"], tensors["layers.1.attn.compressor.ape"])
    expected = torch.cat((tensors["layers.2.ffn.experts.3.w1.weight"], tensors["layers.2.ffn.experts.3.w3.weight"]))
    assert torch.equal(weights["layers.2.ffn.experts.w13.weight"][3], expected)


def test_state_dict_and_saved_files_give_the_same_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**TINY))
    oracle.save_pretrained(tmp_path)
    from_state = collect_weights(oracle.state_dict().items(), CONFIG, torch.float32)
    from_files = load_weights(tmp_path, CONFIG)
    assert from_state.keys() == from_files.keys() == parameter_shapes(CONFIG).keys()
    assert all(torch.equal(tensor, from_files[name]) for name, tensor in from_state.items())


def test_narrow_models_keep_steering_tensors_wide() -> None:
    weights = collect_weights(public_tensors().items(), CONFIG, torch.bfloat16)
    wide = {name.split(".")[-1] for name, tensor in weights.items() if tensor.dtype == torch.float32}
    assert wide >= {"hc_attn_fn", "hc_head_scale", "attn_sink", "ape", "bias"}
    assert weights["layers.0.attn.q_norm.weight"].dtype == torch.float32
    assert weights["layers.0.attn.wq_a.weight"].dtype == weights["embed.weight"].dtype == torch.bfloat16
    assert weights["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


WQ = "layers.0.attn.wq_a.weight"
TABLE = "layers.0.ffn.gate.tid2eid"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (WQ, None, f"tensor '{WQ}' is missing"),
        (
            "layers.2.ffn.experts.1.w3.weight",
            None,
            r"tensor 'layers.2.ffn.experts.w13.weight' is missing .*or incomplete",
        ),
        (WQ, torch.zeros(8, 31), rf"tensor '{WQ}' has shape \[8, 31\], expected \[8, 32\]"),
        (WQ, torch.zeros(8, 32).to(torch.float8_e4m3fn), f"tensor '{WQ}' has dtype torch.float8_e4m3fn, allowed"),
        ("layers.0.attn.wq_a.scale", torch.zeros(1, 1), "'layers.0.attn.wq_a.scale' is a quantisation scale"),
        ("layers.0.attn.extra.weight", torch.zeros(2), "'layers.0.attn.extra.weight' is in the checkpoint but not in"),
        ("layers.0.ffn.experts.4.w2.weight", torch.zeros(32, 16), "expert 4, allowed: 0..3"),
        ("model.layers.0.self_attn.q_a_proj.weight", torch.zeros(8, 32), "twice, under two spellings"),
        (TABLE, torch.full((32, 2), 4), f"tensor '{TABLE}' names experts outside 0..3"),
        (TABLE, torch.zeros(32, 2), f"tensor '{TABLE}' has dtype torch.float32, allowed for deepseek_v4: int64, int32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_tensors_are_named(name: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = public_tensors()
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(ValueError, match=message):
        collect_weights(tensors.items(), CONFIG, torch.float32)


def test_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "quantization_config": {"quant_method": "fp8"}}))
    save_file(public_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="config: quantization_config is set, allowed for deepseek_v4: float weights"):
        load_model(tmp_path, torch.float32)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    file = tmp_path / "model.safetensors"
    save_file(public_tensors(), file)
    assert len(load_file(file)) == len(public_tensors())
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors is truncated or corrupt"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("model.layers.1.attn.norm.weight", "layers.1.attn.kv_norm.weight"),
        ("model.layers.1.self_attn.compressor.indexer.kv_norm.weight", "layers.1.attn.indexer.compressor.norm.weight"),
        ("model.layers.1.self_attn.compressor.indexer.q_b_proj.weight", "layers.1.attn.indexer.wq_b.weight"),
        ("model.layers.1.self_attn.compressor.position_bias", "layers.1.attn.compressor.ape"),
        ("model.layers.1.post_attention_layernorm.weight", "layers.1.ffn_norm.weight"),
    ],
)
def test_transformers_names(theirs: str, ours: str) -> None:
    assert place_of(theirs, CONFIG) == (ours, ())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_vector_that_is_not_finite_is_refused(value: float) -> None:
    """Refused as it comes, before anything is missing."""
    config = ModelConfigV4.from_dict(V4_FLASH)
    norm = torch.ones(config.hidden_size)
    norm[7] = value
    with pytest.raises(ValueError, match=r"tensor 'norm\.weight' holds NaN or infinity"):
        collect_weights([("norm.weight", norm)], config, torch.float32)
