"""The votes of a data-parallel group, over ranks that only count their work."""

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.voting import MAX_PREFILLS_AT_A_POINT, Lockstep, StepKind
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.simulated_group import SimulatedGroup
from tests.engine.test_engine_workloads import EOS, Expected, assert_idle, check_output, record
from tests.engine.toy_model import ToyRunner

PREFILL, DECODE, IDLE = StepKind.PREFILL, StepKind.DECODE, StepKind.IDLE


@dataclass
class Rank:
    """`prompts` prefill steps and `tokens` decode steps to do; a prompt that cannot start wants to all the same."""

    prompts: int = 0
    tokens: int = 0
    can_start: bool = True
    arrivals: dict[int, int] = field(default_factory=dict)  # group step -> prompts that arrive

    def wants(self) -> bool:
        return self.prompts > 0

    def prefill(self) -> str | None:
        if not self.prompts or not self.can_start:
            return None
        self.prompts -= 1
        self.tokens += 1
        return "prompt"

    def decode(self) -> str | None:
        if not self.tokens:
            return None
        self.tokens -= 1
        return "token"


def run(
    ranks: list[Rank], num_steps: int, until_idle: bool = False, **intervals: int
) -> list[list[tuple[StepKind, str | None]]]:
    """The steps of every rank."""
    group = SimulatedGroup(len(ranks))

    def program(index: int) -> list[tuple[StepKind, str | None]]:
        rank = ranks[index]
        lockstep = Lockstep(group.rank(index), **intervals)
        steps = []
        for number in range(num_steps):
            rank.prompts += rank.arrivals.get(number, 0)
            steps.append(lockstep.next_step(rank.wants, rank.prefill, rank.decode))
            if until_idle and number > LAST_ARRIVAL and steps[-1][0] is IDLE:
                break
        return steps

    return group.run(program)


def kinds(steps: list[tuple[StepKind, str | None]]) -> list[StepKind]:
    return [kind for kind, _ in steps]


def test_an_all_point_every_70_decode_steps_and_an_any_point_every_100() -> None:
    """Both ranks get a prompt in decode step 1, and one of them another after the first point."""
    busy = Rank(tokens=1000, arrivals={1: 1})
    other = Rank(tokens=1000, arrivals={1: 1, 75: 1})
    steps = run([busy, other], 105)
    assert [i for i, kind in enumerate(kinds(steps[0])) if kind is PREFILL] == [70, 101]  # decode steps 70 and 100
    assert steps[0][101] == (PREFILL, None) and steps[1][101] == (PREFILL, "prompt")
    assert kinds(steps[0]) == kinds(steps[1])


def test_at_an_all_point_one_rank_alone_does_not_prefill() -> None:
    steps = run([Rank(tokens=300), Rank(tokens=300, arrivals={1: 1})], 100)
    assert kinds(steps[1]) == [DECODE] * 100


def test_the_second_vote_falls_back_to_decoding() -> None:
    """Every rank wants to prefill and none can: the group decodes on instead of voting for ever."""
    ranks = [Rank(prompts=1, tokens=250, can_start=False) for _ in range(3)]
    steps = run(ranks, 250)
    assert all(rank_steps == [(DECODE, "token")] * 250 for rank_steps in steps)


def test_an_empty_rank_does_not_spoil_the_prefill_of_another() -> None:
    ranks = [Rank(prompts=1, tokens=200), Rank(prompts=1, tokens=200, can_start=False)]
    steps = run(ranks, 2)
    assert steps == [[(PREFILL, "prompt"), (DECODE, "token")], [(PREFILL, None), (DECODE, "token")]]


def test_a_group_that_decodes_nothing_prefills_at_once_and_otherwise_is_idle() -> None:
    steps = run([Rank(), Rank(arrivals={5: 1})], 80)
    assert kinds(steps[0]) == [IDLE] * 5 + [PREFILL] + [DECODE] * 70 + [IDLE] * 4
    assert steps[0][6] == (DECODE, None) and steps[1][6] == (DECODE, "token")


def test_an_endless_stream_of_prompts_does_not_hold_up_decoding() -> None:
    ranks = [Rank(prompts=10_000, tokens=1), Rank(prompts=10_000, tokens=1)]
    steps = kinds(run(ranks, 150)[0])
    assert steps[:MAX_PREFILLS_AT_A_POINT] == [PREFILL] * MAX_PREFILLS_AT_A_POINT
    assert steps[MAX_PREFILLS_AT_A_POINT : MAX_PREFILLS_AT_A_POINT + 70] == [DECODE] * 70


def test_a_rank_that_does_not_vote_is_noticed() -> None:
    """What the other tests rely on: in a simulated group a deadlock is an error."""
    group = SimulatedGroup(2)
    group._all_voted = threading.Barrier(2, group._reduce, 0.05)
    with pytest.raises(threading.BrokenBarrierError):
        group.run(lambda index: group.rank(index).allreduce_min(0) if index else 0)


LAST_ARRIVAL = 20
rank_plans = st.builds(
    Rank,
    prompts=st.integers(0, 5),
    tokens=st.integers(0, 20),
    can_start=st.sampled_from([True, True, True, False]),
    arrivals=st.dictionaries(st.integers(0, LAST_ARRIVAL), st.integers(1, 4), max_size=3),
)


def check_progress(ranks: list[Rank], all_interval: int, any_interval: int) -> None:
    """Ranks agree on every step, everything that can be done is done, and steps without any work are few."""
    num_prompts = sum(rank.prompts + sum(rank.arrivals.values()) for rank in ranks)
    # At worst one rank works at a time, and each of its prompts waits for an ANY point.
    limit = LAST_ARRIVAL + num_prompts * (any_interval + 2) + sum(rank.tokens for rank in ranks) + any_interval
    steps = run(ranks, limit, until_idle=True, all_interval=all_interval, any_interval=any_interval)
    assert len({tuple(kinds(rank_steps)) for rank_steps in steps}) == 1
    assert steps[0][-1] == (IDLE, None), "the group spins"
    for rank in ranks:
        assert rank.tokens == 0
        assert rank.prompts == 0 or not rank.can_start
    idle = empty = 0
    for together in zip(*steps, strict=True):
        worked = any(batch is not None for _, batch in together)
        empty = 0 if worked or together[0][0] is IDLE else empty + 1
        assert empty < all_interval, "decoding nothing, and no point in sight"
        assert not (worked and together[0][0] is IDLE)
        idle += together[0][0] is IDLE
    assert idle <= LAST_ARRIVAL + 2


@settings(max_examples=40, deadline=None)
@given(st.lists(rank_plans, min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 12))
def test_ranks_agree_and_all_work_that_can_be_done_is_done(ranks: list[Rank], every: int, any_every: int) -> None:
    check_progress(ranks, every, any_every)


@settings(max_examples=3, deadline=None)
@given(st.lists(rank_plans, min_size=64, max_size=64))
def test_64_ranks(ranks: list[Rank]) -> None:
    check_progress(ranks, 7, 10)


@pytest.mark.parametrize("overlap", [False, True])
def test_engines_of_a_group_give_the_tokens_of_engines_alone(overlap: bool) -> None:
    """Four ranks with unequal loads, one of them with none; each steps until the group has been idle for a while."""
    group = SimulatedGroup(4)
    params = SamplingParams(temperature=0, max_tokens=30)

    def program(rank: int) -> tuple[Engine, dict[str, RequestOutput]]:
        config = EngineConfig(block_size=4, num_blocks=40, max_num_seqs=3, zero_overhead_scheduling=overlap)
        engine = Engine(ToyRunner(40, 4, 3), config, EOS, Lockstep(group.rank(rank), 5, 7))
        got: dict[str, RequestOutput] = {}
        for number in range(400):
            if number % 4 == 0 and number // 4 < 3 * rank:
                engine.add_request(str(number), [rank + 1] * (number + 5), params)
            record(got, engine.step())
            engine.scheduler.check_integrity()
        return engine, got

    for rank, (engine, got) in enumerate(group.run(program)):
        assert len(got) == 3 * rank
        for request_id, output in got.items():
            check_output(engine, Expected([rank + 1] * (int(request_id) + 5), params), output)
        assert_idle(engine)
