"""Paged cache bookkeeping: a reference-counted pool of block ids (system spec, "paged block cache").

Free blocks form a doubly linked list held in two arrays (intrusive: no node objects), so taking the oldest free
block, freeing one, and taking a particular one out of the middle are all O(1). Block 0 is the null block: it heads the
list, pads block tables and is never handed out.
"""

from array import array
from collections.abc import Iterable
from enum import Enum

from deepinfer.observability.block_lifetimes import BlockLifetimes

NULL_BLOCK = 0


class AllocStatus(Enum):
    """What `can_allocate` answers: there is room now, there may be later, there never will be."""

    OK = "ok"
    LATER = "later"  # not enough free blocks now
    NEVER = "never"  # more blocks than the pool has


class BlockManager:
    """Pool of `num_blocks` blocks of `block_size` tokens; `num_blocks` counts the null block.

    `lifetimes` hears of every block that is taken or freed.
    """

    def __init__(self, num_blocks: int, block_size: int, lifetimes: BlockLifetimes | None = None):
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks - 1
        self._lifetimes = lifetimes or BlockLifetimes({})
        self._ref_count = [0] * num_blocks
        # A ring through block 0: next[0] is the oldest free block, prev[0] the newest.
        self._next = [(i + 1) % num_blocks for i in range(num_blocks)]
        self._prev = [(i - 1) % num_blocks for i in range(num_blocks)]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int, keep_free: int = 0) -> AllocStatus:
        """Whether num_blocks can be taken while keep_free stay free."""
        if num_blocks > self.num_blocks - 1:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_blocks + keep_free <= self.num_free else AllocStatus.LATER

    def allocate(self, num_blocks: int) -> list[int]:
        """Take the num_blocks oldest free blocks, each with one reference. Raises RuntimeError if there are fewer."""
        if num_blocks > self.num_free:
            raise RuntimeError(f"asked for {num_blocks} blocks, {self.num_free} are free")
        blocks = []
        for _ in range(num_blocks):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._ref_count[block] = 1
            self._lifetimes.allocated(block)
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference; a free block whose content is still wanted leaves the free list.

        For a prefix cache, which finds a prompt's first blocks in the pool instead of computing them again.
        """
        if not 0 < block < self.num_blocks:
            raise ValueError(f"block must be in [1, {self.num_blocks}), got {block}")
        if self._ref_count[block] == 0:
            self._unlink(block)
        self._ref_count[block] += 1
        self._lifetimes.shared(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; unreferenced ones become the newest free blocks, in the order given."""
        for block in blocks:
            if self._ref_count[block] <= 0:
                raise RuntimeError(f"block {block} is already free")
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._link_newest(block)
                self._lifetimes.freed(block)

    def extend(self, block_table: array, num_tokens: int) -> None:
        """Grow a block table until it covers num_tokens tokens."""
        block_table.extend(self.allocate(self.blocks_for(num_tokens) - len(block_table)))

    def release(self, block_table: array) -> None:
        """Free a whole block table and empty it; the tail goes first, so a shared prefix is evicted last."""
        self.free(reversed(block_table))
        del block_table[:]

    def check_integrity(self, block_tables: Iterable[array] = ()) -> None:
        """Raise RuntimeError unless free list, counts and the given tables (all there are) agree."""
        held = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                held[block] += 1
        if held != self._ref_count:
            wrong = [b for b in range(self.num_blocks) if held[b] != self._ref_count[b]]
            raise RuntimeError(f"reference counts of blocks {wrong[:8]} differ from the block tables")
        num_linked, block = 0, self._next[NULL_BLOCK]
        while block != NULL_BLOCK and num_linked <= self.num_blocks:
            if self._prev[self._next[block]] != block or self._ref_count[block]:
                raise RuntimeError(f"free list is broken at block {block}")
            num_linked += 1
            block = self._next[block]
        if num_linked != self.num_free or self.num_free != self._ref_count.count(0) - 1:
            raise RuntimeError(f"{num_linked} blocks in the free list, {self.num_free} counted free")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link_newest(self, block: int) -> None:
        newest = self._prev[NULL_BLOCK]
        self._next[newest] = self._prev[NULL_BLOCK] = block
        self._prev[block], self._next[block] = newest, NULL_BLOCK
        self.num_free += 1
