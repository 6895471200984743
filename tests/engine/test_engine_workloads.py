"""Random workloads: outputs equal the oracle, nothing leaks, nothing starves, whatever is preempted or cancelled."""

import random
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner, greedy_oracle

EOS = {3}
tokens = st.integers(0, VOCAB_SIZE - 1)


def make_engine(
    block_size: int, num_blocks: int, max_num_seqs: int, chunk: int, step_tokens: int, **options: object
) -> Engine:
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=step_tokens,
        **options,
    )
    return Engine(ToyRunner(num_blocks, block_size, max_num_seqs), config, EOS)


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert not engine.has_unfinished_requests() and not engine.scheduler.has_unfinished()
    engine.scheduler.check_integrity()


@dataclass
class Expected:
    prompt: list[int]
    params: SamplingParams
    aborted: bool = False


def check_output(engine: Engine, request: Expected, got: RequestOutput) -> None:
    output, reason, stop = greedy_oracle(request.prompt, request.params, EOS, engine.max_model_len)
    assert got.finished and len(got.outputs) == request.params.n
    for completion in got.outputs:
        if completion.finish_reason == "abort":
            assert request.aborted
            assert completion.token_ids == output[: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (output, reason, stop)


def steps_alone(engine: Engine, request: Expected) -> int:
    """Most steps that a request takes alone. Ten times that for all of them allows for recomputing, not for a spin."""
    tokens = request.params.max_tokens or engine.max_model_len - len(request.prompt)
    chunk = min(engine.config.prefill_chunk_size, engine.config.max_num_batched_tokens)
    return request.params.n * (-(-len(request.prompt) // chunk) + tokens)


def record(got: dict[str, RequestOutput], outputs: list[RequestOutput]) -> None:
    for output in outputs:
        assert output.request_id not in got or not got[output.request_id].finished
        if output.request_id in got:
            got[output.request_id].merge(output)
        else:
            got[output.request_id] = output


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, cancellations and steps in any order; teardown runs what is left to the end."""

    @initialize(
        block_size=st.sampled_from([1, 3, 8]),
        num_blocks=st.integers(12, 40),
        max_num_seqs=st.integers(1, 6),
        chunk=st.sampled_from([1, 2, 7, 64, 512]),
        step_tokens=st.integers(4, 200),
        zero_overhead_scheduling=st.booleans(),
    )
    def start(self, **options: int) -> None:
        self.engine = make_engine(**options)
        self.expected: dict[str, Expected] = {}
        self.got: dict[str, RequestOutput] = {}

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=60),
        max_tokens=st.integers(0, 60).map(lambda tokens: tokens or None),  # rarely to the end of the context
        min_tokens=st.integers(0, 5),
        n=st.sampled_from([1, 1, 1, 3]),
        ignore_eos=st.booleans(),
        stop=st.lists(tokens, max_size=2),
    )
    def add(self, prompt: list[int], max_tokens: int | None, min_tokens: int, n: int, ignore_eos: bool, stop: list):
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or min_tokens),
            n=n,
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
        )
        prompt = prompt[: self.engine.max_model_len - 1]
        request_id = str(len(self.expected))
        self.expected[request_id] = Expected(prompt, params)
        self.engine.add_request(request_id, prompt, params)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.expected[request_id].aborted = True
        output = self.engine.abort_request(request_id)
        assert (output is None) == (request_id in self.got and self.got[request_id].finished)
        if output:
            record(self.got, [output])

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            record(self.got, self.engine.step())
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        limit = 10 * sum(steps_alone(self.engine, request) for request in self.expected.values()) + 10
        while self.engine.has_unfinished_requests():
            self.step(1)
            limit -= 1
            assert limit, "the engine spins"
        assert self.got.keys() == self.expected.keys()
        for request_id, request in self.expected.items():
            check_output(self.engine, request, self.got[request_id])
        assert_idle(self.engine)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@st.composite
def workloads(draw: st.DrawFn):
    lengths = st.integers(1, 24) | st.integers(1, 2000)
    requests = draw(
        st.lists(st.tuples(lengths, st.integers(1, 40), st.integers(0, 30), st.booleans()), min_size=1, max_size=12)
    )
    seed = draw(st.integers(0, 2**32))
    return requests, seed, draw(st.integers(1, 512)), draw(st.integers(1, 2048)), draw(st.integers(1, 6))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.sampled_from([16, 128]))
def test_mixed_lengths_with_a_cache_for_barely_one_sequence(workload, block_size: int) -> None:
    requests, seed, chunk, step_tokens, max_num_seqs = workload
    rng = random.Random(seed)
    longest = max(length + limit for length, limit, _, _ in requests)
    num_blocks = 2 + -(-longest // block_size)
    engine = make_engine(block_size, num_blocks, max_num_seqs, chunk, step_tokens)
    expected, got, arrivals, cancels = {}, {}, {}, {}
    for i, (length, limit, arrival, cancel) in enumerate(requests):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        expected[str(i)] = Expected(prompt, SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True), cancel)
        arrivals.setdefault(arrival, []).append(str(i))
        if cancel:
            cancels.setdefault(arrival + rng.randrange(40), []).append(str(i))
    limit = 40 + 10 * sum(steps_alone(engine, request) for request in expected.values())
    step = 0
    while step <= 30 or engine.has_unfinished_requests():
        for request_id in arrivals.get(step, []):
            engine.add_request(request_id, expected[request_id].prompt, expected[request_id].params)
        outputs = [engine.abort_request(request_id) for request_id in cancels.get(step, [])] + engine.step()
        for output in filter(None, outputs):
            got[output.request_id].merge(output) if output.request_id in got else got.update(
                {output.request_id: output}
            )
        step += 1
        assert step < limit, "the engine spins"
    for request_id, request in expected.items():
        check_output(engine, request, got[request_id])
    assert_idle(engine)
