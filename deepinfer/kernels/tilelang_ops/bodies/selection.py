"""Selection of the largest values of a row, by digits of their bits: no sort, and ties go to the lowest position."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies.rows import wide
from deepinfer.kernels.tilelang_ops.bodies.scan import running_sums

DIGITS = 256
TILE = 2048  # values at once
TIE = 1 << 16  # a count of ties above a count of others, in one number


def value_at(x, row, at, width):
    """x[row, at] as float32, -inf past the end; no branch, which analysis would follow through all that comes."""
    return T.if_then_else(at < width, wide(x[row, T.min(at, width - 1)]), -T.infinity("float32"))


@T.macro
def sort_key(x):
    """uint32, ordered like float32 numbers; 0 for -inf and NaN, which are never chosen; both zeros are equal."""
    bits = formats.bits(T.if_then_else(x == 0, 0.0, x))
    key = T.if_then_else((bits >> 31) != T.uint32(0), ~bits, bits | T.uint32(0x80000000))
    return T.if_then_else(T.Or(formats.is_nan(x), x == -T.infinity("float32")), T.uint32(0), key)


def find_threshold(x, row, width, k, counts, scratch, state, key):
    """key[0]: the sort key of the k-th largest value of x[row, :width]; state[1]: how many of the values equal to it
    are among the k. With fewer than k candidates key[0] is 1.

    counts and scratch int32 [DIGITS], state int32 [2] and key uint32 [1] are memory of the block's threads.
    """
    begin(k, state, key)
    for shift in (24, 16, 8, 0):
        find_digit(x, row, width, shift, counts, scratch, state, key)


@T.macro
def begin(k, state, key):
    for _ in T.Parallel(1):
        key[0] = T.uint32(0)
        state[1] = k


@T.macro
def find_digit(x, row, width, shift, counts, scratch, state, key):
    """Add the digit at `shift` to key[0]: among values that agree with it in those above."""
    for j in T.Parallel(DIGITS):
        counts[j] = 0
    for part in T.serial(T.ceildiv(width, TILE)):
        for j in T.Parallel(TILE):
            own = sort_key(value_at(x, row, part * TILE + j, width))
            if T.And(own != T.uint32(0), agrees(own, key[0], shift)):
                T.atomic_add(counts[255 - T.cast((own >> shift) & T.uint32(255), "int32")], 1)
    running_sums(counts, scratch, DIGITS)
    for _ in T.Parallel(1):
        state[0] = DIGITS
    for j in T.Parallel(DIGITS):
        before = T.if_then_else(j > 0, counts[T.max(j - 1, 0)], 0)
        if T.And(counts[j] >= state[1], before < state[1]):
            state[0] = j
    for _ in T.Parallel(1):
        place = T.min(state[0], DIGITS - 1)
        before = T.if_then_else(place > 0, counts[T.max(place - 1, 0)], 0)
        if state[0] < DIGITS:
            state[1] = state[1] - before
            key[0] = key[0] | (T.cast(255 - place, "uint32") << shift)
        else:  # fewer than k candidates
            key[0] = T.uint32(1)
            state[1] = width


def agrees(own, key, shift):
    """Whether the digits above `shift` are the same."""
    return T.bool(True) if shift == 24 else ((own ^ key) >> (shift + 8)) == T.uint32(0)


@T.macro
def put_chosen(x, out, row, to, width, k, flags, scratch, state, key):
    """out[to, :k]: ascending positions of what `find_threshold` found in x[row, :width], then -1.

    flags and scratch int32 [TILE] are memory of the block's threads.
    """
    sure = T.alloc_var("int32", init=0)
    ties = T.alloc_var("int32", init=0)
    for j in T.Parallel(k):
        out[to, j] = -1
    for part in T.serial(T.ceildiv(width, TILE)):
        for j in T.Parallel(TILE):
            own = sort_key(value_at(x, row, part * TILE + j, width))
            flags[j] = T.if_then_else(own > key[0], 1, T.if_then_else(own == key[0], TIE, 0))
        running_sums(flags, scratch, TILE)
        for j in T.Parallel(TILE):
            before = T.if_then_else(j > 0, flags[T.max(j - 1, 0)], 0)
            is_sure = flags[j] % TIE - before % TIE
            is_tie = flags[j] // TIE - before // TIE
            ties_before = ties + before // TIE
            if is_sure + T.if_then_else(ties_before < state[1], is_tie, 0) > 0:
                out[to, sure + before % TIE + T.min(ties_before, state[1])] = part * TILE + j
        sure += flags[TILE - 1] % TIE
        ties += flags[TILE - 1] // TIE


@T.macro
def mask_tokens(logits, bitmask, out, row, word, first, block, vocab):
    """out[row, first + .]: logits, or -inf where bit t % 32 of bitmask[row, word + t // 32] is 0, `block` tokens."""
    for j in T.Parallel(block):
        if first + j < vocab:
            allowed = (bitmask[row, word + j // 32] >> (j % 32)) & 1
            out[row, first + j] = T.if_then_else(allowed != 0, logits[row, first + j], -T.infinity("float32"))
