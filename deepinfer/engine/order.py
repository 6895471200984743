"""Who comes first: the order of the waiting queue, and whom preemption takes.

A request of a lower `priority` goes first, but a level is worth one minute of waiting and no more: whoever has waited
longer than that goes before new requests of the next better level. So nothing waits for ever, however many requests of
better priority arrive, and the order of two requests never changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.engine.sequence import Sequence

SECONDS_PER_LEVEL = 60.0


def queue_order(arrival_time: float, priority: int, arrival: int) -> tuple[float, int]:
    """Sort key of the waiting queue, smallest first; `arrival` numbers sequences and decides between equals."""
    return arrival_time + SECONDS_PER_LEVEL * priority, arrival


def victim_of(candidates: Iterable[Sequence]) -> Sequence:
    """Whom to preempt: the worst level of priority and age, then the shortest output, then the last that came."""
    return min(candidates, key=lambda s: (-(s.order[0] // SECONDS_PER_LEVEL), s.num_output_tokens, -s.arrival))
