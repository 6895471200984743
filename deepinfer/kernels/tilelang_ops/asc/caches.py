"""Addresses in paged caches, rows out of them, masks of tokens, and the post-mix of residual streams."""

from typing import Any

import tilelang.ascend.language as T

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
        with T.Kernel(n) as row:
            wanted = T.alloc_shared((1, k), "int32")
            table = T.alloc_shared((1, max_blocks), "int32")
            T.copy(positions[row, 0], wanted)
            T.copy(tables[sequence_of_row[row], 0], table)
            with T.SimtVF(threads=THREADS):
                for i, j in T.Parallel(1, k):
                    at = T.max(wanted[i, j], 0)
                    slot = table[i, at // entries] * entries + at % entries
                    wanted[i, j] = T.if_then_else(wanted[i, j] >= 0, slot, NONE)
            T.copy(wanted, slots[row, 0])

    return entry_slots


def window_slots_tl(window: int, ring: int) -> Any:
    """Slots int32 [n, window] of the last `window` tokens up to positions int32 [n] in rings of the state slots
    int32 [n] (as `decode_plan` has them); -1 before the first token."""
    n = T.dynamic("n")

    @T.prim_func
    def window_slots(
        positions: T.Tensor((n,), "int32"), states: T.Tensor((n,), "int32"), slots: T.Tensor((n, window), "int32")
    ):
        with T.Kernel(n) as row:
            found = T.alloc_shared((1, window), "int32")
            last, base = positions[row], states[row] * ring
            with T.SimtVF(threads=THREADS):
                for i, j in T.Parallel(1, window):
                    at = last - (window - 1) + j
                    found[i, j] = T.if_then_else(at >= 0, base + T.max(at, 0) % ring, NONE)
            T.copy(found, slots[row, 0])

    return window_slots


def load_rows_tl(dim: int, dtype: str = "bfloat16") -> Any:
    """`load_rows` of a cache of plain values [all slots, dim]: rows slots int32 [n], slot 0 for -1."""
    n, size = T.dynamic("n"), T.dynamic("size")

    @T.prim_func
    def load_rows(cache: T.Tensor((size, dim), dtype), slots: T.Tensor((n,), "int32"), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n) as row:
            value = T.alloc_shared((1, dim), dtype)
            T.copy(cache[T.max(slots[row], 0), 0], value)
            T.copy(value, out[row, 0])

    return load_rows


def apply_token_bitmask_tl(vocab: int) -> Any:
    """`apply_token_bitmask` of logits float32 [n, vocab] by bitmask int32 [n, ceil(vocab / 32)], 32 words a block."""
    n, words, block = T.dynamic("n"), (vocab + 31) // 32, 1024
    parts = (vocab + block - 1) // block

    @T.prim_func
    def apply_token_bitmask(
        logits: T.Tensor((n, vocab), "float32"),
        bitmask: T.Tensor((n, words), "int32"),
        out: T.Tensor((n, vocab), "float32"),
    ):
        with T.Kernel(n * parts) as index:
            row, part = index // parts, index % parts
            value = T.alloc_shared((1, block), "float32")
            mask = T.alloc_shared((1, block // 32), "int32")
            T.copy(logits[row, part * block], value)
            T.copy(bitmask[row, part * (block // 32)], mask)
            with T.SimtVF(threads=THREADS):
                for i, j in T.Parallel(1, block):
                    allowed = (mask[i, j // 32] >> (j % 32)) & 1
                    value[i, j] = T.if_then_else(allowed != 0, value[i, j], -T.infinity("float32"))
            T.copy(value, out[row, part * block])

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
        with T.Kernel(n) as row:
            streams = T.alloc_shared((1, hc, dim), dtype)
            output = T.alloc_shared((1, dim), dtype)
            result = T.alloc_shared((1, hc, dim), dtype)
            posts = T.alloc_shared((1, hc), "float32")
            shares = T.alloc_shared((1, hc, hc), "float32")
            T.copy(h[row, 0, 0], streams)
            T.copy(y[row, 0], output)
            T.copy(post[row, 0], posts)
            T.copy(comb[row, 0, 0], shares)
            with T.SimtVF(threads=THREADS):
                value = T.alloc_fragment((hc, dim), "float32")
                for j, d in T.Parallel(hc, dim):
                    value[j, d] = posts[0, j] * T.cast(output[0, d], "float32")
                    for i in T.serial(hc):
                        value[j, d] += shares[0, i, j] * T.cast(streams[0, i, d], "float32")
                for j, d in T.Parallel(hc, dim):
                    result[0, j, d] = value[j, d]
            T.copy(result, out[row, 0, 0])

    return hc_post
