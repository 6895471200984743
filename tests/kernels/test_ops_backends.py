"""Every backend of every operation agrees with the PyTorch reference, over random, empty, ragged and extreme inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import deepinfer.kernels.ops  # noqa: F401  (registers the backends)
from deepinfer.kernels.reference.quant import dequantize_fp4_weight
from deepinfer.kernels.registry import OPERATIONS
from tests.kernels.cases import CASES, EXACT, normal

SEEDS = (0, 1, 2)
BACKENDS = [
    pytest.param(name, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for name, op in sorted(OPERATIONS.items())
    for device in sorted(op.backends)
]


def copied(argument, device: str = "cpu"):
    """A copy with the same strides on `device`, so that both sides may write into their own."""
    if not isinstance(argument, Tensor):
        return argument
    if argument.is_contiguous() or argument._base is None:
        return argument.clone().to(device)
    base = argument._base.clone().to(device)
    return base.as_strided(argument.shape, argument.stride(), argument.storage_offset())


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill freed memory with NaN, so that a value that a kernel forgot to write shows."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for size in (64, 1024, 16384, 262144):
            [torch.full((size,), float("nan"), device=device) for _ in range(8)]


def test_every_operation_has_cases():
    assert set(CASES) == set(OPERATIONS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_agrees_with_reference(name: str, device: str, seed: int):
    implementation, reference = OPERATIONS[name].backends[device], OPERATIONS[name].reference
    covered = 0
    for case in CASES[name](torch.Generator().manual_seed(seed)):
        ours, theirs = [copied(a, device) for a in case], [copied(a) for a in case]
        result = implementation(*ours)
        if result is NotImplemented:
            continue
        covered += 1
        expected = reference(*theirs)
        result = _to_cpu(result)
        if (
            name.startswith("moe_experts") and case[-1]
        ):  # a last-bit difference may round an activation to the next FP8 value
            assert (result - expected).norm() <= 2e-3 * expected.norm()
        elif name == "draw_tokens":
            compare_draws(result, expected)
        elif name == "index_scores":  # a backend may give more columns than the reference
            width = expected.shape[1]
            assert bool((result[:, width:] == -torch.inf).all())
            compare(name, result[:, :width], expected)
        else:
            compare(name, result, expected)
        for before, after in zip(theirs, ours, strict=True):  # what was written, and that nothing else was
            if isinstance(before, Tensor):
                compare_exactly(_whole(after).cpu(), _whole(before))
    if not covered:
        pytest.skip("this backend covers none of the cases here")


def _to_cpu(result):
    if isinstance(result, tuple):
        return tuple(map(_to_cpu, result))
    return result.cpu() if isinstance(result, Tensor) else result


def compare_draws(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """The same tokens of the rows that count; sums in another order may move a draw at the edge of a token's share."""
    compare("draw_tokens", result[1], expected[1])
    valid = expected[1].isfinite()
    differ = (result[0] != expected[0]) & valid
    assert differ.sum() <= 0.03 * valid.sum()


def _whole(tensor: Tensor) -> Tensor:
    """With the space around a view."""
    return tensor if tensor._base is None else tensor._base


def compare(name: str, result, expected) -> None:
    if isinstance(expected, tuple):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            compare(name, one, other)
    elif expected is None:
        assert result is None
    else:
        assert result.dtype == expected.dtype and result.shape == expected.shape
        if name in EXACT or not expected.is_floating_point():
            compare_exactly(result, expected)
        else:
            finite = expected[expected.isfinite()]
            scale = finite.abs().max().item() if finite.numel() else 1.0
            torch.testing.assert_close(result, expected, rtol=2e-5, atol=4e-6 * max(scale, 1e-30), equal_nan=True)


def compare_exactly(result: Tensor, expected: Tensor) -> None:
    """Bit for bit (NaN equals NaN, -0 does not equal 0)."""
    if expected.is_floating_point() and expected.numel():
        same = (result == expected) & (torch.signbit(result) == torch.signbit(expected))
        assert bool((same | (result.isnan() & expected.isnan())).all())
    else:
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("name", "device"), [b for b in BACKENDS if b.values[1] == "cpu"])
def test_float64_runs_the_reference(name: str, device: str):
    """A float64 call through the registry gives the reference's result in float64."""
    for case in CASES[name](torch.Generator().manual_seed(5)):
        wide = [a.double() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in case]
        if name in ("load_rows", "top_k_positions", "mask_to_candidates", "candidate_blocks", "engram_hash"):
            continue
        expected = OPERATIONS[name].reference(*[copied(a) for a in wide])
        compare_reference = OPERATIONS[name](*[copied(a) for a in wide])
        for one, other in zip(_tuple(compare_reference), _tuple(expected), strict=True):
            if isinstance(other, Tensor):
                compare_exactly(one, other)


def _tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def some_attention(g: torch.Generator, n: int) -> tuple:
    """Rows of two caches with holes, enough work for several threads."""
    window_slots, latent_slots = (torch.randint(-1, 150, (n, count), generator=g).int() for count in (130, 75))
    caches = normal(g, 3, 50, 128), normal(g, 3, 50, 128)
    return normal(g, n, 8, 128), caches[0], window_slots, caches[1], latent_slots, normal(g, 8), 128**-0.5


THREADED = ("sparse_attention", "moe_experts", "moe_experts_fp4", "hc_post_pre", "index_scores", "linear")


@pytest.mark.parametrize("name", THREADED)
def test_threads_do_not_change_results(name: str):
    """One thread and several give the same bits."""
    if "cpu" not in OPERATIONS[name].backends:
        pytest.skip("only the C kernels promise this")
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            g = torch.Generator().manual_seed(9)
            cases = [
                *CASES[name](g),
                *([some_attention(g, n) for n in (1, 3, 9)] if name == "sparse_attention" else []),
            ]
            results.append([OPERATIONS[name].backends["cpu"](*map(copied, case)) for case in cases])
        for one, *others in zip(*results, strict=True):
            for other in others:
                assert one is other is NotImplemented or _same_bits(one, other)
    finally:
        torch.set_num_threads(threads)


def _same_bits(one, other) -> bool:
    pairs = zip(_tuple(one), _tuple(other), strict=True)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def test_attention_does_not_depend_on_the_batch():
    """A row alone, and beside rows that see more keys, gives the same bits."""
    implementation = OPERATIONS["sparse_attention"].backends["cpu"]
    q, window, window_slots, latent, latent_slots, sink, scale = some_attention(torch.Generator().manual_seed(1), 9)
    latent_slots[4, 40:] = -1
    together = implementation(q, window, window_slots, latent, latent_slots, sink, scale)
    if together is NotImplemented:
        pytest.skip("only the C kernels promise this")
    row = slice(4, 5)
    alone = implementation(q[row].clone(), window, window_slots[row], latent, latent_slots[row, :40], sink, scale)
    assert torch.equal(alone, together[row])


def test_rows_do_not_depend_on_their_batch():
    """An expert row computed alone equals, bit for bit, the same row computed among others."""
    g = torch.Generator().manual_seed(3)
    x, gates = normal(g, 33, 64), torch.rand(33, 2, generator=g)
    chosen = torch.rand(33, 6, generator=g).argsort(1)[:, :2].int()
    w13, w2 = normal(g, 6, 64, 64), normal(g, 6, 64, 32)
    together = OPERATIONS["moe_experts"](x, chosen, gates, w13, w2, 10.0, False)
    if OPERATIONS["moe_experts"].backends.get("cpu") is None:
        pytest.skip("only the C kernels promise this")
    for row in (0, 17, 32):
        one = slice(row, row + 1)
        alone = OPERATIONS["moe_experts"](x[one], chosen[one], gates[one], w13, w2, 10.0, False)
        assert torch.equal(alone, together[one])


def test_stored_experts_equal_float_experts():
    """FP4 weights give, bit for bit, what their float32 values give."""
    for case in CASES["moe_experts_fp4"](torch.Generator().manual_seed(4)):
        x, chosen, gates, w13, s13, w2, s2, *rest = case
        dense = dequantize_fp4_weight(w13, s13, torch.float32), dequantize_fp4_weight(w2, s2, torch.float32)
        expected = OPERATIONS["moe_experts"](x, chosen, gates, *dense, *rest)
        compare_exactly(OPERATIONS["moe_experts_fp4"](*case), expected)
