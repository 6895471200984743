"""Speculative decoding: looking drafts up in a sequence's own text, and comparing drafts with the target's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation

NO_DRAFT = -1  # in place of a token: there is no draft, which agrees with nothing


@operation
def verify_tokens(
    chosen: Tensor, slot_tokens: Tensor, slot_lengths: Tensor, slots: Tensor, first_rows: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Which drafts are what the target itself chose, and so how far each of S sequences has come.

    chosen int64 [R]: the target's token after each row; sequence i has the rows from first_rows[i] on, one and then
    one for each of its num_drafts[i] <= K drafts; slots, first_rows and num_drafts int64 [S]. By state slot and
    changed in place: slot_tokens int64 [slots, 1 + K], the latest token and the drafts after it, of which the latest
    becomes new; slot_lengths int64 [slots], tokens of the sequence, which grow by what was accepted and one.

    -> tokens int64 [S, 1 + K], of which the first accepted + 1 count, and accepted int64 [S].
    """
    num_columns = slot_tokens.shape[1]
    at = torch.arange(num_columns, device=chosen.device)
    tokens = chosen[first_rows.unsqueeze(1) + torch.minimum(at, num_drafts.unsqueeze(1))]
    agrees = (tokens[:, :-1] == slot_tokens[slots, 1:]) & (at[:-1] < num_drafts.unsqueeze(1))
    accepted = agrees.cumprod(1).sum(1)
    slot_tokens[slots, 0] = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    slot_lengths[slots] += accepted + 1
    return tokens, accepted


@operation
def choose_draft_lengths(survival: Tensor, room: Tensor, step_ms: Tensor, until_first_fall: bool) -> Tensor:
    """How many drafts of each of S sequences to verify (speculation/draft_lengths.py has the rule) -> int64 [S].

    survival [S, K]: chance that a draft and all before it are accepted, which does not rise along a row; room int64
    [S]; step_ms: of a step by the drafts that it verifies, at least S * K + 1 of them, of survival's dtype.
    """
    num_sequences, num_drafts = survival.shape
    has_chance = (torch.arange(num_drafts, device=room.device) < room.unsqueeze(1)) & (survival > 0)
    ordered, order = torch.where(has_chance, survival, 0.0).flatten().sort(descending=True, stable=True)
    is_draft = ordered > 0
    theta = (num_sequences + torch.cat((ordered.new_zeros(1), ordered.cumsum(0)))) / step_ms[: len(ordered) + 1]
    theta = torch.where(torch.cat((is_draft.new_ones(1), is_draft)), theta, -torch.inf)
    count = theta.argmax()
    if until_first_fall:
        falls = (theta.diff() < 0) & is_draft
        count = torch.where(falls.any(), falls.int().argmax(), is_draft.sum())
    admitted = (torch.arange(len(order), device=order.device) < count) & is_draft
    lengths = torch.zeros(num_sequences, dtype=torch.int64, device=order.device)
    return lengths.index_add_(0, order // max(num_drafts, 1), admitted.to(torch.int64))


@operation
def lookup_drafts(
    history: Tensor, slots: Tensor, slot_lengths: Tensor, longest: int, num_drafts: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor]:
    """Drafts from the text of the sequences themselves: what came after the latest of the best earlier matches.

    history int32 [slots, L]: tokens of each state slot; slots int64 [S]; slot_lengths int64 [slots]: how many of them
    count, `longest` of them at most (known to the host). A match is an earlier place whose last 1 to max_match tokens
    are those of the sequence; the longest is taken, then the latest. What lies past the end of the text is taken from
    the place again: a text that repeats itself goes on doing so.

    -> drafts int64 [S, num_drafts], NO_DRAFT without a match of min_match tokens, and its length int64 [S], else 0.
    """
    text = history[:, :longest][slots].long()  # [S, longest]
    lengths = slot_lengths[slots].unsqueeze(1)
    at = torch.arange(text.shape[1], device=text.device)
    length_here = torch.zeros_like(text)
    agrees = at < lengths - 1  # a match ends before the last token
    for back in range(max_match):
        tail = text.gather(1, (lengths - 1 - back).clamp_min(0))
        shifted = torch.where(at >= back, text.roll(back, 1), NO_DRAFT)
        agrees = agrees & (shifted == tail) & (lengths > back)
        length_here += agrees
    match, last = (length_here * (text.shape[1] + 1) + at * (length_here > 0)).max(1)
    match = match // (text.shape[1] + 1)
    period = lengths.squeeze(1) - 1 - last  # at least 1 where there is a match
    ahead = torch.arange(num_drafts, device=text.device) % period.clamp_min(1).unsqueeze(1)
    drafts = text.gather(1, (last.unsqueeze(1) + 1 + ahead).clamp_max(text.shape[1] - 1))
    found = match >= min_match
    return torch.where(found.unsqueeze(1), drafts, NO_DRAFT), torch.where(found, match, 0)
