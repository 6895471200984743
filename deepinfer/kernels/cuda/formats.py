"""FP8 and FP4 formats inside kernels: the rules of kernels/reference/quant.py, bit for bit for float32 inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.reference.cache_rows import RowFormat

# How a cache row is stored (KIND of the kernels).
PLAIN, FP8, MXFP4, NVFP4 = (tl.constexpr(kind) for kind in range(4))
KINDS = {RowFormat.FP8: 1, RowFormat.MXFP4: 2, RowFormat.NVFP4: 3}


@triton.jit
def e2m1_code(x):
    """Nearest E2M1 code of x, ties to the even code, clamped to +-6; int32 0..15."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """Float32 values of codes (int32; higher bits are ignored): the code's bits are those of a float32 times 2^-126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e8m0_value(byte):
    """2^(byte - 127) of int32 bytes, exact also for byte 0; 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(byte):
    """Float32 values of E4M3 bytes (uint8)."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_byte(x):
    """E4M3 bytes (uint8) of the nearest value, ties to even, clamped to +-448. x is not NaN."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _ceil_log2_byte(x):
    """E8M0 byte of the smallest power of two >= x, for normal positive x; NaN's for what is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.where(bits >= 0x7F800000, 255, exponent)


@triton.jit
def group_scale(x, KIND: tl.constexpr):
    """x float32 [groups, size] -> scale bytes int32 [groups] and the scales float32 [groups]."""
    size = tl.where(x != x, float("inf"), tl.abs(x))
    largest = tl.max(size, axis=1)
    if KIND == NVFP4:
        is_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
        byte = e4m3_byte(tl.div_rn(tl.maximum(largest, 0.01171875), 6.0)).to(tl.int32)
        byte = tl.where(is_nan, 0x7F, byte)
        scale = tl.where(is_nan, float("nan"), e4m3_value(byte.to(tl.uint8)))
    else:
        if KIND == FP8:
            byte = _ceil_log2_byte(tl.maximum(largest, 1e-4) * (1.0 / 448.0))
        else:
            byte = _ceil_log2_byte(tl.div_rn(tl.maximum(largest, 7.052966104933725e-38), 6.0))
        scale = e8m0_value(byte)
    return byte, scale


@triton.jit
def over_scale(x, scale):
    """x [groups, size] / scale [groups], 0 where the scale is NaN."""
    ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return tl.where((scale != scale)[:, None], 0.0, ratio)


@triton.jit
def load_row_values(base, inside, column, dim, KIND: tl.constexpr):
    """Float32 values [rows, columns] of stored rows: base [rows, 1] points at their first elements.

    column int32 [1, columns], the row's element numbers; inside [rows, columns]. Packed rows are uint8.
    """
    if KIND == PLAIN:
        value = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    elif KIND == FP8:
        scale = e8m0_value(tl.load(base + dim + column // 32, mask=inside, other=127).to(tl.int32))
        value = e4m3_value(tl.load(base + column, mask=inside, other=0)) * scale
    else:
        pair = tl.load(base + column // 2, mask=inside, other=0).to(tl.int32)
        if KIND == MXFP4:
            scale = e8m0_value(tl.load(base + dim // 2 + column // 32, mask=inside, other=127).to(tl.int32))
        else:
            scale = e4m3_value(tl.load(base + dim // 2 + column // 16, mask=inside, other=0))
        value = e2m1_value(pair >> (4 * (column & 1))) * scale
    return value
