"""Timers, statistics, FLOP counts, profiler traces and control of the garbage collector; see docs/observability.md."""
