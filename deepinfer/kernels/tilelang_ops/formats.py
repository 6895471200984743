"""Rounding to FP8, FP4 and their scales as expressions on the bits of float32 numbers: the same on every platform.

A macro names its argument first, so that expressions that use it twice do not compute it twice.

The rules are those of kernels/reference/quant.py, which the results match bit for bit.
"""

from typing import Any

import tilelang.language as T

E4M3_MAX, E2M1_MAX = 448.0, 6.0
TWO_23 = 8388608.0  # adding it to a small number leaves the number, rounded to an integer, in the low bits


def bits(x: Any) -> Any:
    return T.reinterpret(x, "uint32")


def sign_bit(x: Any, place: int) -> Any:
    return (bits(x) >> 31) << place


@T.macro
def power_of_two(exponent: Any) -> Any:
    """2^exponent of an int32 in -126..127; NaN for 128."""
    value = T.reinterpret(T.cast(exponent + 127, "uint32") << 23, "float32")
    return T.if_then_else(exponent == 128, T.reinterpret(T.uint32(0x7FC00000), "float32"), value)


def magnitude(x: Any) -> Any:
    """Bits of |x| as int32: ordered like the numbers, infinity and then NaN above all, which a maximum would drop."""
    return T.reinterpret(T.abs(x), "int32") & 0x7FFFFFFF


def is_finite(magnitude: Any) -> Any:
    return magnitude < 0x7F800000


def is_nan(x: Any) -> Any:
    """By its bits: a comparison of x with itself is simplified away."""
    return (bits(x) & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000)


def number(magnitude: Any) -> Any:
    return T.reinterpret(magnitude, "float32")


@T.macro
def ceil_log2(x: Any) -> Any:
    """Smallest int32 n with 2^n >= x, a normal positive number."""
    return T.cast(bits(x) >> 23, "int32") - 127 + T.cast((bits(x) & T.uint32(0x7FFFFF)) != T.uint32(0), "int32")


@T.macro
def e4m3_code(x: Any) -> Any:
    """uint32 code of the nearest E4M3 value, ties to even, clamped to +-448."""
    a = T.min(T.abs(x), E4M3_MAX)
    normal = ((bits(a) + T.uint32(0x7FFFF) + ((bits(a) >> 20) & T.uint32(1))) >> 20) - T.uint32(120 << 3)
    small = bits(a * 512.0 + TWO_23) & T.uint32(15)
    return T.if_then_else(a >= 2.0**-6, normal, small) | sign_bit(x, 7)


@T.macro
def e4m3_value(code: Any) -> Any:
    """float32 value of an E4M3 code, uint32."""
    rest = code & T.uint32(127)
    normal = T.reinterpret((rest << 20) + T.uint32(120 << 23), "float32")
    value = T.if_then_else(rest >= T.uint32(8), normal, T.cast(rest, "float32") * 2.0**-9)
    value = T.if_then_else(rest == T.uint32(127), T.reinterpret(T.uint32(0x7FC00000), "float32"), value)
    return T.if_then_else((code & T.uint32(128)) != T.uint32(0), -value, value)


@T.macro
def e2m1_code(x: Any) -> Any:
    """uint32 code of the nearest E2M1 value, ties to the even code, clamped to +-6."""
    a = T.min(T.abs(x), E2M1_MAX)
    normal = ((bits(a) + T.uint32(0x1FFFFF) + ((bits(a) >> 22) & T.uint32(1))) >> 22) - T.uint32(126 << 1)
    small = bits(a * 2.0 + TWO_23) & T.uint32(3)
    return T.if_then_else(a >= 1.0, normal, small) | sign_bit(x, 3)


@T.macro
def e2m1_value(code: Any) -> Any:
    """float32 value of an E2M1 code, uint32."""
    rest = code & T.uint32(7)
    normal = T.reinterpret((rest + T.uint32(126 << 1)) << 22, "float32")
    value = T.if_then_else(rest >= T.uint32(2), normal, T.cast(rest, "float32") * 0.5)
    return T.if_then_else((code & T.uint32(8)) != T.uint32(0), -value, value)


def rounded(x: Any, dtype: str) -> Any:
    """x float32 as a value of `dtype`, widened again: where the reference computes in `dtype`."""
    return x if dtype == "float32" else T.cast(T.cast(x, dtype), "float32")


# ------------------------------------------------------------------ groups of values that share a scale


def scale_of(amax: Any, values: str, scales: str, dtype: str) -> Any:
    """float32 scale of a group from the magnitude of its largest value: NaN where that is not finite.

    values 'e4m3' or 'e2m1'; scales 'ue8m0', 'e4m3' or 'float32'; `dtype` of the values that are cast.
    """
    most = E4M3_MAX if values == "e4m3" else E2M1_MAX
    if scales == "ue8m0":
        if values == "e4m3":
            exponent = ceil_log2(T.max(number(amax), 1e-4) * (1.0 / E4M3_MAX))
        else:
            exponent = ceil_log2(T.max(number(amax), E2M1_MAX * 2.0**-126) / E2M1_MAX)
        return power_of_two(T.if_then_else(is_finite(amax), exponent, 128))
    if scales == "e4m3":  # saturates at 448, where infinity ends too
        scale = e4m3_value(e4m3_code(rounded(T.max(number(amax), most * 2.0**-9) / most, dtype)))
        return T.if_then_else(amax <= 0x7F800000, scale, number(0x7FC00000 + amax * 0))
    scale = T.max(number(amax), 1e-4) / most
    return T.if_then_else(is_finite(amax), scale, number(0x7FC00000 + amax * 0))


def scale_code(scale: Any, scales: str) -> Any:
    """What is stored of a scale: float32, or uint8 of its exponent or E4M3 code."""
    if scales == "float32":
        return scale
    if scales == "ue8m0":
        return T.cast(T.if_then_else(is_nan(scale), T.uint32(255), bits(scale) >> 23), "uint8")
    return T.cast(T.if_then_else(is_nan(scale), T.uint32(127), e4m3_code(scale)), "uint8")


def scale_value(code: Any, scales: str) -> Any:
    """float32 scale of what `scale_code` gave; UE8M0 of 0 is 2^-127."""
    if scales == "float32":
        return code
    code = T.cast(code, "uint32")
    if scales == "e4m3":
        return e4m3_value(code)
    value = T.if_then_else(code == T.uint32(0), T.uint32(0x00400000), code << 23)
    return T.reinterpret(T.if_then_else(code == T.uint32(255), T.uint32(0x7FC00000), value), "float32")


def divided(x: Any, scale: Any, scales: str, dtype: str) -> Any:
    """x over its group's scale as `dtype` holds it; 0 where the scale is NaN, which says all."""
    quotient = x * (1.0 / scale) if scales == "ue8m0" else x / scale  # a power of two divides exactly either way
    return T.if_then_else(is_nan(scale), 0.0, rounded(quotient, dtype))


def value_code(quotient: Any, values: str) -> Any:
    return e4m3_code(quotient) if values == "e4m3" else e2m1_code(quotient)


def code_value(code: Any, values: str) -> Any:
    return e4m3_value(code) if values == "e4m3" else e2m1_value(code)
