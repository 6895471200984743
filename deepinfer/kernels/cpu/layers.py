"""CPU kernels of the layers around attention: norms, rotation, mHC, selection, Engram, MoE."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cpu.library import functions, ready
from deepinfer.kernels.reference import basic, engram, hyper_connection, indexer, moe  # noqa: F401  (define the operations)
from deepinfer.kernels.registry import backend

MAX_HC = 8  # streams that the C kernel has room for
WEIGHT_KINDS, FP8 = {torch.float32: 0, torch.bfloat16: 1}, 2  # rows.h's names of what a row holds
MAX_LINEAR_VALUES = 1 << 18  # activations that stay in a core's cache; above, PyTorch's BLAS blocks better


@backend("linear", "cpu")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    if x.dim() != 2 or weight.dtype not in WEIGHT_KINDS or not weight.is_contiguous():
        return NotImplemented
    return _linear(x, WEIGHT_KINDS[weight.dtype], weight, None, 1)


@backend("linear_fp8", "cpu")
def linear_fp8(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    if x.dim() != 2 or not values.is_contiguous() or not scales.is_contiguous() or values.shape[1] % 32:
        return NotImplemented
    return _linear(x, FP8, values, scales, 1)


@backend("grouped_linear", "cpu")
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype not in WEIGHT_KINDS or not (x.is_contiguous() and weight.is_contiguous()):
        return NotImplemented
    return _linear(x.flatten(1), WEIGHT_KINDS[weight.dtype], weight.flatten(0, 1), None, x.shape[1])


@backend("grouped_linear_fp8", "cpu")
def grouped_linear_fp8(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    if not all(t.is_contiguous() for t in (x, values, scales)) or values.shape[1] % 32:
        return NotImplemented
    return _linear(x.flatten(1), FP8, values, scales, x.shape[1])


def _linear(x: Tensor, kind: int, weight: Tensor, scales: Tensor | None, groups: int) -> Tensor:
    """x [N, groups * K], weight [groups * O, K] -> [N, groups * O]."""
    kernels = functions()
    if kernels is None or x.dtype is not torch.float32 or x.stride(1) != 1:
        return NotImplemented
    n, (columns, k) = x.shape[0], weight.shape
    stored = None if scales is None else scales.data_ptr()
    if n * k > MAX_LINEAR_VALUES:
        if kind:
            narrow, weight = weight, torch.empty(columns, k, dtype=torch.float32)
            kernels["widen"](kind, narrow.data_ptr(), stored, k, columns, weight.data_ptr())
        if groups > 1:
            return basic.grouped_linear.reference(x.unflatten(1, (groups, k)), weight.unflatten(0, (groups, -1)))
        return F.linear(x, weight)
    out = torch.empty(n, columns, dtype=torch.float32)
    kernels["linear"](
        x.data_ptr(), x.stride(0), kind, weight.data_ptr(), stored, n, k, groups, columns // groups, out.data_ptr()
    )  # fmt: skip
    return out


@backend("rms_norm", "cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernels = functions()
    dim = x.shape[-1]
    stride = x.stride(0) if x.dim() == 2 and x.stride(1) == 1 else dim  # part of the columns of a wider matrix
    if kernels is None or not ready(weight) or x.dtype is not torch.float32 or not (stride > dim or ready(x)):
        return NotImplemented
    out = torch.empty(x.shape, dtype=torch.float32)
    kernels["rms_norm"](x.data_ptr(), stride, weight.data_ptr(), eps, x.numel() // dim, dim, out.data_ptr())
    return out


@backend("rope", "cpu")
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(x, cos, sin):
        return NotImplemented
    n, heads, dim = x.shape
    out = torch.empty_like(x)
    pairs = cos.shape[-1]
    kernels["rope"](
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), inverse, n, heads, dim, pairs, out.data_ptr()
    )  # fmt: skip
    return out


@backend("norm_rope", "cpu")
def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(weight, cos, sin) or x.dtype is not torch.float32 or x.stride(1) != 1:
        return NotImplemented
    n, dim = x.shape
    out = torch.empty(n, dim, dtype=torch.float32)
    kernels["norm_rope"](
        x.data_ptr(), x.stride(0), weight.data_ptr(), eps, cos.data_ptr(), sin.data_ptr(), n, dim, cos.shape[1],
        out.data_ptr(),
    )  # fmt: skip
    return out


@backend("norm_latents", "cpu")
def norm_latents(
    x: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q, kv = x.split((len(q_norm), len(kv_norm)), dim=-1)
    normed = rms_norm(q, q_norm, eps)
    rotated = NotImplemented if normed is NotImplemented else norm_rope(kv, kv_norm, eps, cos, sin)
    return rotated if rotated is NotImplemented else (normed, rotated)


@backend("swiglu", "cpu")
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(gate_up):
        return NotImplemented
    n, width = gate_up.shape
    out = torch.empty(n, width // 2, dtype=torch.float32)
    kernels["swiglu"](gate_up.data_ptr(), limit, n, width // 2, out.data_ptr())
    return out


@backend("hc_post", "cpu")
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(h, y, post, comb):
        return NotImplemented
    n, hc, dim = h.shape
    out = torch.empty_like(h)
    kernels["hc_post"](
        h.data_ptr(), y.data_ptr(), post.data_ptr(), comb.data_ptr(), n, hc, dim, out.data_ptr()
    )  # fmt: skip
    return out


@backend("hc_pre", "cpu")
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
    h = h.contiguous()  # the first layer repeats the embedding with stride 0
    mixed = _hc(h, None, None, None, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
    return mixed if mixed is NotImplemented else mixed[1:]


@backend("hc_post_pre", "cpu")
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
    if not ready(y, post, comb):
        return NotImplemented
    return _hc(h, y, post, comb, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps)


def _hc(h, y, post, comb, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps):
    kernels = functions()
    p_prev = p_prev.contiguous()
    if kernels is None or h.shape[1] > MAX_HC or not ready(h, p_prev, fn, scale, base, norm_weight):
        return NotImplemented
    n, hc, dim = h.shape
    after = h if y is None else torch.empty_like(h)
    x, new_comb = torch.empty(n, dim, dtype=torch.float32), torch.empty(n, hc, hc, dtype=torch.float32)
    new_pre, new_post = torch.empty(n, hc, dtype=torch.float32), torch.empty(n, hc, dtype=torch.float32)
    incoming = (None, None, None) if y is None else (y.data_ptr(), post.data_ptr(), comb.data_ptr())
    kernels["hc_post_pre"](
        h.data_ptr(), *incoming, p_prev.data_ptr(), fn.data_ptr(), scale.data_ptr(), base.data_ptr(),
        norm_weight.data_ptr(), n, hc, dim, sinkhorn_iters, hc_eps, rms_eps,
        after.data_ptr(), x.data_ptr(), new_pre.data_ptr(), new_post.data_ptr(), new_comb.data_ptr(),
    )  # fmt: skip
    return after, x, new_pre, new_post, new_comb


@backend("top_k_positions", "cpu")
def top_k_positions(scores: Tensor, k: int) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(scores):
        return NotImplemented
    n, width = scores.shape
    out = torch.empty(n, k, dtype=torch.int32)
    kernels["top_k_positions"](scores.data_ptr(), n, width, k, out.data_ptr())
    return out


@backend("candidate_blocks", "cpu")
def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, top_blocks: int) -> Tensor:
    kernels = functions()
    n, width = scores.shape
    if kernels is None or width == 0 or not ready(scores):
        return NotImplemented
    visible = visible.to(torch.int32).contiguous()
    kept = torch.zeros(n, -(-width // block_size), dtype=torch.bool)
    kernels["candidate_blocks"](
        scores.data_ptr(), visible.data_ptr(), n, width, block_size, top_blocks, kept.data_ptr()
    )  # fmt: skip
    return kept


@backend("mask_to_candidates", "cpu")
def mask_to_candidates(scores: Tensor, kept: Tensor, block_size: int) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(scores) or not kept.is_contiguous():
        return NotImplemented
    n, width = scores.shape
    out = torch.empty_like(scores)
    kernels["mask_to_candidates"](scores.data_ptr(), kept.data_ptr(), n, width, block_size, out.data_ptr())
    return out


@backend("engram_hash", "cpu")
def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    kernels = functions()
    tensors = history, multipliers, primes, offsets
    if kernels is None or not all(t.dtype is torch.int64 and t.is_contiguous() for t in tensors):
        return NotImplemented
    n, length = history.shape
    heads = primes.shape[1]
    out = torch.empty(n, (length - 1) * heads, dtype=torch.int64)
    kernels["engram_hash"](*(t.data_ptr() for t in tensors), pad, n, length, heads, out.data_ptr())
    return out


@backend("engram_gate", "cpu")
def engram_gate(h: Tensor, kv: Tensor, weight: Tensor, alive: Tensor | None, eps: float) -> Tensor:
    kernels = functions()
    h = h.contiguous()
    if kernels is None or not ready(h, kv, weight):
        return NotImplemented
    n, hc, dim = h.shape
    out = torch.empty_like(h)
    alive = None if alive is None else alive.contiguous()
    kernels["engram_gate"](
        h.data_ptr(), kv.data_ptr(), weight.data_ptr(), None if alive is None else alive.data_ptr(), eps, n, hc, dim,
        out.data_ptr(),
    )  # fmt: skip
    return out


@backend("moe_gate", "cpu")
def moe_gate(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    kernels = functions()
    if kernels is None or not ready(logits, bias):
        return NotImplemented
    n, experts = logits.shape
    chosen, gates = torch.empty(n, k, dtype=torch.int32), torch.empty(n, k, dtype=torch.float32)
    bias_stride = experts if bias.dim() == 2 else 0
    kernels["moe_gate"](
        logits.data_ptr(), bias.data_ptr(), bias_stride, n, experts, k, normalise, scaling, chosen.data_ptr(),
        gates.data_ptr(),
    )  # fmt: skip
    return chosen, gates


@backend("moe_experts", "cpu")
def moe_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize_activations: bool
) -> Tensor:
    if not ready(w13, w2):
        return NotImplemented
    weights = w13.data_ptr(), None, w2.data_ptr(), None
    return _experts(x, chosen, gates, w2.shape, weights, limit, quantize_activations)


@backend("moe_experts_fp4", "cpu")
def moe_experts_fp4(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
    quantize_activations: bool,
) -> Tensor:
    stored = w13, w13_scale, w2, w2_scale
    experts, dim, half = w2.shape
    if not all(t.is_contiguous() and t.element_size() == 1 for t in stored) or dim % 32 or half % 16:
        return NotImplemented
    weights = tuple(t.data_ptr() for t in stored)
    return _experts(x, chosen, gates, (experts, dim, 2 * half), weights, limit, quantize_activations)


def _experts(x, chosen, gates, shape, weights, limit, quantize_activations):
    """shape: experts, D, I; weights: pointers to values and scales (None: the values are floats) of w13, then of w2."""
    kernels = functions()
    experts, dim, inner = shape
    if kernels is None or not ready(x, gates) or (quantize_activations and (dim % 32 or inner % 32)):
        return NotImplemented
    n, k = chosen.shape
    chosen = chosen.to(torch.int32).contiguous()
    out = torch.empty_like(x)
    kernels["moe_experts"](
        x.data_ptr(), chosen.data_ptr(), gates.data_ptr(), n, k, experts, dim, inner, *weights, limit,
        quantize_activations, out.data_ptr(),
    )  # fmt: skip
    return out
