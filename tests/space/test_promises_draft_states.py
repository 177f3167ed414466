"""Promise 23: a recurrent state for each draft position; the accepted one becomes current, and nothing is copied."""

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, RecurrentState, Shortage, StepPlan
from pagedkv.contract.answers import PrefixGone
from pagedkv.contract.spec import AllocStatus
from pagedkv.errors import SequenceError, StepError, TokenError, TruncationError
from tests.space.spaces import acknowledge, hit, new_space, prefill, run_step, tokens, unchanged


def drafting(num_slots: int = 4, num_states: int = 20, **settings: object) -> BlockSpace:
    """A state every 8 tokens, and one for each of so many that are not accepted; blocks of 4 tokens beside."""
    groups = RecurrentState(8, num_draft_states=num_slots), FullAttention(4)
    return new_space(*groups, num_blocks={"state": num_states + 1, "device": 101}, **settings)  # type: ignore[arg-type]


def slots(space: BlockSpace, row: int) -> list[int]:
    return space.draft_block_ids(row, 0)


def current(space: BlockSpace, row: int) -> int:
    """The block of a row's current state."""
    return space.block_ids(row, 0)[(space.num_tokens(row) - 1) // 8]


def firsts(plan: StepPlan) -> list[int] | None:
    return None if plan.draft_states is None else plan.draft_states.firsts.tolist()


@pytest.mark.interpreted
def test_promise_23_the_plan_tells_which_block_each_drafts_state_is_written_to() -> None:
    space = drafting()
    row = prefill(space, tokens(5))
    assert slots(space, row) == [0, 0, 0, 0]
    space.append([row], [5, 6, 7], [3], num_draft=2)
    plan = run_step(space)
    mine = slots(space, row)
    assert [position % 4 for position in (6, 7)] == [slot for slot in range(4) if mine[slot]]
    assert firsts(plan) == [6]
    planned = {writes.group: writes for writes in plan.table_writes}
    assert (planned[2].rows.tolist(), planned[2].starts.tolist()) == ([row], [2])
    assert planned[2].block_ids.tolist() == mine[2:]
    assert not set(mine[2:]) & {block for new in plan.new_blocks for block in new.block_ids.tolist()}
    restored = StepPlan.from_buffer(plan.buffer.tobytes())
    assert firsts(restored) == [6]


@pytest.mark.interpreted
@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_promise_23_the_accepted_state_changes_places_with_the_current_one(num_accepted: int) -> None:
    """Of drafts 5, 6 and 7 so many are accepted, all in one interval."""
    space = drafting()
    row = prefill(space, tokens(4))
    space.append([row], tokens(4, first=4), [4], num_draft=3)
    run_step(space)
    before, mine = current(space, row), slots(space, row)
    space.truncate([row], [5 + num_accepted])
    space.check()
    expected = mine[(5 + num_accepted - 1) % 4] if num_accepted else before
    assert current(space, row) == expected
    space.append(row, [9])
    plan = run_step(space)
    assert plan.copies == ()
    space.check()


@pytest.mark.interpreted
def test_promise_23_a_block_is_computed_once_the_state_at_its_end_is_accepted() -> None:
    space = drafting()
    row = prefill(space, tokens(6))
    space.append([row], [6, 7], [2], num_draft=2)
    run_step(space)
    assert space.computed_block_ids(row, 0) == []
    assert space.computed_block_ids(row, 1) == space.block_ids(row, 1)
    space.append([row], [8])
    assert space.computed_block_ids(row, 0) == space.block_ids(row, 0)[:1]


@pytest.mark.interpreted
def test_promise_23_accepted_by_the_next_append_with_the_step_in_flight() -> None:
    space = drafting()
    row = prefill(space, tokens(4))
    space.append([row], tokens(3, first=4), [3], num_draft=2)
    first = space.plan_step()
    before, mine = current(space, row), slots(space, row)
    space.append([row], [7], [1])
    assert current(space, row) == mine[6 % 4]
    assert slots(space, row)[6 % 4] == before
    second = space.plan_step()
    assert firsts(second) is None
    acknowledge(space, first, second)
    space.check()


@pytest.mark.interpreted
def test_promise_23_a_checkpoint_among_accepted_drafts_is_kept() -> None:
    """Position 7 ends an interval: its state is the checkpoint, that of position 9 the current one."""
    space = drafting()
    row = prefill(space, tokens(6))
    space.append([row], tokens(5, first=6), [5], num_draft=4)
    run_step(space)
    mine = slots(space, row)
    assert hit(space, tokens(12)) == 0
    space.truncate([row], [10])
    assert space.block_ids(row, 0) == [mine[7 % 4], mine[9 % 4]]
    space.check()
    assert hit(space, tokens(12)) == 8
    space.free(row)
    space.check()
    assert hit(space, tokens(12)) == 8


@pytest.mark.interpreted
def test_promise_23_a_refused_checkpoint_is_not_found() -> None:
    space = drafting()
    row = prefill(space, tokens(6))
    space.append([row], tokens(5, first=6), [5], num_draft=4)
    run_step(space)
    space.truncate([row], [7])
    space.append(row, [70, 80])
    run_step(space)
    space.check()
    assert hit(space, tokens(12)) == 0
    assert hit(space, [*range(7), 70, 80, 90]) == 8


@pytest.mark.interpreted
def test_promise_23_steps_planned_ahead_have_states_for_all_that_may_be_refused() -> None:
    """Two drafts a step: six tokens are open at most, those of two steps."""
    space = drafting(6)
    row = prefill(space, tokens(4))
    space.append([row], None, [3])
    running = space.plan_step()
    space.fill([row], [7], [1])
    most = 0
    for num_accepted in (3, 1, 2, 3, 1, 3, 3, 2):
        space.append([row], None, [3])
        following = space.plan_step()
        unknown = following.unknown
        assert unknown is not None
        assert firsts(following) == [space.num_tokens(row) - 6]
        most = max(most, sum(block > 0 for block in slots(space, row)))
        space.fill([row], [7] * num_accepted, [num_accepted])
        acknowledge(space, running)
        space.check()
        running = following
    assert most == 6
    assert current(space, row) not in slots(space, row)


@pytest.mark.interpreted
def test_promise_23_a_row_holds_two_states_and_one_for_each_open_token() -> None:
    space = drafting(4)
    row = prefill(space, tokens(20))
    for _ in range(12):
        space.append([row], [1, 2, 3, 4], [4], num_draft=3)
        run_step(space)
        assert len({*space.block_ids(row, 0), *slots(space, row)} - {0}) <= 2 + 3
        space.truncate([row], [space.num_tokens(row) - 2])
        assert len({*space.block_ids(row, 0), *slots(space, row)} - {0}) <= 2
        space.check()


@pytest.mark.interpreted
def test_promise_23_growing_takes_a_block_for_each_draft_or_nothing() -> None:
    space = drafting(4, num_states=3)
    row = prefill(space, tokens(4))
    with unchanged(space):
        assert not space.can_append([row], [4], num_draft=3)
        assert space.append([row], tokens(4), [4], num_draft=3) == Shortage("state", num_needed=3, num_free=2)
        assert not space.can_append([row], [3], unknown=True)
        assert space.append([row], None, [3]) == Shortage("state", num_needed=3, num_free=2)
        assert space.can_append([row], [4])
    assert space.can_append([row], [3], num_draft=2)
    assert space.append([row], tokens(3), [3], num_draft=2) is None
    assert space.num_free_blocks("state") == 0
    run_step(space)
    assert space.can_append([row], [1], num_draft=1)  # the slots are there
    assert space.append([row], tokens(1), [1], num_draft=1) is None
    space.free(row)
    space.check()
    run_step(space)
    assert space.num_free_blocks("state") == 3


@pytest.mark.interpreted
def test_promise_23_a_failed_step_of_open_tokens_alone_loses_no_row() -> None:
    """The states before them stand: they were not advanced in place."""
    space = drafting()
    row = prefill(space, tokens(5))
    space.append([row], None, [2])
    failed = space.plan_step()
    answer = space.abort(failed.step_id)
    assert (answer.rewound_rows, answer.lost_rows) == ((row,), ())
    space.check()
    again = run_step(space)
    assert (again.compute.starts.tolist(), firsts(again)) == ([5], [5])
    space.check()


@pytest.mark.interpreted
def test_promise_23_a_failed_step_that_advanced_a_state_in_place_loses_its_row() -> None:
    space = drafting()
    row = prefill(space, tokens(5))
    space.append([row], tokens(3), [3], num_draft=2)
    answer = space.abort(space.plan_step().step_id)
    assert answer.lost_rows == (row,)
    space.check()
    space.free(row)
    space.check()


@pytest.mark.interpreted
def test_promise_23_forks_never_share_a_drafts_state() -> None:
    space = drafting()
    row = prefill(space, tokens(5))
    space.append([row], tokens(3), [3], num_draft=2)
    run_step(space)
    with unchanged(space), pytest.raises(SequenceError, match=r"2 of its 8 tokens are not accepted.*fork it at 6"):
        space.fork(row)
    with unchanged(space):
        assert space.fork(row, at=7) == PrefixGone(7, 6)
    child = space.fork(row, at=6)
    assert isinstance(child, np.ndarray)
    run_step(space)
    assert not any(slots(space, int(child[0])))
    space.check()
    space.truncate([row], [8])
    space.fork(row, 2)
    space.check()


@pytest.mark.interpreted
def test_promise_23_rows_with_open_states_wait_before_they_are_swapped_out() -> None:
    space = drafting(num_host_blocks={"state": 6, "device": 20})
    row = prefill(space, tokens(5))
    space.append([row], tokens(3), [3], num_draft=2)
    run_step(space)
    with unchanged(space):
        assert space.can_swap_out([row]) is AllocStatus.LATER
        with pytest.raises(SequenceError, match="tokens that are not accepted"):
            space.swap_out([row])
    space.append([row], [9])
    run_step(space)
    assert any(slots(space, row))
    assert space.can_swap_out([row]) is AllocStatus.OK
    space.swap_out([row])
    space.check()
    assert not any(slots(space, row))
    run_step(space)
    space.swap_in([row])
    space.append([row], tokens(3), [3], num_draft=2)
    run_step(space)
    space.check()


@pytest.mark.interpreted
def test_promise_23_what_another_reader_holds_is_left_to_it() -> None:
    """The current state is held by a ticket: it does not become a slot's, which is taken anew when it is needed."""
    space = drafting()
    row = prefill(space, tokens(5))
    space.append([row], tokens(3), [3], num_draft=2)
    run_step(space)
    held, mine = current(space, row), slots(space, row)
    ticket = space.hold([held], pool="state")
    space.append([row], tokens(3), [3], num_draft=2)
    assert current(space, row) not in {held, 0}
    assert held not in slots(space, row)
    space.check()
    run_step(space)
    space.release(ticket)
    space.check()
    assert mine


@pytest.mark.interpreted
def test_promise_23_the_kept_state_of_a_prompt_is_left_to_who_hits_it() -> None:
    space = new_space(FullAttention(4), RecurrentState(16, num_draft_states=3), num_blocks={"device": 101, "state": 21})
    answer = space.match(tokens(22))
    allocation = space.allocate(tokens(20), match=answer)
    assert isinstance(allocation, Allocation)
    run_step(space)
    space.append([allocation.row], [20, 21, 22], [3], num_draft=2)
    run_step(space)
    space.truncate([allocation.row], [22])
    space.append([allocation.row], [50], [1])
    run_step(space)
    space.check()
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_receipts_count_the_blocks_of_drafts() -> None:
    space = drafting(receipts=True)
    row = prefill(space, tokens(5))
    before = space.receipt(row).block_steps[0]
    space.append([row], tokens(3), [3], num_draft=2)
    run_step(space)
    assert space.receipt(row).block_steps[0] - before == 3
    space.check()


@pytest.mark.interpreted
def test_promise_23_without_draft_states_nothing_is_planned_of_them() -> None:
    space = drafting(0)
    row = prefill(space, tokens(5))
    space.append(row, [6])
    plan = run_step(space)
    assert plan.draft_states is None
    assert slots(space, row) == []
    assert space._state.draft_tables == ()


REFUSED = {
    "more drafts than states": (
        TokenError,
        "num_draft = 5, but a recurrent state cannot be rolled back by more than 4 tokens",
        lambda space, row: space.append([row], tokens(6), [6], num_draft=5),
    ),
    "more unknown tokens than states": (
        TokenError,
        "cannot take 5 unknown tokens: 0 are not accepted yet, and there is a state for 4",
        lambda space, row: space.append([row], None, [5]),
    ),
    "rolled back behind what is accepted": (
        TruncationError,
        "is past that and 3 is no checkpoint",
        lambda space, row: space.truncate([row], [3]),
    ),
    "drafts of a prompt": (
        TokenError,
        "allocate the certain tokens, then append the drafts",
        lambda space, _: space.allocate(tokens(9), num_draft=1),
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_promise_23_what_has_no_state_is_refused_and_nothing_changes(refused: tuple) -> None:  # type: ignore[type-arg]
    error, message, act = refused
    space = drafting()
    row = prefill(space, tokens(5))
    with unchanged(space), pytest.raises(error, match=message):
        act(space, row)


@pytest.mark.interpreted
def test_promise_23_more_unknown_tokens_are_refused_until_some_are_accepted() -> None:
    space = drafting(4)
    row = prefill(space, tokens(5))
    space.append([row], None, [3])
    plan = space.plan_step()
    with unchanged(space), pytest.raises(TokenError, match=r"2 unknown tokens: 3 are not accepted yet.* for 4"):
        space.append([row], None, [2])
    space.append([row], None, [1])
    space.fill([row], [9], [1])
    space.fill([row], [9, 9], [2])
    acknowledge(space, plan)
    assert space.append([row], None, [2]) is None
    space.check()


@pytest.mark.interpreted
def test_promise_23_drafts_are_not_declared_computed() -> None:
    space = drafting()
    row = prefill(space, tokens(5))
    space.append([row], tokens(3), [3], num_draft=2)
    with unchanged(space), pytest.raises(StepError, match="2 of its 8 tokens are not accepted yet"):
        space.mark_computed([row])
    space.append([row], [1])
    space.mark_computed([row])
    space.check()


@pytest.mark.interpreted
def test_promise_23_groups_with_fewer_states_say_how_many_tokens_may_be_open() -> None:
    groups = RecurrentState(8, num_draft_states=4), RecurrentState(8, num_draft_states=2)
    space = new_space(*groups, num_blocks={"state": 41})
    row = prefill(space, tokens(5))
    with unchanged(space), pytest.raises(TokenError, match="rolled back by more than 2 tokens"):
        space.append([row], tokens(4), [4], num_draft=3)
    space.append([row], tokens(3), [3], num_draft=2)
    run_step(space)
    space.truncate([row], [7])
    space.check()
