"""Log-probabilities of prompt tokens against the naive reference, which computes each whole prompt anew, in float64."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine import chunking
from deepinfer.engine.engine import Engine
from deepinfer.engine.messages import Completion, Output, PromptPart, output_to_wire, prompt_to_wire
from deepinfer.engine.output_pool import RequestOutputPool
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sent_requests import SentRequests
from deepinfer.engine.swap import copy_sequence
from deepinfer.models import reference
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.outputs import RequestOutput, TokenLogprob
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner, full_logits

CONFIG = tiny_config(2, hc_sinkhorn_iters=3)
WEIGHTS = {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}
TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()
MODEL = DeepseekV41(CONFIG, dict(WEIGHTS), TOKEN_MAP)
KEEP = 17 + CONFIG.max_backtracking_tokens


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


REQUESTS = {  # id -> prompt, parameters: some ask, and those that do not are beside them in the same steps
    "long": (prompt_of(75), {"prompt_logprobs": 3}),
    "silent": (prompt_of(70), {}),
    "forced": (prompt_of(33), {"prompt_logprobs": 2, "force_topk": 40, "n": 2}),
    "one": (prompt_of(1), {"prompt_logprobs": 1}),
    "two": (prompt_of(2), {"prompt_logprobs": 0, "logprobs": 2}),
    "named": (prompt_of(40), {"prompt_logprobs": 20, "logprob_token_ids": (499, 7), "temperature": 1.0}),
}


def make_engine(**options: object) -> Engine:
    defaults = {
        "block_size": 4, "num_blocks": 200, "max_num_seqs": 5, "max_num_batched_tokens": 64, "prefill_chunk_size": 24,
        "kv_cache_dtype": "fp64", "dtype": "fp64", "seed": 1,
    }  # fmt: skip
    config = EngineConfig(**{**defaults, **options})
    return Engine(ModelRunner(MODEL, config), config, [CONFIG.eos_token_id])


def params_of(name: str, max_tokens: int = 12) -> SamplingParams:
    defaults = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "seed": 3}
    return SamplingParams(**{**defaults, **REQUESTS[name][1]})


def run(engine: Engine, names: list[str], every: int = 0) -> dict[str, RequestOutput]:
    """Merged outputs of requests that arrive `every` steps; prompt log-probabilities must come with the first token."""
    waiting, merged, step = names[:], {}, 0
    while waiting or engine.has_unfinished_requests():
        while waiting and step >= every * (len(names) - len(waiting)):
            engine.add_request(waiting[0], REQUESTS[waiting[0]][0], params_of(waiting[0]))
            waiting.pop(0)
        for output in engine.step():
            assert output.error is None, output.error
            first = merged.get(output.request_id)
            begun = first is not None and any(c.index == 0 and c.token_ids for c in first.outputs)
            begins = any(c.index == 0 and c.token_ids for c in output.outputs)
            asked = REQUESTS[output.request_id][1].get("prompt_logprobs") is not None
            assert (output.prompt_logprobs is not None) == (asked and begins and not begun)
            if first is None:
                merged[output.request_id] = output
            else:
                first.merge(output)
        engine.scheduler.check_integrity()
        step += 1
    return merged


def log_softmax(logits: torch.Tensor, force_topk: int | None) -> torch.Tensor:
    if force_topk is not None:
        least = logits.sort(-1, descending=True).values[..., force_topk - 1 : force_topk]
        logits = torch.where(logits >= least, logits, -torch.inf)
    return torch.log_softmax(logits, -1)


def check(name: str, output: RequestOutput) -> None:
    prompt, params = REQUESTS[name][0], params_of(name)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    logits = reference.forward(WEIGHTS, CONFIG, torch.tensor([prompt]), TOKEN_MAP)[0]
    expected = log_softmax(logits, params.force_topk)
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    for position, entry in enumerate(entries[1:]):
        row, token_id = expected[position], prompt[position + 1]
        assert entry is not None and entry.token_id == token_id
        assert entry.rank == int((logits[position] > logits[position, token_id]).sum()) + 1
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        best = row.sort(descending=True, stable=True).indices[: params.prompt_logprobs].tolist()
        assert [token for token, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx(row[best].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 1, "max_num_batched_tokens": 3},
        {"prefill_chunk_size": 512, "max_num_batched_tokens": 512},
        {"zero_overhead_scheduling": True, "prefill_chunk_size": 7},
        {"zero_overhead_scheduling": True, "cuda_graphs": True},
        {"speculative_config": {"method": "ngram"}},
        {"yoco_prefill_truncation_mode": "compact", "yoco_prefill_keep_tokens": KEEP},
        {"yoco_prefill_truncation_mode": "mask", "yoco_prefill_keep_tokens": KEEP, "prefill_chunk_size": 9},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_equal_the_full_reference(options: dict) -> None:
    for name, output in run(make_engine(**options), list(REQUESTS)).items():
        check(name, output)


@pytest.mark.parametrize(("mode", "overlap"), [("recompute", True), ("swap", False), ("swap", True)])
def test_preemption_amid_prompts_asks_no_token_twice(mode: str, overlap: bool) -> None:
    rng = random.Random(1)
    engine = make_engine(
        num_blocks=1 + rng.randint(24, 34), max_num_seqs=4, preemption_mode=mode, swap_memory_bytes=1 << 22,
        zero_overhead_scheduling=overlap, prefill_chunk_size=rng.randint(3, 20),
    )  # fmt: skip
    asked_before: list[int] = []  # positions of a sequence that were asked about when it was preempted

    def preempt_somebody() -> None:
        prefilling = [seq for seq in engine.scheduler.prefilling if seq.num_computed]
        if prefilling and len(asked_before) < 4 and rng.random() < 0.3:
            victim = rng.choice(prefilling)
            asked_before.append(victim.num_prompt_asked if victim.prompt_logprobs else 0)
            engine.scheduler._preempt(victim)

    engine.before_step = preempt_somebody  # type: ignore[method-assign]
    for name, output in run(engine, rng.sample(list(REQUESTS), len(REQUESTS)), every=rng.randint(0, 3)).items():
        check(name, output)
    assert len(asked_before) > 1 and max(asked_before) > 0


def test_whoever_asks_runs_all_layers_and_the_others_as_before() -> None:
    """YoCo truncation is off for a request that asks, alone: its tokens are those of the full model."""
    truncated = {"yoco_prefill_truncation_mode": "compact", "yoco_prefill_keep_tokens": KEEP}
    got = run(make_engine(**truncated), ["long", "silent"])
    full = run(make_engine(), ["long", "silent"])
    alone = run(make_engine(**truncated), ["silent"])
    assert got["long"].outputs[0].token_ids == full["long"].outputs[0].token_ids
    assert got["silent"].outputs[0].token_ids == alone["silent"].outputs[0].token_ids


def test_asking_changes_no_token() -> None:
    asked = run(make_engine(), ["long", "named"])
    for name in asked:
        engine = make_engine()
        params = SamplingParams(**{**vars_of(params_of(name)), "prompt_logprobs": None, "logprob_token_ids": None})
        engine.add_request(name, REQUESTS[name][0], params)
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += output.outputs[0].token_ids
        assert tokens == asked[name].outputs[0].token_ids


def vars_of(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in ("temperature", "max_tokens", "ignore_eos", "seed", "force_topk")}


def test_named_tokens_are_reported_in_their_order() -> None:
    output = run(make_engine(), ["named"])["named"]
    prompt, tokens = REQUESTS["named"][0], output.outputs[0].token_ids
    logits = reference.forward(WEIGHTS, CONFIG, torch.tensor([prompt + tokens]), TOKEN_MAP)[0, len(prompt) - 1 :]
    expected = torch.log_softmax(logits, -1)
    assert output.outputs[0].logprobs is not None and len(output.outputs[0].logprobs) == len(tokens) == 12
    for row, token_id, entry in zip(expected, tokens, output.outputs[0].logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == [499, 7]
        assert [value for _, value in entry.top] == pytest.approx(row[[499, 7]].tolist(), abs=1e-4)


def test_steps_hold_a_bounded_number_of_asked_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a row of logits, which for a large vocabulary is more than all else that the step needs."""
    monkeypatch.setattr(chunking, "ASKED_BYTES", 4 * VOCAB_SIZE * 16)
    runner = ToyRunner(200, 4, 8)
    rows: list[int] = []
    forward = runner.forward
    runner.forward = lambda inputs: (rows.append(len(inputs.logits_rows)), forward(inputs))[1]
    engine = Engine(runner, EngineConfig(block_size=4, num_blocks=200, max_num_seqs=8))
    for number in range(6):
        prompt = [(number + i) % VOCAB_SIZE for i in range(50)]
        asked = {"prompt_logprobs": 0} if number % 2 else {}
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=3, **asked))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.prompt_logprobs is not None:
                prompt = output.prompt_token_ids
                for length, entry in enumerate(output.prompt_logprobs[1:], 1):
                    expected = torch.log_softmax(torch.from_numpy(full_logits(prompt[:length])).double(), -1)
                    assert entry is not None and entry.logprob == pytest.approx(
                        float(expected[prompt[length]]), abs=1e-4
                    )
    assert 16 <= max(rows) <= 16 + 6  # beside the tokens that are drawn


def test_a_prefill_engine_reports_them_and_the_decode_engine_does_not_again() -> None:
    prefill, decode = make_engine(kind="prefill"), make_engine(kind="decode", num_blocks=24)
    prefill.add_request("long", REQUESTS["long"][0], params_of("long"))
    outputs: list[RequestOutput] = []
    taken = []
    while not taken:
        outputs += prefill.step()
        taken = prefill.take_prefilled()
    check("long", outputs[-1])
    here = decode.add_prefilled("long", taken[0])
    assert here is not None
    copy_sequence(
        prefill.runner.cache_rows(), taken[0].block_table, taken[0].state_slot,
        decode.runner.cache_rows(), here.block_table, here.state_slot,
    )  # fmt: skip
    prefill.scheduler.release_taken(taken[0])
    decode.scheduler._preempt(_decoding(decode))  # computed again, from the first token on
    while decode.has_unfinished_requests():
        for output in decode.step():
            assert output.error is None and output.prompt_logprobs is None


def _decoding(engine: Engine):
    engine.scheduler.running, engine.scheduler.prompted = engine.scheduler.prompted, []
    return engine.scheduler.running[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_they_travel_to_the_server_chunk_by_chunk(overlap: bool) -> None:
    """And leave pooled outputs. The one who waits gets them with the first token, all at once."""
    engine = make_engine(zero_overhead_scheduling=overlap, prefill_chunk_size=16)
    engine.outputs = RequestOutputPool(debug=True)
    requests, received, parts = SentRequests(), dict[str, list[RequestOutput]](), Counter[str]()
    for name in ("long", "forced", "silent", "two"):
        number = requests.add(name, REQUESTS[name][0], received.setdefault(name, []).append)
        engine.add_request(str(number), REQUESTS[name][0], params_of(name))
    while engine.has_unfinished_requests():
        for output in engine.step():
            requests.deliver(output_to_wire(output))
        for request_id, entries in engine.take_prompt_logprobs():
            assert len(entries) <= 2 * 16 + 1  # what one step found, or with overlap two
            requests.add_prompt_part(PromptPart(int(request_id), prompt_to_wire(entries)))
            parts[["long", "forced", "silent", "two"][int(request_id)]] += 1
    assert parts["long"] > 2 and parts["silent"] == 0
    for name, news in received.items():
        assert sum(output.prompt_logprobs is not None for output in news) == (name != "silent")
        whole = news[0]
        for output in news[1:]:
            whole.merge(output)
        check(name, whole)
    forced = received["forced"][0].prompt_logprobs
    assert any(entry is not None and entry.logprob == -math.inf for entry in forced or ())


def test_parts_of_a_request_that_is_gone_reach_nobody() -> None:
    requests, received = SentRequests(), list[RequestOutput | Exception]()
    number = requests.add("a", [5, 6], received.append)
    requests.forget(number)
    requests.add_prompt_part(PromptPart(number, [None, (-1.0, [], [], 2)]))
    again = requests.add("a", [5, 6], received.append)
    metrics = (0.0, None, None, None, 0)
    requests.deliver(Output(again, [Completion(0, [7])], True, metrics, None, [None, (-2.0, [4], [-1.0], 3)]))
    [output] = received
    assert isinstance(output, RequestOutput)
    assert output.prompt_logprobs == [None, TokenLogprob(6, -2.0, [(4, -1.0)], 3)]


def test_named_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="logprob_token_ids"):
        make_engine().add_request("x", [5], SamplingParams(logprob_token_ids=[CONFIG.vocab_size]))
