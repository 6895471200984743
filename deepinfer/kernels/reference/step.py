"""Where a step reads and writes: addresses in paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation


@operation
def entry_slots(positions: Tensor, block_tables: Tensor, sequence_of_row: Tensor, entries: int) -> Tensor:
    """Physical slots of compressed positions in a cache of `entries` a block; -1 stays -1.

    positions int [N, K], block_tables int32 [S, max_blocks], sequence_of_row int [N] -> int32 [N, K].
    """
    tables = block_tables[sequence_of_row.long().unsqueeze(1), positions.clamp_min(0) // entries]
    return torch.where(positions >= 0, tables * entries + positions % entries, -1).to(torch.int32)
