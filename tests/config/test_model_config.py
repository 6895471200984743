"""The public config.json, what is derived from it, and how a contradiction is refused (spec: model, section 1)."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.config.model import ModelConfig
from deepinfer.config.model_v4 import ModelConfigV4
from deepinfer.config.parts import LayerMode
from tests.configs import TINY_VISION, tiny_config, tiny_token_map

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


def test_packaged_config_has_the_keys_of_the_released_file():
    assert len(RAW) == 11
    assert len(RAW["text_config"]) == 59 and len(RAW["vision_config"]) == 11
    assert RAW["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    for absent in ("num_hash_layers", "n_group", "topk_group", "layer_types", "n_prefill_layer", "gate_temp"):
        assert absent not in RAW["text_config"]


def test_values_of_the_released_file():
    assert (FLASH.hidden_size, FLASH.num_hidden_layers, FLASH.vocab_size) == (5120, 40, 129280)
    assert FLASH.rms_norm_eps == 1e-20 and FLASH.swiglu_limit == 10.0 and FLASH.routed_scaling_factor == 1.5
    assert FLASH.rope_scaling.factor == 16 and FLASH.rope_scaling.original_max_position_embeddings == 65536
    assert (FLASH.rope_theta, FLASH.compress_rope_theta) == (10000, 160000)
    assert FLASH.image_token_id == 129264 and FLASH.dspark_noise_token_id == 128799
    assert FLASH.vision is not None and FLASH.vision.min_pixels == 544**2 and FLASH.vision.max_wh_ratio is None


def test_every_known_key_is_read_from_the_file():
    """Changing any key of the released text config changes the config or is refused; only these three are ignored."""
    ignored = {"model_type", "attention_dropout", "use_cache"}
    config = tiny_config(2)
    for key in RAW["text_config"].keys() - ignored:
        raw = config.to_dict()
        value = raw["text_config"][key]
        if isinstance(value, bool):
            raw["text_config"][key] = not value
        elif isinstance(value, int | float):
            raw["text_config"][key] = value + 1
        elif isinstance(value, str):
            raw["text_config"][key] = value + "x"
        elif isinstance(value, list):
            raw["text_config"][key] = value[:-1]
        else:
            raw["text_config"][key] = {**value, "factor": value["factor"] + 1}
        try:
            changed = ModelConfig.from_dict(raw)
        except ValueError as error:
            assert str(error).startswith("config: ")
        else:
            assert changed != config, key


def test_flat_spelling_gives_the_same_config():
    assert ModelConfig.from_dict(flat_form(RAW)) == FLASH


@pytest.mark.parametrize("config", [FLASH, tiny_config(), tiny_config(2), tiny_config(2, vision=TINY_VISION)])
def test_to_dict_round_trip_through_json(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_layer_modes_of_the_released_model():
    want = {0: "swa", 1: "swa", **dict.fromkeys(range(2, 40), "reuse")}
    want |= dict.fromkeys((2, 8, 14, 20), "full") | dict.fromkeys((24, 28, 32, 36), "reindex")
    assert {plan.layer_id: plan.mode.value for plan in FLASH.layers} == want
    modes = [plan.mode for plan in FLASH.layers]
    assert [modes.count(m) for m in (LayerMode.FULL, LayerMode.REINDEX, LayerMode.REUSE, LayerMode.SWA)] == [
        4,
        4,
        30,
        2,
    ]


def test_owners_of_the_released_model():
    owners = {plan.layer_id: (plan.kv_owner, plan.index_owner) for plan in FLASH.layers}
    assert owners[1] == (-1, -1)
    assert owners[2] == owners[7] == (2, 2)
    assert owners[8] == owners[13] == (8, 8)
    assert owners[19] == (14, 14)
    assert owners[20] == owners[23] == (20, 20)
    assert owners[24] == owners[27] == (20, 24)
    assert owners[39] == (20, 36)
    assert [plan.layer_id for plan in FLASH.layers if plan.writes_candidates] == [20]
    assert [plan.layer_id for plan in FLASH.layers if plan.reads_candidates] == [24, 28, 32, 36]
    assert [plan.layer_id for plan in FLASH.layers if plan.has_engram] == [1, 14]
    assert (FLASH.num_encoder_layers, FLASH.ring_size, FLASH.hc_mix_size) == (20, 134, 24)


def test_engram_primes_are_the_published_ones():
    first, second = FLASH.engram_primes
    assert (sum(first), sum(second)) == (384006168, 384016682)
    assert [(p[0], p[7], p[8], p[15], p[16], p[23]) for p in (first, second)] == [
        (16000057, 16000183, 16000189, 16000321, 16000339, 16000463),
        (16000477, 16000627, 16000667, 16000769, 16000781, 16000889),
    ]
    assert tiny_config().engram_primes == ((61, 67, 71, 73), (79, 83, 89, 97))


def test_tiny_model_makes_every_mode_and_its_token_map_fits():
    config = tiny_config(2)
    assert [plan.mode.value for plan in config.layers] == [
        "swa", "full", "reuse", "full", "reuse", "full", "reuse", "reindex", "reuse", "reindex",
    ]  # fmt: skip
    assert config.num_encoder_layers == 5 and config.ring_size == 20
    assert tiny_config().ring_size == 17  # no draft head: one slot is enough
    ids = tiny_token_map()
    assert (
        sorted(set(ids.tolist())) == list(range(config.engram_compressed_vocab_size)) and len(ids) == config.vocab_size
    )


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


def test_candidates_may_be_off():
    config = tiny_config(candidate_source_layer_id=-1)
    assert not any(plan.writes_candidates or plan.reads_candidates for plan in config.layers)


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


NAN, INFINITY = float("nan"), float("inf")
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


def test_a_model_without_compressed_layers_is_valid():
    config = tiny_config(
        compress_ratios=(0,) * 10, kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1
    )
    assert {plan.mode for plan in config.layers} == {LayerMode.SWA}


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


# ------------------------------------------------------------------ values that no model has


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
