"""Many consumers of one engine thread: same tokens, prompt cancellation, and nobody left waiting."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.async_engine import AsyncEngine
from deepinfer.engine.engine import Engine
from deepinfer.errors import EngineStoppedError
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import EOS, make_engine
from tests.engine.toy_model import ToyRunner, greedy_oracle

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def with_engine(test: Callable[[AsyncEngine], Coroutine[Any, Any, None]], engine: Engine | None = None) -> None:
    """Run a coroutine against a fresh engine; whatever happens, within 60 s."""
    async_engine = AsyncEngine(engine or make_engine(4, 60, 4, 16, 64))

    async def main() -> None:
        try:
            await asyncio.wait_for(test(async_engine), 60)
        finally:
            async_engine.close()

    asyncio.run(main())
    assert not async_engine._thread.is_alive()


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    joined: RequestOutput | None = None
    async for output in outputs:
        if joined is None:
            joined = output
        else:
            joined.merge(output)
    assert joined is not None and joined.finished
    return joined


async def until_idle(engine: AsyncEngine) -> None:
    while (stats := engine.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0.005)
    assert stats.num_free_blocks == stats.num_blocks


def test_many_consumers_get_the_tokens_of_the_oracle() -> None:
    async def test(engine: AsyncEngine) -> None:
        prompts = [[i % 60, (7 * i) % 60, 5] * (1 + i % 5) for i in range(40)]
        outputs = await asyncio.gather(*(collect(engine.generate(str(i), p, GREEDY)) for i, p in enumerate(prompts)))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == greedy_oracle(prompt, GREEDY, EOS, engine.max_model_len)[0]
        await until_idle(engine)

    with_engine(test)


def test_a_slow_consumer_gets_everything_in_fewer_outputs() -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = []
        async for output in engine.generate("slow", [1, 2], GREEDY):
            outputs.append(output)
            await asyncio.sleep(0.2)
        assert len(outputs) < 20 and outputs[-1].finished
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert tokens == greedy_oracle([1, 2], GREEDY, EOS, engine.max_model_len)[0]

    with_engine(test)


def test_every_way_of_leaving_aborts_the_request() -> None:
    async def test(engine: AsyncEngine) -> None:
        other = asyncio.create_task(collect(engine.generate("other", [9], ENDLESS)))

        async with aclosing(engine.generate("closed", [1], ENDLESS)) as outputs:
            async for _ in outputs:
                break
        async for _ in engine.generate("broken off", [1], ENDLESS):
            break

        async def consume() -> None:
            await collect(engine.generate("cancelled", [1], ENDLESS))

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        queued = [asyncio.create_task(collect(engine.generate(f"queued {i}", [1], ENDLESS))) for i in range(8)]
        await asyncio.sleep(0.01)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        assert (await other).outputs[0].finish_reason == "length"
        await until_idle(engine)

    slow = Engine(SlowRunner(1500, 4, 4), EngineConfig(block_size=4, num_blocks=1500, max_num_seqs=4), EOS)
    with_engine(test, slow)


class SlowRunner(ToyRunner):
    """Steps of a few milliseconds, so that requests are caught in the middle."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes, max_model_len=300)
        self.pause = threading.Event()

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        self.pause.wait(0.003)
        return super().run(inputs)


def test_abort_from_outside_ends_the_stream() -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine.generate("r", [1], ENDLESS)))
        await asyncio.sleep(0.03)
        engine.abort("r")
        engine.abort("unknown")
        assert (await task).outputs[0].finish_reason == "abort"
        await until_idle(engine)

    with_engine(test, Engine(SlowRunner(200, 4, 4), EngineConfig(block_size=4, num_blocks=200, max_num_seqs=4), EOS))


def test_bad_requests_are_refused_before_anything_runs() -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="prompt_token_ids"):
            engine.generate("r", [], GREEDY)
        with pytest.raises(ValueError, match="stop_token_ids"):
            engine.generate("r", [1], SamplingParams(stop_token_ids=[1000]))
        first = engine.generate("same", [1], ENDLESS)
        await anext(first)
        with pytest.raises(ValueError, match="request_id 'same'"):
            await collect(engine.generate("same", [1], GREEDY))
        await first.aclose()
        assert (await collect(engine.generate("same", [1], GREEDY))).finished

    with_engine(test, Engine(SlowRunner(200, 4, 4), EngineConfig(block_size=4, num_blocks=200, max_num_seqs=4), EOS))


def test_a_failing_step_is_an_error_for_its_requests_and_the_engine_goes_on() -> None:
    engine = make_engine(4, 60, 1, 16, 64)
    engine.runner.poison = 50
    mild = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={50: -100})

    async def test(async_engine: AsyncEngine) -> None:
        prompts = {"a": [1], "bad": [50], "b": [2]}
        outputs = await asyncio.gather(*(collect(async_engine.generate(i, p, mild)) for i, p in prompts.items()))
        assert [output.error for output in outputs] == [None, "RuntimeError: poisoned token", None]
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
        assert async_engine.is_running
        await until_idle(async_engine)

    with_engine(test, engine)


def test_closing_releases_every_consumer() -> None:
    async def test(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate(str(i), [1], ENDLESS))) for i in range(6)]
        await asyncio.sleep(0.02)
        engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineStoppedError) for result in results)
        with pytest.raises(EngineStoppedError, match="closed"):
            engine.generate("late", [1], GREEDY)

    with_engine(test, Engine(SlowRunner(200, 4, 4), EngineConfig(block_size=4, num_blocks=200, max_num_seqs=4), EOS))


def test_requests_queued_behind_a_close_are_released_also_under_one_id() -> None:
    runner = GatedRunner(200, 4, 4)

    async def test(engine: AsyncEngine) -> None:
        first = asyncio.create_task(collect(engine.generate("same", [1], ENDLESS)))
        while not runner.entered.is_set():
            await asyncio.sleep(0.001)
        closing = asyncio.get_running_loop().run_in_executor(None, engine.close)
        while engine._inbox.empty():
            await asyncio.sleep(0.001)
        late = [asyncio.create_task(collect(engine.generate(i, [1], ENDLESS))) for i in ("same", "same", "other")]
        pausing, given_up = (asyncio.create_task(engine.pause(True)) for _ in range(2))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.01)
        runner.gate.set()
        results = await asyncio.gather(first, *late, pausing, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStoppedError] * 5
        await closing

    with_engine(test, Engine(runner, EngineConfig(block_size=4, num_blocks=200, max_num_seqs=4), EOS))


class GatedRunner(ToyRunner):
    """Stays in its first step until `gate` is set."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.entered, self.gate = threading.Event(), threading.Event()

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        self.entered.set()
        self.gate.wait(30)
        return super().run(inputs)


def test_a_fault_of_the_engine_itself_hangs_nobody() -> None:
    engine = make_engine(4, 60, 2, 16, 64)

    async def test(async_engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(async_engine.generate(str(i), [1], ENDLESS))) for i in range(5)]
        await asyncio.sleep(0.01)
        engine.scheduler.slots = None  # corrupt it: the next admission or release raises
        results = await asyncio.gather(*tasks, return_exceptions=True)
        died = [result for result in results if isinstance(result, EngineStoppedError)]
        assert len(died) == 5 - sum(isinstance(result, RequestOutput) for result in results) >= 1
        assert not async_engine.is_running
        with pytest.raises(EngineStoppedError, match="died"):
            async_engine.generate("late", [1], GREEDY)

    with_engine(test, engine)
