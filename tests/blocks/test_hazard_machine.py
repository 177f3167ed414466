"""The policy that learns: any order of operations, with sequences side by side; and arrays broken in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.eviction.hazard.layout import (
    COUNTED_LIFE,
    GHOST_ROW_WORDS,
    GHOST_RUN,
    LEAF,
    LEAF_CLASSES,
    LEAF_REFS,
    LEAF_TICKS,
    MOST_DRAWN,
    NEXT_RUN,
    NUM_ALIVE,
    NUM_CHILDREN,
    NUM_LEAVES,
    NUM_RUN_FIELDS,
    OLDEST_RUN,
    PLACE,
    RUN,
    SUM_ALIVE,
    VICTIM,
    VICTIM_LEFT,
    VICTIM_RUN,
    ticks_now,
)
from pagedkv.blocks.eviction.hazard.policy import HAZARD, OF_LRU, value_of
from pagedkv.blocks.eviction.policy import note_request
from pagedkv.blocks.life_cycle import make_spare
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import (
    FREE,
    KEPT,
    LIFE,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    SPARE,
)
from tests.blocks.eviction_model import GROUP_NAME, NamedPool, digest_words

pytestmark = pytest.mark.plain_only

FIRST = 2  # the first content
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)  # in a tree with two branches everywhere
PLACES = st.integers(0, 99)
OUTPUTS = st.sampled_from([-1, 0, 3, 500])


def new_pool(num_blocks: int, num_runs: int = 16, num_rows: int = 2) -> NamedPool:
    """Make a pool that remembers few runs and few ghosts, so that they are forgotten and displaced."""
    pool = NamedPool(num_blocks, HAZARD)
    pool.pool.arrays = pool.arrays = pool.arrays._replace(
        eviction_runs=np.zeros((num_runs, NUM_RUN_FIELDS), np.int32),
        eviction_table=np.zeros((num_rows, GHOST_ROW_WORDS), np.uint32),
    )
    return pool


def carrier(pool: NamedPool, content: int) -> int:
    """Find the block that holds a content; the null block if none does."""
    digest = np.zeros(8, np.uint32)
    digest[:2] = digest_words(content)
    return find(pool.arrays, GROUP_NAME, digest)


def leaves(pool: NamedPool) -> set[int]:
    """List the free cached blocks that no such block continues, by their records alone."""
    records = pool.arrays.records
    cached = [
        block
        for block in range(1, pool.pool.num_blocks)
        if records[block, QUEUE] == FREE and records[block, NAME] and records[block, KEPT] != SPARE
    ]
    continued = {(int(records[block, PARENT]), int(records[block, PARENT_LIFE])) for block in cached}
    return {block for block in cached if (block, int(records[block, LIFE])) not in continued}


@dataclass(slots=True)
class Held:
    """A sequence: the blocks it holds, head first, and how many of its contents were hit or computed.

    Args:
        path: its contents.
        blocks: as many as there was room for.
    """

    path: list[int]
    blocks: list[int]


class HazardMachine(RuleBasedStateMachine):
    """Sequences that come, hit, compute the same as others, and go, told to the policy or not."""

    @initialize(
        num_blocks=st.sampled_from([1, 2, 3, 5, 8, 16]),
        num_runs=st.sampled_from([2, 4, 64]),
        num_rows=st.sampled_from([1, 1, 8]),
    )
    def build(self, num_blocks: int, num_runs: int, num_rows: int) -> None:
        """Build the pool."""
        self.pool = new_pool(num_blocks, num_runs, num_rows)
        self.contents: dict[tuple[int, ...], int] = {}
        self.sequences: list[Held] = []
        self.now_s = 0.0

    @rule(paths=st.lists(PATHS, min_size=2, max_size=8), num_outputs=OUTPUTS)
    def serve(self, paths: list[list[int]], num_outputs: int) -> None:
        """Serve prompts one at a time."""
        for path in paths:
            self.begin(path)
            self._end(self.sequences.pop(), num_outputs)

    @rule(path=PATHS)
    def begin(self, path: list[int]) -> None:
        """Hit the leading blocks of a prompt, and compute the rest while there is room; duplicates stay nameless."""
        contents = [
            self.contents.setdefault(tuple(path[: end + 1]), FIRST + len(self.contents)) for end in range(len(path))
        ]
        blocks: list[int] = []
        for content in contents:
            block = carrier(self.pool, content)
            if block == NULL_BLOCK or block not in self.pool.children(blocks[-1] if blocks else NULL_BLOCK):
                break
            self.pool.reuse(block)
            blocks.append(block)
        for content, previous in list(zip(contents, [None, *contents], strict=False))[len(blocks) :]:
            if not self.pool.free:
                break
            blocks.append(self._acquire())
            parent = NULL_BLOCK if previous is None else carrier(self.pool, previous)
            if carrier(self.pool, content) == NULL_BLOCK and (previous is None or parent != NULL_BLOCK):
                self.pool.name(blocks[-1], content, parent)
        self.sequences.append(Held(contents, blocks))

    def _acquire(self) -> int:
        """Take a block: if it was cached, then the least worth of all that may go, or the next of the run before."""
        pool, state, marks = self.pool.arrays, self.pool.arrays.eviction, self.pool.arrays.eviction_blocks
        first = self.pool.free[0]
        is_spared = not pool.records[first, NAME] or pool.records[first, KEPT] == SPARE
        is_evictable = leaves(self.pool)
        now = ticks_now(pool)
        values = {int(marks[place, LEAF]): value_of(pool, place, now) for place in range(1, len(is_evictable) + 1)}
        next_of_run = int(state[VICTIM]) if state[VICTIM_LEFT] > 0 else NULL_BLOCK
        if next_of_run not in is_evictable or marks[next_of_run, RUN] != state[VICTIM_RUN]:
            next_of_run = NULL_BLOCK
        assert len(is_evictable) <= MOST_DRAWN  # so that all are looked at
        block = self.pool.acquire()
        if is_spared:
            assert block == first
        elif int(state[VICTIM_RUN]) == OF_LRU:
            assert block == first  # a departure was not allowed; windows leave heads before tails
        elif next_of_run != NULL_BLOCK:
            assert block == next_of_run
        else:
            assert values[block] == min(values.values())
        return block

    @precondition(lambda self: self.sequences)
    @rule(which=PLACES, num_outputs=OUTPUTS)
    def end(self, which: int, num_outputs: int) -> None:
        """End a sequence, or preempt it: that is the same here."""
        self._end(self.sequences.pop(which % len(self.sequences)), num_outputs)

    def _end(self, sequence: Held, num_outputs: int) -> None:
        note_request(self.pool.arrays, np.array([NULL_BLOCK, *sequence.blocks], np.int32), num_outputs)
        for block in reversed(sequence.blocks):
            self.pool.release(block)

    @precondition(lambda self: self.sequences)
    @rule(which=PLACES, length=st.integers(0, 6))
    def truncate(self, which: int, length: int) -> None:
        """Give back all but the leading blocks of a sequence: the policy is told nothing."""
        sequence = self.sequences[which % len(self.sequences)]
        for block in reversed(sequence.blocks[length:]):
            self.pool.release(block)
        del sequence.blocks[length:]

    @precondition(lambda self: self.sequences)
    @rule(which=PLACES, length=st.integers(0, 6))
    def slide(self, which: int, length: int) -> None:
        """Give back the leading blocks of a sequence, as behind a window."""
        sequence = self.sequences[which % len(self.sequences)]
        for block in sequence.blocks[:length]:
            self.pool.release(block)
        del sequence.blocks[:length]

    @rule(which=PLACES)
    def drop_name(self, which: int) -> None:
        """Make a content unfindable, free or in use."""
        block = self._carrier_of(which)
        if block != NULL_BLOCK:
            self.pool.drop_name(block)

    @rule(which=PLACES)
    def spare(self, which: int) -> None:
        """Mark an unreferenced block as first to be evicted."""
        block = self._carrier_of(which)
        if block != NULL_BLOCK and self.pool.arrays.records[block, REF_COUNT] == 0:
            make_spare(self.pool.arrays, block)

    def _carrier_of(self, which: int) -> int:
        contents = list(self.contents.values())
        return carrier(self.pool, contents[which % len(contents)]) if contents else NULL_BLOCK

    @rule(steps=st.sampled_from([0, 1, 30, 10_000]))
    def pause(self, steps: int) -> None:
        """Let time pass; a clock that was never told counts blocks."""
        self.now_s += steps
        self.pool.pool.advance(self.now_s)

    @rule()
    def plan_step(self) -> None:
        """Send the open step on its way."""
        self.pool.plan_step()

    @rule(back=st.integers(0, 2))
    def settle(self, back: int) -> None:
        """Settle the steps in flight, but for the last few."""
        counts = self.pool.arrays.counts
        self.pool.settle(max(int(counts[SETTLED_STEP]), int(counts[OPEN_STEP]) - 1 - back))

    @invariant()
    def check(self) -> None:
        """Everything that the pool and the policy promise; and what may go is what the records say."""
        check_pool(self.pool.pool)
        marks = self.pool.arrays.eviction_blocks
        assert leaves(self.pool) == set(np.flatnonzero(marks[:, PLACE] > 0).tolist())
        state = self.pool.arrays.eviction
        assert 0 <= state[NEXT_RUN] - state[OLDEST_RUN] <= len(self.pool.arrays.eviction_runs)


def test_any_order_of_operations_keeps_what_it_promises_and_evicts_what_is_worth_least() -> None:
    run_state_machine_as_test(HazardMachine, settings=settings(deadline=None, stateful_step_count=40))


def in_use() -> NamedPool:
    """Two sequences of three blocks that begin alike, released; one block of a third was evicted."""
    machine = HazardMachine()
    machine.build(8, 16, 2)
    machine.serve([[0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0]], 3)
    machine.check()
    return machine.pool


def a_leaf(pool: NamedPool) -> int:
    """Name a block that may go."""
    return int(pool.arrays.eviction_blocks[1, LEAF])


def a_run(pool: NamedPool) -> int:
    """Name the row of a run that counts blocks."""
    return int(np.flatnonzero(pool.arrays.eviction_runs[:, NUM_ALIVE])[0])


def a_parent(pool: NamedPool) -> int:
    """Name a block that others continue."""
    return int(np.flatnonzero(pool.arrays.eviction_blocks[:, PLACE] < 0)[0])


Where: TypeAlias = Callable[[NamedPool], tuple[npt.NDArray[np.generic], int | tuple[int, int]]]
BREAKS: dict[str, tuple[Where, int]] = {
    "a leaf that is none": (lambda pool: (pool.arrays.eviction_blocks, (a_leaf(pool), PLACE)), 0),
    "a leaf in another place": (lambda pool: (pool.arrays.eviction_blocks, (1, LEAF)), 0),
    "a leaf that others continue": (lambda pool: (pool.arrays.eviction_blocks, (a_parent(pool), PLACE)), 1),
    "a block that continues none too many": (
        lambda pool: (pool.arrays.eviction_blocks, (a_parent(pool), NUM_CHILDREN)),
        9,
    ),
    "blocks that continue another life": (
        lambda pool: (pool.arrays.eviction_blocks, (a_parent(pool), COUNTED_LIFE)),
        99,
    ),
    "leaves miscounted": (lambda pool: (pool.arrays.eviction, NUM_LEAVES), 0),
    "a row of another time": (lambda pool: (pool.arrays.eviction_blocks, (1, LEAF_TICKS)), 12_345),
    "a row of another place in the trace": (lambda pool: (pool.arrays.eviction_blocks, (1, LEAF_REFS)), 12_345),
    "a row of other classes": (lambda pool: (pool.arrays.eviction_blocks, (1, LEAF_CLASSES)), 12_345),
    "blocks of a run miscounted": (lambda pool: (pool.arrays.eviction_runs, (a_run(pool), NUM_ALIVE)), 99),
    "remembered blocks miscounted": (lambda pool: (pool.arrays.eviction, SUM_ALIVE), 99),
    "a block that left its run": (lambda pool: (pool.arrays.eviction_blocks, (a_leaf(pool), RUN)), 0),
    "a ghost that no run counts": (lambda pool: (pool.arrays.eviction_table, (0, GHOST_RUN)), 1),
    "more runs than rows": (lambda pool: (pool.arrays.eviction, NEXT_RUN), 1000),
}


@pytest.mark.parametrize(("where", "value"), BREAKS.values(), ids=BREAKS)
def test_what_is_broken_is_noticed(where: Where, value: int) -> None:
    pool = in_use()
    array, place = where(pool)
    assert array[place] != value
    array[place] = value
    with pytest.raises(AssertionError, match="device: "):
        check_pool(pool.pool)
