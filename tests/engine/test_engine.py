"""Requests from arrival to end: validation, stop conditions, fairness, failures, and seeds across batches."""

import math
import weakref

import numpy as np
import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import EOS, assert_idle, make_engine, record
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner, full_logits, greedy_oracle

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(autouse=True, params=["0", "1"], ids=["in turn", "overlapped"])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", request.param)


def run(engine: Engine) -> dict[str, RequestOutput]:
    got: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        record(got, engine.step())
    return got


@pytest.mark.parametrize(
    "prompt",
    [[], "text", b"ab", None, 5, [1.0], [True], ["1"], [-1], [VOCAB_SIZE], [2**70], [1, None], np.array([1, 2])],
)
def test_bad_prompt_names_the_field_and_changes_nothing(prompt: object) -> None:
    engine = make_engine(4, 20, 4, 16, 64)
    engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(ValueError, match="^prompt_token_ids") as error:
        engine.add_request("bad", prompt, GREEDY)
    assert "\n" not in str(error.value)
    got = run(engine)
    assert list(got) == ["good"]
    assert got["good"].outputs[0].token_ids == greedy_oracle([1, 2, 3], GREEDY, EOS, 76)[0]


def test_prompt_longer_than_the_context_or_the_cache() -> None:
    short_context = Engine(ToyRunner(100, 4, 4, max_model_len=50), EngineConfig(block_size=4, num_blocks=100))
    small_cache = make_engine(4, 11, 4, 16, 64)
    limited = Engine(ToyRunner(100, 4, 4), EngineConfig(block_size=4, num_blocks=100, max_model_len=30))
    for engine, longest in ((short_context, 49), (small_cache, 39), (limited, 29)):
        with pytest.raises(ValueError, match=f"prompt_token_ids has {longest + 1} tokens"):
            engine.add_request("bad", [1] * (longest + 1), GREEDY)
        engine.add_request("good", [1] * longest, GREEDY)
        completion = run(engine)["good"].outputs[0]
        assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_bad_parameters_and_ids() -> None:
    engine = make_engine(4, 20, 4, 16, 64)
    for bad in (
        {"stop_token_ids": [VOCAB_SIZE]},
        {"golden_token_ids": [0, VOCAB_SIZE]},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"allowed_token_ids": [VOCAB_SIZE]},
        {"bad_words_token_ids": [[1, VOCAB_SIZE]]},
        {"allowed_token_ids": [3, 4], "bad_words_token_ids": [[3]], "stop_token_ids": [4], "min_tokens": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            engine.add_request("bad", [1], SamplingParams(**bad))
    with pytest.raises(ValueError, match="sampling_params"):
        engine.add_request("bad", [1], {"temperature": 0})
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="request_id 'a'"):
        engine.add_request("a", [1], GREEDY)
    run(engine)
    assert_idle(engine)


def test_each_stop_condition() -> None:
    tokens = greedy_oracle([1, 2], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), set(), 2048)[0]
    stop = next(i for i in range(5, 40) if tokens[i] not in tokens[:i])
    engine = Engine(ToyRunner(40, 4, 4), EngineConfig(block_size=4, num_blocks=40), {tokens[stop]})

    def outcome(**params: object) -> tuple[int, str | None, int | str | None]:
        engine.add_request("r", [1, 2], SamplingParams(temperature=0, **params))
        completion = run(engine)["r"].outputs[0]
        return len(completion.token_ids), completion.finish_reason, completion.stop_reason

    assert outcome() == (stop + 1, "stop", None)
    assert outcome(stop_token_ids=[tokens[stop]]) == (stop + 1, "stop", tokens[stop])
    assert outcome(max_tokens=3) == (3, "length", None)
    assert outcome(max_tokens=stop + 1) == (stop + 1, "stop", None)  # both at once: it did end by itself
    assert outcome(ignore_eos=True, max_tokens=40) == (40, "length", None)
    assert outcome(ignore_eos=True) == (39 * 4 - 2, "length", None)
    assert outcome(min_tokens=stop + 2, max_tokens=stop + 5)[0] > stop + 1


def test_golden_tokens_are_scored_not_chosen() -> None:
    prompt, golden = [5, 6], [3, 9, 3, 0]  # 3 is an end-of-sequence token: it does not stop teacher forcing
    engine = make_engine(4, 20, 4, 16, 64)
    engine.add_request("r", prompt, SamplingParams(golden_token_ids=golden, logprobs=1))
    completion = run(engine)["r"].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (golden, "length")
    assert completion.logprobs is not None
    for i, entry in enumerate(completion.logprobs):
        logits = full_logits(prompt + golden[:i]).astype(np.float64)
        normaliser = math.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(logits[golden[i]] - normaliser, abs=1e-5)
        assert entry.top == [(int(logits.argmax()), pytest.approx(logits.max() - normaliser, abs=1e-5))]


def test_seeded_requests_are_the_same_alone_and_in_a_crowd_with_preemption() -> None:
    def sampled(i: int, n: int = 1) -> SamplingParams:
        choice = ({}, {"top_k": 5}, {"top_p": 0.8}, {"presence_penalty": 1.0})[i % 4]
        return SamplingParams(seed=1000 + i, max_tokens=30, ignore_eos=True, n=n, **choice)

    prompts = [[i, 2 * i, 7] * 4 for i in range(12)]
    alone = []
    for i, prompt in enumerate(prompts):
        engine = make_engine(4, 60, 8, 16, 64)
        engine.add_request("r", prompt, sampled(i))
        alone.append(run(engine)["r"].outputs[0].token_ids)
    assert len({tuple(tokens) for tokens in alone}) == 12
    crowd = make_engine(4, 24, 8, 7, 20)
    for i, prompt in enumerate(prompts):
        crowd.add_request(str(i), prompt, sampled(i))
    got = run(crowd)
    assert crowd.stats().num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in got.values()) == crowd.stats().num_preemptions
    assert [got[str(i)].outputs[0].token_ids for i in range(12)] == alone
    assert crowd.stats().num_prompt_tokens == sum(map(len, prompts))  # recomputation is not counted again


def test_completion_i_is_what_a_request_with_the_seed_plus_i_gives() -> None:
    def tokens(seed: int, n: int) -> list[list[int]]:
        engine = make_engine(4, 60, 8, 16, 64)
        engine.add_request("r", [4, 5, 6], SamplingParams(seed=seed, max_tokens=30, ignore_eos=True, n=n))
        completions = run(engine)["r"].outputs
        assert engine.stats().num_prompt_tokens == 3 * n
        return [c.token_ids for c in sorted(completions, key=lambda c: c.index)]

    together = tokens(70, n=3)
    assert together == [tokens(70 + i, n=1)[0] for i in range(3)]
    assert len(set(map(tuple, together))) == 3


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them() -> None:
    def texts(seed: int | None) -> list[list[int]]:
        config = EngineConfig(block_size=4, num_blocks=60, seed=seed)
        engine = Engine(ToyRunner(60, 4, 64), config)
        for i in range(4):
            engine.add_request(str(i), [1, 2], SamplingParams(max_tokens=20))
        return [got.outputs[0].token_ids for _, got in sorted(run(engine).items())]

    assert texts(1) == texts(1) != texts(2)
    assert EngineConfig().seed is None and texts(None) != texts(None)
    assert len(set(map(tuple, texts(1)))) == 4


def test_a_long_prompt_does_not_hold_up_decoding_and_chunks_respect_their_limits() -> None:
    engine = make_engine(8, 200, 4, chunk=10, step_tokens=25)
    engine.add_request("short", [1], GREEDY)
    engine.step()
    engine.add_request("long", [2] * 500, GREEDY)
    engine.add_request("long too", [3] * 500, GREEDY)
    engine.runner.steps.clear()
    run(engine)
    prefills = [tokens for is_prefill, tokens in engine.runner.steps if is_prefill]
    assert prefills[0] == 20 and max(prefills) <= 25
    first = [is_prefill for is_prefill, _ in engine.runner.steps][:38]
    assert first == [False, True] * 19  # the short request decodes after every chunk


def test_arrivals_without_end_starve_nobody() -> None:
    """One new request a step, more than the engine can serve: each is still started in order, and finishes."""
    engine = make_engine(4, 24, 3, 16, 16)
    got: dict[str, RequestOutput] = {}
    started = []
    for i in range(300):
        engine.add_request(str(i), [i % VOCAB_SIZE] * (1 + i % 30), GREEDY)
        record(got, engine.step())
        for request_id, request in engine.requests.items():
            if request.metrics.first_scheduled_time is not None and request_id not in started:
                started.append(request_id)
    assert started == [str(i) for i in range(len(started))]
    finished = [output for output in got.values() if output.finished]
    assert len(finished) > 20
    oldest_unfinished = min(int(request_id) for request_id in engine.requests)
    assert int(started[-1]) - oldest_unfinished <= 3 + engine.scheduler.num_preemptions


def test_preemption_takes_the_shortest_output() -> None:
    engine = make_engine(4, 9, 2, 64, 64)  # 8 blocks of 4 tokens
    engine.add_request("old", [1] * 4, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.add_request("new", [2] * 8, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    got = run(engine)
    assert (got["old"].metrics.num_preemptions, got["new"].metrics.num_preemptions > 0) == (0, True)


def test_a_failing_step_fails_its_requests_only() -> None:
    engine = make_engine(4, 40, 1, 16, 64)  # one sequence at a time: one request a step
    engine.runner.poison = 50
    engine.add_request("first", [1, 2], GREEDY)
    engine.add_request("bad", [1, 50], SamplingParams(temperature=0, max_tokens=5, n=2))
    engine.add_request("last", [1, 2], SamplingParams(temperature=0, max_tokens=3, logit_bias={50: -100}))
    got = run(engine)
    assert got["bad"].error == "RuntimeError: poisoned token" and got["bad"].finished
    assert [c.finish_reason for c in got["bad"].outputs] == ["error", "error"]
    assert got["last"].error is None and len(got["last"].outputs[0].token_ids) == 3
    assert_idle(engine)


class NotFiniteRunner(ToyRunner):
    """Overflows on sequences whose last token is 50."""

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        logits = super().run(inputs)
        logits[inputs.token_ids[inputs.logits_rows] == 50] = math.nan
        return logits


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    runner = NotFiniteRunner(40, 4, 4)
    engine = Engine(runner, EngineConfig(block_size=4, num_blocks=40, max_num_seqs=4), EOS)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias={50: -100}, logprobs=1)
    engine.add_request("good", [1, 2], params)
    engine.add_request("bad", [1, 50], params)
    got = run(engine)
    assert got["bad"].outputs[0].finish_reason == "error" and "not finite" in str(got["bad"].error)
    assert len(got["good"].outputs[0].token_ids) == 5
    assert_idle(engine)


def test_aborting_one_completion_of_several() -> None:
    engine = make_engine(4, 60, 4, 16, 64)
    engine.add_request("r", [1, 2, 3], SamplingParams(seed=5, max_tokens=10, n=3, ignore_eos=True))
    got: dict[str, RequestOutput] = {}
    for _ in range(4):
        record(got, engine.step())
    aborted = engine.abort_request("r", index=1)
    assert aborted is not None and not aborted.finished
    assert [(c.index, c.finish_reason) for c in aborted.outputs] == [(1, "abort")]
    assert engine.abort_request("r", index=1) is None and engine.abort_request("unknown") is None
    record(got, [aborted])
    while engine.has_unfinished_requests():
        record(got, engine.step())
    lengths = {c.index: (len(c.token_ids), c.finish_reason) for c in got["r"].outputs}
    assert lengths[0] == lengths[2] == (10, "length") and lengths[1][1] == "abort" and lengths[1][0] < 10
    assert_idle(engine)


def test_metrics_are_in_order() -> None:
    engine = make_engine(4, 60, 4, 2, 64)
    engine.add_request("r", [1] * 9, GREEDY)
    metrics = run(engine)["r"].metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(times) and len(set(times)) == 4
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (9, 20)


class BrokenEstimator:
    """A FLOP estimator with a bug: `Runner.flops` is the part of an observer that a model brings along."""

    def step(self, *arguments: object) -> None:
        raise ZeroDivisionError("no FLOPs")


@pytest.mark.parametrize("hook", ["flops", "before_step", "work_began", "work_ended"])
def test_a_failing_observer_is_logged_and_costs_no_request(
    hook: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ToyRunner(20, 4, 4)
    if hook == "flops":
        runner.flops = BrokenEstimator()
    engine = Engine(runner, EngineConfig(block_size=4, num_blocks=20), EOS)
    if hook != "flops":
        monkeypatch.setattr(engine.observer, hook, BrokenEstimator().step)
    engine.add_request("r", [1, 2, 3], GREEDY)
    got = run(engine)["r"]
    assert got.error is None
    assert got.outputs[0].token_ids == greedy_oracle([1, 2, 3], GREEDY, EOS, 76)[0]
    assert sum("an observer failed" in record.message for record in caplog.records) == 1


def test_an_overlapped_step_is_launched_before_the_tokens_of_the_last_one_are_read() -> None:
    engine = make_engine(4, 20, 4, 16, 64, zero_overhead_scheduling=True)
    engine.add_request("r", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    launched, news = [], []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        launched.append(len(engine.runner.steps))
        news.append(sum(len(c.token_ids) for output in outputs for c in output.outputs))
    # One prompt step and three decode steps; the fifth call only reads: the length limit is known before the token.
    assert launched == [1, 2, 3, 4, 4] and news == [0, 1, 1, 1, 1]


def test_a_step_in_flight_is_forgotten_when_nobody_is_left() -> None:
    """Its logits are freed at once, and an idle engine's next request does not read it."""
    engine = make_engine(4, 20, 4, 16, 64, zero_overhead_scheduling=True)
    logits: list[weakref.ref[torch.Tensor]] = []
    run_step = engine.runner.run

    def watched(inputs: ModelInputs) -> torch.Tensor:
        result = run_step(inputs)
        logits.append(weakref.ref(result))
        return result

    engine.runner.run = watched  # type: ignore[method-assign]
    engine.add_request("r", [1, 2, 3], GREEDY)
    for _ in range(3):
        engine.step()
    assert logits[-1]() is not None
    engine.abort_request("r")
    assert all(ref() is None for ref in logits)
    engine.add_request("next", [1, 2, 3], GREEDY)
    assert engine.step() == []
    assert run(engine)["next"].outputs[0].token_ids == greedy_oracle([1, 2, 3], GREEDY, EOS, 76)[0]
    assert_idle(engine)


def test_a_stop_token_costs_an_overlapped_engine_one_row_and_no_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    token_ids, reason, _ = greedy_oracle([1, 2, 3], params, {*range(0, VOCAB_SIZE, 4)}, 76)
    assert reason == "stop" and len(token_ids) < 30
    engine = make_engine(4, 20, 4, 16, 64, zero_overhead_scheduling=True)
    engine.eos_token_ids = {*range(0, VOCAB_SIZE, 4)}
    engine.add_request("r", [1, 2, 3], params)
    assert run(engine)["r"].outputs[0].token_ids == token_ids
    assert len(engine.runner.steps) == len(token_ids) + 1
    assert_idle(engine)
