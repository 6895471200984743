"""The indexer's logits beside DeepGEMM's: FP8 keys in ranges and pages, and the MXFP4 keys of the engine's cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from deepinfer.bench.cuda_timing import copy_bandwidth, time_us
from deepinfer.bench.gemm_baselines import E4M3, baseline_us, import_deep_gemm, random_fp8, record
from deepinfer.bench.results import Record
from deepinfer.kernels.deep_gemm.indexer import index_scores
from deepinfer.kernels.deep_gemm.mqa_logits import FP4_ROW, PAGE, PAGE_BYTES, mqa_logits, paged_mqa_logits
from deepinfer.kernels.reference.quant import mxfp4_round_trip

HEADS, INDEX_DIM = 32, 128


def logits(context: int = 32768) -> Iterator[Record]:
    """32 heads of 128: prefill of 4,096 tokens at the end of 32K keys, and decode of 64 sequences of 32K keys."""
    deep_gemm = import_deep_gemm()
    tokens = 4096
    q = torch.randn(tokens, HEADS, INDEX_DIM, device="cuda").to(E4M3)
    keys, key_scales = random_fp8(context, INDEX_DIM), torch.rand(context, device="cuda")
    weights = torch.randn(tokens, HEADS, device="cuda")
    ends = torch.arange(context - tokens + 1, context + 1, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(ends)
    flops = 2.0 * float(ends.sum()) * HEADS * INDEX_DIM / 1e6
    for clean in (True, False):
        us = time_us([partial(mqa_logits, q, keys, key_scales, weights, starts, ends, clean)])
        theirs = None
        if deep_gemm is not None:
            theirs = baseline_us(
                [partial(deep_gemm.fp8_mqa_logits, q, (keys, key_scales), weights, starts, ends, clean)]
            )
        name = f"indexer logits, prefill {tokens} x {context}, " + ("-inf elsewhere" if clean else "seen keys only")
        yield record(name, "TFLOP/s", flops / us, ("DeepGEMM", theirs and flops / theirs), 0.9)

    sequences, bandwidth = 64, copy_bandwidth()
    pages = torch.randint(0, 100, (sequences * context // PAGE, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    pages[:, PAGE * INDEX_DIM :] = torch.rand(pages.shape[0], PAGE, device="cuda").view(torch.uint8)
    table = torch.randperm(pages.shape[0], device="cuda").view(sequences, -1).int().contiguous()
    for queries in (1, 2, 6):
        q = torch.randn(sequences, queries, HEADS, INDEX_DIM, device="cuda").to(E4M3)
        weights = torch.randn(sequences * queries, HEADS, device="cuda")
        visible = torch.full((sequences * queries,), context, dtype=torch.int32, device="cuda")
        us = time_us([partial(paged_mqa_logits, q, pages, weights, visible, table, context)])
        moved = pages.numel() + sequences * queries * context * 4
        theirs = None
        if deep_gemm is not None and queries <= 2:
            lengths = visible.view(sequences, queries)
            plan = deep_gemm.get_paged_mqa_logits_metadata(
                lengths, PAGE, torch.cuda.get_device_properties(0).multi_processor_count
            )
            cache = pages.view(-1, PAGE, 1, INDEX_DIM + 4)
            call = deep_gemm.fp8_paged_mqa_logits
            theirs = baseline_us([partial(call, q, cache, weights, lengths, table, plan, context, False)])
        name = f"indexer logits, paged decode {sequences} x {context}, {queries} token(s) a sequence"
        yield record(name, "calls/s", 1e6 / us, ("DeepGEMM", theirs and 1e6 / theirs), 0.9)
        baseline = ("copy, bytes read and written", bandwidth / 1e12)
        yield record(f"{name}, bandwidth", "TB/s", moved / us / 1e6, baseline, None)
    yield from fp4_logits(sequences, context)


def fp4_logits(sequences: int, context: int) -> Iterator[Record]:
    """The same scores of keys as the engine's cache holds them: 64 bytes of E2M1 pairs and four scales a key."""
    page, bandwidth = 128, copy_bandwidth()
    cache = torch.randint(0, 256, (sequences * context // page, page, FP4_ROW), dtype=torch.uint8, device="cuda")
    cache[..., 64:] = torch.randint(118, 128, (*cache.shape[:2], 4), dtype=torch.uint8, device="cuda")
    table = torch.randperm(len(cache), device="cuda").view(sequences, -1).int().contiguous()
    for rows, of in ((sequences, sequences), (4096, 1)):
        iq = mxfp4_round_trip(torch.randn(rows, HEADS, INDEX_DIM, device="cuda")).bfloat16()
        weights = torch.randn(rows, HEADS, device="cuda").bfloat16()
        owner = torch.arange(rows, dtype=torch.int32, device="cuda") * of // rows
        first = context if of > 1 else context - rows + 1
        visible = torch.arange(first, first + rows, dtype=torch.int32, device="cuda").clamp_max(context)
        us = time_us([partial(index_scores, iq, weights, cache, table[:of], owner, visible)])
        if of > 1:
            moved = cache.numel() + rows * context * 4
            name = f"indexer scores over MXFP4 keys, paged decode {rows} x {context}, bandwidth"
            baseline = ("copy, bytes read and written", bandwidth / 1e12)
            yield record(name, "TB/s", moved / us / 1e6, baseline, None)
        else:
            flops = 2.0 * float(visible.sum()) * HEADS * INDEX_DIM / 1e6
            name = f"indexer scores over MXFP4 keys, prefill {rows} x {context}"
            yield record(name, "TFLOP/s", flops / us, ("", None), None)
