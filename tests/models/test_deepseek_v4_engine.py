"""A DeepSeek-V4 checkpoint served by the engine: the greedy tokens are those of `transformers` generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.loading import load_engine

pytest.importorskip("transformers")

from tests.models.test_deepseek_v4 import oracle_model, random_tokens  # noqa: E402  (needs transformers)

PROMPT_LENGTHS = [5, 120, 61, 250]  # two answers need another block of 128 tokens


@pytest.fixture(scope="module")
def oracle() -> Any:
    return oracle_model(seed=11)


@pytest.fixture(scope="module")
def checkpoint(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek_v4")
    oracle.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(oracle: Any) -> list[list[int]]:
    """32 greedy tokens after each prompt; oracle sequences run alone, so that nothing is padded."""
    answers = []
    for length in PROMPT_LENGTHS:
        prompt = random_tokens(length, seed=length)[None]
        options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        answers.append(oracle.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, length:].tolist())
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 37, "max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"num_blocks": 6, "watermark": 0.0},  # all prompts fit, their answers do not
        {"num_blocks": 6, "watermark": 0.0, "preemption_mode": "swap", "swap_memory_bytes": 1 << 24},
        {"block_size": 256, "dtype": "fp64"},
        {"cuda_graphs": True, "max_num_seqs": 5},
    ],
    ids=["defaults", "odd-chunks", "preemption", "swap", "fp64", "padded-decode-steps"],
)
def test_greedy_tokens_equal_generate(checkpoint: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    llm = LLM(checkpoint, **options)
    prompts = [random_tokens(length, seed=length).tolist() for length in PROMPT_LENGTHS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (llm.engine.stats().num_preemptions > 0) == ("num_blocks" in options)


def test_packed_caches_and_blocks_that_cut_groups_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8', allowed for deepseek_v4"):
        load_engine(checkpoint, EngineConfig(kv_cache_dtype="fp8"))
    with pytest.raises(ValueError, match="block_size is 64, allowed: a multiple of the ratio 128"):
        load_engine(checkpoint, EngineConfig(block_size=64))


def test_truncating_a_prefill_without_decoder_half_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="yoco_prefill_truncation_mode must be off for this model, got 'mask'"):
        load_engine(checkpoint, EngineConfig(yoco_prefill_truncation_mode="mask", yoco_prefill_keep_tokens=1000))
