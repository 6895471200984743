"""A process that compiles a grammar first: whatever happens to it there happens to nobody else.

A schema is a program that a client wrote. Most compile in milliseconds; some take minutes, gigabytes or all the stack.
Each is compiled in a fork, which has limited memory, gets little of the CPUs once it has taken long, and is killed in
the end. What has passed, in the words of the grammar library, may be compiled again beside the engine, in less time
than it took here.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepinfer.structured.constraint import Constraint
from deepinfer.structured.priority import wait_eagerly

MEMORY_BYTES = 2 << 30
START_SECONDS = 120.0
CPU_SECONDS = 1.0  # that compiling may take
Answer = tuple[str | None, str | None]  # what is wrong, or the grammar; neither if it takes too long


class TooSlowError(ValueError):
    """A constraint was not compiled in the time that it was given."""


class SandboxError(ValueError):
    """Nothing is known of the constraint: the process that was to compile it is gone."""


class Sandbox:
    """Any thread may use it; each has a process of its own, from its first use on."""

    def __init__(self, path: Path, size: int, eos_token_ids: tuple[int, ...], backend: str, seconds: float) -> None:
        self._arguments = [str(path), str(size), ",".join(map(str, eos_token_ids)), backend]
        self._seconds = seconds
        self._local = threading.local()

    def write(self, constraint: Constraint, seconds: float = math.inf) -> str:
        """`Backend.write`. Raises ValueError naming the field if it cannot be compiled within the limits, either.

        TooSlowError after `seconds`, or the limit of time if that is less; SandboxError, which is of the moment.
        """
        seconds = min(seconds, self._seconds)
        process = self._process()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([seconds, constraint.so_args()]).encode() + b"\n")
            process.stdin.flush()
            answer = _read_line(process, seconds + START_SECONDS)
        except (OSError, EOFError):  # a TimeoutError, too
            self._end(process)
            raise SandboxError("so_args.schema could not be compiled: the process that does it is gone") from None
        error, grammar = json.loads(answer)
        if error is not None:
            raise ValueError(error)
        if grammar is None:
            raise TooSlowError(f"so_args.schema is too complex: it was not compiled within {seconds:g} s")
        return grammar

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._local, "process", None)
        if process is None or process.poll() is not None:
            command = [sys.executable, "-m", "deepinfer.structured.sandbox", *self._arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            try:
                _read_line(process, START_SECONDS)
            except (EOFError, TimeoutError):
                self._end(process)
                raise SandboxError("so_args: the process that compiles grammars does not start") from None
            self._local.process = process
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass
        self._local.process = None


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Raises TimeoutError, or EOFError if the process is gone."""
    assert process.stdout is not None
    fd, deadline, parts = process.stdout.fileno(), time.monotonic() + seconds, [b""]
    while not parts[-1].endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(fd, 1 << 16)
        if not part:
            raise EOFError
        parts.append(part)
    return b"".join(parts)


def main(path: str, size: str, eos_token_ids: str, backend_name: str) -> None:
    """The process itself: a line of standard input is (seconds, so_args), a line of standard output an Answer."""
    from deepinfer.structured.backend import make_backend
    from deepinfer.structured.faults import placed
    from deepinfer.structured.loading import load_vocabulary
    from deepinfer.structured.trial import try_out

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    eos = [int(text) for text in eos_token_ids.split(",") if text]
    vocabulary = load_vocabulary(Path(path), int(size), eos)
    backend = make_backend(backend_name, vocabulary)

    def check(constraint: Constraint) -> str:
        start = time.process_time()
        try:
            grammar = backend.write(constraint)
            compiled = backend.build(grammar)
        except ValueError as error:
            raise placed(error, constraint, backend) from None
        if time.process_time() - start > CPU_SECONDS:
            raise ValueError("so_args.schema is too complex: compiling it takes too long")
        try_out(compiled, vocabulary.num_words, eos)
        return grammar

    def judge(so_args: dict[str, Any]) -> Answer:
        try:
            return None, check(Constraint.from_so_args(so_args))
        except BaseException as fault:  # a library's panic is no Exception
            is_known = isinstance(fault, ValueError)
            return (str(fault) if is_known else f"so_args.schema could not be compiled: {fault}"), None

    print("null", file=answers, flush=True)  # ready
    for line in sys.stdin.buffer:
        seconds, so_args = json.loads(line)
        answer = in_child(partial(judge, so_args), seconds)
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:  # the engine has ended meanwhile
            os._exit(0)


def in_child(judge: Callable[[], Answer], seconds: float) -> Answer:
    """The answer of a forked process, which may be killed without loading anything again afterwards."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        cpu_seconds = math.ceil(seconds) + 1  # should its parent be killed, and not kill it
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(json.dumps(judge()))
        os._exit(0)
    os.close(write_end)

    def has_answer(seconds: float) -> bool:
        return bool(select.select([read_end], [], [], seconds)[0])

    try:
        if not wait_eagerly(has_answer, pid) and not has_answer(seconds):
            os.kill(pid, signal.SIGKILL)
            return None, None
        with os.fdopen(os.dup(read_end)) as pipe:
            answer = pipe.read()
        if not answer:
            return "so_args.schema is too complex: compiling it takes too much memory", None
        return json.loads(answer)
    finally:
        os.close(read_end)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
