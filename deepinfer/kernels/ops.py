"""The operations the models call. Importing this registers every backend that this machine can run."""

from importlib.util import find_spec

import torch

from deepinfer.kernels import cpu, registry  # cpu registers its backends
from deepinfer.kernels.deep_gemm.available import is_available
from deepinfer.kernels.platform import PLATFORM
from deepinfer.kernels.reference.attention import rotated_attention, sparse_attention
from deepinfer.kernels.reference.basic import (
    grouped_linear,
    grouped_linear_fp8,
    linear,
    linear_fp8,
    norm_latents,
    norm_rope,
    rms_norm,
    rope,
    round_fp8,
    swiglu,
)
from deepinfer.kernels.reference.bitmask import apply_token_bitmask
from deepinfer.kernels.reference.cache_rows import RowFormat, load_rows, round_trip_rows, store_rows
from deepinfer.kernels.reference.casts import cast_groups, norm_cast, rope_cast, swiglu_cast, uncast_groups
from deepinfer.kernels.reference.compressor import pool_groups
from deepinfer.kernels.reference.engram import engram_gate, engram_hash, ngram_ids
from deepinfer.kernels.reference.hyper_connection import hc_post, hc_post_pre, hc_pre
from deepinfer.kernels.reference.indexer import (
    candidate_blocks,
    index_scores,
    mask_to_candidates,
    top_k,
    top_k_positions,
)
from deepinfer.kernels.reference.int8 import chain_drafts, linear_int8
from deepinfer.kernels.reference.moe import (
    expand_rows,
    expert_order,
    moe_experts,
    moe_experts_fp4,
    moe_gate,
    reduce_rows,
)
from deepinfer.kernels.reference.prefill_plan import prefill_plan, window_plan
from deepinfer.kernels.reference.rejection import accept_or_resample, token_probabilities
from deepinfer.kernels.reference.sampling import draw_tokens
from deepinfer.kernels.reference.speculation import choose_draft_lengths, lookup_drafts, verify_tokens
from deepinfer.kernels.reference.step import decode_plan, entry_slots, window_slots

if PLATFORM.tilelang_ops_backend == "cuda" and find_spec("triton") is not None:
    from deepinfer.kernels import cuda  # noqa: F401  (registers its backends)
if PLATFORM.tilelang_ops_backend == "asc" or (PLATFORM.tilelang_ops_backend == "cuda" and registry.USES_TILELANG):
    from deepinfer.kernels.tilelang_ops import attention, calls, operations  # noqa: F401  (fill operations.CALLS)

    operations.register("npu" if PLATFORM.tilelang_ops_backend == "asc" else "cuda")

get_kv_swa_index_decode = window_slots  # as other engines for this model call it

__all__ = [
    "RowFormat",
    "accept_or_resample",
    "apply_token_bitmask",
    "candidate_blocks",
    "cast_groups",
    "chain_drafts",
    "choose_draft_lengths",
    "decode_plan",
    "draw_tokens",
    "engram_gate",
    "engram_hash",
    "entry_slots",
    "expand_rows",
    "expert_order",
    "get_kv_swa_index_decode",
    "grouped_linear",
    "grouped_linear_fp8",
    "hc_post",
    "hc_post_pre",
    "hc_pre",
    "index_scores",
    "linear",
    "linear_fp8",
    "linear_int8",
    "load_rows",
    "lookup_drafts",
    "mask_to_candidates",
    "moe_experts",
    "moe_experts_fp4",
    "moe_gate",
    "multiplies_fp8",
    "multiplies_int8",
    "ngram_ids",
    "norm_cast",
    "norm_latents",
    "norm_rope",
    "pool_groups",
    "prefill_plan",
    "reads_fp4_experts",
    "reads_narrow_weights",
    "reduce_rows",
    "rms_norm",
    "rope",
    "rope_cast",
    "rotated_attention",
    "round_fp8",
    "round_trip_rows",
    "sparse_attention",
    "store_rows",
    "swiglu",
    "swiglu_cast",
    "token_probabilities",
    "top_k",
    "top_k_positions",
    "uncast_groups",
    "verify_tokens",
    "window_plan",
    "window_slots",
]


def multiplies_fp8(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the products of kernels/deep_gemm take activations of `dtype` there: BF16 on Hopper, with a compiler."""
    return dtype is torch.bfloat16 and is_available(torch.device(device))


def multiplies_int8(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether `linear_int8` and `chain_drafts` have a kernel for activations of `dtype` there."""
    is_on_cpu = torch.device(device).type == "cpu" and not registry.FORCE_REFERENCE
    return is_on_cpu and dtype is torch.float32 and cpu.int8.multiplies_int8()


def reads_narrow_weights(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether `linear` reads BF16 weights, and `linear_fp8` FP8 ones, at full speed with `dtype` there."""
    is_on_cpu = torch.device(device).type == "cpu" and not registry.FORCE_REFERENCE
    return is_on_cpu and dtype is torch.float32 and cpu.cpu_backend_status().active


def reads_fp4_experts(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether `moe_experts_fp4` has a kernel for activations of `dtype` there; its reference is slow."""
    kind = torch.device(device).type
    if registry.FORCE_REFERENCE:
        return False
    if kind == "cuda":
        return dtype in (torch.bfloat16, torch.float32) and kind in moe_experts_fp4.backends
    return kind == "cpu" and dtype is torch.float32 and cpu.cpu_backend_status().active
