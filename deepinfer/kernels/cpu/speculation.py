"""CPU kernel of prompt lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.library import functions
from deepinfer.kernels.reference import speculation  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend


@backend("lookup_drafts", "cpu")
def lookup_drafts(
    history: Tensor, slots: Tensor, slot_lengths: Tensor, longest: int, num_drafts: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor]:
    kernels = functions()
    if kernels is None or history.dtype is not torch.int32 or history.stride(1) != 1:
        return NotImplemented
    slots, slot_lengths = slots.contiguous(), slot_lengths.contiguous()
    drafts = torch.empty(len(slots), num_drafts, dtype=torch.int64)
    matches = torch.empty(len(slots), dtype=torch.int64)
    kernels["lookup_drafts"](
        history.data_ptr(), history.stride(0), slots.data_ptr(), slot_lengths.data_ptr(), len(slots), num_drafts,
        min_match, max_match, drafts.data_ptr(), matches.data_ptr(),
    )  # fmt: skip
    return drafts, matches
