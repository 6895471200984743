"""Engine kinds: a prefill engine hands sequences to a decode engine, and a completion engine prefills more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import load_engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.swap import copy_sequence
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import Expected, assert_idle, check_output, make_engine, record
from tests.engine.test_swap import v41
from tests.engine.toy_model import VOCAB_SIZE

BLOCK_SIZE = 4


def hand_over(source: Engine, target: Engine, taken: list[Sequence]) -> list[Sequence]:
    """Move sequences between engines in one process; returns those that the target has no room for yet."""
    left = []
    for seq in taken:
        there = target.add_prefilled(f"{seq.request_id}.{seq.index}", seq)
        if there is None:
            left.append(seq)
            continue
        copy_sequence(
            source.runner.cache_rows(), seq.block_table, seq.state_slot,
            target.runner.cache_rows(), there.block_table, there.state_slot,
        )  # fmt: skip
        source.scheduler.release_taken(seq)
    return left


def run_pair(source: Engine, target: Engine, requests: list[Expected]) -> dict[str, RequestOutput]:
    """All requests through both engines; the outputs of a sequence joined, by "request.index"."""
    got: dict[str, RequestOutput] = {}

    def collect(outputs: list[RequestOutput], of_target: bool) -> None:
        for output in outputs:
            assert output.error is None, output.error
            for completion in output.outputs:
                name = output.request_id if of_target else f"{output.request_id}.{completion.index}"
                part = RequestOutput(name, [], [completion], completion.finish_reason is not None, output.metrics)
                record(got, [part])

    for number, request in enumerate(requests):
        source.add_request(str(number), request.prompt, request.params)
    held: list[Sequence] = []
    steps = 0
    while source.has_unfinished_requests() or target.has_unfinished_requests() or held:
        collect(source.step(), False)
        held = hand_over(source, target, held + source.take_prefilled())
        collect(target.step(), True)
        source.scheduler.check_integrity()
        target.scheduler.check_integrity()
        steps += 1
        assert steps < 20_000, "the pair spins"
    return got


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), min_size=1, max_size=6),
    max_tokens=st.integers(1, 20),
    n=st.sampled_from([1, 1, 2]),
    chunk=st.sampled_from([3, 16]),
    overlap=st.booleans(),
    mode=st.sampled_from(["recompute", "swap"]),
    num_blocks=st.integers(15, 40),
)
def test_a_prefill_and_a_decode_engine_give_the_tokens_of_one_engine(
    prompts: list[list[int]], max_tokens: int, n: int, chunk: int, overlap: bool, mode: str, num_blocks: int
) -> None:
    """Also when the decode engine runs out of blocks and preempts what it was given."""
    options = {"zero_overhead_scheduling": overlap, "preemption_mode": mode, "swap_memory_bytes": 1 << 12}
    source = make_engine(BLOCK_SIZE, 24, 3, chunk, 32, kind="prefill", zero_overhead_scheduling=overlap)
    target = make_engine(BLOCK_SIZE, num_blocks, 4, chunk, 32, kind="decode", **options)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n)
    requests = [Expected(prompt, params) for prompt in prompts]
    got = run_pair(source, target, requests)
    assert got.keys() == {f"{number}.{index}" for number in range(len(prompts)) for index in range(n)}
    for name, output in got.items():
        one = SamplingParams(temperature=0, max_tokens=max_tokens)
        check_output(source, Expected(prompts[int(name.split(".")[0])], one), output)
    assert all(is_prefill for is_prefill, _ in source.runner.steps)  # type: ignore[attr-defined]
    assert_idle(source)
    assert_idle(target)


def test_the_real_model_goes_on_from_a_copied_cache() -> None:
    """A decode engine that never sees a prompt continues it: blocks, ring, carry and n-grams came along."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in (9, 40)]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)

    def engine(kind: str) -> Engine:
        config = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=40, max_num_seqs=4, dtype="fp64", kv_cache_dtype="fp8", kind=kind
        )
        return Engine(ModelRunner(v41(), config), config)

    alone: dict[str, RequestOutput] = {}
    both = engine("normal")
    for number, prompt in enumerate(prompts):
        both.add_request(str(number), prompt, params)
    while both.has_unfinished_requests():
        record(alone, both.step())
    got = run_pair(engine("prefill"), engine("decode"), [Expected(prompt, params) for prompt in prompts])
    for number in range(2):
        assert got[f"{number}.0"].outputs[0].token_ids == alone[str(number)].outputs[0].token_ids


def test_a_decode_engine_takes_no_prompts_and_no_id_twice() -> None:
    source = make_engine(BLOCK_SIZE, 24, 3, 16, 32, kind="prefill")
    target = make_engine(BLOCK_SIZE, 24, 3, 16, 32, kind="decode")
    with pytest.raises(ValueError, match="kind must not be decode"):
        target.add_request("a", [1], SamplingParams())
    source.add_request("a", [1, 2], SamplingParams(temperature=0, ignore_eos=True))
    while not (taken := source.take_prefilled()):
        source.step()
    assert target.add_prefilled("a", taken[0]) is not None
    with pytest.raises(ValueError, match="request_id 'a' is already in use"):
        target.add_prefilled("a", taken[0])
    source.scheduler.check_integrity()
    source.scheduler.release_taken(taken[0])
    assert_idle(source)


def test_a_full_decode_engine_says_so_and_changes_nothing() -> None:
    source = make_engine(BLOCK_SIZE, 24, 3, 64, 64, kind="prefill")
    target = make_engine(BLOCK_SIZE, 8, 3, 64, 64, kind="decode", watermark=0.0)
    for name in "ab":
        source.add_request(name, [1] * 18, SamplingParams(temperature=0, ignore_eos=True))
    source.step()
    first, second = source.take_prefilled()
    assert target.add_prefilled("a", first) is not None
    assert target.add_prefilled("b", second) is None
    assert "b" not in target.requests
    target.scheduler.check_integrity()


def test_what_was_preempted_comes_before_what_is_handed_over() -> None:
    """Otherwise a stream of new sequences would take every block that falls free."""
    source = make_engine(BLOCK_SIZE, 40, 3, 64, 64, kind="prefill")
    target = make_engine(BLOCK_SIZE, 12, 3, 64, 64, kind="decode", watermark=0.0)
    for name in "abc":
        source.add_request(name, [1] * 18, SamplingParams(temperature=0, ignore_eos=True, max_tokens=20))
    source.step()
    first, second, third = source.take_prefilled()
    assert not hand_over(source, target, [first, second])
    while not target.scheduler.waiting:
        target.step()
    while target.scheduler.waiting:
        assert target.add_prefilled("c", third) is None
        target.step()
    while target.add_prefilled("c", third) is None:
        target.step()
    target.scheduler.check_integrity()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_half_an_engine_is_not_loaded_where_requests_come_in(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"kind \(DEEPINFER_ENGINE_KIND\) must be normal or completion, got '{kind}'"):
        load_engine("nano", EngineConfig(kind=kind))


def test_a_completion_engine_prefills_four_times_before_it_decodes() -> None:
    shares = {}
    for kind in ("normal", "completion"):
        engine = make_engine(BLOCK_SIZE, 200, 20, 4, 4, kind=kind)
        for number in range(12):
            engine.add_request(str(number), [1] * 4, SamplingParams(temperature=0, ignore_eos=True, max_tokens=50))
        for _ in range(15):
            engine.step()
        shares[kind] = [is_prefill for is_prefill, _ in engine.runner.steps]  # type: ignore[attr-defined]
    assert shares["normal"] == [True, False] * 7 + [True]
    assert shares["completion"] == [True, True, True, True, False] * 2 + [True, True, True, True, False]
    assert make_engine(4, 20, 2, 4, 4, kind="completion").observer.collector.interval == 10_000


def test_kinds_decide_whether_steps_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = {kind: EngineConfig(kind=kind, device="cuda").overlaps_steps for kind in
               ("normal", "completion", "prefill", "decode")}  # fmt: skip
    assert overlap == {"normal": True, "completion": True, "prefill": False, "decode": False}
    assert not EngineConfig(kind="normal").overlaps_steps  # nothing to hide on a CPU
    monkeypatch.setenv("DEEPINFER_ENGINE_KIND", "completion")
    assert EngineConfig().kind == "completion"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "both", "kind must be one of normal, prefill, decode, completion, got 'both'"),
        ("preemption_mode", "drop", "preemption_mode must be one of recompute, swap, got 'drop'"),
        ("swap_memory_bytes", 0, "swap_memory_bytes must be an integer >= 1"),
        ("prefill_step_ms", 0, "prefill_step_ms must be a number > 0 and <= 1e.09, or null, got 0"),
        ("prefill_step_ms", float("nan"), "prefill_step_ms must be a number > 0"),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{field: value})  # type: ignore[arg-type]
