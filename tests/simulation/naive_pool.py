"""One pool of blocks in dictionaries and lists: who refers to each, where it can be found, when it was given up.

Written from the promises of the design and from ``docs/decisions/0007``. A cached block is found by its *whole* prefix,
a tuple of tokens. Two things are kept as the library keeps them, since counts depend on them: a name is good only
while the block that its chain goes through keeps its content (``life``), and blocks that the open step copies or swaps
are not handed out before that step is over (``deferred``).
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["ROOT_LIFE", "Content", "NaivePool", "Name"]

Content: TypeAlias = tuple[Hashable, ...]
ROOT_LIFE = 0


@dataclass
class Name:
    """What a block can be found by."""

    content: Content
    parent_life: int


class NaivePool:
    """A device pool, or a host pool.

    Attributes:
        now: read whenever a block is given up or evicted.
        eviction_ages: seconds, one entry a block.
    """

    def __init__(self, num_usable: int) -> None:
        self.num_usable = num_usable
        self.now = 0.0
        self.free = list(range(num_usable))  # the first is taken first
        self.deferred: list[int] = []
        self.references: Counter[int] = Counter()
        self.names: dict[int, Name] = {}
        self.found: dict[Content, int] = {}
        self.life = dict.fromkeys(range(num_usable), ROOT_LIFE)
        self.num_lives = 0
        self.pending: set[int] = set()  # the open step computes something in them
        self.held: set[int] = set()  # the open step copies or swaps them
        self.given_up_at: dict[int, float] = {}
        self.was_hit: set[int] = set()
        self.eviction_ages: list[float] = []
        self.num_never_reused = 0

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

    # References

    def take(self) -> int:
        """Hand the next free block out; what it cached is evicted."""
        block = self._next_free()
        if block in self.names:
            self.eviction_ages.append(self.now - self.given_up_at[block])
            self.num_never_reused += block not in self.was_hit
            self._forget(block)
        self._new_life(block)
        self.references[block] = 1
        self.pending.discard(block)
        return block

    def _next_free(self) -> int:
        return self.free.pop(0)

    def share(self, block: int) -> None:
        """Refer to a block once more, wherever it is."""
        if block in self.free:
            self.free.remove(block)
        if block in self.deferred:
            self.deferred.remove(block)
        self.references[block] += 1

    def give_back(self, block: int) -> None:
        """Refer to a block once less; the last reference frees it, at once unless the open step moves it."""
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

    def end_step(self) -> None:
        """The open step is over: free what waited for it."""
        self.pending.clear()
        self.held.clear()
        for block in self.deferred:
            self._enqueue(block)
        self.deferred = []

    # Names

    def carrier(self, content: Content, block: int, parent_life: int) -> int:
        """Offer a block for the name of its content; tell which block carries it."""
        other = self.found.get(content)
        if other is not None and (other == block or self.names[other].parent_life == parent_life):
            return other
        if other is not None:  # named, but not to be found: a block before it was evicted
            self._forget(other)
            if other in self.free:
                self.free.remove(other)
                self.free.insert(0, other)
        self.names[block] = Name(content, parent_life)
        self.found[content] = block
        return block

    def child(self, content: Content, parent_life: int) -> int | None:
        """Find the block of some content behind a parent that still has the content that it had then."""
        block = self.found.get(content)
        return block if block is not None and self.names[block].parent_life == parent_life else None

    def _forget(self, block: int) -> None:
        del self.found[self.names.pop(block).content]
        self.was_hit.discard(block)
        self._new_life(block)

    def _new_life(self, block: int) -> None:
        self.num_lives += 1
        self.life[block] = self.num_lives
