"""Specialises, checks and launches the attention kernel of attention.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map
from deepinfer.kernels.flash_mla.variants import Variant
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format

HEAD_DIM = 512
ROPE_PAIRS = 32
BLOCK_HEADS = 64
THREADS = 384


Formats = tuple[RowFormat | str | None, RowFormat | str | None]


@dataclass(frozen=True)
class Inputs:
    """What a launch attends over, as in kernels/reference/attention.py, and which steps around attention it takes."""

    q: Tensor  # BF16 [N, H, 512]
    window_cache: Tensor  # [pages, page size, row]: BF16, or bytes of packed rows
    window_slots: Tensor  # int32 [N, count]; -1: no row
    latent_cache: Tensor | None
    latent_slots: Tensor | None
    sink: Tensor  # FP32 [H]
    scale: float
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines FP32 [N, 32]: turn queries, and outputs back
    q_norm: bool = False

    @property
    def formats(self) -> Formats:
        """Row formats of the window's and the latents' cache; None for no cache, and for one that is not read here."""
        if self.latent_cache is None or self.latent_slots is None:
            return _row_format(self.window_cache, RowFormat.FP8), None
        latent = _row_format(self.latent_cache, latent_format(self.latent_cache, HEAD_DIM))
        return _row_format(self.window_cache, RowFormat.FP8), latent


def _row_format(cache: Tensor, packed: RowFormat) -> RowFormat | str | None:
    """Format of a cache [pages, page size, row]."""
    if cache.dtype == torch.uint8:
        return packed if cache.shape[-1] == packed.row_bytes(HEAD_DIM) else None
    return "bf16" if cache.dtype == torch.bfloat16 and cache.shape[-1] == HEAD_DIM else None


class _Query(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class _RowSource(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("slots_stride", ctypes.c_int64),
        ("count", ctypes.c_int),
    ]


class _Output(ctypes.Structure):
    _fields_ = [("values", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


class _Params(ctypes.Structure):
    _fields_ = [
        ("query", _Query),
        ("window", _RowSource),
        ("latent", _RowSource),
        ("sink", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("out", _Output),
        ("scale", ctypes.c_float),
        ("tokens", ctypes.c_int),
    ]


@cache
def kernel(variant: Variant) -> Kernel:
    """The variant's kernel; compiled on its first launch."""
    return Kernel(variant.build(), shared_bytes=shared_bytes(variant.split))


def shared_bytes(split: int) -> int:
    """SHARED_BYTES of layout.cuh; three peers' shares do not fit into what one query takes."""
    return 216_448 + 512 * split + (13_312 if split == 4 else 0)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _source(cache: Tensor | None, slots: Tensor | None) -> tuple[int, _RowSource]:
    """Page size (0 when there is one page) and the kernel's view of a cache and its slots."""
    if cache is None or slots is None:
        return 0, _RowSource()
    size = cache.element_size()
    page = cache.shape[1] if cache.shape[0] > 1 else 0
    return page, _RowSource(
        cache.data_ptr(),
        cache.stride(0) * size,
        cache.stride(1) * size,
        slots.data_ptr(),
        slots.stride(0),
        slots.shape[1],
    )


def choose_split(tokens: int, heads: int, processors: int) -> int:
    """Blocks that share one token's keys: as many as keep the card's processors busy."""
    blocks = tokens * heads // BLOCK_HEADS
    return 4 if blocks * 4 <= processors else 2 if blocks * 2 <= processors else 1


def prepare(inputs: Inputs, out: Tensor, out_scales: Tensor | None, split: int) -> tuple[Variant, _Params]:
    """What the kernel is specialised to, and its parameters beside the query's tensor map."""
    q, angles = inputs.q, inputs.angles
    tokens, heads, _ = q.shape
    window_page, window = _source(inputs.window_cache, inputs.window_slots)
    latent_page, latent = _source(inputs.latent_cache, inputs.latent_slots)
    formats = inputs.formats
    assert formats[0] is not None
    variant = Variant(
        heads,
        formats[0],
        window_page,
        formats[1],
        latent_page,
        split,
        q_norm=inputs.q_norm,
        rope=angles is not None,
        fp8=out_scales is not None,
    )
    return variant, _Params(
        _Query(q.data_ptr(), q.stride(0) * 2, q.stride(1) * 2),
        window,
        latent,
        inputs.sink.data_ptr(),
        *((angles[0].data_ptr(), angles[1].data_ptr()) if angles else (None, None)),
        _Output(out.data_ptr(), None if out_scales is None else out_scales.data_ptr()),
        inputs.scale,
        tokens,
    )


def launch(inputs: Inputs, out: Tensor, out_scales: Tensor | None = None, split: int | None = None) -> None:
    """Run the kernel on checked inputs (see attention.py).

    `out` [N, H, 512] is BF16, or E4M3 with `out_scales` uint8 [N, H, 16]. The split over the keys follows the number of
    tokens: the only place where a batch changes the order of a sum. Bits that must not depend on it take a constant
    `split`.
    """
    q = inputs.q
    tokens, heads, _ = q.shape
    processors = _processors(q.device.index)
    split = split or choose_split(tokens, heads, processors)
    variant, params = prepare(inputs, out, out_scales, split)
    items = tokens * heads // BLOCK_HEADS
    grid = items * split if split > 1 else min(items, processors)
    kernel(variant).launch((grid, 1, 1), (THREADS, 1, 1), params, tensor_map(q, (1, BLOCK_HEADS, 64)))
