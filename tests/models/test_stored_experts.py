"""A model whose routed experts stay in FP4 computes exactly what the model with dequantised experts computes."""

from __future__ import annotations

import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.llm import LLM
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.layers.moe import StoredExperts
from deepinfer.models.loader import is_routed_expert, load_quantized, load_weights
from deepinfer.models.writer import write_synthetic
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map


def generate(model: DeepseekV41) -> list[tuple[list[int], list[float]]]:
    config = EngineConfig(max_num_seqs=2, num_blocks=8)
    llm = LLM.from_engine(Engine(ModelRunner(model, config), config))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    outputs = llm.generate([[5, 9, 300, 41], list(range(3, 40))], params)
    return [(o.outputs[0].token_ids, [p.logprob for p in o.outputs[0].logprobs]) for o in outputs]


def test_same_tokens_and_logprobs(tmp_path):
    config = tiny_config()
    write_synthetic(tmp_path, config, seed=1)
    token_map = torch.from_numpy(tiny_token_map()).long()
    plain = DeepseekV41(config, load_weights(tmp_path, config), token_map)
    experts = load_quantized(tmp_path, config, include=is_routed_expert)
    rest = load_weights(tmp_path, config, include=lambda name: not is_routed_expert(name))
    stored = DeepseekV41(config, rest, token_map, stored_experts=experts)
    assert all(isinstance(layer.ffn.experts, StoredExperts) for layer in stored.layers)
    assert not rest and not experts  # taken over
    assert generate(stored) == generate(plain)
