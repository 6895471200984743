"""How much of a prompt a step takes: images stay whole, and a fitted cost keeps steps within their time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.chunking import (
    MAX_CHUNK,
    MIN_CHUNK,
    MIN_OBSERVATIONS,
    PrefillCost,
    StepBudget,
    chunk_size,
    image_spans,
)
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import Expected, check_output, make_engine, record

IMAGE = 9


@given(st.lists(st.sampled_from([IMAGE, IMAGE, 1, 2]), max_size=40))
def test_image_spans_are_the_runs_of_the_image_token(prompt: list[int]) -> None:
    spans = image_spans(prompt, IMAGE)
    covered = {position for first, after in spans for position in range(first, after)}
    assert covered == {position for position, token in enumerate(prompt) if token == IMAGE}
    assert all(after < first for (_, after), (first, _) in zip(spans, spans[1:], strict=False))
    assert image_spans(prompt, -1) == ()


@st.composite
def prompts_with_images(draw: st.DrawFn) -> list[int]:
    pieces = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=5))
    return [token for text, image in pieces for token in [1] * text + [IMAGE] * image] or [1]


@given(prompts_with_images(), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_chunks_cover_a_prompt_and_never_cut_an_image(
    prompt: list[int], limit: int, budget: int, is_first: bool
) -> None:
    spans = image_spans(prompt, IMAGE)
    limit, start = min(limit, budget), 0
    while start < len(prompt):
        count = chunk_size(start, len(prompt), limit, budget, spans, is_first)
        span = next(((first, after) for first, after in spans if first == start), None)
        if count == 0:  # only an image that is too large for this step waits, and never in a step of its own
            assert not is_first and span is not None and span[1] - span[0] > budget
            count = chunk_size(start, len(prompt), limit, budget, spans, True)
            assert count == span[1] - span[0]
        elif count > limit:
            assert span is not None and count == span[1] - span[0] and (is_first or count <= budget)
        start += count
        assert not any(first < start < after for first, after in spans)
    assert start == len(prompt)


def test_text_fills_the_chunk_and_an_image_starts_the_next() -> None:
    spans = ((10, 18),)
    assert chunk_size(0, 30, 8, 100, spans, True) == 8
    assert chunk_size(8, 30, 8, 100, spans, True) == 2  # up to the image
    assert chunk_size(10, 30, 4, 100, spans, False) == 8  # whole, although longer than a chunk
    assert chunk_size(10, 30, 4, 7, spans, False) == 0  # the step has no room for it
    assert chunk_size(10, 30, 4, 7, spans, True) == 8  # alone it may go over the budget
    assert chunk_size(18, 30, 100, 100, spans, True) == 12


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(prompts_with_images(), min_size=1, max_size=6),
    chunk=st.integers(1, 20),
    step_tokens=st.integers(1, 40),
    options=st.fixed_dictionaries(
        {"zero_overhead_scheduling": st.booleans(), "preemption_mode": st.sampled_from(["recompute", "swap"])}
    ),
)
def test_the_engine_never_stops_inside_an_image(
    prompts: list[list[int]], chunk: int, step_tokens: int, options: dict[str, object]
) -> None:
    """Also not when sequences are preempted and computed again; and the tokens are the oracle's."""
    longest = max(map(len, prompts)) + 12
    num_blocks = 2 + -(-longest // 4) * 2
    engine = make_engine(4, num_blocks, 3, chunk, step_tokens, swap_memory_bytes=1 << 12, **options)
    engine.runner.image_token_id = IMAGE  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    got: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        record(got, engine.step())
        for seq in engine.scheduler.prefilling:
            assert not any(
                first < seq.num_computed < after for first, after in image_spans(prompts[int(seq.request_id)], IMAGE)
            )
    for number, prompt in enumerate(prompts):
        check_output(engine, Expected(prompt, params), got[str(number)])


coefficients = st.tuples(st.floats(0, 20), st.floats(1e-3, 1), st.floats(0, 1e-4))


def observed(cost: tuple[float, float, float], seed: int, noise: float) -> PrefillCost:
    """Fitted to 40 steps of one to three sequences, whose times are off by up to `noise`."""
    base, per_token, per_pair = cost
    rng, fitted = random.Random(seed), PrefillCost()
    for _ in range(40):
        starts = [rng.randrange(0, 50_000) for _ in range(rng.randint(1, 3))]
        counts = [rng.randrange(1, 2000) for _ in starts]
        time = base + sum(per_token * q + per_pair * q * (c + q / 2) for c, q in zip(starts, counts, strict=True))
        fitted.observe(starts, counts, time * (1 + rng.uniform(-noise, noise)))
    return fitted


@given(coefficients, st.integers(0, 1000))
def test_the_cost_is_found_again(cost: tuple[float, float, float], seed: int) -> None:
    base, per_token, per_pair = cost
    fitted = observed(cost, seed, noise=0.0)
    for start, count in ((0, 500), (10_000, 2000), (50_000, 1)):
        want = per_token * count + per_pair * count * (start + count / 2)
        assert fitted.milliseconds(start, count) == pytest.approx(want, rel=1e-3, abs=1e-3)
    assert fitted.base == pytest.approx(base, rel=1e-2, abs=0.05)


@given(coefficients, st.integers(0, 1000))
def test_noise_moves_it_little(cost: tuple[float, float, float], seed: int) -> None:
    base, per_token, per_pair = cost
    fitted = observed(cost, seed, noise=0.05)
    want = base + per_token * 1000 + per_pair * 1000 * (20_000 + 500)
    assert fitted.base + fitted.milliseconds(20_000, 1000) == pytest.approx(want, rel=0.1)
    assert min(fitted.base, fitted.per_token, fitted.per_pair) >= 0


@given(coefficients, st.integers(0, 100_000), st.floats(-5, 500))
def test_the_largest_chunk_uses_the_time_up(cost: tuple[float, float, float], start: int, milliseconds: float) -> None:
    fitted = PrefillCost()
    fitted.base, fitted.per_token, fitted.per_pair = cost
    chunk = fitted.largest_chunk(start, milliseconds)
    assert chunk == 0 or fitted.milliseconds(start, chunk) <= milliseconds * (1 + 1e-9)
    assert chunk == MAX_CHUNK or fitted.milliseconds(start, chunk + 1) > milliseconds * (1 - 1e-9)


@given(
    coefficients,
    st.floats(1, 200),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 4000)), min_size=1, max_size=6),
)
def test_a_step_keeps_to_its_time(
    cost: tuple[float, float, float], milliseconds: float, wanted: list[tuple[int, int]]
) -> None:
    fitted = PrefillCost()
    fitted.base, fitted.per_token, fitted.per_pair = cost
    fitted.num_observed = MIN_OBSERVATIONS
    budget, spent, taken = StepBudget(8192, 2048, fitted, milliseconds), fitted.base, []
    for start, length in wanted:
        count = budget.take(start, start + length, ())
        assert 0 <= count <= min(length, 2048)
        taken.append(count)
        spent += fitted.milliseconds(start, count)
    assert not taken or taken[0] > 0, "a step always takes something"
    assert spent <= milliseconds * (1 + 1e-6) or (taken[0] <= MIN_CHUNK and not any(taken[1:]))


def test_without_observations_only_tokens_count() -> None:
    assert StepBudget(100, 64, PrefillCost(), 0.001).take(0, 500, ()) == 64
    assert StepBudget(100, 64, observed((1.0, 0.1, 0.0), 0, 0.0), None).take(0, 500, ()) == 64


def test_an_engine_learns_its_cost_and_plans_with_it() -> None:
    """On the toy model, whose time is what it is: the fit exists after some steps, and the tokens do not change."""
    engine = make_engine(8, 200, 4, 64, 64, prefill_step_ms=1e-3)  # less than any step takes
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [[number + 1] * 300 for number in range(4)]
    got: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        record(got, engine.step())
    assert engine.scheduler.prefill_cost.is_known
    counts = [tokens for is_prefill, tokens in engine.runner.steps if is_prefill]  # type: ignore[attr-defined]
    assert max(counts[:MIN_OBSERVATIONS]) == 64 and max(counts[MIN_OBSERVATIONS:]) == MIN_CHUNK
    for number, prompt in enumerate(prompts):
        check_output(engine, Expected(prompt, params), got[str(number)])
