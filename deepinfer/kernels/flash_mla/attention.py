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
from deepinfer.kernels.flash_mla.launch import BLOCK_HEADS, HEAD_DIM, ROPE_PAIRS, Inputs, launch

logger = logging.getLogger(__name__)

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
    return _if_covered(
        Inputs(q, window_cache, window_slots, latent_cache, latent_slots, sink.float().contiguous(), scale)
    )


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
    sink, angles = sink.float().contiguous(), (cos.float().contiguous(), sin.float().contiguous())
    return _if_covered(Inputs(q, window_cache, window_slots, latent_cache, latent_slots, sink, scale, angles))


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
    sink, angles = sink.float().contiguous(), (cos.float().contiguous(), sin.float().contiguous())
    inputs = Inputs(q, window_cache, window_slots, latent_cache, latent_slots, sink, scale, angles, q_norm)
    if not covered(inputs):
        raise ValueError(
            "q must be BF16 [N, H, 512] on Hopper with H a multiple of 64, caches aligned BF16 or packed rows, slots "
            f"int32 [N, count], sink [H], cos and sin [N, {ROPE_PAIRS}]; got q {q.dtype} {list(q.shape)} on {q.device}"
        )
    return _attend(inputs, fp8)


def covered(inputs: Inputs) -> bool:
    """Whether this is a case for the kernel."""
    q, angles = inputs.q, inputs.angles
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.device.type != "cuda" or not is_hopper(q.device.index):
        return False
    tokens, heads, dim = q.shape
    if dim != HEAD_DIM or heads % BLOCK_HEADS or not _aligned(q) or inputs.sink.shape != (heads,):
        return False
    if angles is not None and any(part.shape != (tokens, ROPE_PAIRS) for part in angles):
        return False
    window_format, latent_format = inputs.formats
    if window_format is None or not _readable(inputs.window_cache, inputs.window_slots, tokens):
        return False
    if inputs.latent_cache is None or inputs.latent_slots is None:
        return True
    return latent_format is not None and _readable(inputs.latent_cache, inputs.latent_slots, tokens)


def _if_covered(inputs: Inputs) -> Any:
    if not covered(inputs):
        return NotImplemented
    try:
        return _attend(inputs, fp8=False)[0]
    except (CompileError, DriverError) as error:
        _warn_once(str(error))
        return NotImplemented


def _attend(inputs: Inputs, fp8: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of a covered case, and its scales with `fp8`."""
    q = inputs.q
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn if fp8 else q.dtype, device=q.device)
    scales = torch.empty(*q.shape[:2], HEAD_DIM // 32, dtype=torch.uint8, device=q.device) if fp8 else None
    if q.shape[0]:
        launch(inputs, out, scales)
    return out, scales


def _readable(cache: Tensor, slots: Tensor, tokens: int) -> bool:
    """Rows are aligned, and slots int32 [tokens, count] lie next to each other."""
    if slots.dtype != torch.int32 or slots.shape[0] != tokens or (slots.shape[1] > 1 and slots.stride(1) != 1):
        return False
    return _aligned(cache)


def _aligned(tensor: Tensor) -> bool:
    """The last dimension is contiguous, and rows start at multiples of ALIGNMENT bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return tensor.stride(-1) == 1 and not any(number % ALIGNMENT for number in (tensor.data_ptr(), *strides))


@cache
def _warn_once(message: str) -> None:
    logger.warning("sparse attention runs without its Hopper kernel, slower: %s", message)
