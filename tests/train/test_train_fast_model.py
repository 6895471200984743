"""The training forward pass against the reference model, and its pieces against theirs."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.reference import quant
from deepinfer.models import reference
from deepinfer.train import fast_ops, fast_quant
from deepinfer.train.fast_model import FastModel
from deepinfer.train.parameters import (
    Parameters,
    initial_masters,
    parameter_kinds,
    stored_values,
    with_image_biases,
)
from tests.configs import tiny_config, tiny_token_map


def busy_masters(config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Initial masters moved away from their symmetric start, so that every mechanism matters."""
    masters = initial_masters(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, value in masters.items():
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() <= 2 or "hc_" in name or "engram" in name:
            value += 0.3 * noise
        if name.endswith(("wo_b.weight", "w2.weight", "engram.wkv.weight")):
            value *= 10
    return masters


@pytest.mark.parametrize(
    "fast, slow, shape",
    [
        (fast_quant.fp8_rows, quant.fp8_round_trip, (50, 96)),
        (fast_quant.mxfp4_rows, quant.mxfp4_round_trip, (50, 96)),
        (fast_quant.nvfp4_rows, quant.nvfp4_round_trip, (50, 96)),
        (
            fast_quant.fp8_blocks,
            lambda x: quant.dequantize_fp8_weight(*quant.quantize_fp8_weight(x), torch.float32),
            (64, 96),
        ),
        (
            fast_quant.mxfp4_rows,
            lambda x: quant.dequantize_fp4_weight(*quant.quantize_fp4_weight(x), torch.float32),
            (50, 96),
        ),
    ],
)
def test_fast_rounding_equals_the_reference(fast, slow, shape):
    generator = torch.Generator().manual_seed(3)
    for spread in (1.0, 8.0):
        x = torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn(shape, generator=generator))
        x[:2] = 0.0
        x[2] = 6.0 * 2.0 ** torch.arange(-shape[1] // 2, shape[1] - shape[1] // 2).clamp(-60, 60)
        torch.testing.assert_close(fast(x), slow(x), rtol=0, atol=0)
        again = fast(fast(x))
        torch.testing.assert_close(again, fast(x), rtol=0, atol=0)


def test_sdpa_with_a_sink_equals_the_reference():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 3, 16, generator=generator, dtype=torch.float64)
    keys = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 6, 9, generator=generator) < 0.5
    sink = torch.randn(3, generator=generator, dtype=torch.float64)
    expected = reference.attend(q, keys, mask, sink, 0.3)
    torch.testing.assert_close(fast_ops.attend_sdpa(q, keys, mask, sink, 0.3), expected)


def test_expert_order_is_a_grouped_permutation():
    chosen = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:2] for i in range(37)])
    source, slot, places, ends, counts = fast_ops.expert_order(chosen, 6)
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=6))
    starts = torch.cat((torch.zeros(1, dtype=ends.dtype), ends[:-1]))
    assert bool((ends % fast_ops.GROUP_ALIGNMENT == 0).all())
    for token in range(37):
        for k in range(2):
            row = places[token, k]
            assert source[row] == token and slot[row] == 2 * token + k
            assert starts[chosen[token, k]] <= row < ends[chosen[token, k]]
    assert int((slot == chosen.numel()).sum()) == source.numel() - chosen.numel()


@pytest.mark.parametrize("dense", [False, True])
def test_fast_model_equals_the_reference(dense):
    config = tiny_config(index_topk=1000, candidate_topk_blocks=1000) if dense else tiny_config()
    token_map = torch.from_numpy(tiny_token_map()).long()
    masters = busy_masters(config)
    tokens = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(5))
    weights = stored_values(config, masters)
    numerics = reference.Numerics(quantize_kv=True)
    expected = reference.forward(weights, config, tokens, token_map, numerics=numerics)
    parameters = Parameters(parameter_kinds(config), masters, "cpu", torch.float32)
    model = FastModel(config, token_map, 64, "cpu")
    w = parameters.compute_weights()
    y, info = model.hidden(w, tokens, dense=dense)
    logits = y @ w["head.weight"].T
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    ce, _ = model.losses(w, y, tokens)
    expected_ce = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.flatten(), reduction="none")
    torch.testing.assert_close(ce.flatten(), expected_ce, rtol=1e-3, atol=1e-3)
    assert len(info.index_losses) == 5 and set(info.expert_counts) == set(range(10))


def test_gradients_equal_the_references():
    config = tiny_config()
    token_map = torch.from_numpy(tiny_token_map()).long()
    masters = busy_masters(config)
    tokens = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1)
    parameters = Parameters(parameter_kinds(config), masters, "cpu", torch.float32)
    model = FastModel(config, token_map, 32, "cpu")
    w = parameters.compute_weights()
    y, _ = model.hidden(w, tokens)
    model.losses(w, y, targets)[0].mean().backward()
    fast = parameters.gradients()
    w = parameters.compute_weights()
    w = with_image_biases(w)
    numerics = reference.Numerics(quantize_kv=True)
    logits = reference.forward(w, config, tokens, token_map, numerics=numerics)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    slow = parameters.gradients()
    for name, gradient in slow.items():
        if "indexer" in name:
            continue  # no gradient reaches it through a selection; its own loss trains it
        scale = float(gradient.abs().max()) + 1e-9
        error = float((fast[name] - gradient).abs().max()) / scale
        assert error < 5e-3, f"{name}: {error}"


def test_index_loss_reaches_only_the_indexer():
    config = tiny_config()
    parameters = Parameters(parameter_kinds(config), busy_masters(config), "cpu", torch.float32)
    model = FastModel(config, torch.from_numpy(tiny_token_map()).long(), 32, "cpu", index_rows=8)
    tokens = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(5))
    _, info = model.hidden(parameters.compute_weights(), tokens)
    torch.stack(info.index_losses).sum().backward()
    moved = {name for name, gradient in parameters.gradients().items() if float(gradient.abs().max()) > 0}
    assert moved == {name for name in parameters.leaves if "indexer" in name}
