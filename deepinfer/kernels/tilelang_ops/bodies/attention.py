"""Sparse attention: what both platforms share of it."""

from typing import Any, NamedTuple

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies import caches
from deepinfer.kernels.tilelang_ops.bodies.casts import stored_code

LOWEST = -1e30  # a finite "no maximum yet"


class Rows(NamedTuple):
    """A cache [pages, size, row] whose pages and rows may be apart, as `load_rows_tl` takes it."""

    row_format: str
    size: int
    page_stride: int
    row_stride: int

    @property
    def stored(self) -> str:
        """Type of the numbers in memory."""
        return "uint8" if self.row_format in caches.PACKED else self.row_format

    def tensor(self, pages: Any, dim: int) -> Any:
        """The annotation of a kernel's argument."""
        shape = (pages, self.size, caches.row_size(self.row_format, dim))
        return T.StridedTensor(shape, (self.page_stride, self.row_stride, 1), self.stored)


def row_of(i: Any) -> Any:
    """Where number j of row i is in memory [rows, 1, row]."""
    return lambda j: (i, 0, j)


def row_value(rows: Rows, memory: Any, at: Any, j: Any, dim: int) -> Any:
    """Value j of the row whose number i is memory[at(i)]."""
    if rows.row_format not in caches.PACKED:
        return memory[at(j)]
    values, scale_kind, group = caches.PACKED[rows.row_format]
    first_scale = caches.row_size(rows.row_format, dim) - dim // group
    scale = formats.scale_value(memory[at(first_scale + j // group)], scale_kind)
    return formats.code_value(stored_code(memory, at, j, values), values) * scale
