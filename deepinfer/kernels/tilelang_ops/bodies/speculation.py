"""Speculative decoding: how many drafts to verify, and which of them are what the target chose."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies.scan import running_sums


@T.macro
def choose_draft_lengths(
    survival, room, step_ms, out, chance, place, tau, scratch, best, rows, drafts, size, stops,
):  # fmt: skip
    """out[s]: drafts of each of `rows` sequences, most likely first, that raise the tokens a millisecond.

    chance, tau and scratch [size] like survival, place int32 [size] and best int32 [1] are memory of the block's
    threads; size: a power of two, at least rows * drafts. stops: at the first fall, for drafts that were drawn.
    """
    for j in T.Parallel(size):
        chance[j] = 0.0
        tau[j] = 0.0
        place[j] = 0
        if j < rows * drafts:
            given = survival[j // drafts, j % drafts]
            if T.And(j % drafts < room[j // drafts], given > 0.0):
                chance[j] = given
    for j in T.Parallel(size):
        for i in T.serial(rows * drafts):
            if T.Or(chance[i] > chance[j], T.And(chance[i] == chance[j], i < j)):
                place[j] += 1
    for j in T.Parallel(size):
        if chance[j] > 0.0:
            tau[place[j]] = chance[j]
    running_sums(tau, scratch, size)
    for j in T.Parallel(size):  # how many tokens a millisecond the first j + 1 drafts give
        scratch[j] = 0.0
        if T.And(j < rows * drafts, tau[j] > T.if_then_else(j > 0, tau[T.max(j - 1, 0)], 0.0)):
            scratch[j] = (rows + tau[j]) / step_ms[j + 1]
    for _ in T.Parallel(1):
        best[0] = 0
        top = T.alloc_var(chance.dtype, init=0.0)
        has_fallen = T.alloc_var("int32", init=0)
        top = rows / step_ms[0]
        for j in T.serial(rows * drafts):
            if T.And(scratch[j] > 0.0, has_fallen == 0):
                if T.Or(scratch[j] > top, T.And(stops, scratch[j] == top)):
                    top = scratch[j]
                    best[0] = j + 1
                elif stops:
                    has_fallen = 1
    for j in T.Parallel(size):
        if j < rows:
            out[j] = 0
            for i in T.serial(drafts):
                if T.And(chance[j * drafts + i] > 0.0, place[j * drafts + i] < best[0]):
                    out[j] += 1


@T.macro
def verify_tokens(chosen, slot_tokens, slot_lengths, slots, first_rows, num_drafts, tokens, accepted, s, most):
    """tokens[s, :most + 1] and accepted[s] of sequence s, whose latest token and length advance."""
    still = T.alloc_var("int64", init=1)
    count = T.alloc_var("int64", init=0)
    still = T.int64(1)
    count = T.int64(0)
    for j in T.serial(most + 1):
        own = chosen[first_rows[s] + T.min(T.int64(j), num_drafts[s])]
        tokens[s, j] = own
        if j < most:
            agrees = T.And(own == slot_tokens[slots[s], T.min(j + 1, most)], T.int64(j) < num_drafts[s])
            still = T.if_then_else(agrees, still, T.int64(0))
            count = count + still
    accepted[s] = count
    slot_tokens[slots[s], 0] = tokens[s, count]
    slot_lengths[slots[s]] = slot_lengths[slots[s]] + count + 1
