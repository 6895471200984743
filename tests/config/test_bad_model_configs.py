"""A config.json that is wrong is refused by name: contradictions, values of other types, sizes that no model has."""

import copy
import json
from dataclasses import replace

import pytest

from deepinfer.config.model import ModelConfig
from deepinfer.config.model_v4 import ModelConfigV4
from tests.config.released import FLASH, RAW, flat_form
from tests.configs import tiny_config

NAN, INFINITY = float("nan"), float("inf")
# key, value, and what the message must say
REFUSED = [
    ("vocab_size", 0, "vocab_size is 0, allowed: a positive integer"),
    ("hidden_size", 100, "hidden_size is 100, allowed: a multiple of 32"),
    ("head_dim", 48, "head_dim is 48, allowed: a multiple of 32"),
    ("index_head_dim", 40, "index_head_dim is 40"),
    ("qk_rope_head_dim", 15, "qk_rope_head_dim is 15, allowed: even"),
    ("qk_rope_head_dim", 128, "qk_rope_head_dim is 128"),
    ("q_lora_rank", 65, "q_lora_rank is 65"),
    ("moe_intermediate_size", 33, "moe_intermediate_size is 33"),
    ("o_groups", 3, "o_groups is 3, allowed: a divisor of num_attention_heads = 4"),
    ("o_lora_rank", 8, "o_lora_rank is 8"),
    ("num_experts_per_tok", 9, "num_experts_per_tok is 9, allowed: at most n_routed_experts = 8"),
    ("n_shared_experts", 2, "n_shared_experts is 2, allowed: 1"),
    ("scoring_func", "softmax", "scoring_func is 'softmax', allowed: 'sqrtsoftplus'"),
    ("topk_method", "greedy", "topk_method is 'greedy'"),
    ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    ("attention_bias", True, "attention_bias is True"),
    ("tie_word_embeddings", True, "tie_word_embeddings is True"),
    ("compress_ratios", (0, 2, 2, 2, 2, 1, 1, 1, 1), "compress_ratios"),
    ("compress_ratios", (0, 4, 2, 2, 2, 1, 1, 1, 1, 1), "compress_ratios"),
    ("compress_ratios", (0, 2, 2, 1, 2, 1, 1, 1, 1, 1), "compress_ratios of layer 4 is 2, its kv source 3 has 1"),
    ("compress_ratios", (2, 2, 2, 2, 2, 1, 1, 1, 1, 1), "layer 0 has compress_ratios 2 but no kv_source_layer_ids"),
    ("kv_source_layer_ids", (3, 1, 5), "kv_source_layer_ids"),
    ("kv_source_layer_ids", (0, 1, 3, 5), "kv_source_layer_ids is 0"),
    ("kv_source_layer_ids", (1, 2, 3, 5), "kv_source_layer_ids"),
    ("kv_source_layer_ids", (1, 3, 5, 10), "kv_source_layer_ids is 10, allowed: 0..9"),
    ("index_source_layer_ids", (1, 3, 5, 9, 7), "index_source_layer_ids"),
    ("index_source_layer_ids", (1, 5, 7, 9), "kv_source_layer_ids"),
    ("candidate_source_layer_id", 6, "candidate_source_layer_id is 6, allowed: negative, or one of"),
    ("candidate_source_layer_id", 7, "candidate_source_layer_id is 7, allowed: the last kv_source_layer_ids entry 5"),
    (
        "engram_num_embeddings",
        (272, 349),
        r"engram_num_embeddings (layer 3) is 349, allowed: the sum of its primes, 348",
    ),
    ("engram_num_embeddings", (272,), "engram_num_embeddings is [272], allowed: one entry for each of"),
    ("engram_compressed_vocab_size", 0, "engram_compressed_vocab_size is 0"),
    ("engram_head_dim", 40, "engram_head_dim is 40"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_contradictions_are_refused_by_name(key, value, message):
    with pytest.raises(ValueError) as error:
        tiny_config(**{key: value})
    assert str(error.value).startswith("config: ") and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dspark_target_layer_ids", (8, 10), "dspark_target_layer_ids is 10, allowed: 0..9"),
        ("dspark_noise_token_id", 512, "dspark_noise_token_id is 512, allowed: 0..511"),
        ("compress_ratios", (0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 1), "allowed: 0 (draft layer)"),
    ],
)
def test_draft_contradictions(key, value, message):
    with pytest.raises(ValueError) as error:
        tiny_config(2, **{key: value})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["text_config"].pop("head_dim"), "key 'head_dim' is missing"),
        (lambda raw: raw["text_config"].update(hidden_size="5120"), "hidden_size is '5120', allowed: an integer"),
        (lambda raw: raw["text_config"].update(hidden_size=True), "hidden_size is True, allowed: an integer"),
        (lambda raw: raw["text_config"].update(rope_theta="1e4"), "rope_theta is '1e4', allowed: a number"),
        (lambda raw: raw["text_config"].update(compress_ratios=5), "compress_ratios is 5, allowed: a list of integers"),
        (lambda raw: raw["text_config"].update(engram_layer_ids=["1"]), "engram_layer_ids"),
        (
            lambda raw: raw["text_config"]["rope_scaling"].update(rope_type="linear"),
            "rope_scaling.rope_type is 'linear'",
        ),
        (
            lambda raw: raw["quantization_config"].update(weight_block_size=[128, 128]),
            "weight_block_size is [128, 128]",
        ),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, change, message):
    raw = copy.deepcopy(RAW)
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError) as error:
        ModelConfig.from_file(tmp_path)
    assert message in str(error.value) and str(error.value).startswith("config: ")


# key of text_config, value, what the message must say
WRONG_VALUES = [
    ("num_key_value_heads", 8, "num_key_value_heads is 8, allowed: 1"),
    ("norm_topk_prob", "false", "norm_topk_prob is 'false', allowed: true or false"),
    ("norm_topk_prob", 1, "norm_topk_prob is 1, allowed: true or false"),
    ("rms_norm_eps", NAN, "rms_norm_eps is nan, allowed: a number"),
    ("rms_norm_eps", -1, "rms_norm_eps is -1, allowed: a positive"),
    ("rms_norm_eps", INFINITY, "rms_norm_eps is inf, allowed: a number"),
    ("swiglu_limit", -1, "swiglu_limit is -1, allowed: a positive"),
    ("routed_scaling_factor", NAN, "routed_scaling_factor is nan, allowed: a number"),
    ("rope_theta", 0, "rope_theta is 0, allowed: a positive"),
    ("compress_rope_theta", -1.5, "compress_rope_theta is -1.5, allowed: a positive number"),
    ("hc_sinkhorn_iters", 0, "hc_sinkhorn_iters is 0, allowed: a positive integer"),
    ("hc_sinkhorn_iters", 10**9, "hc_sinkhorn_iters is 1000000000, allowed: at most 1000"),
    ("hc_eps", NAN, "hc_eps is nan, allowed: a number"),
    ("hidden_act", 3, "hidden_act is 3, allowed: a string"),
    ("hidden_size", None, "hidden_size is None, allowed: an integer"),
    ("hidden_size", 10**30, "hidden_size is 1000000000000000000000000000000, allowed: an integer"),
    ("hidden_size", 5120.0, "hidden_size is 5120.0, allowed: an integer"),
    ("compress_ratios", [True] * 43, "allowed: a list of integers"),
    ("kv_source_layer_ids", {"2": 2}, "kv_source_layer_ids is {'2': 2}, allowed: a list of integers"),
    ("candidate_block_size", 0, "candidate_block_size is 0, allowed: a positive integer"),
    ("candidate_topk_blocks", 0, "candidate_topk_blocks is 0, allowed: a positive integer"),
    ("engram_pad_token_id", 129280, "engram_pad_token_id is 129280, allowed: 0..129279"),
    ("engram_pad_token_id", -1, "engram_pad_token_id is -1, allowed: 0..129279"),
    ("engram_layer_ids", [1, 99], "engram_layer_ids is 99, allowed: 0..39"),
    ("engram_layer_ids", [14, 1], "engram_layer_ids is [14, 1], allowed: strictly increasing layer ids"),
    ("engram_max_ngram_size", 1, "engram_max_ngram_size is 1, allowed: 2..4"),
    ("engram_max_ngram_size", 5, "engram_max_ngram_size is 5, allowed: 2..4"),
    ("engram_vocab_size", 10**15, "engram_vocab_size is 1000000000000000, allowed: 1..2147483647"),
    ("engram_n_heads", 10**9, "engram_n_heads is 1000000000, allowed: 1..256"),
    ("engram_head_dim", 0, "engram_head_dim is 0, allowed: a positive multiple of 32"),
    ("engram_compressed_vocab_size", 129281, "engram_compressed_vocab_size is 129281, allowed: 1..129280"),
    ("num_nextn_predict_layers", -3, "num_nextn_predict_layers is -3, allowed: a non-negative integer"),
    ("dspark_block_size", -10, "dspark_block_size is -10, allowed: a positive integer"),
    ("dspark_markov_rank", 0, "dspark_markov_rank is 0, allowed: a positive integer"),
    ("dspark_num_experts_per_tok", 129, "allowed: at most dspark_n_routed_experts = 128"),
    ("dspark_target_layer_ids", [], "dspark_target_layer_ids is [], allowed: at least one layer id"),
    ("rope_scaling", "yarn", "rope_scaling is 'yarn', allowed: an object"),
    ("rope_scaling", {"factor": "16"}, "rope_scaling.factor is '16', allowed: a number"),
    ("rope_scaling", {"factor": 0}, "rope_scaling.factor is 0, allowed: a number >= 1"),
    ("rope_scaling", {"factor": NAN}, "rope_scaling.factor is nan, allowed: a number"),
    ("rope_scaling", {"beta_fast": -1}, "rope_scaling.beta_fast is -1, allowed: a positive"),
    (
        "rope_scaling",
        {"original_max_position_embeddings": 0},
        "rope_scaling.original_max_position_embeddings is 0, allowed: a positive integer",
    ),
]
# path to a value outside text_config, value, what the message must say
WRONG_ELSEWHERE = [
    (["text_config"], None, "text_config is None, allowed: an object"),
    (["text_config"], [], "text_config is [], allowed: an object"),
    (["vision_config"], 3, "vision_config is 3, allowed: an object"),
    (["vision_config"], {}, "key 'vision_config.num_hidden_layers' is missing"),
    (["vision_config", "patch_size"], "14", "vision_config.patch_size is '14', allowed: an integer"),
    (["vision_config", "downsample_ratio"], 0, "vision_config.downsample_ratio is 0, allowed: a positive integer"),
    (["vision_config", "max_wh_ratio"], -1.0, "vision_config.max_wh_ratio is -1.0, allowed: a positive number"),
    (["vision_config", "max_wh_ratio"], "wide", "vision_config.max_wh_ratio is 'wide', allowed: a number or null"),
    (["vision_config", "num_attention_heads"], 15, "vision_config.hidden_size is 1024, allowed: a multiple of"),
    (["quantization_config"], [1], "quantization_config is [1], allowed: an object"),
    (
        ["quantization_config", "weight_block_size"],
        32,
        "quantization_config.weight_block_size is 32, allowed: [32, 32]",
    ),
    (["quantization_config", "quant_method"], "awq", "quantization_config.quant_method is 'awq', allowed: 'fp8'"),
    (["quantization_config", "scale_fmt"], "fp32", "quantization_config.scale_fmt is 'fp32', allowed: 'ue8m0'"),
    (["quantization_config", "expert_dtype"], "int4", "quantization_config.expert_dtype is 'int4', allowed: 'fp4'"),
    (["eos_token_id"], 129280, "eos_token_id is 129280, allowed: 0..129279"),
    (["eos_token_id"], [1], "eos_token_id is [1], allowed: an integer"),
    (["bos_token_id"], -1, "bos_token_id is -1, allowed: 0..129279"),
    (["pad_token_id"], None, "pad_token_id is None, allowed: an integer"),
    (["image_token_id"], 129280, "image_token_id is 129280, allowed: -1 (none) or 0..129279"),
    (["model_type"], ["deepseek_v41"], "model_type is ['deepseek_v41'], allowed: 'deepseek_v41'"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [*((["text_config", key], value, message) for key, value, message in WRONG_VALUES), *WRONG_ELSEWHERE],
    ids=str,
)
def test_wrong_values_in_a_file_are_refused_by_name(tmp_path, path, value, message):
    """Through the file, so that NaN and Infinity, which Python's JSON reader takes, are among them."""
    raw = copy.deepcopy(RAW)
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError) as error:
        ModelConfig.from_file(tmp_path)
    assert str(error.value).startswith("config: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_flat_form_is_checked_too():
    raw = flat_form(RAW)
    for key, value in (("expert_dtype", "int4"), ("rope_factor", "16"), ("vision_dim", 0), ("norm_eps", -1)):
        with pytest.raises(ValueError, match="config: "):
            ModelConfig.from_dict({**raw, key: value})
    assert ModelConfig.from_dict({**raw, "expert_dtype": "fp4", "scale_fmt": "ue8m0"}) == FLASH


@pytest.mark.parametrize("config_class", [ModelConfig, ModelConfigV4])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"[1]", "holds list, allowed: a JSON object"),
        (b"null", "holds NoneType, allowed: a JSON object"),
        ('{"model_type": "\u00fc"}'.encode("latin-1"), "is not UTF-8"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
    ids=["truncated", "list", "null", "latin-1", "deep", "long number"],
)
def test_files_that_hold_no_object_are_named(tmp_path, config_class, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError) as error:
        config_class.from_file(tmp_path)
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no config.json at"):
        ModelConfig.from_file(tmp_path)


def test_the_config_is_checked_whenever_it_is_made():
    with pytest.raises(ValueError, match="o_groups"):
        replace(FLASH, o_groups=7)


@pytest.mark.parametrize("value", [2**31, 2**62])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "vocab_size hidden_size num_hidden_layers moe_intermediate_size num_attention_heads head_dim q_lora_rank"
        ).split(),
        *("o_lora_rank n_routed_experts index_n_heads index_head_dim index_topk sliding_window hc_mult").split(),
        *("hc_sinkhorn_iters max_position_embeddings candidate_topk_blocks candidate_block_size").split(),
        *("engram_head_dim num_nextn_predict_layers dspark_block_size dspark_markov_rank").split(),
        *("dspark_n_routed_experts routed_scaling_factor rms_norm_eps hc_eps").split(),
    ],
)
def test_absurd_sizes_are_refused_at_once(name: str, value: int) -> None:
    raw = tiny_config(2).to_dict()
    raw["text_config"][name] = value
    with pytest.raises(ValueError, match=rf"^config: {name} is {value}, allowed: at most") as error:
        ModelConfig.from_dict(raw)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("routed_scaling_factor", 1e300),
        ("swiglu_limit", 1e300),
        ("rope_theta", 1e300),
        ("rope_theta", 1),
        ("compress_rope_theta", 1),
        ("compress_rope_theta", 0.5),
        ("max_position_embeddings", 1),
    ],
)
def test_values_that_break_the_arithmetic_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^config: {name} is"):
        tiny_config(**{name: value})
