"""Addresses in paged caches, rows into and out of them."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies.casts import cast_row, numbers, stored_code

NONE = -1
# Values, scales and values of a scale by the name of a `RowFormat`; a cache of another name holds plain values.
PACKED = {"fp8": ("e4m3", "ue8m0", 32), "mxfp4": ("e2m1", "ue8m0", 32), "nvfp4": ("e2m1", "e4m3", 16)}


def row_size(row_format, dim):
    """Numbers of a row: bytes if it is packed."""
    if row_format not in PACKED:
        return dim
    values, _, group = PACKED[row_format]
    return (dim if values == "e4m3" else dim // 2) + dim // group


def row_at(slot, size):
    """Where number j of the row of `slot` is in a cache of pages of `size` rows."""
    return lambda j: (slot // size, slot % size, j)


def behind(at, first):
    """`at` of what lies `first` numbers further."""
    return lambda j: at(first + j)


@T.macro
def entry_slots(positions, tables, sequence, out, row, k, entries):
    """out[row, :k]: slots of positions[row, :k] by tables[sequence, :]; -1 stays -1."""
    for j in T.Parallel(k):
        at = T.max(positions[row, j], 0)
        slot = tables[sequence, at // entries] * entries + at % entries
        out[row, j] = T.if_then_else(positions[row, j] >= 0, slot, NONE)


@T.macro
def window_slots(last, base, out, row, window, ring):
    """out[row, :window]: slots of the last tokens up to position `last` in a ring that begins at slot `base`."""
    for j in T.Parallel(window):
        at = last - (window - 1) + j
        out[row, j] = T.if_then_else(at >= 0, base + T.max(at, 0) % ring, NONE)


@T.macro
def load_row(cache, at, out, row, dim, row_format):
    """out[row, :dim] of the row whose number j is cache[at(j)]."""
    for j in T.Parallel(dim):
        if row_format not in PACKED:
            out[row, j] = cache[at(j)]
        else:
            values, scale_kind, group = PACKED[row_format]
            scale = formats.scale_value(cache[at(row_size(row_format, dim) - dim // group + j // group)], scale_kind)
            out[row, j] = formats.code_value(stored_code(cache, at, j, values), values) * scale


@T.macro
def copy_row(values, row, cache, at, dim):
    for j in T.Parallel(dim):
        cache[at(j)] = values[row, j]


def store_row(values, row, cache, at, dim, row_format, dtype):
    """Inverse of `load_row` of values[row, :]."""
    if row_format not in PACKED:
        return copy_row(values, row, cache, at, dim)
    scales_at = behind(at, row_size(row_format, dim) - dim // PACKED[row_format][2])
    kind, scale_kind, group = PACKED[row_format]
    return cast_row(numbers(values, row), cache, at, cache, scales_at, dim, group, kind, scale_kind, dtype)
