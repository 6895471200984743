"""Figures of an engine in another process."""

from __future__ import annotations

from deepinfer.observability.stats import WindowStats

_NO_WINDOW = WindowStats(0.0, 0.0, 0, 0, 0.0, 0, 0.0, None, None, None, None)


class RemoteStatistics:
    """The figures that the process reported last. `totals` count over restarts."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}  # of processes that died
        self._now: dict[str, float] = {}
        self._window = _NO_WINDOW

    @property
    def totals(self) -> dict[str, float]:
        """Counts since the first process started."""
        names = self._before.keys() | self._now.keys()
        return {name: self._before.get(name, 0.0) + self._now.get(name, 0.0) for name in names}

    def window(self) -> WindowStats:
        """Figures of the latest window; zeros while there is no process."""
        return self._window

    def update(self, window: WindowStats, totals: dict[str, float]) -> None:
        """What the process has just reported; its `totals` count from its start."""
        self._window, self._now = window, totals

    def restart(self) -> None:
        """The process is gone: what it counted is kept."""
        self._before, self._now, self._window = self.totals, {}, _NO_WINDOW
