"""FP8 activations and weights with scales for 32 values, brought to the scales that the matrix products take."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.reference.quant import e4m3_round

SOURCE = Path(__file__).parent / "activations.cu"
ITEMS = 32  # 128-value pieces of a block of threads


class _Params(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("scale_bytes", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_scales", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("out_scales_stride", ctypes.c_int),
        ("m", ctypes.c_int),
        ("k", ctypes.c_int),
    ]


def build(from_fp8: bool, ordered: bool = False) -> Build:
    """What to compile."""
    return Build("quantize_rows", SOURCE, {"FROM_FP8": int(from_fp8), "ORDERED": int(ordered)})


def builds() -> list[Build]:
    """From BF16 and from E4M3 with UE8M0 scales."""
    return [build(False), build(True), build(False, True)]


@cache
def _kernel(from_fp8: bool, ordered: bool) -> Kernel:
    return Kernel(build(from_fp8, ordered))


def quantize_rows(
    x: Tensor,
    scale_bytes: Tensor | None = None,
    rows: Tensor | None = None,
    starts_early: bool = False,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of x as E4M3 [M, K] with float32 scales [M, ceil(K / 128)] (M contiguous), on the GPU.

    x is BF16 [N, K], quantised as an FP8 linear does it (one power of two for 32 values; spec: model, section 3), or
    E4M3 [N, K] with its UE8M0 `scale_bytes` [N, K / 32]. Four scales become one, their largest: exact but for values
    that become subnormal. `rows` int32 [M] names the row of x for each row of the result; without it, all in order.
    K must be a multiple of 32. `ordered`: columns as `ordered_columns` says, K filled up with zeros. `starts_early`:
    the kernel before on the stream may let this one start. Raises ValueError.
    """
    from_fp8 = scale_bytes is not None
    n, k = x.shape
    dtype = torch.float8_e4m3fn if from_fp8 else torch.bfloat16
    apart = x.stride(0) * x.element_size() if n > 1 else 0  # one row may have any stride
    if x.dtype != dtype or k % 32 or x.stride(1) != 1 or apart % 16 or x.data_ptr() % 16:
        raise ValueError(f"x must be {dtype} [N, K], K % 32 == 0, rows 16 bytes aligned, got {x.dtype} {list(x.shape)}")
    if scale_bytes is not None and (list(scale_bytes.shape) != [n, k // 32] or scale_bytes.stride(1) != 1):
        raise ValueError(f"scale_bytes must be [{n}, {k // 32}], got {list(scale_bytes.shape)}")
    m = n if rows is None else rows.shape[0]
    blocks = -(-k // 128)
    out = torch.empty(m, blocks * 128 if ordered else k, dtype=torch.float8_e4m3fn, device=x.device)
    out_scales = torch.empty(blocks, -(-m // 4) * 4, device=x.device)[:, :m].T
    if m == 0 or k == 0:
        return out, out_scales
    params = _Params(x=x.data_ptr(), out=out.data_ptr(), out_scales=out_scales.data_ptr(), m=m, k=k)
    params.x_stride, params.out_scales_stride = apart, out_scales.stride(1)
    if rows is not None:
        params.rows = rows.data_ptr()
    if scale_bytes is not None:
        params.scale_bytes, params.scale_stride = scale_bytes.data_ptr(), scale_bytes.stride(0)
    _kernel(from_fp8, ordered).launch((-(-m * blocks // ITEMS), 1, 1), (256, 1, 1), params, starts_early=starts_early)
    return out, out_scales


def row_scaled_weight(values: Tensor, scale_bytes: Tensor, block_rows: int) -> tuple[Tensor, Tensor]:
    """E4M3 [N, K] with E8M0 bytes [ceil(N / block_rows), K / 32] -> E4M3 [N, K] and one float32 scale a row [N].

    block_rows is 32 for the model's FP8 weights, 1 for MXFP8. A row takes its largest scale; smaller groups lose only
    what E4M3 cannot hold below it, 2^-10 of that scale and less.
    """
    exponents = scale_bytes.view(torch.uint8).to(torch.int32).repeat_interleave(block_rows, 0)[: values.shape[0]]
    top = exponents.amax(1, keepdim=True)
    factor = torch.exp2((exponents - top).float()).repeat_interleave(32, 1)[:, : values.shape[1]]
    scaled = e4m3_round(values.float() * factor).to(torch.float8_e4m3fn)
    scales = torch.exp2((top - 127).double()).float().masked_fill(top == 255, float("nan"))
    return scaled, scales.squeeze(1)
