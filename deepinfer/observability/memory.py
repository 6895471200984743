"""When Python's cyclic garbage collector runs, and how long what a step hands out stays valid.

A collection in the middle of a step stalls the device. While an engine has work, the automatic collector is off and a
collection runs every DEEPINFER_GC_INTERVAL_STEP steps; the moment the engine has nothing to do, the program that it is
part of gets its collector back as it was.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_lock = threading.RLock()  # a collection while it is held may drop another engine
_num_holders = 0  # the collector belongs to the process, which may hold several engines


class CollectorHold:
    """One engine's hold on the process's garbage collector. `interval` 0 leaves the collector alone.

    A program that has switched its collector off itself is left alone too.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.holding = False
        self._num_steps = 0

    def acquire(self) -> None:
        """The engine has work from now on. What exists now is not looked at again until the last release."""
        global _num_holders
        if self.holding or self.interval == 0:
            return
        with _lock:
            if _num_holders == 0:
                if not gc.isenabled() or gc.get_freeze_count():
                    return
                gc.disable()
                gc.freeze()
            _num_holders += 1
            self.holding = True

    def step(self) -> None:
        """Call after every step; collects when it is due."""
        self._num_steps += 1
        if self.holding and self._num_steps % self.interval == 0:
            gc.collect()

    def release(self) -> None:
        """The engine has nothing to do: the collector is as it was before."""
        global _num_holders
        if not self.holding:
            return
        with _lock:
            self.holding = False
            _num_holders -= 1
            if _num_holders == 0:
                gc.unfreeze()
                gc.enable()

    def __del__(self) -> None:
        self.release()


class StaleReadError(RuntimeError):
    """Something was read after its round and the one extra round were over."""


class DeferredRelease(Generic[T]):
    """Holds resources for exactly one extra round, so that whoever got them in one step may read them in the next.

    What is deferred in round N stays valid through round N + 1 and goes to `release` when round N + 2 begins.
    With `debug`, an object handed on to `release` refuses every access, so a reader that kept it too long gets a
    StaleReadError instead of another request's data. `release` may then only store it, and whoever uses it again calls
    `revive` first.
    """

    def __init__(self, release: Callable[[T], None], debug: bool = False) -> None:
        self._release = release
        self._debug = debug
        self._current: list[T] = []
        self._previous: list[T] = []

    def __len__(self) -> int:
        return len(self._current) + len(self._previous)

    def defer(self, resource: T) -> None:
        """Release it at the end of the next round."""
        self._current.append(resource)

    def next_round(self) -> None:
        """Begin a round: release what was deferred before the round that ends now."""
        expired = self._previous
        self._previous, self._current = self._current, expired
        for resource in expired:
            if self._debug:
                retire(resource)
            self._release(resource)
        expired.clear()


_retired_types: dict[type, type] = {}


def retire(resource: Any) -> None:
    """Make every attribute access of an object raise StaleReadError. Its class must allow a subclass."""
    kind = type(resource)
    if kind in _retired_types.values():
        return
    if kind not in _retired_types:

        def refuse(self: object, *arguments: object) -> None:
            raise StaleReadError(f"{kind.__name__} was read after its round was over; copy what you keep")

        hooks = {"__getattribute__": refuse, "__setattr__": refuse, "__slots__": (), "live_type": kind}
        _retired_types[kind] = type(f"Retired{kind.__name__}", (kind,), hooks)
    object.__setattr__(resource, "__class__", _retired_types[kind])


def revive(resource: Any) -> None:
    """Undo `retire`; does nothing to an object that is alive."""
    live_type = getattr(type(resource), "live_type", None)
    if live_type is not None:
        object.__setattr__(resource, "__class__", live_type)
