"""Priority: the lowest number first, with the order written out; any order of operations beside sorted lists."""

import numpy as np
import pytest
from hypothesis import Phase

from pagedkv import Allocation, BlockSpace, FullAttention, SpaceConfig
from pagedkv.blocks.eviction.policy import note_request
from pagedkv.blocks.eviction.priority import NEUTRAL, PRIORITY, set_priority
from pagedkv.errors import ConfigurationError
from tests.blocks.ending_machine import EndingModel, EndingPool, drive_endings
from tests.blocks.eviction_model import NamedPool
from tests.space.spaces import allocate, hit, new_space, only_pool, prefill, run_step, tokens

pytestmark = pytest.mark.plain_only


class PriorityModel(EndingModel):
    """The model whose free blocks are sorted by the levels of their contents."""

    @property
    def free(self) -> list[int]:
        """All free blocks, the next to be handed out first."""
        return self.nameless + sorted(self.cold, key=lambda block: self.blocks[block].level or 0)

    def end(self, blocks: list[int], number: int) -> None:
        """Give named blocks the number, unless they have a higher one."""
        for block in blocks:
            state = self.blocks[block]
            if state.content is not None:
                state.level = self._joined(state.level, number)

    def _joined(self, level: int | None, number: int) -> int:
        return number if level is None else max(level, number)

    def _enqueue(self, block: int) -> None:
        super()._enqueue(block)
        state = self.blocks[block]
        if state.content is not None and state.level is None:
            state.level = 0

    def require_same(self, pool: NamedPool) -> None:
        """Hold the pool against the model: the cold list has the order of release."""
        assert pool.free == self.nameless + self.cold
        for block, state in self.blocks.items():
            assert pool.rank(block) == (0 if state.level is None else NEUTRAL + state.level)


class HasTheLatestNumber(PriorityModel):
    """Breaks the promise: what several sequences had gets the number of the last."""

    def _joined(self, level: int | None, number: int) -> int:
        del level
        return number


class GoesByReleaseAlone(PriorityModel):
    """Breaks the promise: numbers change nothing."""

    @property
    def free(self) -> list[int]:
        """All free blocks, as LRU has them."""
        return self.nameless + self.cold


class PriorityPool(EndingPool):
    """The pool, whose sequences end with numbers."""

    def end(self, blocks: list[int], number: int) -> None:
        """Note the end of a sequence."""
        set_priority(self.arrays, number)
        note_request(self.arrays, np.array(blocks, np.int32), -1)
        set_priority(self.arrays, 0)


def test_any_order_of_operations_evicts_the_lowest_number_first_and_never_a_parent_before_its_child() -> None:
    drive_endings(PriorityModel, PriorityPool, PRIORITY, 100)


@pytest.mark.parametrize("broken", [HasTheLatestNumber, GoesByReleaseAlone])
def test_a_model_that_differs_in_one_place_is_noticed(broken: type[PriorityModel]) -> None:
    with pytest.raises(AssertionError):
        drive_endings(broken, PriorityPool, PRIORITY, 300, phases=[Phase.generate])


def ended(pool: PriorityPool, *numbers: int) -> None:
    """Serve first blocks one after the other, each with a number."""
    for content, number in enumerate(numbers, 10):
        block = pool.compute(content)
        pool.end([block], number)
        pool.release(block)


def victims(pool: PriorityPool, count: int) -> list[int]:
    return [pool.acquire() for _ in range(count)]


def test_the_lowest_number_goes_first_and_of_one_number_the_least_recently_used() -> None:
    pool = PriorityPool(6, PRIORITY)
    ended(pool, 0, 3, -1, 3, 0, -127)
    pool.reuse(1)
    pool.release(1)
    assert victims(pool, 6) == [6, 3, 5, 1, 2, 4]


def test_a_lower_number_that_comes_later_goes_first() -> None:
    pool = PriorityPool(3, PRIORITY)
    ended(pool, 5, 6, 7)
    assert victims(pool, 1) == [1]
    pool.name(1, 99)
    pool.end([1], -9)
    pool.release(1)
    assert victims(pool, 2) == [1, 2]


def test_a_broken_ring_is_noticed() -> None:
    pool = PriorityPool(3, PRIORITY)
    ended(pool, 0, 0, 1)
    PRIORITY.check("device", pool.arrays, pool.free, [])
    pool.arrays.eviction_table[2, 0] = 2
    with pytest.raises(AssertionError, match="device: "):
        PRIORITY.check("device", pool.arrays, pool.free, [])


def served(space: BlockSpace, first: int, priority: int) -> None:
    answer = space.allocate(tokens(9, first=first))
    assert isinstance(answer, Allocation)
    run_step(space)
    space.free(answer.row, priority=priority)
    space.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_space_takes_numbers_from_127_below_to_127_above_zero(*, prefix_caching: bool) -> None:
    config = SpaceConfig(
        (FullAttention(4),), 13, watermark=0.0, eviction="priority", prefix_caching=prefix_caching, max_tokens=64
    )
    space = BlockSpace(config)
    if not prefix_caching:
        served(space, 0, 1)
        return
    for first, priority in ((0, 127), (100, -127), (200, 1)):
        served(space, first, priority)
    assert space.evict(2) == 2
    assert [hit(space, tokens(9, first=first)) for first in (0, 100, 200)] == [8, 0, 8]
    assert space.evict(2) == 2
    assert [hit(space, tokens(9, first=first)) for first in (0, 100, 200)] == [8, 0, 0]
    served(space, 100, 0)
    assert only_pool(space).num_cached == 4
    with pytest.raises(ConfigurationError, match="priority must be at most 127, got 128"):
        served(space, 300, 128)


def test_what_was_superseded_goes_before_the_lowest_number() -> None:
    space = new_space(num_blocks=8, eviction="priority")
    space.free(prefill(space, tokens(8)), priority=-3)
    old, new = prefill(space, tokens(8, first=100)), prefill(space, tokens(12, first=200))
    space.free(old, superseded_by=new)
    allocate(space, tokens(4, first=300))  # the one block that it takes is evicted
    assert (hit(space, tokens(9)), hit(space, tokens(9, first=100))) == (8, 4)
