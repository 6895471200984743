"""Prompts have the lengths and prefixes that were asked for, and arrivals the distribution."""

import json
import math
import os.path
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from deepinfer.bench.serve_files import (
    SONNET_QUESTION,
    burstgpt_requests,
    custom_requests,
    sonnet_requests,
    spec_bench_requests,
)
from deepinfer.bench.serve_workload import (
    Request,
    arrival_times,
    load_tokenizer,
    ramp,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
    trace_requests,
    warm_up_requests,
    word_pool,
)

WORDS = word_pool(None)


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def num_words(request: Request) -> int:
    assert isinstance(request.prompt, str)
    return len(request.prompt.split())


def test_a_tokenizer_gives_prompts_of_exact_length() -> None:
    tokenizer = load_tokenizer("nano")
    words = word_pool(tokenizer)
    for length in (1, 17, 400):
        for request in random_requests(words, 20, length, 8, 0.0, draw()):
            assert len(tokenizer.encode(str(request.prompt), add_special_tokens=False).ids) == length


def test_a_bad_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(tmp_path), "no-such-thing"):
        with pytest.raises(ValueError, match="--tokenizer"):
            load_tokenizer(name)


def test_random_lengths() -> None:
    exact = random_requests(WORDS, 50, 30, 7, 0.0, draw())
    assert {(num_words(one), one.output_len) for one in exact} == {(30, 7)}
    varied = random_requests(WORDS, 2000, 20, 10, 0.5, draw())
    prompt_lens, output_lens = [num_words(one) for one in varied], [one.output_len for one in varied]
    assert set(prompt_lens) == set(range(10, 31)) and set(output_lens) == set(range(5, 16))
    assert np.mean(prompt_lens) == pytest.approx(20, abs=0.6)
    with pytest.raises(ValueError, match="--random-range-ratio"):
        random_requests(WORDS, 1, 20, 10, 1.0, draw())


def test_a_seed_decides_the_prompts() -> None:
    one, same, other = (random_requests(WORDS, 5, 40, 8, 0.3, draw(seed)) for seed in (1, 1, 2))
    assert one == same and not {request.prompt for request in one} & {request.prompt for request in other}


def test_shared_prefixes() -> None:
    requests = shared_prefix_requests(WORDS, 40, 4, 25, 10, 6, draw())
    prompts = [str(request.prompt).split() for request in requests]
    assert all(len(prompt) == 35 for prompt in prompts) and all(request.output_len == 6 for request in requests)
    prefixes = [tuple(prompt[:25]) for prompt in prompts]
    assert sorted(Counter(prefixes).values()) == [10, 10, 10, 10]
    assert len({tuple(prompt[25:]) for prompt in prompts}) == 40
    assert prefixes != sorted(prefixes, key=prefixes.index)  # not one group after the other


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    conversations = [
        [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": "answer " * (10 + number)}]
        for number in range(6)
    ]
    conversations += [[{"from": "human", "value": "alone"}], []]
    path.write_text(json.dumps([{"id": "x", "conversations": turns} for turns in conversations]))
    everything = sharegpt_requests(path, None, None, None, draw())
    assert {one.prompt for one in everything} == {f"question {number}" for number in range(6)}
    assert everything != sharegpt_requests(path, None, None, None, draw(1))
    tokenizer = load_tokenizer("nano")
    for one in sharegpt_requests(path, None, None, tokenizer, draw()):
        answer = "answer " * (10 + int(str(one.prompt)[-1]))
        assert one.output_len == len(tokenizer.encode(answer, add_special_tokens=False).ids)
    more = sharegpt_requests(path, 15, 9, None, draw())
    assert len(more) == 15 and more[:6] == more[6:12] and {one.output_len for one in more} == {9}
    for text in ("nonsense", "{}", "[]", '[{"conversations": [1, 2]}]'):
        path.write_text(text)
        with pytest.raises(ValueError, match="sharegpt.json"):
            sharegpt_requests(path, None, None, None, draw())


def write_trace(path: Path, *entries: dict) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return path


def test_trace(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "prompt": "later", "output_length": 5},
        {"timestamp": 1000, "input_length": 12, "output_length": 4},
        {"timestamp": 1500, "prompt_token_ids": [5, 6, 7], "output_length": 3},
    )
    first, second, third = trace_requests(path, None, WORDS, 0.001, 512, draw())
    assert (first.arrival, num_words(first), first.output_len) == (0, 12, 4)
    assert second == Request([5, 6, 7], 3, 0.5) and third == Request("later", 5, 2.0)
    assert [one.arrival for one in trace_requests(path, 2, WORDS, 0.01, 512, draw())] == [0, 5]


def test_hash_ids_of_a_trace_are_shared_blocks(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 30, "hash_ids": [7, 8, 9], "output_length": 1},
        {"timestamp": 1, "input_length": 35, "hash_ids": [7, 8, 4, 5], "output_length": 1},
        {"timestamp": 2, "input_length": 15, "hash_ids": [6, 8], "output_length": 1},
    )
    prompts = [str(one.prompt).split() for one in trace_requests(path, None, WORDS, 1, 10, draw())]
    assert [len(prompt) for prompt in prompts] == [30, 35, 15]
    assert len(os.path.commonprefix(prompts[:2])) in range(20, 23)  # chance may add a word or two
    assert prompts[2][10:] == prompts[0][10:15] and prompts[2][:10] != prompts[0][:10]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1: not JSON"),
        ("[1]", "line 1: must be an object"),
        ('{"timestamp": "noon", "output_length": 1}', "line 1: must be an object"),
        ('{"timestamp": 1, "prompt": "a"}', "line 1: 'output_length' is missing"),
        ('{"timestamp": 1, "output_length": 1}', "line 1: 'input_length' is missing"),
        ("", "holds no requests"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        trace_requests(path, None, WORDS, 1, 512, draw())


def gaps(rate: float, burstiness: float, count: int = 20_000) -> np.ndarray:
    times = arrival_times(count + 1, rate, burstiness, draw(3))
    assert len(times) == count + 1 and times[0] == 0 and times == sorted(times)
    return np.diff(times)


def test_poisson_arrivals() -> None:
    """Gaps pass a Kolmogorov-Smirnov test for the exponential, and are independent; counts have variance = mean."""
    rate = 5.0
    found = np.sort(gaps(rate, 1.0))
    steps = np.arange(1, len(found) + 1) / len(found)
    assert np.abs(steps - (1 - np.exp(-rate * found))).max() < 1.63 / math.sqrt(len(found))  # 1% level
    unsorted = gaps(rate, 1.0)
    assert abs(np.corrcoef(unsorted[:-1], unsorted[1:])[0, 1]) < 0.03
    counts = np.bincount(np.cumsum(unsorted).astype(int))[:-1]
    assert counts.mean() == pytest.approx(rate, rel=0.03) and counts.var() == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    found = gaps(10.0, burstiness)
    assert found.mean() == pytest.approx(0.1, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    skew = ((found - found.mean()) ** 3).mean() / found.std() ** 3
    assert skew == pytest.approx(2 / math.sqrt(burstiness), rel=0.15)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_the_rate_ramps_up(strategy: str) -> None:
    """Steady gaps are those of the rate at the time; random ones have its mean."""
    count = 4001
    rates = ramp(count, 10.0, 90.0, strategy)
    middle = 50.0 if strategy == "linear" else 30.0
    assert rates[0] == 10 and rates[-1] == pytest.approx(90, rel=0.01) and rates[2000] == pytest.approx(middle)
    assert np.diff(arrival_times(count, rates, math.inf, draw())) == pytest.approx(1 / rates)
    found = np.diff(arrival_times(count, rates, 1.0, draw()))
    for part in (slice(0, 1000), slice(3000, 4000)):
        assert found[part].mean() == pytest.approx((1 / rates[part]).mean(), rel=0.1)


def test_custom_file(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 5}\n\n{"prompt": "b"}\n')
    assert custom_requests(path, 3, None) == [Request("a", 5), Request("b", 256), Request("a", 5)]
    assert custom_requests(path, None, 9) == [Request("a", 9), Request("b", 9)]
    for bad in ('{"prompt": ""}', '{"output_tokens": 5}', '{"prompt": "a", "output_tokens": 0}', "[]", "{"):
        path.write_text('{"prompt": "a"}\n' + bad)
        with pytest.raises(ValueError, match=r"custom\.jsonl, line 2"):
            custom_requests(path, None, None)


def test_spec_bench_file(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    lines = [{"category": "math" if n % 2 else "qa", "turns": [f"question {n}", "and then?"]} for n in range(8)]
    write_trace(path, *lines)
    everything = spec_bench_requests(path, None, 30, None, draw())
    assert sorted(str(one.prompt) for one in everything) == [f"question {n}" for n in range(8)]
    assert {one.output_len for one in everything} == {30}
    assert everything != spec_bench_requests(path, None, 30, None, draw(1))
    some = spec_bench_requests(path, 6, 30, "math", draw())
    assert len(some) == 6 and {str(one.prompt) for one in some} == {f"question {n}" for n in (1, 3, 5, 7)}
    with pytest.raises(ValueError, match="--spec-bench-category must be one of math, qa, got 'x'"):
        spec_bench_requests(path, None, 30, "x", draw())
    write_trace(path, {"turns": ["a"]}, {"turns": []})
    with pytest.raises(ValueError, match=r"question\.jsonl, line 2: needs turns"):
        spec_bench_requests(path, None, 30, None, draw())


def test_sonnet_file(tmp_path: Path) -> None:
    path = tmp_path / "sonnet.txt"
    tokenizer = load_tokenizer("nano")
    poem = [f"line {number} " + "of the poem " * (1 + number % 5) + "\n" for number in range(60)]
    path.write_text("\n".join(poem))  # with empty lines between them
    requests = sonnet_requests(path, 12, 80, 200, 9, tokenizer, draw())
    prompts = [str(one.prompt) for one in requests]
    assert len(set(prompts)) == 12 and {one.output_len for one in requests} == {9}
    for prompt in prompts:
        lines = prompt.removeprefix(SONNET_QUESTION).splitlines(keepends=True)
        assert prompt.startswith(SONNET_QUESTION) and set(lines) <= set(poem)
        assert 150 < len(tokenizer.encode(prompt, add_special_tokens=False).ids) <= 200
    shared = os.path.commonprefix(prompts).removeprefix(SONNET_QUESTION)
    assert shared.startswith("".join(poem[:3])) and shared in "".join(poem)
    assert len(tokenizer.encode(SONNET_QUESTION + shared, add_special_tokens=False).ids) <= 80 + 15
    assert requests == sonnet_requests(path, 12, 80, 200, 9, tokenizer, draw())
    for prefix_len, input_len in ((200, 100), (5, 100), (95, 100)):
        with pytest.raises(ValueError, match="--sonnet-prefix-len"):
            sonnet_requests(path, 1, prefix_len, input_len, 9, tokenizer, draw())
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no lines"):
        sonnet_requests(path, 1, 80, 200, 9, tokenizer, draw())


def test_burstgpt_file(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,GPT-4,3,7,10,Conversation log\n6,GPT-4,4,0,4,Conversation log\n9,ChatGPT,2,1,3,API log\n"
    )
    found = burstgpt_requests(path, 3, WORDS, draw())
    assert [(len(str(one.prompt).split()), one.output_len) for one in found] == [(3, 7), (2, 1), (3, 7)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a BurstGPT file"):
        burstgpt_requests(path, None, WORDS, draw())


def test_constant_and_burst_arrivals() -> None:
    assert arrival_times(4, 10, math.inf, draw()) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert arrival_times(3, math.inf, 1.0, draw()) == [0, 0, 0]
    for rate, burstiness in ((0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.nan)):
        with pytest.raises(ValueError, match="--request-rate and --burstiness"):
            arrival_times(3, rate, burstiness, draw())


def test_warming_up_leaves_no_prefix_behind() -> None:
    requests = [*random_requests(WORDS, 3, 40, 6, 0.0, draw()), Request([1, 2, 3, 4], 2)]
    warm_ups = warm_up_requests(requests, 6)
    assert [len(one.prompt) for one in warm_ups] == [len(requests[number % 4].prompt) for number in range(6)]
    assert warm_ups[3] == Request([3, 4, 1, 2], 2)
    starts = {str(one.prompt)[:20] for one in requests}
    assert not starts & {str(one.prompt)[:20] for one in warm_ups}
    assert warm_up_requests(requests, 0) == []
