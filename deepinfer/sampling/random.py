"""Counter-based uniform draws: a function of (seed, counter) alone, so batch mates and preemption change nothing.

The mixer is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

import numpy as np

from deepinfer.params import MAX_SEED

_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seeds: list[int], counters: list[int]) -> np.ndarray:
    """float64 [n] in [0, 1), multiples of 2**-40 (so that u * total rounds below total)."""
    state = _mix(np.array(seeds, np.uint64)) + np.array(counters, np.uint64) * np.uint64(_GOLDEN)
    return (_mix(state) >> np.uint64(24)).astype(np.float64) * 2.0**-40


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: seed, seed + 1, ..., so that each can be repeated by itself."""
    return (seed + index) % (MAX_SEED + 1)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
