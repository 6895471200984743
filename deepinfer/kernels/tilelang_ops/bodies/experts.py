"""Mixture of experts around the products: gate, order of the pairs by expert, expansion and weighted sum."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies.rows import wide
from deepinfer.kernels.tilelang_ops.bodies.scan import running_sums

LAST = 2147483647


def sqrt_softplus(x):
    return T.sqrt(T.if_then_else(x > 20.0, x, T.log1p(T.exp(x))))


@T.macro
def moe_gate(logits, bias, chosen, gates, picked, row, bias_row, experts, width, k, normalise, scaling):
    """chosen[row, :k] and gates[row, :k] of logits[row, :experts]; `width`: experts, up to a multiple of 32.

    `picked` float32 [k] is memory of the block's threads. Ties go to the lowest expert.
    """
    score = T.alloc_fragment((1, width), "float32")
    ranked = T.alloc_fragment((1, width), "float32")
    where_best = T.alloc_fragment((1, width), "int32")
    gate_there = T.alloc_fragment((1, width), "float32")
    best = T.alloc_fragment((1,), "float32")
    at = T.alloc_fragment((1,), "int32")
    gate = T.alloc_fragment((1,), "float32")
    for i, e in T.Parallel(1, width):
        score[i, e] = 0.0
        ranked[i, e] = -T.infinity("float32")
        if e < experts:
            score[i, e] = sqrt_softplus(logits[row, e])
            ranked[i, e] = score[i, e] + bias[bias_row, e]
    for j in T.serial(k):
        T.reduce_max(ranked, best, dim=1)
        for i, e in T.Parallel(1, width):
            where_best[i, e] = T.if_then_else(ranked[i, e] == best[i], e, LAST)
        T.reduce_min(where_best, at, dim=1)
        for i, e in T.Parallel(1, width):
            gate_there[i, e] = T.if_then_else(e == at[i], score[i, e], 0.0)
            ranked[i, e] = T.if_then_else(e == at[i], -T.infinity("float32"), ranked[i, e])
        T.reduce_sum(gate_there, gate, dim=1)
        for i in T.Parallel(1):
            chosen[row, j] = at[i]
            picked[j] = gate[i]
    for j in T.Parallel(k):
        gates[row, j] = picked[j] * scaling / (gate_total(picked, k) if normalise else 1.0)


def gate_total(picked, k):
    total = picked[0]
    for j in range(1, k):
        total = total + picked[j]
    return total + 1e-20


def expert_at(chosen, pair, pairs):
    return T.if_then_else(pair < pairs, chosen[T.min(pair, pairs - 1)], LAST)


@T.macro
def place_pairs(chosen, counts, order, places, flags, scratch, expert, pairs, tile):
    """The pairs of one expert, in their order: counts[expert], order[place] = pair and places[pair] = place.

    chosen [pairs]: the expert of each pair; `flags` and `scratch` int32 [tile] are memory of the block's threads.
    """
    earlier = T.alloc_fragment((1, tile), "int32")
    own = T.alloc_fragment((1, tile), "int32")
    sums = T.alloc_fragment((1,), "int32")
    start = T.alloc_var("int32", init=0)
    count = T.alloc_var("int32", init=0)
    for part in T.serial(T.ceildiv(pairs, tile)):
        for i, j in T.Parallel(1, tile):
            owner = expert_at(chosen, part * tile + j, pairs)
            earlier[i, j] = T.cast(owner < expert, "int32")
            own[i, j] = T.cast(owner == expert, "int32")
        T.reduce_sum(earlier, sums, dim=1)
        start += sums[0]
        T.reduce_sum(own, sums, dim=1)
        count += sums[0]
    for _ in T.Parallel(1):
        counts[expert] = count
    for part in T.serial(T.ceildiv(pairs, tile)):
        for j in T.Parallel(tile):
            flags[j] = T.cast(expert_at(chosen, part * tile + j, pairs) == expert, "int32")
        running_sums(flags, scratch, tile)
        for j in T.Parallel(tile):
            if expert_at(chosen, part * tile + j, pairs) == expert:
                order[start + flags[j] - 1] = part * tile + j
                places[part * tile + j] = start + flags[j] - 1
        start += flags[tile - 1]


@T.macro
def expand_row(x, source, out, row, dim):
    for j in T.Parallel(dim):
        out[row, j] = x[source, j]


@T.macro
def reduce_row(z, places, gates, out, row, to, dim, k):
    """out[to, :] = sum of gates[row, i] * z[places[row, i], :], in order of i."""
    total = T.alloc_fragment((dim,), "float32")
    for j in T.Parallel(dim):
        total[j] = gates[row, 0] * wide(z[places[row, 0], j])
        for i in T.serial(1, k):
            total[j] += gates[row, i] * wide(z[places[row, i], j])
    for j in T.Parallel(dim):
        out[to, j] = total[j]
