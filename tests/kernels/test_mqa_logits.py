"""Indexer logits for Hopper agree with float64 over what their operands hold; all need the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm import indexer
from deepinfer.kernels.deep_gemm.mqa_logits import PAGE, PAGE_BYTES, mqa_logits, paged_mqa_logits
from deepinfer.kernels.reference.indexer import index_scores as reference_scores
from deepinfer.kernels.reference.quant import mxfp4_round_trip, pack_mxfp4_row, unpack_mxfp4_row
from tests.kernels.matrix_cases import E4M3, gpu, hopper, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def random_query(tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(tokens, 32, 128, device="cuda").to(E4M3)
    k = torch.randn(keys, 128, device="cuda").to(E4M3)
    return q, k, torch.rand(keys, device="cuda") + 0.1, torch.randn(tokens, 32, device="cuda")


def expected_logits(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    dots = torch.relu(torch.einsum("thd,sd->ths", q.double(), keys.double()))
    return torch.einsum("th,ths->ts", weights.double(), dots) * scales.double()


@gpu
@hopper
@pytest.mark.parametrize("tokens, keys", [(5, 1), (9, 130), (64, 5000), (300, 1000), (1, 128)])
def test_logits_of_ranges(tokens, keys):
    torch.manual_seed(tokens)
    q, k, scales, weights = random_query(tokens, keys)
    starts = torch.randint(0, max(keys // 2, 1), (tokens,), dtype=torch.int32, device="cuda")
    ends = torch.randint(0, keys + 1, (tokens,), dtype=torch.int32, device="cuda")
    out = mqa_logits(q, k, scales, weights, starts, ends)
    at = torch.arange(keys, device="cuda")
    seen = (at >= starts[:, None]) & (at < ends[:, None])
    assert (out[~seen] == float("-inf")).all()
    assert relative_error(out[seen], expected_logits(q, k, scales, weights)[seen]) < 1e-3
    part = mqa_logits(q, k, scales, weights, starts, ends, clean=False)
    assert torch.equal(part[seen], out[seen])


@gpu
@hopper
def test_logits_of_extremes():
    """A NaN scale of a key, the largest values, no range at all."""
    torch.manual_seed(3)
    q, k, scales, weights = random_query(70, 300)
    starts, ends = torch.zeros(70, dtype=torch.int32, device="cuda"), torch.full((70,), 300).int().cuda()
    ends[10] = 0
    whole = mqa_logits(q, k, scales, weights, starts, ends)
    scales[17] = torch.nan
    out = mqa_logits(q, k, scales, weights, starts, ends)
    assert out[:10, 17].isnan().all() and (out[10] == float("-inf")).all()
    others = torch.arange(300, device="cuda") != 17
    assert torch.equal(out[:, others], whole[:, others])
    q, k = torch.full_like(q.float(), 448.0).to(E4M3), torch.full_like(k.float(), 448.0).to(E4M3)
    scales.fill_(1e-20)
    weights.fill_(-1e15)
    out = mqa_logits(q, k, scales, weights, starts, ends)
    assert relative_error(out[:10], expected_logits(q, k, scales, weights)[:10]) < 1e-3


@gpu
@hopper
@pytest.mark.parametrize(
    "sequences, queries, width",
    [(3, 1, 200), (5, 2, 1000), (2, 6, 300), (40, 3, 500), (7, 4, 64), (4, 5, 257), (3, 8, 129)],
)
def test_logits_of_pages(sequences, queries, width):
    torch.manual_seed(width)
    pages = -(-width // PAGE)
    q, k, scales, weights = random_query(sequences * queries, sequences * pages * PAGE)
    stored = torch.cat((k.view(torch.uint8).view(-1, PAGE * 128), scales.view(-1, PAGE).view(torch.uint8)), 1)
    order = torch.randperm(sequences * pages, device="cuda")
    cache = torch.full((sequences * pages + 3, PAGE_BYTES), 255, dtype=torch.uint8, device="cuda")
    cache[order] = stored
    visible = torch.randint(0, width + 1, (sequences * queries,), dtype=torch.int32, device="cuda")
    table = order.view(sequences, pages).int().contiguous()
    most = visible.view(sequences, queries).amax(1, keepdim=True)
    table[torch.arange(pages, device="cuda") * PAGE >= most] = 1 << 30  # pages that nobody sees are not read
    out = paged_mqa_logits(q.view(sequences, queries, 32, 128), cache, weights, visible, table, width)
    for i in range(sequences):
        rows, own = slice(i * queries, (i + 1) * queries), slice(i * pages * PAGE, i * pages * PAGE + width)
        expected = expected_logits(q[rows], k[own], scales[own], weights[rows])
        seen = torch.arange(width, device="cuda") < visible[rows, None]
        if seen.any():
            assert relative_error(out[rows][seen], expected[seen]) < 1e-3


@gpu
@hopper
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("sequences, queries, width", [(3, 1, 200), (5, 2, 1000), (40, 3, 500), (2, 6, 300)])
def test_logits_of_fp4_pages(sequences, queries, width, page):
    """Keys as the engine's cache holds them; some are far apart in size, some zero."""
    torch.manual_seed(width)
    pages = -(-width // page)
    q, _, _, weights = random_query(sequences * queries, 1)
    spread = torch.exp(torch.randn(sequences * pages * page, 4, device="cuda")).repeat_interleave(32, 1)
    rows = pack_mxfp4_row(torch.randn(sequences * pages * page, 128, device="cuda") * spread)
    rows[::7] = pack_mxfp4_row(torch.zeros(1, 128, device="cuda"))
    keys = unpack_mxfp4_row(rows, 128, torch.float64)
    order = torch.randperm(sequences * pages, device="cuda")
    cache = torch.full((sequences * pages + 3, page * 68 + 64), 255, dtype=torch.uint8, device="cuda")
    cache = cache[:, 16 : 16 + page * 68].unflatten(1, (page, 68))
    cache[order] = rows.view(-1, page, 68)
    visible = torch.randint(0, width + 1, (sequences * queries,), dtype=torch.int32, device="cuda")
    table = order.view(sequences, pages).int().contiguous()
    most = visible.view(sequences, queries).amax(1, keepdim=True)
    table[torch.arange(pages, device="cuda") * page >= most] = 1 << 30  # pages that nobody sees are not read
    out = paged_mqa_logits(q.view(sequences, queries, 32, 128), cache, weights, visible, table, width)
    for i in range(sequences):
        part, own = slice(i * queries, (i + 1) * queries), slice(i * pages * page, i * pages * page + width)
        expected = expected_logits(q[part], keys[own], torch.ones(width, device="cuda"), weights[part])
        seen = torch.arange(width, device="cuda") < visible[part, None]
        if seen.any():
            assert relative_error(out[part][seen], expected[seen]) < 1e-3


@gpu
@hopper
@pytest.mark.parametrize("rows, sequences", [(9, 3), (300, 4), (17, 17), (1, 1)])
@pytest.mark.parametrize("entries", [64, 128])
def test_index_scores_agree_with_the_reference(entries, rows, sequences, monkeypatch):
    """Prefill and, with a row a sequence, decode."""
    monkeypatch.setattr(indexer, "FEWEST_SCORES", 0)
    monkeypatch.setattr(indexer, "NARROWEST", 0)
    torch.manual_seed(entries)
    blocks = 5
    iq = mxfp4_round_trip(torch.randn(rows, 32, 128, device="cuda")).bfloat16()
    weights = torch.randn(rows, 32, device="cuda").bfloat16()
    pages = sequences * blocks + 5
    cache = pack_mxfp4_row(torch.randn(pages * entries, 128, device="cuda")).view(pages, entries, 68)
    tables = torch.randperm(pages, device="cuda")[: sequences * blocks].view(sequences, blocks).int()
    owner = torch.arange(rows, device="cuda", dtype=torch.int32) * sequences // rows
    visible = torch.randint(0, blocks * entries + 1, (rows,), device="cuda", dtype=torch.int32)
    most = visible.new_zeros(sequences).scatter_reduce_(0, owner.long(), visible, "amax")
    unseen = torch.arange(blocks, device="cuda") * entries >= most[:, None]
    result = indexer.index_scores(iq, weights, cache, tables.masked_fill(unseen, 1 << 30), owner, visible)
    expected = reference_scores.reference(iq.double(), weights.double(), cache, tables, owner, visible)
    width = expected.shape[1]
    assert (result[:, width:] == float("-inf")).all()
    assert torch.equal(result[:, :width].isinf(), expected.isinf())
    assert relative_error(result[:, :width][~expected.isinf()], expected[~expected.isinf()]) < 1e-3
