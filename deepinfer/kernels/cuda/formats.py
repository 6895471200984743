"""FP8 and FP4 formats inside kernels: the rules of kernels/reference/quant.py, bit for bit for float32 inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.cuda.fp4_assembly import e2m1_pairs_assembly
from deepinfer.kernels.reference.cache_rows import RowFormat

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # no assembly then

# How a cache row is stored (KIND of the kernels).
PLAIN, FP8, MXFP4, NVFP4 = (tl.constexpr(kind) for kind in range(4))
KINDS = {RowFormat.FP8: 1, RowFormat.MXFP4: 2, RowFormat.NVFP4: 3}


@triton.jit
def e2m1_codes(x, scale):
    """Nearest E2M1 codes of x / scale, int32 0..15: ties to the even code, clamped to +-6. `scale` broadcasts to x.

    0 where the scale is NaN. No division: scale times threshold is exact, and x / scale rounds to more than a threshold
    just where x is more than that.
    """
    size = tl.abs(x)
    upper = size >= 1.75 * scale
    middle = size >= tl.where(upper, 3.5 * scale, 0.75 * scale)
    high = tl.where(middle, 5.0 * scale, 2.5 * scale)
    threshold = tl.where(upper, high, tl.where(middle, 1.25 * scale, 0.25 * scale))
    code = upper.to(tl.int32) * 4 + middle.to(tl.int32) * 2 + (size > threshold).to(tl.int32)
    return tl.where(scale != scale, 0, code | ((x.to(tl.int32, bitcast=True) >> 28) & 8))


@triton.jit
def e2m1_code_over(x, scale):
    """`e2m1_codes` of x [groups, size] / scale [groups]."""
    return e2m1_codes(x, scale[:, None])


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
def scale_for(largest, is_nan, KIND: tl.constexpr):
    """Scale bytes int32 and scales float32 of groups whose largest size is `largest` (inf where `is_nan`)."""
    if KIND == NVFP4:
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
def group_scale(x, KIND: tl.constexpr):
    """x float32 [groups, size] -> scale bytes int32 [groups] and the scales float32 [groups]."""
    largest = tl.max(tl.where(x != x, float("inf"), tl.abs(x)), axis=1)
    if KIND == NVFP4:
        is_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    else:
        is_nan = largest < 0  # their scale of infinity is NaN
    return scale_for(largest, is_nan, KIND)


@triton.jit
def _larger_of_pairs(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pair_scale(pairs, KIND: tl.constexpr):
    """`group_scale` of BF16 pairs in words int32 [groups, size / 2]: the bits of numbers order as their sizes do."""
    both = tl.reduce(pairs & 0x7FFF7FFF, 1, _larger_of_pairs)
    largest = tl.maximum(both & 0xFFFF, both >> 16)
    size = (tl.minimum(largest, 0x7F80) << 16).to(tl.float32, bitcast=True)
    return scale_for(size, largest > 0x7F80, KIND)


_E2M1_PAIRS = tl.constexpr(e2m1_pairs_assembly())


@triton.jit
def e2m1_pairs_over(pairs, scale):
    """`e2m1_code_over` of BF16 pairs in words int32 [groups, size / 2]: a byte for each. Not interpreted."""
    bits = (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    twice = tl.broadcast_to((bits | (bits << 16))[:, None], pairs.shape)
    return tl.inline_asm_elementwise(
        _E2M1_PAIRS, "=r,r,r,r,r,r,r,r,r", [pairs, twice], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def over_power(x, byte):
    """x [groups, size] / 2^(byte - 127), byte int32 [groups]: times the inverse, to the same bits; 0 for byte 255."""
    return tl.where((byte == 255)[:, None], 0.0, x * e8m0_value(254 - byte)[:, None])


@triton.jit
def _e8m0(byte, DTYPE: tl.constexpr):
    """2^(byte - 127) of int32 bytes in BF16 or float32."""
    if DTYPE == tl.bfloat16:
        bits = tl.where(byte == 0, 0x0040, tl.where(byte == 255, 0x7FC0, byte << 7))
        value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = e8m0_value(byte)
    return value


@triton.jit
def _e2m1_pair(packed, scale, DTYPE: tl.constexpr):
    """Values of the low and of the high codes of bytes, times a scale each byte, in BF16 or float32."""
    if DTYPE == tl.bfloat16 and not INTERPRETED:
        # Four bytes a time: a code's bits in those of a BF16 number, times 2^126 (exact), times the scale.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, bits, sign, power;
            mov.b32 power, 0x7E807E80;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            and.b32 bits, first, 0x00070007;
            shl.b32 bits, bits, 6;
            and.b32 sign, first, 0x00080008;
            shl.b32 sign, sign, 12;
            or.b32 bits, bits, sign;
            mul.bf16x2 bits, bits, power;
            mul.bf16x2 $0, bits, $5;
            and.b32 bits, second, 0x00070007;
            shl.b32 bits, bits, 6;
            and.b32 sign, second, 0x00080008;
            shl.b32 sign, sign, 12;
            or.b32 bits, bits, sign;
            mul.bf16x2 bits, bits, power;
            mul.bf16x2 $1, bits, $6;
            and.b32 bits, first, 0x00700070;
            shl.b32 bits, bits, 2;
            and.b32 sign, first, 0x00800080;
            shl.b32 sign, sign, 8;
            or.b32 bits, bits, sign;
            mul.bf16x2 bits, bits, power;
            mul.bf16x2 $2, bits, $5;
            and.b32 bits, second, 0x00700070;
            shl.b32 bits, bits, 2;
            and.b32 sign, second, 0x00800080;
            shl.b32 sign, sign, 8;
            or.b32 bits, bits, sign;
            mul.bf16x2 bits, bits, power;
            mul.bf16x2 $3, bits, $6;
            }""",
            "=r,=r,=r,=r,r,r,r", [packed, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = packed.to(tl.int32)
        low, high = (e2m1_value(code) * scale).to(DTYPE), (e2m1_value(code >> 4) * scale).to(DTYPE)
    return low, high


@triton.jit
def spread(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, GROUPS] -> [ROWS, GROUPS * SIZE], each scale SIZE times."""
    wide = tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, SIZE))
    return tl.reshape(wide, (ROWS, GROUPS * SIZE))


@triton.jit
def load_packed(
    values, scales, alive, start, dim: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Bytes of FP4 pairs [rows, DEPTH / 2] from column `start` on and of their scales [rows, DEPTH / GROUP].

    values and scales: pointers [rows] at each row's packed pairs and scales.
    """
    pairs = start // 2 + tl.arange(0, DEPTH // 2)
    group = start // GROUP + tl.arange(0, DEPTH // GROUP)
    if dim % DEPTH == 0:  # no mask along the columns, for wide loads
        inside, inside_group = alive[:, None], alive[:, None]
    else:
        inside, inside_group = (
            alive[:, None] & (pairs < dim // 2)[None, :],
            alive[:, None] & (group < dim // GROUP)[None, :],
        )
    packed = tl.load(values[:, None] + pairs[None, :], mask=inside, other=0)
    byte = tl.load(scales[:, None] + group[None, :], mask=inside_group, other=0)
    return packed, byte


@triton.jit
def widen(packed, byte, GROUP: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS, DEPTH] values in DTYPE of what `load_packed` gave. Scales are E8M0 (groups of 32) or E4M3 (of 16)."""
    if GROUP == 16:
        scale = e4m3_value(byte).to(DTYPE)
    else:
        scale = _e8m0(byte.to(tl.int32), DTYPE)
    low, high = _e2m1_pair(packed, spread(scale, ROWS, DEPTH // GROUP, GROUP // 2), DTYPE)
    return tl.interleave(low, high)


@triton.jit
def load_cache_rows(
    base, alive, dim: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """[ROWS, DIM] values in DTYPE of whole cache rows at pointers base [ROWS]; zeros outside. For many rows at once.

    For wide loads the caller must say tl.multiple_of(base, bytes) where it makes the pointers.
    """
    at = tl.arange(0, DIM)
    if dim == DIM:
        inside = alive[:, None]
    else:
        inside = alive[:, None] & (at < dim)[None, :]
    if KIND == PLAIN:
        value = tl.load(base[:, None] + at[None, :], mask=inside, other=0.0).to(DTYPE)
    elif KIND == FP8:
        value = tl.load(base[:, None] + at[None, :], mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
        group = tl.arange(0, DIM // 32)
        byte = tl.load(
            base[:, None] + dim + group[None, :], mask=alive[:, None] & (group * 32 < dim)[None, :], other=127
        )
        scale = spread(e8m0_value(byte.to(tl.int32)), ROWS, DIM // 32, 32)
        value = (value.to(tl.float32) * scale).to(DTYPE)
    else:
        GROUP: tl.constexpr = 16 if KIND == NVFP4 else 32
        packed, byte = load_packed(base, base + dim // 2, alive, 0, dim, GROUP, DIM)
        value = widen(packed, byte, GROUP, ROWS, DIM, DTYPE)
    return value
