"""A block space in dictionaries and lists: one full-attention group, as simple as can be, for the naive server.

Written from the promises of the design (1 to 7 and 13) and from ``docs/decisions/0007``. A cached block is found by
its *whole* prefix, a tuple of tokens. Two things are kept as the library keeps them, since counts depend on them:
a name is good only while the block that its chain goes through keeps its content (``life``), and blocks that
the open step copies or swaps are handed to nobody before that step is over (``deferred``).
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["NaiveSpace", "NaiveTable"]

ROOT_LIFE = 0


@dataclass
class NaiveTable:
    """One sequence: its tokens, its blocks, how much is computed and named."""

    tokens: list[Hashable]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    parent_life: int = ROOT_LIFE  # life of the block that is named for the last published content


@dataclass
class Name:
    """What a block can be found by."""

    content: tuple[Hashable, ...]
    parent_life: int


@dataclass
class Duplicate:
    """A block whose content ``carrier`` is named for, with both blocks' lives."""

    table: NaiveTable
    index: int
    block: int
    life: int
    carrier: int
    carrier_life: int


class NaiveSpace:
    """A device pool and a host pool, and what happens in them.

    Attributes:
        now: read whenever a block is given up, hit or evicted.
        hit_ages, eviction_ages: seconds, one entry a block.
    """

    def __init__(self, num_usable: int, block_size: int, num_host_usable: int, watermark: float) -> None:
        self.num_usable = num_usable
        self.block_size = block_size
        self.watermark = watermark
        self.now = 0.0
        self.free = list(range(num_usable))  # the first is taken first
        self.deferred: list[int] = []
        self.references: Counter[int] = Counter()
        self.names: dict[int, Name] = {}
        self.found: dict[tuple[Hashable, ...], int] = {}
        self.life = dict.fromkeys(range(num_usable), ROOT_LIFE)
        self.num_lives = 0
        self.pending: set[int] = set()  # the open step computes something in them
        self.held: set[int] = set()  # the open step copies or swaps them
        self.copied_to: set[int] = set()  # the open step writes them before its forward pass
        self.duplicates: list[Duplicate] = []
        self.num_host_usable = num_host_usable
        self.num_host_free = num_host_usable
        self.num_host_deferred = 0
        self.given_up_at: dict[int, float] = {}
        self.was_hit: set[int] = set()
        self.hit_ages: list[float] = []
        self.eviction_ages: list[float] = []
        self.num_never_reused = 0

    # Counting

    @property
    def num_live(self) -> int:
        """Blocks that tables refer to."""
        return sum(1 for count in self.references.values() if count > 0)

    @property
    def num_cached(self) -> int:
        """Free blocks that can be found."""
        return sum(1 for block in self.free if block in self.names)

    @property
    def num_empty(self) -> int:
        """Free blocks without content."""
        return len(self.free) - self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def kept_free(self) -> int:
        """The watermark, unless the pool serves nobody."""
        return 0 if len(self.free) == self.num_usable else int(self.watermark * self.num_usable)

    # One block

    def _new_life(self, block: int) -> None:
        self.num_lives += 1
        self.life[block] = self.num_lives

    def _forget(self, block: int) -> None:
        del self.found[self.names.pop(block).content]
        self.was_hit.discard(block)
        self._new_life(block)

    def _next_free(self) -> int:
        return self.free.pop(0)

    def _take(self) -> int:
        block = self._next_free()
        if block in self.names:
            self.eviction_ages.append(self.now - self.given_up_at[block])
            self.num_never_reused += block not in self.was_hit
            self._forget(block)
        self._new_life(block)
        self.references[block] = 1
        self.pending.discard(block)
        return block

    def _share(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        if block in self.deferred:
            self.deferred.remove(block)
        self.references[block] += 1

    def _give_back(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] > 0:
            return
        self.given_up_at[block] = self.now
        if block in self.names and block in self.pending:
            self._forget(block)
        if block in self.held:
            self.deferred.append(block)
        else:
            self._enqueue(block)

    def _enqueue(self, block: int) -> None:
        if block in self.names:
            self.free.append(block)
        else:
            self.free.insert(0, block)

    # Names

    def _publish(self, table: NaiveTable) -> None:
        """Name every full block of a table that was not offered yet."""
        for index in range(table.num_published, len(table.tokens) // self.block_size):
            content = tuple(table.tokens[: (index + 1) * self.block_size])
            block = table.blocks[index]
            carrier = self._carrier(content, block, table.parent_life)
            if carrier != block:
                lives = self.life[block], self.life[carrier]
                self.duplicates.append(Duplicate(table, index, block, lives[0], carrier, lives[1]))
            table.num_published = index + 1
            table.parent_life = self.life[carrier]

    def _carrier(self, content: tuple[Hashable, ...], block: int, parent_life: int) -> int:
        other = self.found.get(content)
        if other is not None and self.names[other].parent_life == parent_life:
            return other
        if other is not None:  # named, but nobody could find it: a block before it was given up
            self._forget(other)
            if other in self.free:
                self.free.remove(other)
                self.free.insert(0, other)
        self.names[block] = Name(content, parent_life)
        self.found[content] = block
        return block

    def hits(self, tokens: list[Hashable]) -> list[int]:
        """Find the cached blocks of a prompt, at most all but its last token. Changes nothing."""
        blocks: list[int] = []
        parent_life = ROOT_LIFE
        for end in range(self.block_size, self._most_hit_tokens(tokens) + 1, self.block_size):
            block = self.found.get(tuple(tokens[:end]))
            if block is None or self.names[block].parent_life != parent_life:
                break
            blocks.append(block)
            parent_life = self.life[block]
        return blocks

    def _most_hit_tokens(self, tokens: list[Hashable]) -> int:
        return len(tokens) - 1

    # Sequences

    def can_allocate(self, tokens: list[Hashable]) -> bool:
        """Tell whether the new blocks, and hits that are free, leave the watermark."""
        hits = self.hits(tokens)
        num_needed = self.blocks_for(len(tokens)) - len(hits) + sum(1 for block in hits if block in self.free)
        return num_needed <= len(self.free) - self.kept_free

    def allocate(self, tokens: list[Hashable]) -> NaiveTable:
        """Seat a new sequence; its hits count as computed."""
        hits = self.hits(tokens)
        for block in hits:
            is_used = self.references[block] > 0
            self.hit_ages.append(0.0 if is_used else self.now - self.given_up_at[block])
            self.was_hit.add(block)
            self._share(block)
        table = NaiveTable(list(tokens), list(hits), len(hits) * self.block_size, len(hits))
        if hits:
            table.parent_life = self.life[hits[-1]]
        self._extend(table)
        self._publish(table)
        return table

    def _extend(self, table: NaiveTable) -> None:
        """Take the blocks that a table lacks, and note what the open step computes."""
        while len(table.blocks) < self.blocks_for(len(table.tokens)):
            table.blocks.append(self._take())
        self.pending |= set(table.blocks[table.num_computed // self.block_size :])

    def num_needed(self, growing: list[tuple[NaiveTable, list[Hashable]]]) -> int:
        """Count the free blocks that :meth:`append` takes, copies on write included."""
        references = self.references.copy()
        num_needed = 0
        for table, tokens in growing:
            num_tokens = len(table.tokens)
            if num_tokens % self.block_size and references[table.blocks[-1]] > 1:
                references[table.blocks[-1]] -= 1
                num_needed += 1
            num_needed += self.blocks_for(num_tokens + len(tokens)) - len(table.blocks)
        return num_needed

    def append(self, growing: list[tuple[NaiveTable, list[Hashable]]]) -> None:
        """Append tokens to tables, in order; the free blocks suffice."""
        for table, tokens in growing:
            if len(table.tokens) % self.block_size and self.references[table.blocks[-1]] > 1:
                self._copy_on_write(table)
            table.tokens += tokens
            self._extend(table)
        for table, _ in growing:
            self._publish(table)

    def _copy_on_write(self, table: NaiveTable) -> None:
        shared, own = table.blocks[-1], self._take()
        if shared in self.pending:
            self.pending.add(own)
        self.held |= {shared, own}
        self.copied_to.add(own)
        self._give_back(shared)
        table.blocks[-1] = own

    def fork(self, table: NaiveTable) -> NaiveTable:
        """Share every block of a sequence."""
        for block in table.blocks:
            self.references[block] += 1
        child = NaiveTable(list(table.tokens), list(table.blocks), table.num_computed, table.num_published)
        child.parent_life = table.parent_life
        return child

    def release(self, tables: list[NaiveTable]) -> None:
        """Give sequences up, of each the tail first."""
        for table in tables:
            for block in reversed(table.blocks):
                self._give_back(block)
            table.blocks = []

    # Swaps; host blocks are counted only: nobody can find them

    def can_swap_out(self, tables: list[NaiveTable]) -> bool:
        """Tell whether the host pool has room, and the open step writes none of the blocks beforehand."""
        blocks = {block for table in tables for block in table.blocks}
        return len(blocks) <= self.num_host_free and not blocks & self.copied_to

    def swap_out(self, tables: list[NaiveTable]) -> int:
        """Move sequences out; their device blocks stay put until the step is over. Returns the blocks moved."""
        blocks = {block for table in tables for block in table.blocks}
        self.held |= blocks
        self.num_host_free -= len(blocks)
        on_host = [[~block for block in table.blocks] for table in tables]  # negative: no device block
        self.release(tables)
        for table, places in zip(tables, on_host, strict=True):
            table.blocks = places
        return len(blocks)

    def can_swap_in(self, tables: list[NaiveTable]) -> bool:
        """Tell whether the blocks leave the watermark."""
        blocks = {block for table in tables for block in table.blocks}
        return len(blocks) <= len(self.free) - self.kept_free

    def swap_in(self, tables: list[NaiveTable]) -> int:
        """Move sequences back: new blocks, in the order of the tables, offered for names anew."""
        moved_to: dict[int, int] = {}
        for table in tables:
            for index, block in enumerate(table.blocks):
                if block in moved_to:
                    self.references[moved_to[block]] += 1
                else:
                    moved_to[block] = self._take()
                table.blocks[index] = moved_to[block]
            table.num_published, table.parent_life = 0, ROOT_LIFE
        self.held |= set(moved_to.values())
        self.copied_to |= set(moved_to.values())
        self.num_host_deferred += len(moved_to)
        for table in tables:
            if table.num_computed < len(table.tokens):
                self.pending |= set(table.blocks[table.num_computed // self.block_size :])
        for table in tables:
            self._publish(table)
        return len(moved_to)

    def acknowledge(self) -> None:
        """The open step is over: free what waited for it, drop duplicates."""
        self.pending.clear()
        self.held.clear()
        self.copied_to.clear()
        for block in self.deferred:
            self._enqueue(block)
        self.deferred = []
        self.num_host_free += self.num_host_deferred
        self.num_host_deferred = 0
        for duplicate in self.duplicates:
            self._merge(duplicate)
        self.duplicates = []

    def _merge(self, duplicate: Duplicate) -> None:
        blocks, block, carrier = duplicate.table.blocks, duplicate.block, duplicate.carrier
        is_still_there = (
            duplicate.index < len(blocks)
            and blocks[duplicate.index] == block
            and (self.references[block], self.life[block]) == (1, duplicate.life)
            and carrier in self.names
            and self.life[carrier] == duplicate.carrier_life
        )
        if is_still_there:
            self._share(carrier)
            blocks[duplicate.index] = carrier
            self._give_back(block)
