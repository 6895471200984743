"""Logits of the lightning indexer: over ranges of FP8 keys (prefill), or over pages of FP8 or MXFP4 keys (decode)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.checks import check
from deepinfer.kernels.deep_gemm.fp8_gemm import processors
from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map

SOURCE = Path(__file__).parent / "mqa_logits.cu"
DIM, KEYS, PAGE, HEADS = 128, 128, 64, 32
PAGE_BYTES = PAGE * (DIM + 4)
FP4_ROW, FP4_PAGES = 68, (64, 128)  # bytes of an MXFP4 key; keys of a page
MAX_SEQUENCES = 1024
PREFILL_SHAPE = (4, 2)
# Tokens of a product and products, for 1.. tokens of a sequence.
DECODE_SHAPES = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (4, 1), 5: (5, 1), 6: (3, 2), 8: (4, 2)}


class _Params(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("tokens", ctypes.c_int),
        ("keys", ctypes.c_int),
        ("chunk", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("clean", ctypes.c_int),
        ("width", ctypes.c_int),
    ]


@dataclass(frozen=True)
class _Variant:
    """Tokens of a product and products; keys of a page, 0 for ranges of one array."""

    shape: tuple[int, int]
    page: int = 0
    fp4: bool = False
    relative: bool = False
    heads: int = HEADS

    @property
    def query_bytes(self) -> int:
        return self.heads * self.shape[0] * self.shape[1] * DIM

    @property
    def stage_bytes(self) -> int:
        return KEYS * (FP4_ROW if self.fp4 else DIM) + KEYS * 4

    @property
    def stages(self) -> int:
        return min(16 if self.fp4 else 8, (220_000 - 2 * self.query_bytes) // self.stage_bytes)

    def build(self) -> Build:
        """What to compile."""
        defines: dict[str, int | str] = {
            "PAGED": int(self.page > 0),
            "RELATIVE": int(self.relative),
            "FP4": int(self.fp4),
            "PAGE": self.page or PAGE,
            "HEADS": self.heads,
            "TOKENS": self.shape[0],
            "PRODUCTS": self.shape[1],
            "STAGES": self.stages,
        }
        return Build("mqa_logits", SOURCE, defines)


def builds() -> list[Build]:
    """The indexer of V4.1-Flash: 32 heads; one token a sequence and what speculative decoding verifies."""
    decode = [_Variant(shape, PAGE) for shape in DECODE_SHAPES.values()]
    decode += [_Variant(shape, page, True) for shape in DECODE_SHAPES.values() for page in FP4_PAGES]
    prefill = [_Variant(PREFILL_SHAPE, relative=relative) for relative in (False, True)]
    return [variant.build() for variant in (*prefill, *decode)]


def engine_builds() -> list[Build]:
    """What `index_scores` launches: pages of the engine's cache, a token a sequence, and ranges of widened keys."""
    decode = [_Variant(DECODE_SHAPES[1], page, True) for page in FP4_PAGES]
    return [variant.build() for variant in (_Variant(PREFILL_SHAPE, relative=True), *decode)]


@cache
def _kernel(variant: _Variant) -> Kernel:
    tables = (2 * variant.stages + 4) * 8 + (MAX_SEQUENCES + 1) * 4
    return Kernel(variant.build(), 2 * variant.query_bytes + variant.stages * variant.stage_bytes + tables)


@cache
def fp4_order(device: torch.device) -> Tensor:
    """Which column stands where for keys widened in registers: see mqa_logits.cu."""
    position = torch.arange(DIM, device=device)
    lane, i, upper = position % 16 // 4, position % 4, position % 32 // 16
    return position // 32 * 32 + 8 * lane + 4 * upper + i


def _check(q: Tensor, weights: Tensor) -> None:
    tokens, heads, dim = q.shape
    if q.dtype != torch.float8_e4m3fn or dim != DIM or heads != HEADS or not q.is_contiguous():
        raise ValueError(f"q must be contiguous float8_e4m3fn [T, 32, {DIM}], got {q.dtype} {list(q.shape)}")
    check("weights", weights, torch.float32, [tokens, heads], q)


def mqa_logits(
    q: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    clean: bool = True,
    width: int | None = None,
) -> Tensor:
    """out[t, s] = key_scales[s] * sum_h weights[t, h] * relu(q[t, h] . keys[s]) for starts[t] <= s < ends[t], float32.

    q E4M3 [T, 32, 128] (its scales belong into weights), keys E4M3 [S, 128], key_scales float32 [S], weights float32
    [T, 32], starts and ends int32 [T] -> [T, S]. Elsewhere -inf, or with `clean` off partly unwritten. With `width`
    [T, width], column 0 of a token being the key starts[t]: no range may be longer. Raises ValueError.
    """
    _check(q, weights)
    tokens, count = q.shape[0], keys.shape[0]
    if keys.dtype != torch.float8_e4m3fn or keys.shape[1] != DIM:
        raise ValueError(f"keys must be float8_e4m3fn [S, {DIM}], got {keys.dtype} {list(keys.shape)}")
    check("key_scales", key_scales, torch.float32, [count], q)
    check("starts", starts, torch.int32, [tokens], q)
    check("ends", ends, torch.int32, [tokens], q)
    out = torch.empty(tokens, count if width is None else width, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or count == 0:
        return out.fill_(-torch.inf)
    cards, group = processors(q.device.index), PREFILL_SHAPE[0] * PREFILL_SHAPE[1]
    tiles, groups = -(-count // KEYS), -(-tokens // group)
    chunk = max(4, min(64, tiles * groups // (cards * 8)))
    params = _Params(
        weights=weights.data_ptr(),
        starts=starts.data_ptr(),
        ends=ends.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        tokens=tokens,
        keys=count,
        chunk=chunk,
        clean=int(clean),
        width=width or 0,
    )
    _kernel(_Variant(PREFILL_SHAPE, relative=width is not None)).launch(
        (min(cards, groups * -(-tiles // chunk)), 1, 1),
        (384, 1, 1),
        params,
        tensor_map(q.flatten(0, 1), (group * q.shape[1], DIM), 128),
        tensor_map(keys, (KEYS, DIM), 128),
        tensor_map(key_scales.unsqueeze(0), (1, KEYS), 0),
    )
    return out


def paged_mqa_logits(
    q: Tensor,
    pages: Tensor,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    width: int,
    clean: bool = False,
    ordered: bool = False,
) -> Tensor:
    """`mqa_logits` for n tokens of each sequence over its paged keys: float32 [B * n, width].

    q E4M3 [B, n, 32, 128]; pages uint8, either [P, 64 * 132], each 64 keys of 128 E4M3 and then 64 float32 scales, or
    [P, 64 or 128, 68], rows of 64 bytes of E2M1 pairs and four E8M0 bytes (the engine's cache); weights
    float32 [B * n, 32]; visible int32 [B * n]: keys that a token sees; block_table int32 [B, >= ceil(visible / 64)].
    Columns that are not visible are -inf; those from the end of a sequence's last 128 keys on are written only if
    `clean`. n is 1 to 6 or 8, at most 1,024 sequences. `ordered`: the columns of q are in `fp4_order` already. Raises
    ValueError.
    """
    sequences, queries = q.shape[:2]
    shape = DECODE_SHAPES.get(queries)
    if shape is None or sequences > MAX_SEQUENCES:
        raise ValueError(f"q must have {sorted(DECODE_SHAPES)} tokens of at most {MAX_SEQUENCES} sequences")
    flat = q.flatten(0, 1)
    _check(flat, weights)
    variant = _paged_variant(pages, shape)
    check("visible", visible, torch.int32, [flat.shape[0]], q)
    if block_table.dtype != torch.int32 or block_table.shape[0] != sequences or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 [{sequences}, pages], got {block_table.dtype} {block_table.shape}")
    out = torch.empty(flat.shape[0], width, dtype=torch.float32, device=q.device)
    if sequences == 0 or width == 0:
        return out
    params = _Params(
        weights=weights.data_ptr(),
        ends=visible.data_ptr(),
        out=out.data_ptr(),
        pages=pages.data_ptr(),
        block_table=block_table.data_ptr(),
        out_stride=width,
        tokens=flat.shape[0],
        keys=width,
        table_stride=block_table.stride(0),
        page_stride=pages.stride(0),
        clean=int(clean),
    )
    if variant.fp4 and not ordered:
        flat = flat.view(torch.uint8).index_select(-1, fp4_order(q.device)).view(torch.float8_e4m3fn)
    queries_map = tensor_map(flat.flatten(0, 1), (queries * q.shape[2], DIM), 128)
    keys_map = (
        queries_map if variant.fp4 else tensor_map(pages.view(torch.float8_e4m3fn).view(-1, DIM), (PAGE, DIM), 128)
    )
    grid = (processors(q.device.index), 1, 1)
    _kernel(variant).launch(grid, (384, 1, 1), params, queries_map, keys_map, keys_map)
    return out


def _paged_variant(pages: Tensor, shape: tuple[int, int]) -> _Variant:
    if pages.dtype == torch.uint8 and pages.dim() == 3 and pages.shape[2] == FP4_ROW and pages.shape[1] in FP4_PAGES:
        if (
            pages.stride(1) == FP4_ROW
            and pages.stride(2) == 1
            and not pages.stride(0) % 16
            and not pages.data_ptr() % 16
        ):
            return _Variant(shape, pages.shape[1], True)
    elif pages.dtype == torch.uint8 and list(pages.shape[1:]) == [PAGE_BYTES] and pages.is_contiguous():
        return _Variant(shape, PAGE)
    raise ValueError(
        f"pages must be uint8, contiguous [P, {PAGE_BYTES}] or [P, 64 or 128, {FP4_ROW}] with pages 16 bytes aligned, "
        f"got {pages.dtype} {list(pages.shape)}"
    )
