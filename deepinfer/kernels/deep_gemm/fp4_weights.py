"""MXFP4 weights of experts in the layout that the grouped kernel reads (fp4_weights.cuh): same size, other order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 256, 128
TILE_BYTES = TILE_ROWS * (TILE_COLUMNS // 2 + TILE_COLUMNS // 32)
EXPERTS_AT_ONCE = 4  # arranging takes some 100 bytes a weight byte


@dataclass(frozen=True)
class ExpertWeights:
    """`tiles` uint8 [E, rows / 256, K / 128, 17408] and `row_scales` float32 [E, rows], rows padded; see `arrange`.

    Columns are in the order of `ordered_columns`, which x must have too.
    """

    tiles: Tensor
    row_scales: Tensor
    rows: int  # of the matrix, without padding
    columns: int
    gate_up: bool

    @property
    def nbytes(self) -> int:
        return self.tiles.numel() + self.row_scales.numel() * 4


def ordered_columns(x: Tensor) -> Tensor:
    """x [P, K] of one byte a value -> [P, K'], filled up with zeros to K', a multiple of 128.

    Column 32 c + 8 s + 4 u + i of each 128 goes to 32 s + 16 u + 4 c + i: a thread of the products holds columns 4 c to
    4 c + 3 of every 16, so all of its weights are of one group of 32. `quantize_rows(ordered=True)` writes this order.
    """
    padded = F.pad(x.view(torch.uint8), (0, -x.shape[1] % TILE_COLUMNS))
    moved = padded.unflatten(1, (-1, 4, 4, 2, 4)).permute(0, 1, 3, 4, 2, 5)
    return moved.reshape(padded.shape).view(x.dtype)


def natural_columns(x: Tensor, columns: int) -> Tensor:
    """The inverse: x [P, K'] in the order of `ordered_columns` -> [P, columns]."""
    moved = x.view(torch.uint8).unflatten(1, (-1, 4, 2, 4, 4)).permute(0, 1, 4, 2, 3, 5)
    return moved.reshape(x.shape)[:, :columns].contiguous().view(x.dtype)


def arrange(packed: Tensor, scale_bytes: Tensor, gate_up: bool = False) -> ExpertWeights:
    """E2M1 pairs uint8 [E, O, K/2] (low nibble first) and E8M0 bytes [E, O, K/32] -> the kernel's layout.

    Each row keeps one scale, that of its largest group divided by 2^6, and each group its distance from it: with it
    codes become E4M3 exactly down to 2^-14 of the row's largest group, and are rounded to E4M3's smallest step below.
    `gate_up` is for [w1 | w3] [E, 2 I, ...]: 8 rows of w1, 8 of w3 and so on. K must be a multiple of 32, I of 8.
    Raises ValueError.
    """
    experts, rows, half = packed.shape
    columns = half * 2
    if columns % 32 or list(scale_bytes.shape) != [experts, rows, columns // 32]:
        raise ValueError(f"packed [E, O, K/2] needs K % 32 == 0 and scale_bytes [E, O, K/32], got {list(packed.shape)}")
    if gate_up and rows % 16:
        raise ValueError(f"gate_up needs 2 I rows, I a multiple of 8, got {rows}")
    row_blocks, k_blocks = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    device = packed.device
    tiles = torch.empty(experts, row_blocks, k_blocks, TILE_BYTES, dtype=torch.uint8, device=device)
    row_scales = torch.empty(experts, row_blocks * TILE_ROWS, device=device)
    for first in range(0, experts, EXPERTS_AT_ONCE):
        part = slice(first, first + EXPERTS_AT_ONCE)
        codes, exponents = packed[part].view(torch.uint8), scale_bytes[part].view(torch.uint8)
        if gate_up:
            codes, exponents = (_interleave(t) for t in (codes, exponents))
        tiles[part], row_scales[part] = _arrange(codes, exponents, row_blocks, k_blocks)
    return ExpertWeights(tiles, row_scales, rows, columns, gate_up)


def _interleave(t: Tensor) -> Tensor:
    """[E, 2 I, X] = [w1 | w3] -> 8 rows of each in turn."""
    return t.unflatten(1, (2, -1, 8)).transpose(1, 2).flatten(1, 3)


def _arrange(packed: Tensor, exponents: Tensor, row_blocks: int, k_blocks: int) -> tuple[Tensor, Tensor]:
    experts, rows, half = packed.shape
    pad_rows = row_blocks * TILE_ROWS - rows
    packed = F.pad(packed, (0, k_blocks * TILE_COLUMNS // 2 - half, 0, pad_rows))
    exponents = F.pad(exponents, (0, k_blocks * TILE_COLUMNS // 32 - half // 16, 0, pad_rows)).to(torch.int32)
    # Groups of zeros have no say in the row's scale.
    used = (packed.unflatten(-1, (-1, 16)) & 0x77 != 0).any(-1)
    top = torch.where(used, exponents, -1).amax(-1, keepdim=True)
    row_scale = torch.exp2((top - 127 - 6).double()).where(top >= 0, 1.0).float().squeeze(-1)
    row_scale = row_scale.masked_fill((exponents == 255).any(-1), float("nan"))
    distance = (top - exponents).clamp(0, 255)
    scale_codes = torch.where(distance <= 11, 11 - distance, 0x80 | (distance - 12).clamp(0, 7)).to(torch.uint8)
    scale_codes = torch.where(used, scale_codes, 0)

    # Rows: 64-row groups q, warps w, halves h, rows r; columns: blocks, groups of 32 c, products s, halves u, i.
    nibbles = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).to(torch.int32)
    nibbles = nibbles.view(experts, row_blocks, 4, 4, 2, 8, k_blocks, 4, 4, 2, 4)
    nibbles = nibbles.permute(0, 1, 6, 2, 3, 4, 5, 7, 8, 9, 10)  # [E, row block, k block, q, w, h, r, c, s, u, i]
    u = torch.arange(2, device=packed.device).view(2, 1)
    i = torch.arange(4, device=packed.device).view(1, 4)
    words = ((nibbles & 7).long() << (16 * u + 4 * i)) | ((nibbles >> 3).long() << (8 * i + 7 - 4 * u))
    words = words.sum((-1, -2))  # bits are disjoint
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    code_bytes = words.contiguous().view(torch.uint8).reshape(experts, row_blocks, k_blocks, -1)
    scale_codes = scale_codes.view(experts, row_blocks, TILE_ROWS, k_blocks, 4).transpose(2, 3).flatten(3)
    return torch.cat((code_bytes, scale_codes), -1), row_scale
