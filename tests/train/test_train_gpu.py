"""What training runs only on CUDA, against the reference: Triton kernels, FlexAttention, grouped products, graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from deepinfer.models import reference
from deepinfer.train import fast_ops
from deepinfer.train.fast_model import swiglu
from deepinfer.train.graphs import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.cpu().double() - expected.cpu().double()).norm() / expected.double().norm())


def test_sinkhorn_and_its_gradient():
    torch.manual_seed(0)
    logits, weight = torch.randn(1000, 4, 4) * 2, torch.randn(1000, 4, 4)
    fast, slow = logits.cuda().requires_grad_(), logits.double().requires_grad_()
    c, expected = fast_ops.sinkhorn(fast, 20, 1e-6), fast_ops.sinkhorn(slow, 20, 1e-6)
    (c * weight.cuda()).sum().backward()
    (expected * weight).sum().backward()
    assert relative_error(c.detach(), expected.detach()) < 1e-5
    assert fast.grad is not None and slow.grad is not None
    assert relative_error(fast.grad, slow.grad) < 1e-4


@pytest.mark.parametrize("k", [1, 64, 500, 2000])
def test_top_k_mask_is_exact_with_ties_and_invisible_positions(k):
    torch.manual_seed(0)
    scores = (torch.randn(300, 1000, device="cuda") * 50).round() / 4
    scores[:, 900:] = float("-inf")
    scores[0, 3:] = float("-inf")
    scores[1, 7] = float("inf")
    assert torch.equal(fast_ops.top_k_mask(scores, k), reference.top_k_mask(scores, k))


def test_mix_projection_keeps_float32_weights():
    torch.manual_seed(0)
    h = torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    fn = torch.randn(24, 256, device="cuda") * 0.02
    expected = F.linear(h.double().flatten(-2), fn.double())
    assert relative_error(fast_ops.mix_projection(h, fn), expected) < 1e-4


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_flex_attention_with_sink_equals_the_reference(ratio):
    torch.manual_seed(0)
    length, batch, heads, dim, window = 512, 2, 4, 64, 128
    groups = length // ratio if ratio else 0
    position = torch.arange(length, device="cuda")
    mask = ((position[:, None] >= position) & (position[:, None] - position < window)).expand(batch, -1, -1)
    selection = None
    if ratio:
        visible = torch.arange(groups, device="cuda") < ((position + 1) // ratio)[:, None]
        selection = (torch.rand(batch, length, groups, device="cuda") < 0.3) & visible
        mask = torch.cat((mask, selection), dim=-1)
    shapes = ((batch, length, heads, dim), (batch, length + groups, dim))
    fast = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    fast.append(torch.randn(heads, device="cuda").requires_grad_())
    slow = [tensor.detach().double().requires_grad_() for tensor in fast]
    o, lse = fast_ops.FlexAttend(length, window, "cuda")(fast[0], fast[1], selection, ratio, dim**-0.5)
    o = o.float() * torch.sigmoid(lse - fast[2]).unsqueeze(-1)
    expected = reference.attend(slow[0], slow[1], mask, slow[2], dim**-0.5)
    weight = torch.randn_like(o)
    assert relative_error(o.detach(), expected.detach()) < 1e-2
    gradients = torch.autograd.grad((o * weight).sum(), fast)
    for value, right in zip(gradients, torch.autograd.grad((expected * weight).sum(), slow), strict=True):
        assert relative_error(value, right) < 2e-2


def test_grouped_experts_equal_the_reference():
    torch.manual_seed(0)
    tokens, dim, inter, experts, k = 3000, 128, 64, 24, 4
    chosen = torch.rand(tokens, experts, device="cuda").topk(k).indices
    shapes = ((experts, inter, dim), (experts, dim, inter), (experts, inter, dim))
    leaves = [(torch.randn(shape, device="cuda") * 0.1).bfloat16().requires_grad_() for shape in shapes]
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gates = torch.rand(tokens, k, device="cuda").requires_grad_()
    grouped = fast_ops.GroupedExperts(partial(swiglu, limit=10.0), lambda f: f)
    y, counts = grouped(x, chosen, gates, *leaves)
    expected = reference.routed_experts(x, chosen, gates, *leaves, 10.0, reference.Numerics())
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=experts))
    assert relative_error(y.detach(), expected.detach()) < 1e-2
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((y.float() * weight).sum(), [x, gates, *leaves])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, gates, *leaves])
    for value, right in zip(gradients, wanted, strict=True):
        assert relative_error(value, right) < 2e-2


def test_graph_replay_reads_new_inputs_and_keys():
    scale = torch.ones((), device="cuda")

    def compute(x: torch.Tensor, doubled: bool) -> torch.Tensor:
        return x * scale * (2 if doubled else 1)

    step = GraphedStep(compute)
    for value in (1.0, 3.0):
        for doubled in (False, True, True):
            scale.fill_(value)
            result = step(torch.full((4,), value, device="cuda"), doubled)
            assert result.tolist() == [value * value * (2 if doubled else 1)] * 4
