"""Addresses in paged caches, rows into and out of them: a row passes through the Unified Buffer.

A cache is a view [pages, size, row] whose pages and rows may be apart; row_format: 'fp8', 'mxfp4' or 'nvfp4' of
`RowFormat`, or the dtype of a cache of plain values.
"""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import caches, threads_for

THREADS = 128


def entry_slots_tl(k: int, max_blocks: int, stride: int, entries: int) -> Any:
    """`entry_slots` of positions int32 [n, k] by block tables int32 [sequences, max_blocks], `stride` apart."""
    n, sequences = T.dynamic("n"), T.dynamic("sequences")

    @T.prim_func
    def entry_slots(
        positions: T.Tensor((n, k), "int32"),
        tables: T.StridedTensor((sequences, max_blocks), (stride, 1), "int32"),
        sequence_of_row: T.Tensor((n,), "int32"),
        slots: T.Tensor((n, k), "int32"),
    ):
        with T.Kernel(n) as row:
            wanted, table = T.alloc_shared((1, k), "int32"), T.alloc_shared((1, max_blocks), "int32")
            T.copy(positions[row, 0], wanted)
            T.copy(tables[sequence_of_row[row], 0], table)
            with T.SimtVF(threads=THREADS):
                caches.entry_slots(wanted, table, 0, wanted, 0, k, entries)
            T.copy(wanted, slots[row, 0])

    return entry_slots


def window_slots_tl(window: int, ring: int) -> Any:
    """`window_slots` at positions int32 [n] in rings of the state slots int32 [n]."""
    n = T.dynamic("n")

    @T.prim_func
    def window_slots(
        positions: T.Tensor((n,), "int32"), states: T.Tensor((n,), "int32"), slots: T.Tensor((n, window), "int32")
    ):
        with T.Kernel(n) as row:
            found = T.alloc_shared((1, window), "int32")
            last, base = positions[row], states[row] * ring
            with T.SimtVF(threads=THREADS):
                caches.window_slots(last, base, found, 0, window, ring)
            T.copy(found, slots[row, 0])

    return window_slots


def load_rows_tl(
    dim: int, row_format: str, size: int, page_stride: int, row_stride: int, dtype: str = "bfloat16"
) -> Any:
    """`load_rows` at slots int32 [n], the row of slot 0 for -1."""
    n, pages = T.dynamic("n"), T.dynamic("pages")
    row_size, stored = caches.row_size(row_format, dim), "uint8" if row_format in caches.PACKED else row_format

    @T.prim_func
    def load_rows(
        cache: T.StridedTensor((pages, size, row_size), (page_stride, row_stride, 1), stored),
        slots: T.Tensor((n,), "int32"),
        out: T.Tensor((n, dim), dtype),
    ):
        with T.Kernel(n) as row:
            packed, value = T.alloc_shared((1, 1, row_size), stored), T.alloc_shared((1, dim), dtype)
            slot = T.max(slots[row], 0)
            T.copy(cache[slot // size, slot % size, 0], packed)
            with T.SimtVF(threads=threads_for(dim)):
                caches.load_row(packed, caches.row_at(0, size), value, 0, dim, row_format)
            T.copy(value, out[row, 0])

    return load_rows


def store_rows_tl(
    dim: int, row_format: str, size: int, page_stride: int, row_stride: int, dtype: str = "bfloat16"
) -> Any:
    """`store_rows` of values [n, dim] at slots int32 [n], none of them -1."""
    n, pages = T.dynamic("n"), T.dynamic("pages")
    row_size, stored = caches.row_size(row_format, dim), "uint8" if row_format in caches.PACKED else row_format

    @T.prim_func
    def store_rows(
        values: T.Tensor((n, dim), dtype),
        slots: T.Tensor((n,), "int32"),
        cache: T.StridedTensor((pages, size, row_size), (page_stride, row_stride, 1), stored),
    ):
        with T.Kernel(n) as row:
            value, packed = T.alloc_shared((1, dim), dtype), T.alloc_shared((1, 1, row_size), stored)
            slot = slots[row]
            T.copy(values[row, 0], value)
            with T.SimtVF(threads=threads_for(dim // 2)):
                caches.store_row(value, 0, packed, caches.row_at(0, size), dim, row_format, dtype)
            T.copy(packed, cache[slot // size, slot % size, 0])

    return store_rows
