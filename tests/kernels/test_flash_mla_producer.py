"""The code that fills attention's key tiles, compiled for the CPU: bit for bit what the caches' formats say."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.flash_mla.launch import _Params, _Query, _source
from deepinfer.kernels.flash_mla.variants import SOURCE, Variant
from deepinfer.kernels.reference.cache_rows import RowFormat, load_rows, store_rows
from tests.kernels.on_host import compile_on_host, copy_sources, needs_compiler
from tests.kernels.test_flash_mla_on_host import IMITATED

DIM = 512
ENTRY = """
// 128 threads produce; one more takes each half tile when it is ready, and gives it back.
extern "C" bool on_host(const Params* p, int rank, u8* out) {
    std::mt19937 random(rank);
    forget_launch(&random);
    TensorMap map = {p->query.base, p->query.token_stride, p->query.head_stride};
    return run(1, 1, 160, SHARED_BYTES, [=] {
        SHARED_MEMORY(shared);
        const Barriers barriers = {shared_address(shared + BARRIERS)};
        if (threadIdx.x == 0) {
            barrier_init(barriers.query_ready(), 1), barrier_init(barriers.query_free(), 1);
            for (int i = 0; i < 4; i++) {
                barrier_init(barriers.ready(i / 2, i % 2), 128 + (i / 2 == i % 2 ? BIAS_THREADS : 0));
                barrier_init(barriers.free(i / 2, i % 2), 1);
            }
        }
        __syncthreads();
        if (threadIdx.x < 128) produce(*p, map, barriers, shared, 0, p->tokens, 1, rank);
        if (threadIdx.x != 128) return;
        barrier_wait(barriers.query_ready(), 0);
        for (int pair = 0; pair < Tiles(*p, rank).pairs(); pair++) {
            u8* tiles = out + pair * (4 * HALF_TILE_BYTES + 512);
            for (int i : {0, 3, 1, 2}) {
                const int tile = i / 2, half = i % 2;
                barrier_wait(barriers.ready(tile, half), pair & 1);
                memcpy(tiles + i * HALF_TILE_BYTES, shared + KEYS + i * HALF_TILE_BYTES, HALF_TILE_BYTES);
                if (tile == half) memcpy(tiles + 4 * HALF_TILE_BYTES + tile * 256, shared + BIAS + tile * 256, 256);
                barrier_arrive(barriers.free(tile, half));
            }
        }
        barrier_arrive(barriers.query_free());
    });
}
"""
VARIANTS = {
    "fp8-nvfp4": Variant(64, RowFormat.FP8, 5, RowFormat.NVFP4, 8),
    "bf16-nvfp4": Variant(64, "bf16", 5, RowFormat.NVFP4, 8),
    "fp8-bf16": Variant(64, RowFormat.FP8, 5, "bf16", 8),
    "bf16-bf16": Variant(64, "bf16", 5, "bf16", 8),
    "fp8-fp8": Variant(64, RowFormat.FP8, 5, RowFormat.FP8, 8),
    "fp8": Variant(64, RowFormat.FP8, 5, None, 0),
    "bf16-bf16-2": Variant(64, "bf16", 5, "bf16", 8, split=2),
    "fp8-nvfp4-4": Variant(64, RowFormat.FP8, 5, RowFormat.NVFP4, 8, split=4),
}

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=list(VARIANTS))
def built(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    copy_sources(folder, SOURCE, IMITATED)
    on_host = compile_on_host(folder, VARIANTS[request.param].build(), ENTRY).on_host
    on_host.restype = ctypes.c_bool
    return VARIANTS[request.param], on_host


def make_cache(g: torch.Generator, pages: int, size: int, row_format: RowFormat | str) -> Tensor:
    """A cache [pages, size, row] in wider pages, with values of very different size and some that are NaN."""
    values = torch.randn(pages * size, DIM, generator=g) * torch.exp(4 * torch.randn(pages * size, 1, generator=g))
    values[3, 64:128] = 0
    values[4, :16] *= 1e-4  # a subnormal NVFP4 scale
    plain = row_format == "bf16"
    row = DIM if isinstance(row_format, str) else row_format.row_bytes(DIM)
    wide = torch.zeros(pages, size * row + 16, dtype=torch.bfloat16 if plain else torch.uint8)
    cache = wide[:, : size * row].unflatten(1, (size, row))
    store_rows.reference(cache, torch.arange(pages * size), values, RowFormat.FP8 if plain else row_format)
    if isinstance(row_format, RowFormat):  # a group that holds NaN has a scale of NaN
        cache[0, 2, -1] = 255 if row_format is RowFormat.FP8 else 127
    return cache


def make_slots(g: torch.Generator, rows: int, count: int) -> Tensor:
    """[1, count], a fifth of them -1, from a wider tensor."""
    slots = torch.randint(0, rows, (1, count + 2), generator=g, dtype=torch.int32)
    slots[torch.rand(slots.shape, generator=g) < 0.2] = -1
    return slots[:, :count]


def produce(
    on_host: Any, caches: list[Tensor | None], slots: list[Tensor | None], pairs: int, rank: int = 0
) -> tuple[Tensor, Tensor]:
    """A block's tiles BF16 [2 x pairs, 64, 512] and their biases [2 x pairs, 64]."""
    q = torch.zeros(1, 64, DIM, dtype=torch.bfloat16)
    window, latent = _source(caches[0], slots[0])[1], _source(caches[1], slots[1])[1]
    params = _Params(_Query(q.data_ptr(), q.stride(0) * 2, q.stride(1) * 2), window, latent, tokens=1)
    out = torch.zeros(pairs, 131072 + 512, dtype=torch.uint8)
    assert on_host(ctypes.byref(params), rank, ctypes.c_void_p(out.data_ptr())), "threads wait for each other for ever"
    # [tile, 8 sub-tiles of 64 columns, 64 rows, 8 chunks of 16 bytes], chunks swizzled by the row
    raw = out[:, :131072].reshape(2 * pairs, 8, 64, 8, 16)
    row, chunk = torch.arange(64).unsqueeze(1), torch.arange(8)
    tiles = raw[:, :, row, chunk ^ (row % 8)].flatten(-2).view(torch.bfloat16).transpose(1, 2).flatten(2)
    return tiles, out[:, 131072:].contiguous().view(torch.float32).view(2 * pairs, 64)


def all_tiles(variant: Variant, caches: list[Tensor | None], slots: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """By the formats' definitions: BF16 [tiles, 64, 512], the window's first, and which of their rows are there."""
    keys, alive = [], []
    scaled = 2.0**-16 if "bf16" not in (variant.window_format, variant.latent_format) else 1.0
    for cache, these, packed in zip(caches, slots, (variant.window_format, variant.latent_format), strict=True):
        if cache is None or these is None:
            continue
        rows = load_rows.reference(cache, these[0], packed, DIM, torch.float64)
        rows = torch.where((these[0] >= 0).unsqueeze(1), rows * scaled, 0)
        keys.append(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 64)))
        alive.append(torch.nn.functional.pad(these[0] >= 0, (0, -len(rows) % 64)))
    return torch.cat(keys).unflatten(0, (-1, 64)).bfloat16(), torch.cat(alive).unflatten(0, (-1, 64))


def check(
    on_host: Any,
    caches: list[Tensor | None],
    slots: list[Tensor | None],
    tiles: Tensor,
    alive: Tensor,
    rank: int = 0,
) -> None:
    """`tiles` are the block's; a tile that is missing in the last pair has no rows."""
    pairs = max(-(-len(tiles) // 2), 1)
    absent = 2 * pairs - len(tiles)
    tiles = torch.cat((tiles, torch.zeros(absent, 64, DIM, dtype=tiles.dtype)))
    alive = torch.cat((alive, torch.zeros(absent, 64, dtype=torch.bool)))
    found, bias = produce(on_host, caches, slots, pairs, rank)
    torch.testing.assert_close(found, tiles, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bias == 0, alive) and (bias[~alive] == -float("inf")).all()


@pytest.mark.parametrize(("window", "selected"), [(128, 512), (64, 64), (100, 77), (1, 300), (640, 0), (3, 0)])
def test_tiles_hold_the_rows(built, window, selected):
    """Every block of a cluster has its share of the tiles, and together they have all."""
    variant, on_host = built
    g = torch.Generator().manual_seed(window + selected)
    caches: list[Tensor | None] = [make_cache(g, 7, 5, variant.window_format), None]
    slots: list[Tensor | None] = [make_slots(g, 35, window), None]
    if variant.latent_format is not None:
        caches[1], slots[1] = make_cache(g, 6, 8, variant.latent_format), make_slots(g, 48, selected)
    tiles, alive = all_tiles(variant, caches, slots)
    for rank in range(variant.split):
        share = slice(len(tiles) * rank // variant.split, len(tiles) * (rank + 1) // variant.split)
        check(on_host, caches, slots, tiles[share], alive[share], rank)


def test_offsets_beyond_32_bits(built):
    """Pages 3 GiB apart, as in a cache of an H200: more than 2^31 bytes, and in BF16 more than 2^32 elements."""
    variant, on_host = built
    if variant.split > 1:
        pytest.skip("the same code")
    g = torch.Generator().manual_seed(0)
    caches, far, slots = [], [], []
    for row_format, page in ((variant.window_format, 5), (variant.latent_format, 8)):
        if row_format is None:
            caches.append(None), far.append(None), slots.append(None)
            continue
        near = make_cache(g, 4, page, row_format).contiguous()
        apart = 3 << 30  # bytes; what is never written takes no memory
        memory = torch.frombuffer(mmap.mmap(-1, 3 * apart + (1 << 20)), dtype=near.dtype)
        wide = memory.as_strided(near.shape, (apart // near.element_size(), near.shape[2], 1))
        wide.copy_(near)
        caches.append(near), far.append(wide), slots.append(make_slots(g, 4 * page, 200))
    tiles, alive = all_tiles(variant, caches, slots)
    check(on_host, far, slots, tiles, alive)
