"""FIFO: places by first release, with the order written out; any order of operations beside a list of places."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagedkv.blocks.eviction.fifo import FIFO
from pagedkv.blocks.eviction.rings import OLDER
from pagedkv.blocks.record import NULL_BLOCK
from tests.blocks.eviction_model import Model, NamedPool

pytestmark = pytest.mark.plain_only

NUM_CONTENTS = 12


class FifoModel(Model):
    """The model without a ghost, whose cold list is its places, those of blocks in use left out."""

    def __init__(self, num_blocks: int) -> None:
        """Expect an empty pool."""
        super().__init__(num_blocks, num_slots=0)
        self.places: list[int] = []

    def _enqueue(self, block: int) -> None:
        super()._enqueue(block)
        if block in self.cold and block not in self.places:
            self.places.append(block)
        self._put_in_order()

    def _put_in_order(self) -> None:
        self.cold.sort(key=self.places.index)

    def acquire(self) -> int:
        """Hand out the next free block, which has no place from now on."""
        block = super().acquire()
        self._give_place_up(block)
        return block

    def drop_name(self, block: int) -> None:
        """Make a block unfindable, which takes its place."""
        super().drop_name(block)
        self._give_place_up(block)

    def _give_place_up(self, block: int) -> None:
        if block in self.places:
            self.places.remove(block)


class RecentModel(FifoModel):
    """Breaks the promise: whoever is released again is the youngest."""

    def _put_in_order(self) -> None:
        """Leave it at the back."""


CONTENTS = st.integers(0, NUM_CONTENTS - 1)


class FifoMachine(RuleBasedStateMachine):
    """Blocks that are computed, hit, released and dropped, in a pool and in its model."""

    model_class: ClassVar[type[FifoModel]] = FifoModel

    @initialize(num_blocks=st.integers(1, 10))
    def build(self, num_blocks: int) -> None:
        """Build both."""
        self.model, self.pool = self.model_class(num_blocks), NamedPool(num_blocks, FIFO)
        self.both: tuple[Model | NamedPool, ...] = (self.model, self.pool)
        self.held: list[int] = []

    @rule(contents=st.lists(CONTENTS, min_size=1, max_size=4), num_named=st.integers(0, 4))
    def compute(self, contents: list[int], num_named: int) -> None:
        """Acquire blocks for contents that have none, and name the first of them."""
        for number, content in enumerate(contents):
            if self.model.free and self.model.carrier(content) is None:
                block = self.pool.acquire()
                assert block == self.model.acquire()
                self.held.append(block)
                if number < num_named:
                    for side in self.both:
                        side.name(block, content, NULL_BLOCK)

    @rule(contents=st.lists(CONTENTS, min_size=1, max_size=4))
    def hit(self, contents: list[int]) -> None:
        """Hit the contents that are there."""
        for content in contents:
            block = self.model.carrier(content)
            if block is not None:
                self.held.append(block)
                for side in self.both:
                    side.reuse(block)

    @rule(which=st.lists(st.integers(0, 99), min_size=1, max_size=6))
    def release(self, which: list[int]) -> None:
        """Give references back, in any order."""
        for pick in which[: len(self.held)]:
            block = self.held.pop(pick % len(self.held))
            for side in self.both:
                side.release(block)

    @rule(content=CONTENTS)
    def drop_name(self, content: int) -> None:
        """Make a content unfindable."""
        block = self.model.carrier(content)
        if block is not None:
            for side in self.both:
                side.drop_name(block)

    @rule()
    def plan_step(self) -> None:
        """Send the open step on its way."""
        for side in self.both:
            side.plan_step()

    @rule(back=st.integers(0, 2))
    def settle(self, back: int) -> None:
        """Settle the steps in flight, but for the last few."""
        for side in self.both:
            side.settle(max(self.model.settled_step, self.model.open_step - 1 - back))

    @invariant()
    def same(self) -> None:
        """Hold the pool against the model, and its places against themselves."""
        pool, model = self.pool, self.model
        assert (pool.free, pool.protected) == (model.free, [])
        assert (pool.pool.num_cached, pool.pool.num_deferred) == (len(model.cold), len(model.deferred))
        assert set(np.flatnonzero(pool.arrays.eviction_table[:-1, OLDER]).tolist()) == set(model.places)
        FIFO.check("device", pool.arrays, pool.free, pool.protected)


class RecentMachine(FifoMachine):
    """Must fail."""

    model_class = RecentModel


def test_any_order_of_operations_agrees_with_a_list_of_places() -> None:
    run_state_machine_as_test(FifoMachine, settings=settings(deadline=None, stateful_step_count=40))


def test_a_model_in_which_a_hit_renews_is_noticed() -> None:
    only_looking = settings(max_examples=500, deadline=None, phases=[Phase.generate], database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(RecentMachine, settings=only_looking)


def test_a_hit_renews_nothing() -> None:
    pool = NamedPool(5, FIFO)
    pool.compute_and_release([10, 20, 30, 40, 50])
    for block in (2, 1, 4):
        pool.reuse(block)
        pool.release(block)
    assert pool.free == [1, 2, 3, 4, 5]


def test_a_place_is_where_the_neighbours_are_that_are_free() -> None:
    pool = NamedPool(6, FIFO)
    pool.compute_and_release([10, 20, 30, 40, 50, 60])
    for block in (2, 3, 4, 1, 6):
        pool.reuse(block)
    assert pool.free == [5]
    for block, expected in ((3, [3, 5]), (6, [3, 5, 6]), (4, [3, 4, 5, 6]), (1, [1, 3, 4, 5, 6])):
        pool.release(block)
        assert pool.free == expected


def test_the_place_counts_from_the_first_release_and_not_from_the_name() -> None:
    pool = NamedPool(3, FIFO)
    early = pool.compute(10)
    pool.compute_and_release([20, 30])
    pool.release(early)
    assert pool.free == [2, 3, 1]


def test_other_content_of_a_block_gets_a_place_of_its_own() -> None:
    pool = NamedPool(3, FIFO)
    pool.compute_and_release([10, 20, 30])
    pool.compute_and_release([40])
    assert pool.free == [2, 3, 1]
    pool.drop_name(3)
    assert pool.free == [3, 2, 1]
    pool.compute_and_release([50])
    assert pool.free == [2, 1, 3]


def test_of_one_sequence_the_tail_goes_first() -> None:
    pool = NamedPool(3, FIFO)
    parent = NULL_BLOCK
    for content in (10, 11, 12):
        parent = pool.compute(content, parent)
    for block in (3, 2, 1):
        pool.release(block)
    assert pool.free == [3, 2, 1]


def test_a_prefix_goes_before_what_continues_it_since_it_is_older() -> None:
    """The price of the name: a prefix is not renewed by what continues it, so blocks may be left that none can hit."""
    pool = NamedPool(4, FIFO)
    pool.compute_and_release([10])
    pool.reuse(1)
    child = pool.compute(11, parent=1)
    pool.release(child)
    pool.release(1)
    assert pool.free == [3, 4, 1, 2]
    assert pool.children(1) == [2]
    for _ in range(3):
        pool.acquire()
    assert pool.children(1) == []
    assert pool.pool.prefix_index.named_blocks().tolist() == [2]


@pytest.mark.parametrize("field", [0, 1])
def test_a_broken_ring_is_noticed(field: int) -> None:
    pool = NamedPool(3, FIFO)
    pool.compute_and_release([10, 20, 30])
    pool.arrays.eviction_table[2, field] = 2
    with pytest.raises(AssertionError, match="device: "):
        FIFO.check("device", pool.arrays, pool.free, pool.protected)


def test_a_block_out_of_its_place_is_noticed() -> None:
    pool = NamedPool(3, FIFO)
    pool.compute_and_release([10, 20, 30])
    with pytest.raises(AssertionError, match="device: a cached block is out of its place"):
        FIFO.check("device", pool.arrays, [1, 3, 2], [])


def test_it_keeps_8_bytes_a_block() -> None:
    arrays = NamedPool(1000, FIFO).arrays
    assert arrays.eviction_table.nbytes == 8 * (1000 + 2)  # and the null block's and the sentinel's
    assert arrays.eviction.nbytes == arrays.ranks.nbytes == 0
