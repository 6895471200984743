"""The fused sampler, one block a row: what top-k leaves, then temperature, top-p, min-p and the draw in one launch."""

from typing import Any

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies import sampling

THREADS = 256
NUMBER = "float64"  # of sums of weights


def find_candidates_tl(vocab: int) -> Any:
    """What num_candidates int64 [n] leaves of logits float32 [n, vocab]: values above key uint32 [n] in their order,
    and those equal to it up to position last int32 [n]."""
    n = T.dynamic("n")

    @T.prim_func
    def find_candidates(
        logits: T.Tensor((n, vocab), "float32"),
        num_candidates: T.Tensor((n,), "int64"),
        key: T.Tensor((n,), "uint32"),
        last: T.Tensor((n,), "int32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            counts, flags = T.alloc_shared((256,), "int32"), T.alloc_shared((sampling.TILE,), "int32")
            scratch, state = T.alloc_shared((sampling.TILE,), "int32"), T.alloc_shared((2,), "int32")
            found = T.alloc_shared((1,), "uint32")
            count = T.cast(num_candidates[row], "int32")
            sampling.find_candidates(logits, row, vocab, count, counts, flags, scratch, state, found)
            for _ in T.Parallel(1):
                key[row] = T.if_then_else(count < vocab, found[0], T.uint32(0))
                last[row] = state[0]

    return find_candidates


def draw_tokens_tl(vocab: int) -> Any:
    """`draw_tokens` of logits float32 [n, vocab], all other inputs [n]: key and last from `find_candidates`."""
    n, padded = T.dynamic("n"), 1 << (-(-vocab // sampling.TILE) * sampling.BLOCKS - 1).bit_length()
    padded = max(padded, THREADS)

    @T.prim_func
    def draw_tokens(
        logits: T.Tensor((n, vocab), "float32"),
        temperature: T.Tensor((n,), NUMBER),
        key: T.Tensor((n,), "uint32"),
        last: T.Tensor((n,), "int32"),
        top_p: T.Tensor((n,), NUMBER),
        min_p: T.Tensor((n,), NUMBER),
        seeds: T.Tensor((n,), "int64"),
        counters: T.Tensor((n,), "int64"),
        tokens: T.Tensor((n,), "int64"),
        largest: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            sums, scratch = T.alloc_shared((padded,), NUMBER), T.alloc_shared((padded,), NUMBER)
            inside, total = T.alloc_shared((sampling.BLOCK,), NUMBER), T.alloc_shared((1,), NUMBER)
            drawn, best = T.alloc_shared((sampling.BLOCK,), "float32"), T.alloc_shared((1,), "float32")
            token, found = T.alloc_shared((1,), "int32"), T.alloc_shared((1,), "int32")
            sampling.find_largest(logits, row, vocab, best, token)
            is_drawn = T.And(temperature[row] > T.cast(0.0, NUMBER), T.abs(best[0]) < T.infinity("float32"))
            sampling.draw(
                logits, row, vocab, is_drawn,
                T.cast(T.max(temperature[row], T.cast(sampling.TINY, NUMBER)), "float32"), top_p[row],
                T.cast(min_p[row], "float32"), T.cast(seeds[row], "uint64"), T.cast(counters[row], "uint64"), key[row],
                last[row], token, best, sums, scratch, inside, found, total, drawn, padded, NUMBER,
            )  # fmt: skip
            for _ in T.Parallel(1):
                tokens[row] = T.cast(token[0], "int64")
                largest[row] = best[0]

    return draw_tokens
