"""Top-k positions of a row, and masks of tokens."""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import selection

THREADS = 256
BLOCK = 2048  # tokens of a block that masks


def top_k_positions_tl(width: int, k: int, dtype: str = "float32") -> Any:
    """`top_k_positions` of scores [n, width], one block a row."""
    n = T.dynamic("n")

    @T.prim_func
    def top_k_positions(scores: T.Tensor((n, width), dtype), out: T.Tensor((n, k), "int32")):
        with T.Kernel(n) as row:
            counts, scratch = T.alloc_shared((selection.DIGITS,), "int32"), T.alloc_shared((selection.TILE,), "int32")
            flags, state = T.alloc_shared((selection.TILE,), "int32"), T.alloc_shared((2,), "int32")
            key = T.alloc_shared((1,), "uint32")
            with T.SimtVF(threads=THREADS):
                selection.find_threshold(scores, row, width, k, counts, scratch, state, key)
                selection.put_chosen(scores, out, row, row, width, k, flags, scratch, state, key)

    return top_k_positions


def apply_token_bitmask_tl(vocab: int) -> Any:
    """`apply_token_bitmask` of logits float32 [n, vocab] by bitmask int32 [n, ceil(vocab / 32)]."""
    n, words = T.dynamic("n"), (vocab + 31) // 32
    parts = (vocab + BLOCK - 1) // BLOCK

    @T.prim_func
    def apply_token_bitmask(
        logits: T.Tensor((n, vocab), "float32"),
        bitmask: T.Tensor((n, words), "int32"),
        out: T.Tensor((n, vocab), "float32"),
    ):
        with T.Kernel(n * parts) as index:
            row, part = index // parts, index % parts
            with T.SimtVF(threads=THREADS):
                selection.mask_tokens(logits, bitmask, out, row, part * (BLOCK // 32), part * BLOCK, BLOCK, vocab)

    return apply_token_bitmask
