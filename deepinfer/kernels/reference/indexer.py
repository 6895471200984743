"""Lightning indexer: scores of compressed positions, candidate blocks and top-k selection (spec: model, section 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat, load_rows
from deepinfer.kernels.registry import operation

ROWS_AT_ONCE = 256


@operation
def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, sequence_of_row: Tensor, visible: Tensor
) -> Tensor:
    """sum_h weights[n, h] * relu(iq[n, h] . key[g]) for every compressed position g below visible[n], else -inf.

    iq [N, Hi, di], weights [N, Hi], cache [blocks, entries, row], block_tables int32 [S, max_blocks],
    sequence_of_row int32 [N], visible int32 [N] -> at least float32 [N, max(visible)].
    """
    compute = torch.promote_types(iq.dtype, torch.float32)
    width = int(visible.max()) if visible.numel() else 0
    entries = cache.shape[1]
    scores = torch.full((iq.shape[0], width), float("-inf"), dtype=compute, device=iq.device)
    positions = torch.arange(width, device=iq.device)
    for sequence in sequence_of_row.unique().tolist() if width else []:
        rows = torch.where(sequence_of_row == sequence)[0]
        count = int(visible[rows].max())
        slots = block_tables[sequence, positions[:count] // entries].long() * entries + positions[:count] % entries
        keys = load_rows.reference(cache, slots, RowFormat.MXFP4, iq.shape[-1], iq.dtype)
        for part in rows.split(ROWS_AT_ONCE):
            dots = torch.relu(torch.einsum("nhd,gd->nhg", iq[part], keys).to(compute))
            values = torch.einsum("nh,nhg->ng", weights[part].to(compute), dots)
            hidden = positions[:count] >= visible[part, None]
            scores[part, :count] = values.masked_fill(hidden, float("-inf"))
    return scores


@operation
def top_k_positions(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest scores above -inf, ascending; ties go to the lowest; int32 [N, k], -1 = unused.

    NaN is never chosen.
    """
    width = scores.shape[1]
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.where(scores.gather(1, order) > float("-inf"), order, width).sort(dim=-1).values
    chosen = F.pad(chosen, (0, k - chosen.shape[1]), value=width)
    return torch.where(chosen == width, -1, chosen).to(torch.int32)


@operation
def top_k(scores: Tensor, k: int, ends: Tensor | None, by_value: bool, nan: str) -> tuple[Tensor, Tensor]:
    """The k largest of each row of scores [N, width] above -inf -> values [N, k], -inf where there are fewer, and
    positions int32 [N, k], -1 there.

    ends int32 [N]: positions from it on do not count. Of equal scores always those at the lowest positions are taken.
    by_value: the largest first, equal ones by position; else all by position. nan: 'ignore' never takes NaN, 'raise'
    waits for the device and raises ValueError if there is one.
    """
    if ends is not None:
        scores = scores.masked_fill(
            torch.arange(scores.shape[1], device=ends.device) >= ends.unsqueeze(1), float("-inf")
        )
    if nan not in ("ignore", "raise"):
        raise ValueError(f"nan must be 'ignore' or 'raise', got {nan!r}")
    if nan == "raise" and scores.isnan().any():
        raise ValueError("scores have a NaN; nan='ignore' leaves it out")
    positions = top_k_positions.reference(scores, k)
    padded = F.pad(scores, (0, 1), value=float("-inf"))
    values = padded.gather(1, torch.where(positions < 0, scores.shape[1], positions).long())
    if by_value:
        values, order = values.sort(dim=1, descending=True, stable=True)
        positions = positions.gather(1, order)
    return values, positions


@operation
def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, top_blocks: int) -> Tensor:
    """Blocks of `block_size` positions that later index sources may select in; the newest one is always kept.

    scores [N, G] with -inf where invisible, visible int32 [N] -> bool [N, ceil(G / block_size)].
    """
    padded = F.pad(scores, (0, -scores.shape[1] % block_size), value=float("-inf"))
    blocks = padded.unflatten(-1, (-1, block_size)).amax(-1)
    if blocks.shape[1] == 0:
        return torch.zeros_like(blocks, dtype=torch.bool)
    own = ((visible.long() - 1).clamp_min(0) // block_size).unsqueeze(1)
    pinned = torch.where(visible > 0, float("inf"), float("-inf")).to(blocks.dtype).unsqueeze(1)
    blocks = blocks.scatter(1, own, pinned)
    order = torch.sort(blocks, dim=-1, descending=True, stable=True).indices[:, :top_blocks]
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, order, True)
    return kept & (blocks > float("-inf"))


@operation
def mask_to_candidates(scores: Tensor, kept: Tensor, block_size: int) -> Tensor:
    """-inf outside the kept blocks. scores [N, G], kept bool [N, ceil(G / block_size)] -> [N, G]."""
    inside = kept.repeat_interleave(block_size, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(~inside, float("-inf"))
