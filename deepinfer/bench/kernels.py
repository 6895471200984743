"""`deepinfer bench kernels`: the Triton kernels at the sizes of V4.1-Flash on one GPU, each beside its baseline.

Medians of CUDA graph replays over three input sets in turn, clocks left alone. Bytes are those that an operation must
read and write at least once. The copy that they are compared with has three sets as well and moves as many bytes, half
of them read and half written: both run from memory, or both from the L2 cache where three sets fit into it (50 MB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.bench.cuda_timing import Run, copy_bandwidth, matmul_rate, time_us
from deepinfer.bench.results import Record, measured
from deepinfer.kernels import ops
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import OPERATIONS

VOCAB, DIM, INNER, EXPERTS, ACTIVE, HC = 129280, 5120, 2304, 384, 6, 4
TOKENS = 4096
SETS = 3  # input sets that a timing rotates among
COMMAND = "deepinfer bench kernels"


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


# ------------------------------------------------------------------ selection and sampling


def sampler_arguments(rows: int, top_k: int, top_p: float) -> tuple[Any, ...]:
    one = torch.ones(rows, device="cuda", dtype=torch.float64)
    row = torch.arange(rows, device="cuda")
    logits = random(rows, VOCAB, dtype=torch.float32) * 2
    return logits, one * 0.8, torch.full_like(row, top_k), top_k, one * top_p, one * 0, row, row


def torch_sampler(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The usual way: softmax, sort, cut, multinomial."""
    probabilities, ids = (logits / 0.8).softmax(-1).sort(-1, descending=True)
    above = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(above > top_p, 0)
    probabilities[:, top_k:] = 0
    return ids.gather(1, probabilities.multinomial(1))


def sampler() -> Iterator[Record]:
    arguments = [sampler_arguments(64, 50, 0.95) for _ in range(SETS)]
    ours = time_us([partial(ops.draw_tokens, *a) for a in arguments])
    theirs = time_us([partial(torch_sampler, a[0], 50, 0.95) for a in arguments])
    yield record("sampler, 64 x 129,280, temperature + top-k 50 + top-p 0.95", ours, "torch sort", theirs, 1 / 6)
    plain = [(*a[:2], torch.full_like(a[2], VOCAB), 0, *a[4:]) for a in arguments]
    yield record(
        "sampler, 64 x 129,280, temperature + top-p 0.95", time_us([partial(ops.draw_tokens, *a) for a in plain])
    )
    greedy = [(a[0], a[1] * 0, *a[2:]) for a in plain]
    ours = time_us([partial(ops.draw_tokens, *a) for a in greedy])
    theirs = time_us([partial(torch.max, a[0], -1) for a in greedy])
    yield record("sampler, 64 x 129,280, greedy", ours, "torch.max", theirs)


def top_k() -> Iterator[Record]:
    cases = ((64, 131072, torch.bfloat16, 8), (64, VOCAB, torch.float32, 6), (1, 131072, torch.bfloat16, 4))
    for rows, width, dtype, target in cases:
        scores = [random(rows, width, dtype=dtype) for _ in range(SETS)]
        ours = time_us([partial(ops.top_k_positions, s, 512) for s in scores])
        theirs = time_us([partial(torch.topk, s, 512) for s in scores])
        name = f"top-k 512 of {rows} x {width:,} {str(dtype).removeprefix('torch.')}"
        yield record(name, ours, "torch.topk", theirs, 1 / target)


# ------------------------------------------------------------------ bound by memory


Case = tuple[str, str, int, Callable[[], tuple[Any, ...]]]  # name, operation, bytes at least moved, arguments' maker
Cases = Callable[[int], Iterator[Case]]


def streaming_cases(tokens: int) -> Iterator[Case]:
    row = tokens * DIM * 2
    fn, scale, base = (
        random(24, HC * DIM, dtype=torch.float32),
        random(3, dtype=torch.float32),
        random(24, dtype=torch.float32),
    )
    norm, gate_weight = random(DIM), random(HC, DIM, dtype=torch.float32)

    def mixes() -> tuple[Tensor, Tensor]:
        return torch.rand(tokens, HC, device="cuda"), torch.rand(tokens, HC, HC, device="cuda")

    coefficients = (fn, scale, base, norm, 20, 1e-6, 1e-20)

    def post_pre() -> tuple[Any, ...]:
        post, comb = mixes()
        return random(tokens, HC, DIM), random(tokens, DIM), post, comb, post, *coefficients

    cache = torch.zeros(tokens // 128, 128, 528, dtype=torch.uint8, device="cuda")
    latents = torch.zeros(tokens // 128, 128, 288, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(tokens, device="cuda")
    yield "RMSNorm", "rms_norm", 2 * row, lambda: (random(tokens, DIM), norm, 1e-20)
    yield "SwiGLU", "swiglu", 3 * tokens * INNER * 2, lambda: (random(tokens, 2 * INNER), 10.0)
    yield "cast to FP8 and back", "round_fp8", 2 * row, lambda: (random(tokens, DIM),)
    angles = random(tokens, 32, dtype=torch.float32)
    yield "RoPE, 64 heads", "rope", 4 * tokens * 64 * 512, lambda: (random(tokens, 64, 512), angles, angles, False)
    yield "mHC post", "hc_post", 9 * row, lambda: (random(tokens, HC, DIM), random(tokens, DIM), *mixes())
    yield "mHC pre", "hc_pre", 5 * row, lambda: (random(tokens, HC, DIM), mixes()[0], *coefficients)
    yield "mHC post + pre", "hc_post_pre", 10 * row, post_pre
    yield (
        "Engram gate", "engram_gate", 13 * row,
        lambda: (random(tokens, HC, DIM), random(tokens, (HC + 1) * DIM), gate_weight, None, 1e-20),
    )  # fmt: skip
    rows, heads = 1 << 21, 24  # of 256 values as Engram's tables have them
    table = torch.randint(0, 126, (1, rows, 264), dtype=torch.uint8, device="cuda")
    yield (
        "Engram gather", "load_rows", tokens * heads * (264 + 512),
        lambda: (table, torch.randint(rows, (tokens, heads), device="cuda"), RowFormat.FP8, 256, torch.bfloat16),
    )  # fmt: skip
    yield (
        "MoE gate", "moe_gate", tokens * EXPERTS * 4,
        lambda: (random(tokens, EXPERTS, dtype=torch.float32), random(EXPERTS, dtype=torch.float32), ACTIVE, True, 1.5),
    )  # fmt: skip
    yield (
        "store FP8 rows", "store_rows", tokens * (1024 + 528),
        lambda: (cache, slots, random(tokens, 512), RowFormat.FP8),
    )  # fmt: skip
    yield (
        "store NVFP4 rows", "store_rows", tokens * (1024 + 288),
        lambda: (latents, slots, random(tokens, 512), RowFormat.NVFP4),
    )  # fmt: skip
    yield (
        "load FP8 rows", "load_rows", tokens * (1024 + 528),
        lambda: (cache, slots, RowFormat.FP8, 512, torch.bfloat16),
    )  # fmt: skip


def cast_cases(tokens: int) -> Iterator[Case]:
    """Casts with other scales, and behind the operation before them."""
    values = tokens * DIM
    norm, angles = random(DIM), random(tokens, 32, dtype=torch.float32)

    def cast(*arguments: Any) -> Callable[[], tuple[Any, ...]]:
        return lambda: (random(tokens, DIM), *arguments)

    yield "cast to FP8, a scale a token", "cast_groups", 3 * values, cast("e4m3", "float32", 1, DIM)
    yield "cast to FP8, a scale for 128 of a token", "cast_groups", 3 * values, cast("e4m3", "float32", 1, 128)
    yield "cast to FP8, UE8M0 for 32 of a token", "cast_groups", 3 * values, cast("e4m3", "ue8m0", 1, 32)
    yield "cast to FP8, a scale for 128 x 128", "cast_groups", 3 * values, cast("e4m3", "float32", 128, 128)
    yield "cast to FP8, a scale a channel", "cast_groups", 3 * values, cast("e4m3", "float32", tokens, 1)
    yield "cast to FP8, a scale for 128 tokens of a channel", "cast_groups", 3 * values, cast("e4m3", "float32", 128, 1)
    yield "cast to NVFP4", "cast_groups", 2 * values + values * 9 // 16, cast("e2m1", "e4m3", 1, 16)
    yield "cast to MXFP4", "cast_groups", 2 * values + values * 17 // 32, cast("e2m1", "ue8m0", 1, 32)
    codes = torch.randint(0, 126, (tokens, DIM), dtype=torch.uint8, device="cuda")
    scales = torch.rand(tokens, 1, device="cuda")
    yield (
        "back from FP8, a scale a token", "uncast_groups", 3 * values,
        lambda: (codes.clone(), scales, "e4m3", "float32", 1, DIM, torch.bfloat16),
    )  # fmt: skip
    yield "RMSNorm + cast to FP8", "norm_cast", 3 * values, lambda: (random(tokens, DIM), norm, 1e-20)
    yield "SwiGLU + cast to FP8", "swiglu_cast", 5 * tokens * INNER, lambda: (random(tokens, 2 * INNER), 10.0)
    yield (
        "RoPE, 64 heads + cast to FP8", "rope_cast", 3 * tokens * 64 * 512,
        lambda: (random(tokens, 64, 512), angles, angles, False),
    )  # fmt: skip


COMPILED = (
    "rms_norm", "swiglu", "round_fp8", "rope", "hc_post", "hc_pre", "hc_post_pre", "engram_gate", "moe_gate",
    "load_rows", "cast_groups", "uncast_groups", "norm_cast", "swiglu_cast", "rope_cast",
)  # fmt: skip


def streaming(with_compile: bool, tokens: int, cases: Cases = streaming_cases) -> Iterator[Record]:
    for name, operation, size, make in cases(tokens):
        arguments = [make() for _ in range(SETS)]
        ours = time_us([partial(OPERATIONS[operation], *a) for a in arguments])
        if not with_compile:
            yield measured(
                f"{name}, {tokens:,} tokens", part="4C", unit="TB/s", value=size / ours / 1e6, command=COMMAND,
                baseline_name="copy of the same bytes", baseline_value=copy_bandwidth(size) / 1e12, target=0.8,
            )  # fmt: skip
        elif operation in COMPILED:
            compiled = torch.compile(OPERATIONS[operation].reference, dynamic=False)
            theirs = time_us([partial(compiled, *a) for a in arguments])
            yield record(f"{name}, {tokens:,} tokens, beside torch.compile", ours, "torch.compile", theirs)
        del arguments


# ------------------------------------------------------------------ experts


def expert_weights() -> tuple[Tensor, ...]:
    """FP4 experts of one layer: random codes, and scales that keep the products near 1."""

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, device="cuda")

    def scales(rows: int, columns: int) -> Tensor:
        return torch.full((EXPERTS, rows, columns // 32), 120, dtype=torch.uint8, device="cuda")

    shapes = ((2 * INNER, DIM), (DIM, INNER))
    return tuple(make(*shape) for shape in shapes for make in (codes, scales))


def experts() -> Iterator[Record]:
    weights = expert_weights()
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    for tokens in (1, 16, 128, TOKENS):
        runs: list[Run] = []
        used = []
        for _ in range(SETS):
            chosen = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :ACTIVE].int().contiguous()
            gates = torch.rand(tokens, ACTIVE, device="cuda")
            used.append(len(chosen.unique()))
            runs.append(partial(ops.moe_experts_fp4, random(tokens, DIM), chosen, gates, *weights, 10.0, False))
        ours = time_us(runs)
        name = f"routed experts, FP4 weights, {tokens:,} tokens"
        if tokens < TOKENS:  # weights of the experts in use
            size = sum(used) / SETS * 3 * DIM * INNER * (1 / 2 + 1 / 32)
            yield measured(
                name, part="4B", unit="TB/s", value=size / ours / 1e6, command=COMMAND, baseline_name="copy",
                baseline_value=bandwidth / 1e12, target=0.8 if tokens == 128 else None,
            )  # fmt: skip
        else:
            flops = 6.0 * tokens * ACTIVE * DIM * INNER
            yield measured(
                name, part="4B", unit="TFLOP/s", value=flops / ours / 1e6, command=COMMAND,
                baseline_name="dense BF16 product", baseline_value=rate / 1e12, target=0.6,
            )  # fmt: skip


def record(
    name: str, ours: float, baseline_name: str | None = None, theirs: float | None = None, target: float | None = None
) -> Record:
    """Microseconds beside those of the baseline; target: at most this share of them."""
    return measured(
        name, part="4C", unit="us", value=ours, command=COMMAND, baseline_name=baseline_name, baseline_value=theirs,
        target=target, higher_is_better=False,
    )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Record]]] = {
    "sampler": sampler,
    "top_k": top_k,
    "streaming": partial(streaming, False, TOKENS),
    "streaming-8x": partial(streaming, False, 8 * TOKENS),
    "casts": partial(streaming, False, TOKENS, cast_cases),
    "compile": partial(streaming, True, TOKENS),
    "compile-casts": partial(streaming, True, TOKENS, cast_cases),
    "experts": experts,
}


def measure(groups: Sequence[str]) -> list[Record]:
    """Run the named groups and print every record. Raises ValueError without a GPU or for a name that is unknown."""
    if not torch.cuda.is_available():
        raise ValueError("the kernel benchmark needs a CUDA device")
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        raise ValueError(f"groups must be among {', '.join(GROUPS)}, got {', '.join(unknown)}")
    records = []
    for group in groups:
        for one in GROUPS[group]():
            beside = "" if one.ratio is None else f"  ({one.ratio:.3f} x {one.baseline_name})"
            print(f"{one.name}: {one.value:.2f} {one.unit}{beside}", flush=True)
            records.append(one)
    return records
