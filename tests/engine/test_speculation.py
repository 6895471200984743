"""With drafts, good or bad, the tokens, log-probabilities and finish reasons are those of decoding one by one."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.decode_curve import DecodeCurve
from deepinfer.engine.engine import Engine
from deepinfer.kernels.reference.speculation import NO_DRAFT
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.slot_tokens import SlotTokens
from tests.engine.test_engine_workloads import EOS, Expected, assert_idle, check_output, record
from tests.engine.test_overlap import Arrival, arrivals
from tests.engine.test_scheduler_kinds import run_pair
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner, full_logits, greedy_oracle

BLOCK_SIZE = 4


class TellTale:
    """A Drafter that has been told how texts go on, and tells the truth as often as `honesty` says.

    It checks that the device knows what it must: its text is that of a sequence, with nothing that was not accepted.
    """

    probabilities = None
    learns = True

    def __init__(self, num_drafts: int, num_slots: int, texts: list[list[int]], honesty: float, seed: int) -> None:
        self.num_drafts = num_drafts
        self.texts = texts
        self.honesty = honesty
        self.random = random.Random(seed)
        self.text: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.num_accepted = 0

    def expect(self, drafts: bool) -> None: ...

    def prefilled(self, inputs: ModelInputs) -> None:
        starts = inputs.query_start.tolist()
        for slot, begin, end in zip(inputs.state_slots.tolist(), starts, starts[1:], strict=False):
            start = int(inputs.positions[begin])
            self.text[slot] = self.text[slot][:start] + inputs.token_ids[begin:end].tolist()

    def resumed(self, slot: int, token_ids: array) -> None:
        self.text[slot] = token_ids.tolist()

    def chosen(self, state: SlotTokens, round: Round) -> None:
        for slot, row, accepted in zip(
            round.slots.tolist(), round.tokens.tolist(), round.accepted.tolist(), strict=True
        ):
            self.text[slot] += row[: accepted + 1]
            assert len(self.text[slot]) == int(state.lengths[slot]) <= round.longest
            assert self.text[slot][-1] == int(state.tokens[slot, 0])
            self.num_accepted += accepted

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        drafts = [self._drafts(self.text[slot]) for slot in round.slots.tolist()]
        return Drafts(torch.tensor(drafts), torch.tensor([[self.random.random()] for _ in drafts]))

    def _drafts(self, text: list[int]) -> list[int]:
        known = next((t[len(text) :] for t in self.texts if t[: len(text)] == text), [])
        drafts = []
        for token in (known + [0] * self.num_drafts)[: self.num_drafts]:
            is_true = self.random.random() < self.honesty
            drafts.append(token if is_true else self.random.randrange(VOCAB_SIZE))
        if self.random.random() < 0.3:
            cut = self.random.randrange(self.num_drafts)
            drafts[cut:] = [NO_DRAFT] * (self.num_drafts - cut)
        return drafts

    def survival(self, scores: np.ndarray) -> np.ndarray:
        return scores[:, :1] ** np.arange(1, self.num_drafts + 1)

    def learn(self, scores: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        assert (0 <= num_accepted).all() and (num_accepted <= num_verified).all()
        assert (1 <= num_verified).all() and (num_verified <= self.num_drafts).all()


@dataclass(frozen=True)
class Setting:
    num_drafts: int
    overlap: bool
    padded: bool
    swap: bool
    num_blocks: int  # one sequence takes 17 at most: preemption is common
    max_num_seqs: int
    chunk: int
    honesty: float
    seed: int


speculative_settings = st.builds(
    Setting,
    num_drafts=st.integers(1, 5),
    overlap=st.booleans(),
    padded=st.booleans(),
    swap=st.booleans(),
    num_blocks=st.integers(18, 40),
    max_num_seqs=st.integers(1, 6),
    chunk=st.sampled_from([1, 5, 16]),
    honesty=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)


def make_engine(setting: Setting, texts: list[list[int]] | None, curve: DecodeCurve | None = None) -> Engine:
    """Without `texts` there are no drafts. Without `curve` their verification costs nothing."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=setting.num_blocks,
        max_num_seqs=setting.max_num_seqs,
        prefill_chunk_size=setting.chunk,
        max_num_batched_tokens=40,
        preemption_mode="swap" if setting.swap else "recompute",
        swap_memory_bytes=40_000,
        zero_overhead_scheduling=setting.overlap,
        speculative_config=None if texts is None else {"method": "ngram", "num_speculative_tokens": setting.num_drafts},
    )
    room = 1 if texts is None else 1 + setting.num_drafts
    runner = ToyRunner(
        setting.num_blocks, BLOCK_SIZE, setting.max_num_seqs, room=room, padded=setting.padded and texts is not None
    )
    if texts is None:
        return Engine(runner, config, EOS)
    if curve is not None:
        runner.decode_curve = lambda: curve  # type: ignore[attr-defined]
    drafter = TellTale(setting.num_drafts, setting.max_num_seqs, texts, setting.honesty, setting.seed)
    return Engine(runner, config, EOS, drafter=drafter)


def run(
    engine: Engine, workload: list[Arrival], cancels: dict[int, list[str]] | None = None
) -> dict[str, RequestOutput]:
    got: dict[str, RequestOutput] = {}
    step = 0
    while step <= 30 or engine.has_unfinished_requests():
        for number, arrival in enumerate(workload):
            if arrival.step == step:
                engine.add_request(str(number), arrival.prompt, arrival.params)
        aborted = [engine.abort_request(request_id) for request_id in (cancels or {}).get(step, [])]
        record(got, [output for output in aborted if output is not None])
        record(got, engine.step())
        engine.scheduler.check_integrity()
        step += 1
        assert step < 5000, "the engine spins"
    assert_idle(engine)
    return got


def outcome(output: RequestOutput) -> list[tuple]:
    return [
        (c.index, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason)
        for c in sorted(output.outputs, key=lambda c: c.index)
    ]


def texts_of(workload: list[Arrival], outputs: dict[str, RequestOutput]) -> list[list[int]]:
    return [
        list(workload[int(number)].prompt) + completion.token_ids
        for number, output in outputs.items()
        for completion in output.outputs
    ]


@settings(max_examples=25, deadline=None)
@given(workload=st.lists(arrivals, min_size=1, max_size=6), setting=speculative_settings)
def test_outputs_are_those_without_drafts(workload: list[Arrival], setting: Setting) -> None:
    plain = run(make_engine(setting, None), workload)
    engine = make_engine(setting, texts_of(workload, plain))
    got = run(engine, workload)
    assert got.keys() == plain.keys() == {str(number) for number in range(len(workload))}
    for request_id, want in plain.items():
        assert outcome(got[request_id]) == outcome(want)


@settings(max_examples=15, deadline=None)
@given(
    workload=st.lists(arrivals, min_size=2, max_size=6),
    setting=speculative_settings,
    cancels=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=6),
)
def test_whoever_is_cancelled_disturbs_nobody(
    workload: list[Arrival], setting: Setting, cancels: list[tuple[int, int]]
) -> None:
    plain = run(make_engine(setting, None), workload)
    by_step: dict[int, list[str]] = {}
    for step, number in cancels:
        by_step.setdefault(step, []).append(str(number))
    got = run(make_engine(setting, texts_of(workload, plain)), workload, by_step)
    cancelled = {str(number) for _, number in cancels}
    for request_id, want in plain.items():
        for mine, theirs in zip(outcome(got[request_id]), outcome(want), strict=False):
            if mine[3] == "abort":
                assert request_id in cancelled and mine[1] == theirs[1][: len(mine[1])]
            else:
                assert mine == theirs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_drafts_that_are_always_right_are_all_accepted(num_drafts: int, overlap: bool) -> None:
    setting = Setting(num_drafts, overlap, False, False, 40, 2, 16, 1.0, 0)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    workload = [Arrival(0, [5, 9, 2], params)]
    plain = run(make_engine(setting, None), workload)
    engine = make_engine(setting, texts_of(workload, plain))
    engine.speculation.variable_length = False
    engine.speculation.drafter._drafts = lambda text: plain_drafts(engine, text)  # never cut short
    assert outcome(run(engine, workload)["0"]) == outcome(plain["0"])
    decode_steps = sum(not is_prefill for is_prefill, _ in engine.runner.steps)
    rounds = -(-59 // (1 + num_drafts))
    # With overlap the drafts of the first step are not trusted, and the last ones are planned with the longest text.
    assert rounds <= decode_steps <= rounds + (4 if overlap else 2)


def plain_drafts(engine: Engine, text: list[int]) -> list[int]:
    drafter = engine.speculation.drafter
    known = next(t[len(text) :] for t in drafter.texts if t[: len(text)] == text)
    return (known + [0] * drafter.num_drafts)[: drafter.num_drafts]


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_behind_the_token_that_ends_a_sequence_are_not_accepted(overlap: bool) -> None:
    """A stop token at every place of a round, all of whose drafts are what the target would have chosen."""
    num_drafts, prompt = 3, [5, 9, 2]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    text = greedy_oracle(prompt, params, EOS, 2048)[0]
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=40, max_num_seqs=2, zero_overhead_scheduling=overlap,
        speculative_config={"method": "ngram", "num_speculative_tokens": num_drafts, "variable_length": False},
    )  # fmt: skip
    for stop in range(1, 13):
        if text[stop] in text[:stop]:
            continue
        drafter = TellTale(num_drafts, 2, [prompt + text], 1.0, 0)
        engine = Engine(ToyRunner(40, BLOCK_SIZE, 2, room=1 + num_drafts), config, EOS, drafter=drafter)
        drafter._drafts = lambda text, engine=engine: plain_drafts(engine, text)  # type: ignore[method-assign]
        stopping = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[text[stop]])
        output = run(engine, [Arrival(0, prompt, stopping)])["0"].outputs[0]
        assert output.token_ids == text[: stop + 1]
        totals = engine.observer.stats.totals
        assert totals["accepted"] == sum(totals[f"accepted_at_{i}"] for i in range(num_drafts))
        if overlap:  # the first step knows of no drafts yet
            assert totals["accepted"] <= stop
        else:  # the first token comes with the prompt, then each round brings its drafts and one more
            rounds, rest = divmod(stop, 1 + num_drafts)
            assert totals["accepted"] == rounds * num_drafts + rest


def test_a_sequence_that_fails_disturbs_nobody() -> None:
    """The step behind its last one, launched before the host knew, finds it within `Round.longest` all the same."""
    bad_prompt, bad_length = [5, 9, 2] * 6, 24

    class Clairvoyant(TellTale):
        def _drafts(self, text: list[int]) -> list[int]:
            foreseen = list(text)
            for _ in range(self.num_drafts):  # where no token is possible, the first one is drawn
                foreseen.append(0 if len(foreseen) == bad_length else int(full_logits(foreseen).argmax()))
            return foreseen[len(text) :]

    engine = make_engine(Setting(3, True, False, False, 40, 2, 32, 1.0, 0), [])
    engine.speculation.drafter = Clairvoyant(3, 2, [], 1.0, 0)
    forward = engine.runner.run

    def run_badly(inputs: ModelInputs) -> torch.Tensor:
        logits = forward(inputs)
        logits[inputs.positions[inputs.logits_rows] == bad_length - 1] = -torch.inf
        return logits

    engine.runner.run = run_badly
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)  # the other one is never that long
    engine.add_request("bad", bad_prompt, params)
    engine.add_request("good", [4], params)
    got: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        record(got, engine.step())
    assert got["bad"].error == "the model returned logits that are not finite"
    before = greedy_oracle(bad_prompt, params, EOS, engine.max_model_len)[0][: bad_length - len(bad_prompt)]
    assert got["bad"].outputs[0].token_ids == before  # drafts in front of the bad row are tokens like any other
    assert got["good"].outputs[0].token_ids == greedy_oracle([4], params, EOS, engine.max_model_len)[0]
    assert_idle(engine)


def test_the_device_never_learns_what_was_not_accepted() -> None:
    """A negative control: a step that counts one draft too many changes the tokens."""
    setting = Setting(3, False, False, False, 40, 2, 16, 0.6, 0)
    workload = [Arrival(0, [5, 9, 2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))]
    plain = run(make_engine(setting, None), workload)
    engine = make_engine(setting, texts_of(workload, plain))
    chosen = engine.speculation.drafter.chosen

    def one_more(state: SlotTokens, round: Round) -> None:
        chosen(state, round)
        state.lengths[round.slots] += (round.accepted == 1).long()

    engine.speculation.drafter.chosen = one_more
    with pytest.raises(AssertionError):
        assert outcome(run(engine, workload)["0"]) == outcome(plain["0"])


@settings(max_examples=20, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), min_size=1, max_size=5),
    max_tokens=st.integers(1, 20),
    overlap=st.booleans(),
    mode=st.sampled_from(["recompute", "swap"]),
    num_blocks=st.integers(15, 40),
    honesty=st.sampled_from([0.0, 0.8]),
)
def test_a_decode_engine_drafts_for_what_it_is_given(
    prompts: list[list[int]], max_tokens: int, overlap: bool, mode: str, num_blocks: int, honesty: float
) -> None:
    """The device of the second engine learns the tokens of a sequence that was prefilled elsewhere."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    options = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 32, "zero_overhead_scheduling": overlap}
    source_config = EngineConfig(num_blocks=24, max_num_seqs=3, kind="prefill", **options)
    source = Engine(ToyRunner(24, BLOCK_SIZE, 3, room=5), source_config, EOS)
    options |= {"preemption_mode": mode, "swap_memory_bytes": 1 << 13}
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=4, kind="decode", **options)
    limit = min(source.max_model_len, (num_blocks - 1) * BLOCK_SIZE)
    texts = [prompt + greedy_oracle(prompt, params, EOS, limit)[0] for prompt in prompts]
    target = Engine(
        ToyRunner(num_blocks, BLOCK_SIZE, 4, room=5), config, EOS, drafter=TellTale(4, 4, texts, honesty, 1)
    )
    requests = [Expected(prompt, params) for prompt in prompts]
    for name, output in run_pair(source, target, requests).items():
        check_output(source, requests[int(name.split(".")[0])], output)
    assert_idle(source)
    assert_idle(target)
