"""T-LRU: tails first, with the order written out; any order of operations beside two lists."""

import numpy as np
import pytest
from hypothesis import Phase

from pagedkv import Allocation, BlockSpace, FullAttention, SpaceConfig
from pagedkv.blocks.eviction.policy import note_request
from pagedkv.blocks.eviction.tlru import DEFAULT_TAIL, NUM_TAIL, TLRU, set_tail
from tests.blocks.ending_machine import EndingModel, EndingPool, drive_endings
from tests.blocks.eviction_model import NamedPool
from tests.space.spaces import hit, only_pool, run_step, tokens

pytestmark = pytest.mark.plain_only

TAIL = 2


class TlruModel(EndingModel):
    """The model in which ends decide what is protected, and nothing else does."""

    def end(self, blocks: list[int], _number: int) -> None:
        """Protect what is before the tail."""
        named = [place for place, block in enumerate(blocks) if self.blocks[block].content is not None]
        for block in blocks[: max(0, max(named, default=-1) + 1 - self._tail)]:
            if self.blocks[block].content is not None:
                self.blocks[block].is_protected = True

    @property
    def _tail(self) -> int:
        return TAIL

    def _enqueue(self, block: int) -> None:
        state = self.blocks[block]
        if state.content is None:
            self.nameless.insert(0, block)
        else:
            (self.protected if state.is_protected else self.cold).append(block)

    def require_same(self, pool: NamedPool) -> None:
        """Hold the pool against the model."""
        assert (pool.free, pool.protected) == (self.free, self.protected)
        assert all(pool.rank(block) == state.is_protected for block, state in self.blocks.items())


class HasALongerTail(TlruModel):
    """Breaks the promise by a block."""

    @property
    def _tail(self) -> int:
        return TAIL + 1


class TakesTheLastEnd(TlruModel):
    """Breaks the promise: what is in the tail of the last sequence is tail, whatever others need."""

    def end(self, blocks: list[int], number: int) -> None:
        """Forget what sequences before have needed."""
        for block in blocks:
            self.blocks[block].is_protected = False
        super().end(blocks, number)


class TlruPool(EndingPool):
    """The pool, with a short tail."""

    def __init__(self, num_blocks: int, policy: object = TLRU) -> None:
        """Build the pool."""
        assert policy is TLRU
        super().__init__(num_blocks, TLRU)
        set_tail(self.arrays, TAIL)

    def end(self, blocks: list[int], _number: int) -> None:
        """Note the end of a sequence."""
        note_request(self.arrays, np.array(blocks, np.int32), -1)


def test_any_order_of_operations_evicts_tails_first_and_never_a_parent_before_its_child() -> None:
    drive_endings(TlruModel, TlruPool, TLRU, 100)


@pytest.mark.parametrize("broken", [HasALongerTail, TakesTheLastEnd])
def test_a_model_that_differs_in_one_place_is_noticed(broken: type[TlruModel]) -> None:
    with pytest.raises(AssertionError):
        drive_endings(broken, TlruPool, TLRU, 300, phases=[Phase.generate])


def test_a_lost_rank_is_noticed() -> None:
    pool = TlruPool(3)
    block = pool.compute(10)
    pool.release(block)
    pool.arrays.ranks[block] = 1
    with pytest.raises(AssertionError, match="device: a block before a tail is in the cold list"):
        TLRU.check("device", pool.arrays, pool.free, pool.protected)


def served(space: BlockSpace, length: int, first: int) -> None:
    answer = space.allocate(tokens(length, first=first))
    assert isinstance(answer, Allocation)
    run_step(space)
    space.free(answer.row)
    space.check()


def test_a_next_turn_computes_no_more_than_the_tail_as_long_as_tails_are_left() -> None:
    """The long conversation is the older one; LRU would evict all of it first."""
    config = SpaceConfig((FullAttention(4),), 31, watermark=0.0, eviction="tlru", tail_tokens=8, max_tokens=100)
    space = BlockSpace(config)
    assert only_pool(space).arrays.eviction[NUM_TAIL] == 2
    for length, first in ((41, 0), (9, 100), (9, 200)):
        served(space, length, first)
    left = [(hit(space, tokens(41)), hit(space, tokens(9, first=100)), hit(space, tokens(9, first=200)))]
    for _ in range(4):
        space.evict(2)
        left.append((hit(space, tokens(41)), hit(space, tokens(9, first=100)), hit(space, tokens(9, first=200))))
    assert left == [(40, 8, 8), (32, 8, 8), (32, 0, 8), (32, 0, 0), (24, 0, 0)]


def test_tails_have_a_length_where_none_is_set() -> None:
    assert NamedPool(3, TLRU).arrays.eviction.tolist() == [DEFAULT_TAIL]
    assert SpaceConfig((FullAttention(16),), 9).tail_tokens == 16 * DEFAULT_TAIL
