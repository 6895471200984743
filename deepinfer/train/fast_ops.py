"""The inner operations of a training step: same results as `models.reference`, made for one large CUDA device.

Attention runs block-sparse over [window keys | compressed keys] (FlexAttention; masked SDPA elsewhere), experts as one
grouped matrix product per projection over tokens sorted by expert, the mHC projection in BF16 pairs with FP32 sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.models import reference

BLOCK = 128  # rows and keys of an attention block
GROUP_ALIGNMENT = 16  # rows; every expert's rows start at a multiple of it


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The doubly stochastic C of mHC from its logits [..., hc, hc]; the definition is in `reference.mhc_mixes`."""
    if logits.is_cuda:
        from deepinfer.train import triton_ops

        return triton_ops.sinkhorn(logits, iterations, eps)
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """`reference.top_k_mask`, without a sort where a GPU is present."""
    if scores.is_cuda:
        from deepinfer.train import triton_ops

        return triton_ops.top_k_mask(scores, k)
    return reference.top_k_mask(scores, k)


class _Lookup(torch.autograd.Function):
    """Embedding whose gradient is summed in FP32 by atomics: no sort, no host synchronisation."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        total.index_add_(0, ctx.saved_tensors[0].flatten(), grad.reshape(-1, ctx.shape[1]).float())
        return total.to(ctx.dtype), None


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of table [V, D] at ids int64 [...] -> [..., D]."""
    return _Lookup.apply(table, ids)


class _MixProjection(torch.autograd.Function):
    """z @ fn.T with z BF16 and fn FP32 as two BF16 terms, summed in FP32; BF16 products in the backward pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, fn: Tensor) -> Tensor:
        high = fn.to(torch.bfloat16)
        low = (fn - high.float()).to(torch.bfloat16)
        ctx.save_for_backward(z, high)
        both = torch.mm(z, torch.cat((high, low)).T, out_dtype=torch.float32)
        return both[:, : fn.shape[0]] + both[:, fn.shape[0] :]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z, high = ctx.saved_tensors
        grad = grad.to(torch.bfloat16)
        return grad @ high, torch.mm(grad.T, z, out_dtype=torch.float32)


def mix_projection(h: Tensor, fn: Tensor) -> Tensor:
    """h [B, T, hc, D], fn [mixes, hc * D] -> float32 [B, T, mixes]."""
    if h.is_cuda:
        return _MixProjection.apply(h.reshape(-1, fn.shape[1]), fn).unflatten(0, h.shape[:2])
    return F.linear(h.flatten(-2).to(fn.dtype), fn)


# ------------------------------------------------------------------ attention


def attend_sdpa(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """`reference.attend` through masked SDPA: the sink is one more key that only a padded query dimension sees.

    q [B, T, H, d], keys [B, S, d], mask bool [B, T, S], sink [H] -> [B, T, H, d].
    """
    batch, length, heads, dim = q.shape
    pad = 8  # keeps the head dimension a multiple of 8
    column = (sink.to(q.dtype) / scale).view(1, 1, heads, 1).expand(batch, length, heads, 1)
    q = torch.cat((q, column, q.new_zeros(batch, length, heads, pad - 1)), dim=-1).transpose(1, 2)
    last = (torch.arange(dim + pad, device=keys.device) == dim).to(keys.dtype).expand(batch, 1, -1)
    k = torch.cat((F.pad(keys, (0, pad)), last), dim=1).unsqueeze(1).expand(-1, heads, -1, -1)
    v = F.pad(keys, (0, 0, 0, 1)).unsqueeze(1).expand(-1, heads, -1, -1)
    mask = F.pad(mask, (0, 1), value=True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


class FlexAttend:
    """Block-sparse attention over window keys and compressed keys, with log-sum-exp for the sink.

    Only blocks that can hold a visible key are visited: a band for the window, a triangle for the compressed part.
    """

    def __init__(self, length: int, window: int, device: str) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        if length % (2 * BLOCK) or window > BLOCK:
            raise ValueError(f"length {length} and window {window}: a multiple of {2 * BLOCK}, at most {BLOCK}")
        self.length, self.window, self.device = length, window, device
        self._flex = torch.compile(flex_attention, dynamic=False)
        self._blocks: dict[int, Any] = {}

    def _mask_mod(self, selection: Tensor | None) -> Callable[..., Tensor]:
        length, window = self.length, self.window

        def in_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i - j < window)

        if selection is None:
            return in_window
        last = selection.shape[-1] - 1

        def in_window_or_selected(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            g = (j - length).clamp(0, last)
            return torch.where(j < length, (j <= i) & (i - j < window), selection[b, i, g])

        return in_window_or_selected

    def _block_mask(self, ratio: int, selection: Tensor | None) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        if ratio not in self._blocks:
            rows = self.length // BLOCK
            visited = []
            for i in range(rows):
                window = [j for j in (i - 1, i) if j >= 0]
                groups = ((i + 1) * BLOCK) // ratio if ratio else 0  # visible to the block's last row
                visited.append(window + [rows + j for j in range((groups + BLOCK - 1) // BLOCK)])
            width = rows + (rows // ratio if ratio else 0)
            counts = torch.tensor([len(v) for v in visited], dtype=torch.int32, device=self.device).view(1, 1, rows)
            indices = torch.tensor([v + [0] * (width - len(v)) for v in visited], dtype=torch.int32, device=self.device)
            keys = width * BLOCK
            self._blocks[ratio] = BlockMask.from_kv_blocks(
                counts, indices.view(1, 1, rows, width), BLOCK_SIZE=BLOCK, seq_lengths=(self.length, keys)
            )
        known = self._blocks[ratio]
        return BlockMask(
            known.seq_lengths,
            known.kv_num_blocks,
            known.kv_indices,
            known.full_kv_num_blocks,
            known.full_kv_indices,
            known.q_num_blocks,
            known.q_indices,
            known.full_q_num_blocks,
            known.full_q_indices,
            known.BLOCK_SIZE,
            self._mask_mod(selection),
        )

    def __call__(
        self, q: Tensor, keys: Tensor, selection: Tensor | None, ratio: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [B, T, H, d], keys [B, T + G, d], selection [B, T, G] -> o [B, T, H, d] without sink, lse [B, T, H]."""
        keys = keys.unsqueeze(1)
        o, lse = self._flex(
            q.transpose(1, 2),
            keys,
            keys,
            block_mask=self._block_mask(ratio, selection),
            scale=scale,
            enable_gqa=True,
            return_lse=True,  # type: ignore[arg-type]
        )
        return o.transpose(1, 2), lse.transpose(1, 2)


# ------------------------------------------------------------------ experts


def _gather_sum(rows: Tensor, places: Tensor) -> Tensor:
    """sum_k rows[places[:, k]] in float32: [P, D], [N, k] -> [N, D] in rows' dtype."""
    total = rows[places[:, 0]].float()
    for k in range(1, places.shape[1]):
        total = total + rows[places[:, k]].float()
    return total.to(rows.dtype)


class _Dispatch(torch.autograd.Function):
    """Token rows to expert order; its gradient is `_Combine`'s forward pass (no scatter)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor, gather_sum: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(places)
        ctx.gather_sum = gather_sum
        return x[source]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.gather_sum(grad, ctx.saved_tensors[0]), None, None, None


class _Combine(torch.autograd.Function):
    """Sum of each token's expert rows; its gradient is a gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, places: Tensor, gather_sum: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(source)
        return gather_sum(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad[ctx.saved_tensors[0]], None, None, None


def expert_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where every (token, choice) goes when rows are grouped by expert. chosen int64 [N, k].

    Returns:
        source int64 [P]: token of each grouped row (0 in padding rows);
        slot int64 [P]: flat choice index of each grouped row, N * k in padding rows;
        places int64 [N, k]: grouped row of each choice;
        ends int32 [E]: end of each expert's rows, a multiple of GROUP_ALIGNMENT;
        counts int64 [E]: choices per expert. P = N * k + E * GROUP_ALIGNMENT, no device synchronisation.
    """
    tokens, k = chosen.shape
    choices = tokens * k
    ids, order = torch.sort(chosen.flatten().to(torch.uint8), stable=True)
    ids = ids.long()
    starts = torch.searchsorted(ids, torch.arange(experts + 1, device=ids.device))
    counts = starts.diff()
    padded = (counts + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    ends = padded.cumsum(0)
    row = (ends - padded)[ids] + torch.arange(choices, device=ids.device) - starts[ids]
    total = choices + experts * GROUP_ALIGNMENT
    slot = torch.full((total,), choices, device=ids.device).scatter_(0, row, order)
    source = torch.where(slot == choices, 0, slot // k)
    places = torch.empty_like(order).scatter_(0, order, row)
    return source, slot, places.view(tokens, k), ends.to(torch.int32), counts


class GroupedExperts:
    """Routed experts for CUDA in BF16. `swiglu` and `gather_sum` may be compiled versions."""

    def __init__(self, swiglu: Callable[..., Tensor], compile: Callable[..., Any]) -> None:
        self.swiglu, self.gather_sum = swiglu, compile(_gather_sum)

    def __call__(
        self, x: Tensor, chosen: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x [N, D], chosen int64 [N, k], gates [N, k], w1 and w3 [E, I, D], w2 [E, D, I] -> [N, D], counts [E]."""
        source, slot, places, ends, counts = expert_order(chosen, w1.shape[0])
        rows = _Dispatch.apply(x, source, places, self.gather_sum)
        gate = F.pad(gates.flatten(), (0, 1)).gather(0, slot)
        gu = F.grouped_mm(rows, torch.cat((w1, w3), dim=1).transpose(1, 2), offs=ends)
        z = self.swiglu(gu, gate)
        y = F.grouped_mm(z, w2.transpose(1, 2), offs=ends)
        return _Combine.apply(y, source, places, self.gather_sum), counts
