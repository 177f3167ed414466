"""A block space in dictionaries and lists: one full-attention group, as simple as can be, for the naive server.

Written from the promises of the design (1 to 7 and 13), from ``docs/decisions/0007`` and from ``docs/replay.md``, over
two pools of ``naive_pool.py``.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from tests.simulation.naive_pool import ROOT_LIFE, Content, NaivePool

__all__ = ["Duplicate", "NaiveSpace", "NaiveTable"]


@dataclass(eq=False)
class NaiveTable:
    """One sequence: its tokens, its blocks, how much is computed and named."""

    tokens: list[Hashable]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    parent_life: int = ROOT_LIFE  # life of the block that is named for the last published content


@dataclass
class Duplicate:
    """A block whose content ``carrier`` is named for, with both blocks' lives."""

    index: int
    block: int
    life: int
    carrier: int
    carrier_life: int


class NaiveSpace:
    """A device pool and a host pool, and the sequences in them.

    Attributes:
        hit_ages: seconds, one entry a block that was hit.
    """

    def __init__(self, num_usable: int, block_size: int, num_host_usable: int, watermark: float) -> None:
        self.block_size = block_size
        self.watermark = watermark
        self.device = self.new_pool(num_usable)
        self.host = self.new_pool(num_host_usable)
        self.running: list[NaiveTable] = []  # tables of device blocks
        self.copied_to: set[int] = set()  # device blocks that the open step writes before its forward pass
        self.duplicates: list[Duplicate] = []
        self.hit_ages: list[float] = []

    def new_pool(self, num_usable: int) -> NaivePool:
        """Make a pool; negative controls make a broken one."""
        return NaivePool(num_usable)

    def set_time(self, now: float) -> None:
        """Let it be so late."""
        self.device.now = now

    # Counting

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def kept_free(self) -> int:
        """The watermark, unless the pool serves no sequence."""
        is_idle = len(self.device.free) == self.device.num_usable
        return 0 if is_idle else int(self.watermark * self.device.num_usable)

    def fits(self, num_needed: int) -> bool:
        """Tell whether so many blocks leave the watermark."""
        return num_needed <= len(self.device.free) - self.kept_free

    # Names

    def content(self, table: NaiveTable, index: int) -> Content:
        """Give what a full block stands for: all tokens up to its end."""
        return tuple(table.tokens[: (index + 1) * self.block_size])

    def _publish(self, table: NaiveTable) -> None:
        """Name every full block of a table that was not offered yet."""
        for index in range(table.num_published, len(table.tokens) // self.block_size):
            block = table.blocks[index]
            carrier = self.device.carrier(self.content(table, index), block, table.parent_life)
            if carrier != block:
                lives = self.device.life[block], self.device.life[carrier]
                self.duplicates.append(Duplicate(index, block, lives[0], carrier, lives[1]))
            table.num_published = index + 1
            table.parent_life = self.device.life[carrier]

    def hits(self, tokens: list[Hashable]) -> list[int]:
        """Find the cached blocks of a prompt, at most all but its last token. Changes nothing."""
        blocks: list[int] = []
        parent_life = ROOT_LIFE
        for end in range(self.block_size, self._most_hit_tokens(tokens) + 1, self.block_size):
            block = self.device.child(tuple(tokens[:end]), parent_life)
            if block is None:
                break
            blocks.append(block)
            parent_life = self.device.life[block]
        return blocks

    def _most_hit_tokens(self, tokens: list[Hashable]) -> int:
        return len(tokens) - 1

    # Sequences

    def can_allocate(self, tokens: list[Hashable], num_slots: int = 0) -> bool:
        """Tell whether the new blocks, slots beyond the tokens, and hits that are free leave the watermark."""
        hits = self.hits(tokens)
        num_free_hits = sum(1 for block in hits if block in self.device.free)
        return self.fits(self.blocks_for(len(tokens) + num_slots) - len(hits) + num_free_hits)

    def allocate(self, tokens: list[Hashable]) -> NaiveTable:
        """Seat a new sequence; its hits count as computed."""
        hits, device = self.hits(tokens), self.device
        for block in hits:
            is_used = device.references[block] > 0
            self.hit_ages.append(0.0 if is_used else device.now - device.given_up_at[block])
            device.was_hit.add(block)
            device.share(block)
        table = NaiveTable(list(tokens), list(hits), len(hits) * self.block_size, len(hits))
        if hits:
            table.parent_life = device.life[hits[-1]]
        self.running.append(table)
        self._extend(table)
        self._publish(table)
        return table

    def _extend(self, table: NaiveTable) -> None:
        """Take the blocks that a table lacks, and note what the open step computes."""
        while len(table.blocks) < self.blocks_for(len(table.tokens)):
            table.blocks.append(self.device.take())
        self.device.pending |= set(table.blocks[table.num_computed // self.block_size :])

    def num_needed(self, growing: list[tuple[NaiveTable, list[Hashable]]]) -> int:
        """Count the free blocks that :meth:`append` takes, copies on write included."""
        references = self.device.references.copy()
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
            if len(table.tokens) % self.block_size and self.device.references[table.blocks[-1]] > 1:
                self._copy_on_write(table)
            table.tokens += tokens
            self._extend(table)
        for table, _ in growing:
            self._publish(table)

    def _copy_on_write(self, table: NaiveTable) -> None:
        shared, own = table.blocks[-1], self.device.take()
        if shared in self.device.pending:
            self.device.pending.add(own)
        self.device.held |= {shared, own}
        self.copied_to.add(own)
        self.device.give_back(shared)
        table.blocks[-1] = own

    def fork(self, table: NaiveTable) -> NaiveTable:
        """Share every block of a sequence."""
        for block in table.blocks:
            self.device.share(block)
        child = NaiveTable(list(table.tokens), list(table.blocks), table.num_computed, table.num_published)
        child.parent_life = table.parent_life
        self.running.append(child)
        return child

    def release(self, tables: list[NaiveTable]) -> None:
        """Give sequences up, of each the tail first."""
        for table in tables:
            for block in reversed(table.blocks):
                self.device.give_back(block)
            table.blocks = []
            self.running.remove(table)

    # Swaps

    def can_swap_out(self, tables: list[NaiveTable]) -> bool:
        """Tell whether the host pool has room, and the open step writes none of the blocks beforehand."""
        blocks = {block for table in tables for block in table.blocks}
        num_taken = self._num_taken(self._twins(tables, self.device, self.host), self.host)
        return num_taken <= len(self.host.free) and not blocks & self.copied_to

    def swap_out(self, tables: list[NaiveTable]) -> int:
        """Move sequences out; blocks that are copied stay put until the step is over. Returns how many are."""
        num_moved = len(self._move(tables, self.device, self.host))
        for table in tables:
            self.running.remove(table)
            self._name_on_host(table)
        return num_moved

    def can_swap_in(self, tables: list[NaiveTable], num_slots: int) -> bool:
        """Tell whether the next token of each sequence, and slots beyond it, leave the watermark."""
        num_taken = self._num_taken(self._twins(tables, self.host, self.device), self.device)
        holders = Counter(table.blocks[-1] for table in tables if len(table.tokens) % self.block_size)
        num_copied = sum(count - 1 for count in holders.values())  # all write; the last one need not copy
        num_beyond = sum(self.blocks_for(len(table.tokens) + 1 + num_slots) - len(table.blocks) for table in tables)
        return self.fits(num_taken + num_copied + num_beyond)

    def swap_in(self, tables: list[NaiveTable]) -> int:
        """Move sequences back, and offer their blocks for names anew. Returns how many blocks are copied."""
        moved_to = self._move(tables, self.host, self.device)
        self.copied_to |= set(moved_to)
        for table in tables:
            self.running.append(table)
            table.num_published, table.parent_life = 0, ROOT_LIFE
        for table in tables:
            self._publish(table)
        return len(moved_to)

    def _twins(self, tables: list[NaiveTable], source: NaivePool, destination: NaivePool) -> dict[int, int | None]:
        """Find, for each block, the block that holds the same on the other side.

        It is full and computed, and so is its twin; the twin can be found there from the prompt's beginning on.
        """
        twins: dict[int, int | None] = {}
        for table in tables:
            parent_life: int | None = ROOT_LIFE
            for index, block in enumerate(table.blocks):
                if block not in twins:
                    is_whole = (index + 1) * self.block_size <= table.num_computed and block not in source.pending
                    twin = None
                    if is_whole and parent_life is not None:
                        twin = destination.child(self.content(table, index), parent_life)
                    twins[block] = None if twin in destination.pending else twin
                twin = twins[block]
                parent_life = None if twin is None else destination.life[twin]
        return twins

    def _num_taken(self, twins: dict[int, int | None], destination: NaivePool) -> int:
        """Count the free blocks that go: one for each copy, and the unreferenced twins."""
        shared = {twin for twin in twins.values() if twin is not None}
        num_copied = sum(twin is None for twin in twins.values())
        return num_copied + sum(1 for twin in shared if twin in destination.free)

    def _move(self, tables: list[NaiveTable], source: NaivePool, destination: NaivePool) -> list[int]:
        """Give all blocks of sequences their places on the other side; return the places that are copied to."""
        places = self._twins(tables, source, destination)
        copied_to: list[int] = []
        claimed = {block: twin for block, twin in places.items() if twin is not None}
        for twin in claimed.values():
            destination.share(twin)  # before any new block, which might evict it
        for table in tables:
            before, table.blocks = table.blocks, []
            for block in before:
                place = places[block]
                if place is None:
                    place = places[block] = destination.take()
                    source.held.add(block)
                    destination.held.add(place)
                    copied_to.append(place)
                elif block in claimed:
                    del claimed[block]  # its first reference is taken
                else:
                    destination.share(place)
                table.blocks.append(place)
            for block in reversed(before):
                source.give_back(block)
        return copied_to

    def _name_on_host(self, table: NaiveTable) -> None:
        """Let what a sequence brought to the host be found there, up to the first block that has a double there."""
        parent_life = ROOT_LIFE
        for index in range(table.num_computed // self.block_size):
            block = table.blocks[index]
            if block not in self.host.names:
                carrier = self.host.carrier(self.content(table, index), block, parent_life)
                if carrier != block:
                    return
            parent_life = self.host.life[block]

    # The end of a step

    def acknowledge(self) -> None:
        """The open step is over: free what waited for it, replace duplicates by what is found in their place."""
        self.device.end_step()
        self.host.end_step()
        self.copied_to.clear()
        duplicates, self.duplicates = self.duplicates, []
        orphans: list[NaiveTable] = []
        for duplicate in duplicates:
            if self._is_still_there(duplicate):
                self._merge(duplicate, orphans)
        for table in orphans:
            self._publish(table)

    def _is_still_there(self, duplicate: Duplicate) -> bool:
        block = duplicate.block
        return self.device.life[block] == duplicate.life and block not in self.device.names

    def _merge(self, duplicate: Duplicate, orphans: list[NaiveTable]) -> None:
        """Let all who hold a duplicate hold its carrier; where that is gone, let the duplicate be named."""
        index, block, carrier = duplicate.index, duplicate.block, duplicate.carrier
        holders = [table for table in self.running if table.blocks[index : index + 1] == [block]]
        if carrier in self.device.names and self.device.life[carrier] == duplicate.carrier_life:
            for holder in holders:
                self.device.share(carrier)
                holder.blocks[index] = carrier
                self.device.give_back(block)
            return
        for holder in holders:
            self._unpublish_from(holder, index)
        orphans.extend(holder for holder in holders if holder not in orphans)

    def _unpublish_from(self, table: NaiveTable, index: int) -> None:
        while index > 0 and table.blocks[index - 1] not in self.device.names:
            index -= 1
        if index < table.num_published:
            table.num_published = index
            table.parent_life = self.device.life[table.blocks[index - 1]] if index else ROOT_LIFE
