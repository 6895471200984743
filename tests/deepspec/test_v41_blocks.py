"""The training form of the V4.1 draft head equals the naive reference, and its losses are what they say."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.deepspec.losses import LossWeights, block_losses
from deepinfer.deepspec.v41_blocks import BlockModel, draft_kinds, initial_masters
from deepinfer.models import reference, reference_draft
from deepinfer.models.checkpoint_format import parameter_specs
from deepinfer.models.random_weights import random_weights
from deepinfer.train.fast_model import FastModel
from deepinfer.train.parameters import Parameters
from tests.configs import tiny_config, tiny_token_map

CONFIG = tiny_config(2)
WEIGHTS = random_weights(CONFIG, seed=0)
TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()
LENGTH = 48


@pytest.mark.parametrize("quantize_kv", [False, True])
def test_blocks_equal_the_reference(quantize_kv):
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(2, LENGTH, 2 * CONFIG.hidden_size, generator=generator)
    tokens = torch.randint(3, 500, (2, LENGTH + 1), generator=generator)
    anchors = torch.tensor([[0, 7, LENGTH - 1 - CONFIG.dspark_block_size], [20, 3, 30]])
    model = BlockModel(CONFIG, WEIGHTS["embed.weight"], WEIGHTS["head.weight"], LENGTH, quantize_kv=quantize_kv)
    blocks = model(WEIGHTS, taps, tokens, anchors)
    numerics = reference.Numerics(quantize_kv=quantize_kv)
    for n, (row, p) in enumerate((r, int(a)) for r in range(2) for a in anchors[r]):
        forced = tokens[row, p + 2 : p + 2 + CONFIG.dspark_block_size]
        _, scores, logits = reference_draft.draft(
            WEIGHTS, CONFIG, taps[row, : p + 1], tokens[row, p + 1], numerics=numerics, forced=forced
        )
        torch.testing.assert_close(blocks.logits[n], logits, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(blocks.scores[n], scores, atol=2e-3, rtol=1e-3)
    chosen = CONFIG.dspark_num_experts_per_tok * anchors.numel() * CONFIG.dspark_block_size
    assert blocks.expert_counts.sum(1).tolist() == [chosen, chosen]


def test_taps_of_the_training_forward_pass():
    tokens = torch.randint(3, 500, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    model = FastModel(CONFIG, TOKEN_MAP, LENGTH, "cpu", quantize_kv=False, tap_layers=CONFIG.dspark_target_layer_ids)
    _, info = model.hidden(WEIGHTS, tokens, train=False)
    trace: dict[str, torch.Tensor] = {}
    reference.forward(WEIGHTS, CONFIG, tokens, TOKEN_MAP, trace=trace)
    for tap, layer in zip(info.taps, CONFIG.dspark_target_layer_ids, strict=True):
        torch.testing.assert_close(tap, trace[f"layers.{layer}.tap"], atol=2e-3, rtol=1e-3)


def test_every_master_gets_a_gradient():
    """But the balancer's biases; what the confidence learns from does not move the draft."""
    parameters = Parameters(draft_kinds(CONFIG), initial_masters(CONFIG), "cpu", torch.float32)
    weights = parameters.compute_weights()
    names = {name for kind in parameters.kinds for name in kind.names}
    assert names == {n for n in parameter_specs(CONFIG) if n.startswith("mtp.") and not n.endswith("bias_vl")}
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(1, LENGTH, 2 * CONFIG.hidden_size, generator=generator)
    tokens = torch.randint(3, 500, (1, LENGTH + 1), generator=generator)
    model = BlockModel(CONFIG, WEIGHTS["embed.weight"], WEIGHTS["head.weight"], LENGTH)
    blocks = model(weights, taps, tokens, torch.tensor([[4, 20, 40]]))
    blocks.scores.sum().backward(retain_graph=True)
    assert set(parameters.gradients()) == {"mtp.*.confidence_head.proj.weight"}
    blocks.logits.square().sum().backward()
    expected = {kind.name for kind in parameters.kinds if kind.rule != "balance"}
    assert set(parameters.gradients()) == expected
    assert all(float(g.abs().max()) > 0 for g in parameters.gradients().values())


def test_losses_by_hand():
    target = torch.log(torch.tensor([[[0.5, 0.5, 1e-9], [1.0, 1e-9, 1e-9]]]))
    draft = torch.log(torch.tensor([[[0.25, 0.5, 0.25], [0.5, 0.5, 1e-9]]]))
    scores, counted = torch.zeros(1, 2), torch.ones(1, 2)
    losses = block_losses(draft, target, scores, counted, LossWeights(0.1, 0.9, 1.0, gamma=2.0))
    assert losses.acceptance.tolist() == pytest.approx([0.75, 0.5], abs=1e-6)
    assert float(losses.accepted_length) == pytest.approx(1 + 0.75 + 0.75 * 0.5, abs=1e-6)
    entropy = [-0.5 * math.log(0.25) - 0.5 * math.log(0.5), math.log(2)]
    terms = [0.1 * e + 0.9 * (1 - a) + math.log(2) for e, a in zip(entropy, (0.75, 0.5), strict=True)]
    fade = math.exp(-0.5)
    assert float(losses.loss) == pytest.approx((terms[0] + fade * terms[1]) / (1 + fade), abs=1e-5)
    one = block_losses(draft, target, scores, torch.tensor([[1.0, 0.0]]), LossWeights(0.1, 0.9, 1.0, gamma=2.0))
    assert float(one.loss) == pytest.approx(terms[0], abs=1e-5)
