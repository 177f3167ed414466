"""Promises 15 and 23: a state is kept inside a chunk, at a position that the engine names, and prompts hit there."""

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    FullAttention,
    KeptState,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    TenantLimits,
)
from pagedkv.blocks.record import KEPT, SPARE
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import BlockError, ConfigurationError, SwappedOutError, TokenError, UnknownSequenceError
from tests.space.spaces import cache, found, hit, new_space, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

HYBRID = FullAttention(4), RecurrentState(16)
POOLS = {"device": 101, "state": 11}


def hybrid(num_states: int = 10, **settings: object) -> BlockSpace:
    return new_space(*HYBRID, num_blocks={"device": 101, "state": num_states + 1}, **settings)  # type: ignore[arg-type]


def allocated(space: BlockSpace, prompt: Int32Array, keys: RequestKeys = NO_KEYS, **how: object) -> int:
    answer = space.allocate(prompt, keys=keys, **how)  # type: ignore[arg-type]
    assert isinstance(answer, Allocation)
    return answer.row


def kept(space: BlockSpace, row: int, position: int) -> tuple[KeptState, ...]:
    answer = space.keep_states(row, position)
    assert isinstance(answer, tuple)
    space.check()
    return answer


def settle(space: BlockSpace, row: int) -> None:
    run_step(space)
    space.check()
    space.free(row)
    space.check()


@pytest.mark.parametrize("position", [4, 8, 12, 20, 24, 28, 36])
def test_a_prompt_hits_where_a_state_was_kept_inside_the_chunk(position: int) -> None:
    space = hybrid()
    row = allocated(space, tokens(39))
    (state,) = kept(space, row, position)
    assert (state.group, state.pool) == (1, "state")
    assert state.block_id not in space.block_ids(row, 1)
    settle(space, row)
    other = np.concatenate([tokens(position), tokens(20, first=500)])
    assert hit(space, other) == position
    assert hit(space, tokens(39)) == max(position, 32)


def test_without_it_the_ends_of_intervals_alone_hit() -> None:
    space = hybrid()
    settle(space, allocated(space, tokens(39)))
    assert hit(space, np.concatenate([tokens(28), tokens(20, first=500)])) == 16


@pytest.mark.parametrize("position", [24, 28, 36, 44, 52, 60])
def test_of_a_later_chunk_it_is_named_before_the_tokens_are_appended(position: int) -> None:
    space = hybrid()
    row = allocated(space, tokens(22))
    run_step(space)
    assert len(kept(space, row, position)) == 1
    assert space.append(row, tokens(40, first=22)) is None
    settle(space, row)
    assert hit(space, np.concatenate([tokens(position), tokens(20, first=500)])) == position


def test_a_new_row_names_positions_behind_its_hit_also_in_the_interval_that_the_hit_ends_in() -> None:
    """The hit ends at 20, inside an interval: what was before it is no part of the row's table."""
    space = hybrid()
    settle_at(space, 20)
    row = allocated(space, np.concatenate([tokens(20), tokens(30, first=300)]))
    kept(space, row, 28)
    settle(space, row)
    assert hit(space, np.concatenate([tokens(20), tokens(8, first=300), tokens(9, first=700)])) == 28


def settle_at(space: BlockSpace, position: int) -> None:
    row = allocated(space, tokens(position + 3))
    kept(space, row, position)
    settle(space, row)
    assert hit(space, tokens(position + 3)) == position


def test_a_row_goes_on_from_a_copy_of_it() -> None:
    space = hybrid()
    row = allocated(space, tokens(30))
    (state,) = kept(space, row, 24)
    settle(space, row)
    other = allocated(space, np.concatenate([tokens(24), tokens(9, first=500)]))
    plan = run_step(space)
    (copies,) = plan.copies
    assert (copies.pool, copies.src_ids.tolist()) == ("state", [state.block_id])
    assert plan.compute.starts.tolist() == [24]
    space.free(other)


def test_an_answer_from_before_is_matched_again() -> None:
    space = hybrid()
    answer = space.match(tokens(30))
    row = allocated(space, tokens(30), match=answer)
    kept(space, row, 24)
    run_step(space)
    other = space.allocate(tokens(30), match=answer)
    assert isinstance(other, Allocation)
    assert other.num_hit_tokens == 24


def test_where_an_interval_ends_nothing_is_taken() -> None:
    space = hybrid()
    row = allocated(space, tokens(39))
    assert kept(space, row, 32) == ()
    settle(space, row)
    assert hit(space, np.concatenate([tokens(32), tokens(9, first=500)])) == 32


def test_windows_are_kept_there_too() -> None:
    space = new_space(
        FullAttention(4), SlidingWindow(8, 4), RecurrentState(16), num_blocks={"device": 101, "state": 11}
    )
    row = allocated(space, tokens(39))
    kept(space, row, 20)
    run_step(space)
    assert {3, 4} <= set(found(space, tokens(39), group=1))
    assert space.append(row, tokens(30, first=39)) is None
    settle(space, row)
    assert hit(space, np.concatenate([tokens(20), tokens(9, first=500)])) == 20


def test_states_of_several_groups_are_kept_together() -> None:
    groups = RecurrentState(16), FullAttention(4), RecurrentState(12, pool="other")
    space = new_space(*groups, num_blocks={"device": 101, "state": 11, "other": 11})
    row = allocated(space, tokens(39))
    assert [(state.group, state.pool) for state in kept(space, row, 20)] == [(0, "state"), (2, "other")]
    assert [state.group for state in kept(space, row, 24)] == [0]
    settle(space, row)
    assert hit(space, np.concatenate([tokens(24), tokens(9, first=500)])) == 24
    assert hit(space, np.concatenate([tokens(20), tokens(9, first=500)])) == 20


def test_promise_9_nothing_hits_it_before_it_is_planned_and_an_aborted_step_withdraws_it() -> None:
    space = hybrid()
    row = allocated(space, tokens(30))
    kept(space, row, 24)
    other = np.concatenate([tokens(24), tokens(9, first=500)])
    assert hit(space, other) == 0
    plan = space.plan_step()
    assert hit(space, other) == 24
    num_free = space.num_free_blocks("state")
    aborted = space.abort(plan.step_id)
    space.check()
    assert aborted.undefined_tickets == ()
    assert hit(space, other) == 0
    assert space.num_free_blocks("state") == num_free + 1
    kept(space, row, 24)
    settle(space, row)
    assert hit(space, other) == 24


def test_what_is_rolled_back_in_the_open_step_is_not_kept() -> None:
    space = hybrid()
    row = allocated(space, tokens(10))
    run_step(space)
    kept(space, row, 24)
    assert space.append(row, tokens(20, first=10)) is None
    space.truncate([row], [22])
    space.check()
    assert space.append(row, tokens(20, first=300)) is None
    settle(space, row)
    assert hit(space, np.concatenate([tokens(22), tokens(2, first=300), tokens(9, first=500)])) == 16


@pytest.mark.parametrize("leave", ["free", "swap out", "nothing"])
def test_what_the_plan_does_not_compute_is_not_kept(leave: str) -> None:
    space = hybrid(num_host_blocks={"device": 30, "state": 9})
    row = allocated(space, tokens(10))
    run_step(space)
    num_free = space.num_free_blocks("state")
    kept(space, row, 24)
    assert space.num_free_blocks("state") == num_free - 1
    if leave == "free":
        space.free(row)
    if leave == "swap out":
        space.swap_out([row])
    run_step(space)
    space.check()
    assert space.num_free_blocks("state") == num_free + (leave != "nothing")


def test_a_reset_before_the_plan_keeps_none() -> None:
    space = hybrid()
    row = allocated(space, tokens(30))
    kept(space, row, 24)
    space.reset_prefix_cache()
    settle(space, row)
    assert hit(space, tokens(30)) == 0
    assert space.num_cached_blocks("state") == 0


@pytest.mark.parametrize("publish", [False, "prompt"])
def test_promise_27_what_is_not_published_is_not_kept(publish: bool | str) -> None:  # noqa: FBT001
    space = hybrid()
    row = allocated(space, tokens(10), publish=publish)
    run_step(space)
    kept(space, row, 24)
    assert space.append(row, tokens(20, first=10)) is None
    settle(space, row)
    assert hit(space, tokens(30)) <= 8


def test_of_two_rows_that_keep_the_same_state_one_gives_the_name() -> None:
    space = hybrid()
    rows = [allocated(space, tokens(30)) for _ in range(2)]
    for row in rows:
        kept(space, row, 24)
    run_step(space)
    space.check()
    assert space.num_cached_blocks("state") == 2  # one at 16, where an interval ends, and one at 24
    space.free(rows)
    assert hit(space, np.concatenate([tokens(24), tokens(9, first=500)])) == 24


def test_promise_8_it_has_the_keys_of_its_prompt() -> None:
    space = hybrid()
    row = allocated(space, tokens(30), RequestKeys(salt=b"a"))
    kept(space, row, 12)
    settle(space, row)
    other = np.concatenate([tokens(12), tokens(9, first=500)])
    assert hit(space, other, RequestKeys(salt=b"a")) == 12
    assert hit(space, other) == hit(space, other, RequestKeys(salt=b"b")) == 0


def test_too_few_states_are_a_shortage_and_nothing_is_changed() -> None:
    space = hybrid(2)
    row = allocated(space, tokens(30))
    with unchanged(space):
        assert space.keep_states(row, 24) == Shortage("state", num_needed=1, num_free=0)


def test_it_is_charged_to_the_tenant_of_its_row() -> None:
    limits = {"a": TenantLimits(cap={"device": 100, "state": 3}), "b": TenantLimits()}
    space = hybrid(tenants=limits)
    row = allocated(space, tokens(30), tenant="a")
    kept(space, row, 24)
    answer = space.keep_states(row, 28)
    assert isinstance(answer, Shortage)
    assert answer.share is not None
    assert (answer.share.tenant, answer.share.num_permitted) == ("a", 0)
    settle(space, row)


def test_a_boundary_state_is_handed_to_a_store_before_it_can_be_evicted() -> None:
    """Held between the plan and its end, in whatever way it was kept; the store lets it go when it has read it."""
    space = hybrid(5)
    row = allocated(space, tokens(39))
    (inside,) = kept(space, row, 24)
    with pytest.raises(BlockError, match="gets its content in the open step"):
        space.hold([inside.block_id], "state")
    plan = space.plan_step()
    boundary = space.block_ids(row, 1)[1]
    ticket = space.hold([inside.block_id, boundary], "state")
    space.acknowledge(plan.step_id)
    space.free(row)
    for first in range(1000, 5000, 1000):
        cache(space, tokens(17, first=first))
    space.evict(100, pool="state")
    assert hit(space, np.concatenate([tokens(24), tokens(9, first=500)])) == 24
    assert hit(space, np.concatenate([tokens(32), tokens(9, first=500)])) == 32
    space.release(ticket)
    space.check()
    space.evict(100, pool="state")
    assert hit(space, np.concatenate([tokens(24), tokens(9, first=500)])) == 0


def test_what_cannot_be_kept_is_refused() -> None:
    space = hybrid(num_host_blocks={"device": 30, "state": 9})
    row = allocated(space, tokens(20))
    run_step(space)
    with unchanged(space), pytest.raises(TokenError, match="20 tokens are planned already"):
        space.keep_states(row, 20)
    assert space.append(row, tokens(30, first=20)) is None
    with unchanged(space), pytest.raises(TokenError, match="name a position before the tokens of its chunk"):
        space.keep_states(row, 24)
    kept(space, row, 40)
    with pytest.raises(TokenError, match="position must be at most 1000"):
        space.keep_states(row, 1001)
    run_step(space)
    space.swap_out([row])
    with pytest.raises(SwappedOutError):
        space.keep_states(row, 60)
    with pytest.raises(UnknownSequenceError):
        space.keep_states(99, 60)
    attention = new_space()
    with pytest.raises(ConfigurationError, match="no group is a recurrent state with prefix caching"):
        attention.keep_states(allocated(attention, tokens(9)), 4)


@pytest.mark.parametrize("interval", [2, 4, 6])
@pytest.mark.parametrize("position", [12, 20, 28])
def test_states_at_multiples_of_less_than_a_block_of_attention_are_hit_inside_that_block(
    interval: int, position: int
) -> None:
    """Where intervals end there anyway, naming the position keeps the state from being shed."""
    groups, pools = (FullAttention(8), RecurrentState(interval)), {"device": 101, "state": 101}
    space = new_space(*groups, num_blocks=pools, min_partial_hit=1)
    row = allocated(space, tokens(39))
    assert len(kept(space, row, position)) == (position % interval > 0)
    run_step(space)
    assert space.append(row, tokens(20, first=39)) is None
    settle(space, row)
    records = space._state.groups[1].pool.arrays.records
    space.evict(int((records[:, KEPT] == SPARE).sum()), pool="state")
    other = np.concatenate([tokens(position), tokens(9, first=500)])
    answer = space.match(other)
    assert (answer.num_tokens, answer.num_whole_tokens) == (position, position // 8 * 8)
    again = allocated(space, other)
    plan = run_step(space)
    assert plan.compute.starts.tolist() == [position]
    assert {copies.pool for copies in plan.copies} == {"device", *(["state"] if position % interval else [])}
    space.free(again)
