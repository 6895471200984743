"""Specialises, checks and launches the attention kernel of attention.cu."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map
from deepinfer.kernels.flash_mla.variants import Variant
from deepinfer.kernels.reference.cache_rows import RowFormat

HEAD_DIM = 512
ROPE_PAIRS = 32
BLOCK_HEADS = 64
THREADS = 384


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
    return Kernel(variant.build(), shared_bytes=216_448 + 512 * variant.split)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_format(cache: Tensor, packed: RowFormat) -> RowFormat | str | None:
    """Format of a cache [pages, page_size, row] that the kernel reads, or None if it does not read this one."""
    if cache.dtype == torch.uint8:
        return packed if cache.shape[-1] == packed.row_bytes(HEAD_DIM) else None
    return "bf16" if cache.dtype == torch.bfloat16 and cache.shape[-1] == HEAD_DIM else None


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


def prepare(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
    out: Tensor,
    *,
    formats: tuple[RowFormat | str, RowFormat | str | None],
    split: int,
    out_scales: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    q_norm: bool = False,
) -> tuple[Variant, _Params]:
    """What the kernel is specialised to, and its parameters beside the query's tensor map."""
    tokens, heads, _ = q.shape
    window_page, window = _source(window_cache, window_slots)
    latent_page, latent = _source(latent_cache, latent_slots)
    has_angles, is_fp8 = angles is not None, out_scales is not None
    variant = Variant(heads, formats[0], window_page, formats[1], latent_page, split, q_norm, has_angles, is_fp8)
    return variant, _Params(
        _Query(q.data_ptr(), q.stride(0) * 2, q.stride(1) * 2),
        window,
        latent,
        sink.data_ptr(),
        *((angles[0].data_ptr(), angles[1].data_ptr()) if angles else (None, None)),
        _Output(out.data_ptr(), out_scales.data_ptr() if out_scales is not None else None),
        scale,
        tokens,
    )


def launch(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
    out: Tensor,
    *,
    formats: tuple[RowFormat | str, RowFormat | str | None],
    out_scales: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    q_norm: bool = False,
    split: int | None = None,
) -> None:
    """Run the kernel on checked arguments (see attention.py); out [N, H, 512] BF16 or E4M3.

    The split over the keys follows the number of tokens: the only place where a batch changes the order of a sum. Bits
    that must not depend on it take a constant `split`.
    """
    tokens, heads, _ = q.shape
    processors = _processors(q.device.index)
    split = split or choose_split(tokens, heads, processors)
    variant, params = prepare(
        q,
        window_cache,
        window_slots,
        latent_cache,
        latent_slots,
        sink,
        scale,
        out,
        formats=formats,
        split=split,
        out_scales=out_scales,
        angles=angles,
        q_norm=q_norm,
    )
    items = tokens * heads // BLOCK_HEADS
    grid = items * split if split > 1 else min(items, processors)
    kernel(variant).launch((grid, 1, 1), (THREADS, 1, 1), params, tensor_map(q, (1, BLOCK_HEADS, 64)))
