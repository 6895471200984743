"""The attention kernel behind the operation `sparse_attention`, and with the steps around it in the same launch."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import CompileError
from deepinfer.kernels.deep_select.top_k import is_hopper
from deepinfer.kernels.flash_mla.launch import BLOCK_HEADS, HEAD_DIM, ROPE_PAIRS, launch, row_format
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format

logger = logging.getLogger(__name__)

_ALIGNMENT = {"bf16": 16, RowFormat.FP8: 16, RowFormat.NVFP4: 16}  # bytes that a thread loads at once


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
    for other cases, and if the kernel does not compile.
    """
    formats = _formats(q, window_cache, window_slots, latent_cache, latent_slots)
    if formats is None:
        return NotImplemented
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    try:
        launch(
            q,
            window_cache,
            window_slots,
            latent_cache,
            latent_slots,
            sink.float().contiguous(),
            scale,
            out,
            formats=formats,
        )
    except CompileError as error:
        _warn_once(str(error))
        return NotImplemented
    return out


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
    caches = (window_cache, window_slots, latent_cache, latent_slots)
    if _formats(q, *caches) is None or cos.shape != (q.shape[0], ROPE_PAIRS) or sin.shape != cos.shape:
        return NotImplemented
    try:
        return fused_attention(q, cos, sin, *caches, sink, scale, fp8=False)[0]
    except CompileError as error:
        _warn_once(str(error))
        return NotImplemented


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
    cover, CompileError.
    """
    formats = _formats(q, window_cache, window_slots, latent_cache, latent_slots)
    if formats is None:
        raise ValueError(
            "q and the caches must be as the kernel reads them: BF16 on Hopper, d = 512, H a multiple of 64"
        )
    if cos.shape != (q.shape[0], ROPE_PAIRS) or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must be [{q.shape[0]}, {ROPE_PAIRS}], got {list(cos.shape)}, {list(sin.shape)}")
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn if fp8 else q.dtype, device=q.device)
    scales = torch.empty(*q.shape[:2], HEAD_DIM // 32, dtype=torch.uint8, device=q.device) if fp8 else None
    if q.shape[0]:
        launch(
            q,
            window_cache,
            window_slots,
            latent_cache,
            latent_slots,
            sink.float().contiguous(),
            scale,
            out,
            formats=formats,
            out_scales=scales,
            angles=(cos.float().contiguous(), sin.float().contiguous()),
            q_norm=q_norm,
        )
    return out, scales


def _formats(
    q: Tensor, window_cache: Tensor, window_slots: Tensor, latent_cache: Tensor | None, latent_slots: Tensor | None
) -> tuple[RowFormat | str, RowFormat | str | None] | None:
    """Row formats of the two caches, or None if this is no case for the kernel."""
    _, heads, dim = q.shape
    if q.dtype != torch.bfloat16 or dim != HEAD_DIM or heads % BLOCK_HEADS or q.device.type != "cuda":
        return None
    if not is_hopper(q.device.index) or not _aligned(q, 16):
        return None
    window = _cache_format(window_cache, window_slots, RowFormat.FP8)
    if window is None:
        return None
    if latent_cache is None or latent_slots is None:
        return window, None
    latent = _cache_format(latent_cache, latent_slots, latent_format(latent_cache, dim))
    return None if latent is None else (window, latent)


def _cache_format(cache: Tensor, slots: Tensor, packed: RowFormat) -> RowFormat | str | None:
    found = row_format(cache, packed)
    if found is None or not _aligned(cache, _ALIGNMENT[found]):
        return None
    if slots.dtype != torch.int32 or (slots.shape[1] > 1 and slots.stride(1) != 1):
        return None
    return found


def _aligned(tensor: Tensor, size: int) -> bool:
    """The last dimension is contiguous, and rows start at multiples of `size` bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return tensor.stride(-1) == 1 and not any(number % size for number in (tensor.data_ptr(), *strides))


@cache
def _warn_once(message: str) -> None:
    logger.warning("sparse attention runs without its Hopper kernel, slower: %s", message)
