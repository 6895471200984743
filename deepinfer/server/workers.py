"""Heavy work beside the event loop, so that a long request does not stop the streams of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from deepinfer.server.errors import ApiError

THREADS = 2
MAX_JOBS = 1024  # running and waiting; each may hold a whole request body

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Workers:
    """A few threads; jobs beyond them wait in order of arrival.  Used in the server's event loop only."""

    def __init__(self, threads: int = THREADS, max_jobs: int = MAX_JOBS):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="deepinfer-worker")
        self._max_jobs = max_jobs
        self._jobs: set[asyncio.Future] = set()

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of the call, or what it raised.  ApiError 429 while `max_jobs` are in progress."""
        if len(self._jobs) >= self._max_jobs:
            raise ApiError("too many long requests at a time", 429, code="queue_full", retry_after=1)
        job = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await job
