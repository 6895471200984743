"""`sparse_attention` on its TileLang kernel: arguments as the kernels of either platform take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format
from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, launch


@call
def sparse_attention(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Any:
    n, heads, dim = q.shape
    if q.dtype is not torch.bfloat16 or heads % 16 or (heads > 64 and heads % 64) or dim % 64:
        return NotImplemented
    absent = torch.full((n, 1), -1, dtype=torch.int32, device=q.device)
    if latent_cache is None or latent_slots is None:
        latent_cache, latent_slots = window_cache, absent
    near, far = _rows(window_cache, RowFormat.FP8), _rows(latent_cache, latent_format(latent_cache, dim))
    if near is None or far is None:
        return NotImplemented
    window_slots, latent_slots = (s.int().contiguous() if s.shape[1] else absent for s in (window_slots, latent_slots))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = (heads, dim, scale, window_slots.shape[1], latent_slots.shape[1], near, far)
    sinks = sink.float().view(1, -1) if q.device.type == "npu" else sink.float()
    caches = (window_cache, window_slots, latent_cache, latent_slots)
    launch("sparse_attention_tl", sizes, q.contiguous(), *caches, sinks, out)
    return out


def _rows(cache: Tensor, packed: RowFormat) -> tuple[str, int, int, int] | None:
    """`Rows` of bodies/attention.py for a cache, or None for one that the kernels do not read."""
    if cache.stride(2) != 1 or cache.dtype not in (torch.uint8, torch.bfloat16):
        return None
    kind = packed.value if cache.dtype is torch.uint8 else DTYPES[cache.dtype]
    return kind, cache.shape[1], cache.stride(0), cache.stride(1)
