"""Observer: what an engine calls before and after a step. It bundles statistics, traces and garbage collection."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from deepinfer import envs
from deepinfer.config.engine import EngineConfig
from deepinfer.observability.flops import FlopsEstimator
from deepinfer.observability.memory import CollectorHold
from deepinfer.observability.peak import peak_flops
from deepinfer.observability.profiler import ProfilerServer, TraceCapture
from deepinfer.observability.stats import StatsLogger, StepStats
from deepinfer.observability.stats import logger as stats_logger
from deepinfer.observability.timers import CPUTimer, ScopeTime

logger = logging.getLogger(__name__)


class Observer:
    """One an engine, set up by environment variables (docs/observability.md).

    Args:
        device: torch device of the model, for its peak FLOP/s.
        flops: counts FLOPs of steps; None where the model has no estimator.
        gc_factor: multiplies DEEPINFER_GC_INTERVAL_STEP.
        part_times: device times of the parts of decode steps, by name; without waiting for the device.

    Raises ValueError if the profiler's address is taken.
    """

    def __init__(
        self,
        device: str,
        flops: FlopsEstimator | None = None,
        gc_factor: int = 1,
        part_times: Callable[[], dict[str, ScopeTime]] = dict,
    ) -> None:
        self.part_times = part_times
        self._working = True
        self.timer = CPUTimer(envs.get("DEEPINFER_TIMERS"))
        self.flops = flops
        envs.get("DEEPINFER_PEAK_FLOPS")  # rubbish is refused now, not when a step first asks for it
        self.stats = StatsLogger(envs.get("DEEPINFER_STATS_INTERVAL"), peak_flops=lambda: _peak_of(device))
        self.collector = CollectorHold(gc_factor * envs.get("DEEPINFER_GC_INTERVAL_STEP"))
        self.capture = TraceCapture(envs.get("DEEPINFER_PROFILER_DIR"), self.timer)
        port = envs.get("DEEPINFER_PROFILER_PORT")
        self.profiler = None
        if port is not None:
            self.profiler = ProfilerServer(self.capture, envs.get("DEEPINFER_PROFILER_HOST"), port)

    @classmethod
    def of(cls, runner: object, config: EngineConfig) -> Observer:
        """Of an engine over `runner`, which may have `flops` and `part_times`."""
        gc_factor = 10 if config.kind == "completion" else 1  # nobody waits for a single token there
        part_times = getattr(runner, "part_times", dict)
        return cls(config.device, getattr(runner, "flops", None), gc_factor, part_times)

    def guard(self, hook: Callable[[], None]) -> None:
        """Call a hook. A fault costs observations, not requests: it is logged, and no hook is called any more."""
        if self._working:
            try:
                hook()
            except Exception:
                logger.exception("an observer failed; statistics and traces are off from here on")
                self._working = False

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` makes an idle engine's thread call `capture.between_steps`."""
        self.capture.wake = wake

    def work_began(self) -> None:
        """The first request of an idle engine arrived."""
        self.collector.acquire()

    def work_ended(self) -> None:
        """No request is left."""
        self.collector.release()

    def before_step(self) -> None:
        """Begin or end the traces that were asked for."""
        self.capture.between_steps()

    def after_step(self, step: StepStats) -> None:
        """Take in what a step did, and log the figures when they are due."""
        if self.stats.record(step) and self.timer.enabled:
            summary = self.timer.summary() | self.part_times()
            times = (f"{name} {1e3 * time.median:.3f}" for name, time in summary.items())
            stats_logger.info("medians in ms: %s", ", ".join(times))
        self.capture.after_step()
        self.collector.step()

    def close(self) -> None:
        """Give back the garbage collector and the profiler's port."""
        self.collector.release()
        if self.profiler is not None:
            self.profiler.close()
            self.profiler = None


def _peak_of(device: str) -> float | None:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    return peak_flops(device, name)
