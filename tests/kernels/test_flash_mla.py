"""The Hopper attention kernel agrees with float64 attention over what its caches hold; needs a Hopper GPU.

Tolerance: products and sums are FP32, so what is left is rounding to BF16, twice: of the probabilities, of the result.
An error that is uniform within 2^-8 of a value's power of two is 2^-8 / sqrt(3 x 2.16) = 0.15% of a norm (2.16: the
mean square of a mantissa), so two are 0.22%, which is what is measured. Packed keys are exact in BF16; a rotated query
is rounded once more, by which its logits change by 0.15% / sqrt(8) or less: an eighth of it rotates. ROUNDING is 2.3
times the expectation; one key too many or too few of 640 changes a result by 1 / sqrt(640) = 4%.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.deep_jit.compilers import options
from deepinfer.kernels.flash_mla.attention import fused_attention, sparse_attention
from deepinfer.kernels.flash_mla.launch import Inputs, choose_split, launch
from deepinfer.kernels.flash_mla.variants import Variant
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format, load_rows, store_rows

DIM = 512
SCALE = DIM**-0.5
ROUNDING = 5e-3
LATENTS = {"plain": RowFormat.NVFP4, "packed": RowFormat.NVFP4, "fp8": RowFormat.FP8}

pytestmark = pytest.mark.usefixtures("poisoned_memory")
gpu = pytest.mark.gpu
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def make_cache(
    g: torch.Generator, pages: int, size: int, kind: str, row_format: RowFormat, spread: float, device: str
) -> Tensor:
    """A view [pages, size, row] into wider pages, everything around the rows poisoned; row values differ in size."""
    values = torch.randn(pages * size, DIM, generator=g) * torch.exp(spread * torch.randn(pages * size, 1, generator=g))
    if kind != "plain":
        row, dtype, poison = row_format.row_bytes(DIM), torch.uint8, 255
    else:
        row, dtype, poison = DIM, torch.bfloat16, float("nan")
    wide = torch.full((pages, size * row + 32), poison, dtype=dtype)
    cache = wide[:, 16 : 16 + size * row].unflatten(1, (size, row))
    store_rows.reference(cache, torch.arange(pages * size), values, row_format)
    return wide.to(device)[:, 16 : 16 + size * row].unflatten(1, (size, row))


@dataclass
class Case:
    q: Tensor
    window_cache: Tensor
    window_slots: Tensor
    latent_cache: Tensor | None
    latent_slots: Tensor | None
    sink: Tensor

    @property
    def arguments(self) -> tuple:
        caches = (self.window_cache, self.window_slots, self.latent_cache, self.latent_slots)
        return (self.q, *caches, self.sink, SCALE)

    def expected(self, q: Tensor | None = None) -> Tensor:
        """Attention in float64 over the values that the caches hold."""
        q = (self.q if q is None else q).double()
        keys, slots = [], []
        caches = [(self.window_cache, self.window_slots, RowFormat.FP8)]
        if self.latent_cache is not None and self.latent_slots is not None:
            caches.append((self.latent_cache, self.latent_slots, latent_format(self.latent_cache, DIM)))
        for cache, these, packed in caches:
            keys.append(load_rows.reference(cache, these, packed, DIM, torch.float64))
            slots.append(these)
        key, slot = torch.cat(keys, 1), torch.cat(slots, 1)
        key = torch.where((slot >= 0).unsqueeze(-1), key, 0)
        logits = torch.einsum("nhd,nsd->nhs", q, key) * SCALE
        logits = logits.masked_fill((slot < 0).unsqueeze(1), float("-inf"))
        sink = self.sink.double().view(1, -1, 1).expand(*logits.shape[:2], 1)
        top = torch.cat((logits, sink), -1).amax(-1, keepdim=True).clamp_min(-1e300)
        weights = torch.exp(logits - top)
        total = weights.sum(-1, keepdim=True) + torch.exp(sink - top)
        return torch.einsum("nhs,nsd->nhd", weights, key) / torch.where(total > 0, total, 1)


def make_case(
    seed: int,
    tokens: int,
    heads: int,
    window: int,
    selected: int | None,
    kinds: tuple[str, str] = ("plain", "plain"),
    absent: float = 0.15,
    spread: float = 0.3,
    pages: tuple[int, int] = (13, 9),
    sizes: tuple[int, int] = (134, 64),
    device: str = "cuda",
) -> Case:
    g = torch.Generator().manual_seed(seed)

    def make_slots(count: int, rows: int) -> Tensor:
        slots = torch.randint(0, rows, (tokens, count + 3), generator=g, dtype=torch.int32)
        slots[torch.rand(slots.shape, generator=g) < absent] = -1
        return slots.to(device)[:, :count]  # rows are further apart than they are long

    q = torch.randn(tokens, heads, DIM + 8, generator=g).bfloat16().to(device)[..., :DIM]
    window_cache = make_cache(g, pages[0], sizes[0], kinds[0], RowFormat.FP8, spread, device)
    latent_cache = latent_slots = None
    if selected is not None:
        latent_cache = make_cache(g, pages[1], sizes[1], kinds[1], LATENTS[kinds[1]], spread, device)
        latent_slots = make_slots(selected, pages[1] * sizes[1])
    sink = torch.randn(heads, generator=g).to(device)
    return Case(q, window_cache, make_slots(window, pages[0] * sizes[0]), latent_cache, latent_slots, sink)


def relative_error(result: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(result.float()).all()
    return ((result.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


SHAPES = [
    # tokens, heads, window, selected
    (1, 64, 128, 512),
    (7, 64, 128, 512),
    (200, 64, 128, 512),
    (3, 128, 128, 512),
    (5, 64, 128, None),
    (9, 64, 100, 77),
    (4, 64, 1, 1),
    (3, 64, 65, 640),
    (2, 192, 17, 129),
    (2, 64, 128, 2048),  # a list of candidates in place of the best 512
    (1, 128, 128, 16384),  # all that candidate blocks can hold
]
KINDS = [
    ("plain", "plain"),
    ("packed", "packed"),
    ("plain", "packed"),
    ("packed", "plain"),
    ("packed", "fp8"),
    ("plain", "fp8"),
]
FORMATS = ("plain-plain", "packed-packed", "packed-fp8")


@gpu
@hopper
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(shape, kinds):
    case = make_case(sum(n or 0 for n in shape), *shape, kinds=kinds)
    result = sparse_attention(*case.arguments)
    assert result is not NotImplemented
    assert relative_error(result, case.expected()) < ROUNDING


@gpu
@hopper
@pytest.mark.parametrize("split", (1, 2, 4))
@pytest.mark.parametrize("kinds", FORMATS)
def test_a_split_changes_rounding_only_and_repeats_exactly(split, kinds):
    case = make_case(5, 9, 64, 128, 512, kinds=tuple(kinds.split("-")))
    results = []
    for _ in range(5):
        out = torch.full_like(case.q, float("nan")).contiguous()
        launch(Inputs(*case.arguments), out, split=split)
        results.append(out)
    assert relative_error(results[0], case.expected()) < ROUNDING
    assert all(torch.equal(results[0], other) for other in results[1:])


@gpu
@hopper
def test_random_shapes():
    """Fresh ones on every run; the seed is in the message."""
    seed = random.SystemRandom().randrange(1 << 31)
    draw = random.Random(seed)
    for _ in range(24):
        tokens, kinds = draw.choice((1, 2, 5, 33, 67, 133, 150)), tuple(draw.choice(FORMATS).split("-"))
        window, selected = draw.choice((1, 63, 64, 128)), draw.choice((None, 0, 1, draw.randrange(1, 700), 512))
        absent, spread = draw.choice((0.0, 0.15, 0.9, 1.0)), draw.choice((0.1, 1.0))
        case = make_case(draw.randrange(1 << 31), tokens, 64, window, selected, kinds, absent, spread)
        error = relative_error(sparse_attention(*case.arguments), case.expected())
        assert error < ROUNDING, (seed, tokens, window, selected, kinds, absent, error)


@gpu
@hopper
@pytest.mark.parametrize("kinds", FORMATS)
def test_queries_of_different_lengths_share_rings(kinds):
    """Speculation: 1 to 6 query tokens a sequence, each sees one more row of the same ring than the one before."""
    lengths = (6, 1, 3, 6, 2, 1, 5)
    case = make_case(15, sum(lengths), 64, 128, 512, kinds=tuple(kinds.split("-")))
    last = torch.cat([torch.arange(100 * i, 100 * i + length) for i, length in enumerate(lengths)]).cuda()
    ring = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).cuda()
    wanted = last.unsqueeze(1) + torch.arange(-127, 1, device="cuda")
    case.window_slots = torch.where(wanted < 0, -1, ring.unsqueeze(1) * 134 + wanted % 134).int()
    together, expected = sparse_attention(*case.arguments), case.expected()
    assert relative_error(together, expected) < ROUNDING
    alone = Case(
        case.q[6:7], case.window_cache, case.window_slots[6:7], case.latent_cache, case.latent_slots[6:7], case.sink
    )
    assert relative_error(sparse_attention(*alone.arguments), expected[6:7]) < ROUNDING


@gpu
@hopper
@pytest.mark.parametrize("kinds", [*KINDS[:3], KINDS[4]], ids="-".join)
def test_no_key_at_all_gives_zero(kinds):
    case = make_case(6, 6, 64, 128, 512, kinds=kinds)
    case.window_slots[:4] = -1
    case.latent_slots[:4] = -1
    case.latent_slots[4] = -1  # one branch alone
    case.window_slots[5] = -1
    result = sparse_attention(*case.arguments)
    assert (result[:4] == 0).all()
    assert relative_error(result, case.expected()) < ROUNDING


@gpu
@hopper
@pytest.mark.parametrize("kinds", [*KINDS[:2], KINDS[4]], ids="-".join)
def test_extreme_values(kinds):
    """Logits far apart, keys of very different size, sinks that dominate, vanish or are infinite.

    A result that few large keys decide does not average their probabilities' rounding: 2^-8 of each, and cancellation.
    """
    case = make_case(7, 8, 64, 128, 512, kinds=kinds, spread=3.0)
    case.q.mul_(torch.logspace(-3, 1.5, 8, device="cuda").view(-1, 1, 1))
    case.sink[:6] = torch.tensor([-float("inf"), float("inf"), 1e4, -1e4, 80.0, -80.0], device="cuda")
    expected = case.expected()
    expected[:, 1] = 0  # an infinite sink takes everything
    result = sparse_attention(*case.arguments)
    for token in range(8):
        assert relative_error(result[token], expected[token]) < 2e-2


@gpu
@hopper
def test_rows_that_are_not_asked_for_may_hold_nan():
    case = make_case(8, 5, 64, 128, 512)
    case.window_cache[0, 0] = float("nan")  # what a slot of -1 would read
    case.latent_cache[0, 0] = float("nan")
    case.window_slots[case.window_slots == 0] = 1
    case.latent_slots[case.latent_slots == 0] = 1
    assert relative_error(sparse_attention(*case.arguments), case.expected()) < ROUNDING


@gpu
@hopper
def test_a_key_of_nan_shows():
    case = make_case(9, 4, 64, 128, 512)
    case.latent_cache[2, 3, 5] = float("nan")
    case.latent_slots[1, 7] = 2 * 64 + 3
    result = sparse_attention(*case.arguments)
    assert result[1].isnan().any()


@gpu
@hopper
def test_no_tokens():
    case = make_case(10, 1, 64, 128, 512)
    empty = Case(
        case.q[:0], case.window_cache, case.window_slots[:0], case.latent_cache, case.latent_slots[:0], case.sink
    )
    assert sparse_attention(*empty.arguments).shape == (0, 64, DIM)


@gpu
@hopper
def test_captured_in_a_graph():
    case = make_case(11, 12, 64, 128, 512, kinds=("packed", "packed"))
    expected = sparse_attention(*case.arguments)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sparse_attention(*case.arguments)
    result.fill_(float("nan"))
    case.q.mul_(0.5)
    graph.replay()
    assert relative_error(result, case.expected()) < ROUNDING
    assert not torch.equal(result, expected)


@gpu
@hopper
@pytest.mark.parametrize("q_norm", (False, True))
@pytest.mark.parametrize("tokens", (3, 150))
def test_fused_agrees_with_the_steps_in_float64(tokens, q_norm):
    case = make_case(12 + tokens, tokens, 64, 128, 512, kinds=("packed", "packed"))
    angle = torch.rand(tokens, 32, device="cuda", dtype=torch.float64) * 6.28
    values, scales = fused_attention(
        case.q, angle.cos().float(), angle.sin().float(), *case.arguments[1:], q_norm=q_norm
    )
    q = case.q.double()
    if q_norm:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-20)
    expected = rotate(case.expected(rotate(q, angle)), -angle)
    groups = expected.unflatten(-1, (16, 32))
    result = values.double().unflatten(-1, (16, 32)) * torch.exp2(scales.double() - 127).unsqueeze(-1)
    assert relative_error(result, groups) < 4e-2  # E4M3 rounds to 1 / 16
    exact = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp_min(1e-4) / 448)))
    agree = (torch.exp2(scales.double() - 127) == exact).double().mean()
    assert agree > 0.98  # a maximum next to a power of two may fall on its other side


@gpu
@hopper
@pytest.mark.parametrize("kinds", KINDS[:2], ids="-".join)
def test_fused_without_the_cast(kinds):
    case = make_case(14, 140, 64, 128, 512, kinds=kinds)
    angle = torch.rand(140, 32, device="cuda", dtype=torch.float64) * 6.28
    cos, sin = angle.cos().float(), angle.sin().float()
    result, scales = fused_attention(case.q, cos, sin, *case.arguments[1:], fp8=False)
    assert scales is None
    assert relative_error(result, rotate(case.expected(rotate(case.q.double(), angle)), -angle)) < 6e-3


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    even, odd = x[..., 448:].unflatten(-1, (32, 2)).unbind(-1)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :448], turned), -1)


@gpu
@hopper
def test_what_it_does_not_cover_is_left_to_others():
    case = make_case(13, 2, 64, 128, 64)
    q, *rest = case.arguments
    assert sparse_attention(q.float(), *rest) is NotImplemented
    assert sparse_attention(q[:, :40], *rest) is NotImplemented
    assert sparse_attention(q[..., :448], *rest) is NotImplemented
    assert sparse_attention(q, case.window_cache.float(), *rest[1:]) is NotImplemented
    assert sparse_attention(q, case.window_cache, case.window_slots.long(), *rest[2:]) is NotImplemented
    assert sparse_attention(q[:1], *rest) is NotImplemented  # slots of two tokens
    assert sparse_attention(q, *rest[:4], case.sink[:63], SCALE) is NotImplemented


def test_the_fused_kernel_says_what_it_needs():
    q, ones = torch.zeros(2, 64, DIM), torch.ones(2, 32)
    with pytest.raises(ValueError, match=r"q must be BF16 .* got q torch.float32 \[2, 64, 512\] on cpu"):
        fused_attention(q, ones, ones, q, torch.zeros(2, 1, dtype=torch.int32), None, None, torch.zeros(64), SCALE)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kind", ("plain", "packed", "fp8"))
def test_matrix_products_overlap_with_the_rest(kind, tmp_path):
    """ptxas serialises all products, silently, where a register of a running one may be touched; no loop spills."""
    variant = {
        "plain": Variant(64, "bf16", 0, "bf16", 0),
        "packed": Variant(64, RowFormat.FP8, 134, RowFormat.NVFP4, 128, split=2),
        "fp8": Variant(64, RowFormat.FP8, 134, RowFormat.FP8, 128),
    }[kind]
    build = variant.build()
    arguments = options(build.defines, build.arch, build.source.parent)
    arguments[arguments.index("-arch=sm_90a")] = "-gencode=arch=compute_90a,code=sm_90a"
    command = [
        "nvcc",
        "-cubin",
        "-Xptxas",
        "-v",
        *arguments,
        str(build.source),
        "-o",
        str(tmp_path / "attention.cubin"),
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "Used 168 registers" in log
    if variant.split == 1:  # in a cluster, a few words where the shares are added, once a token
        assert " 0 bytes spill stores, 0 bytes spill loads" in log
    assert "serialized" not in log
    assert "warning" not in log


@pytest.mark.parametrize("tokens", (1, 16, 33, 34, 64, 66, 67, 132, 1000))
def test_split_keeps_within_the_card(tokens):
    split = choose_split(tokens, 64, 132)
    assert split in (1, 2, 4)
    assert split == 1 or tokens * split <= 132
    assert split == 4 or tokens * split * 2 > 132
