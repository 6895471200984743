"""A request waits for its grammar outside of the engine: in a thread, and in a process of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from deepinfer import SamplingParams
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.async_engine import AsyncEngine
from deepinfer.engine.client import EngineClient
from deepinfer.engine.compiling import Compiling
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import load_engine
from deepinfer.structured.compiler import GrammarCompiler
from tests.structured.grammars import NANO, REGEX, slow_schema


class SlowCompiler:
    """A compiler whose grammars are ready when the test says so."""

    def __init__(self, real: GrammarCompiler) -> None:
        self.real, self.go = real, threading.Event()

    def compile(self, so_args: Any) -> Future[Any]:
        slow: Future[Any] = Future()

        def work() -> None:
            self.go.wait(30)
            if not slow.set_running_or_notify_cancel():
                return
            try:
                slow.set_result(self.real.compile(so_args).result(30))
            except ValueError as error:
                slow.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return slow

    def protect(self) -> None:
        pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.checkpoints import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def slowly_compiling_engine(folder: Any) -> tuple[Engine, SlowCompiler]:
    engine = load_engine(folder, EngineConfig(max_num_seqs=4))
    assert engine.grammars is not None
    slow = SlowCompiler(engine.grammars)
    engine.grammars = slow  # type: ignore[assignment]
    return engine, slow


async def tokens_of(stream: Any) -> tuple[list[int], str | None]:
    token_ids: list[int] = []
    reason = None
    async for output in stream:
        token_ids += output.outputs[0].token_ids
        reason = output.outputs[0].finish_reason
    return token_ids, reason


def test_a_request_waits_outside_of_the_engine_and_nobody_waits_for_it(tiny: Any) -> None:
    engine, slow = slowly_compiling_engine(tiny)
    running = AsyncEngine(engine)

    async def scenario() -> None:
        bound = SamplingParams(max_tokens=20, so_args=REGEX)
        waiting = asyncio.create_task(tokens_of(running.generate("waits", [5, 6], bound)))
        aborted = asyncio.create_task(tokens_of(running.generate("aborted", [5, 6], bound)))
        left = running.generate("left", [5, 6], bound)
        leaving = asyncio.create_task(left.__anext__())
        refused = asyncio.create_task(
            tokens_of(running.generate("bad", [5], SamplingParams(so_args={"schema_type": "regex", "schema": "("})))
        )
        await asyncio.sleep(0.1)
        free = await tokens_of(running.generate("free", [5, 6], SamplingParams(max_tokens=30, ignore_eos=True)))
        assert free[1] == "length" and len(free[0]) == 30
        assert running.stats().num_running == running.stats().num_waiting == 0
        running.abort("aborted")
        assert await aborted == ([], "abort")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await left.aclose()
        slow.go.set()
        token_ids, reason = await waiting
        assert reason == "stop" and len(token_ids) >= 2
        with pytest.raises(ValueError, match="^so_args.schema"):
            await refused
        assert running.is_running and not engine.has_unfinished_requests()

    try:
        asyncio.run(scenario())
    finally:
        running.close()


def test_an_id_is_in_use_while_its_grammar_is_compiled(tiny: Any) -> None:
    engine, slow = slowly_compiling_engine(tiny)
    running = AsyncEngine(engine)

    async def scenario() -> None:
        bound, free = SamplingParams(max_tokens=20, so_args=REGEX), SamplingParams(max_tokens=30, ignore_eos=True)
        waiting = asyncio.create_task(tokens_of(running.generate("same", [5, 6], bound)))
        await asyncio.sleep(0.1)
        with pytest.raises(ValueError, match="already in use"):
            await tokens_of(running.generate("same", [5, 6], free))
        slow.go.set()
        assert (await waiting)[1] == "stop"
        assert (await tokens_of(running.generate("same", [5, 6], free)))[1] == "length"

    try:
        asyncio.run(scenario())
    finally:
        running.close()


def test_a_grammar_that_comes_too_late_lets_nobody_else_in() -> None:
    """Its request was aborted, and another one has the id: that one waits for its own grammar."""
    entered: list[int] = []
    compiling = Compiling(lambda: None)
    first: Future[Any] = Future()
    second: Future[Any] = Future()
    first.set_running_or_notify_cancel()  # too late to be cancelled
    compiling.add("same", [1], SamplingParams(n=2), first, lambda: entered.append(1))
    aborted = compiling.abort("same")
    assert aborted is not None and [c.finish_reason for c in aborted.outputs] == ["abort", "abort"]
    compiling.add("same", [1], SamplingParams(), second, lambda: entered.append(2))
    first.set_result(None)
    compiling.enter_done()
    assert entered == [] and "same" in compiling
    second.set_result(None)
    compiling.enter_done()
    assert entered == [2] and "same" not in compiling


def test_an_engine_process_compiles_and_refuses(tiny: Any) -> None:
    async def scenario() -> None:
        client = EngineClient(str(tiny), EngineConfig(max_num_seqs=4))
        try:
            await client.compile(REGEX)
            with pytest.raises(ValueError, match="^so_args.schema"):
                await client.compile({"schema_type": "regex", "schema": "("})
            with pytest.raises(ValueError, match="^so_args.schema_type"):
                await client.compile({"schema_type": "xml", "schema": "("})
            params = SamplingParams(max_tokens=20, so_args={"schema_type": "choice", "schema": '["x", "y"]'})
            token_ids, reason = await tokens_of(client.generate("1", [5, 6], params))  # not compiled before
            assert reason == "stop" and token_ids
            bad = SamplingParams(so_args={"schema_type": "regex", "schema": "["})
            with pytest.raises(ValueError, match="^so_args.schema"):
                await tokens_of(client.generate("2", [5, 6], bad))
            assert (await tokens_of(client.generate("3", [5], SamplingParams(max_tokens=3, ignore_eos=True))))[
                1
            ] == "length"
        finally:
            client.close()

    asyncio.run(scenario())


def test_an_engine_process_begins_nothing_for_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_GRAMMAR_TIMEOUT", "2")

    async def scenario() -> None:
        client = EngineClient(str(NANO), EngineConfig(max_num_seqs=4))
        try:
            await client.compile(REGEX)
            slow = [asyncio.create_task(client.compile(slow_schema(number))) for number in range(3, 18)]
            await asyncio.sleep(0.7)
            for task in slow:
                task.cancel()
            left = await asyncio.gather(*slow, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in left)
            start = time.monotonic()
            await client.compile({"schema_type": "regex", "schema": "new"})
            assert time.monotonic() - start < 2.0
            with pytest.raises(ValueError, match="^so_args.schema"):  # all that waited before would take 30 s
                await asyncio.wait_for(client.compile(slow_schema(20)), 20)
        finally:
            client.close()

    asyncio.run(scenario())
