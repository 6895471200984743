"""Casts of rows, or of a block of rows, to FP8 or FP4 and back; `formats` has the rules.

E2M1 codes are stored in pairs, the one of the even column low.
"""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies.rows import gated, rms_factor, rotated_even, rotated_odd, sum_squares, wide


def columns(row, first=0):
    """Where a macro finds number j of a row of a matrix."""
    return lambda j: (row, first + j)


def numbers(x, row):
    """Number j of a row of a matrix, as float32."""
    return lambda j: wide(x[row, j])


def stored_code(codes, code_at, j, values):
    """uint32 code of value j."""
    if values == "e4m3":
        return T.cast(codes[code_at(j)], "uint32")
    pair = T.cast(codes[code_at(j // 2)], "uint32")
    return T.if_then_else(j % 2 == 0, pair & T.uint32(15), pair >> 4)


@T.macro
def cast_row(value, codes, code_at, scales, scale_at, dim, group, values, scale_kind, dtype):
    """Codes and scales of the numbers value(j), j < dim, a scale for `group` each; byte j goes to codes[code_at(j)]."""
    groups, half = dim // group, group // 2
    low = T.alloc_fragment((groups, half), "float32")
    high = T.alloc_fragment((groups, half), "float32")
    largest = T.alloc_fragment((groups, half), "int32")
    amax = T.alloc_fragment((groups,), "int32")
    scale = T.alloc_fragment((groups,), "float32")
    for g, j in T.Parallel(groups, half):
        low[g, j] = value(g * group + 2 * j)
        high[g, j] = value(g * group + 2 * j + 1)
        largest[g, j] = T.max(formats.magnitude(low[g, j]), formats.magnitude(high[g, j]))
    T.reduce_max(largest, amax, dim=1)
    for g in T.Parallel(groups):
        scale[g] = formats.scale_of(amax[g], values, scale_kind, dtype)
        scales[scale_at(g)] = formats.scale_code(scale[g], scale_kind)
    for g, j in T.Parallel(groups, half):
        even = formats.value_code(formats.divided(low[g, j], scale[g], scale_kind, dtype), values)
        odd = formats.value_code(formats.divided(high[g, j], scale[g], scale_kind, dtype), values)
        if values == "e4m3":
            codes[code_at(g * group + 2 * j)] = T.cast(even, "uint8")
            codes[code_at(g * group + 2 * j + 1)] = T.cast(odd, "uint8")
        else:
            codes[code_at(g * half + j)] = T.cast(even | (odd << 4), "uint8")


@T.macro
def round_row(x, out, row, dim, group, values, scale_kind, dtype):
    """out[row, :]: what a reader sees of x[row, :] after a cast."""
    groups = dim // group
    number = T.alloc_fragment((groups, group), "float32")
    largest = T.alloc_fragment((groups, group), "int32")
    amax = T.alloc_fragment((groups,), "int32")
    scale = T.alloc_fragment((groups,), "float32")
    for g, j in T.Parallel(groups, group):
        number[g, j] = wide(x[row, g * group + j])
        largest[g, j] = formats.magnitude(number[g, j])
    T.reduce_max(largest, amax, dim=1)
    for g in T.Parallel(groups):
        scale[g] = formats.scale_of(amax[g], values, scale_kind, dtype)
    for g, j in T.Parallel(groups, group):
        code = formats.value_code(formats.divided(number[g, j], scale[g], scale_kind, dtype), values)
        out[row, g * group + j] = formats.code_value(code, values) * scale[g]


@T.macro
def uncast_row(codes, code_at, scales, scale_at, out, row, dim, group, values, scale_kind):
    """out[row, :]: inverse of `cast_row`."""
    for j in T.Parallel(dim):
        scale = formats.scale_value(scales[scale_at(j // group)], scale_kind)
        out[row, j] = formats.code_value(stored_code(codes, code_at, j, values), values) * scale


@T.macro
def cast_block(x, codes, scales, scale, first, column, block, n, height, width, group, values, scale_kind, dtype):
    """Rows first .. first + height (those below n) and `width` columns of x; a scale for all rows and `group` columns.

    scales[block, column // group + .]; `scale` float32 [width // group] is memory of the block's threads.
    """
    groups, half = width // group, width // 2
    largest = T.alloc_fragment((height, groups, group), "int32")
    of_rows = T.alloc_fragment((height, groups), "int32")
    amax = T.alloc_fragment((groups,), "int32")
    for i, g, j in T.Parallel(height, groups, group):
        largest[i, g, j] = 0
        if first + i < n:
            largest[i, g, j] = formats.magnitude(wide(x[first + i, column + g * group + j]))
    T.reduce_max(largest, of_rows, dim=2)
    T.reduce_max(of_rows, amax, dim=0)
    for g in T.Parallel(groups):
        scale[g] = formats.scale_of(amax[g], values, scale_kind, dtype)
        scales[block, column // group + g] = formats.scale_code(scale[g], scale_kind)
    for i, j in T.Parallel(height, half):
        if first + i < n:
            at = column + 2 * j
            low, high = wide(x[first + i, at]), wide(x[first + i, at + 1])
            even = formats.value_code(formats.divided(low, scale[2 * j // group], scale_kind, dtype), values)
            odd = formats.value_code(formats.divided(high, scale[(2 * j + 1) // group], scale_kind, dtype), values)
            if values == "e4m3":
                codes[first + i, at] = T.cast(even, "uint8")
                codes[first + i, at + 1] = T.cast(odd, "uint8")
            else:
                codes[first + i, column // 2 + j] = T.cast(even | (odd << 4), "uint8")


def rotated_value(x, cos, sin, row, head, j, plain, sign):
    """Value j of `rope` of x[row, head]."""
    pair = T.max(j - plain, 0) // 2
    even, odd = x[row, head, plain + 2 * pair], x[row, head, plain + 2 * pair + 1]
    c, s = cos[row, pair], sign * sin[row, pair]
    turned = T.if_then_else(j % 2 == 0, rotated_even(even, odd, c, s), rotated_odd(even, odd, c, s))
    return T.if_then_else(j < plain, wide(x[row, head, j]), turned)


def normed_numbers(x, weight, factor, row, dtype):
    return lambda j: formats.rounded(wide(weight[j]) * (wide(x[row, j]) * factor[0]), dtype)


def gated_numbers(gate_up, row, inner, limit, dtype):
    return lambda j: formats.rounded(gated(gate_up[row, j], gate_up[row, inner + j], limit), dtype)


def rotated_numbers(x, cos, sin, row, head, plain, sign, dtype):
    return lambda j: formats.rounded(rotated_value(x, cos, sin, row, head, j, plain, sign), dtype)


@T.macro
def norm_cast(x, weight, codes, scales, row, dim, group, eps, dtype):
    """`cast_row` of `rms_norm`, rounded to `dtype` in between; E4M3 with UE8M0."""
    total = T.alloc_fragment((1,), "float32")
    factor = T.alloc_shared((1,), "float32")
    sum_squares(x, row, dim, total)
    for i in T.Parallel(1):
        factor[i] = rms_factor(total[i], dim, eps)
    cast_row(
        normed_numbers(x, weight, factor, row, dtype),
        codes, columns(row), scales, columns(row), dim, group, "e4m3", "ue8m0", dtype,
    )  # fmt: skip


@T.macro
def swiglu_cast(gate_up, codes, scales, row, inner, group, limit, dtype):
    """`cast_row` of `swiglu`, rounded to `dtype` in between; E4M3 with UE8M0."""
    cast_row(
        gated_numbers(gate_up, row, inner, limit, dtype),
        codes, columns(row), scales, columns(row), inner, group, "e4m3", "ue8m0", dtype,
    )  # fmt: skip


@T.macro
def rope_cast(x, cos, sin, codes, scales, row, head, to, to_head, dim, pairs, group, sign, dtype):
    """`cast_row` of `rope` of x[row, head], rounded to `dtype` in between, to codes[to, to_head * dim + .]."""
    cast_row(
        rotated_numbers(x, cos, sin, row, head, dim - 2 * pairs, sign, dtype),
        codes, columns(to, to_head * dim), scales, columns(to, to_head * (dim // group)), dim, group, "e4m3", "ue8m0",
        dtype,
    )  # fmt: skip
