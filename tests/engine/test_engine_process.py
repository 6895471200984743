"""An engine in a process of its own: same tokens, prompt cancellation, and whichever side dies, nobody hangs."""

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine import client as client_module
from deepinfer.engine.client import EngineClient
from deepinfer.engine.loading import load_engine
from deepinfer.errors import EngineStoppedError
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.checkpoints import write_tiny_checkpoint

CONFIG = EngineConfig(max_num_seqs=8, seed=0)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def client(checkpoint: Path) -> Iterator[EngineClient]:
    client = EngineClient(str(checkpoint), CONFIG)
    yield client
    client.close()
    assert not is_alive(client.pid)


def is_alive(pid: int) -> bool:
    """Also a zombie counts as alive: its parent has not waited for it."""
    return Path(f"/proc/{pid}").exists()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    joined: RequestOutput | None = None
    async for output in outputs:
        if joined is None:
            joined = output
        else:
            joined.merge(output)
    assert joined is not None and joined.finished
    return joined


async def tokens(client: EngineClient, request_id: str, prompt: list[int], params: SamplingParams) -> list[int]:
    return (await collect(client.generate(request_id, prompt, params))).outputs[0].token_ids


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def until_idle(client: EngineClient) -> None:
    await until(lambda: client.stats().num_running == client.stats().num_waiting == 0)
    assert client.stats().num_free_blocks == client.stats().num_blocks


async def freeze(pid: int) -> None:
    """Stop the process, and read what it has sent."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    await asyncio.sleep(0.05)


def test_the_same_outputs_as_without_a_process(client: EngineClient, checkpoint: Path) -> None:
    requests = [
        ([5, 6, 7], GREEDY),
        ([9] * 300, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)),
        ([8, 3], SamplingParams(seed=11, max_tokens=20, n=3, top_p=0.9, logprobs=0)),
        ([8, 3], SamplingParams(seed=11, max_tokens=20, logit_bias={7: 5.0, 9: -100.0}, presence_penalty=0.5)),
        ([4], SamplingParams(temperature=0, max_tokens=9, force_topk=2, logprobs=4, ignore_eos=True)),
        ([4, 4], SamplingParams(golden_token_ids=[50, 51, 52], logprobs=1)),
        ([4, 5], SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=list(range(256, 512)))),
    ]
    engine = load_engine(checkpoint, CONFIG)
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    expected: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id in expected:
                expected[output.request_id].merge(output)
            else:
                expected[output.request_id] = output

    async def test() -> None:
        answers = await asyncio.gather(*(collect(client.generate(str(i), *r)) for i, r in enumerate(requests)))
        for number, answer in enumerate(answers):
            wanted = expected[str(number)]
            assert answer.request_id == str(number) and answer.prompt_token_ids == requests[number][0]
            assert answer.finished and answer.error is None
            for got, want in zip(
                sorted(answer.outputs, key=lambda o: o.index),
                sorted(wanted.outputs, key=lambda o: o.index),
                strict=True,
            ):
                assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
                assert got.stop_reason == want.stop_reason
                assert (got.logprobs is None) == (want.logprobs is None)
                for a, b in zip(got.logprobs or [], want.logprobs or [], strict=True):
                    assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                    assert [i for i, _ in a.top] == [i for i, _ in b.top]
                    assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)
            times = answer.metrics
            assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time
        await until_idle(client)
        assert client.statistics.window().generation_throughput > 0
        assert client.statistics.totals["output"] == client.stats().num_output_tokens > 0

    run(test)


@pytest.mark.parametrize("leave", ["close", "cancel", "abort"])
def test_a_cancelled_request_is_gone_after_the_step_in_progress(client: EngineClient, leave: str) -> None:
    async def test() -> None:
        outputs = client.generate("r", [1, 2, 3], ENDLESS)
        await anext(outputs)
        rest = asyncio.create_task(collect(outputs)) if leave != "close" else None
        await freeze(client.pid)
        before = client.stats()
        assert before.num_running == 1 and before.num_free_blocks < before.num_blocks
        if rest is None:
            await outputs.aclose()
        elif leave == "cancel":
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)
        else:
            client.abort("r")
        os.kill(client.pid, signal.SIGCONT)
        await until_idle(client)
        assert client.stats().num_output_tokens - before.num_output_tokens <= 1
        if rest is not None and leave == "abort":
            assert (await rest).outputs[0].finish_reason == "abort"

    run(test)


def test_a_hundred_random_cancels_leave_nothing_behind(client: EngineClient) -> None:
    async def test() -> None:
        rng = random.Random(5)
        tasks = []
        for number in range(100):
            prompt = [rng.randrange(4, 500) for _ in range(rng.choice([1, 5, 200, 700]))]
            params = SamplingParams(seed=number, max_tokens=100, ignore_eos=True, n=rng.choice([1, 1, 3]))
            tasks.append(asyncio.create_task(collect(client.generate(f"r{number}", prompt, params))))
            await asyncio.sleep(rng.random() * 0.02)
            rng.choice(tasks).cancel()
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(client)

    run(test)


def test_late_news_does_not_reach_a_new_request_of_the_same_id(client: EngineClient) -> None:
    async def test() -> None:
        expected = [await tokens(client, "x", [10 + i, 3], GREEDY) for i in range(10)]
        assert len(set(map(tuple, expected))) > 5
        for number in range(10):
            async with aclosing(client.generate("same", [60 + number], ENDLESS)) as outputs:
                for _ in range(number % 4 + 1):
                    await anext(outputs)
                await freeze(client.pid)
                os.kill(client.pid, signal.SIGCONT)
                time.sleep(0.03)  # the event loop stands still: news of this request piles up in the socket
            assert await tokens(client, "same", [10 + number, 3], GREEDY) == expected[number]
        await until_idle(client)

    run(test)


def test_bad_requests(client: EngineClient) -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match="prompt_token_ids"):
            client.generate("r", [], GREEDY)
        with pytest.raises(ValueError, match="prompt_token_ids.*512"):
            client.generate("r", [512], GREEDY)
        with pytest.raises(ValueError, match="stop_token_ids"):
            client.generate("r", [1], SamplingParams(stop_token_ids=[1000]))
        first = client.generate("same", [1], ENDLESS)
        await anext(first)
        with pytest.raises(ValueError, match="request_id 'same'"):
            await collect(client.generate("same", [1], GREEDY))
        await first.aclose()
        assert len(await tokens(client, "same", [1], GREEDY)) == 12

    run(test)


def test_a_message_that_the_engine_cannot_take_ends_its_own_request(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        pid, running = client.pid, asyncio.create_task(tokens(client, "a", [5], GREEDY))
        await asyncio.sleep(0)  # it is queued
        with monkeypatch.context() as patch:
            patch.setattr(client_module, "params_to_wire", lambda params: {"no_such_parameter": 1})
            with pytest.raises(ValueError, match="no_such_parameter"):
                await tokens(client, "b", [5], GREEDY)
        assert await running == await tokens(client, "c", [5], GREEDY)
        assert client.pid == pid and is_alive(pid)

    run(test)


def test_a_slow_consumer_gets_everything_in_fewer_outputs(client: EngineClient) -> None:
    async def test() -> None:
        outputs = []
        async for output in client.generate("slow", [1, 2], GREEDY):
            outputs.append(output.outputs[0].token_ids)
            await asyncio.sleep(0.3)
        assert len(outputs) < 12 and sum(outputs, []) == await tokens(client, "fast", [1, 2], GREEDY)

    run(test)


def test_a_killed_engine_fails_its_requests_and_comes_back(client: EngineClient) -> None:
    async def test() -> None:
        expected = await tokens(client, "before", [7, 7], GREEDY)
        counted = client.statistics.totals["output"]
        running = [asyncio.create_task(collect(client.generate(str(i), [1, i], ENDLESS))) for i in range(12)]
        await until(lambda: client.stats().num_running == 8)
        pid, restarts = client.pid, client.num_restarts
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(result, EngineStoppedError) and "died" in str(result) for result in results)
        assert client.state == "starting" and not client.is_running
        assert client.stats().num_running == 0 and client.stats().num_free_blocks == client.stats().num_blocks
        with pytest.raises(EngineStoppedError):
            client.generate("too early", [1], GREEDY)
        await until(lambda: client.is_running)
        assert not is_alive(pid) and client.pid != pid and client.num_restarts == restarts + 1
        assert await tokens(client, "0", [7, 7], GREEDY) == expected
        await until_idle(client)
        assert client.statistics.totals["output"] > counted  # counters never fall

    run(test)


def test_an_engine_that_hangs_is_restarted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ENGINE_TIMEOUT", "3")
    client = EngineClient(str(checkpoint), CONFIG)

    async def test() -> None:
        outputs = client.generate("r", [1], ENDLESS)
        await anext(outputs)
        pid = client.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineStoppedError, match="died"):
            await collect(outputs)
        await until(lambda: client.is_running)
        assert not is_alive(pid)
        idle = client.pid
        await asyncio.sleep(4)
        assert client.pid == idle and client.is_running  # one that has nothing to do is not taken for hung
        assert len(await tokens(client, "r", [1], GREEDY)) == 12

    try:
        run(test)
    finally:
        client.close()


def test_an_engine_that_always_dies_is_given_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(client_module, "MAX_RESTARTS", 2)
    client = EngineClient(str(checkpoint), CONFIG)

    async def test() -> None:
        client.attach()
        for death in range(client_module.MAX_RESTARTS + 1):
            await until(lambda death=death: client.num_restarts == death)
            os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state == "dead")
        assert client.num_restarts == client_module.MAX_RESTARTS and not is_alive(client.pid)
        with pytest.raises(EngineStoppedError, match="3 times"):
            client.generate("r", [1], GREEDY)

    run(test)
    client.close()


def test_closing_releases_every_consumer(checkpoint: Path) -> None:
    client = EngineClient(str(checkpoint), CONFIG)

    async def test() -> None:
        tasks = [asyncio.create_task(collect(client.generate(str(i), [1], ENDLESS))) for i in range(10)]
        await until(lambda: client.stats().num_running == 8)
        await asyncio.to_thread(client.close)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineStoppedError) for result in results)
        with pytest.raises(EngineStoppedError, match="closed"):
            client.generate("late", [1], GREEDY)
        await asyncio.sleep(0.5)
        assert client.state == "dead" and not is_alive(client.pid)

    run(test)
    client.close()


def test_a_checkpoint_that_cannot_be_loaded(checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    for model in (str(broken), "unknown"):
        with pytest.raises(ValueError) as expected:
            load_engine(model, CONFIG)
        with pytest.raises(ValueError) as got:
            EngineClient(model, CONFIG)
        assert str(got.value) == str(expected.value)
