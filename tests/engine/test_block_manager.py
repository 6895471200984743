"""BlockManager and StateSlots against plain dictionaries and sets."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.engine.block_manager import AllocStatus, BlockManager
from deepinfer.engine.state_slots import StateSlots


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size=4)
        self.capacity = num_blocks - 1
        self.tables: list[list[int]] = []
        self.free_order = list(range(1, num_blocks))  # oldest first

    @rule(count=st.integers(0, 13), keep_free=st.integers(0, 3))
    def allocate(self, count: int, keep_free: int) -> None:
        status = self.manager.can_allocate(count, keep_free)
        if count > self.capacity:
            assert status is AllocStatus.NEVER
        else:
            fits = count + keep_free <= len(self.free_order)
            assert status is (AllocStatus.OK if fits else AllocStatus.LATER)
        if count > len(self.free_order):
            with pytest.raises(RuntimeError, match="blocks"):
                self.manager.allocate(count)
            return
        blocks = self.manager.allocate(count)
        assert blocks == self.free_order[:count]  # oldest first, never block 0
        del self.free_order[:count]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_prefix(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        for block in prefix:
            self.manager.share(block)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.free_order)
    @rule(data=st.data())
    def revive_a_free_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.free_order))
        self.manager.share(block)
        self.free_order.remove(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        blocks = self.tables.pop(index)
        table = array("i", blocks)
        self.manager.release(table)
        assert len(table) == 0
        still_held = {block for other in self.tables for block in other}
        self.free_order += [block for block in reversed(blocks) if block not in still_held]

    @rule()
    def freeing_a_free_block_is_refused(self) -> None:
        if self.free_order:
            with pytest.raises(RuntimeError, match="already free"):
                self.manager.free([self.free_order[0]])

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "manager"):
            assert self.manager.num_free == len(self.free_order)
            self.manager.check_integrity(array("i", table) for table in self.tables)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_integrity_check_sees_a_leak_and_a_foreign_block() -> None:
    manager = BlockManager(8, 4)
    table = array("i")
    manager.extend(table, 9)
    assert len(table) == 3
    manager.check_integrity([table])
    with pytest.raises(RuntimeError, match="reference counts"):
        manager.check_integrity([])
    with pytest.raises(RuntimeError, match="reference counts"):
        manager.check_integrity([table, array("i", [7])])
    manager._next[manager._next[0]] = 0
    with pytest.raises(RuntimeError, match="free list"):
        manager.check_integrity([table])


def test_null_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="block must be in"):
        BlockManager(4, 4).share(0)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockManager(1, 4)


def test_state_slots_are_distinct_and_never_zero() -> None:
    slots = StateSlots(3)
    held = [slots.allocate() for _ in range(3)]
    assert sorted(held) == [1, 2, 3] and slots.num_free == 0
    with pytest.raises(RuntimeError, match="slots"):
        slots.allocate()
    slots.check_integrity(held)
    slots.free(held.pop())
    slots.check_integrity(held)
    for wrong in ([1], [*held, held[0]]):
        with pytest.raises(RuntimeError, match="leaked"):
            slots.check_integrity(wrong)
