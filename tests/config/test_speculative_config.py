"""Speculative settings: vLLM's keys, and bad ones refused with a line that names the field."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from deepinfer.commands.options import make_engine_config, sglang_speculation
from deepinfer.config.engine import EngineConfig
from deepinfer.config.speculative import SpeculativeConfig

GOOD = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


def test_a_dict_is_a_config_also_after_a_trip_to_another_process() -> None:
    config = EngineConfig(speculative_config=GOOD)  # type: ignore[arg-type]
    assert config.speculative_config == SpeculativeConfig(**GOOD)  # type: ignore[arg-type]
    assert EngineConfig(**asdict(config)) == config
    assert EngineConfig().speculative_config is None


def test_the_environment_decides_about_variable_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SpeculativeConfig(method="dspark").variable_length
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "0")
    assert not SpeculativeConfig(method="dspark").variable_length
    assert SpeculativeConfig(method="dspark", variable_length=True).variable_length


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "medusa"}, "method must be one of ngram, dspark"),
        ({"method": None}, "method must be one of"),
        ({}, "must name a method"),
        ("ngram", "speculative_config must be an object"),
        ({"method": "ngram", "model": "x"}, "unknown key model; known are method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer >= 1"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "prompt_lookup_max": 1, "prompt_lookup_min": 2}, "prompt_lookup_min must be at most"),
        ({"method": "ngram", "prompt_lookup_min": "2"}, "prompt_lookup_min must be an integer"),
        ({"method": "ngram", "draft_sample_method": "probabilistic"}, "draft_sample_method must be greedy"),
        ({"method": "dspark", "draft_sample_method": "beam"}, "draft_sample_method must be one of"),
        ({"method": "dspark", "variable_length": 1}, "variable_length must be true or false"),
        (
            {"method": "dspark", "rejection_sample_method": "block"},
            "rejection_sample_method must be standard, .* 'block'",
        ),
        ({"method": "dspark", "enable_adaptive_verification": "no"}, "enable_adaptive_verification must be true or"),
        (
            {"method": "dspark", "enable_adaptive_verification": True, "variable_length": False},
            "enable_adaptive_verification and variable_length are the same",
        ),
    ],
)
def test_bad_settings_are_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        EngineConfig(speculative_config=given)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("adaptive", [True, False])
def test_more_keys_of_vllm(adaptive: bool) -> None:
    more = {"rejection_sample_method": "standard", "enable_adaptive_verification": adaptive}
    config = EngineConfig(speculative_config=GOOD | more)  # type: ignore[arg-type]
    assert config.speculative_config == SpeculativeConfig(**GOOD, variable_length=adaptive)  # type: ignore[arg-type]
    assert set(more).isdisjoint(GOOD), "what was given is left as it is"


@pytest.mark.parametrize(
    ("algorithm", "num_draft_tokens", "block_size", "expected"),
    [
        ("NGRAM", None, None, SpeculativeConfig(method="ngram")),
        ("ngram", 4, None, SpeculativeConfig(method="ngram", num_speculative_tokens=3)),
        ("DSPARK", None, 3, SpeculativeConfig(method="dspark", num_speculative_tokens=3)),
        ("DSPARK", 6, 5, SpeculativeConfig(method="dspark", num_speculative_tokens=5)),
        (None, None, None, None),
        ("EAGLE", None, None, "--speculative-algorithm must be DSPARK or NGRAM, got 'EAGLE'"),
        ("NGRAM", 1, None, "--speculative-num-draft-tokens must be at least 2"),
        ("NGRAM", None, 3, "--speculative-dspark-block-size is of"),
        ("DSPARK", 5, 5, "--speculative-num-draft-tokens must be --speculative-dspark-block-size"),
        (None, 5, None, "--speculative-algorithm must be given"),
    ],
)
def test_the_options_of_sglang(
    algorithm: str | None,
    num_draft_tokens: int | None,
    block_size: int | None,
    expected: SpeculativeConfig | str | None,
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            sglang_speculation(None, algorithm, num_draft_tokens, block_size)
        return
    text = sglang_speculation(None, algorithm, num_draft_tokens, block_size)
    assert make_engine_config(speculative_config=text).speculative_config == expected
    with pytest.raises(ValueError, match="cannot both be given"):
        sglang_speculation("{}", algorithm or "NGRAM", None, None)


def test_the_command_line_takes_json() -> None:
    config = make_engine_config(speculative_config='{"method": "ngram", "num_speculative_tokens": 2}')
    assert config.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ValueError, match="--speculative-config must be JSON, got"):
        make_engine_config(speculative_config="ngram")
