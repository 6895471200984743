"""Each operation with its arguments as the kernels of either platform take them, and its outputs.

Sizes of a model are compiled in; numbers of rows are not.
"""

from deepinfer.kernels.tilelang_ops.calls import (
    caches,
    casts,
    engram,
    experts,
    hyper_connection,
    rows,
    sampling,
    speculation,
)

__all__ = ["caches", "casts", "engram", "experts", "hyper_connection", "rows", "sampling", "speculation"]
