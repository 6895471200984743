"""The draft head on a GPU: near the float reference, and the same when a CUDA graph replays it."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models import reference, reference_draft
from deepinfer.models.caches import CACHE_DTYPES
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.draft_head import DraftSampling, Taps
from deepinfer.models.random_weights import random_weights
from tests.configs import tiny_config, tiny_token_map

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTHS = [5, 40, 17]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def case(request):
    """Model, caches with the context of three sequences, and what the reference needs."""
    config = tiny_config(2)
    weights = random_weights(config, 0, request.param)
    on_device = {name: value.cuda() for name, value in weights.items()}
    token_map = torch.from_numpy(tiny_token_map()).long()
    model = DeepseekV41(config, on_device, token_map, draft_head=True)
    caches = model.allocate_caches(2, 8, len(LENGTHS) + 1, CACHE_DTYPES["fp8"])
    caches.state.storage.fill_(0xA5)
    generator = torch.Generator().manual_seed(0)
    width = len(config.dspark_target_layer_ids) * config.hidden_size
    taps = [torch.randn(n, width, generator=generator).to(request.param) for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    states = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS)).int()
    model.draft_head.store(Taps(torch.cat(taps).cuda(), positions.cuda(), states.cuda()), caches)
    return config, weights, model, caches, taps


def inputs():
    slots = torch.arange(1, len(LENGTHS) + 1, dtype=torch.int32)
    return [t.cuda() for t in (torch.tensor(LENGTHS) - 1, torch.tensor([7, 8, 9]), slots)]


def test_near_the_reference(case):
    config, weights, model, caches, taps = case
    rows = len(LENGTHS)
    ones = torch.ones(rows, dtype=torch.float64, device="cuda")
    whole = torch.full((rows,), config.vocab_size, device="cuda")
    numbers = torch.arange(rows, device="cuda")
    sampling = DraftSampling(ones, whole, 0, ones, 0 * ones, numbers, numbers)
    draft = model.draft_head.draft(*inputs(), caches, sampling)
    exact = {name: value.float() for name, value in weights.items()}
    numerics = reference.Numerics(quantize_kv=True)
    for row in range(rows):
        forced = draft.tokens[row].cpu()
        _, scores, logits = reference_draft.draft(
            exact, config, taps[row].float(), torch.tensor(7 + row), numerics=numerics, forced=forced
        )
        error = (draft.logits[row].cpu() - logits).norm() / logits.norm()
        assert error < (0.02 if model.dtype is torch.float32 else 0.15)
        assert (draft.confidences[row].cpu() - torch.sigmoid(scores)).abs().max() < 0.25


def test_a_graph_replays_the_same_drafts(case):
    _, _, model, caches, taps = case
    static = inputs()
    expected = model.draft_head.draft(*static, caches)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model.draft_head.draft(*static, caches)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    last = Taps(torch.stack([t[-1] for t in taps]).cuda(), static[0], static[2])
    with torch.cuda.graph(graph):
        model.draft_head.store(last, caches)
        draft = model.draft_head.draft(*static, caches)
    graph.replay()
    assert torch.equal(draft.tokens, expected.tokens)
    torch.testing.assert_close(draft.confidences, expected.confidences, atol=1e-5, rtol=0)
    for old, new in zip(static, [static[0], torch.tensor([20, 21, 22]), static[2]], strict=True):
        old.copy_(new)
    graph.replay()
    again = model.draft_head.draft(*static, caches)
    assert torch.equal(draft.tokens, again.tokens) and not torch.equal(draft.tokens, expected.tokens)
