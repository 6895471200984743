"""The draft-length scheduler and the verification of drafts."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.tilelang_ops.operations import call, empty, launch, number_dtype


@call
def choose_draft_lengths(survival: Tensor, room: Tensor, step_ms: Tensor, until_first_fall: bool) -> Tensor:
    n, drafts = survival.shape
    out = empty(room, n)
    most = max(64, 1 << (n - 1).bit_length()) if n else 0
    inputs = (survival.to(number_dtype(room)).contiguous(), room, step_ms.to(number_dtype(room)))
    launch("choose_draft_lengths_tl", (most, drafts, until_first_fall), *inputs, out)
    return out


@call
def verify_tokens(
    chosen: Tensor, slot_tokens: Tensor, slot_lengths: Tensor, slots: Tensor, first_rows: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    n, columns = len(slots), slot_tokens.shape[1]
    if not slot_tokens.is_contiguous():
        return NotImplemented
    tokens, accepted = empty(slots, n, columns), empty(slots, n)
    inputs = (chosen, slot_tokens, slot_lengths, slots, first_rows, num_drafts)
    launch("verify_tokens_tl", (columns - 1,), *inputs, tokens, accepted)
    return tokens, accepted
