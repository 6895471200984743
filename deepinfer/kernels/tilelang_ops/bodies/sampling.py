"""Drawing a token of a row: temperature, top-k, top-p, min-p, without a sort (kernels/reference/sampling.py)."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies.scan import running_sums
from deepinfer.kernels.tilelang_ops.bodies.selection import TILE, find_threshold, sort_key, value_at

BLOCK = 256  # tokens whose weights are added up first; as many as threads, so that all of them meet at every barrier
BLOCKS = TILE // BLOCK
GOLDEN = 0x9E3779B97F4A7C15
TINY = 2.0**-126
LAST = 2147483647


@T.macro
def mix64(x):
    """splitmix64 of a uint64."""
    a = x + T.uint64(GOLDEN)
    b = (a ^ (a >> T.uint64(30))) * T.uint64(0xBF58476D1CE4E5B9)
    c = (b ^ (b >> T.uint64(27))) * T.uint64(0x94D049BB133111EB)
    return c ^ (c >> T.uint64(31))


def uniform(seed, counter, number):
    """In [0, 1), a function of two uint64."""
    bits = mix64(mix64(seed) + counter * T.uint64(GOLDEN)) >> T.uint64(24)
    return T.cast(T.cast(bits, "int64"), number) * T.cast(2.0**-40, number)


@T.macro
def find_largest(logits, row, width, largest, token):
    """largest[0], NaN if the row has one, and token[0], the first of the largest; memory of the block's threads."""
    best = T.alloc_fragment((1, TILE), "float32")
    best_at = T.alloc_fragment((1, TILE), "int32")
    broken = T.alloc_fragment((1, TILE), "int32")
    top = T.alloc_fragment((1,), "float32")
    first = T.alloc_fragment((1,), "int32")
    is_broken = T.alloc_fragment((1,), "int32")
    for i, j in T.Parallel(1, TILE):
        best[i, j] = -T.infinity("float32")
        best_at[i, j] = j
        broken[i, j] = 0
    for part in T.serial(T.ceildiv(width, TILE)):
        for i, j in T.Parallel(1, TILE):
            value = value_at(logits, row, part * TILE + j, width)
            best_at[i, j] = T.if_then_else(value > best[i, j], part * TILE + j, best_at[i, j])
            best[i, j] = T.if_then_else(value > best[i, j], value, best[i, j])
            broken[i, j] = T.if_then_else(formats.is_nan(value), 1, broken[i, j])
    T.reduce_max(best, top, dim=1)
    T.reduce_max(broken, is_broken, dim=1)
    for i, j in T.Parallel(1, TILE):
        best_at[i, j] = T.if_then_else(best[i, j] == top[i], best_at[i, j], LAST)
    T.reduce_min(best_at, first, dim=1)
    for i in T.Parallel(1):
        largest[i] = T.if_then_else(is_broken[i] != 0, T.reinterpret(T.uint32(0x7FC00000), "float32"), top[i])
        token[i] = T.min(first[i], width - 1)


@T.macro
def find_candidates(logits, row, width, count, counts, flags, scratch, state, key):
    """key[0] and state[0]: what `weight_of` asks about the `count` largest of logits[row, :width].

    Values above key[0] are candidates, and those equal to it up to position state[0].
    """
    ties = T.alloc_var("int32", init=0)
    wanted = T.alloc_var("int32", init=0)
    find_threshold(logits, row, width, count, counts, scratch, state, key)
    wanted = state[1]
    for _ in T.Parallel(1):
        state[0] = width
    for part in T.serial(T.ceildiv(width, TILE)):
        for j in T.Parallel(TILE):
            own = sort_key(value_at(logits, row, part * TILE + j, width))
            flags[j] = T.cast(T.And(own == key[0], own != T.uint32(0)), "int32")
        running_sums(flags, scratch, TILE)
        for j in T.Parallel(TILE):
            before = T.if_then_else(j > 0, flags[T.max(j - 1, 0)], 0)
            if T.And(ties + flags[j] == wanted, ties + before < wanted):
                state[0] = part * TILE + j
        ties += flags[TILE - 1]


@T.macro
def weight_of(logits, row, at, width, largest, heat, key, last):
    """exp((logit - largest) / heat) of a token that may be drawn, else 0; `last` as `find_last_tie` gives it."""
    value = value_at(logits, row, at, width)
    own = sort_key(value)
    weight = T.exp((value - largest) / heat)
    may = T.Or(own > key, T.And(own == key, at <= last))
    return T.if_then_else(may, weight, 0.0)


@T.macro
def add_up(logits, row, width, largest, heat, key, last, least, above, sums, scratch, total, padded, number):
    """sums[block]: running sums of the blocks' weights that are at least `least` and above `above`; total[0]: of all
    weights. sums and scratch [padded] and total [1] of type `number` are memory of the block's threads."""
    weight = T.alloc_fragment((BLOCKS, BLOCK), "float32")
    block = T.alloc_fragment((BLOCKS,), "float32")
    for _ in T.Parallel(1):
        total[0] = T.cast(0.0, number)
    for j in T.Parallel(padded):
        sums[j] = T.cast(0.0, number)
    for part in T.serial(T.ceildiv(width, TILE)):
        for b, j in T.Parallel(BLOCKS, BLOCK):
            weight[b, j] = weight_of(
                logits, row, part * TILE + b * BLOCK + j, width, largest, heat, key, last
            )  # fmt: skip
        T.reduce_sum(weight, block, dim=1)
        for b in T.Parallel(BLOCKS):
            scratch[b] = T.cast(block[b], number)
        for _ in T.Parallel(1):
            for b in T.serial(BLOCKS):
                total[0] = total[0] + scratch[b]
        for b, j in T.Parallel(BLOCKS, BLOCK):
            is_in = T.And(weight[b, j] >= least, weight[b, j] > above)
            weight[b, j] = T.if_then_else(is_in, weight[b, j], 0.0)
        T.reduce_sum(weight, block, dim=1)
        for b in T.Parallel(BLOCKS):
            sums[part * BLOCKS + b] = T.cast(block[b], number)
    running_sums(sums, scratch, padded)


@T.macro
def first_above(ends, size, target, found):
    """found[0]: the first place whose running sum is above `target`, or the last that adds something to it."""
    for _ in T.Parallel(1):
        found[0] = 0
    for j in T.Parallel(size):
        before = T.if_then_else(j > 0, ends[T.max(j - 1, 0)], T.cast(0, ends.dtype))
        beyond = T.if_then_else(ends[size - 1] > target, T.And(ends[j] > target, before <= target), False)
        last = T.And(T.And(ends[size - 1] <= target, ends[j] >= ends[size - 1]), before < ends[size - 1])
        if T.Or(beyond, last):
            found[0] = j


@T.macro
def draw(
    logits, row, width, is_drawn, heat, share, least, seed, counter, key, last, token, largest,
    sums, scratch, inside, found, total, drawn, padded, number,
):  # fmt: skip
    """token[0] is drawn among the candidates of logits[row, :width], if is_drawn; largest[0] from `find_largest`,
    key and last from `find_candidates`; the rest is memory of the block's threads."""
    pending = T.alloc_var("int32", init=0)
    attempt = T.alloc_var("uint64", init=0)
    above = T.alloc_var("float32", init=-1.0)
    allowed = T.alloc_var(number, init=0.0)
    target = T.alloc_var(number, init=0.0)
    weight_above = T.alloc_var(number, init=0.0)
    block = T.alloc_var("int32", init=0)
    pending = T.cast(is_drawn, "int32")
    attempt = counter
    above = -1.0
    allowed = T.cast(-1.0, number)
    while pending > 0:
        add_up(logits, row, width, largest[0], heat, key, last, least, above, sums, scratch, total, padded, number)
        weight_above = sums[padded - 1]
        # A token that was drawn stays if too little weight is above it; else the next draw is among what is.
        pending = T.cast(T.And(weight_above >= allowed, weight_above > T.cast(0.0, number)), "int32")
        target = uniform(seed, attempt, number) * weight_above
        first_above(sums, padded, target, found)
        block = found[0]
        target = target - T.if_then_else(block > 0, sums[T.max(block - 1, 0)], T.cast(0.0, number))
        for j in T.Parallel(BLOCK):
            weight = weight_of(logits, row, block * BLOCK + j, width, largest[0], heat, key, last)
            drawn[j] = T.if_then_else(T.And(weight >= least, weight > above), weight, 0.0)
            inside[j] = T.cast(drawn[j], number)
        running_sums(inside, scratch, BLOCK)
        first_above(inside, BLOCK, target, found)  # stays inside, though the block's sum was rounded otherwise
        for _ in T.Parallel(1):
            if pending > 0:
                token[0] = block * BLOCK + found[0]
        above = drawn[found[0]]
        allowed = share * total[0]
        attempt = attempt + T.uint64(1 << 40)
        pending = T.if_then_else(share < T.cast(1.0, number), pending, 0)
