"""Giving the device's memory back: names dropped, rows lost, and the host's part kept."""

import pytest

from pagedkv import CacheEventKind, InvalidatedMemory, Shortage
from pagedkv.errors import BlockError, SequenceError, StepError
from tests.space.spaces import acknowledge, allocate, cache, hit, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted


def test_nothing_on_the_device_is_found_and_rows_that_run_are_lost() -> None:
    space = new_space(events=True)
    cache(space, tokens(9))
    row = prefill(space, tokens(9, first=100))
    waiting = allocate(space, tokens(9, first=200))
    space.drain_events()
    assert space.invalidate_memory().lost_rows == (row, waiting)
    space.check()
    assert [hit(space, tokens(9, first=first)) for first in (0, 100, 200)] == [0, 0, 0]
    assert [CacheEventKind(kind) for kind in space.drain_events()[0].kinds] == [CacheEventKind.CLEARED]
    with pytest.raises(SequenceError, match="lost"):
        space.append([row], [7])
    assert space.plan_step().compute.num_tokens == 0
    space.free([row, waiting])
    assert space.num_free_blocks() == 100
    space.check()


def test_what_is_swapped_out_comes_back() -> None:
    space = new_space(num_host_blocks=10)
    row = prefill(space, tokens(9))
    space.swap_out([row])
    run_step(space)
    assert space.invalidate_memory() == InvalidatedMemory(())
    answer = space.swap_in([row])
    assert not isinstance(answer, Shortage)
    (moves,) = answer
    assert len(moves.src_ids) == 3, "what was on the device as well is gone"
    run_step(space)
    assert hit(space, tokens(9)) == 8
    space.check()


def test_tickets_are_told_and_stay_to_be_released() -> None:
    space = new_space()
    row = prefill(space, tokens(9))
    ticket = space.hold(space.block_ids(row)[:2])
    assert space.invalidate_memory().undefined_tickets == (ticket,)
    space.free([row])
    space.check()
    assert space.num_free_blocks() == 98
    space.release(ticket)
    assert space.num_free_blocks() == 100
    with pytest.raises(BlockError):
        space.release(ticket)


def test_it_is_refused_while_the_device_works() -> None:
    space = new_space(num_host_blocks=10)
    row = prefill(space, tokens(6))
    space.append([row], [7])
    plan = space.plan_step()
    with unchanged(space), pytest.raises(StepError, match="in flight"):
        space.invalidate_memory()
    acknowledge(space, plan)
    space.swap_out([row])
    with unchanged(space), pytest.raises(StepError, match="copies or swaps"):
        space.invalidate_memory()
    run_step(space)
    space.invalidate_memory()


def test_the_space_serves_on_afterwards() -> None:
    space = new_space()
    row = prefill(space, tokens(9))
    space.invalidate_memory()
    space.free([row])
    assert hit(space, tokens(9)) == 0
    cache(space, tokens(9))
    assert hit(space, tokens(9)) == 8
    space.check()


def test_a_swap_that_moves_nothing_since_all_is_there_does_not_stand_in_the_way() -> None:
    space = new_space(num_host_blocks=10)
    row = prefill(space, tokens(8))
    space.swap_out([row])
    run_step(space)
    assert space.swap_in([row]) == ()
    assert space.invalidate_memory().lost_rows == (row,)
