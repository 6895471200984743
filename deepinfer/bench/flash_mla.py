"""Sparse attention on one Hopper GPU, beside FlashMLA, gather + SDPA and separate launches, all in one run.

python -m deepinfer.bench.flash_mla [--save FOLDER] [--only prefill,decode,fused,wide]

FlashMLA (package tokenspeed-flashmla) is measured where it can be imported. Medians of CUDA graph replays over several
input sets, clocks left alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.bench.cuda_timing import Run, copy_bandwidth, fp8_matmul_rate, matmul_rate, time_us
from deepinfer.bench.results import RESULTS_DIR, Record, measured, save
from deepinfer.kernels import ops
from deepinfer.kernels.flash_mla.attention import fused_attention, sparse_attention
from deepinfer.kernels.flash_mla.variants import Variant
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.reference.quant import pack_fp8_row, pack_nvfp4_row

COMMAND = "python -m deepinfer.bench.flash_mla"
PART = "4A"
HEADS, DIM, WINDOW, SELECTED = 64, 512, 128, 512
SCALE = DIM**-0.5
SETS = 3  # input sets that a timing rotates among
RING, BLOCK = 134, 128  # rows of a window ring and of a block of compressed KV
ROWS = {RowFormat.NVFP4: pack_nvfp4_row, RowFormat.FP8: pack_fp8_row}
LABELS = {RowFormat.NVFP4: "NVFP4", RowFormat.FP8: "FP8"}


@dataclass(frozen=True)
class Ceilings:
    """What this card does in this run, per second: bytes of a copy, operations of large products."""

    copy: float
    bf16: float
    fp8: float

    def floor_us(self, moved: float, operations: float) -> float:
        """Microseconds that `moved` bytes or BF16 `operations` take at least."""
        return max(moved / self.copy, operations / self.bf16) * 1e6


def measure_ceilings() -> tuple[Ceilings, list[Record]]:
    """The ceilings, and a record of each."""
    ceilings = Ceilings(copy_bandwidth(), matmul_rate(), fp8_matmul_rate())
    named = (
        ("copy", "TB/s", ceilings.copy),
        ("BF16 product of 8192^3", "TFLOP/s", ceilings.bf16),
        ("FP8 product of 8192^3, row-wise scales", "TFLOP/s", ceilings.fp8),
    )
    return ceilings, [
        measured(f"ceiling of the run: {name}", part=PART, unit=unit, value=rate / 1e12, command=COMMAND)
        for name, unit, rate in named
    ]


def compile_ahead() -> None:
    """All kernels of the benchmark side by side; one after the other takes minutes where none is cached."""
    variants = [Variant(heads, "bf16", 0, "bf16", 0) for heads in (64, 128)]
    for kind in ROWS:
        variants.append(Variant(64, "bf16", 0, kind, BLOCK))
        variants += [Variant(64, RowFormat.FP8, RING, kind, BLOCK, split) for split in (1, 2)]
    variants += [Variant(64, RowFormat.FP8, RING, RowFormat.NVFP4, BLOCK, s, True, True, True) for s in (1, 2)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda variant: variant.build().cubin(), variants))


def random_slots(tokens: int, count: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (tokens, count), dtype=torch.int32, device="cuda")


# ------------------------------------------------------------------ prefill


def attention_flops(tokens: int, heads: int = HEADS, keys: int = WINDOW + SELECTED) -> float:
    return tokens * heads * keys * 4.0 * DIM


def prefill(ceilings: Ceilings) -> list[Record]:
    """V4.1-Flash's 64 heads and 640 keys: all BF16, or the selected ones packed as caches have them."""
    return prefill_of(ceilings, HEADS, SELECTED, tuple(ROWS), 4096, 0.9)


def wide_prefill(ceilings: Ceilings) -> list[Record]:
    """128 heads and 2,048 keys."""
    return prefill_of(ceilings, 128, 2048 - WINDOW, (), 2048, None)


def prefill_of(
    ceilings: Ceilings, heads: int, chosen: int, formats: Sequence[RowFormat], tokens: int, target: float | None
) -> list[Record]:
    """128 rows of a window and `chosen` ones at random, of 32,768 rows."""
    rows = 32768
    ours: list[Run] = []
    packed: dict[RowFormat, list[Run]] = {kind: [] for kind in formats}
    theirs: list[Run] = []
    flash_mla = import_flash_mla()
    for _ in range(SETS):
        q = torch.randn(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
        kv = torch.randn(1, rows, DIM, device="cuda", dtype=torch.bfloat16)
        sink = torch.randn(heads, device="cuda")
        position = torch.arange(tokens, device="cuda", dtype=torch.int32) + rows - tokens
        window = position.unsqueeze(1) - torch.arange(WINDOW, device="cuda", dtype=torch.int32)
        selected = random_slots(tokens, chosen, rows).sort(-1).values
        arguments = (q, kv, window.contiguous(), kv, selected, sink, SCALE)
        ours.append(partial(sparse_attention, *arguments))
        for kind in formats:
            latents = ROWS[kind](kv[0].float()).view(-1, BLOCK, kind.row_bytes(DIM))
            packed[kind].append(partial(sparse_attention, q, kv, window.contiguous(), latents, selected, sink, SCALE))
        if flash_mla is not None:
            indices = torch.cat((window, selected), 1).unsqueeze(1).contiguous()
            theirs.append(partial(flash_mla.flash_mla_sparse_fwd, q, kv.view(-1, 1, DIM), indices, SCALE, DIM, sink))
    runs = {"BF16": ours} | {f"BF16 window + {LABELS[kind]} rows": these for kind, these in packed.items()}
    if theirs:
        runs["FlashMLA"] = theirs
    flops = attention_flops(tokens, heads, WINDOW + chosen)
    rate = {name: flops / time_us(these) / 1e6 for name, these in runs.items()}
    shape = f"{heads} heads, {WINDOW + chosen:,} keys, {tokens:,} queries"
    compared = [
        measured(
            f"sparse prefill attention, {name}, {shape}",
            part=PART,
            unit="TFLOP/s",
            value=rate[name],
            command=COMMAND,
            baseline_name="FlashMLA, BF16" if theirs else None,
            baseline_value=rate.get("FlashMLA"),
            target=target if theirs and name == "BF16" else None,
        )
        for name in runs
        if name != "FlashMLA"
    ]
    share = measured(
        f"sparse prefill attention, BF16, {shape}, share of the BF16 ceiling",
        part=PART,
        unit="of the product's rate",
        value=rate["BF16"] * 1e12 / ceilings.bf16,
        command=COMMAND,
    )
    return [*compared, share]


# ------------------------------------------------------------------ decode


def packed_caches(sequences: int, selected_rows: int, kind: RowFormat) -> tuple[Tensor, Tensor]:
    """An FP8 ring a sequence [sequences, 134, 528] and packed blocks [blocks, 128, 288 or 528], random values."""
    ring = pack_fp8_row(torch.randn(sequences * RING, DIM, device="cuda")).view(sequences, RING, -1)
    values = torch.randn(1 << 16, DIM, device="cuda")
    rows = ROWS[kind](values).repeat(-(-selected_rows // len(values)), 1)[:selected_rows]
    return ring, rows.view(-1, BLOCK, kind.row_bytes(DIM))


def decode_case(batch: int, queries: int, context: int, kind: RowFormat = RowFormat.NVFP4) -> tuple[Any, ...]:
    """Arguments of `sparse_attention` for `queries` tokens each of `batch` sequences."""
    tokens = batch * queries
    ring, latents = packed_caches(batch, batch * context, kind)
    q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    sequence = torch.arange(batch, device="cuda", dtype=torch.int32).repeat_interleave(queries).unsqueeze(1)
    window = sequence * RING + torch.arange(WINDOW, device="cuda", dtype=torch.int32)
    selected = sequence * context + random_slots(tokens, SELECTED, context).sort(-1).values
    return q, ring, window, latents, selected, torch.randn(HEADS, device="cuda"), SCALE


def decode_bytes(batch: int, queries: int, kind: RowFormat) -> int:
    """Bytes that one step must move: every row that some query of a sequence reads once, queries, outputs."""
    window = batch * WINDOW * RowFormat.FP8.row_bytes(DIM)
    selected = batch * queries * SELECTED * kind.row_bytes(DIM)  # drawn apart for each query
    return window + selected + batch * queries * HEADS * DIM * 4


def decode(ceilings: Ceilings, context: int = 8192) -> list[Record]:
    """Batch 64 and 128, 1 and 6 query tokens a sequence, compressed KV in NVFP4 (as released) and in FP8."""
    records = []
    for batch, queries in ((64, 1), (128, 1), (64, 6), (128, 6)):
        theirs = flash_mla_decode(batch, queries, context)
        for kind, label in LABELS.items():
            cases = [decode_case(batch, queries, context, kind) for _ in range(SETS)]
            ours = time_us([partial(sparse_attention, *case) for case in cases])
            gathered = time_us([partial(gather_and_sdpa, kind, *cases[0])], 5)
            del cases
            name = f"sparse decode attention, FP8 window + {label} rows, batch {batch}, {queries} query token(s)"
            floor = ceilings.floor_us(decode_bytes(batch, queries, kind), attention_flops(batch * queries))
            records += decode_records(name, ours, gathered, theirs, floor)
    return records


def decode_records(name: str, ours: float, gathered: float, theirs: float | None, floor: float) -> list[Record]:
    """Times of one shape, in microseconds, beside gather + SDPA, beside its floor, and beside FlashMLA if that ran."""
    known: dict[str, Any] = {"part": PART, "command": COMMAND}
    records = [
        measured(
            f"{name}, beside gather + SDPA",
            unit="us",
            value=ours,
            baseline_name="gather + SDPA",
            baseline_value=gathered,
            higher_is_better=False,
            **known,
        ),
        measured(
            f"{name}, beside its floor",
            unit="us",
            value=ours,
            baseline_name="bytes or operations over the ceilings",
            baseline_value=floor,
            higher_is_better=False,
            **known,
        ),
    ]
    if theirs is not None:
        records.append(
            measured(
                name,
                unit="calls a second",
                value=1e6 / ours,
                baseline_name="FlashMLA, FP8 rows",
                baseline_value=1e6 / theirs,
                target=0.9,
                samples=[{"us": ours, "baseline_us": theirs}],
                **known,
            )
        )
    return records


def gather_and_sdpa(
    kind: RowFormat,
    q: Tensor,
    ring: Tensor,
    window: Tensor,
    latents: Tensor,
    selected: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """What PyTorch alone does: unpack the rows to BF16, then attention over them (without the sink)."""
    keys = torch.cat(
        (
            ops.load_rows(ring, window, RowFormat.FP8, DIM, q.dtype),
            ops.load_rows(latents, selected, kind, DIM, q.dtype),
        ),
        1,
    ).unsqueeze(1)
    return F.scaled_dot_product_attention(q.unsqueeze(2).transpose(1, 2), keys, keys, scale=scale)


# ------------------------------------------------------------------ FlashMLA


def import_flash_mla():  # type: ignore[no-untyped-def]
    """The module, or None where it is not installed."""
    try:
        import flash_mla

        return flash_mla
    except ImportError:
        return None


def flash_mla_cache(rows: int, page: int = 64) -> Tensor:
    """A cache of its rows of 584 bytes: 448 of E4M3, 64 BF16, 8 scales at the end of the page; random values."""
    pages, stride = rows // page, -(-page * 584 // 576) * 576
    raw = torch.randint(0, 256, (pages, stride), device="cuda", dtype=torch.uint8) & 0xBF  # no NaN, values below 2
    raw[:, page * 576 :] = 127  # scales of 1
    return raw[:, : page * 584].view(pages, page, 1, 584).view(torch.float8_e4m3fn)


def flash_mla_decode(batch: int, queries: int, context: int) -> float | None:
    """Microseconds of FlashMLA's FP8 decode over a window and selected rows in one softmax."""
    flash_mla = import_flash_mla()
    if flash_mla is None:
        return None
    runs: list[Run] = []
    for _ in range(SETS):
        q = torch.randn(batch, queries, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        window, main = flash_mla_cache(batch * 128), flash_mla_cache(batch * context)
        sequence = torch.arange(batch, device="cuda", dtype=torch.int32).view(-1, 1, 1)
        near = (sequence * 128 + torch.arange(WINDOW, device="cuda", dtype=torch.int32)).expand(-1, queries, -1)
        far = random_slots(batch * queries, SELECTED, context).view(batch, queries, -1) + sequence * context
        sink, plan = torch.randn(HEADS, device="cuda"), flash_mla.get_mla_metadata()[0]
        run = partial(flash_mla.flash_mla_with_kvcache, q, window, None, None, DIM, plan, softmax_scale=SCALE)
        indices = {"indices": near.contiguous(), "extra_indices_in_kvcache": far.contiguous()}
        runs.append(partial(run, is_fp8_kvcache=True, attn_sink=sink, extra_k_cache=main, **indices))
    return time_us(runs)


# ------------------------------------------------------------------ fused


def fused(ceilings: Ceilings, context: int = 8192) -> list[Record]:
    """Query norm, RoPE, attention, inverse RoPE and the FP8 cast in one launch, against five in a graph."""
    records = []
    for batch, queries in ((64, 1), (128, 1), (128, 6)):
        together: list[Run] = []
        apart: list[Run] = []
        for _ in range(SETS):
            q, *caches = decode_case(batch, queries, context)
            angle = torch.rand(q.shape[0], 32, device="cuda") * 6.28
            cos, sin = angle.cos(), angle.sin()
            weight = torch.ones(DIM, device="cuda", dtype=torch.bfloat16)
            rows = torch.empty(1, q.shape[0] * HEADS, RowFormat.FP8.row_bytes(DIM), device="cuda", dtype=torch.uint8)
            slots = torch.arange(q.shape[0] * HEADS, device="cuda", dtype=torch.int32)

            apart.append(partial(separate_steps, q, cos, sin, weight, rows, slots, caches))
            together.append(partial(fused_attention, q, cos, sin, *caches, q_norm=True))
        records.append(
            measured(
                f"norm, RoPE, attention, RoPE and FP8 cast in one launch, batch {batch}, {queries} query token(s)",
                part=PART,
                unit="calls a second",
                value=1e6 / time_us(together),
                command=COMMAND,
                baseline_name="five launches in a graph",
                baseline_value=1e6 / time_us(apart),
                target=1.15,
            )
        )
    return records


def separate_steps(
    q: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, caches: Sequence[Any]
) -> None:
    """The same steps one launch each; the cast writes FP8 rows with their scales."""
    q = ops.rope(ops.rms_norm(q, weight, 1e-20), cos, sin, False)
    o = ops.rope(sparse_attention(q, *caches), cos, sin, True)
    ops.store_rows(rows, slots, o.flatten(0, 1), RowFormat.FP8)


SECTIONS: dict[str, Callable[[Ceilings], list[Record]]] = {
    "prefill": prefill,
    "decode": decode,
    "fused": fused,
    "wide": wide_prefill,
}


def main(arguments: list[str] | None = None) -> None:
    """Print what is measured, and save it with --save."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS_DIR, help="folder for flash_mla.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help=", ".join(SECTIONS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError("bench flash_mla needs a CUDA device")
    torch.manual_seed(0)
    compile_ahead()
    ceilings, found = measure_ceilings()
    show(found)
    for name in options.only.split(","):
        if name not in SECTIONS:
            raise ValueError(f"--only is {name!r}, allowed: {', '.join(SECTIONS)}")
        records = SECTIONS[name](ceilings)
        show(records)
        found += records
        if options.save:
            save("flash_mla", found, options.save)


def show(records: Sequence[Record]) -> None:
    for record in records:
        beside = f"  {record.baseline_name} {record.baseline_value:.4g}, {record.ratio:.3f} x" if record.ratio else ""
        print(f"{record.name}: {record.value:.4g} {record.unit}{beside}", flush=True)


if __name__ == "__main__":
    main()
