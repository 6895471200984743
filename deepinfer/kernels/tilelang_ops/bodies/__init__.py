"""What a block computes, as macros for the kernels of every platform, which bring the rows and take the results.

Buffers may lie in global or in local memory; a row is an index into them.
"""


def threads_for(dim: int) -> int:
    """Threads of a block that adds up `dim` values, a multiple of 32: a power of two that divides it, 128 at most."""
    return min(dim & -dim, 128)
