"""Tensors of more than 2^31 values: offsets in them do not fit into 32 bits. Needs a CUDA device with 80 GB."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import OPERATIONS

pytestmark = pytest.mark.gpu
ROWS, VOCAB, DIM = 32768, 129280, 5120
MANY = 430_000  # rows of DIM values


@pytest.fixture(autouse=True)
def enough_memory():
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("not enough memory")
    yield
    torch.cuda.empty_cache()


def behind(rows: int, width: int) -> Tensor:
    """Rows to look at: the first, those around 2^31 values, and the last."""
    boundary = 2**31 // width
    return torch.tensor([0, boundary - 1, boundary, boundary + 1, rows - 1], device="cuda")


def random(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, width, dtype=dtype, device="cuda").normal_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_k(dtype: torch.dtype):
    scores, rows = random(ROWS, VOCAB, dtype), behind(ROWS, VOCAB)
    positions = ops.top_k_positions(scores, 512)[rows]
    assert torch.equal(positions.cpu(), OPERATIONS["top_k_positions"].reference(scores[rows].cpu(), 512))


def test_sampler():
    """Rows far behind draw what they would draw by themselves."""
    logits, rows = random(ROWS, VOCAB, torch.float32), behind(ROWS, VOCAB)
    one = torch.ones(ROWS, dtype=torch.float64, device="cuda")
    row = torch.arange(ROWS, device="cuda")
    arguments = one * 0.8, torch.full_like(row, 50), 50, one * 0.9, one * 0, row, row
    tokens, largest = ops.draw_tokens(logits, *arguments)
    few = tuple(a[rows] if isinstance(a, Tensor) else a for a in arguments)
    alone = ops.draw_tokens(logits[rows], *few)
    assert torch.equal(tokens[rows], alone[0]) and torch.equal(largest[rows], alone[1])
    assert torch.equal(largest[rows], logits[rows].max(1).values)


@pytest.mark.parametrize(("height", "columns"), [(1, DIM), (128, 128), (1, 32)])
def test_casts(height: int, columns: int):
    x = random(MANY, DIM, torch.bfloat16)
    codes, scales = ops.cast_groups(x, "e4m3", "float32", height, columns)
    first = MANY // height * height - height
    expected = OPERATIONS["cast_groups"].reference(
        x[first : first + height].float(), "e4m3", "float32", height, columns
    )
    assert torch.equal(codes[first : first + height], expected[0])
    assert torch.equal(scales[first // height], expected[1][0])


def test_rows_of_a_wide_model():
    x, weight, rows = random(MANY, DIM, torch.bfloat16), random(1, DIM, torch.bfloat16)[0], behind(MANY, DIM)
    expected = OPERATIONS["rms_norm"].reference(x[rows], weight, 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6)[rows], expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(ops.norm_cast(x, weight, 1e-6)[0][rows], ops.norm_cast(x[rows].contiguous(), weight, 1e-6)[0])


def test_a_table_of_more_than_4_gib():
    table = torch.randint(0, 126, (1, 17_000_000, 264), dtype=torch.uint8, device="cuda")
    slots = torch.tensor([0, 2**31 // 264, 2**32 // 264 + 1, 16_999_999], device="cuda")
    loaded = ops.load_rows(table, slots, RowFormat.FP8, 256, torch.bfloat16)
    few = table[:, slots].contiguous()
    expected = ops.load_rows(few, torch.arange(4, device="cuda"), RowFormat.FP8, 256, torch.bfloat16)
    assert torch.equal(loaded, expected)
