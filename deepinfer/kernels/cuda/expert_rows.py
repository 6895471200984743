"""Around the products of experts: the order of their pairs, rows in that order, weighted sums of a token's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered, rows_of
from deepinfer.kernels.reference import moe  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


@triton.jit(do_not_specialize=["pairs"])
def _order(chosen, counts, order, places, pairs, CHUNK: tl.constexpr):
    """One expert: its pairs follow those of lower experts, in their own order. No sort, and no atomics."""
    expert = tl.program_id(0)
    lower = tl.zeros((CHUNK,), tl.int32)
    own = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        other = tl.load(chosen + at, mask=at < pairs, other=2147483647)
        lower += (other < expert).to(tl.int32)
        own += (other == expert).to(tl.int32)
    place = tl.sum(lower, axis=0)
    tl.store(counts + expert, tl.sum(own, axis=0))
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        is_own = (tl.load(chosen + at, mask=at < pairs, other=2147483647) == expert).to(tl.int32)
        target = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(order + target, at, mask=is_own > 0)
        tl.store(places + at, target, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)


@backend("expert_order", "cuda")
def expert_order(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if chosen.dtype is not torch.int32:
        return NotImplemented
    chosen = chosen.contiguous()
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    places = torch.empty_like(chosen)
    _order[(num_experts,)](chosen, counts, order, places, chosen.numel(), CHUNK=1024, num_warps=4)
    return counts, order, places


@triton.jit
def _expand(x, order, out, stride, dim, k, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = (tl.load(order + place) // k).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place * dim + at, tl.load(x + row * stride + at, mask=at < dim, other=0.0), mask=at < dim)


@backend("expand_rows", "cuda")
def expand_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    if not covered(x):
        return NotImplemented
    x, stride = rows_of(x)
    n, dim = len(order), x.shape[1]
    out = torch.empty(n, dim, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(max(dim, 1)), 2048)
    if out.numel():
        _expand[(n, triton.cdiv(dim, block))](x, order.contiguous(), out, stride, dim, k, BLOCK=block)
    return out


@triton.jit
def _reduce(z, places, gates, out, stride, dim, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        source = z + tl.load(places + row * K + slot).to(tl.int64) * stride
        gate = tl.load(gates + row * K + slot).to(tl.float32)
        total += gate * tl.load(source + at, mask=at < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + at, total.to(out.dtype.element_ty), mask=at < dim)


@backend("reduce_rows", "cuda")
def reduce_rows(z: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    if not covered(z, gates):
        return NotImplemented
    z, stride = rows_of(z)
    (n, k), dim = places.shape, z.shape[1]
    out = torch.empty(n, dim, dtype=z.dtype, device=z.device)
    block = min(triton.next_power_of_2(max(dim, 1)), 1024)
    if out.numel():
        _reduce[(n, triton.cdiv(dim, block))](
            z, places.contiguous(), gates.contiguous(), out, stride, dim, K=k, BLOCK=block
        )
    return out
