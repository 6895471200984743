"""Compiling grammars beside the engine: on threads of their own, once for all requests that ask for the same."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from deepinfer.structured.backend import Backend, Result, make_backend
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.faults import placed
from deepinfer.structured.matcher import Grammar
from deepinfer.structured.priority import join_politely
from deepinfer.structured.sandbox import Sandbox
from deepinfer.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
THREADS = 2
CACHED_GRAMMARS = 256
CACHED_BYTES = 16 * 1024 * 1024  # of schemas; what a library makes of them is some hundred times as much at most
MAX_WAITING = 16_384
_Key = tuple[str, str]


class GrammarCompiler:
    """Any thread may use it.

    Args:
        load_vocabulary: called once, when the first grammar is asked for.
        backend: "llguidance" or "xgrammar".
        sandbox: what `protect` makes compile every constraint first.

    A sandbox also writes the grammar: nothing of that holds the GIL here. What a grammar library then does, without the
    GIL, runs on a thread that gets what the others leave.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        backend: str = "llguidance",
        sandbox: Sandbox | None = None,
    ) -> None:
        self._load_vocabulary, self._backend_name, self._sandbox = load_vocabulary, backend, sandbox
        self._is_protected = False
        self._vocabulary: Vocabulary | None = None
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._cache: OrderedDict[_Key, Future[Grammar]] = OrderedDict()
        self._num_waiting = 0
        self._pool = ThreadPoolExecutor(THREADS, "deepinfer-grammar")

    def protect(self) -> None:
        """From here on, strangers write the schemas."""
        self._is_protected = True

    def compile(self, so_args: Mapping[str, Any]) -> Future[Grammar]:
        """The grammar, once it is there; the future raises ValueError naming the field if there is none.

        Raises ValueError at once for malformed so_args, or if too many grammars wait to be compiled.
        """
        constraint = Constraint.from_so_args(so_args)
        body = replace(constraint, trigger_token_ids=(), bound_token_id=None)
        key = (body.schema_type, body.schema)
        with self._lock:
            future = self._cache.get(key)
            if future is None:
                if self._num_waiting >= MAX_WAITING:
                    raise ValueError("so_args: too many grammars wait to be compiled, ask again later")
                self._num_waiting += 1
                future = self._cache[key] = self._pool.submit(self._build, body)
                future.add_done_callback(lambda done: self._forget_failure(key, done))
                self._drop_old()
            self._cache.move_to_end(key)
        return future if body == constraint else _mapped(future, constraint)

    def _build(self, constraint: Constraint) -> Grammar:
        written = self._sandbox.write(constraint) if self._is_protected and self._sandbox is not None else None
        with self._loading:
            if self._backend is None:
                self._vocabulary = self._load_vocabulary()
                self._backend = make_backend(self._backend_name, self._vocabulary)
        assert self._vocabulary is not None
        try:
            compiled = self._backend.build(self._backend.write(constraint) if written is None else written, run_aside)
        except ValueError as error:
            raise placed(error, constraint, self._backend) from None
        except BaseException as error:  # a library's fault (a panic is no Exception) is no reason to stop serving
            logger.exception("a grammar could not be compiled")
            raise ValueError(f"so_args.schema could not be compiled: {error}") from None
        return Grammar(constraint, compiled, self._backend, self._vocabulary)

    def _forget_failure(self, key: _Key, done: Future[Grammar]) -> None:
        """Errors are not kept: they may be of a moment (too slow), and their text is the client's."""
        with self._lock:
            self._num_waiting -= 1
            if (done.cancelled() or done.exception() is not None) and self._cache.get(key) is done:
                del self._cache[key]

    def _drop_old(self) -> None:
        size = sum(len(schema) for _, schema in self._cache)
        for key in list(self._cache):
            if len(self._cache) <= CACHED_GRAMMARS and size <= CACHED_BYTES:
                break
            if self._cache[key].done():
                del self._cache[key]
                size -= len(key[1])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _mapped(future: Future[Grammar], constraint: Constraint) -> Future[Grammar]:
    """The same grammar behind a trigger."""
    mapped: Future[Grammar] = Future()

    def finish(done: Future[Grammar]) -> None:
        try:
            mapped.set_result(done.result().behind(constraint))
        except BaseException as error:
            mapped.set_exception(error)

    future.add_done_callback(finish)
    return mapped


def run_aside(function: Callable[[], Result]) -> Result:
    """Call it in a thread that steps back behind all others when it takes longer than usual."""
    done: Future[Result] = Future()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, name="deepinfer-grammar-build", daemon=True)
    thread.start()
    join_politely(thread)
    return done.result()
