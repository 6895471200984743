"""Every mechanism bites: a wrong reading of the spec, one at a time, changes the tiny model's logits clearly.

Without this, "the engine equals the reference" could hold for a model in which half of the mechanisms do nothing.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from deepinfer.models import reference
from deepinfer.models.layers.rope import apply_rope, rope_frequencies
from deepinfer.models.random_weights import random_weights
from tests.configs import tiny_config, tiny_token_map

CONFIG = tiny_config()
WEIGHTS = {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}
TOKENS = torch.randint(3, 500, (1, 96), generator=torch.Generator().manual_seed(5))
TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()


def logits(config=CONFIG, weights=WEIGHTS, **options):
    return reference.forward(weights, config, TOKENS, TOKEN_MAP, **options)


@pytest.fixture(scope="module")
def expected():
    return logits()


def clearly_differs(got, expected):
    return (got - expected).abs().max() / expected.abs().max() > 1e-3


original = {name: getattr(reference, name) for name in ("mhc_mixes", "attend", "engram", "rotate")}


def transposed_combination(h, w, name, config):
    pre, post, c = original["mhc_mixes"](h, w, name, config)
    return pre, post, c.transpose(-1, -2)


def half_split_rope(x, cos, sin, inverse=False):
    pairs = cos.shape[-1]
    split = x.shape[-1] - 2 * pairs
    a, b = x[..., split : split + pairs], x[..., split + pairs :]
    sin = -sin if inverse else sin
    return torch.cat((x[..., :split], a * cos - b * sin, b * cos + a * sin), -1)


def rope_without_inverse(x, cos, sin, inverse=False):
    return x if inverse else apply_rope(x, cos, sin)


def relu_after_weighting(iq, weights, ik):
    return torch.relu(torch.einsum("bth,bthd,bgd->btg", weights, iq, ik))


def sink_in_numerator(q, keys, mask, sink, scale):
    o = torch.einsum("bthd,bsd->bhts", q, keys) * scale
    o = torch.cat((o.masked_fill(~mask[:, None], -torch.inf), sink.view(1, -1, 1, 1).expand(*o.shape[:3], 1)), -1)
    values = torch.cat((keys, torch.ones_like(keys[:, :1])), 1)
    return torch.einsum("bhts,bsd->bthd", o.softmax(-1), values)


def no_sink(q, keys, mask, sink, scale):
    return original["attend"](q, keys, mask, torch.full_like(sink, -1e30), scale)


def unshifted_block(h, p_prev, w, plan, context):
    config, name = context.config, f"layers.{plan.layer_id}"
    pre, post, c = reference.mhc_mixes(h, w, f"{name}.hc_attn", config)
    y = reference.rms_norm(reference.mhc_mix_in(pre, h), w[f"{name}.attn_norm.weight"], config.rms_norm_eps)
    h = reference.mhc_mix_out(h, reference.attention(y, w, f"{name}.attn", plan, context), post, c)
    pre, post, c = reference.mhc_mixes(h, w, f"{name}.hc_ffn", config)
    y = reference.rms_norm(reference.mhc_mix_in(pre, h), w[f"{name}.ffn_norm.weight"], config.rms_norm_eps)
    return reference.mhc_mix_out(h, reference.moe(y, w, f"{name}.ffn", plan.layer_id, context), post, c), pre


def engram_norm_over_all_streams(h, hash_ids, alive, w, name, config, numerics):
    """The gated value, off by the ratio of a stream's own norm to the norm over all streams."""
    joint = h.square().mean((-2, -1), keepdim=True).sqrt() / h.square().mean(-1, keepdim=True).sqrt()
    out = original["engram"](h, hash_ids, alive, w, name, config, numerics)
    return h + (out - h) / joint


def group_at_its_last_token(x, table, inverse=False):
    """A table of every second position is the one for groups: read it one position later."""
    row = table.shape[1] * table.shape[2]
    if table.stride(0) == 2 * row:
        table = torch.as_strided(table, table.shape, table.stride(), table.storage_offset() + row)
    return original["rotate"](x, table, inverse)


PATCHES = {
    "combination transposed": ("mhc_mixes", transposed_combination),
    "rope on split halves": ("apply_rope", half_split_rope),
    "no inverse rope on the output": ("apply_rope", rope_without_inverse),
    "relu after the index weights": ("index_scores", relu_after_weighting),
    "sink in the numerator": ("attend", sink_in_numerator),
    "no sink": ("attend", no_sink),
    "unshifted pre": ("block", unshifted_block),
    "engram norm over all streams": ("engram", engram_norm_over_all_streams),
    "group placed at its last token": ("rotate", group_at_its_last_token),
}


@pytest.mark.parametrize("control", PATCHES)
def test_wrong_function(control, monkeypatch, expected):
    name, wrong = PATCHES[control]
    monkeypatch.setattr(reference, name, wrong)
    ops = reference.ReferenceOps(attend=reference.attend)
    got = logits(ops=ops, run_block=reference.block)
    assert clearly_differs(got, expected)


def test_softmax_gate(monkeypatch, expected):
    monkeypatch.setattr(reference.F, "softplus", lambda x: x.softmax(-1).square())  # its square root is taken next
    assert clearly_differs(logits(), expected)


CONFIGS = {
    "an eps that is not negligible": {"rms_norm_eps": 1e-2},
    "one more visible window key": {"sliding_window": 17},
    "one more selected position": {"index_topk": 9},
    "one more candidate block": {"candidate_topk_blocks": 4},
    "no candidate restriction": {"candidate_source_layer_id": -1},
    "one Sinkhorn iteration": {"hc_sinkhorn_iters": 1},
    "gates not normalised": {"norm_topk_prob": False},
    "swiglu limit": {"swiglu_limit": 0.5},
    "yarn factor": {"rope_scaling": dataclasses.replace(CONFIG.rope_scaling, factor=1.0)},
    "engram pad": {"engram_pad_token_id": 3},
}


@pytest.mark.parametrize("control", CONFIGS)
def test_wrong_config_value(control, expected):
    assert clearly_differs(logits(dataclasses.replace(CONFIG, **CONFIGS[control])), expected)


def swapped(a, b):
    return {
        **WEIGHTS,
        **{k: WEIGHTS[k.replace(a, b)] for k in WEIGHTS if a in k},
        **{k: WEIGHTS[k.replace(b, a)] for k in WEIGHTS if b in k and k.replace(b, a) in WEIGHTS},
    }


@pytest.mark.parametrize(
    "pair", [("experts.w1", "experts.w3"), ("hc_attn_fn", "hc_ffn_fn"), ("shared_experts.w1", "shared_experts.w3")]
)
def test_swapped_weights(pair, expected):
    assert clearly_differs(logits(weights=swapped(*pair)), expected)


@pytest.mark.parametrize(
    "name", ["gate.bias", "attn_sink", "hc_attn_base", "hc_ffn_scale", "engram.q_weight", "k_norm.weight"]
)
def test_zeroed_weights(name, expected):
    got = logits(weights={k: torch.zeros_like(w) if k.endswith(name) else w for k, w in WEIGHTS.items()})
    assert clearly_differs(got, expected)


def test_gate_bias_steers_the_choice_only(expected):
    """A bias that does not change the order of the experts changes nothing."""
    got = logits(weights={k: w + 0.7 if k.endswith("gate.bias") else w for k, w in WEIGHTS.items()})
    torch.testing.assert_close(got, expected)


def test_image_span_uses_its_own_bias_and_blocks_engram(expected):
    span = torch.zeros_like(TOKENS, dtype=torch.bool)
    span[:, 20:30] = True
    got = logits(image_span=span)
    torch.testing.assert_close(got[:, :20], expected[:, :20])
    assert clearly_differs(got[:, 20:30], expected[:, 20:30])
    assert clearly_differs(got[:, 31:32], expected[:, 31:32])  # its n-gram would cross the span


def test_n_grams_do_not_reach_over_a_boundary():
    """Sticky: behind a blocked position every older token counts as pad."""
    compressed = torch.tensor([[5, 6, reference.ENGRAM_DEAD, 7, 8]])
    other = torch.tensor([[9, 1, reference.ENGRAM_DEAD, 7, 8]])
    config = dataclasses.replace(CONFIG)
    a = reference.engram_hash_ids(compressed, 2, 1, config)
    b = reference.engram_hash_ids(other, 2, 1, config)
    torch.testing.assert_close(a[:, 3:], b[:, 3:])
    assert not torch.equal(a[:, :2], b[:, :2])


def test_yarn_only_in_compressed_layers():
    plain = rope_frequencies(CONFIG, compressed=False)
    torch.testing.assert_close(plain, 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    scaled = rope_frequencies(CONFIG, compressed=True)
    base = 160000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert scaled[0] == base[0] and scaled[-1] == base[-1] / 16


def test_yarn_of_the_released_model():
    """Ramp between pair 15 and pair 25 (spec: model, section 3)."""
    config = dataclasses.replace(
        CONFIG,
        head_dim=512,
        index_head_dim=128,
        qk_rope_head_dim=64,
        rope_scaling=dataclasses.replace(CONFIG.rope_scaling, original_max_position_embeddings=65536),
    )
    base = 160000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    share = rope_frequencies(config, compressed=True) / base
    ramp = ((torch.arange(32) - 15) / 10).clamp(0, 1).double()
    torch.testing.assert_close(share, ramp / 16 + 1 - ramp)


def test_reference_is_differentiable():
    weights = {k: w.clone().requires_grad_() for k, w in WEIGHTS.items()}
    out = reference.forward(weights, CONFIG, TOKENS, TOKEN_MAP, numerics=reference.Numerics(True, True))
    F.cross_entropy(out[0, :-1], TOKENS[0, 1:]).backward()
    # The selection has no gradient: the indexer is trained by its own loss; biases steer the choice only.
    indirect = (
        "gate.bias",
        "gate.bias_vl",
        "indexer.wq_b.weight",
        "weights_proj.weight",
        "indexer.wk.weight",
        "k_norm.weight",
    )
    for name, w in weights.items():
        if name.endswith(indirect) and "attn.k_norm" not in name:
            continue
        assert w.grad is not None and torch.isfinite(w.grad).all() and w.grad.abs().max() > 0, name
