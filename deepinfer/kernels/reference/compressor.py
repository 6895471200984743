"""Pooling of token groups into one latent each (spec: model, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation


@operation
def pool_groups(
    ab: Tensor,
    carry: Tensor,
    state_slots: Tensor,
    members: Tensor,
    pending_rows: Tensor,
    pending_slots: Tensor,
    pending_places: Tensor,
) -> Tensor:
    """Softmax-weighted mean of each group's tokens, a channel at a time; then tokens of open groups go to the carry.

    ab [N, 2, d], values and gates of the new tokens; carry [slots, C, 2, d], those of earlier ones, of one dtype;
    state_slots int64 [S]; members int64 [groups, ratio] into [N new rows | S * C carried rows]; pending_* int64
    [pending], rows and where they go: carry[slot, place] -> [groups, d].
    """
    carried = carry[state_slots].flatten(0, 1)  # [S * C, 2, d]
    a, b = torch.cat((ab, carried))[members].unbind(2)  # [groups, ratio, d]
    carry[pending_slots, pending_places] = ab[pending_rows]
    return (a * b.softmax(dim=1)).sum(1)
