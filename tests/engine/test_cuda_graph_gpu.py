"""CUDA graphs on a GPU: replays are the eager step bit for bit, and the engine's tokens do not change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.draft_graphs import DraftGraphs
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import resolve_model
from deepinfer.engine.runner import ModelRunner, compute_dtype
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.registry import Model, load_model
from deepinfer.params import SamplingParams
from deepinfer.sampling.sampler import DrawParameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# A product of padded rows may differ in its last bits, which FP8 and FP4 rows would turn into other codes.
EXACT = {"dtype": "fp32", "kv_cache_dtype": "fp32"}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode curves of tests are not those of the machine."""
    monkeypatch.setattr("deepinfer.engine.decode_curve.cache_dir", lambda: tmp_path)


@lru_cache
def loaded(dtype: torch.dtype, with_head: bool) -> Model:
    """All runners share the weights: loading takes longer than most tests."""
    return load_model(resolve_model("nano"), dtype, "cuda", None, with_head)


def nano(**options: object) -> ModelRunner:
    """A runner of few captured shapes."""
    config = EngineConfig(device="cuda", **{"max_model_len": 2048, **options})  # type: ignore[arg-type]
    speculative = config.speculative_config
    with_head = speculative is not None and speculative.method == "dspark"
    return ModelRunner(loaded(compute_dtype(config), with_head), config)


def cache_tensors(runner: ModelRunner) -> list[torch.Tensor]:
    """Block tensors and state without the null block and the null slot."""
    blocks = [*runner.caches.blocks.latents.values(), *runner.caches.blocks.index_keys.values()]
    return [tensor[1:] for tensor in (*blocks, runner.caches.state.storage)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_replay_is_the_eager_step_bit_for_bit(dtype: str) -> None:
    runner = nano(dtype=dtype, max_num_seqs=12, cuda_graphs=True)
    graphs = runner.graphs
    assert isinstance(graphs, DecodeGraphs) and graphs.cost.seconds > 0
    chosen = random.Random(0)
    for _ in range(2):
        for shape in graphs.shapes:
            padded = graphs.inputs[shape]
            graphs._write_context(padded, chosen.randint(1, 2000), runner.config.block_size, runner.num_blocks)
            padded.token_ids.copy_(torch.randint(3, runner.vocab_size, (shape.rows,)))
            num_rows = chosen.randint(shape.rows // 2 + 1, shape.rows)
            for part in (padded.token_ids, padded.positions, padded.state_slots, padded.block_tables):
                part[num_rows:] = 0
            padded.context_lens[num_rows:] = 1
            before = [tensor.clone() for tensor in cache_tensors(runner)]
            eager = runner.forward(padded)[:num_rows].clone()
            after = [tensor.clone() for tensor in cache_tensors(runner)]
            for tensor, old in zip(cache_tensors(runner), before, strict=True):
                tensor.copy_(old)
            assert torch.equal(graphs.run(padded)[:num_rows], eager)
            for tensor, new in zip(cache_tensors(runner), after, strict=True):
                assert torch.equal(tensor.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize("mode", ["off", "compact"])
def test_a_replayed_chunk_is_the_eager_chunk_bit_for_bit(mode: str) -> None:
    runner = nano(
        max_num_seqs=2, cuda_graphs=True, prefill_chunk_size=256, yoco_prefill_truncation_mode=mode,
        yoco_prefill_keep_tokens=200,
    )  # fmt: skip
    chunks = runner.prefill_graphs
    assert chunks is not None and chunks.cost.seconds > 0
    assert {shape.kept for shape in chunks.shapes} == ({256} if mode == "off" else {0, 200})
    for shape in chunks.shapes:
        start = 0 if shape.is_first else shape.blocks * runner.config.block_size - 256
        inputs = chunks.inputs(shape)
        inputs.token_ids.copy_(torch.randint(3, runner.vocab_size, (256,)))
        inputs.positions.copy_(torch.arange(start, start + 256))
        inputs.context_lens.fill_(start + 256)
        inputs.state_slots.fill_(1)
        inputs.block_tables.copy_(torch.arange(1, shape.blocks + 1))
        if inputs.keep_from is not None:
            inputs.keep_from.fill_(start + 256 - shape.kept)
        before = [tensor.clone() for tensor in cache_tensors(runner)]
        eager = runner.forward(inputs).clone()
        after = [tensor.clone() for tensor in cache_tensors(runner)]
        for tensor, old in zip(cache_tensors(runner), before, strict=True):
            tensor.copy_(old)
        assert torch.equal(chunks.run(inputs, shape)[0], eager)
        for tensor, new in zip(cache_tensors(runner), after, strict=True):
            assert torch.equal(tensor.view(torch.uint8), new.view(torch.uint8))


def answers(runner: ModelRunner, seed: int, num_requests: int = 24) -> tuple[dict[str, list[int]], int]:
    """Tokens of a random workload with arrivals over time and cancellations, and the number of preemptions."""
    chosen = random.Random(seed)
    engine = Engine(runner, runner.config, runner.eos_token_ids)
    arrivals = sorted(chosen.randint(0, 40) for _ in range(num_requests))
    tokens: dict[str, list[int]] = {}
    step = 0
    while step <= arrivals[-1] or engine.has_unfinished_requests():
        for number, arrival in enumerate(arrivals):
            if arrival == step:
                prompt = [chosen.randint(3, runner.vocab_size - 1) for _ in range(chosen.randint(1, 300))]
                params = SamplingParams(temperature=0.0, max_tokens=chosen.randint(1, 60), ignore_eos=True)
                engine.add_request(str(number), prompt, params)
                tokens[str(number)] = []
            elif arrival + 10 == step and number % 7 == 0:
                engine.abort_request(str(number))
                tokens.pop(str(number), None)
        for output in engine.step():
            assert output.error is None, output.error
            for completion in output.outputs:
                if output.request_id in tokens:
                    tokens[output.request_id] += completion.token_ids
        engine.scheduler.check_integrity()
        step += 1
    return tokens, engine.stats().num_preemptions


def test_overlap_and_graphs_change_no_token() -> None:
    """All four combinations, with arrivals over time, cancellations and preemption."""
    options = {
        **EXACT, "block_size": 16, "max_num_seqs": 6, "num_blocks": 60,
        "prefill_chunk_size": 128, "max_num_batched_tokens": 128,  # so that many steps are one full chunk
    }  # fmt: skip
    got: dict[tuple[bool, bool], dict[str, list[int]]] = {}
    for graphs in (True, False):
        runner = nano(cuda_graphs=graphs, **options)
        for overlap in (True, False):
            runner.config = replace(runner.config, zero_overhead_scheduling=overlap)
            got[graphs, overlap], preemptions = answers(runner, 2, 10)
            assert preemptions > 0
    assert all(tokens == got[True, True] for tokens in got.values())


def with_head(draft_sample_method: str) -> ModelRunner:
    speculative = {"method": "dspark", "draft_sample_method": draft_sample_method, "variable_length": False}
    return nano(cuda_graphs=True, max_num_seqs=6, speculative_config=speculative, **EXACT)


def test_drafts_of_a_graph_are_those_that_are_launched_one_by_one() -> None:
    """Of every captured size, drawn, and what they were drawn from."""
    runner = with_head("probabilistic")
    engine = Engine(runner, runner.config, runner.eos_token_ids)
    drafter = engine.speculation.drafter
    graphs = drafter.run
    assert isinstance(graphs, DraftGraphs) and graphs.cost.seconds > 0 and graphs.sizes == [1, 2, 4, 6]
    assert engine.stats().cuda_graph_seconds > graphs.cost.seconds + runner.graphs.cost.seconds
    generator = torch.Generator(device="cuda").manual_seed(0)
    state = graphs.state
    for size in graphs.sizes:
        slots = torch.randperm(6, generator=generator, device="cuda")[:size] + 1
        state.tokens[slots, 0] = torch.randint(3, 5000, (size,), generator=generator, device="cuda")
        state.lengths[slots] = torch.randint(3, 40, (size,), generator=generator, device="cuda")
        shares = torch.rand(size, generator=generator, device="cuda", dtype=torch.float64)
        seeds = torch.randint(1 << 40, (size,), generator=generator, device="cuda")
        whole = torch.full_like(seeds, runner.vocab_size)
        drawing = DrawParameters(
            0.3 + shares, whole, 0, 1 - 0.3 * shares, 0.02 * shares, seeds, torch.zeros_like(seeds)
        )
        expected = drafter.draft_slots(state, slots, drawing)
        drawn_from = drafter.probabilities[slots].clone()
        drafter.probabilities.fill_(torch.nan)
        got = graphs(state, slots, drawing)
        assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.scores, expected.scores)
        assert torch.equal(drafter.probabilities[slots], drawn_from) and (drawn_from.sum(-1) > 0.99).all()
        few = drawing._replace(num_candidates=torch.full_like(seeds, 1), most_candidates=1)
        assert torch.equal(graphs(state, slots, few).tokens, drafter.draft_slots(state, slots).tokens)


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_the_second_runner_changes_no_greedy_token(draft_sample_method: str) -> None:
    expected, _ = answers(nano(cuda_graphs=True, max_num_seqs=6, **EXACT), 4, 12)
    assert answers(with_head(draft_sample_method), 4, 12)[0] == expected


def test_overlap_gives_the_same_bits() -> None:
    """Everything arrives at once, fits, and ends at a length limit: then both ways run the same batches."""
    runner = nano(max_num_seqs=12, cuda_graphs=True, prefill_chunk_size=128, max_num_batched_tokens=512)
    results = []
    for overlap in (False, True, True):
        engine = Engine(runner, replace(runner.config, zero_overhead_scheduling=overlap), runner.eos_token_ids)
        chosen = random.Random(1)
        for number in range(12):
            prompt = [chosen.randint(3, runner.vocab_size - 1) for _ in range(chosen.randint(1, 400))]
            temperature = chosen.choice([0.0, 1.0])
            limit = chosen.randint(1, 80)
            params = SamplingParams(
                temperature=temperature, seed=number, max_tokens=limit, ignore_eos=True, logprobs=2,
                presence_penalty=chosen.choice([0.0, 0.5]),
            )  # fmt: skip
            engine.add_request(str(number), prompt, params)
        got: dict[str, list[object]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None, output.error
                got.setdefault(output.request_id, []).extend(output.outputs[0].logprobs or [])
        assert engine.stats().num_preemptions == 0
        results.append(got)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_no_step_waits_for_the_device(mode: str) -> None:
    """Prefill, with and without truncation, and decoding outside a graph: PyTorch reports every wait as an error."""
    runner = nano(max_num_seqs=4, cuda_graphs=False, yoco_prefill_truncation_mode=mode, yoco_prefill_keep_tokens=200)
    engine = Engine(runner, runner.config, runner.eos_token_ids)
    for round_number in range(2):  # the first compiles kernels
        for number, length in enumerate((5, 300, 900)):
            prompt = [3 + (7 * i) % 5000 for i in range(length)]
            engine.add_request(f"{round_number}-{number}", prompt, SamplingParams(temperature=0.0, max_tokens=8))
        run = runner.run

        def watched(inputs: ModelInputs, run: object = run) -> torch.Tensor:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(inputs)  # type: ignore[operator]
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.run = watched if round_number else run  # type: ignore[method-assign]
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None, output.error


KINDS = [
    SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True),
    SamplingParams(seed=1, top_p=0.9, top_k=40, logprobs=3, max_tokens=140, ignore_eos=True),
    SamplingParams(
        seed=2, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.5, max_tokens=140, ignore_eos=True, n=2
    ),
    SamplingParams(seed=3, logit_bias={7: 2.0}, min_tokens=9, allowed_token_ids=[*range(3, 99)], max_tokens=140),
]


def launch_watched(engine: Engine) -> None:
    """Requests of all kinds, twice: the first compiles kernels, in the second PyTorch reports waits as errors.

    Only `read` may wait for the device.
    """
    launch_forward, launch_sampling = engine._launch_forward, engine._launch_sampling

    def watched(launch: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    assert engine.overlaps
    for round_number in range(2):
        if round_number:
            engine._launch_forward = watched(launch_forward)  # type: ignore[method-assign, assignment]
            engine._launch_sampling = watched(launch_sampling)  # type: ignore[method-assign, assignment]
        for number, params in enumerate(KINDS):
            prompt = [3 + (7 * i + number) % 50 for i in range(100 + 90 * number)]
            engine.add_request(f"{round_number}-{number}", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None, output.error


@pytest.mark.parametrize("graphs", [True, False])
def test_an_overlapped_step_is_launched_without_a_wait(graphs: bool) -> None:
    """All of it: scheduling, packing the inputs, the model, sampling of every kind, and preemption with swapping."""
    runner = nano(
        max_num_seqs=6, num_blocks=14, watermark=0.0, cuda_graphs=graphs, preemption_mode="swap",
        swap_memory_bytes=1 << 26, prefill_chunk_size=128, max_num_batched_tokens=128,
    )  # fmt: skip
    engine = Engine(runner, runner.config, runner.eos_token_ids)
    launch_watched(engine)
    swap = engine.scheduler.swap
    assert swap is not None and swap.num_swapped_out > 1


@pytest.mark.parametrize("speculative", [
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "dspark"},
    {"method": "dspark", "draft_sample_method": "probabilistic"},
], ids=lambda s: "-".join(map(str, s.values())))  # fmt: skip
def test_a_step_with_drafts_is_launched_without_a_wait(speculative: dict) -> None:
    runner = nano(max_num_seqs=6, cuda_graphs=True, speculative_config={**speculative, "variable_length": False})
    engine = Engine(runner, runner.config, runner.eos_token_ids)
    launch_watched(engine)
    assert engine.observer.stats.totals["draft_tokens"] > 100


def test_parts_of_a_decode_step_are_timed_inside_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_TIMERS", "1")
    runner = nano(max_num_seqs=4, cuda_graphs=True, **EXACT)
    expected, _ = answers(nano(max_num_seqs=4, cuda_graphs=False, **EXACT), 1)
    assert answers(runner, 1)[0] == expected
    torch.cuda.synchronize()
    times = runner.part_times()
    prefill = times.pop("prefill")
    assert prefill.count > 0 and prefill.median > 0
    assert set(times) == {"decode attention", "decode moe", "decode rest"}
    assert len({time.count for time in times.values()}) == 1
    whole = runner.decode_curve().step_ms(4)
    assert 0.5 * whole < sum(1e3 * time.median for time in times.values()) < 2 * whole


def test_a_step_that_looks_at_values_is_refused_by_its_line_and_the_engine_goes_on() -> None:
    def forward(inputs: ModelInputs) -> torch.Tensor:
        return inputs.token_ids * int(inputs.positions.sum())

    graphs = DecodeGraphs(forward, 4, 8, 3, "cuda")
    with pytest.raises(RuntimeError, match=r"rows=4, blocks=3.*cannot be captured: .*test_cuda_graph_gpu.py:\d+"):
        graphs.capture()
    assert not graphs.is_captured
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_the_decode_curve_is_there_after_start_up(tmp_path: Path) -> None:
    runner = nano(max_num_seqs=12, cuda_graphs=True)
    assert len(list(tmp_path.glob("decode-curve-*"))) == 1
    assert [size for size, _ in runner.decode_curve().points] == [1, 2, 4, 8, 12]
