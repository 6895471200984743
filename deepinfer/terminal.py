"""What a person at a terminal is told while nothing else happens."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show `what ...` until the end of the block, then remove it.  Nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"\r\x1b[K{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
