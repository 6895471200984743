"""Token-level sparse attention over a window and selected compressed rows, one softmax (spec: model, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.basic import rope
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format, load_rows
from deepinfer.kernels.registry import operation

ROWS_AT_ONCE = 128  # bounds the gathered keys: rows x (window + selected) x d


@operation
def sparse_attention(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Keys are the values; the sink adds exp(sink) to the denominator only; no valid key gives 0.

    q [N, H, d]; window_cache [pages, page_size, row] and window_slots int32 [N, W]; latent_cache and latent_slots
    int32 [N, K] or None for layers without compressed KV, its packed rows NVFP4 or FP8 (`latent_format`); slots of -1
    are skipped; sink [H] -> [N, H, d].
    """
    outputs = []
    for start in range(0, q.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        qs = q[rows]
        compute = torch.promote_types(q.dtype, torch.float32)
        slots = window_slots[rows]
        keys = load_rows.reference(window_cache, slots, RowFormat.FP8, q.shape[-1], q.dtype)
        if latent_cache is not None and latent_slots is not None:
            packed = latent_format(latent_cache, q.shape[-1])
            latents = load_rows.reference(latent_cache, latent_slots[rows], packed, q.shape[-1], q.dtype)
            keys = torch.cat((keys, latents), dim=1)
            slots = torch.cat((slots, latent_slots[rows]), dim=1)
        valid = slots >= 0
        keys = torch.where(valid.unsqueeze(-1), keys, 0)  # an unused row may hold NaN bytes
        logits = torch.einsum("nhd,nsd->nhs", qs, keys).to(compute) * scale
        logits = logits.masked_fill(~valid.unsqueeze(1), float("-inf"))
        column = sink.to(compute).view(1, -1, 1).expand(*logits.shape[:2], 1)
        probabilities = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]
        outputs.append(torch.einsum("nhs,nsd->nhd", probabilities.to(keys.dtype), keys))
    return torch.cat(outputs) if outputs else torch.empty_like(q)


@operation
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
) -> Tensor:
    """`sparse_attention` of queries that `rope` rotates first, its result rotated back. q [N, H, d] -> [N, H, d].

    Made of operations that have backends of their own: a backend of this one is for doing all in one launch.
    """
    q = rope(q, cos, sin, False)
    o = sparse_attention(q, window_cache, window_slots, latent_cache, latent_slots, sink, scale)
    return rope(o, cos, sin, True)
