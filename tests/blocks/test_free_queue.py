"""FreeBlockQueue: driven against a plain list, and misused."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedkv.blocks.free_queue import FreeBlockQueue
from pagedkv.blocks.record import NEXT, PREVIOUS, new_pool_arrays
from pagedkv.errors import BlockError

NUM_BLOCKS = 8  # the null block and seven to be queued
ANY_ID = st.integers(-1, NUM_BLOCKS + 1)


def new_queue(num_blocks: int = NUM_BLOCKS) -> FreeBlockQueue:
    return FreeBlockQueue(new_pool_arrays(num_blocks, 1, caching=False))


class QueueMachine(RuleBasedStateMachine):
    """A queue, and the list of block ids that it must equal; misuse must raise and leave it equal."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = new_queue()
        self.model = list(range(1, NUM_BLOCKS))

    def outside(self) -> set[int]:
        """Blocks of the pool that are not in the queue."""
        return set(range(1, NUM_BLOCKS)) - set(self.model)

    @precondition(lambda self: self.model)
    @rule()
    def popleft(self) -> None:
        """The first block comes out."""
        assert self.queue.popleft() == self.model.pop(0)

    @precondition(lambda self: not self.model)
    @rule()
    def popleft_of_nothing(self) -> None:
        """An empty queue has no first block."""
        with pytest.raises(BlockError, match="cannot take 1 blocks from a queue of 0"):
            self.queue.popleft()

    @rule(n=st.integers(-2, NUM_BLOCKS + 1))
    def popleft_n(self, n: int) -> None:
        """The first n come out in order, or none."""
        if 0 <= n <= len(self.model):
            assert self.queue.popleft_n(n) == self.model[:n]
            del self.model[:n]
        else:
            with pytest.raises(BlockError, match=f"cannot take {n} blocks from a queue of {len(self.model)}"):
                self.queue.popleft_n(n)

    @rule(block=ANY_ID)
    def remove(self, block: int) -> None:
        """A block comes out of the middle, if it is there."""
        if block in self.model:
            self.queue.remove(block)
            self.model.remove(block)
        else:
            with pytest.raises(BlockError, match=f"block {block} is not"):
                self.queue.remove(block)

    @rule(block=ANY_ID)
    def append(self, block: int) -> None:
        """A block that is not in the queue goes to its end."""
        if block in self.outside():
            self.queue.append(block)
            self.model.append(block)
        else:
            with pytest.raises(BlockError, match=f"block {block} is "):
                self.queue.append(block)

    @rule(blocks=st.lists(ANY_ID, max_size=4))
    def append_n(self, blocks: list[int]) -> None:
        """Blocks go to the end in order, all or none."""
        if set(blocks) <= self.outside() and len(set(blocks)) == len(blocks):
            self.queue.append_n(blocks)
            self.model += blocks
        else:
            with pytest.raises(BlockError):
                self.queue.append_n(blocks)

    @invariant()
    def equals_the_list(self) -> None:
        """Order and count are those of the list."""
        assert self.queue.get_all_free_blocks() == self.model
        assert self.queue.num_free_blocks == len(self.model)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueue = pytest.mark.interpreted(QueueMachine.TestCase)


def test_a_new_queue_holds_all_but_the_null_block_in_order() -> None:
    assert new_queue(5).get_all_free_blocks() == [1, 2, 3, 4]


def test_append_n_names_a_block_given_twice() -> None:
    queue = new_queue()
    blocks = queue.popleft_n(3)
    with pytest.raises(BlockError, match="twice among the 4 blocks"):
        queue.append_n([*blocks, blocks[0]])
    assert queue.get_all_free_blocks() == [4, 5, 6, 7]


@pytest.mark.interpreted
def test_taking_a_block_out_of_the_middle_touches_only_its_neighbours() -> None:
    """O(1): nothing but the block and its two neighbours is written (peers' fault 3)."""
    arrays = new_pool_arrays(1000, 1, caching=False)
    before = arrays.records.copy()
    FreeBlockQueue(arrays).remove(500)
    assert set((arrays.records != before).any(axis=1).nonzero()[0].tolist()) == {499, 500, 501}
    assert arrays.records[499, NEXT] == 501
    assert arrays.records[501, PREVIOUS] == 499


def test_a_miscounted_queue_is_noticed() -> None:
    """Negative control: reading the queue proves that links and count agree."""
    arrays = new_pool_arrays(8, 1, caching=False)
    arrays.records[3, NEXT] = 0
    with pytest.raises(AssertionError, match="links 3 blocks but counts 7"):
        FreeBlockQueue(arrays).get_all_free_blocks()
