"""compute-sanitizer finds nothing in the attention kernels; needs a Hopper GPU and the CUDA toolkit's tool."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import sanitized_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
]
ROOT = Path(__file__).parents[2]
HAND_OVERS = tuple(sanitized_attention.HAND_OVERS)
ATTENTION = [name for name in sanitized_attention.names() if not name.startswith(HAND_OVERS)]


def findings(tool: str, names: list[str]) -> int:
    """What the tool reports of small launches, all of which must be right as well."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "tests.kernels.sanitized_attention", *names]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert answer.returncode == 0, answer.stdout[-2000:]
    assert answer.stdout.count("ran ") == len(names)
    return sum(map(int, re.findall(r"SUMMARY: (\d+)", answer.stdout)))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("tool", ("memcheck", "synccheck", "initcheck"))
def test_nothing_is_found(tool: str):
    assert findings(tool, ATTENTION) == 0


@pytest.mark.timeout(1000)
def test_no_race_is_found():
    assert findings("racecheck", ATTENTION) == 0


@pytest.mark.timeout(1000)
def test_why_memory_changes_hands_as_it_does():
    """Of two right ways, racecheck follows one; the other is reported, alone and with nothing else around it."""
    assert findings("racecheck", ["copies_then_peers-0", "copies_then_peers-1", "take_turns-0"]) == 0
    assert findings("racecheck", ["copies_then_peers-2"]) > 0  # why peers do not send their sums to the key tiles
    assert findings("racecheck", ["take_turns-1"]) > 0  # the PTX manual's example of barrier.arrive
