"""Eviction played with lists and dicts: what ``pagedkv.blocks.eviction`` says in words, none of its code.

A ``Model`` is a pool of blocks whose contents are numbers. It follows every reference, so that a test can ask it which
block goes next. ``NamedPool`` is the production pool behind the same operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.eviction.adaptive import (
    ADAPTIVE,
    EVICTION_COUNTDOWN,
    FLOW_COLD,
    FLOW_REUSED,
    NUM_PROTECTED,
    TARGET,
)
from pagedkv.blocks.eviction.policy import EvictionPolicy
from pagedkv.blocks.free_queue import blocks_of_list, protected_sentinel
from pagedkv.blocks.life_cycle import acquire, drop_name, release, reuse, settle_until
from pagedkv.blocks.prefix_index import is_child_of, name_block
from pagedkv.blocks.record import (
    LIFE,
    NAME,
    NULL_BLOCK,
    NUM_ACQUIRED,
    NUM_SENTINELS,
    OPEN_STEP,
    PARENT,
    PARENT_LIFE,
    REF_COUNT,
)
from pagedkv.blocks.sweeps import drop_all_names

__all__ = ["Ghost", "Model", "NamedPool", "digest_words"]

GROUP_NAME: Final = 1  # of the one group there is
CLOCK_PERIOD: Final = 2**32


def digest_words(content: int) -> tuple[int, int]:
    """Give a content the first two words of its digest: the first says where its ghost goes, the second which it is.

    A ghost leaves out the last bit of the second word, so contents 2 and 3 leave ghosts that look alike, if their first
    words meet in one slot.
    """
    return content * 0x9E3779B1 % 2**32, content


@dataclass(slots=True)
class Block:
    """What the model knows of one block. Without a content it has no name."""

    content: int | None = None
    parent: tuple[int, int] = (NULL_BLOCK, 0)  # and its life
    life: int = 0
    num_refs: int = 0
    hold_step: int = 0
    is_protected: bool = False
    is_reused: bool = False
    level: int | None = None  # of the policy by priority


@dataclass(frozen=True, slots=True)
class Ghost:
    """What is remembered of an evicted content."""

    fingerprint: int
    was_reused: bool
    clock: int


@dataclass(slots=True)
class Flows:
    """Evictions of late, by whether the block had been hit, and how many more until both are halved."""

    cold: int
    reused: int
    countdown: int


@dataclass
class Model:
    """A pool of blocks, in lists. What subclasses break is in methods of its own.

    Args:
        num_blocks: blocks that can be handed out.
        num_slots: of the ghost table; none is LRU.
        clock: acquisitions so far.
    """

    num_blocks: int
    num_slots: int
    clock: int = 0
    open_step: int = 1
    settled_step: int = 0
    nameless: list[int] = field(default_factory=list)  # free blocks, the next to be handed out first
    cold: list[int] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    ghosts: dict[int, Ghost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make all blocks free."""
        self.blocks = {block: Block() for block in range(self.num_blocks + 1)}
        self.nameless = list(range(1, self.num_blocks + 1))
        self.target = self.num_blocks * 16 // 8 if self.num_slots else 0  # an eighth, in sixteenths of a block
        self.flows = Flows(1, 1, self.num_blocks) if self.num_slots else Flows(0, 0, 0)

    @property
    def free(self) -> list[int]:
        """All free blocks, the next to be handed out first."""
        return self.nameless + self.cold + self.protected

    @property
    def num_protected(self) -> int:
        """Protected blocks, free or not."""
        return sum(block.is_protected for block in self.blocks.values())

    def children(self, parent: int) -> list[int]:
        """List the named blocks that continue what a block holds."""
        link = (parent, self.blocks[parent].life)
        return [block for block, state in self.blocks.items() if state.content is not None and state.parent == link]

    def carrier(self, content: int) -> int | None:
        """Find the block that has a content's name."""
        return next((block for block, state in self.blocks.items() if state.content == content), None)

    def acquire(self) -> int:
        """Hand out the next free block."""
        block = self.free[0]
        self._take_out(block)
        state = self.blocks[block]
        if state.content is not None:
            self._remember(state.content, was_reused=state.is_reused)
            self._forget(state)
        state.life += 1
        state.num_refs = 1
        state.hold_step = 0
        self.clock += 1
        return block

    def name(self, block: int, content: int, parent: int) -> None:
        """Give a block in use a content, which continues that of ``parent``."""
        state = self.blocks[block]
        state.content = content
        state.parent = (parent, self.blocks[parent].life)
        if self._may_be_born_protected(parent):
            self._recall(state, content)

    def reuse(self, block: int) -> None:
        """Hit a block."""
        self._take_out(block)
        state = self.blocks[block]
        state.num_refs += 1
        if self.num_slots:
            state.is_protected = state.is_reused = True

    def share(self, block: int) -> None:
        """Take one more reference without a hit."""
        self.blocks[block].num_refs += 1

    def release(self, block: int) -> None:
        """Give one reference back."""
        state = self.blocks[block]
        state.num_refs -= 1
        if state.num_refs:
            return
        if self.open_step - 1 > self.settled_step:
            state.hold_step = max(state.hold_step, self.open_step - 1)
        if state.hold_step > self.settled_step:
            self.deferred.append(block)
        else:
            self._enqueue(block)

    def drop_name(self, block: int) -> None:
        """Make a block unfindable."""
        self._forget(self.blocks[block])
        if block in self.free:
            self._take_out(block)
            self.nameless.insert(0, block)

    def drop_all_names(self) -> None:
        """Make everything unfindable."""
        for block, state in self.blocks.items():
            if state.content is not None:
                self.drop_name(block)

    def plan_step(self) -> None:
        """Send the open step on its way."""
        self.open_step += 1

    def settle(self, step: int) -> None:
        """Note that steps are over."""
        self.settled_step = step
        while self.deferred and self.blocks[self.deferred[0]].hold_step <= step:
            self._enqueue(self.deferred.pop(0))

    def _take_out(self, block: int) -> None:
        for queue in (self.nameless, self.cold, self.protected, self.deferred):
            if block in queue:
                queue.remove(block)

    def _enqueue(self, block: int) -> None:
        state = self.blocks[block]
        if state.content is None:
            self.nameless.insert(0, block)
        elif not state.is_protected:
            self.cold.append(block)
        else:
            self.protected.append(block)
            while self.protected and 16 * self.num_protected > self.target:
                demoted = self.protected.pop(0)
                self.blocks[demoted].is_protected = False
                self._demote(demoted)

    def _demote(self, block: int) -> None:
        self.cold.append(block)

    def _forget(self, state: Block) -> None:
        state.content = None
        state.life += 1
        state.is_protected = state.is_reused = False
        state.level = None

    def _slot(self, content: int) -> int:
        return digest_words(content)[0] % self.num_slots

    def _remember(self, content: int, *, was_reused: bool) -> None:
        if not self.num_slots:
            return
        self.ghosts.pop(self._slot(content), None)
        if self.clock % CLOCK_PERIOD != 0:  # at which slots are empty
            fingerprint = digest_words(content)[1] // 2
            self.ghosts[self._slot(content)] = Ghost(fingerprint, was_reused, self.clock % CLOCK_PERIOD)
        if was_reused:
            self.flows.reused += 1
        else:
            self.flows.cold += 1
        self.flows.countdown -= 1
        if self.flows.countdown == 0:
            self._halve_flows()

    def _halve_flows(self) -> None:
        self.flows = Flows(self.flows.cold // 2 + 1, self.flows.reused // 2 + 1, self.num_blocks)

    def _may_be_born_protected(self, parent: int) -> bool:
        state = self.blocks[parent]
        return bool(self.num_slots) and (parent == NULL_BLOCK or (state.is_protected and state.num_refs > 0))

    def _recall(self, state: Block, content: int) -> None:
        ghost = self.ghosts.get(self._slot(content))
        if ghost is None or ghost.fingerprint != digest_words(content)[1] // 2:
            return
        away = self._away(ghost)
        if away > self.num_blocks:
            return
        if 4 * away <= self.num_blocks:
            self.target = max(0, min(self.target + self._vote(ghost), 15 * self.num_blocks))
        del self.ghosts[self._slot(content)]
        state.is_protected = state.is_reused = True

    def _away(self, ghost: Ghost) -> int:
        return (self.clock - ghost.clock) % CLOCK_PERIOD

    def _vote(self, ghost: Ghost) -> int:
        flows = self.flows
        both = flows.cold + flows.reused
        return 8 * both // flows.reused if ghost.was_reused else -(8 * both // flows.cold)


class NamedPool:
    """The production pool, whose blocks get contents by number.

    Args:
        num_blocks: blocks that can be handed out.
        policy: which of them to evict.
        num_slots: of the ghost table, where it shall not be as large as the policy makes it; a power of two.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy = ADAPTIVE, num_slots: int | None = None) -> None:
        """Build the pool."""
        self.pool = BlockPool("device", num_blocks + 1, 1, policy=policy)
        if num_slots is not None:
            self.pool.arrays = self.pool.arrays._replace(eviction_table=np.zeros((num_slots, 2), np.uint32))
        self.arrays = self.pool.arrays

    @property
    def clock(self) -> int:
        """Acquisitions so far."""
        return int(self.arrays.counts[NUM_ACQUIRED])

    @clock.setter
    def clock(self, clock: int) -> None:
        self.arrays.counts[NUM_ACQUIRED] = clock

    @property
    def target(self) -> int:
        """How many blocks to protect at most, in sixteenths."""
        return self._count(TARGET)

    @target.setter
    def target(self, target: int) -> None:
        if target or len(self.arrays.eviction):
            self.arrays.eviction[TARGET] = target

    @property
    def num_protected(self) -> int:
        """Protected blocks as the policy counts them."""
        return self._count(NUM_PROTECTED)

    @property
    def flows(self) -> Flows:
        """Evictions of late."""
        return Flows(*map(self._count, (FLOW_COLD, FLOW_REUSED, EVICTION_COUNTDOWN)))

    def _count(self, place: int) -> int:
        """Read a count of the adaptive policy; LRU keeps none."""
        return int(self.arrays.eviction[place]) if len(self.arrays.eviction) else 0

    @property
    def free(self) -> list[int]:
        """All free blocks, the next to be handed out first."""
        return self.pool.free_queue.get_all_free_blocks()

    @property
    def protected(self) -> list[int]:
        """Free blocks in the protected list."""
        records = self.arrays.records
        return blocks_of_list(records, protected_sentinel(records), self.pool.num_free)

    def rank(self, block: int) -> int:
        """What the policy thinks of a block."""
        return int(self.arrays.ranks[block]) if len(self.arrays.ranks) else 0

    def children(self, parent: int) -> list[int]:
        """List the named blocks that continue what a block holds."""
        records = self.arrays.records
        return [
            block
            for block in range(1, len(records) - NUM_SENTINELS)
            if is_child_of(self.arrays, GROUP_NAME, block, parent)
        ]

    def acquire(self) -> int:
        """Hand out the next free block."""
        return acquire(self.arrays)

    def name(self, block: int, content: int, parent: int = NULL_BLOCK, num_lives_ago: int = 0) -> None:
        """Give a block in use a content, which continues that of ``parent``, or one that ``parent`` had before."""
        self.arrays.digests[block, :2] = digest_words(content)
        name_block(self.arrays, GROUP_NAME, block, parent, int(self.arrays.records[parent, LIFE]) - num_lives_ago)

    def compute(self, content: int, parent: int = NULL_BLOCK) -> int:
        """Acquire a block for a content, and name it."""
        block = self.acquire()
        self.name(block, content, parent)
        return block

    def compute_and_release(self, contents: Sequence[int]) -> list[int]:
        """Compute first blocks one after the other, each released before the next."""
        blocks = []
        for content in contents:
            blocks.append(self.compute(content))
            self.release(blocks[-1])
        return blocks

    def reuse(self, block: int) -> None:
        """Hit a block."""
        reuse(self.arrays, block)

    def share(self, block: int) -> None:
        """Take one more reference without a hit."""
        self.arrays.records[block, REF_COUNT] += 1

    def release(self, block: int) -> None:
        """Give one reference back."""
        release(self.arrays, block, int(self.arrays.counts[OPEN_STEP]) - 1)

    def drop_name(self, block: int) -> None:
        """Make a block unfindable."""
        drop_name(self.arrays, block)

    def drop_all_names(self) -> None:
        """Make everything unfindable."""
        drop_all_names(self.arrays)

    def plan_step(self) -> None:
        """Send the open step on its way."""
        self.arrays.counts[OPEN_STEP] += 1

    def settle(self, step: int) -> None:
        """Note that steps are over."""
        settle_until(self.arrays, step)

    def require_same(self, model: Model) -> None:
        """Hold everything that eviction depends on against the model."""
        assert self.free == model.free
        assert self.protected == model.protected
        assert (self.target, self.num_protected, self.flows) == (model.target, model.num_protected, model.flows)
        assert self.pool.num_cached == len(model.cold) + len(model.protected)
        assert self.pool.num_deferred == len(model.deferred)
        for block, state in model.blocks.items():
            assert self.rank(block) == state.is_protected + 2 * state.is_reused
            link = (int(self.arrays.records[block, PARENT]), int(self.arrays.records[block, PARENT_LIFE]))
            assert bool(self.arrays.records[block, NAME]) == (state.content is not None)
            assert state.content is None or link == state.parent
        for slot, (word, clock) in enumerate(self.arrays.eviction_table.tolist()):
            ghost = model.ghosts.get(slot)
            assert clock == (ghost.clock if ghost else 0)
            assert ghost is None or word == 2 * ghost.fingerprint + ghost.was_reused
