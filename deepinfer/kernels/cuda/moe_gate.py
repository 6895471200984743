"""Gate of a mixture of experts: on Hopper in CUDA C++ (deep_select), else a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.deep_select.gate import choose_experts
from deepinfer.kernels.reference import moe  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend


@triton.jit
def _gate(
    logits, bias, chosen, gates, stride, bias_stride, experts, k, scaling,
    NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    x = tl.load(logits + row * stride + expert, mask=inside, other=0.0)
    # log1p(e) = 2 atanh(e / (2 + e)), here with e <= 1: the series is exact to float32.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    q = s * s
    log1p = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))))))
    score = tl.sqrt_rn(tl.where(x > 20.0, x, tl.maximum(x, 0.0) + log1p))
    key = score + tl.load(bias + row * bias_stride + expert, mask=inside, other=0.0)
    key = tl.where(inside, key, float("-inf"))
    slot = tl.arange(0, K)
    picked = tl.zeros((K,), tl.int32)
    gate = tl.zeros((K,), tl.float32)
    for step in range(k):
        best = tl.min(tl.where(key == tl.max(key, axis=0), expert, EXPERTS), axis=0)
        best = tl.minimum(best, experts - 1)  # NaN is equal to nothing
        picked = tl.where(slot == step, best, picked)
        gate = tl.where(slot == step, tl.sum(tl.where(expert == best, score, 0.0), axis=0), gate)
        key = tl.where(expert == best, float("-inf"), key)
    if NORMALISE:
        gate = gate / (tl.sum(gate, axis=0) + 1e-20)
    tl.store(chosen + row * k + slot, picked, mask=slot < k)
    tl.store(gates + row * k + slot, gate * scaling, mask=slot < k)


@backend("moe_gate", "cuda")
def moe_gate(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    n, experts = logits.shape
    if logits.dtype is not torch.float32 or bias.dtype is not torch.float32 or k > experts:
        return NotImplemented
    logits, bias = logits.contiguous(), bias.contiguous()
    result = choose_experts(logits, bias, k, normalise, scaling)
    if result is not None:
        return result
    chosen = torch.empty(n, k, dtype=torch.int32, device=logits.device)
    gates = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    _gate[(n,)](
        logits, bias, chosen, gates, experts, experts if bias.dim() == 2 else 0, experts, k, scaling,
        NORMALISE=normalise, EXPERTS=triton.next_power_of_2(experts), K=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip
    return chosen, gates
