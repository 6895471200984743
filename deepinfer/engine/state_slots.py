"""Pool of state slots: one per admitted sequence, for everything of fixed size (SWA ring, carries, Engram window)."""

from collections.abc import Iterable

NULL_SLOT = 0


class StateSlots:
    """Slot ids 1..num_slots; slot 0 is the null slot that padding rows write to."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a free slot. Raises RuntimeError if there is none."""
        if not self._free:
            raise RuntimeError(f"all {self.num_slots} state slots are taken")
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless the held slots (all there are) and the free ones are exactly 1..num_slots."""
        if sorted([*held, *self._free]) != list(range(1, self.num_slots + 1)):
            raise RuntimeError("state slots leaked or taken twice")
