"""What of EngineConfig depends on the machine and on the model."""

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import check_device
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
