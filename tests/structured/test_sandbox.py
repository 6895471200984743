"""The process in which schemas of strangers are tried out: it ends, whatever they hold."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time

import pytest

from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.sandbox import Sandbox
from tests.structured.grammars import EOS, NANO, REGEX, REPEATED, TOO_COMPLEX, VOCAB_SIZE, tag, vocabulary


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
