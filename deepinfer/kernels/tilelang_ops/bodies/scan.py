"""Running sums of a block's numbers: Ascend has no built-in one."""

from typing import Any

import tilelang.language as T


def running_sums(x: Any, scratch: Any, size: int) -> None:
    """x[j] becomes x[0] + ... + x[j]; x and scratch [size] in the block's memory, size a power of two.

    The steps are unrolled: their distances are constants.
    """
    source, target, by = x, scratch, 1
    while by < size:
        add_shifted(source, target, size, by)
        source, target, by = target, source, 2 * by
    if source is not x:
        copy(source, x, size)


@T.macro
def add_shifted(source, target, size, by):
    for j in T.Parallel(size):
        target[j] = source[j] + T.if_then_else(j >= by, source[T.max(j - by, 0)], T.cast(0, source.dtype))


@T.macro
def copy(source, target, size):
    for j in T.Parallel(size):
        target[j] = source[j]
