"""Work that steps back behind everybody else's once it has taken more CPU time than usual."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

EAGER_SECONDS = 0.015  # of CPU that come first; most grammars are compiled in a third of it
NICENESS = 15  # beside a busy thread, 3% of a core
POLL_SECONDS = 0.005
LONGEST_SECONDS = 1.0  # until it steps back in any case
_OF_PROCESS, _OF_THREAD = 2, 6


def wait_eagerly(wait: Callable[[float], bool], pid: int) -> bool:
    """Wait for a process until it is done, or steps back. `wait` waits so many seconds and says whether it is done."""
    return _wait(wait, pid, _OF_PROCESS)


def join_politely(thread: threading.Thread) -> None:
    """Wait for a thread, which steps back meanwhile if it takes long."""

    def wait(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    if thread.native_id is None or not _wait(wait, thread.native_id, _OF_THREAD):
        thread.join()


def _wait(wait: Callable[[float], bool], task_id: int, kind: int) -> bool:
    end = time.monotonic() + LONGEST_SECONDS
    while not wait(POLL_SECONDS):
        try:
            cpu_seconds = time.clock_gettime(~task_id << 3 | kind)  # clock_getcpuclockid(3) of Linux
            if cpu_seconds < EAGER_SECONDS and time.monotonic() < end:
                continue
            os.setpriority(os.PRIO_PROCESS, task_id, NICENESS)  # of a thread, too
        except (AttributeError, OSError):  # it has ended, or this is no Linux
            pass
        return False
    return True
