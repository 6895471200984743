"""The public config.json and what is derived from it (spec: model, section 1)."""

import json

import pytest

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerMode
from tests.config.released import FLASH, RAW, flat_form
from tests.configs import TINY_VISION, tiny_config, tiny_token_map


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


def test_candidates_may_be_off():
    config = tiny_config(candidate_source_layer_id=-1)
    assert not any(plan.writes_candidates or plan.reads_candidates for plan in config.layers)


NAN, INFINITY = float("nan"), float("inf")


def test_a_model_without_compressed_layers_is_valid():
    config = tiny_config(
        compress_ratios=(0,) * 10, kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1
    )
    assert {plan.mode for plan in config.layers} == {LayerMode.SWA}
