"""Compiling beside the engine: cached, shared, limited, and never in the way of a step."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
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
from deepinfer.engine.loading import load_engine
from deepinfer.errors import BusyError
from deepinfer.structured import compiler as compiler_module
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.llguidance_backend import LLGuidanceBackend
from deepinfer.structured.priority import NICENESS, join_politely
from deepinfer.structured.sandbox import Sandbox, TooSlowError
from tests.structured.grammars import EOS, NANO, REPEATED, VOCAB_SIZE, allowed, tag, tokenizer, vocabulary

REGEX = {"schema_type": "regex", "schema": "[a-c]{3}"}
TOO_COMPLEX = {
    "schema_type": "json",
    "schema": json.dumps({"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(10, 24)]}),
}


@pytest.fixture
def grammars() -> Any:
    made = GrammarCompiler(vocabulary)
    yield made
    made.close()


def test_the_same_is_compiled_once(grammars: GrammarCompiler) -> None:
    first = grammars.compile(REGEX).result(20)
    assert grammars.compile(dict(REGEX)).result(20) is first
    triggered = grammars.compile(REGEX | {"trigger_token_ids": [7]}).result(20)
    assert triggered.compiled is first.compiled and len(allowed(triggered.matcher())) == VOCAB_SIZE - 1
    assert len(allowed(first.matcher())) < 100


def test_errors_are_not_kept(grammars: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="^so_args.schema"):
            grammars.compile({"schema_type": "regex", "schema": "("}).result(20)
    assert not grammars._cache


def test_what_ends_an_output_is_no_part_of_one(grammars: GrammarCompiler) -> None:
    for trigger in ({"trigger_token_ids": [7, EOS]}, {"trigger_token_ids": [7], "bound_token_id": EOS}):
        with pytest.raises(ValueError, match="must not hold a token that ends an output"):
            grammars.compile(REGEX | trigger).result(20)
    parts = [{"type": "token", "token": EOS}, {"type": "const_string", "value": "x"}]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    with pytest.raises(ValueError, match=f"token {EOS} ends an output"):
        grammars.compile({"schema_type": "structural_tag", "schema": tag}).result(20)


def test_the_cache_forgets_the_oldest(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "CACHED_GRAMMARS", 3)
    for number in range(6):
        grammars.compile({"schema_type": "regex", "schema": f"a{{{number + 1}}}"}).result(20)
    grammars.compile(REGEX).result(20)
    assert len(grammars._cache) == 3 and ("regex", "a{1}") not in grammars._cache
    monkeypatch.setattr(compiler_module, "CACHED_BYTES", 10)
    grammars.compile({"schema_type": "regex", "schema": "b"}).result(20)
    assert sum(len(schema) for _, schema in grammars._cache) <= 10


def test_too_many_that_wait_are_refused(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 2)
    monkeypatch.setattr(grammars, "_load_vocabulary", lambda: (go.wait(20), vocabulary())[1])
    waiting = [grammars.compile({"schema_type": "regex", "schema": text}) for text in "ab"]
    with pytest.raises(BusyError, match="too many grammars"):
        grammars.compile({"schema_type": "regex", "schema": "c"})
    go.set()
    assert all(one.result(20) for one in waiting)
    assert grammars.compile({"schema_type": "regex", "schema": "c"}).result(20)


def test_a_fault_of_the_library_is_an_error_of_the_request(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.compile(REGEX).result(20)

    class Panic(BaseException):
        pass

    def fail(*_: Any) -> None:
        raise Panic("boom")

    monkeypatch.setattr(grammars._backend, "build", fail)
    with pytest.raises(ValueError, match="so_args.schema could not be compiled: boom"):
        grammars.compile({"schema_type": "regex", "schema": "zz"}).result(20)


def test_the_sandbox_lets_through_what_is_fine_and_says_what_is_not() -> None:
    sandbox = Sandbox(NANO, VOCAB_SIZE, (EOS,), "llguidance", 4.0)
    guarded = GrammarCompiler(vocabulary, sandbox=sandbox)
    guarded.protect()
    assert guarded.compile(REGEX).result(60)
    for so_args, message in (
        ({"schema_type": "regex", "schema": "("}, "unclosed group"),
        ({"schema_type": "json", "schema": '{"not": {}}'}, "'not' at #/not"),
        (TOO_COMPLEX, "too complex|too big|Unable|too large"),
    ):
        with pytest.raises(ValueError, match=f"^so_args.schema.*({message})"):
            guarded.compile(so_args).result(60)
    assert guarded.compile({"schema_type": "regex", "schema": "still there"}).result(60)
    guarded.close()


def test_without_a_sandbox_the_walk_is_the_same(grammars: GrammarCompiler) -> None:
    late = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]{3}"}, REPEATED]}
    with pytest.raises(ValueError, match="^so_args.schema is too complex"):
        grammars.compile(tag(late)).result(20)


def test_a_fork_ends_though_nobody_is_left_to_kill_it() -> None:
    code = "from deepinfer.structured.sandbox import in_child; "
    code += "in_child(lambda: print(1, flush=True) or str(any(iter(int, 1))), 1.0)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"1\n"
    process.kill()
    ended = select.select([process.stdout], [], [], 60.0)[0]  # the fork has it open as well
    assert ended and process.stdout.read() == b"" and process.wait(timeout=10) == -9
    process.stdout.close()


def test_an_answer_of_the_sandbox_that_nobody_waits_for_is_no_fault() -> None:
    command = [sys.executable, "-m", "deepinfer.structured.sandbox", str(NANO), str(VOCAB_SIZE), str(EOS)]
    command += ["llguidance"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr and process.stdout.readline() == b"null\n"
    patterns = [{"type": "string", "pattern": f"[a-z]*{letter}[a-z]*"} for letter in "abcdefghijklmnopqrstuvwxyz"]
    process.stdin.write(json.dumps([1.0, {"schema_type": "json", "schema": {"allOf": patterns}}]).encode() + b"\n")
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_the_sandbox_kills_what_takes_too_long() -> None:
    sandbox = Sandbox(NANO, VOCAB_SIZE, (EOS,), "llguidance", 0.02)
    guarded = GrammarCompiler(vocabulary, sandbox=sandbox)
    guarded.protect()
    start = time.monotonic()
    with pytest.raises(ValueError, match="too complex: it was not compiled within 0.02 s"):
        guarded.compile(TOO_COMPLEX).result(60)
    assert time.monotonic() - start < 30
    guarded.close()


SLOW = '{{"anyOf": [{{"type": "string", "maxLength": {}}}, {{"type": "integer", "multipleOf": 2000003}}]}}'


def slow_schema(number: int) -> dict[str, str]:
    return {"schema_type": "json", "schema": SLOW.format(number)}


@pytest.fixture(scope="module")
def guarded() -> Any:
    made = GrammarCompiler(vocabulary, sandbox=Sandbox(NANO, VOCAB_SIZE, (EOS,), "llguidance", 2.0))
    made.protect()
    assert made.compile(REGEX).result(60)
    yield made
    made.close()


def test_a_usual_schema_passes_slow_ones_and_nobody_compiles_for_those_who_left(guarded: GrammarCompiler) -> None:
    waiting = [guarded.compile(slow_schema(number)) for number in range(3, 15)]
    time.sleep(0.5)
    start = time.monotonic()
    assert guarded.compile({"schema_type": "regex", "schema": "new"}).result(60)
    assert time.monotonic() - start < 2.0 and not any(future.done() for future in waiting)
    assert guarded.num_waiting == len(waiting)
    start = time.monotonic()
    assert all(future.cancel() for future in waiting)
    while guarded.num_waiting:
        time.sleep(0.01)
        assert time.monotonic() - start < 10  # those that had begun; all of them take longer
    assert guarded.compile({"schema_type": "regex", "schema": "newer"}).result(60)


@pytest.mark.parametrize(("fair_seconds", "order"), [(60.0, "aedcb"), (0.0, "aebdc")])
def test_those_who_have_waited_long_get_every_second_attempt(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, fair_seconds: float, order: str
) -> None:
    go, tried = threading.Event(), []
    monkeypatch.setattr(compiler_module, "FAIR_SECONDS", fair_seconds)

    def build(constraint: Constraint, seconds: float) -> Any:
        assert go.wait(20)
        tried.append(constraint.schema)
        raise ValueError("enough")

    monkeypatch.setattr(grammars, "_build", build)
    waiting = []
    for text in "abcde":
        waiting.append(grammars.compile({"schema_type": "regex", "schema": text}))
        while "a" in {job.constraint.schema for job in list(grammars._new)}:  # until the first has begun
            time.sleep(0.001)
        time.sleep(0.001)
    go.set()
    for future in waiting:
        assert "enough" in str(future.exception(20))
    assert "".join(tried) == order


def test_who_has_waited_too_long_is_told_to_ask_again(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "PATIENCE_SECONDS", 0.0)

    def build(constraint: Constraint, seconds: float) -> Any:
        assert seconds == compiler_module.FIRST_SECONDS
        raise TooSlowError("slow")

    monkeypatch.setattr(grammars, "_build", build)
    with pytest.raises(BusyError, match="^so_args: too many grammars wait"):
        grammars.compile(REGEX).result(20)
    monkeypatch.undo()
    assert grammars.compile(REGEX).result(20) and grammars.num_waiting == 0  # it is not remembered


def test_that_a_schema_was_too_slow_is_remembered_for_a_while(
    guarded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "REFUSED_SECONDS", 2.0)
    schema = slow_schema(2)
    with pytest.raises(ValueError, match="^so_args.schema") as first:
        guarded.compile(schema).result(60)
    refused = guarded.compile(schema)
    assert refused.done() and str(refused.exception()) == str(first.value) and guarded.num_waiting == 0
    time.sleep(2.1)
    again = guarded.compile(schema)
    assert not again.done() and guarded.num_waiting == 1
    again.cancel()


def test_one_who_leaves_takes_nothing_from_others(guarded: GrammarCompiler) -> None:
    blocker = guarded.compile(slow_schema(1))  # so that what follows has not begun
    so_args = {"schema_type": "regex", "schema": "shared"}
    first, second = guarded.compile(so_args), guarded.compile(so_args)
    triggered = guarded.compile(so_args | {"trigger_token_ids": [7]})
    assert first.cancel() and triggered.cancel()
    assert second.result(60).constraint.schema == "shared"
    blocker.cancel()


def test_what_nobody_waits_for_is_not_begun(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    go, built = threading.Event(), []

    class Recording(LLGuidanceBackend):
        def write(self, constraint: Constraint) -> str:
            go.wait(20)
            built.append(constraint.schema)
            return super().write(constraint)

    monkeypatch.setattr(compiler_module, "make_backend", lambda _, words: Recording(words))
    schemas = [{"schema_type": "regex", "schema": text} for text in "abcd"]
    first = grammars.compile(schemas[0])
    while grammars._new:  # until it has begun
        time.sleep(0.01)
    others = [grammars.compile(schema) for schema in schemas[1:]]
    assert first.cancel() and others[0].cancel() and others[2].cancel() and grammars.num_waiting == 2
    go.set()
    assert others[1].result(20) and built == ["a", "c"] and grammars.num_waiting == 0
    assert grammars.compile(schemas[0]).result(20) and built == ["a", "c"]  # what had begun is kept
    last = grammars.compile(schemas[1]).result(20)
    assert last and built == ["a", "c", "b"] and set(grammars._cache) == {("regex", text) for text in "abc"}


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


async def tokens_of(stream: Any) -> tuple[list[int], str | None]:
    token_ids: list[int] = []
    reason = None
    async for output in stream:
        token_ids += output.outputs[0].token_ids
        reason = output.outputs[0].finish_reason
    return token_ids, reason


def test_a_request_waits_outside_of_the_engine_and_nobody_waits_for_it(tiny: Any) -> None:
    engine = load_engine(tiny, EngineConfig(max_num_seqs=4))
    assert engine.grammars is not None
    slow = SlowCompiler(engine.grammars)
    engine.grammars = slow  # type: ignore[assignment]
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
    engine = load_engine(tiny, EngineConfig(max_num_seqs=4))
    assert engine.grammars is not None
    slow = SlowCompiler(engine.grammars)
    engine.grammars = slow  # type: ignore[assignment]
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


def test_the_vocabulary_is_that_of_the_model() -> None:
    assert vocabulary().size == VOCAB_SIZE and vocabulary().eos_token_ids == (EOS,)
    assert vocabulary().encode("ab c") == tokenizer().encode_text("ab c")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
@pytest.mark.parametrize("cpu_seconds", [0.0, 0.2])
def test_a_thread_that_takes_long_steps_back(cpu_seconds: float) -> None:
    found: list[int] = []

    def work() -> None:
        while time.thread_time() < cpu_seconds:
            pass
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread.start()
    join_politely(thread)
    assert found == [max(NICENESS, before) if cpu_seconds else before] and not thread.is_alive()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
