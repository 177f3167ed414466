"""A block gets other content: nothing that was recorded of its old content applies to the new one."""

import pytest

from pagedkv import FullAttention, RequestKeys
from tests.space.spaces import acknowledge, allocate, hit, new_space, only_pool, prefill, run_step, tokens

SALTED = RequestKeys(salt=b"tenant")


@pytest.mark.interpreted
def test_promise_07_nothing_follows_the_new_content_of_a_block_that_its_old_content_was_followed_by() -> None:
    """A merged duplicate was to be the parent of what its row writes next; another sequence has its block by then."""
    space = new_space(FullAttention(2))
    prefill(space, [0, 1, 9])
    row = allocate(space, [0])
    space.append(row, [1, 2, 3], [3])
    duplicate = space.block_ids(row)[0]
    space.truncate(row, [3])  # what is published next continues the row's own block
    run_step(space)
    assert space.block_ids(row)[0] != duplicate, "it was merged"
    other = prefill(space, [100, 101, 102])
    assert space.block_ids(other)[0] == duplicate
    space.append(row, [7])
    run_step(space)
    assert hit(space, [100, 101, 2, 7, 5]) == 2
    space.check()


@pytest.mark.interpreted
def test_promise_08_the_salt_of_a_blocks_content_before_is_not_that_of_the_new_one() -> None:
    space = new_space(num_blocks=3)
    space.free(prefill(space, tokens(8), SALTED))
    space.free(prefill(space, tokens(8, first=50)))
    prefill(space, tokens(8))
    assert hit(space, tokens(9)) == 8
    assert hit(space, tokens(9), SALTED) == 0


@pytest.mark.interpreted
def test_promise_12_a_block_waits_for_a_step_that_is_as_many_away_as_there_are_lists() -> None:
    """Steps 1 and 17 have one list of deferred blocks."""
    space = new_space()
    plans = [space.plan_step() for _ in range(16)]
    row = allocate(space, tokens(3))
    plans.append(space.plan_step())
    space.free(row)
    acknowledge(space, plans[0])
    assert only_pool(space).num_deferred == 1
    acknowledge(space, *plans[1:16])
    assert only_pool(space).num_deferred == 1
    acknowledge(space, plans[16])
    assert only_pool(space).num_deferred == 0
    space.check()


@pytest.mark.interpreted
def test_promise_08_keys_of_blocks_on_the_host_are_not_forgotten() -> None:
    """A salted block that is not full yet is on the host while other salts come and go, and all are swept."""
    space = new_space(num_host_blocks=10)
    row = prefill(space, tokens(3), SALTED)
    assert space.swap_out(row)
    run_step(space)
    space._state.keys_before_sweep = 2
    for number in range(4):
        space.free(prefill(space, tokens(3), RequestKeys(salt=b"%d" % number)))
    assert space.swap_in(row)
    space.append(row, [3, 4], [2])
    run_step(space)
    assert hit(space, tokens(5), SALTED) == 4
    assert [hit(space, tokens(5), RequestKeys(salt=b"%d" % number)) for number in range(4)] == [0] * 4
    space.check()


def test_promise_09_a_step_that_computes_nothing_of_a_row_loses_nothing_by_its_abort() -> None:
    """What was to be computed was rolled back: a fork waits for no row."""
    space = new_space()
    row = prefill(space, tokens(6))
    space.append(row, [6])
    space.truncate(row, [6])
    (child,) = space.fork(row).tolist()
    plan = space.plan_step()
    assert space.abort(plan.step_id).lost_rows == ()
    assert space.num_tokens(child) == 6
    space.check()
