"""What the open plan copies or swaps is held for it, and counted before anything moves."""

import pytest

from pagedkv import FullAttention, Shortage
from tests.space.spaces import allocate, new_space, only_pool, prefill, run_step, tokens


@pytest.mark.interpreted
def test_promise_12_the_destination_of_a_copy_waits_for_the_copy() -> None:
    space = new_space()
    parent = prefill(space, tokens(6))
    (child,) = space.fork(parent).tolist()
    space.append(child, [6])
    copy = space.block_ids(child)[1]
    space.free(child)
    assert only_pool(space).block(copy).place == "deferred", "the open plan writes it"
    assert [moves.dst_ids.tolist() for moves in run_step(space).copies] == [[copy]]
    assert only_pool(space).block(copy).place == "free"
    space.check()


@pytest.mark.interpreted
def test_promise_12_the_destination_of_a_swap_waits_for_the_swap() -> None:
    space = new_space(num_host_blocks=10)
    row = prefill(space, tokens(3))
    assert space.swap_out(row)
    space.free(row)
    assert space.statistics().host_pools[0].num_deferred == 1, "the open plan writes it"
    run_step(space)
    assert space.statistics().host_pools[0].num_deferred == 0
    space.check()


def test_promise_03_every_group_of_a_pool_is_counted_however_few_tokens_come() -> None:
    space = new_space(FullAttention(1), FullAttention(1), FullAttention(1), num_blocks=6)
    row = prefill(space, tokens(1))
    assert space.num_free_blocks() == 2
    assert not space.can_append(row)
    assert isinstance(space.append(row, [1]), Shortage)
    assert space.num_free_blocks() == 2
    space.check()


@pytest.mark.interpreted
def test_promise_09_a_copy_of_what_a_failed_step_was_to_compute_is_computed_again() -> None:
    """The row that was to compute holds a copy, made to reserve a slot; whoever copies that one computes it too."""
    space = new_space()
    row = allocate(space, tokens(6))
    plan = space.plan_step()
    (other,) = space.fork(row).tolist()
    assert space.append(row, [], [0], num_lookahead=1) is None
    assert space.abort(plan.step_id).lost_rows == (other,)
    space.free(other)
    (child,) = space.fork(row).tolist()
    space.append(child, [6])
    compute = space.plan_step().compute
    assert compute.starts[compute.rows == child].tolist() == [4]
    space.check()
