"""Weights in the formats of the Hopper kernels: what they hold, and on a GPU what the layers make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepinfer.bench.synthetic import small_config, synthetic_model
from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.linear import Fp8Weight, fp8_linear
from deepinfer.kernels.reference.quant import dequantize_fp8_weight, fp8_round_trip, quantize_fp8_weight
from deepinfer.models.fp8 import use_fp8_kernels
from deepinfer.models.layers.linear import quantized_linear
from deepinfer.models.layers.moe import ArrangedExperts, StoredExperts
from deepinfer.models.registry import round_activations

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def stored_weight(rows: int, columns: int, spread: float) -> torch.Tensor:
    """Values that 32 x 32 blocks of FP8 hold, blocks apart in size by `spread`."""
    g = torch.Generator().manual_seed(rows)
    blocks = torch.exp(spread * torch.randn(-(-rows // 32), columns // 32, generator=g))
    blocks = blocks.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)
    weight = quantize_fp8_weight(torch.randn(rows, columns, generator=g) * blocks)
    return dequantize_fp8_weight(*weight, torch.float32)


def test_an_fp8_weight_keeps_its_values() -> None:
    weight = stored_weight(72, 160, 0.5)
    weight[3] = 0
    held = Fp8Weight.of(weight.bfloat16())
    values = held.values.float() * held.scales.unsqueeze(1)
    largest = weight.abs().amax(1, keepdim=True)
    assert ((values - weight).abs() <= largest * 2.0**-18).all()
    normal = weight.abs() >= largest * 2.0**-14
    assert torch.equal(values[normal], weight[normal])
    assert (values[3] == 0).all() and held.shape == weight.shape
    assert torch.equal(held[8:16].values.float(), held.values[8:16].float())
    assert torch.equal(held.scales, torch.exp2(held.scales.log2().round()))


def test_every_layer_takes_the_form_of_the_kernels() -> None:
    model = synthetic_model(small_config(8), torch.bfloat16, "cpu")
    for layer in model.layers:  # a CPU keeps no FP4 in BF16 models: stored ones are made here
        assert not isinstance(layer.ffn.experts, ArrangedExperts)
    use_fp8_kernels(model.layers)
    for layer in model.layers:
        attention, ffn = layer.attention, layer.ffn
        weights = [attention.wq_a_wkv, attention.wq_b, attention.wo_b, ffn.shared_w13, ffn.shared_w2]
        weights += [attention.indexer.wq_b] if attention.indexer is not None else []
        weights += [layer.engram.wkv] if layer.engram is not None else []
        assert all(isinstance(weight, Fp8Weight) for weight in weights)
        assert isinstance(attention.wo_a, torch.Tensor) and isinstance(ffn.gate, torch.Tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_the_kernels_activations_stay_as_they_are() -> None:
    model = synthetic_model(small_config(4), torch.bfloat16, "cpu")
    assert not ops.multiplies_fp8(torch.bfloat16, "cpu") and not model.quantize_activations
    round_activations(model, True)
    assert model.quantize_activations and isinstance(model.layers[0].attention.wq_b, torch.Tensor)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("shape", [(1792, 5120), (4608, 5120), (5120, 2304), (136, 96)])
def test_a_linear_in_fp8(rows: int, shape: tuple[int, int]) -> None:
    weight = stored_weight(*shape, 0.3).cuda()
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    result = quantized_linear(x, Fp8Weight.of(weight), True)
    expected = fp8_round_trip(x.double()) @ weight.double().T
    assert ((result.double() - expected).norm() / expected.norm()) < 4e-3
    assert torch.equal(fp8_linear(x, Fp8Weight.of(weight)), result)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("rows", [3, 200])
def test_a_layer_gives_what_it_gave(rows: int) -> None:
    """The feed-forward with weights in the kernels' form beside the one with rounded activations in Triton."""
    config = small_config(4)
    plain = synthetic_model(config, torch.bfloat16, "cuda", quantize_activations=False)
    fast = synthetic_model(config, torch.bfloat16, "cuda", quantize_activations=True)
    x = torch.randn(rows, config.hidden_size, device="cuda").bfloat16()
    for before, after in zip(plain.layers, fast.layers, strict=True):
        assert isinstance(before.ffn.experts, StoredExperts) and isinstance(after.ffn.experts, ArrangedExperts)
        # A synthetic model's dense weights are no FP8 values yet: these are what the other layer holds.
        w13, w2 = (
            (weight.values.float() * weight.scales.unsqueeze(1)).bfloat16()
            for weight in (after.ffn.shared_w13, after.ffn.shared_w2)
        )
        same = replace(before.ffn, shared_w13=w13, shared_w2=w2)
        expected = same.forward(x, None, config, True).double()
        result = after.ffn.forward(x, None, config, True).double()
        assert ((result - expected).norm() / expected.norm()) < 0.015  # values on the other side of a rounding boundary
