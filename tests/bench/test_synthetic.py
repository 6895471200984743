"""Synthetic models keep the released relations between layers, and their stored weights have the scale they claim."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from deepinfer.bench import throughput
from deepinfer.bench.synthetic import benchmark_model, small_config, synthetic_config, v41_config
from deepinfer.models.checkpoint_format import parameter_specs
from deepinfer.models.loader import is_engram_table, is_routed_expert
from deepinfer.models.plan import BUILT_IN_CONFIGS, load_plan_config
from deepinfer.models.random_weights import random_stored_weights


def test_forty_layers_share_as_the_released_model_does() -> None:
    ours, released = v41_config(40), load_plan_config("DeepSeek-V4.1-Flash")
    assert ours.layers == released.layers
    given = json.loads(BUILT_IN_CONFIGS["DeepSeek-V4.1-Flash"].read_text())["text_config"]
    sizes = [name for name in given if name.endswith(("_size", "_dim", "_rank", "_heads", "_topk", "_per_tok"))]
    assert {name: given[name] for name in sizes if hasattr(ours, name) and "engram_vocab" not in name} == {
        name: getattr(ours, name) for name in sizes if hasattr(ours, name) and "engram_vocab" not in name
    }


@pytest.mark.parametrize("num_layers", [4, 8, 16, 40])
def test_fewer_layers_have_every_kind(num_layers: int) -> None:
    layers = v41_config(num_layers).layers
    assert [sum(layer.compress_ratio == 1 for layer in layers), len(layers)] == [num_layers // 2, num_layers]
    assert {layer.compress_ratio for layer in layers} == {0, 1, 2} and sum(layer.has_engram for layer in layers) == 2
    assert any(layer.reads_candidates for layer in layers) == (num_layers // 2 > 4)


@pytest.mark.parametrize(("shape", "num_layers", "named"), [("v9", 8, "synthetic"), ("v41", 7, "num_layers")])
def test_what_cannot_be_made_is_named(shape: str, num_layers: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        synthetic_config(shape, num_layers)


def test_stored_weights_have_every_shape_and_unit_scale() -> None:
    config = replace(small_config(4), hidden_size=256)
    weights, experts = random_stored_weights(config, 0, torch.float32, "cpu")
    specs = parameter_specs(config)
    assert weights.keys() | experts.keys() == specs.keys()
    for name, spec in specs.items():
        if is_routed_expert(name):
            values = experts[name].dequantize()
            assert values.shape == spec.shape
            assert 0.6 < float(values.std()) * spec.shape[-1] ** 0.5 < 1.6  # the scale is a power of two
        elif not is_engram_table(name):
            assert weights[name].shape == spec.shape and bool(weights[name].isfinite().all())


def test_both_forms_of_the_experts_give_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP4 kept for a kernel, and plain values where there is none."""
    from deepinfer.bench.decode import add_requests, benchmark_engine
    from deepinfer.config.engine import EngineConfig
    from deepinfer.kernels import ops

    answers = []
    for reads_fp4 in (True, False):
        monkeypatch.setattr(ops, "reads_fp4_experts", lambda dtype, device, answer=reads_fp4: answer)
        monkeypatch.setattr(ops.moe_experts_fp4, "backends", {})
        model = benchmark_model("", "cpu", "v41-small", 4)
        engine = benchmark_engine(model, EngineConfig(max_num_seqs=3, max_model_len=64))
        add_requests(engine, 3, 20, 8)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        answers.append(tokens)
    assert answers[0] == answers[1] and len({tuple(row) for row in answers[0].values()}) == 3


def test_the_engine_alone(capsys: pytest.CaptureFixture) -> None:
    throughput.main("--quick --synthetic v41-small --layers 4 --batch 3 --output-len 6 --repeats 2".split())
    out = capsys.readouterr().out
    assert "decode of 3 sequences, prompt 128 (v41-small shape, 4 layers)" in out and "wrote" not in out
