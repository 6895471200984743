"""Shows that the two YoCo truncation modes of prefill, mask and compact, are one and the same model.

Level 1 (cheap, no weights): requests go through the real scheduler and the real step metadata. For every query of the
decoder layers it follows, through the window rings, which keys the query sees, and compares mask with compact: the
pivot (first visible key), every visible key of the window, and the number of visible compressed keys. Both must also
be the window [max(s, i - W + 1), i] of the definition, s being the first kept position.

Level 2: the model runs. Log-probabilities of the whole vocabulary, at the end of the prompt and after every token of a
given answer (teacher forcing), are compared element by element between mask and compact; the difference to truncation
off is reported as the approximation error.

Each process takes a share of the work. Exit code 0: all equal, 1: not equal, 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import resolve_model
from deepinfer.engine.runner import DTYPES, ModelRunner
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.decode_step import decode_metadata
from deepinfer.models.layers.rope import rope_frequencies
from deepinfer.models.layers.step import StepMetadata
from deepinfer.models.layers.yoco import decoder_half
from deepinfer.models.random_weights import random_weights
from deepinfer.models.registry import load_model
from deepinfer.params import SamplingParams

EXAMPLES = """examples:
  python examples/yoco/yoco_equiv.py --level 1
  python examples/yoco/yoco_equiv.py --level 2 --random-weights --processes 2
  python examples/yoco/yoco_equiv.py --level 2 --text README.md --prompt-lens 300,500
  torchrun --nproc-per-node 8 examples/yoco/yoco_equiv.py --level 2 --model CHECKPOINT --device cuda --dtype bf16
"""
# Largest |difference of two log-probabilities| that counts as equal. Kernels may sum in another order when a step has
# fewer rows, and below float64 that can tip the rounding of a cached value.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-2, "bf16": 0.5}
FIRST_TOKEN = 3  # ids below are control tokens


def run_requests(engine: Engine, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """All prompts at once, each followed by its given answer."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        engine.add_request(str(number), prompt, SamplingParams(golden_token_ids=answer, max_tokens=len(answer)))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                raise ValueError(output.error)


# ------------------------------------------------------------------ level 1


@dataclass(frozen=True)
class Query:
    """What one query of a decoder layer sees. A key is (sequence << 32) + position, -1 if nothing was written there."""

    window_keys: list[int]
    num_compressed: list[int]  # by compress ratio

    @property
    def pivot(self) -> int:
        return min(self.window_keys)


class MetadataRunner:
    """A runner without weights: a decoder layer's window ring holds keys' names in place of their values.

    Every token of sequence number n has id FIRST_TOKEN + n, so that the inputs say whose row is whose.
    """

    def __init__(self, config: ModelConfig, num_sequences: int, num_blocks: int, block_size: int) -> None:
        self.config = config
        self.vocab_size = FIRST_TOKEN + num_sequences
        self.max_model_len = config.max_position_embeddings
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.frequencies = {kind: rope_frequencies(config, kind) for kind in (False, True)}
        self.ring = torch.full(((num_sequences + 1) * config.ring_size,), -1)
        self.queries: dict[tuple[int, int], Query] = {}  # (sequence, position) ->

    def run(self, inputs: ModelInputs) -> Tensor:
        plan = StepMetadata.build if inputs.is_prefill else decode_metadata
        step = plan(inputs, self.config, self.frequencies, self.block_size, torch.float32)
        step = step if inputs.keep_from is None else decoder_half(step, self.config).step
        window, rows = step.window, step.inputs
        names = ((rows.token_ids - FIRST_TOKEN) << 32) + rows.positions
        if window.from_ring:
            self.ring[window.stored_slots] = names
            keys = self.ring
        else:
            keys = torch.cat((self.ring[window.previous_slots], names))
            self.ring[window.stored_slots] = names[window.stored_rows]
        compressed = torch.stack([plan.visible for plan in step.compression.values()], dim=1).tolist()
        for name, slots, counts in zip(names.tolist(), window.slots, compressed, strict=True):
            self.queries[name >> 32, name & 0xFFFFFFFF] = Query(keys[slots[slots >= 0]].tolist(), counts)
        return torch.zeros(len(inputs.logits_rows), self.vocab_size)


def trace_queries(config: ModelConfig, mode: str, case: tuple[list[int], int], args: Arguments) -> MetadataRunner:
    """Prompts of the given lengths, in chunks of the given size, then a few decode steps."""
    lengths, chunk_size = case
    num_blocks = 1 + sum(-(-(n + args.answer_len) // args.block_size) for n in lengths)
    runner = MetadataRunner(config, len(lengths), num_blocks, args.block_size)
    engine = Engine(runner, engine_config(args, mode, len(lengths), prefill_chunk_size=chunk_size))
    names = [FIRST_TOKEN + number for number in range(len(lengths))]
    prompts = [[name] * length for name, length in zip(names, lengths, strict=True)]
    run_requests(engine, prompts, [[name] * args.answer_len for name in names])
    return runner


def differences(config: ModelConfig, case: tuple[list[int], int], args: Arguments) -> tuple[int, list[str]]:
    """Number of queries compared, and what is wrong with them."""
    mask, compact = (trace_queries(config, mode, case, args).queries for mode in ("mask", "compact"))
    wrong = []
    num_kept = 0
    for sequence, length in enumerate(case[0]):
        keep_from = max(length - args.keep_tokens, 0)
        expected = range(keep_from, length + args.answer_len - 1)
        got = sorted(position for owner, position in compact if owner == sequence)
        if got != list(expected):
            wrong.append(f"prompt of {length}: compact ran {len(got)} positions, not those from {keep_from}")
        for position in expected:
            num_kept += 1
            first = max(keep_from if position < length else 0, position - config.sliding_window + 1)
            window = [(sequence << 32) + key for key in range(first, position + 1)]
            queries = [queries.get((sequence, position)) for queries in (mask, compact)]
            where = f"prompt of {length}, chunks of {case[1]}, query {position}"
            if None in queries or queries[0] != queries[1]:
                wrong.append(f"{where}: mask {describe(queries[0])}, compact {describe(queries[1])}")
            elif queries[0] is not None and queries[0].window_keys != window:
                wrong.append(f"{where}: pivot {queries[0].pivot & 0xFFFFFFFF}, expected {first}")
    return num_kept, wrong


def describe(query: Query | None) -> str:
    if query is None:
        return "did not run"
    stale = sum(key < 0 for key in query.window_keys)
    return f"sees {len(query.window_keys)} keys from {query.pivot & 0xFFFFFFFF if not stale else 'a stale slot'}"


def level_1(args: Arguments) -> Iterator[tuple[int, list[str]]]:
    """This process's share of the cases: every chunk size, over all prompts together and over each alone."""
    config = ModelConfig.from_file(resolve_model(args.model))
    batches = [args.prompt_lens, *([length] for length in args.prompt_lens)]
    for case in list(product(batches, args.chunk_sizes))[args.rank :: args.world_size]:
        yield differences(config, case, args)


def report_level_1(results: list[tuple[int, list[str]]]) -> bool:
    wrong = [line for _, lines in results for line in lines]
    for line in wrong[:10]:
        print(f"  {line}")
    queries = sum(count for count, _ in results)
    print(
        f"L1 {'FAIL' if wrong else 'PASS'}: {len(results)} batches, {queries} kept queries, "
        f"{len(wrong)} differences in pivots or visible keys"
    )
    return not wrong


# ------------------------------------------------------------------ level 2


class RecordingRunner(ModelRunner):
    """Keeps the log-probabilities of every row that is sampled, by request."""

    engine: Engine

    def __init__(self, model: DeepseekV41, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.logprobs: dict[str, list[Tensor]] = {}

    def run(self, inputs: ModelInputs) -> Tensor:
        logits = self.model.forward(inputs, self.caches)
        owner = torch.searchsorted(inputs.query_start[1:].long(), inputs.logits_rows, right=True)
        slots = inputs.state_slots[owner].tolist()
        requests = {s.state_slot: s.request_id for r in self.engine.requests.values() for s in r.sequences}
        for slot, row in zip(slots, logits.log_softmax(-1).cpu(), strict=True):
            self.logprobs.setdefault(requests[slot], []).append(row)
        return logits.float()


def answer_logprobs(
    model: DeepseekV41, mode: str, prompts: list[list[int]], answers: list[list[int]], args: Arguments
) -> list[Tensor]:
    """Log-probabilities [answer_len, vocab] of each prompt, on the CPU."""
    config = engine_config(args, mode, len(prompts), prefill_chunk_size=args.chunk_sizes[0])
    runner = RecordingRunner(model, config)
    runner.engine = Engine(runner, config)
    run_requests(runner.engine, prompts, answers)
    return [torch.stack(runner.logprobs[str(number)]) for number in range(len(prompts))]


@dataclass(frozen=True)
class Comparison:
    """One prompt. Differences are |log-probability - log-probability|, over all tokens and the whole vocabulary."""

    prompt_len: int
    num_values: int
    max_difference: float  # between mask and compact
    off_max: float  # between off and compact
    off_mean: float  # ... of the answer's own tokens
    off_kl: float  # mean KL(off || compact) in nats


def compare(answer: list[int], prompt: list[int], off: Tensor, mask: Tensor, compact: Tensor) -> Comparison:
    chosen = torch.tensor(answer).unsqueeze(1)
    return Comparison(
        prompt_len=len(prompt),
        num_values=compact.numel(),
        max_difference=float((mask - compact).abs().max()),
        off_max=float((off - compact).abs().max()),
        off_mean=float((off - compact).gather(1, chosen).abs().mean()),
        off_kl=float((off.exp() * (off - compact)).sum(1).mean()),
    )


def level_2(args: Arguments) -> Iterator[Comparison]:
    """This process's share of the prompts, batched together."""
    model = make_model(args)
    lengths = (args.prompt_lens * args.repeats)[args.rank :: args.world_size]
    pieces = list(token_pieces(args, model.vocab_size, lengths))
    if not pieces:
        return
    prompts, answers = [p[: -args.answer_len] for p in pieces], [p[-args.answer_len :] for p in pieces]
    off, mask, compact = (answer_logprobs(model, mode, prompts, answers, args) for mode in ("off", "mask", "compact"))
    for parts in zip(answers, prompts, off, mask, compact, strict=True):
        yield compare(*parts)


def make_model(args: Arguments) -> DeepseekV41:
    path, device = resolve_model(args.model), args.local_device
    if not args.random_weights:
        model = load_model(path, DTYPES[args.dtype], device)
        if not isinstance(model, DeepseekV41):
            raise ValueError(f"--model must be a deepseek_v41 checkpoint, got {args.model}")
        return model
    config = ModelConfig.from_file(path)
    weights = {name: w.to(device, DTYPES[args.dtype]) for name, w in random_weights(config, seed=0).items()}
    token_map = torch.arange(config.vocab_size) % max(config.engram_compressed_vocab_size, 1)
    return DeepseekV41(config, weights, token_map)


def token_pieces(args: Arguments, vocab_size: int, lengths: list[int]) -> Iterator[list[int]]:
    """Prompt and answer in one list, for each prompt length: consecutive pieces of the text, else random tokens."""
    generator = torch.Generator().manual_seed(args.rank)
    sizes = [length + args.answer_len for length in lengths]
    if args.text is None:
        yield from (torch.randint(FIRST_TOKEN, vocab_size, (n,), generator=generator).tolist() for n in sizes)
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model(args.model) / "tokenizer.json"))
    tokens = tokenizer.encode(args.text.read_text(), add_special_tokens=False).ids
    for n in sizes:
        if len(tokens) < n:
            raise ValueError(f"--text is {len(tokens)} tokens long, a prompt and its answer need {n}")
        start = int(torch.randint(len(tokens) - n + 1, (), generator=generator))
        yield tokens[start : start + n]


def report_level_2(results: list[Comparison], args: Arguments) -> bool:
    worst = max(result.max_difference for result in results)
    passed = all(result.max_difference <= args.tolerance for result in results)  # False for NaN
    for r in sorted(results, key=lambda r: r.prompt_len):
        print(
            f"  prompt of {r.prompt_len}: mask - compact {r.max_difference:.1e}; off - compact: "
            f"largest {r.off_max:.1e}, answer tokens {r.off_mean:.1e}, KL {r.off_kl:.1e} nats"
        )
    print(
        f"L2 {'PASS' if passed else 'FAIL'}: {len(results)} prompts, {sum(r.num_values for r in results)} "
        f"log-probabilities, largest difference {worst:.1e}, allowed {args.tolerance:.0e}"
    )
    return passed


# ------------------------------------------------------------------ arguments and processes


@dataclass
class Arguments:
    """The command line, and which process this is."""

    level: int
    model: str
    keep_tokens: int
    prompt_lens: list[int]
    chunk_sizes: list[int]
    answer_len: int
    processes: int
    repeats: int
    dtype: str
    kv_cache_dtype: str
    device: str
    tolerance: float
    random_weights: bool
    text: Path | None
    block_size: int = 128
    rank: int = field(default=0, init=False)
    world_size: int = field(default=1, init=False)

    @property
    def local_device(self) -> str:
        """One GPU a process."""
        return f"cuda:{self.rank % torch.cuda.device_count()}" if self.device == "cuda" else self.device


def engine_config(args: Arguments, mode: str, num_sequences: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=num_sequences,
        block_size=args.block_size,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.local_device if args.level == 2 else "cpu",
        yoco_prefill_truncation_mode=mode,
        yoco_prefill_keep_tokens=args.keep_tokens,
        **options,
    )


def run_level(args: Arguments) -> bool:
    """Run this process's share, gather all shares, report on process 0. True if everything is equal."""
    results: list[Any] = list(level_1(args) if args.level == 1 else level_2(args))
    if args.world_size > 1:
        shares: list[Any] = [None] * args.world_size
        dist.all_gather_object(shares, results)
        results = [result for share in shares for result in share]
    if args.rank:
        return True
    print(f"{args.model}, {args.world_size} process(es), keep {args.keep_tokens} tokens")
    return report_level_1(results) if args.level == 1 else report_level_2(results, args)


def run_process(rank: int, args: Arguments, rendezvous: str, passed: Any) -> None:
    """One of args.processes processes that this script started."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.processes)
    args.rank, args.world_size = rank, args.processes
    if not run_level(args):
        passed.value = 0
    dist.destroy_process_group()


def run_processes(args: Arguments) -> bool:
    """In this process, in those that torchrun started, or in args.processes new ones."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        return run_level(args)
    if args.processes == 1:
        return run_level(args)
    passed = mp.get_context("spawn").Value("i", 1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_process, (args, f"{folder}/rendezvous", passed), nprocs=args.processes)
    return bool(passed.value)


def parse_arguments(arguments: list[str]) -> Arguments:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--level", type=int, choices=(1, 2), default=1, help="1: what queries see; 2: log-probabilities (default 1)")
    add("--model", default="nano", help="nano or a checkpoint folder (default nano)")
    add("--keep-tokens", type=int, help="default: the smallest allowed, window + backtracking; less makes L1 fail")
    add("--prompt-lens", type=numbers, default="1,100,134,300,513", help="tokens of the prompts (default %(default)s)")
    add("--chunk-sizes", type=numbers, default="512,100,33", help="prefill chunks; L2 takes the first (%(default)s)")
    add("--answer-len", type=int, default=16, help="tokens after each prompt (default 16)")
    add("--processes", type=int, default=1, help="processes to start (default 1); torchrun's are used as they are")
    add("--repeats", type=int, default=1, help="L2: prompts of each length (default 1)")
    add("--dtype", choices=tuple(TOLERANCES), default="fp64", help="L2: arithmetic (default fp64)")
    add("--kv-cache-dtype", choices=("fp8", "bf16", "fp32", "fp64"), default="fp8", help="L2: caches (default fp8)")
    add("--device", default="cpu", help="L2: cpu or cuda, one GPU a process (default cpu)")
    add("--tolerance", type=float, help=f"L2: largest difference allowed (default by dtype: {TOLERANCES})")
    add("--random-weights", action="store_true", help="L2: only the config of --model is read")
    add("--text", type=Path, help="L2: prompts and answers are pieces of this text file (default: random tokens)")
    options = parser.parse_args(arguments)
    positive = (*options.prompt_lens, *options.chunk_sizes, options.answer_len, options.processes, options.repeats)
    if min(positive) < 1:
        parser.error("lengths, chunk sizes, --processes and --repeats must be at least 1")
    if options.keep_tokens is None:
        options.keep_tokens = ModelConfig.from_file(resolve_model(options.model)).ring_size
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.dtype]
    return Arguments(**vars(options))


def main(arguments: list[str] | None = None) -> int:
    try:
        args = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        return 0 if run_processes(args) else 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
