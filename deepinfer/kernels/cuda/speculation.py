"""Prompt lookup, the comparison of drafts with the target's tokens, and how many drafts to verify: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference import speculation  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend

BLOCK = 1024
MOST_DRAFTS = 4096  # of all sequences, that one program puts in order


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


@triton.jit
def _chances(survival, room, at, num_sequences, num_drafts, DRAFTS: tl.constexpr):
    """Chance of the draft at each place of a table of DRAFTS columns, 0 without one; its order among equal ones."""
    row, draft = at // DRAFTS, at % DRAFTS
    exists = (row < num_sequences) & (draft < num_drafts)
    index = row * num_drafts + draft
    chance = tl.load(survival + index, mask=exists, other=0.0)
    allowed = draft < tl.load(room + row, mask=exists, other=0)
    return tl.where(exists & allowed & (chance > 0), chance, 0.0), tl.where(exists, index, at + num_sequences * DRAFTS)


@triton.jit(do_not_specialize=["num_sequences"])
def _choose_lengths(
    survival, room, step_ms, scratch, lengths, num_sequences, num_drafts,
    FIRST_FALL: tl.constexpr, SEQUENCES: tl.constexpr, DRAFTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program. scratch: chances in their order, then how fast a step with so many drafts is expected to be."""
    SIZE: tl.constexpr = SEQUENCES * DRAFTS
    at = tl.arange(0, SIZE)
    chance, index = _chances(survival, room, at, num_sequences, num_drafts, DRAFTS)
    ahead = tl.zeros((SIZE,), tl.int32)
    for start in range(0, SIZE, CHUNK):
        other, other_index = _chances(survival, room, start + tl.arange(0, CHUNK), num_sequences, num_drafts, DRAFTS)
        is_equal = (other[None, :] == chance[:, None]) & (other_index[None, :] < index[:, None])
        ahead += tl.sum(((other[None, :] > chance[:, None]) | is_equal).to(tl.int32), axis=1)
    tl.store(scratch + ahead, chance)
    tl.debug_barrier()
    ordered = tl.load(scratch + at)
    is_draft = ordered > 0
    many = num_sequences.to(ordered.dtype)
    nothing = many / tl.load(step_ms)
    theta = (many + tl.cumsum(ordered, axis=0)) / tl.load(step_ms + 1 + at, mask=is_draft, other=1.0)
    theta = tl.where(is_draft, theta, -float("inf"))
    if FIRST_FALL:
        tl.store(scratch + SIZE + at, theta)
        tl.debug_barrier()
        before = tl.where(at == 0, nothing, tl.load(scratch + SIZE + at - 1, mask=at > 0, other=0.0))
        falls = is_draft & (theta < before)
        count = tl.minimum(tl.min(tl.where(falls, at, SIZE), axis=0), tl.sum(is_draft.to(tl.int32), axis=0))
    else:
        best = tl.max(theta, axis=0)
        first = tl.min(tl.where(theta == best, at + 1, SIZE), axis=0)
        count = tl.where(best > nothing, first, 0)
    admitted = ((ahead < count) & (chance > 0)).to(tl.int64)
    row = tl.arange(0, SEQUENCES)
    tl.store(lengths + row, tl.sum(tl.reshape(admitted, (SEQUENCES, DRAFTS)), axis=1), mask=row < num_sequences)


@backend("choose_draft_lengths", "cuda")
def choose_draft_lengths(survival: Tensor, room: Tensor, step_ms: Tensor, until_first_fall: bool) -> Tensor:
    num_sequences, num_drafts = survival.shape
    sequences, drafts = triton.next_power_of_2(max(num_sequences, 1)), triton.next_power_of_2(max(num_drafts, 1))
    if sequences * drafts > MOST_DRAFTS or survival.dtype not in (torch.float32, torch.float64) or not num_drafts:
        return NotImplemented
    lengths = torch.empty(num_sequences, dtype=torch.int64, device=survival.device)
    if num_sequences:
        scratch = torch.empty(2 * sequences * drafts, dtype=survival.dtype, device=survival.device)
        _choose_lengths[(1,)](
            survival.contiguous(), room.contiguous(), step_ms.contiguous(), scratch, lengths, num_sequences, num_drafts,
            FIRST_FALL=until_first_fall, SEQUENCES=sequences, DRAFTS=drafts, CHUNK=min(sequences * drafts, 16),
            num_warps=8,
        )  # fmt: skip
    return lengths
