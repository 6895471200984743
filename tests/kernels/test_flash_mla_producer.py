"""The code that fills attention's key tiles, compiled for the CPU: bit for bit what the caches' formats say."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.flash_mla.launch import _Params, _source
from deepinfer.kernels.flash_mla.variants import SOURCE, Variant
from deepinfer.kernels.reference.cache_rows import RowFormat, load_rows, store_rows

DIM = 512
RUN = """
#include <thread>
#include <vector>
extern "C" int produce_all(const Params* p, int rank, u8* out, const u8** ranges, int* counts) {
    const Barriers barriers = {shared_address(shared_memory + BARRIERS)};
    first_barrier = barriers.base;
    memcpy(readable, ranges, sizeof readable);
    memset(shared_memory, 0xFF, sizeof shared_memory);
    for (auto& count : arrivals) count = 0;
    prefetched_outside = false;
    TensorMap map;
    pthread_barrier_init(&together, nullptr, 128);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 128; thread++) {
        threads.emplace_back([&, thread] {
            threadIdx.x = 256 + thread;
            produce(*p, map, barriers, shared_memory, 0, p->tokens, 1, rank);
        });
    }
    for (auto& thread : threads) thread.join();
    memcpy(out, shared_memory + KEYS, 131072);
    memcpy(out + 131072, shared_memory + BIAS, 512);
    std::copy(arrivals, arrivals + 16, counts);
    return prefetched_outside;
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

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


def build(variant: Variant, folder: Path) -> ctypes.CDLL:
    """The kernel's source up to its entry point, over an imitation of the card's instructions."""
    folder, headers = folder / "flash_mla", folder / "deep_jit"
    folder.mkdir(), headers.mkdir()
    for path in SOURCE.parent.glob("*.cu*"):
        text = re.sub(r'asm( volatile)?\((?:[^;]|;\\n|;")*?\);', ";", path.read_text())
        (folder / path.name).write_text(text.replace("#pragma unroll", "//"))
    shutil.copy(Path(__file__).parent / "hopper_on_host.cuh", headers / "hopper.cuh")
    source = (folder / "attention.cu").read_text()
    (folder / "producer.cpp").write_text(source[: source.index("#if SPLIT > 1\n#define CLUSTER")] + RUN)
    defines = [f"-D{name}={value}" for name, value in variant.build().defines.items()]
    library = folder / "producer.so"
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", *defines]
    answer = subprocess.run([*command, "producer.cpp", "-o", str(library)], cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[:3000]
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", params=list(VARIANTS))
def built(request, tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    return VARIANTS[request.param], build(VARIANTS[request.param], tmp_path_factory.mktemp(request.param))


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
    library: ctypes.CDLL, caches: list[Tensor | None], slots: list[Tensor | None], rank: int = 0
) -> tuple[Tensor, Tensor, list[int]]:
    """The last pair of tiles BF16 [2, 64, 512] and its biases [2, 64], arrivals at the four halves' barriers."""
    params = _Params(window=_source(caches[0], slots[0])[1], latent=_source(caches[1], slots[1])[1], tokens=1)
    out = torch.zeros(131072 + 512, dtype=torch.uint8)
    counts = (ctypes.c_int * 16)()
    ranges = (ctypes.c_void_p * 4)()
    for i, cache in enumerate(caches):
        if cache is not None:
            ranges[2 * i] = cache.data_ptr()
            ranges[2 * i + 1] = cache.data_ptr() + cache.shape[0] * cache.stride(0) * cache.element_size()
    assert library.produce_all(ctypes.byref(params), rank, ctypes.c_void_p(out.data_ptr()), ranges, counts) == 0
    # [tile, 8 sub-tiles of 64 columns, 64 rows, 8 chunks of 16 bytes], chunks swizzled by the row
    raw = out[:131072].view(2, 8, 64, 8, 16)
    row, chunk = torch.arange(64).unsqueeze(1), torch.arange(8)
    tiles = raw[:, :, row, chunk ^ (row % 8)].flatten(-2).view(torch.bfloat16).transpose(1, 2).flatten(2)
    return tiles, out[131072:].view(torch.float32).view(2, 64), list(counts)[2:6]


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


def check_last_pair(found: tuple[Tensor, Tensor, list[int]], tiles: Tensor, alive: Tensor) -> None:
    """`tiles` are a block's; a tile that is missing in the last pair has no rows."""
    pairs = max(-(-len(tiles) // 2), 1)
    absent = 2 * pairs - len(tiles)
    tiles = torch.cat((tiles, torch.zeros(absent, 64, DIM, dtype=tiles.dtype)))[-2:]
    alive = torch.cat((alive, torch.zeros(absent, 64, dtype=torch.bool)))[-2:]
    torch.testing.assert_close(found[0], tiles, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1] == 0, alive) and (found[1][~alive] == -float("inf")).all()
    arrivals = [128 + 32, 128, 128, 128 + 32]  # halves (0, 0), (0, 1), (1, 0), (1, 1); two bring the bias
    assert found[2] == [count * pairs for count in arrivals]


@needs_compiler
@pytest.mark.parametrize(("window", "selected"), [(128, 512), (64, 64), (100, 77), (1, 300), (640, 0), (3, 0)])
def test_tiles_hold_the_rows_of_the_last_pair(built, window, selected):
    """Every block of a cluster has its share of the tiles, and together they have all."""
    variant, library = built
    g = torch.Generator().manual_seed(window + selected)
    caches: list[Tensor | None] = [make_cache(g, 7, 5, variant.window_format), None]
    slots: list[Tensor | None] = [make_slots(g, 35, window), None]
    if variant.latent_format is not None:
        caches[1], slots[1] = make_cache(g, 6, 8, variant.latent_format), make_slots(g, 48, selected)
    tiles, alive = all_tiles(variant, caches, slots)
    for rank in range(variant.split):
        share = slice(len(tiles) * rank // variant.split, len(tiles) * (rank + 1) // variant.split)
        check_last_pair(produce(library, caches, slots, rank), tiles[share], alive[share])


@needs_compiler
def test_offsets_beyond_32_bits(built):
    """Pages 3 GiB apart, as in a cache of an H200: more than 2^31 bytes, and in BF16 more than 2^32 elements."""
    variant, library = built
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
    check_last_pair(produce(library, far, slots), tiles, alive)
