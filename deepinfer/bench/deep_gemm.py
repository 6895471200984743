"""FP8 and BF16 products on one Hopper GPU: dense, grouped, with MXFP4 experts, indexer logits; beside DeepGEMM.

python -m deepinfer.bench.deep_gemm [--save FOLDER] [--only dense,linears,groups,grouped,experts,logits,engine]

DeepGEMM (package tokenspeed-deepgemm) is measured where it can be imported. Medians of CUDA graph replays on random
data, several input sets where one would stay in L2, clocks left alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.bench.cuda_timing import copy_bandwidth, time_us
from deepinfer.bench.decode import measure_batch
from deepinfer.bench.gemm_baselines import COMMAND, E4M3, baseline_us, faster, import_deep_gemm, random_fp8, record
from deepinfer.bench.gemm_logits import logits
from deepinfer.bench.results import RESULTS_DIR, Record, save
from deepinfer.bench.synthetic import benchmark_engine, synthetic_config, synthetic_model
from deepinfer.config.engine import EngineConfig
from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.activations import quantize_rows
from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights, arrange
from deepinfer.kernels.deep_gemm.fp8_gemm import fp8_gemm, row_scales_layout
from deepinfer.kernels.deep_gemm.group_gemm import bf16_gemm, grouped_bf16_gemm, grouped_fp8_gemm
from deepinfer.kernels.deep_gemm.linear import Fp8Weight, fp8_linear, fp8_product
from deepinfer.kernels.deep_gemm.moe import routed_experts
from deepinfer.kernels.deep_gemm.moe_gemm import grouped_gate_up, grouped_gemm

DIM, INNER, EXPERTS, ACTIVE = 5120, 2304, 384, 6

PLANNED = 3  # shapes of DENSE that the plan has a target for
# M, N, K, input sets: the plan's three, then V4.1-Flash's linears (wq_b, wkv, shared experts, indexer.wq_b).
DENSE = [
    (8192, 8192, 8192, 1),
    (4096, 5120, 5120, 3),
    (128, 5120, 5120, 4),
    (4096, 32768, 1280, 1),
    (4096, 512, 5120, 3),
    (4096, 4608, 5120, 2),
    (4096, 5120, 2304, 3),
    (128, 4608, 5120, 4),
    (64, 5120, 5120, 4),
    (16, 5120, 5120, 4),
]


# ------------------------------------------------------------------ dense


def dense() -> Iterator[Record]:
    """1 x 128 scales of activations, 128 x 128 of weights."""
    deep_gemm = import_deep_gemm()
    for position, (m, n, k, sets) in enumerate(DENSE):
        ours: list[Callable[[], object]] = []
        theirs: list[Callable[[], object]] = []
        row_wise: list[Callable[[], object]] = []
        for _ in range(sets):
            a, b = random_fp8(m, k), random_fp8(n, k)
            a_scales = row_scales_layout(torch.rand(m, k // 128, device="cuda"))
            b_scales = torch.rand(-(-n // 128), k // 128, device="cuda")
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            ours.append(partial(fp8_product, a, a_scales, b, b_scales, out))
            if deep_gemm is not None:
                theirs.append(partial(deep_gemm.fp8_gemm_nt, (a, a_scales), (b, b_scales), out))
            scales = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
            row_wise.append(partial(torch._scaled_mm, a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True))
        flops = 2.0 * m * n * k / 1e6
        rate = flops / time_us(ours)
        name = f"FP8 GEMM, 1x128 and 128x128 scales, {m} x {n} x {k}"
        theirs_us = baseline_us(theirs) if theirs else None
        target = 0.95 if position < PLANNED else None
        yield record(name, "TFLOP/s", rate, ("DeepGEMM", theirs_us and flops / theirs_us), target)
        row_wise_us = baseline_us(row_wise)
        baseline = ("torch._scaled_mm, row-wise scales", row_wise_us and flops / row_wise_us)
        yield record(f"{name}, beside one scale a row", "TFLOP/s", rate, baseline, None)


def linears() -> Iterator[Record]:
    """V4.1-Flash's FP8 linears as decode steps call them, rounding of the activations included, beside BF16 ones."""
    for name, n, k in (
        ("wq_a and wkv", 1792, 5120),
        ("wq_b", 32768, 1280),
        ("wo_b", 5120, 8192),
        ("shared experts' w1 and w3", 4608, 5120),
        ("shared experts' w2", 5120, 2304),
    ):
        sets = max(1, 250_000_000 // (n * k))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        fp8 = [Fp8Weight.of(weight) for weight in weights]
        for rows in (1, 16, 64):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            us = time_us([partial(fp8_linear, x, weight) for weight in fp8])
            bf16_us = time_us([partial(torch.nn.functional.linear, x, weight) for weight in weights])
            title = f"FP8 linear of few rows, {name}, {rows} x {n} x {k}"
            yield faster(title, us, ("BF16 linear of PyTorch", bf16_us))


# ------------------------------------------------------------------ grouped


def groups() -> Iterator[Record]:
    """BF16, dense and of 48 groups of rows; FP8 x FP8 of the same groups."""
    for m, n, k, sets in ((8192, 8192, 8192, 1), (4096, 5120, 5120, 2), (128, 5120, 5120, 4), (16, 5120, 5120, 4)):
        x = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        w = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        flops = 2.0 * m * n * k / 1e6
        us, torch_us = (time_us([partial(f, *pair) for pair in zip(x, w, strict=True)]) for f in (bf16_gemm, F.linear))
        baseline = ("torch.nn.functional.linear", flops / torch_us)
        yield record(f"BF16 GEMM, {m} x {n} x {k}", "TFLOP/s", flops / us, baseline, None)
    deep_gemm, count = import_deep_gemm(), 48
    weights = torch.randn(count, INNER, DIM, device="cuda", dtype=torch.bfloat16)
    fp8_weights = weights.to(E4M3)
    w_scales = torch.rand(count, INNER // 128, DIM // 128, device="cuda")
    for each in (8, 64, 512):
        counts = torch.full((count,), each, dtype=torch.int32, device="cuda")
        begins = counts.cumsum(0).int() - counts
        wide = torch.randn(count * each, DIM, device="cuda", dtype=torch.bfloat16)
        flops = 2.0 * count * each * INNER * DIM / 1e6
        us = time_us([partial(grouped_bf16_gemm, wide, begins, counts, weights)])
        torch_us = time_us([partial(torch.bmm, wide.view(count, each, DIM), weights.transpose(1, 2))])
        title = f"of {count} groups of {each} rows, 5120 to 2304"
        yield record(f"BF16 GEMM {title}", "TFLOP/s", flops / us, ("torch.bmm", flops / torch_us), None)
        values, scales = wide.to(E4M3), row_scales_layout(torch.rand(count * each, DIM // 128, device="cuda"))
        us = time_us([partial(grouped_fp8_gemm, values, scales, begins, counts, fp8_weights, w_scales)])
        theirs = None
        if deep_gemm is not None:
            out = torch.empty(count, each, INNER, dtype=torch.bfloat16, device="cuda")
            masked = values.view(count, each, DIM), torch.rand(count, DIM // 128, each, device="cuda").transpose(1, 2)
            call = deep_gemm.m_grouped_fp8_gemm_nt_masked
            theirs = baseline_us([partial(call, masked, (fp8_weights, w_scales), out, counts, each)])
        entry = ("DeepGEMM grouped masked FP8", theirs and flops / theirs)
        yield record(f"FP8 GEMM {title}", "TFLOP/s", flops / us, entry, None)


def random_experts(rows: int, columns: int, gate_up: bool) -> ExpertWeights:
    packed = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8, device="cuda")
    return arrange(packed, scales, gate_up)


def route(tokens: int) -> tuple[Tensor, Tensor]:
    """begins and counts of the rows of each expert; every token chooses ACTIVE experts at random."""
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(ACTIVE).indices.flatten()
    counts = torch.bincount(chosen, minlength=EXPERTS).int()
    return (counts.cumsum(0) - counts).int(), counts


def grouped() -> Iterator[Record]:
    """The down product and the fused gate and up product of 384 experts, 6 a token."""
    bandwidth = copy_bandwidth()
    dense_rate = 2.0 * 8192**3 / dense_us(8192, 8192, 8192) / 1e6
    for name, rows, columns, gate_up in (
        ("down 2304 -> 5120", DIM, INNER, False),
        ("gate and up 5120 -> 2 x 2304, SwiGLU and FP8 cast fused", 2 * INNER, DIM, True),
    ):
        weights = random_experts(rows, columns, gate_up)
        for tokens in (4096, 128):
            begins, counts = route(tokens)
            wide = torch.randn(tokens * ACTIVE, columns, device="cuda", dtype=torch.bfloat16)
            x, x_scales = quantize_rows(wide, ordered=True)
            gates = torch.rand(tokens * ACTIVE, device="cuda")
            run: Callable[[], object]
            if gate_up:
                run = partial(grouped_gate_up, x, x_scales, begins, counts, weights, gates, 7.0)
            else:
                run = partial(grouped_gemm, x, x_scales, begins, counts, weights)
            us = time_us([run])
            flops = 2.0 * tokens * ACTIVE * rows * columns / 1e6
            title = f"grouped GEMM FP8 x MXFP4, {name}, {tokens} tokens"
            if tokens == 4096:
                baseline = ("dense FP8 GEMM, 8192^3, same run", dense_rate)
                yield record(title, "TFLOP/s", flops / us, baseline, 0.6)
            used = int((counts > 0).sum())
            moved = used * weights.tiles[0].numel() + x.numel() + tokens * ACTIVE * rows * (0.5 if gate_up else 2)
            baseline = ("copy, bytes read and written", bandwidth / 1e12)
            target = 0.8 if tokens == 128 else None
            yield record(f"{title}, bandwidth", "TB/s", moved / us / 1e6, baseline, target)
            floor = ("the bytes at the copy's bandwidth", flops * bandwidth / moved / 1e6)
            yield record(f"{title}, beside its floor", "TFLOP/s", flops / us, floor, None)
            for baseline_name, runs in grouped_baselines(tokens, counts.tolist(), rows, columns):
                theirs = baseline_us([runs])
                if theirs is not None:
                    entry = (baseline_name, flops / theirs)
                    yield record(f"{title}, beside {baseline_name}", "TFLOP/s", flops / us, entry, None)
        del weights


def dense_us(m: int, n: int, k: int) -> float:
    a_scales = row_scales_layout(torch.rand(m, k // 128, device="cuda"))
    b_scales = torch.rand(n // 128, k // 128, device="cuda")
    return time_us([partial(fp8_gemm, random_fp8(m, k), a_scales, random_fp8(n, k), b_scales)])


def grouped_baselines(
    tokens: int, counts: list[int], rows: int, columns: int
) -> list[tuple[str, Callable[[], object]]]:
    """DeepGEMM's grouped FP8 product (FP8 weights, no SwiGLU), and one FP8 product an expert."""
    weights = torch.randint(0, 0x78, (EXPERTS, rows, columns), dtype=torch.uint8, device="cuda").view(E4M3)
    found: list[tuple[str, Callable[[], object]]] = []
    deep_gemm = import_deep_gemm()
    if deep_gemm is not None:
        room = -(-max(counts) // 64) * 64
        x = torch.randn(EXPERTS * room, columns, device="cuda").to(E4M3).view(EXPERTS, room, columns)
        x_scales = torch.rand(EXPERTS, columns // 128, room, device="cuda").transpose(1, 2)
        w_scales = torch.rand(EXPERTS, rows // 128, columns // 128, device="cuda")
        out = torch.empty(EXPERTS, room, rows, dtype=torch.bfloat16, device="cuda")
        masked = torch.tensor(counts, dtype=torch.int32, device="cuda")
        expected = -(-sum(counts) // EXPERTS)
        call = deep_gemm.m_grouped_fp8_gemm_nt_masked
        found.append(
            ("DeepGEMM grouped masked FP8", partial(call, (x, x_scales), (weights, w_scales), out, masked, expected))
        )
    rows_of = torch.randn(tokens * ACTIVE, columns, device="cuda").to(E4M3)
    one = torch.ones((), device="cuda")

    def loop() -> None:
        first = 0
        for expert, count in enumerate(counts):
            if count:
                part = rows_of[first : first + count]
                torch._scaled_mm(part, weights[expert].T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
                first += count

    found.append(("loop over experts, torch._scaled_mm FP8", loop))
    return found


def experts() -> Iterator[Record]:
    """The whole routed experts of a layer, routing to sum over the slots, beside the Triton kernels."""
    for count in (64, EXPERTS):
        stored = []
        for rows, columns in ((2 * INNER, DIM), (DIM, INNER)):
            stored.append(torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device="cuda"))
            stored.append(torch.full((count, rows, columns // 32), 118, dtype=torch.uint8, device="cuda"))
        arranged = arrange(stored[0], stored[1], gate_up=True), arrange(stored[2], stored[3])
        for tokens in (1, 16, 64, 128, 4096):
            x = torch.randn(tokens, DIM, device="cuda", dtype=torch.bfloat16)
            chosen = torch.rand(tokens, count, device="cuda").topk(ACTIVE).indices.int()
            gates = torch.rand(tokens, ACTIVE, device="cuda")
            us = time_us([partial(routed_experts, x, chosen, gates, *arranged, 10.0)])
            triton_us = time_us([partial(ops.moe_experts_fp4, x, chosen, gates, *stored, 10.0, True)])
            title = f"routed experts, {count} experts of 5120 x 2304, 6 a token, {tokens} tokens"
            yield faster(title, us, ("Triton kernels", triton_us))
        del stored, arranged


# ------------------------------------------------------------------ engine


def engine() -> Iterator[Record]:
    """Prefill and decode of V4.1-Flash's layers with these kernels, and without: Triton experts, BF16 linears."""
    layers, experts_of_layer, batch, prompt_len = 8, 64, 64, 1024
    speeds = {}
    for with_kernels in (True, False):
        config = synthetic_config("v41", layers, experts_of_layer)
        model = synthetic_model(config, torch.bfloat16, "cuda", quantize_activations=with_kernels)
        options = EngineConfig(
            device="cuda", max_num_seqs=batch, max_model_len=2048, watermark=0.0, cudagraph_batch_size_interval=batch
        )
        engine = benchmark_engine(model, options)
        measure_batch(engine, batch, prompt_len, 5, seed=0)  # warms up
        speeds[with_kernels] = measure_batch(engine, batch, prompt_len, 64, seed=1)
        del model, engine
        torch.cuda.empty_cache()
    for phase in ("prefill", "decode"):
        ours, plain = (getattr(speeds[with_kernels], phase) for with_kernels in (True, False))
        title = (
            f"{phase} of {batch} sequences of {prompt_len} tokens, V4.1-Flash, {layers} layers of {experts_of_layer}"
        )
        baseline = ("Triton experts, BF16 linears", plain)
        yield record(f"{title} experts", "tok/s", ours, baseline, None)


SECTIONS: dict[str, Callable[[], Iterator[Record]]] = {
    "dense": dense,
    "linears": linears,
    "groups": groups,
    "grouped": grouped,
    "experts": experts,
    "logits": logits,
    "engine": engine,
}


def main(arguments: list[str] | None = None) -> None:
    """Print what is measured, and save it with --save."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS_DIR, help="folder for deep_gemm.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help=", ".join(SECTIONS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError("bench deep_gemm needs a CUDA device")
    torch.manual_seed(0)
    for name in options.only.split(","):
        if name not in SECTIONS:
            raise ValueError(f"--only is {name!r}, allowed: {', '.join(SECTIONS)}")
        for entry in SECTIONS[name]():
            beside = f"  {entry.baseline_name} {entry.baseline_value:.4g}, {entry.ratio:.3f} x" if entry.ratio else ""
            print(f"{entry.name}: {entry.value:.4g} {entry.unit}{beside}", flush=True)
            if options.save:
                save("deep_gemm", [entry], options.save)


if __name__ == "__main__":
    main()
