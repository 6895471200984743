"""The attention kernel behind the operation `sparse_attention`, and with the steps around it in the same launch."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import CompileError
from deepinfer.kernels.deep_jit.driver import DriverError
from deepinfer.kernels.deep_select.top_k import is_hopper
from deepinfer.kernels.flash_mla.launch import BLOCK_HEADS, HEAD_DIM, ROPE_PAIRS, launch, row_format
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format

logger = logging.getLogger(__name__)

Angles = tuple[Tensor, Tensor]  # cosines and sines [N, 32]
Caches = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # window and its slots, latents and theirs
Formats = tuple[RowFormat | str, RowFormat | str | None]

ALIGNMENT = 16  # bytes that a thread loads at once, and the copy engine's


def sparse_attention(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Any:
    """`sparse_attention` of kernels/reference/attention.py for BF16 queries on Hopper: d = 512, H a multiple of 64.

    Caches are BF16 or packed (FP8 window, NVFP4 or FP8 latents); any strides that keep rows aligned. NotImplemented
    for other cases, and if the kernel does not compile or load.
    """
    return _if_covered(q, (window_cache, window_slots, latent_cache, latent_slots), sink, scale, None)


def rotated_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Any:
    """`rotated_attention` of kernels/reference/attention.py in one launch, where `sparse_attention` here has a case."""
    return _if_covered(q, (window_cache, window_slots, latent_cache, latent_slots), sink, scale, (cos, sin))


def fused_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    q_norm: bool = False,
    fp8: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Query norm, query RoPE, attention, inverse RoPE of the output and its cast to FP8, in one launch.

    As `sparse_attention`, of queries q [N, H, 512] that are not rotated yet; cos and sin float32 [N, 32]. `q_norm`
    divides each head by its root mean square first (V4; V4.1 has none). Returns E4M3 [N, H, 512] and its UE8M0 scales
    uint8 [N, H, 16], one for 32 values; without `fp8` BF16 and None. Raises ValueError for what the kernel does not
    cover, CompileError, DriverError.
    """
    caches = (window_cache, window_slots, latent_cache, latent_slots)
    formats = covered(q, caches, sink, (cos, sin))
    if formats is None:
        raise ValueError(
            "q must be BF16 [N, H, 512] on Hopper with H a multiple of 64, caches aligned BF16 or packed rows, slots "
            f"int32 [N, count], sink [H], cos and sin [N, {ROPE_PAIRS}]; got q {q.dtype} {list(q.shape)} on {q.device}"
        )
    return _attend(q, caches, formats, sink, scale, (cos, sin), q_norm, fp8)


def covered(q: Tensor, caches: Caches, sink: Tensor, angles: Angles | None) -> Formats | None:
    """Row formats of the two caches, or None if this is no case for the kernel."""
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.device.type != "cuda" or not is_hopper(q.device.index):
        return None
    tokens, heads, dim = q.shape
    if dim != HEAD_DIM or heads % BLOCK_HEADS or not _aligned(q) or sink.shape != (heads,):
        return None
    if angles is not None and any(part.shape != (tokens, ROPE_PAIRS) for part in angles):
        return None
    window_cache, window_slots, latent_cache, latent_slots = caches
    window = _cache_format(window_cache, window_slots, tokens, RowFormat.FP8)
    if window is None:
        return None
    if latent_cache is None or latent_slots is None:
        return window, None
    latent = _cache_format(latent_cache, latent_slots, tokens, latent_format(latent_cache, dim))
    return None if latent is None else (window, latent)


def _if_covered(q: Tensor, caches: Caches, sink: Tensor, scale: float, angles: Angles | None) -> Any:
    formats = covered(q, caches, sink, angles)
    if formats is None:
        return NotImplemented
    try:
        return _attend(q, caches, formats, sink, scale, angles)[0]
    except (CompileError, DriverError) as error:
        _warn_once(str(error))
        return NotImplemented


def _attend(
    q: Tensor,
    caches: Caches,
    formats: Formats,
    sink: Tensor,
    scale: float,
    angles: Angles | None,
    q_norm: bool = False,
    fp8: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a covered case, and its scales with `fp8`."""
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn if fp8 else q.dtype, device=q.device)
    scales = torch.empty(*q.shape[:2], HEAD_DIM // 32, dtype=torch.uint8, device=q.device) if fp8 else None
    if q.shape[0]:
        launch(
            q,
            *caches,
            sink.float().contiguous(),
            scale,
            out,
            formats=formats,
            out_scales=scales,
            angles=None if angles is None else (angles[0].float().contiguous(), angles[1].float().contiguous()),
            q_norm=q_norm,
        )
    return out, scales


def _cache_format(cache: Tensor, slots: Tensor, tokens: int, packed: RowFormat) -> RowFormat | str | None:
    found = row_format(cache, packed)
    if found is None or not _aligned(cache):
        return None
    if slots.dtype != torch.int32 or slots.shape[0] != tokens or (slots.shape[1] > 1 and slots.stride(1) != 1):
        return None
    return found


def _aligned(tensor: Tensor) -> bool:
    """The last dimension is contiguous, and rows start at multiples of ALIGNMENT bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return tensor.stride(-1) == 1 and not any(number % ALIGNMENT for number in (tensor.data_ptr(), *strides))


@cache
def _warn_once(message: str) -> None:
    logger.warning("sparse attention runs without its Hopper kernel, slower: %s", message)
