"""What of EngineConfig depends on the machine and on the model."""

import math
from typing import Any

import pytest
import torch

from deepinfer import LLM
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import check_device
from deepinfer.engine.memory import available_memory
from deepinfer.engine.runner import ModelRunner
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.params import SamplingParams
from tests.configs import tiny_config


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' is not available, this machine has: cpu"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(ValueError, match="device 'cuda:2' does not exist, allowed: cpu, cuda:0..cuda:1"):
        check_device("cuda:2")


def test_a_model_of_sliding_window_layers_alone_generates() -> None:
    """Its blocks take no bytes at all."""
    model_config = tiny_config(
        num_hidden_layers=2,
        compress_ratios=(0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    model = DeepseekV41(model_config, random_weights(model_config, seed=0), None)
    config = EngineConfig(max_num_seqs=2, kv_cache_dtype="fp32")
    engine = Engine(ModelRunner(model, config), config)
    engine.add_request("r", list(range(3, 60)), SamplingParams(temperature=0, max_tokens=5))
    tokens = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens += output.outputs[0].token_ids
    assert len(tokens) == 5


COUNTS = "block_size num_blocks max_num_seqs max_num_batched_tokens prefill_chunk_size max_model_len".split()


@pytest.mark.parametrize("value", [10**12, 10**30, pytest.param(10**5000, id="huge")])
@pytest.mark.parametrize("name", [*COUNTS, "yoco_prefill_keep_tokens", "max_backtracking_tokens"])
def test_counts_beyond_int32_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be an integer >= \d and <= 2147483647, got") as error:
        EngineConfig(**{name: value})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["cache_memory_bytes", "seed"])
def test_bytes_beyond_int64_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be an integer"):
        EngineConfig(**{name: 10**30})


@pytest.mark.parametrize("value", [10**5000, 2, 1.0, "yes", [], {}, b"x"], ids=lambda value: str(type(value)))
@pytest.mark.parametrize(
    "name",
    "kind preemption_mode zero_overhead_scheduling cuda_graphs torch_compile kv_cache_dtype dtype device "
    "quantize_activations yoco_prefill_truncation_mode".split(),
)
def test_values_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    """1 and 0 are no switches, though they equal True and False."""
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got ") as error:
        EngineConfig(**{name: value})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e308, True, "5", pytest.param(10**5000, id="huge")])
def test_times_of_a_step_beyond_arithmetic_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^prefill_step_ms must be a number > 0 and <= 1e\+09, or null, got "):
        EngineConfig(prefill_step_ms=value)


@pytest.mark.parametrize("value", [1e-9, 1e9])
def test_the_extremes_of_a_step_still_run(value: float) -> None:
    llm = LLM("nano", prefill_step_ms=value, max_num_seqs=2, max_model_len=256)
    for _ in range(12):  # more steps than the cost model wants to see before it is trusted
        (output,) = llm.generate([list(range(40, 90))], SamplingParams(max_tokens=2, ignore_eos=True))
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("options", [{"num_blocks": 2**31 - 1}, {"max_num_seqs": 10**7}, {"max_num_seqs": 2**31 - 1}])
@pytest.mark.parametrize("more", [{}, {"kv_cache_dtype": "fp64", "dtype": "fp64"}])
def test_caches_that_do_not_fit_are_refused_before_they_are_allocated(options: Any, more: Any) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=rf"^{name} is {value}: the caches need [\d,]+ bytes .* available$"):
        LLM("nano", **options, **more)


def test_backtracking_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match="^max_num_seqs with max_backtracking_tokens 1000000000 is 64: the caches need"
    ):
        LLM("nano", max_backtracking_tokens=10**9)


def test_the_refusal_is_exact_about_what_the_caches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is what the allocated tensors hold."""
    model_config = tiny_config()
    model = DeepseekV41(model_config, random_weights(model_config, seed=0), torch.zeros(512, dtype=torch.int64))
    config = EngineConfig(num_blocks=9, max_num_seqs=5, max_backtracking_tokens=40)
    caches = ModelRunner(model, config).caches
    size = caches.state.storage.nbytes
    size += sum(t.nbytes for t in (*caches.blocks.latents.values(), *caches.blocks.index_keys.values()))
    monkeypatch.setattr("deepinfer.engine.memory.available_memory", lambda: size)
    ModelRunner(model, config)
    monkeypatch.setattr("deepinfer.engine.memory.available_memory", lambda: size - 1)
    with pytest.raises(ValueError, match=f"the caches need {size:,} bytes"):
        ModelRunner(model, config)


def test_available_memory_is_some_of_the_memory() -> None:
    available = available_memory()
    assert available is None or 0 < available < 2**50
