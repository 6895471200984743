"""YoCo truncation through the engine: start-up checks, and greedy tokens equal to the truncated reference's."""

from __future__ import annotations

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.models import reference
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map

CONFIG = tiny_config()
WEIGHTS = {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}
TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()
MODEL = DeepseekV41(CONFIG, dict(WEIGHTS), TOKEN_MAP)
MIN_KEEP = 17  # sliding_window 16, no draft head: 1 backtracking token
PROMPTS = [
    torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (75, 40, 9, 61)
]


def engine_config(mode: str, **options) -> EngineConfig:
    options = {"block_size": 4, "max_num_seqs": 4, "num_blocks": 1 + 200, "prefill_chunk_size": 25, **options}
    return EngineConfig(
        dtype="fp64",
        yoco_prefill_truncation_mode=mode,
        **{"yoco_prefill_keep_tokens": MIN_KEEP, "kv_cache_dtype": "fp8", **options},
    )


def generate(config: EngineConfig, max_tokens: int = 30) -> tuple[list[list[int]], int]:
    """Greedy tokens of all prompts together, and the number of preemptions."""
    engine = Engine(ModelRunner(MODEL, config), config)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[int(output.request_id)] += output.outputs[0].token_ids
    return tokens, engine.stats().num_preemptions


def assert_greedy(tokens: list[list[int]], keep: int | None) -> None:
    """Every token is the arg-max of the reference, truncated to the last `keep` tokens of the prompt."""
    for prompt, got in zip(PROMPTS, tokens, strict=True):
        keep_from = 0 if keep is None else max(len(prompt) - keep, 0)
        logits = reference.forward(
            WEIGHTS,
            CONFIG,
            torch.tensor([prompt + got[:-1]]),
            TOKEN_MAP,
            numerics=reference.Numerics(quantize_kv=True),
            keep_from=keep_from,
        )
        assert got == logits[0, len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("keep", [MIN_KEEP, 33])
def test_greedy_tokens_equal_the_truncated_reference(mode: str, keep: int) -> None:
    tokens, _ = generate(engine_config(mode, yoco_prefill_keep_tokens=keep))
    assert_greedy(tokens, keep)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_recomputation_after_preemption_changes_nothing(mode: str) -> None:
    """KEEP counts from the end of the prompt, so the recomputed pass has the span of the first one."""
    tokens, preemptions = generate(engine_config(mode, num_blocks=1 + 56))
    assert preemptions > 0
    assert_greedy(tokens, MIN_KEEP)


def test_off_ignores_keep_tokens_and_equals_the_full_reference() -> None:
    tokens, _ = generate(engine_config("off"))
    assert_greedy(tokens, None)
    with pytest.raises(AssertionError):
        assert_greedy(generate(engine_config("compact"))[0], None)  # the truncation can be seen in the tokens


@pytest.mark.parametrize("keep", [None, 1, MIN_KEEP - 1])
def test_keeping_too_little_stops_the_start_and_names_both_numbers(keep: int | None) -> None:
    with pytest.raises(ValueError, match=rf"yoco_prefill_keep_tokens must be at least {MIN_KEEP} .* got {keep}"):
        ModelRunner(MODEL, engine_config("compact", yoco_prefill_keep_tokens=keep))


def test_more_backtracking_asks_for_more() -> None:
    with pytest.raises(ValueError, match=r"at least 22 \(sliding_window 16 \+ max_backtracking_tokens 6\)"):
        ModelRunner(MODEL, engine_config("mask", max_backtracking_tokens=6))
    ModelRunner(MODEL, engine_config("mask", max_backtracking_tokens=6, yoco_prefill_keep_tokens=22))


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_rings_hold_the_window_and_what_may_be_taken_back(mode: str) -> None:
    """After any step the latest 16 + 6 tokens are in the rings, and the tokens generated are the same."""
    options = {"max_backtracking_tokens": 6, "yoco_prefill_keep_tokens": 22}
    config = engine_config(mode, **options)
    assert ModelRunner(MODEL, config).caches.state.ring_size == 22
    assert ModelRunner(MODEL, engine_config("off")).caches.state.ring_size == 17
    assert ModelRunner(MODEL, engine_config("off", max_backtracking_tokens=1)).caches.state.ring_size == 17
    tokens, _ = generate(config)
    assert_greedy(tokens, None if mode == "off" else 22)


def test_a_draft_head_counts_as_backtracking() -> None:
    """V4.1-Flash: window 128 and 5 draft tokens give the published minimum of 134."""
    config = tiny_config(2, sliding_window=128, dspark_block_size=5)
    weights = random_weights(config, seed=0)
    weights = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
    model = DeepseekV41(config, weights, TOKEN_MAP)
    with pytest.raises(ValueError, match="at least 134"):
        ModelRunner(model, EngineConfig(yoco_prefill_truncation_mode="mask", yoco_prefill_keep_tokens=133))


def test_the_environment_sets_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig().yoco_prefill_truncation_mode == "off"
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact")
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "134")
    monkeypatch.setenv("DEEPINFER_MAX_BACKTRACKING_TOKENS", "6")
    config = EngineConfig()
    assert (config.yoco_prefill_truncation_mode, config.yoco_prefill_keep_tokens) == ("compact", 134)
    assert config.max_backtracking_tokens == 6
    assert EngineConfig(yoco_prefill_truncation_mode="off").yoco_prefill_truncation_mode == "off"


@pytest.mark.parametrize("mode", ["on", "", "Mask"])
def test_unknown_modes_are_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="yoco_prefill_truncation_mode must be one of off, mask, compact"):
        EngineConfig(yoco_prefill_truncation_mode=mode)
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
    with pytest.raises(ValueError, match="DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE.*off, mask, compact"):
        EngineConfig()
