"""Bad parameters are refused with a ValueError that names the field."""

import math

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.params import SamplingParams

NAN, INF = math.nan, math.inf
HUGE = 10**5000  # no float holds it, and Python refuses to print it
BAD = {
    "max_tokens": [-1, True, 1.5, "4", NAN],
    "temperature": [NAN, INF, -0.1, True, "1", None],
    "top_p": [0, 1.01, NAN, -1, False, "0.5"],
    "top_k": [-2, 1.0, True, "3", None],
    "min_p": [-0.01, 1.01, NAN, "0"],
    "presence_penalty": [-2.1, 2.1, NAN, INF, True],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, "1"],
    "repetition_penalty": [0, -1, NAN, INF, True, 1e-300, 0.0099, 101, 1e39, 1e300],
    "seed": [-1, 2**63, 1.0, True, "7"],
    "stop_token_ids": [[-1], [1.0], [True], "12", 5, {1: 2}],
    "ignore_eos": [1, None, "yes"],
    "min_tokens": [-1, True, 1.0, None],
    "logprobs": [-1, 21, True, 1.0],
    "logprob_token_ids": [[], [1, 1], [-1], [1.0], "12", 5, list(range(129))],
    "prompt_logprobs": [-1, 21, True, 1.0, "2"],
    "force_topk": [0, -1, True, 2.0],
    "golden_token_ids": [[], [-1], [True], "1"],
    "n": [0, 129, True, 1.0],
    "logit_bias": [{-1: 1.0}, {"5": 1.0}, {5: NAN}, {5: 101}, {5: True}, [(5, 1.0)]],
    "allowed_token_ids": [[], [-1], [True], "1", 5],
    "bad_words_token_ids": [[[]], [[-1]], [[True]], ["1"], [5], "12", 5, None],
    "repetition_detection": [
        {},
        {"max_pattern_size": 3},
        {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": 0, "min_count": 2},
        {"max_pattern_size": 65, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 2, "min_pattern_size": 4},
        {"max_pattern_size": 3, "min_count": True},
        {"max_pattern_size": 3, "min_count": 2, "more": 1},
        5,
        "3",
    ],
    "thinking_token_budget": [-1, True, 1.5, "2"],
    "thinking_end_token_ids": [[-1], [True], "1", 5, None],
    "stop": ["", [""], [1], 5],
    "priority": [2**31, -(2**31), True, 1.0, "low", None],
    "deadline_seconds": [0, -1, NAN, INF, True, "soon"],
    "so_args": [
        {},
        [],
        "json",
        5,
        {"schema_type": "xml", "schema": ""},
        {"schema_type": "regex", "schema": 5},
        {"x": 1},
    ],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_value_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b") as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [10**400, HUGE, -HUGE], ids=["1e400", "huge", "negative"])
@pytest.mark.parametrize("field", [field for field in BAD if field not in ("ignore_eos", "stop")])
def test_integers_beyond_any_float_are_refused_in_a_short_line(field: str, value: int) -> None:
    given = [value] if field.endswith("token_ids") else {3: value} if field == "logit_bias" else value
    with pytest.raises(ValueError, match=rf"^{field}\b") as error:
        SamplingParams(**{field: given})
    assert len(str(error.value)) < 400


def test_every_field_has_bad_values_tested() -> None:
    assert BAD.keys() == {name for name, f in SamplingParams.__dataclass_fields__.items() if f.init}


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_good_values_are_normalised() -> None:
    params = SamplingParams(top_k=-1, stop="END", stop_token_ids={7}, logit_bias={3: -100})
    assert (params.top_k, params.stop, params.stop_token_ids, params.logit_bias) == (0, ("END",), (7,), {3: -100})
    assert params == SamplingParams(stop=["END"], stop_token_ids=[7], logit_bias={3: -100.0})


BAD_CONFIG = {
    "block_size": [0, True, 1.0],
    "num_blocks": [1, "8"],
    "cache_memory_bytes": [0, 1.5],
    "max_num_seqs": [0, None],
    "max_num_batched_tokens": [0],
    "prefill_chunk_size": [0, -5],
    "max_model_len": [1, "2K"],
    "watermark": [-0.1, 1.0, NAN, True, "0.1"],
    "kv_cache_dtype": ["fp4", None],
    "dtype": ["int8"],
    "seed": [-1, 1.5],
    "device": ["gpu9", "cuda:", "cuda:-1", "cuda:1x", "cpu\n", 0, None],
    "quantize_activations": ["no", 1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_CONFIG.items() for value in values]
)
def test_bad_engine_config_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        EngineConfig(**{field: value})


def test_number_of_blocks_from_a_memory_budget() -> None:
    config = EngineConfig(max_num_seqs=4, cache_memory_bytes=10_000)
    assert config.resolve_num_blocks(bytes_per_block=1000, max_model_len=10_000) == 10  # the budget
    assert config.resolve_num_blocks(bytes_per_block=1000, max_model_len=129) == 9  # 4 sequences x 2 blocks + null
    assert EngineConfig(num_blocks=5).resolve_num_blocks(1000, 10_000) == 5
    assert config.resolve_num_blocks(bytes_per_block=0, max_model_len=129) == 9  # sliding-window layers only
    with pytest.raises(ValueError, match="cache_memory_bytes"):
        config.resolve_num_blocks(bytes_per_block=5001, max_model_len=100)
