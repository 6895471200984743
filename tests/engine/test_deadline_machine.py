"""Deadlines among everything else: swapping, overlap, priorities, cancellations and questions about prompts, any order.

The engine's clock stands still but for the machine's own rule. A deadline that has passed ends its request in the very
next step, wherever it is: waiting, on the host, amid its prompt, with a token pending.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from deepinfer.engine import collect, engine, request_book
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import EngineMachine, Expected, make_engine, record, tokens
from tests.engine.toy_model import full_logits


class DeadlineMachine(EngineMachine):
    @initialize(
        block_size=st.sampled_from([1, 3]),
        num_blocks=st.integers(12, 40),
        max_num_seqs=st.integers(1, 6),
        chunk=st.sampled_from([2, 7, 64]),
        step_tokens=st.integers(4, 200),
        pool_rows=st.none() | st.integers(4, 30),
        zero_overhead_scheduling=st.booleans(),
    )
    def start(self, pool_rows: int | None, block_size: int, **options: Any) -> None:
        self.now = 1000.0
        self.patch = pytest.MonkeyPatch()
        clock = SimpleNamespace(monotonic=lambda: self.now, thread_time=time.thread_time)
        for module in (engine, collect, request_book):
            self.patch.setattr(module, "time", clock)
        if pool_rows is not None:
            options |= {"preemption_mode": "swap", "swap_memory_bytes": pool_rows * block_size * 8}
        self.engine = make_engine(block_size=block_size, **options)
        self.expected: dict[str, Expected] = {}
        self.got: dict[str, RequestOutput] = {}
        self.due: dict[str, float] = {}

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=40),
        max_tokens=st.integers(1, 30),
        n=st.sampled_from([1, 1, 2]),
        patience=st.none() | st.sampled_from([0.5, 1.0, 3.0, 20.0]),
        priority=st.integers(-1, 1),
        asked=st.sampled_from([None, None, 0, 2]),
    )
    def add_with_deadline(
        self, prompt: list[int], max_tokens: int, n: int, patience: float | None, priority: int, asked: int | None
    ) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, n=n, deadline_seconds=patience, priority=priority,
            prompt_logprobs=asked,
        )  # fmt: skip
        request_id = str(len(self.expected))
        prompt = prompt[: self.engine.max_model_len - 1]
        # Its end by a deadline looks like one by an abort.
        self.expected[request_id] = Expected(prompt, params, patience is not None)
        self.engine.add_request(request_id, prompt, params)
        if patience is not None:
            self.due[request_id] = self.now + patience

    @precondition(lambda self: self.due)
    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 15))
    def step(self, count: int) -> None:
        for _ in range(count):
            record(self.got, self.engine.step())
            self.engine.scheduler.check_integrity()
            late = {request_id for request_id, due in self.due.items() if due <= self.now}
            assert not late & self.engine.requests.keys(), "a request outlived its deadline"

    def teardown(self) -> None:
        try:
            super().teardown()
            for request_id, got in self.got.items():
                check_reasons(got, self.due.get(request_id))
                check_prompt(self.expected[request_id], got)
            swap = self.engine.scheduler.swap if hasattr(self, "engine") else None
            assert swap is None or swap.blocks.num_free == swap.blocks.num_blocks - 1
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()


def check_reasons(got: RequestOutput, due: float | None) -> None:
    finished = got.metrics.finished_time
    for completion in got.outputs:
        if completion.stop_reason == "deadline":
            assert completion.finish_reason == "abort" and due is not None and finished is not None and due <= finished


def check_prompt(request: Expected, got: RequestOutput) -> None:
    """Prompt log-probabilities are there exactly if they were asked for and completion 0 has a token."""
    prompt, asked = request.prompt, request.params.prompt_logprobs
    begun = any(completion.index == 0 and completion.token_ids for completion in got.outputs)
    assert (got.prompt_logprobs is not None) == (asked is not None and begun)
    for length, entry in enumerate((got.prompt_logprobs or [None])[1:], 1):
        expected = torch.log_softmax(torch.from_numpy(full_logits(prompt[:length])).double(), -1)
        assert entry is not None and entry.token_id == prompt[length] and len(entry.top) == asked
        assert entry.logprob == pytest.approx(float(expected[prompt[length]]), abs=1e-4)


TestDeadlineMachine = DeadlineMachine.TestCase
TestDeadlineMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
