"""Triton kernels for CUDA devices (written and tuned for Hopper). Importing this registers them.

A kernel takes what the model gives it: BF16 or float32 values, accumulated in float32. Anything else (float64) makes it
return NotImplemented, and the PyTorch reference runs. No wrapper here waits for the device, so a step made of these
operations can be captured in a CUDA graph.
"""

from deepinfer.kernels.cuda import (
    attention,
    basic,
    bitmask,
    cache_rows,
    casts,
    compressor,
    engram,
    expert_rows,
    fused_casts,
    hyper_connection,
    indexer,
    moe,
    moe_gate,
    prefill_plan,
    sampling,
    speculation,
    step,
    top_k,
)

__all__ = [
    "attention",
    "basic",
    "bitmask",
    "cache_rows",
    "casts",
    "compressor",
    "engram",
    "expert_rows",
    "fused_casts",
    "hyper_connection",
    "indexer",
    "moe",
    "moe_gate",
    "prefill_plan",
    "sampling",
    "speculation",
    "step",
    "top_k",
]
