"""Speculative decoding: the draft-length scheduler, and the comparison of drafts with the target's tokens."""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import speculation

THREADS = 256
NUMBER = "float32"  # of chances and times: vector cores have no wider floats


def choose_draft_lengths_tl(most_rows: int, drafts: int, stops: bool) -> Any:
    """`choose_draft_lengths` of survival [n, drafts], room int64 [n] and step_ms [steps], one block."""
    n, steps = T.dynamic("n"), T.dynamic("steps")
    size = max(1 << (most_rows * drafts - 1).bit_length(), THREADS)

    @T.prim_func
    def choose_draft_lengths(
        survival: T.Tensor((n, drafts), NUMBER),
        room: T.Tensor((n,), "int64"),
        step_ms: T.Tensor((steps,), NUMBER),
        out: T.Tensor((n,), "int64"),
    ):
        with T.Kernel(1) as _:
            chance, place = T.alloc_shared((size,), NUMBER), T.alloc_shared((size,), "int32")
            tau, scratch = T.alloc_shared((size,), NUMBER), T.alloc_shared((size,), NUMBER)
            best = T.alloc_shared((1,), "int32")
            with T.SimtVF(threads=THREADS):
                speculation.choose_draft_lengths(
                    survival, room, step_ms, out, chance, place, tau, scratch, best, n, drafts, size, stops
                )  # fmt: skip

    return choose_draft_lengths


def verify_tokens_tl(drafts: int) -> Any:
    """`verify_tokens` of chosen [rows] and slots, first_rows, num_drafts [n], all int64; a thread a sequence."""
    n, rows, states = T.dynamic("n"), T.dynamic("rows"), T.dynamic("states")

    @T.prim_func
    def verify_tokens(
        chosen: T.Tensor((rows,), "int64"),
        slot_tokens: T.Tensor((states, 1 + drafts), "int64"),
        slot_lengths: T.Tensor((states,), "int64"),
        slots: T.Tensor((n,), "int64"),
        first_rows: T.Tensor((n,), "int64"),
        num_drafts: T.Tensor((n,), "int64"),
        tokens: T.Tensor((n, 1 + drafts), "int64"),
        accepted: T.Tensor((n,), "int64"),
    ):
        with T.Kernel(T.ceildiv(n, THREADS)) as block:
            with T.SimtVF(threads=THREADS):
                for i in T.Parallel(THREADS):
                    if block * THREADS + i < n:
                        speculation.verify_tokens(
                            chosen, slot_tokens, slot_lengths, slots, first_rows, num_drafts, tokens, accepted,
                            block * THREADS + i, drafts,
                        )  # fmt: skip

    return verify_tokens
