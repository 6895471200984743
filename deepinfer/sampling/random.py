"""Which uniform numbers a completion draws: counter-based, so batch mates and preemption change nothing."""

from deepinfer.params import MAX_SEED


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: seed, seed + 1, ..., so that each can be repeated by itself."""
    return (seed + index) % (MAX_SEED + 1)
