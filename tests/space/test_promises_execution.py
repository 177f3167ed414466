"""Promise 21: a block that is given back waits for the steps that may still touch it, and for no others."""

from typing import cast

import numpy as np
import pytest

from pagedkv import BlockSpace, SlidingWindow
from pagedkv.errors import ConfigurationError
from tests.space.spaces import acknowledge, allocate, new_space, prefill, run_step, tokens

pytestmark = pytest.mark.interpreted


def num_deferred(space: BlockSpace) -> int:
    space.check()
    return space.num_deferred_blocks()


@pytest.mark.parametrize("in_order", [False, True])
def test_promise_21_rows_that_are_in_no_step_in_flight_never_wait(*, in_order: bool) -> None:
    space = new_space(in_order=in_order)
    idle, busy = prefill(space, tokens(9)), prefill(space, tokens(9, first=100))
    space.append([busy], [7])
    space.plan_step()
    space.free([idle])
    assert num_deferred(space) == 0


@pytest.mark.parametrize(("in_order", "num_waiting"), [(False, 3), (True, 0)])
def test_promise_21_a_row_in_flight_yields_its_blocks_at_once_where_steps_run_in_order(
    *, in_order: bool, num_waiting: int
) -> None:
    space = new_space(in_order=in_order, num_blocks=4)
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    space.free([row])
    assert num_deferred(space) == num_waiting
    assert space.num_free_blocks() == 3 - num_waiting
    if in_order:
        allocate(space, tokens(9, first=100))
        space.check()
    acknowledge(space, plan)
    assert num_deferred(space) == 0


def test_promise_21_windows_yield_what_steps_in_flight_read_at_once_too() -> None:
    space = new_space(SlidingWindow(4, 4), in_order=True)
    row = prefill(space, tokens(8))
    for number in range(8):
        space.append([row], [100 + number])
        space.plan_step()
    space.acknowledge(space._ledger.in_flight[0].plan.step_id)
    assert num_deferred(space) == 0
    assert space.block_ids(row)[0] == 0


def test_promise_21_in_order_a_copy_holds_its_source_until_the_plan_is_taken() -> None:
    """The copy is made before the forward pass of its own plan, and whoever takes the block writes it later."""
    space = new_space(in_order=True)
    parent = prefill(space, tokens(6))
    shared = space.block_ids(parent)[1]
    (child,) = space.fork(parent).tolist()
    copies = space.append_with_copies([child], [9])
    assert isinstance(copies, list)
    ((source, _),) = copies
    assert source == shared
    space.free([parent])
    assert num_deferred(space) == 1, "the open plan still copies the block"
    space.plan_step()
    assert num_deferred(space) == 0


def test_promise_21_a_copy_of_a_block_in_use_leaves_nothing_to_wait_for() -> None:
    space = new_space(in_order=True)
    parent = prefill(space, tokens(6))
    (child,) = space.fork(parent).tolist()
    space.append([child], [9])
    space.plan_step()
    space.free([parent, child])
    assert num_deferred(space) == 0


def test_promise_21_swaps_are_waited_for_in_any_order() -> None:
    """They may run beside the steps: the source of one is free when its own plan is acknowledged."""
    space = new_space(in_order=True, num_host_blocks=10)
    row = prefill(space, tokens(9))
    space.swap_out([row])
    plan = space.plan_step()
    assert num_deferred(space) == 3
    acknowledge(space, plan)
    assert num_deferred(space) == 0
    space.swap_in([row])
    space.plan_step()
    (host,) = space.statistics().host_pools
    assert host.num_deferred == 1, "the device's prefix cache holds the other two"


def test_promise_21_a_copy_does_not_end_the_waiting_for_a_swap() -> None:
    """The partly filled block arrives by a swap in flight, is copied by the next plan, and left by both rows."""
    space = new_space(in_order=True, num_host_blocks=10)
    parent = prefill(space, tokens(6))
    (child,) = space.fork(parent).tolist()
    space.swap_out([parent, child])
    run_step(space)
    space.swap_in([parent, child])
    arriving = space.plan_step()
    shared = space.block_ids(parent)[1]
    space.append([child], [9])
    space.plan_step()
    space.free([parent, child])
    pool = space._pool(None)
    assert pool.block(shared).place == "deferred"
    space.check()
    acknowledge(space, arriving)
    assert pool.block(shared).place == "free"


def test_promise_21_an_aborted_step_leaves_nothing_that_waits_or_is_found() -> None:
    space = new_space(in_order=True)
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    space.free([row])
    assert space.num_cached_blocks() == 2, "what the step computes can be found until it fails"
    space.abort(plan.step_id)
    assert (num_deferred(space), space.num_cached_blocks()) == (0, 0)


@pytest.mark.parametrize("in_order", [1, "yes", None, np.True_])
def test_in_order_is_a_plain_bool(in_order: object) -> None:
    with pytest.raises(ConfigurationError, match="in_order"):
        new_space(in_order=cast("bool", in_order))
