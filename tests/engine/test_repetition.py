"""Repetition detection against a look at the whole output after each token, with drafts and without."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.repetition import RepetitionDetector
from deepinfer.params import RepetitionDetection, SamplingParams
from tests.engine.test_speculation import TellTale
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner


def repeats(output: list[int], asked: dict[str, int]) -> bool:
    count = asked["min_count"]
    return any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count
        for size in range(asked["min_pattern_size"], asked["max_pattern_size"] + 1)
    )


settings_of_it = st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(2, 5)).map(
    lambda drawn: {"min_pattern_size": drawn[0], "max_pattern_size": drawn[0] + drawn[1], "min_count": drawn[2]}
)


@given(st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), max_size=60), settings_of_it)
def test_equals_a_look_at_the_whole_output(prompt: list[int], output: list[int], asked: dict[str, int]) -> None:
    detector, token_ids = RepetitionDetector(RepetitionDetection(**asked)), array("q", prompt)
    for length, token_id in enumerate(output, 1):
        token_ids.append(token_id)
        found = detector.repeats(token_ids, len(prompt))
        assert found == repeats(output[:length], asked)
        if found:
            return


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_ends_where_the_repetition_is_complete(drafts: bool, overlap: bool) -> None:
    """Few tokens are allowed, so that outputs repeat themselves."""
    asked = {"max_pattern_size": 3, "min_count": 3, "min_pattern_size": 1}
    ended = 0
    for seed in range(7):
        prompt = [random.Random(seed).randrange(VOCAB_SIZE)]
        outputs = []
        for detection in (None, asked):
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True, allowed_token_ids=[4, 7],
                repetition_detection=detection,
            )  # fmt: skip
            drafter = TellTale(4, 2, [prompt + tokens for tokens, _ in outputs], 1.0, 0) if drafts else None
            config = EngineConfig(block_size=4, num_blocks=40, max_num_seqs=2, zero_overhead_scheduling=overlap)
            engine = Engine(ToyRunner(40, 4, 2, room=5 if drafts else 1), config, drafter=drafter)
            engine.add_request("a", prompt, params)
            tokens: list[int] = []
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens += output.outputs[0].token_ids
                    last = output.outputs[0]
            outputs.append((tokens, (last.finish_reason, last.stop_reason)))
        (whole, _), (got, reason) = outputs
        end = next((n for n in range(1, len(whole) + 1) if repeats(whole[:n], asked)), None)
        assert got == whole[:end]
        assert reason == (("length", None) if end is None else ("stop", "repetition_detected"))
        ended += end is not None
    assert ended > 3
