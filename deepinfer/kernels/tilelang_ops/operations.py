"""Operations on TileLang kernels: the arguments as the kernels of either platform take them, outputs, launch.

`register` makes these the backends of a device: on Ascend they are the only ones, on a GPU DEEPINFER_KERNELS=tilelang
asks for them instead of Triton and CUDA C++. Sizes of a model are compiled in; numbers of rows are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import OPERATIONS

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GROUP = {RowFormat.FP8: 32, RowFormat.MXFP4: 32, RowFormat.NVFP4: 16}
FORMATS = {
    RowFormat.FP8: ("e4m3", "ue8m0", 32), RowFormat.MXFP4: ("e2m1", "ue8m0", 32), RowFormat.NVFP4: ("e2m1", "e4m3", 16),
}  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {}


@cache
def compiled(name: str, sizes: tuple[Any, ...]) -> Callable[..., None]:
    """The kernel of factory `name` for `sizes`, compiled for this platform's device."""
    from deepinfer.kernels import tilelang_ops  # needs TileLang

    return tilelang_ops.compiled(getattr(tilelang_ops, name)(*sizes))


def launch(name: str, sizes: tuple[Any, ...], *tensors: Tensor) -> None:
    """Run factory `name`'s kernel on inputs and then outputs; nothing to do without rows."""
    if all(t.numel() for t in tensors[-1:]):
        compiled(name, sizes)(*tensors)


def call(function: Callable[..., Any]) -> Callable[..., Any]:
    CALLS[function.__name__] = function
    return function


def register(device: str) -> None:
    """Make these the backends of `device`."""
    for name, function in CALLS.items():
        OPERATIONS[name].backends[device] = function


def covered(*tensors: Tensor) -> bool:
    """Of one dtype that the kernels take."""
    return tensors[0].dtype in DTYPES and all(t.dtype is tensors[0].dtype for t in tensors)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


# ------------------------------------------------------------------ rows


@call
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    if dim % 32 or not covered(x, weight):
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch("rms_norm_tl", (dim, eps, DTYPES[x.dtype]), x.reshape(-1, dim).contiguous(), weight, out.view(-1, dim))
    return out


@call
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if not covered(gate_up):
        return NotImplemented
    out = empty(gate_up, n, inner)
    launch("swiglu_tl", (inner, limit, DTYPES[gate_up.dtype]), gate_up.contiguous(), out)
    return out


@call
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if not covered(x) or cos.dtype is not torch.float32:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (x.shape[1], x.shape[2], cos.shape[1], inverse, DTYPES[x.dtype])
    launch("rope_tl", sizes, x.contiguous(), cos.contiguous(), sin.contiguous(), out)
    return out


@call
def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    n, dim = x.shape
    if dim % 32 or not covered(x, weight) or cos.dtype is not torch.float32:
        return NotImplemented
    out = empty(x, n, dim)
    sizes = (dim, cos.shape[1], eps, DTYPES[x.dtype])
    launch("norm_rope_tl", sizes, x.contiguous(), weight, cos.contiguous(), sin.contiguous(), out)
    return out


# ------------------------------------------------------------------ casts


@call
def round_fp8(x: Tensor) -> Tensor:
    return _rounded(x, RowFormat.FP8)


@call
def round_trip_rows(values: Tensor, cache: Tensor, row_format: RowFormat) -> Tensor:
    return _rounded(values, row_format) if cache.dtype is torch.uint8 else NotImplemented


def _rounded(x: Tensor, row_format: RowFormat) -> Tensor:
    dim = x.shape[-1]
    if dim % 32 or not covered(x):
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (dim, *FORMATS[row_format], DTYPES[x.dtype])
    launch("round_rows_tl", sizes, x.reshape(-1, dim).contiguous(), out.view(-1, dim))
    return out


@call
def cast_groups(x: Tensor, values: str, scales: str, group_rows: int, group_columns: int) -> tuple[Tensor, Tensor]:
    n, dim = x.shape
    if dim % 64 or not covered(x):
        return NotImplemented
    codes = empty(x, n, dim if values == "e4m3" else dim // 2, dtype=torch.uint8)
    scale_dtype = torch.float32 if scales == "float32" else torch.uint8
    stored = empty(x, -(-n // group_rows), dim // group_columns, dtype=scale_dtype)
    if group_rows == 1 and group_columns > 1:
        sizes: tuple[Any, ...] = (dim, values, scales, group_columns, DTYPES[x.dtype])
        launch("cast_rows_tl", sizes, x.contiguous(), codes, stored)
    else:
        sizes = (dim, values, scales, group_rows, group_columns, DTYPES[x.dtype])
        launch("cast_blocks_tl", sizes, x.contiguous(), codes, stored)
    return codes, stored


@call
def uncast_groups(
    codes: Tensor, stored: Tensor, values: str, scales: str, group_rows: int, group_columns: int, dtype: torch.dtype
) -> Tensor:
    n, dim = codes.shape[0], stored.shape[1] * group_columns
    if dim % 32 or dtype not in DTYPES:
        return NotImplemented
    out = empty(codes, n, dim, dtype=dtype)
    sizes = (dim, values, scales, group_rows, group_columns, DTYPES[dtype])
    launch("uncast_tl", sizes, codes.contiguous(), stored.contiguous(), out)
    return out


def _fp8_rows(like: Tensor, n: int, dim: int) -> tuple[Tensor, Tensor]:
    return empty(like, n, dim, dtype=torch.uint8), empty(like, n, dim // 32, dtype=torch.uint8)


@call
def norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, dim = x.shape
    if dim % 64 or not covered(x, weight):
        return NotImplemented
    out = _fp8_rows(x, n, dim)
    launch("norm_cast_tl", (dim, eps, DTYPES[x.dtype]), x.contiguous(), weight, *out)
    return out


@call
def swiglu_cast(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if inner % 64 or not covered(gate_up):
        return NotImplemented
    out = _fp8_rows(gate_up, n, inner)
    launch("swiglu_cast_tl", (inner, limit, DTYPES[gate_up.dtype]), gate_up.contiguous(), *out)
    return out


@call
def rope_cast(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    n, heads, dim = x.shape
    if dim % 64 or not covered(x) or cos.dtype is not torch.float32:
        return NotImplemented
    out = _fp8_rows(x, n, heads * dim)
    sizes = (heads, dim, cos.shape[1], inverse, DTYPES[x.dtype])
    launch("rope_cast_tl", sizes, x.contiguous(), cos.contiguous(), sin.contiguous(), *out)
    return out


# ------------------------------------------------------------------ caches


def _cache_sizes(cache: Tensor, row_format: RowFormat, dim: int) -> tuple[Any, ...]:
    kind = row_format.value if cache.dtype is torch.uint8 else DTYPES[cache.dtype]
    return dim, kind, cache.shape[1], cache.stride(0), cache.stride(1)


@call
def store_rows(cache: Tensor, slots: Tensor, values: Tensor, row_format: RowFormat) -> None:
    dim = values.shape[-1]
    if dim % 64 or not covered(values) or cache.stride(2) != 1 or cache.dtype not in (torch.uint8, *DTYPES):
        return NotImplemented
    if len(values):
        sizes = (*_cache_sizes(cache, row_format, dim), DTYPES[values.dtype])
        launch("store_rows_tl", sizes, values.contiguous(), slots.int(), cache)
    return None


@call
def load_rows(cache: Tensor, slots: Tensor, row_format: RowFormat, dim: int, dtype: torch.dtype) -> Tensor:
    if dim % 32 or dtype not in DTYPES or cache.stride(2) != 1 or cache.dtype not in (torch.uint8, *DTYPES):
        return NotImplemented
    out = empty(cache, *slots.shape, dim, dtype=dtype)
    sizes = (*_cache_sizes(cache, row_format, dim), DTYPES[dtype])
    launch("load_rows_tl", sizes, cache, slots.int().flatten(), out.view(-1, dim))
    return out


@call
def entry_slots(positions: Tensor, block_tables: Tensor, sequence_of_row: Tensor, entries: int) -> Tensor:
    out = empty(positions, *positions.shape, dtype=torch.int32)
    sizes = (positions.shape[1], block_tables.shape[1], block_tables.stride(0), entries)
    launch("entry_slots_tl", sizes, positions.int().contiguous(), block_tables, sequence_of_row.int(), out)
    return out


@call
def window_slots(positions: Tensor, state_slots: Tensor, window: int, ring: int) -> Tensor:
    out = empty(positions, len(positions), window, dtype=torch.int32)
    launch("window_slots_tl", (window, ring), positions.int(), state_slots.int(), out)
    return out


# ------------------------------------------------------------------ Engram and mHC


@call
def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    n, length = history.shape
    heads = primes.shape[1]
    out = empty(history, n, (length - 1) * heads)
    launch("engram_hash_tl", (length, heads, pad), history.contiguous(), multipliers, primes, offsets, out)
    return out


@call
def engram_gate(h: Tensor, kv: Tensor, weight: Tensor, alive: Tensor | None, eps: float) -> Tensor:
    n, hc, dim = h.shape
    if dim % 32 or not covered(h, kv):
        return NotImplemented
    out = empty(h, n, hc, dim)
    shown = torch.ones(1, dtype=torch.uint8, device=h.device) if alive is None else alive.to(torch.uint8)
    sizes = (hc, dim, eps, alive is not None, DTYPES[h.dtype])
    launch("engram_gate_tl", sizes, h.contiguous(), kv.contiguous(), weight.float(), shown, out)
    return out


@call
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    n, hc, dim = h.shape
    if dim % 32 or not covered(h, y) or post.dtype is not torch.float32:
        return NotImplemented
    out = empty(h, n, hc, dim)
    sizes = (dim, hc, DTYPES[h.dtype])
    launch("hc_post_tl", sizes, *(t.contiguous() for t in (h, y, post, comb)), out)
    return out


@call
def hc_pre(
    h: Tensor,
    p_prev: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _mix_outputs(h, p_prev, fn, norm_weight)
    if outputs is NotImplemented:
        return NotImplemented
    sizes = _mix_sizes(h, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
    inputs = (h, p_prev, fn, scale.float(), base.float(), norm_weight)
    launch("hc_pre_tl", sizes, *(t.contiguous() for t in inputs), *outputs)
    return outputs


@call
def hc_post_pre(
    h: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    p_prev: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _mix_outputs(h, p_prev, fn, norm_weight)
    if outputs is NotImplemented:
        return NotImplemented
    streams = torch.empty_like(h, memory_format=torch.contiguous_format)
    sizes = _mix_sizes(h, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
    inputs = (h, y, post, comb, p_prev, fn, scale.float(), base.float(), norm_weight)
    launch("hc_post_pre_tl", sizes, *(t.contiguous() for t in inputs), streams, *outputs)
    return streams, *outputs


def _mix_outputs(h: Tensor, p_prev: Tensor, fn: Tensor, norm_weight: Tensor) -> Any:
    n, hc, dim = h.shape
    wide = (t.dtype is torch.float32 for t in (p_prev, fn))
    if dim % 32 or hc * dim % 128 or not covered(h) or norm_weight.dtype not in DTYPES or not all(wide):
        return NotImplemented
    float32 = torch.float32
    return (
        empty(h, n, dim), empty(h, n, hc, dtype=float32), empty(h, n, hc, dtype=float32),
        empty(h, n, hc, hc, dtype=float32),
    )  # fmt: skip


def _mix_sizes(h: Tensor, norm_weight: Tensor, *numbers: float) -> tuple[Any, ...]:
    return (h.shape[2], h.shape[1], *numbers, DTYPES[norm_weight.dtype], DTYPES[h.dtype])


# ------------------------------------------------------------------ experts


@call
def moe_gate(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    n, experts = logits.shape
    if logits.dtype is not torch.float32:
        return NotImplemented
    chosen, gates = empty(logits, n, k, dtype=torch.int32), empty(logits, n, k)
    sizes = (experts, k, normalise, scaling, bias.dim() == 2)
    launch("moe_gate_tl", sizes, logits.contiguous(), bias.float().view(-1, experts).contiguous(), chosen, gates)
    return chosen, gates


@call
def expert_order(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.zeros(num_experts, dtype=torch.int32, device=chosen.device)
    order, places = empty(chosen, chosen.numel()), torch.empty_like(chosen)
    launch("expert_order_tl", (num_experts,), chosen.flatten(), counts, order, places.view(-1))
    return counts, order, places


@call
def expand_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    if not covered(x):
        return NotImplemented
    out = empty(x, len(order), x.shape[1])
    launch("expand_rows_tl", (x.shape[1], k, DTYPES[x.dtype]), x.contiguous(), order, out)
    return out


@call
def reduce_rows(z: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    if not covered(z) or gates.dtype is not torch.float32:
        return NotImplemented
    out = empty(z, len(places), z.shape[1])
    sizes = (z.shape[1], places.shape[1], DTYPES[z.dtype])
    launch("reduce_rows_tl", sizes, z.contiguous(), places, gates.contiguous(), out)
    return out


# ------------------------------------------------------------------ selection, sampling, drafts


@call
def top_k_positions(scores: Tensor, k: int) -> Tensor:
    n, width = scores.shape
    if not covered(scores) or width == 0:
        return NotImplemented
    out = empty(scores, n, k, dtype=torch.int32)
    launch("top_k_positions_tl", (width, k, DTYPES[scores.dtype]), scores.contiguous(), out)
    return out


@call
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch("apply_token_bitmask_tl", (logits.shape[1],), logits.contiguous(), bitmask.contiguous(), out)
    return out


@call
def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    num_candidates: Tensor,
    most_candidates: int,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor]:
    n, vocab = logits.shape
    if logits.dtype is not torch.float32:
        return NotImplemented
    tokens, largest = empty(logits, n, dtype=torch.int64), empty(logits, n)
    temperature, top_p, min_p = (t.to(_number(logits)) for t in (temperature, top_p, min_p))
    logits = logits.contiguous()
    key = torch.zeros(n, dtype=torch.uint32, device=logits.device)
    last = torch.full((n,), vocab, dtype=torch.int32, device=logits.device)
    if most_candidates:
        launch("find_candidates_tl", (vocab,), logits, num_candidates.contiguous(), key, last)
    parameters = (t.contiguous() for t in (temperature, key, last, top_p, min_p, seeds, counters))
    launch("draw_tokens_tl", (vocab,), logits, *parameters, tokens, largest)
    return tokens, largest


def _number(like: Tensor) -> torch.dtype:
    """Of sums of weights and of times: vector cores of Ascend have nothing wider than float32."""
    return torch.float32 if like.device.type == "npu" else torch.float64


@call
def choose_draft_lengths(survival: Tensor, room: Tensor, step_ms: Tensor, until_first_fall: bool) -> Tensor:
    n, drafts = survival.shape
    out = empty(room, n)
    most = max(64, 1 << (n - 1).bit_length()) if n else 0
    inputs = (survival.to(_number(room)).contiguous(), room, step_ms.to(_number(room)))
    launch("choose_draft_lengths_tl", (most, drafts, until_first_fall), *inputs, out)
    return out


@call
def verify_tokens(
    chosen: Tensor, slot_tokens: Tensor, slot_lengths: Tensor, slots: Tensor, first_rows: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    n, columns = len(slots), slot_tokens.shape[1]
    if not slot_tokens.is_contiguous():
        return NotImplemented
    tokens, accepted = empty(slots, n, columns), empty(slots, n)
    inputs = (chosen, slot_tokens, slot_lengths, slots, first_rows, num_drafts)
    launch("verify_tokens_tl", (columns - 1,), *inputs, tokens, accepted)
    return tokens, accepted
