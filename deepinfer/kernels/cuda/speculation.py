"""Prompt lookup, and the comparison of drafts with the target's tokens: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference import speculation  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend

BLOCK = 1024


@triton.jit(do_not_specialize=["longest"])  # one kernel for every length of text
def _lookup(
    history, slots, lengths, drafts, matches, stride, longest, num_drafts, min_match,
    MAX_MATCH: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    text = history + slot * stride
    last = tl.load(lengths + slot) - 1
    # The best place so far as match length * 2**32 + place: the longest match, then the latest.
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, longest, BLOCK):
        at = start + tl.arange(0, BLOCK)
        agrees = at < last
        length = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(MAX_MATCH):
            inside = agrees & (at >= back)
            tail = tl.load(text + last - back, mask=last >= back, other=-1)
            agrees = inside & (tl.load(text + at - back, mask=inside, other=-2) == tail)
            length += agrees.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, length * 4294967296 + at, 0))
    top = tl.max(best, axis=0)
    match, place = top // 4294967296, top % 4294967296
    found = match >= min_match
    ahead = tl.arange(0, DRAFTS)
    period = tl.maximum(last - place, 1)
    token = tl.load(text + place + 1 + ahead % period, mask=found & (ahead < num_drafts), other=-1)
    tl.store(drafts + row * num_drafts + ahead, token.to(tl.int64), mask=ahead < num_drafts)
    tl.store(matches + row, tl.where(found, match, 0))


@backend("lookup_drafts", "cuda")
def lookup_drafts(
    history: Tensor, slots: Tensor, slot_lengths: Tensor, longest: int, num_drafts: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor]:
    if history.dtype is not torch.int32 or history.stride(1) != 1:
        return NotImplemented
    drafts = torch.empty(len(slots), num_drafts, dtype=torch.int64, device=history.device)
    matches = torch.empty(len(slots), dtype=torch.int64, device=history.device)
    if len(slots):
        _lookup[(len(slots),)](
            history, slots.contiguous(), slot_lengths.contiguous(), drafts, matches, history.stride(0), longest,
            num_drafts, min_match, MAX_MATCH=max_match, DRAFTS=triton.next_power_of_2(num_drafts),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return drafts, matches


@triton.jit
def _verify(
    chosen, slot_tokens, slot_lengths, slots, firsts, counts, tokens, accepted, columns, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, first, count = tl.load(slots + row), tl.load(firsts + row), tl.load(counts + row)
    at = tl.arange(0, COLUMNS)
    inside = at < columns
    token = tl.load(chosen + first + tl.minimum(at, count), mask=inside, other=0)
    draft = tl.load(slot_tokens + slot * columns + 1 + at, mask=at < columns - 1, other=-1)
    agrees = (token == draft) & (at < count)
    # The first that does not agree; column `count` never does.
    kept = tl.min(tl.where(agrees, COLUMNS, at), axis=0).to(tl.int64)
    tl.store(tokens + row * columns + at, token, mask=inside)
    tl.store(accepted + row, kept)
    tl.store(slot_tokens + slot * columns, tl.sum(tl.where(at == kept, token, 0), axis=0))
    tl.store(slot_lengths + slot, tl.load(slot_lengths + slot) + kept + 1)


@backend("verify_tokens", "cuda")
def verify_tokens(
    chosen: Tensor, slot_tokens: Tensor, slot_lengths: Tensor, slots: Tensor, first_rows: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    if not (slot_tokens.is_contiguous() and slot_lengths.is_contiguous()):
        return NotImplemented
    count, columns = len(slots), slot_tokens.shape[1]
    tokens = torch.empty(count, columns, dtype=torch.int64, device=chosen.device)
    accepted = torch.empty(count, dtype=torch.int64, device=chosen.device)
    if count:
        _verify[(count,)](
            chosen.contiguous(), slot_tokens, slot_lengths, slots.contiguous(), first_rows.contiguous(),
            num_drafts.contiguous(), tokens, accepted, columns, COLUMNS=triton.next_power_of_2(columns), num_warps=1,
        )  # fmt: skip
    return tokens, accepted
