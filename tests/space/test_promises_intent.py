"""Promise 27, as far as it goes: sequences that publish nothing, and sequences that others replace."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.blocks.free_queue import blocks_of_list, spare_sentinel
from pagedkv.blocks.record import KEPT, NAME, REF_COUNT, SPARE
from pagedkv.errors import ConfigurationError, SequenceError
from tests.space.spaces import allocate, cache, hit, new_space, only_pool, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

HYBRID = (FullAttention(4), SlidingWindow(8, 4))
MIXES: list[tuple[GroupSpec, ...]] = [(FullAttention(4),), HYBRID, (FullAttention(4), RecurrentState(8, pool="device"))]
PROMPT = tokens(33)


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_what_is_not_published_is_found_by_nobody(groups: tuple[GroupSpec, ...]) -> None:
    space = new_space(*groups, num_host_blocks=60)
    cache(space, PROMPT[:17])
    admitted = space.allocate(PROMPT, publish=False)
    assert isinstance(admitted, Allocation)
    assert admitted.num_hit_tokens == 16, "it hits what others have published"
    assert hit(space, PROMPT) == 16
    run_step(space)
    child = space.fork(admitted.row)
    space.append([admitted.row, child[0]], [1, 2])
    run_step(space)
    assert space.swap_out([admitted.row])
    run_step(space)
    assert space.swap_in([admitted.row])
    run_step(space)
    space.append([admitted.row], tokens(20, first=500), [20])
    run_step(space)
    assert hit(space, PROMPT) == 16
    space.free([admitted.row, child[0]])
    assert hit(space, PROMPT) == 16, "the end that it hit is kept"
    cache(space, PROMPT)
    assert hit(space, PROMPT) == 32
    space.check()


def test_whether_to_publish_is_true_or_false() -> None:
    space = new_space()
    wrong: Any
    for wrong in (1, None, "no"):
        with unchanged(space), pytest.raises(ConfigurationError, match="publish must be True or False"):
            space.allocate(PROMPT, publish=wrong)


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_what_only_a_superseded_sequence_held_goes_first(groups: tuple[GroupSpec, ...]) -> None:
    """It was released last, and would be evicted last."""
    space = new_space(*groups, num_blocks=60)
    other = tokens(17, first=500)
    cache(space, other)
    old = prefill(space, PROMPT)
    new = allocate(space, np.append(PROMPT[:16], tokens(5, first=900)))
    run_step(space)
    space.free(old, superseded_by=new)
    assert hit(space, PROMPT) > 16, "there is room"
    space.check()
    records = only_pool(space).arrays.records
    is_cached = (records[:, NAME] > 0) & (records[:, REF_COUNT] == 0)
    num_kept = int((is_cached & (records[:, KEPT] != SPARE)).sum())
    taken = only_pool(space).acquire(space.num_free_blocks() - num_kept)
    assert taken is not None
    assert (hit(space, other), hit(space, PROMPT)) == (16, 16)
    only_pool(space).release(taken)
    space.check()
    space.free(new)
    space.check()


def free_as_superseded(space: BlockSpace, row: int) -> None:
    space.free([row], superseded_by=allocate(space, tokens(3, first=900)))


def free_as_low(space: BlockSpace, row: int) -> None:
    space.free([row], priority=-1)


def free_then_supersede(space: BlockSpace, row: int) -> None:
    space.free([row])
    space.supersede(tokens(17))


def free_beside_a_beginning(space: BlockSpace, row: int) -> None:
    """Another row with the beginning is freed with it, and is named first."""
    space.free([prefill(space, tokens(9)), row], priority=-1)


@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), FullAttention(4))], ids=["one", "two"])
@pytest.mark.parametrize("end", [free_as_superseded, free_as_low, free_then_supersede, free_beside_a_beginning])
def test_promise_27_what_is_to_go_first_goes_from_its_tail(
    groups: tuple[GroupSpec, ...], end: Callable[[BlockSpace, int], None]
) -> None:
    space = new_space(*groups, num_blocks={"device": 40})
    row = prefill(space, tokens(17))
    end(space, row)
    space.check()
    while only_pool(space).num_cached < space.num_free_blocks():
        assert only_pool(space).acquire(1) is not None
    lengths = [hit(space, tokens(17))]
    while only_pool(space).num_cached:
        assert only_pool(space).acquire(1) is not None
        lengths.append(hit(space, tokens(17)))
    assert lengths == sorted(lengths, reverse=True)
    assert {16, 12, 8, 4, 0} == set(lengths), "no eviction costs more than one block's hit"


def test_promise_27_what_is_shed_as_it_is_released_goes_no_earlier_than_what_follows_it() -> None:
    """A step in flight has left its first chunk where it was; steps run in order, so that no block waits for it."""
    space = new_space(ChunkedLocal(8, block_size=4), FullAttention(4), in_order=True)
    row = allocate(space, tokens(14))
    space.plan_step()
    chunks = space.block_ids(row)
    free_as_low(space, row)
    space.check()
    records = only_pool(space).arrays.records
    order = blocks_of_list(records, spare_sentinel(records), space.num_free_blocks())
    assert [block for block in order if block in chunks] == chunks[2::-1]


def test_what_is_superseded_in_flight_goes_first_once_its_step_is_over() -> None:
    space = new_space(num_blocks=20)
    old, new = allocate(space, PROMPT), allocate(space, tokens(5, first=500))
    plan = space.plan_step()
    space.free([old], superseded_by=new)
    space.check()
    space.acknowledge(plan.step_id)
    space.check()
    assert hit(space, PROMPT) == 32
    row = allocate(space, PROMPT)
    space.check()
    space.free([row, new])
    assert space.num_free_blocks() == 19
    space.check()


def test_who_supersedes_lives_on() -> None:
    space = new_space()
    row, gone = prefill(space, PROMPT), prefill(space, tokens(5, first=500))
    space.free(gone)
    for wrong in (row, gone, 15, -1):
        with unchanged(space), pytest.raises(SequenceError):
            space.free([row], superseded_by=wrong)
