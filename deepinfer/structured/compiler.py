"""Compiling grammars beside the engine: on threads of their own, once for all requests that ask for the same."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deepinfer.errors import BusyError
from deepinfer.structured.backend import Backend, Result, make_backend
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.faults import placed
from deepinfer.structured.matcher import Grammar
from deepinfer.structured.priority import join_politely
from deepinfer.structured.sandbox import Sandbox, SandboxError, TooSlowError
from deepinfer.structured.trial import try_out
from deepinfer.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
CACHED_GRAMMARS = 256
CACHED_BYTES = 16 * 1024 * 1024  # of schemas; what a library makes of them is some hundred times as much at most
MAX_WAITING = 16_384
BUSY = "so_args: too many grammars wait to be compiled, ask again later"
FIRST_SECONDS = 0.25  # that a first attempt may take
FAIR_SECONDS = 3.0  # behind which every second first attempt is that of the oldest
PATIENCE_SECONDS = 60.0  # that a schema may have waited when its turn comes
REFUSED_SECONDS = 300.0  # that a schema which was refused after a slow attempt stays refused
_Key = tuple[str, str]


@dataclass(eq=False)
class _Job:
    """A grammar that is to be compiled, with all who wait for it; later the grammar, or why there is none."""

    key: _Key
    constraint: Constraint
    arrival: float = field(default_factory=time.monotonic)
    waiters: dict[Future[Grammar], Constraint] = field(default_factory=dict)
    outcome: Grammar | BaseException | None = None
    forget_at: float = math.inf  # of time.monotonic


class GrammarCompiler:
    """Any thread may use it.

    Args:
        load_vocabulary: called once, when the first grammar is asked for.
        backend: "llguidance" or "xgrammar".
        sandbox: what `protect` makes compile every constraint first.

    A sandbox also writes the grammar: nothing of that holds the GIL here. What a grammar library then does, without the
    GIL, runs on a thread that gets what the others leave. What is not written in a short time is written by another
    worker, behind all others that were as slow. Who has waited too long by then is told to ask again later.
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
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # of all that follows, and of every _Job
        self._cache: OrderedDict[_Key, _Job] = OrderedDict()
        self._new: dict[_Job, None] = {}  # in the order of their arrival
        self._slow: dict[_Job, None] = {}
        self._num_waiting = 0
        self._took_oldest = False
        self._first_worker = ThreadPoolExecutor(1, "deepinfer-grammar")
        self._slow_worker = ThreadPoolExecutor(1, "deepinfer-slow-grammar")

    @property
    def num_waiting(self) -> int:
        """Grammars that are being compiled, or wait for it."""
        return self._num_waiting

    def protect(self) -> None:
        """From here on, strangers write the schemas."""
        self._is_protected = True

    def compile(self, so_args: Mapping[str, Any]) -> Future[Grammar]:
        """The grammar, once it is there; the future raises ValueError naming the field if there is none, and
        BusyError if its turn came too late.

        The future is the caller's own: cancelled, it waits no more, and what nobody waits for is not begun.
        Raises at once: ValueError for malformed so_args, BusyError if too many grammars wait to be compiled.
        """
        constraint = Constraint.from_so_args(so_args)
        body = replace(constraint, trigger_token_ids=(), bound_token_id=None)
        key = (body.schema_type, body.schema)
        waiter: Future[Grammar] = Future()
        with self._lock:
            job = self._cache.get(key)
            if job is None or job.forget_at < time.monotonic():
                if self._num_waiting >= MAX_WAITING:
                    raise BusyError(BUSY)
                self._first_worker.submit(self._try_first)
                job = self._cache[key] = _Job(key, body)
                self._new[job] = None
                self._num_waiting += 1
                self._drop_old()
            self._cache.move_to_end(key)
            outcome = job.outcome
            if outcome is None:
                job.waiters[waiter] = constraint
        if outcome is None:
            waiter.add_done_callback(partial(self._leave, job))
        else:
            _answer(waiter, constraint, outcome)
        return waiter

    def _leave(self, job: _Job, waiter: Future[Grammar]) -> None:
        """A waiter is done. What has begun goes on though nobody waits for it: it is kept for whoever asks next."""
        with self._lock:
            job.waiters.pop(waiter, None)
            if not job.waiters and (job in self._new or job in self._slow):
                self._end(job, None)

    def _try_first(self) -> None:
        """The newest first, in little time: so a usual grammar is there soon, however many slow ones wait.

        When many keep coming, half of the attempts are for those that have waited longest.
        """
        with self._lock:
            if not self._new:
                return  # nobody waits any more
            oldest = next(iter(self._new))
            self._took_oldest = not self._took_oldest and time.monotonic() - oldest.arrival > FAIR_SECONDS
            job = oldest if self._took_oldest else next(reversed(self._new))
            del self._new[job]
        try:
            try:
                self._finish(job, self._build(job.constraint, FIRST_SECONDS))
            except TooSlowError:
                self._put_back(job)
        except BaseException as error:
            self._finish(job, error)

    def _put_back(self, job: _Job) -> None:
        with self._lock:
            if job.waiters:
                self._slow_worker.submit(self._try_slow)
                self._slow[job] = None
            else:
                self._end(job, None)

    def _try_slow(self) -> None:
        """The oldest first, from its beginning. That it is refused is remembered: asking again costs nothing."""
        with self._lock:
            if not self._slow:
                return
            job = next(iter(self._slow))
            del self._slow[job]
        if time.monotonic() - job.arrival > PATIENCE_SECONDS:
            self._finish(job, BusyError(BUSY))
            return
        try:
            self._finish(job, self._build(job.constraint, math.inf))
        except SandboxError as error:
            self._finish(job, error)
        except ValueError as error:
            self._finish(job, error.with_traceback(None), time.monotonic() + REFUSED_SECONDS)
        except BaseException as error:
            self._finish(job, error)

    def _finish(self, job: _Job, outcome: Grammar | BaseException, forget_at: float = 0.0) -> None:
        with self._lock:
            waiters = job.waiters.copy()
            self._end(job, outcome, math.inf if isinstance(outcome, Grammar) else forget_at)
        for waiter, constraint in waiters.items():
            _answer(waiter, constraint, outcome)

    def _end(self, job: _Job, outcome: Grammar | BaseException | None, forget_at: float = 0.0) -> None:
        """Under the lock."""
        job.outcome, job.forget_at = outcome, forget_at
        job.waiters.clear()
        self._num_waiting -= 1
        self._new.pop(job, None)
        self._slow.pop(job, None)
        if not forget_at and self._cache.get(job.key) is job:
            del self._cache[job.key]

    def _build(self, constraint: Constraint, seconds: float) -> Grammar:
        """Raises TooSlowError if a sandbox needs more time than `seconds`."""
        written = self._sandbox.write(constraint, seconds) if self._is_protected and self._sandbox is not None else None
        with self._loading:
            if self._backend is None:
                self._vocabulary = self._load_vocabulary()
                self._backend = make_backend(self._backend_name, self._vocabulary)
        assert self._vocabulary is not None
        try:
            compiled = self._backend.build(self._backend.write(constraint) if written is None else written, run_aside)
            if written is None:
                try_out(compiled, self._vocabulary.num_words, self._vocabulary.eos_token_ids)
        except ValueError as error:
            raise placed(error, constraint, self._backend) from None
        except BaseException as error:  # a library's fault (a panic is no Exception) is no reason to stop serving
            logger.exception("a grammar could not be compiled")
            raise ValueError(f"so_args.schema could not be compiled: {error}") from None
        return Grammar(constraint, compiled, self._backend, self._vocabulary)

    def _drop_old(self) -> None:
        size = sum(len(schema) for _, schema in self._cache)
        for key in list(self._cache):
            if len(self._cache) <= CACHED_GRAMMARS and size <= CACHED_BYTES:
                break
            if self._cache[key].outcome is not None:
                del self._cache[key]
                size -= len(key[1])

    def close(self) -> None:
        """Whoever waits for something that has not begun is cancelled."""
        with self._lock:
            left = [waiter for job in (*self._new, *self._slow) for waiter in job.waiters]
        for waiter in left:
            waiter.cancel()
        for worker in (self._first_worker, self._slow_worker):
            worker.shutdown(wait=False, cancel_futures=True)


def _answer(waiter: Future[Grammar], constraint: Constraint, outcome: Grammar | BaseException) -> None:
    if not waiter.set_running_or_notify_cancel():
        return  # cancelled meanwhile
    try:
        if isinstance(outcome, ValueError):
            kind = BusyError if isinstance(outcome, BusyError) else ValueError
            raise kind(str(outcome))  # each its own: raising one adds to its traceback
        if isinstance(outcome, BaseException):
            raise outcome
        waiter.set_result(outcome if outcome.constraint == constraint else outcome.behind(constraint))
    except BaseException as error:
        waiter.set_exception(error)


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
