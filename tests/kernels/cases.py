"""Random inputs of every kernel operation: what each backend must agree on with the PyTorch reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.ops import RowFormat
from deepinfer.kernels.reference.quant import quantize_fp4_weight
from tests.kernels.more_cases import MORE, MORE_EXACT

Case = tuple[Any, ...]  # the arguments of one call
INF, NAN = float("inf"), float("nan")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def integers(generator: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def strided_cache(g: torch.Generator, pages: int, size: int, dim: int, kind: str, row_format: RowFormat) -> Tensor:
    """A view [pages, size, row] into a wider state row, as the engine's caches are; the space around it is poisoned."""
    if kind == "packed":
        row = row_format.row_bytes(dim)
        wide = torch.full((pages, size * row + 24), 255, dtype=torch.uint8)
        cache = wide[:, 8 : 8 + size * row].unflatten(1, (size, row))
        values = normal(g, pages * size, dim) * torch.exp(normal(g, pages * size, 1))
        from deepinfer.kernels.reference.cache_rows import store_rows

        store_rows.reference(cache, torch.arange(pages * size), values, row_format)
        return cache
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
    wide = torch.full((pages, size * dim + 5), float("nan"), dtype=dtype)
    cache = wide[:, 3 : 3 + size * dim].unflatten(1, (size, dim))
    cache.copy_(normal(g, pages, size, dim))
    return cache


def extreme_rows(g: torch.Generator, n: int, dim: int) -> Tensor:
    """Zeros, huge, tiny and denormal rows, exact ties of every format, and ordinary ones."""
    rows = normal(g, n, dim) * 10.0 ** integers(g, -6, 4, n, 1).float()
    special = [
        torch.zeros(dim),
        -torch.zeros(dim),
        normal(g, dim) * 1e30,
        normal(g, dim) * 1e-38,
        normal(g, dim) * 1e-42,
        torch.linspace(-6, 6, dim).mul(4).round().div(4),
        torch.arange(dim).remainder(17).sub(8).float() * 0.25,
        torch.arange(dim).float() * 2.0**-9,
        torch.full((dim,), 448.0),
        torch.full((dim,), 1e-4),
        torch.arange(dim).float() * 0.0625 + 448,
        torch.full((dim,), 6 * 2.0**-9),
    ]
    for i, row in enumerate(special[:n]):
        rows[i] = row
    return rows


def broken_rows(g: torch.Generator, n: int, dim: int) -> Tensor:
    """Rows that hold NaN of either sign or an infinity in some of their groups."""
    rows = normal(g, n, dim)
    for i, value in zip(range(n), (float("nan"), -float("nan"), INF, -INF) * n, strict=False):
        rows[i, (7 * i) % dim] = value
    return rows


def linear(g: torch.Generator) -> Iterator[Case]:
    for n, k, columns in ((0, 32, 8), (1, 384, 1024), (1, 33, 5), (7, 192, 50), (40, 96, 24), (200, 64, 32)):
        yield normal(g, n, k), normal(g, columns, k)
        yield normal(g, n, k), normal(g, columns, k).bfloat16()
    yield normal(g, 5, 96)[:, 32:], normal(g, 17, 64)
    yield normal(g, 64, 5).T, normal(g, 17, 64)


def rms_norm(g: torch.Generator) -> Iterator[Case]:
    for n, dim in ((0, 64), (1, 384), (7, 33), (130, 512)):
        yield normal(g, n, dim) * 3, normal(g, dim), 1e-20
    yield normal(g, 2, 3, 64) * 1e-12, normal(g, 64), 1e-20
    yield normal(g, 2, 64) * 1e15, normal(g, 64), 1e-6
    yield broken_rows(g, 2, 64), normal(g, 64), 1e-6
    wide = normal(g, 5, 80)
    yield wide[:, :48], normal(g, 48), 1e-20
    yield wide[:, 48:], normal(g, 32), 1e-20
    yield wide[::2], normal(g, 80), 1e-20
    yield wide.T, normal(g, 5), 1e-20


def rope(g: torch.Generator) -> Iterator[Case]:
    for n, heads, dim, pairs in ((0, 2, 32, 8), (1, 8, 128, 16), (5, 3, 50, 7), (9, 4, 64, 32)):
        for inverse in (False, True):
            angle = normal(g, n, pairs) * 10
            yield normal(g, n, heads, dim), angle.cos(), angle.sin(), inverse


def norm_rope(g: torch.Generator) -> Iterator[Case]:
    for n, dim, pairs in ((0, 32, 8), (1, 128, 16), (5, 50, 7), (9, 64, 32)):
        angle = normal(g, n, pairs) * 10
        yield normal(g, n, dim) * 3, normal(g, dim), 1e-6, angle.cos(), angle.sin()
    angle = normal(g, 4, 8)
    yield normal(g, 4, 80)[:, 16:], normal(g, 64), 1e-20, angle.cos(), angle.sin()


def norm_latents(g: torch.Generator) -> Iterator[Case]:
    for n, q_dim, dim, pairs in ((0, 64, 32, 8), (1, 192, 128, 16), (5, 33, 50, 7), (9, 48, 64, 32)):
        angle = normal(g, n, pairs) * 10
        yield normal(g, n, q_dim + dim) * 3, normal(g, q_dim), normal(g, dim), 1e-6, angle.cos(), angle.sin()


def swiglu(g: torch.Generator) -> Iterator[Case]:
    for n, inner, limit in ((0, 8, 10.0), (1, 128, 10.0), (6, 37, 0.5)):
        yield normal(g, n, 2 * inner) * 8, limit
    yield normal(g, 3, 64) * 1e4, 10.0
    rows = broken_rows(g, 8, 64)
    yield torch.where(rows.isfinite(), rows, torch.nan), 10.0


def hc_mix(g: torch.Generator, n: int, hc: int, dim: int) -> tuple[Any, ...]:
    mixes = hc * (2 + hc)
    fn = normal(g, mixes, hc * dim) * (hc * dim) ** -0.5
    weights = fn, normal(g, 3), normal(g, mixes), normal(g, dim)
    return (torch.rand(n, hc, generator=g), *weights, 20, 1e-6, 1e-20)


HC_SHAPES = ((0, 4, 64), (1, 4, 384), (2, 4, 96), (5, 2, 40), (33, 4, 128), (3, 6, 32), (2, 9, 32))


def hc_post(g: torch.Generator) -> Iterator[Case]:
    for n, hc, dim in HC_SHAPES:
        yield normal(g, n, hc, dim), normal(g, n, dim), normal(g, n, hc), torch.rand(n, hc, hc, generator=g)


def hc_pre(g: torch.Generator) -> Iterator[Case]:
    for n, hc, dim in HC_SHAPES:
        yield normal(g, n, hc, dim), *hc_mix(g, n, hc, dim)
    repeated = normal(g, 3, 1, 64).expand(-1, 4, -1)
    one_hot = torch.tensor([1.0, 0, 0, 0]).expand(3, -1)
    yield repeated, one_hot, *hc_mix(g, 3, 4, 64)[1:]


def hc_post_pre(g: torch.Generator) -> Iterator[Case]:
    for n, hc, dim in HC_SHAPES:
        comb = torch.rand(n, hc, hc, generator=g)
        yield normal(g, n, hc, dim), normal(g, n, dim), normal(g, n, hc), comb, *hc_mix(g, n, hc, dim)


def sparse_attention(g: torch.Generator) -> Iterator[Case]:
    for kind, latent in (
        *((kind, RowFormat.NVFP4) for kind in ("float32", "bfloat16", "packed")),
        ("packed", RowFormat.FP8),
    ):
        for n, heads, dim, window, selected in (
            (0, 2, 32, 4, 4),
            (1, 8, 128, 128, 512),
            (1, 1, 32, 3, 0),
            (3, 5, 64, 17, 9),
            (40, 4, 96, 16, 24),
            (2, 64, 512, 20, 30),
        ):
            pages, size = 6, 50
            q = normal(g, n, heads, dim)
            window_cache = strided_cache(g, pages, size, dim, kind, RowFormat.FP8)
            window_slots = integers(g, -40, pages * size, n, window).clamp_min(-1)
            latent_cache = strided_cache(g, pages, size, dim, kind, latent)
            latent_slots = integers(g, -150, pages * size, n, selected).clamp_min(-1)
            if n > 1:
                window_slots[0], latent_slots[0] = -1, -1  # no key at all
                latent_slots[1] = -1
            sink = normal(g, heads) * 3
            yield q, window_cache, window_slots, latent_cache, latent_slots, sink, dim**-0.5
            yield q * 2, window_cache, window_slots, None, None, sink, dim**-0.5
            if n > 1:  # NaN in a query, in the keys of another row, and in a sink
                q, sink = q.clone(), sink.clone()
                q[-1, 0, 5] = sink[-1] = torch.nan
                window_slots[2 % n] = -1
                if kind != "packed":
                    window_cache[0, 0, 3] = torch.nan
                    window_slots[2 % n, 0] = 0
                yield q, window_cache, window_slots, latent_cache, latent_slots, sink, dim**-0.5


def rotated_attention(g: torch.Generator) -> Iterator[Case]:
    for q, *rest in sparse_attention(g):
        angle = torch.rand(q.shape[0], 32 if q.shape[-1] == 512 else 8, generator=g) * 6.28
        yield q, angle.cos(), angle.sin(), *rest


def index_scores(g: torch.Generator) -> Iterator[Case]:
    for kind in ("float32", "bfloat16", "packed"):
        for n, heads, dim, sequences, longest in (
            (0, 2, 32, 1, 5),
            (1, 32, 128, 1, 700),
            (37, 2, 32, 3, 90),
            (50, 4, 64, 1, 300),
        ):
            entries, blocks = 24, 40
            cache = strided_cache(g, blocks, entries, dim, kind, RowFormat.MXFP4)
            tables = integers(g, 0, blocks, sequences, -(-longest // entries))
            of_row = integers(g, 0, sequences, n).sort().values
            visible = integers(g, 0, longest + 1, n)
            yield normal(g, n, heads, dim), normal(g, n, heads), cache, tables, of_row, visible
    cache = strided_cache(g, 4, 8, 32, "float32", RowFormat.MXFP4)
    yield (
        normal(g, 2, 2, 32),
        normal(g, 2, 2),
        cache,
        integers(g, 0, 4, 1, 4),
        torch.zeros(2).int(),
        torch.zeros(2).int(),
    )


def tied_scores(g: torch.Generator, n: int, width: int) -> Tensor:
    """Many equal scores, both zeros and unreachable positions."""
    scores = normal(g, n, width).mul(2).round()
    scores = torch.where(torch.rand(n, width, generator=g) < 0.2, -0.0, scores)
    return torch.where(torch.rand(n, width, generator=g) < 0.3, -INF, scores)


def top_k_positions(g: torch.Generator) -> Iterator[Case]:
    for n, width, k in ((0, 9, 4), (1, 0, 3), (1, 3000, 512), (4, 10, 10), (5, 7, 12), (6, 300, 8), (3, 50, 1)):
        yield normal(g, n, width) * 1e3, k
        yield tied_scores(g, n, width), k
    yield torch.full((2, 9), -INF), 4
    yield torch.tensor([[3e38, 1e-45, -1e-45, -3e38, 0.0, -0.0]]), 3
    yield torch.tensor([[1.0, NAN, -INF, INF, -NAN, 2.0], [NAN, -NAN, NAN, -INF, NAN, -3e38]]), 4


def candidate_blocks(g: torch.Generator) -> Iterator[Case]:
    for n, width, block, top in ((1, 0, 4, 3), (1, 700, 8, 20), (6, 50, 4, 3), (5, 33, 8, 50), (3, 12, 4, 1)):
        visible = integers(g, 0, width + 1, n)
        hidden = torch.arange(width) >= visible[:, None]
        yield tied_scores(g, n, width).masked_fill(hidden, -INF), visible, block, top
        yield normal(g, n, width).masked_fill(hidden, -INF), visible, block, top


def mask_to_candidates(g: torch.Generator) -> Iterator[Case]:
    for n, width, block in ((0, 12, 4), (1, 700, 8), (6, 50, 4), (3, 9, 16)):
        yield normal(g, n, width), torch.rand(n, -(-width // block), generator=g) < 0.5, block


def ngram_ids(g: torch.Generator) -> Iterator[Case]:
    for n, sequences, size, length, kept in ((1, 1, 2, 3, None), (90, 4, 6, 4, 9), (0, 2, 3, 2, 0), (5, 5, 2, 3, None)):
        wide = integers(g, -1, 400, 12, size + 5, dtype=torch.int64)
        sources = integers(g, 0, n + sequences * size + 1, n, length, dtype=torch.int64)
        count = n if kept is None else kept
        places = torch.randperm(12 * size, generator=g)[:count]  # no two rows to one place
        yield (
            integers(g, 0, 1000, n, dtype=torch.int64), integers(g, -1, 400, 1000, dtype=torch.int64),
            wide[:, 2 : 2 + size], torch.randperm(12, generator=g)[:sequences], sources,
            None if kept is None else torch.randperm(max(n, 1), generator=g)[:count], places // size, places % size,
        )  # fmt: skip


def engram_hash(g: torch.Generator) -> Iterator[Case]:
    for n, length, heads in ((0, 3, 2), (1, 4, 8), (40, 3, 2)):
        history = integers(g, -20, 90000, n, length, dtype=torch.int64).clamp_min(-1)
        multipliers = integers(g, 1, 2**45, length, dtype=torch.int64)
        primes = integers(g, 3, 16_000_900, length - 1, heads, dtype=torch.int64)
        yield history, multipliers, primes, integers(g, 0, 10**8, length - 1, heads, dtype=torch.int64), 2


def engram_gate(g: torch.Generator) -> Iterator[Case]:
    for n, hc, dim in ((0, 4, 32), (1, 4, 384), (9, 2, 50)):
        case = normal(g, n, hc, dim), normal(g, n, (hc + 1) * dim) * 3, normal(g, hc, dim)
        yield *case, None, 1e-20
        yield *case, torch.rand(n, generator=g) < 0.5, 1e-20
    yield normal(g, 3, 4, 32), broken_rows(g, 2, 160).repeat(2, 1)[:3], normal(g, 4, 32), None, 1e-20
    yield normal(g, 2, 1, 32).expand(-1, 4, -1), normal(g, 2, 160), normal(g, 4, 32), None, 1e-20


def moe_gate(g: torch.Generator) -> Iterator[Case]:
    for n, experts, k in ((0, 8, 2), (1, 24, 4), (50, 384, 6), (3, 5, 5)):
        logits = normal(g, n, experts) * 3
        yield logits, normal(g, experts), k, True, 1.5
        yield logits * 20, normal(g, n, experts), k, False, 1.0
    yield torch.zeros(3, 16), torch.zeros(16), 4, True, 1.5


def moe_experts(g: torch.Generator) -> Iterator[Case]:
    for n, dim, inner, experts, k in (
        (0, 64, 32, 4, 2),
        (1, 384, 128, 24, 4),
        (5, 96, 32, 8, 2),
        (70, 64, 96, 6, 3),
        (3, 50, 20, 4, 2),
    ):
        chosen = torch.rand(n, experts, generator=g).argsort(1)[:, :k].int()
        weights = normal(g, experts, 2 * inner, dim) * dim**-0.5, normal(g, experts, dim, inner) * inner**-0.5
        for quantize in (False, True) if dim % 32 == 0 else (False,):
            yield normal(g, n, dim) * 2, chosen, torch.rand(n, k, generator=g), *weights, 10.0, quantize
    chosen = torch.rand(5, 4, generator=g).argsort(1)[:, :2].int()
    weights = normal(g, 4, 64, 64), normal(g, 4, 64, 32)
    yield broken_rows(g, 2, 64).repeat(3, 1)[:5], chosen, torch.rand(5, 2, generator=g), *weights, 10.0, False


def moe_experts_fp4(g: torch.Generator) -> Iterator[Case]:
    for x, chosen, gates, w13, w2, limit, quantize in moe_experts(g):
        if x.shape[1] % 32 == 0:
            (p13, s13), (p2, s2) = quantize_fp4_weight(w13), quantize_fp4_weight(w2)
            yield x, chosen, gates, p13.view(torch.uint8), s13, p2.view(torch.uint8), s2, limit, quantize


def apply_token_bitmask(g: torch.Generator) -> Iterator[Case]:
    for n, vocab in ((0, 64), (1, 1), (3, 8192), (2, 129), (5, 1000)):
        words = (vocab + 31) // 32
        mask = integers(g, -(2**31), 2**31 - 1, n, words)
        mask[:1], mask[1:2] = -1, 0
        yield normal(g, n, vocab), mask
    yield normal(g, 4, 200)[:, :90], integers(g, -(2**31), 2**31 - 1, 4, 5)[:, :3]
    yield broken_rows(g, 4, 70), integers(g, -(2**31), 2**31 - 1, 4, 3)


def draw_tokens(g: torch.Generator) -> Iterator[Case]:
    def case(logits: Tensor, heat: Tensor, counts: Tensor, *rest: Tensor) -> Case:
        dropping = counts[counts < logits.shape[1]]
        return logits, heat, counts, int(dropping.max()) if len(dropping) else 0, *rest

    def column(*values: float, rows: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[integers(g, 0, len(values), rows)]

    for rows, width in ((0, 9), (1, 1), (1, 129), (40, 30), (9, 3001), (3, 40_000)):
        logits = normal(g, rows, width) * 2
        seeds = integers(g, -(2**62), 2**62, rows, dtype=torch.int64)
        counters = integers(g, 0, 2**40, rows, dtype=torch.int64)
        everything = torch.full((rows,), width)
        few = integers(g, 1, width + 1, rows, dtype=torch.int64)
        plain, zeros = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
        yield case(logits, plain, everything, plain, zeros, seeds, counters)
        yield case(tied_scores(g, rows, width).clamp_min(-1e9), zeros, everything, plain, zeros, seeds, counters)
        heat = column(0.0, 1e-300, 0.3, 1.0, 3.0, rows=rows)
        top_p, min_p = column(1.0, 0.9, 0.3, 1e-6, rows=rows), column(0.0, 0.2, 1.0, rows=rows)
        for counts in (everything, few, few.clamp_max(50)):
            yield case(logits, heat, counts, top_p, min_p, seeds, counters)
    broken = broken_rows(g, 5, 300)
    ones = torch.ones(5, dtype=torch.float64)
    yield case(broken, ones, torch.full((5,), 300), ones, ones * 0, torch.arange(5), torch.arange(5))
    yield case(broken, ones, torch.full((5,), 7), ones * 0.5, ones * 0.1, torch.arange(5), torch.arange(5))


CACHES = [("float32", RowFormat.FP8), ("bfloat16", RowFormat.NVFP4), *(("packed", f) for f in RowFormat)]


def store_rows(g: torch.Generator) -> Iterator[Case]:
    for kind, row_format in CACHES:
        for n, dim in ((0, 32), (1, 128), (60, 64), (23, 512)):
            cache = strided_cache(g, 5, 16, dim, kind, row_format)
            slots = torch.randperm(80, generator=g)[:n]
            yield cache, slots, extreme_rows(g, n, dim), row_format
            yield cache.clone(), slots.int(), extreme_rows(g, n, dim), row_format
            yield cache.clone(), slots, broken_rows(g, n, dim), row_format


def load_rows(g: torch.Generator) -> Iterator[Case]:
    for kind, row_format in CACHES:
        for dim in (32, 128, 512):
            cache = strided_cache(g, 5, 16, dim, kind, row_format)
            yield cache, integers(g, 0, 80, 3, 7), row_format, dim, torch.float32
            yield cache, integers(g, 0, 80, 0, dtype=torch.int64), row_format, dim, torch.float32
            yield cache, integers(g, -1, 80, 40, dtype=torch.int64), row_format, dim, torch.float32
        if kind == "packed":  # every byte value, also those that no store writes
            row = row_format.row_bytes(64)
            every = torch.arange(row * 256).reshape(256, 1, row).remainder(257).clamp_max(255).to(torch.uint8)
            yield every, torch.arange(256), row_format, 64, torch.float32


def round_trip_rows(g: torch.Generator) -> Iterator[Case]:
    for kind, row_format in CACHES:
        for n, dim in ((0, 32), (60, 128), (20, 64)):
            yield extreme_rows(g, n, dim), strided_cache(g, 2, 4, dim, kind, row_format), row_format
            yield broken_rows(g, n, dim), strided_cache(g, 2, 4, dim, kind, row_format), row_format


def round_fp8(g: torch.Generator) -> Iterator[Case]:
    for n, dim in ((0, 32), (60, 128), (20, 64)):
        yield (extreme_rows(g, n, dim),)
        yield (broken_rows(g, n, dim),)
    yield (normal(g, 6, 4, 64)[:, 1:3],)


def pool_groups(g: torch.Generator) -> Iterator[Case]:
    for n, sequences, groups, ratio, dim in ((1, 1, 1, 2, 8), (0, 2, 1, 2, 40), (40, 6, 25, 2, 128), (9, 3, 0, 4, 200)):
        slots, kept = 7, ratio * (1 + groups % 3)
        wide = torch.full((slots, kept * 2 * dim + 9), float("nan"))
        carry = wide[:, 4 : 4 + kept * 2 * dim].unflatten(1, (kept, 2, dim))
        carry.copy_(normal(g, slots, kept, 2, dim) * 5)
        places = torch.randperm(slots * kept, generator=g)[: min(n, slots * kept)]  # no two rows to one place
        yield (
            normal(g, n, 2, dim) * 5, carry, torch.randperm(slots, generator=g)[:sequences],
            integers(g, 0, n + sequences * kept, groups, ratio, dtype=torch.int64),
            torch.randperm(max(n, 1), generator=g)[: len(places)], places // kept, places % kept,
        )  # fmt: skip


def verify_tokens(g: torch.Generator) -> Iterator[Case]:
    for sequences, num_drafts in ((0, 2), (1, 1), (5, 5), (40, 3)):
        slots = torch.randperm(sequences + 3, generator=g)[:sequences]
        counts = integers(g, 0, num_drafts + 1, sequences, dtype=torch.int64)
        firsts = (counts + 1).cumsum(0) - counts - 1
        tokens = integers(g, -1, 3, sequences + 3, 1 + num_drafts, dtype=torch.int64)
        chosen = integers(g, 0, 3, int((counts + 1).sum()), dtype=torch.int64)
        yield chosen, tokens, integers(g, 1, 100, sequences + 3, dtype=torch.int64), slots, firsts, counts


def lookup_drafts(g: torch.Generator) -> Iterator[Case]:
    for sequences, longest, num_drafts, match in (
        (0, 5, 2, (1, 2)),
        (3, 1, 5, (1, 4)),
        (9, 70, 5, (2, 4)),
        (4, 2500, 3, (1, 3)),
    ):
        history = integers(g, 0, 3 if longest < 100 else 40, sequences + 2, longest + 9)
        lengths = integers(g, 1, longest + 1, sequences + 2, dtype=torch.int64)
        yield history, torch.randperm(sequences + 2, generator=g)[:sequences], lengths, longest, num_drafts, *match


def token_probabilities(g: torch.Generator) -> Iterator[Case]:
    for rows, width in ((0, 9), (1, 1), (7, 130), (3, 4001)):
        for filters in (False, True):
            heat = torch.tensor([0.0, 0.7, 1.5], dtype=torch.float64)[integers(g, 0, 3, rows)]
            candidates = integers(g, 1, width + 1, rows, dtype=torch.int64) if filters else torch.full((rows,), width)
            top_p = torch.tensor([1.0, 0.6], dtype=torch.float64)[integers(g, 0, 1 + filters, rows)]
            min_p = torch.tensor([0.0, 0.1], dtype=torch.float64)[integers(g, 0, 2, rows)]
            yield normal(g, rows, width) * 3, heat, candidates, top_p, min_p, filters


def accept_or_resample(g: torch.Generator) -> Iterator[Case]:
    for rows, width in ((0, 9), (1, 1), (7, 130), (3, 4001)):
        target, draft = (normal(g, rows, width).mul(2).softmax(-1) for _ in range(2))
        seeds, counters = (integers(g, -(2**62), 2**62, rows, dtype=torch.int64) for _ in range(2))
        yield target, draft, integers(g, 0, width, rows, dtype=torch.int64), seeds, counters


def decode_plan(g: torch.Generator) -> Iterator[Case]:
    for n, pairs, block_size, window, ring, ngram, carry, history in (
        (1, 8, 2, 4, 4, 2, 2, 1),
        (7, 32, 128, 128, 134, 3, 6, 8),
        (40, 12, 8, 5, 9, 4, 4, 7),
    ):
        tables = integers(g, 0, 5000, n, 20)[:, 3:15]
        positions = integers(g, 0, 12 * block_size - 6, n, dtype=torch.int64)
        slots = integers(g, 0, 70, n)
        positions[0] = 0
        for row in range(1, n):  # about every other row goes on with the sequence in front of it
            if row % 6 and torch.rand(1, generator=g) < 0.5:
                slots[row], positions[row] = slots[row - 1], positions[row - 1] + 1
        frequencies = 10_000.0 ** -torch.rand(2, pairs, generator=g, dtype=torch.float64)
        sizes = (2, block_size, window, ring, ngram, carry, history, torch.float32)
        yield positions, slots, tables, frequencies, *sizes


def prefill_step(g: torch.Generator, starts: list[int], counts: list[int], max_blocks: int) -> list[Tensor]:
    """positions, query_start, context_lens, state_slots and block tables of sequences that start anywhere."""
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
    query_start = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    context_lens = torch.tensor(starts, dtype=torch.int32) + torch.tensor(counts, dtype=torch.int32)
    slots = torch.randperm(70, generator=g)[: len(starts)].int()
    return [positions, query_start, context_lens, slots, integers(g, 0, 5000, len(starts), max_blocks + 3)[:, 3:]]


# (tokens in the cache, tokens in the step) of each sequence
PREFILL_STEPS = (([0], [1]), ([5, 0, 31, 130], [3, 40, 1, 7]), ([127, 1, 4], [64, 2, 0]), ([9], [0]), ([600], [300]))


def prefill_plan(g: torch.Generator) -> Iterator[Case]:
    for starts, counts in PREFILL_STEPS:
        for pairs, block_size, ngram in ((32, 128, 3), (12, 8, 2), (4, 16, 4)):
            step = prefill_step(g, starts, counts, 1024 // block_size + 1)
            frequencies = 10_000.0 ** -torch.rand(2, pairs, generator=g, dtype=torch.float64)
            contexts = [start + count for start, count in zip(starts, counts, strict=True)]
            num_groups = sum(c // 2 - s // 2 for s, c in zip(starts, contexts, strict=True))
            num_pending = sum(c - max(s, c // 2 * 2) for s, c in zip(starts, contexts, strict=True))
            carry, history = ((2, ngram - 1), (4, ngram + 2))[ngram % 2]
            num_kept = sum(min(count, history) for count in counts)
            sizes = (2, block_size, ngram, carry, history, torch.float32, num_groups, num_pending, num_kept)
            yield *step, frequencies, *sizes


def window_plan(g: torch.Generator) -> Iterator[Case]:
    for starts, counts in PREFILL_STEPS:
        for window, ring in ((128, 134), (5, 9), (16, 16)):
            *step, _ = prefill_step(g, starts, counts, 1)
            num_previous = sum(min(start, window - 1) for start in starts)
            num_stored = sum(min(count, ring) for count in counts)
            for keep_from in (None, integers(g, 0, 200, len(starts))):
                yield *step, keep_from, window, ring, num_previous, num_stored


def entry_slots(g: torch.Generator) -> Iterator[Case]:
    for n, count, entries in ((1, 1, 1), (3, 8, 64), (5, 0, 2), (0, 4, 2), (4, 1500, 128)):
        tables = integers(g, 0, 1000, 3, 12)
        wider = integers(g, 0, 1000, 3, 20)[:, 4:16]
        owner = integers(g, 0, 3, n)
        positions = integers(g, -1, 12 * entries, n, count)
        yield positions, tables, owner, entries
        yield positions.long(), wider, owner.long(), entries


CASES: dict[str, Callable[[torch.Generator], Iterator[Case]]] = {
    f.__name__: f
    for f in (
        accept_or_resample,
        apply_token_bitmask,
        candidate_blocks,
        decode_plan,
        draw_tokens,
        engram_gate,
        engram_hash,
        entry_slots,
        hc_post,
        hc_post_pre,
        hc_pre,
        index_scores,
        linear,
        load_rows,
        lookup_drafts,
        mask_to_candidates,
        moe_experts,
        moe_experts_fp4,
        moe_gate,
        ngram_ids,
        norm_latents,
        norm_rope,
        pool_groups,
        prefill_plan,
        rms_norm,
        rope,
        rotated_attention,
        round_fp8,
        round_trip_rows,
        sparse_attention,
        store_rows,
        swiglu,
        token_probabilities,
        top_k_positions,
        verify_tokens,
        window_plan,
    )
} | MORE
# Operations whose results are integers, masks or stored formats: every backend agrees exactly.
EXACT = {
    "apply_token_bitmask", "candidate_blocks", "engram_hash", "entry_slots", "load_rows", "lookup_drafts",
    "mask_to_candidates", "ngram_ids", "round_fp8", "round_trip_rows", "store_rows", "top_k_positions",
    "verify_tokens", "window_plan",
} | MORE_EXACT  # fmt: skip
