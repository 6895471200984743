"""Addresses in paged caches, rows out of them, and masks of tokens."""

from typing import Any

import tilelang.language as T

THREADS = 128
NONE = -1


def entry_slots_tl(k: int, max_blocks: int, entries: int) -> Any:
    """`entry_slots` of positions int32 [n, k] by the block tables int32 [sequences, max_blocks]; -1 stays -1."""
    n, sequences = T.dynamic("n"), T.dynamic("sequences")

    @T.prim_func
    def entry_slots(
        positions: T.Tensor((n, k), "int32"),
        tables: T.Tensor((sequences, max_blocks), "int32"),
        sequence_of_row: T.Tensor((n,), "int32"),
        slots: T.Tensor((n, k), "int32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            for j in T.Parallel(k):
                at = T.max(positions[row, j], 0)
                slot = tables[sequence_of_row[row], at // entries] * entries + at % entries
                slots[row, j] = T.if_then_else(positions[row, j] >= 0, slot, NONE)

    return entry_slots


def window_slots_tl(window: int, ring: int) -> Any:
    """Slots int32 [n, window] of the last `window` tokens up to positions int32 [n] in rings of the state slots
    int32 [n] (as `decode_plan` has them); -1 before the first token."""
    n = T.dynamic("n")

    @T.prim_func
    def window_slots(
        positions: T.Tensor((n,), "int32"), states: T.Tensor((n,), "int32"), slots: T.Tensor((n, window), "int32")
    ):
        with T.Kernel(n, threads=THREADS) as row:
            for j in T.Parallel(window):
                at = positions[row] - (window - 1) + j
                slots[row, j] = T.if_then_else(at >= 0, states[row] * ring + T.max(at, 0) % ring, NONE)

    return window_slots


def load_rows_tl(dim: int, dtype: str = "bfloat16") -> Any:
    """`load_rows` of a cache of plain values [all slots, dim]: rows slots int32 [n], slot 0 for -1."""
    n, size = T.dynamic("n"), T.dynamic("size")

    @T.prim_func
    def load_rows(cache: T.Tensor((size, dim), dtype), slots: T.Tensor((n,), "int32"), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n, threads=THREADS) as row:
            for j in T.Parallel(dim):
                out[row, j] = cache[T.max(slots[row], 0), j]

    return load_rows


def apply_token_bitmask_tl(vocab: int) -> Any:
    """`apply_token_bitmask` of logits float32 [n, vocab] by bitmask int32 [n, ceil(vocab / 32)]."""
    n, words, block = T.dynamic("n"), (vocab + 31) // 32, 2048

    @T.prim_func
    def apply_token_bitmask(
        logits: T.Tensor((n, vocab), "float32"),
        bitmask: T.Tensor((n, words), "int32"),
        out: T.Tensor((n, vocab), "float32"),
    ):
        with T.Kernel(n, T.ceildiv(vocab, block), threads=THREADS) as (row, part):
            for j in T.Parallel(block):
                at = part * block + j
                if at < vocab:
                    allowed = (bitmask[row, at // 32] >> (at % 32)) & 1
                    out[row, at] = T.if_then_else(allowed != 0, logits[row, at], -T.infinity("float32"))

    return apply_token_bitmask


def hc_post_tl(dim: int, hc: int = 4, dtype: str = "bfloat16") -> Any:
    """`hc_post` of h [n, hc, dim], y [n, dim], post [n, hc], comb [n, hc, hc], one block a row."""
    n = T.dynamic("n")

    @T.prim_func
    def hc_post(
        h: T.Tensor((n, hc, dim), dtype),
        y: T.Tensor((n, dim), dtype),
        post: T.Tensor((n, hc), "float32"),
        comb: T.Tensor((n, hc, hc), "float32"),
        out: T.Tensor((n, hc, dim), dtype),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            value = T.alloc_fragment((hc, dim), "float32")
            for j, d in T.Parallel(hc, dim):
                value[j, d] = post[row, j] * T.cast(y[row, d], "float32")
                for i in T.serial(hc):
                    value[j, d] += comb[row, i, j] * T.cast(h[row, i, d], "float32")
            for j, d in T.Parallel(hc, dim):
                out[row, j, d] = value[j, d]

    return hc_post
