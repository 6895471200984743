"""Compiling beside the engine: cached, shared, limited, and never in the way of a step."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest

from deepinfer.errors import BusyError
from deepinfer.structured import compiler as compiler_module
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.llguidance_backend import LLGuidanceBackend
from deepinfer.structured.priority import NICENESS, join_politely
from deepinfer.structured.sandbox import Sandbox, TooSlowError
from tests.structured.grammars import EOS, NANO, REGEX, VOCAB_SIZE, allowed, slow_schema, tokenizer, vocabulary


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
