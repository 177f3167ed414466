"""Promise 20: tokens that are planned before they are known, filled in later, refused, dropped with failed steps."""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    FullAttention,
    GroupSpec,
    RecurrentState,
    Shortage,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
)
from pagedkv.errors import PagedKVError, SequenceError, SharedPrefixError, TokenError, TruncationError
from pagedkv.space.rows import NUM_ACCEPTED
from tests.space.spaces import acknowledge, allocate, hit, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted


def ranges(plan: StepPlan) -> dict[int, tuple[int, int]]:
    compute = plan.compute
    return {
        row: (start, end)
        for row, start, end in zip(compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist(), strict=True)
    }


def unknown(plan: StepPlan) -> list[tuple[int, int]] | None:
    unknown = plan.unknown
    return list(zip(unknown.counts.tolist(), unknown.steps_back.tolist(), strict=True)) if unknown else None


def overlapped(space: BlockSpace, row: int, new: list[int]) -> list[StepPlan]:
    """Decode a row with one step in flight at any time; return the plans."""
    plans = [space.plan_step()]
    for token in new:
        assert space.append([row], None) is None
        plans.append(space.plan_step())
        space.fill([row], [token])
        space.acknowledge(plans[-2].step_id)
        space.check()
    return plans


def test_promise_20_the_next_step_is_planned_before_the_last_token_is_known() -> None:
    """The usual case: the first token behind a prompt, then one a step."""
    space = new_space()
    row = allocate(space, tokens(6))
    plans = overlapped(space, row, [6, 7, 8])
    assert [ranges(plan)[row] for plan in plans] == [(0, 6), (6, 7), (7, 8), (8, 9)]
    assert [unknown(plan) for plan in plans] == [None, [(1, 1)], [(1, 1)], [(1, 1)]]
    space.acknowledge(plans[-1].step_id)
    space.free([row])
    assert hit(space, tokens(9)) == 8
    space.check()


def test_promise_20_a_block_is_found_once_its_last_token_is_known_and_computed() -> None:
    space = new_space()
    row = allocate(space, tokens(7))
    first = space.plan_step()
    space.append([row], None)
    assert hit(space, [*range(7), 0, 8]) == 4, "what stands for an unknown token is no token"
    second = space.plan_step()
    space.fill([row], [7])
    assert hit(space, tokens(9)) == 4, "known, and in flight"
    space.acknowledge(first.step_id)
    assert hit(space, tokens(9)) == 4
    space.acknowledge(second.step_id)
    assert hit(space, tokens(9)) == 8
    space.check()


def test_promise_20_nothing_moves_and_nothing_is_planned_twice() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    first = space.plan_step()
    space.append([row], None)
    before = space.block_ids(row)
    second = space.plan_step()
    space.fill([row], [6])
    assert space.block_ids(row) == before
    assert ranges(space.plan_step()) == {}
    assert ranges(second) == {row: (6, 7)}
    space.acknowledge(first.step_id)


def speculating(space: BlockSpace, row: int) -> tuple[StepPlan, StepPlan]:
    """Two steps in flight, each of three drafts behind a token that the step before samples."""
    space.append([row], None, [3])
    first = space.plan_step()
    space.append([row], None, [4])
    return first, space.plan_step()


def test_promise_20_refused_drafts_move_what_is_behind_them_down() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    first, second = speculating(space, row)
    assert (ranges(first)[row], ranges(second)[row]) == ((0, 9), (9, 13))
    assert (unknown(first), unknown(second)) == ([(3, 0)], [(7, 1)])
    space.fill([row], [6, 7], [2])
    assert space.num_tokens(row) == 11
    space.check()
    space.acknowledge(first.step_id)
    space.append([row], None, [1])
    third = space.plan_step()
    assert (ranges(third)[row], unknown(third)) == ((11, 12), [(4, 1)])
    space.fill([row], [8, 9, 10, 11], [4])
    assert space.num_tokens(row) == 12
    acknowledge(space, second, third)
    space.free([row])
    assert hit(space, tokens(13)) == 12
    space.check()


def test_promise_20_filling_may_come_after_acknowledging() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    first, second = speculating(space, row)
    acknowledge(space, first, second)
    assert hit(space, tokens(9)) == 4
    space.fill([row], [6, 7], [2])
    assert space.num_tokens(row) == 11
    with unchanged(space), pytest.raises(TokenError, match="no slot for the token behind its drafts, at position 11"):
        space.fill([row], [8, 9, 10, 11], [4])
    space.append([row], None)
    space.fill([row], [8], [1])
    assert space.num_tokens(row) == 9
    space.check()
    assert hit(space, tokens(9)) == 8


@pytest.mark.parametrize("is_acknowledged", [False, True], ids=["in flight", "over"])
@pytest.mark.parametrize("num_filled", [1, 2, 3])
def test_promise_20_what_there_are_slots_for_is_filled_in_though_the_next_token_found_none(
    num_filled: int, *, is_acknowledged: bool
) -> None:
    """Drafts are judged, and the pool has no block for the token behind them: all that comes before is taken."""
    space = new_space(num_blocks=4, receipts=True)
    other = prefill(space, tokens(2, first=90))
    row = allocate(space, tokens(4))
    first = space.plan_step()
    space.append(row, None, [4])
    second = space.plan_step()
    assert isinstance(space.append(row, None), Shortage)
    space.fill(row, [4])
    acknowledge(space, *[first, second][: 1 + is_acknowledged])
    with unchanged(space), pytest.raises(TokenError, match="fill 3 tokens: the last of them is computed again"):
        space.fill(row, tokens(4, first=5), [4])
    space.fill(row, tokens(num_filled, first=5), [num_filled])
    assert space.num_tokens(row) == 5 + num_filled
    acknowledge(space, *[first, second][1 + is_acknowledged :])
    space.check()
    space.free(other)
    assert ranges(run_step(space)) == {row: (4 + num_filled, 5 + num_filled)}, "the token that was sampled last"
    space.append(row, [50])
    run_step(space)
    assert hit(space, [*tokens(5 + num_filled), 50, 0]) == (6 + num_filled) // 4 * 4
    space.check()
    assert space.receipt(row).num_computed == 4 + 4 + 1 + 1, "all that steps have computed, refused drafts included"


def test_promise_20_a_slot_reserved_behind_the_drafts_takes_what_is_sampled_without_computing_anything_again() -> None:
    """The step's samples always have slots; the row waits for a block with its last token outside the space."""
    space = new_space(num_blocks=3)
    row = prefill(space, tokens(4))
    assert isinstance(space.append(row, None, [4], num_lookahead=1), Shortage)
    space.append(row, None, [3], num_lookahead=1)
    plans = [space.plan_step()]
    assert isinstance(space.append(row, None, [1], num_lookahead=1), Shortage)
    assert space.append(row, None, [1]) is None
    plans.append(space.plan_step())
    assert isinstance(space.append(row, None, [1]), Shortage)
    space.fill(row, [4])
    space.fill(row, [5, 6, 7], [3])
    acknowledge(space, *plans)
    space.check()
    assert space.num_tokens(row) == 8
    assert [ranges(plan)[row] for plan in plans] == [(4, 7), (7, 8)]
    assert len(run_step(space).compute.rows) == 0, "nothing is left to compute"
    assert hit(space, tokens(9)) == 8


def test_promise_20_a_token_may_be_appended_when_its_step_is_over() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], None)
    plan = space.plan_step()
    assert (ranges(plan)[row], unknown(plan)) == ((6, 7), [(1, 1)])
    space.fill([row], [6])
    acknowledge(space, plan)
    space.append([row], [7])
    run_step(space)
    assert hit(space, tokens(9)) == 8


def test_promise_20_an_end_found_late_is_rolled_back_while_a_step_is_in_flight() -> None:
    """Two steps late: the positions behind the end are in flight, and computed again after that."""
    space = new_space()
    row = allocate(space, tokens(6))
    plans = [space.plan_step()]
    for _ in range(3):
        space.append([row], None)
        plans.append(space.plan_step())
    space.fill([row], [6])
    space.truncate([row], [7])
    assert space.num_tokens(row) == 7
    space.append(row, [70, 71])
    plan = space.plan_step()
    assert ranges(plan)[row] == (7, 9)
    acknowledge(space, *plans, plan)
    assert hit(space, [*range(7), 70, 71, 72]) == 8
    assert hit(space, tokens(9)) == 4
    space.check()
    space.free([row])


def test_promise_20_a_sequence_that_ended_is_freed_while_it_is_in_flight() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    overlapped(space, row, [6, 7])
    space.append([row], None)
    space.free([row])
    space.check()
    space.acknowledge(space._ledger.in_flight[0].plan.step_id)
    assert space.num_deferred_blocks() == 0
    assert hit(space, tokens(9)) == 4, "the step that computes the eighth token had no row to publish it"


def test_promise_20_a_failed_step_takes_the_tokens_along_that_it_would_have_sampled() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    first = space.plan_step()
    space.append([row], None)
    second = space.plan_step()
    space.append([row], None, [2])
    third = space.plan_step()
    space.append([row], None)
    space.abort(third.step_id)
    space.check()
    assert space.num_tokens(row) == 8, "the token that the second step samples is still to come"
    space.abort(second.step_id)
    assert space.num_tokens(row) == 7
    space.fill([row], [6])
    acknowledge(space, first)
    plan = space.plan_step()
    assert (ranges(plan), unknown(plan)) == ({row: (6, 7)}, None)
    space.check()


def test_promise_20_what_was_filled_in_survives_the_failure_of_its_step() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    first, second = speculating(space, row)
    space.fill([row], [6, 7], [2])
    space.abort(first.step_id)
    assert (space.num_tokens(row), second.step_id) == (8, 2)
    plan = space.plan_step()
    assert (ranges(plan), unknown(plan)) == ({row: (0, 8)}, None)
    acknowledge(space, plan)
    space.append([row], [8])
    assert hit(space, tokens(9)) == 8
    space.check()


def test_promise_20_known_drafts_are_judged_with_the_tokens_behind_them() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], [6, 7, 8], [3], num_draft=2)
    first = space.plan_step()
    space.append([row], None)
    second = space.plan_step()
    assert unknown(second) == [(3, 1)]
    space.fill([row], [7, 80], [2])
    assert space.num_tokens(row) == 9
    acknowledge(space, first, second)
    assert hit(space, [*range(8), 80, 0]) == 8
    assert hit(space, [*range(9), 0]) == 8
    space.check()


def test_promise_20_windows_slide_behind_tokens_that_are_known_and_computed() -> None:
    space = new_space(SlidingWindow(4, 4))
    row = allocate(space, tokens(8))
    plans = [space.plan_step()]
    for _ in range(6):
        space.append([row], None)
        plans.append(space.plan_step())
    acknowledge(space, *plans[:4])
    assert 0 not in space.block_ids(row)[1:], "nothing behind the prompt is known"
    for token in range(6):
        space.fill([row], [100 + token])
    acknowledge(space, *plans[4:])
    assert space.block_ids(row)[:2] == [0, 0]
    space.check()


def test_promise_20_a_state_takes_one_unknown_token_a_step() -> None:
    space = new_space(FullAttention(4), RecurrentState(4), num_blocks={"device": 50, "state": 20})
    row = allocate(space, tokens(6))
    with unchanged(space), pytest.raises(TokenError, match="cannot be rolled back"):
        space.append([row], None)
    plans = overlapped(space, row, [6, 7, 8])
    with unchanged(space), pytest.raises(TokenError, match="cannot be rolled back"):
        space.append([row], None, [2])
    acknowledge(space, plans[-1])
    space.free([row])
    assert hit(space, tokens(9)) == 8


def test_promise_20_copies_on_write_are_as_with_known_tokens() -> None:
    space = new_space()
    parent = prefill(space, tokens(6))
    (child,) = space.fork(parent).tolist()
    copies = space.append_with_copies([parent, child], None)
    assert isinstance(copies, list)
    assert len(copies) == 1
    plan = space.plan_step()
    space.fill([parent, child], [6, 60])
    acknowledge(space, plan)
    space.append([parent, child], [7, 70])
    run_step(space)
    assert (hit(space, tokens(9)), hit(space, [*range(6), 60, 70, 0])) == (8, 8)


def unknown_row() -> tuple[BlockSpace, int]:
    """A row with one unknown token that the step in flight samples, and two that the open step does."""
    space = new_space(num_host_blocks=10)
    row = allocate(space, tokens(6))
    space.plan_step()
    space.append([row], None, [3])
    return space, row


MISUSES: dict[str, tuple[type[PagedKVError], str, Callable[[BlockSpace, int], object]]] = {
    "too many": (TokenError, "sampled 1 to 1", lambda space, row: space.fill([row], [6, 7], [2])),
    "none": (TokenError, "sampled 1 to 1", lambda space, row: space.fill([row], [], [0])),
    "counts": (TokenError, "do not add up", lambda space, row: space.fill([row], [6, 7])),
    "a negative count": (TokenError, "do not add up", lambda space, row: space.fill([row], [], [-1])),
    "no token": (TokenError, "token", lambda space, row: space.fill([row], [2**40])),
    "twice in a batch": (SequenceError, "twice", lambda space, row: space.fill([row, row], [6, 7])),
    "a foreign row": (SequenceError, "does not exist", lambda space, row: space.fill([row + 99], [6])),
    "a vacant row": (SequenceError, "serves no sequence", lambda space, row: space.fill([row + 1], [6])),
    "known tokens behind": (SequenceError, "unknown", lambda space, row: space.append([row], [6])),
    "drafts": (TokenError, "num_draft", lambda space, row: space.append([row], None, [2], num_draft=1)),
    "a fork": (SequenceError, "unknown", lambda space, row: space.fork(row)),
    "a swap": (SequenceError, "unknown", lambda space, row: space.swap_out([row])),
    "a declaration": (SequenceError, "unknown", lambda space, row: space.mark_computed([row])),
    "a rollback": (TruncationError, "only 6 are known", lambda space, row: space.truncate([row], [7])),
}


@pytest.mark.parametrize("name", MISUSES)
def test_promise_20_misuse_changes_nothing(name: str) -> None:
    space, row = unknown_row()
    error, message, act = MISUSES[name]
    with unchanged(space), pytest.raises(error, match=message):
        act(space, row)
    space.fill([row], [6])
    space.check()


def test_promise_20_known_tokens_are_not_filled() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    with unchanged(space), pytest.raises(TokenError, match="all of its 6 tokens are known"):
        space.fill([row], [6])


def test_promise_20_what_the_open_step_samples_is_not_filled_before_it_is_planned() -> None:
    space, row = unknown_row()
    space.fill([row], [6])
    with unchanged(space), pytest.raises(TokenError, match="position 7, is sampled by the open step"):
        space.fill([row], [7])


def test_promise_20_declaring_computed_ends_the_overlap() -> None:
    """The step in flight that would have accepted the tokens does not change the row any more."""
    space = new_space(FullAttention(4), SlidingWindow(4, 4))
    row = allocate(space, tokens(5))
    plans = overlapped(space, row, [5, 6, 7])
    assert hit(space, tokens(10)) == 4, "the step is in flight that computes the eighth token"
    space.mark_computed([row])
    space.check()
    assert hit(space, tokens(10)) == 8
    assert space.block_ids(row, 1)[0] == 0, "the window slides behind them"
    space.append([row], None)
    space.plan_step()
    space.fill([row], [8])
    space.abort(plans[-1].step_id)
    space.check()
    assert (space.num_tokens(row), hit(space, tokens(10))) == (9, 8)


def test_promise_20_a_fork_of_filled_tokens_that_are_in_flight_knows_them() -> None:
    space = new_space()
    row = allocate(space, tokens(5))
    plans = overlapped(space, row, [5, 6, 7])
    (child,) = space.fork(row).tolist()
    space.append([row, child], None)
    plan = space.plan_step()
    assert plan.unknown is not None
    assert plan.unknown.counts.tolist() == [1, 1]
    space.fill([row, child], [8, 80])
    space.check()
    acknowledge(space, plans[-1], plan)
    assert (space.num_tokens(row), space.num_tokens(child), hit(space, tokens(9))) == (9, 9, 8)


def test_promise_20_drafts_that_no_step_judges_take_no_unknown_tokens_behind_them() -> None:
    """What the prompt's step samples was guessed, and the next step computes the guess as if it were known."""
    space = new_space()
    row = allocate(space, tokens(6))
    first = space.plan_step()
    space.append([row], [6], num_draft=1)
    second = space.plan_step()
    with unchanged(space), pytest.raises(TokenError, match="from position 6 on, are all that step 2 computes"):
        space.append([row], None)
    acknowledge(space, first, second)
    space.append([row], None)
    third = space.plan_step()
    space.fill([row], [60], [1])
    assert (space.num_tokens(row), ranges(third)) == (7, {row: (7, 8)})
    assert space._ledger.in_flight[0].starts.tolist() == [6], "it is computed again"
    acknowledge(space, third)
    space.check()


def test_promise_20_ranges_that_were_rolled_back_compute_no_drafts() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    plans = [space.plan_step()]
    space.append([row], None, [2])
    plans.append(space.plan_step())
    space.truncate([row], [6])
    space.append(row, [6, 7], num_draft=1)
    space.append([row], None)
    plans.append(space.plan_step())
    space.append([row], None)
    space.fill([row], [70], [1])
    acknowledge(space, *plans)
    assert space.num_tokens(row) == 8
    space.check()


def test_promise_20_many_rows_are_filled_at_once() -> None:
    space = new_space()
    rows = [allocate(space, tokens(5, first=100 * number)) for number in range(4)]
    first = space.plan_step()
    space.append(rows, None, [1, 4, 1, 3])
    second = space.plan_step()
    space.fill(rows[::-1], [305, 205, 105, 5])
    space.append(rows, None)
    space.fill(rows[1:2], [106, 107], [2])
    assert space.lengths(rows).tolist() == [7, 8, 7, 9]
    np.testing.assert_array_equal(space._state.num_known[rows], [6, 8, 6, 6])
    acknowledge(space, first, second)
    space.check()
    assert hit(space, [*range(100, 108), 0]) == 4, "the last of them is not computed"


@pytest.mark.interpreted
@pytest.mark.parametrize("num_others", [0, 11])
def test_promise_20_unknown_tokens_behind_a_kept_state_are_counted_where_blocks_are_short(num_others: int) -> None:
    groups = FullAttention(4), RecurrentState(12)
    space = new_space(*groups, num_blocks={"device": 200, "state": num_others + 6}, max_tokens=96)
    for other in range(num_others):
        allocate(space, tokens(1, first=100 + other))
    prompt = tokens(17)
    allocation = space.allocate(prompt[:16], match=space.match(prompt))
    assert isinstance(allocation, Allocation)
    plan = space.plan_step()
    assert space.append(allocation.row, None, [1]) is None
    space.check()
    acknowledge(space, plan)
    space.plan_step()
    space.fill(allocation.row, [16])
    assert space.num_tokens(allocation.row) == 17
    space.check()


@pytest.mark.interpreted
def test_promise_20_a_range_that_was_rolled_back_samples_nothing() -> None:
    """Two steps compute the row; rolled back to within the first, the second does not change what comes next."""
    space = new_space()
    row = prefill(space, tokens(4))
    space.append(row, None, [2])
    first = space.plan_step()
    space.append(row, None, [1])
    second = space.plan_step()
    acknowledge(space, first, second)
    space.truncate(row, [3])
    space.append(row, None, [3])
    third = space.plan_step()
    assert space.num_tokens(row) == 6
    space.fill(row, [50])
    assert space.num_tokens(row) == 6, "the one token that was waited for is there; none was refused"
    acknowledge(space, third)
    space.check()


@pytest.mark.interpreted
def test_promise_20_drafts_that_others_share_are_not_overwritten() -> None:
    """A fork shares the drafts; were they refused, the other row's next tokens would be written over them."""
    space = new_space()
    row = prefill(space, tokens(5))
    space.append(row, [90, 91], num_draft=1)
    run_step(space)
    child = space.fork(row)[0]
    with unchanged(space), pytest.raises(SharedPrefixError, match="hold its drafts, positions 6 to 6"):
        space.append(row, None, [1])
    space.free([child])
    assert space.append(row, None, [1]) is None
    space.check()


@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(6, 4))], ids=str)
def test_promise_20_drafts_that_an_ended_fork_has_accepted_are_not_found_once_they_may_be_overwritten(
    groups: tuple[GroupSpec, ...],
) -> None:
    """The fork's block is named for its tokens, and its parent's next tokens take its place."""
    space = new_space(*groups)
    row = prefill(space, tokens(6))
    space.append([row], [6, 99], [2], num_draft=1)
    run_step(space)
    (fork,) = space.fork(row)
    space.truncate([fork], [8])
    prompt = [*range(7), 99]
    assert hit(space, [*prompt, 1]) == 8
    space.free(fork)
    space.append([row], None, [1])
    assert hit(space, [*prompt, 1]) == 4, "a step may overwrite the last token of the block"
    plan = space.plan_step()
    space.fill([row], [7], [1])
    acknowledge(space, plan)
    run_step(space)
    space.check()
    assert hit(space, [*prompt, 1]) == 4
    assert hit(space, [*range(8), 1]) == 8, "it is named for its new tokens"


@pytest.mark.interpreted
def test_promise_20_a_token_that_is_filled_in_late_is_not_accepted_before_it_is_computed() -> None:
    """Its step is over that sampled it, but the step is still to come that computes it: no block is named for it."""
    space = new_space()
    row = allocate(space, tokens(7))
    first = space.plan_step()
    space.append([row], None)
    acknowledge(space, first)
    space.fill([row], [7])
    assert space._state.rows[row, NUM_ACCEPTED] == 7
    assert hit(space, tokens(9)) == 4
    space.check()
    second = space.plan_step()
    assert ranges(second) == {row: (7, 8)}
    acknowledge(space, second)
    assert space._state.rows[row, NUM_ACCEPTED] == 8
    assert hit(space, tokens(9)) == 8
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_promise_20_of_drafts_that_are_judged_late_only_computed_ones_are_accepted(num_right: int) -> None:
    """Right drafts were computed by the step that judges them; the token behind the last right one was not."""
    space = new_space()
    row = allocate(space, tokens(5))
    run_step(space)
    space.append([row], tokens(3, first=5), [3], num_draft=2)
    plan = space.plan_step()
    space.append([row], None)
    acknowledge(space, plan)
    space.fill([row], [*range(6, 6 + num_right), 900], [num_right + 1])
    assert space._state.rows[row, NUM_ACCEPTED] == 6 + num_right
    assert space.num_tokens(row) == 7 + num_right
    assert hit(space, tokens(9)) == (8 if num_right == 2 else 4)
    run_step(space)
    assert space._state.rows[row, NUM_ACCEPTED] == 7 + num_right
    space.check()


def test_a_row_with_an_unknown_token_can_be_swapped_out_later() -> None:
    space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=20, num_host_blocks=20))
    row = prefill(space, list(range(6)))
    assert space.can_swap_out(row) is AllocStatus.OK
    space.append(row, None, [1])
    assert space.can_swap_out(row) is AllocStatus.LATER
    with pytest.raises(SequenceError, match="1 of its 7 tokens are unknown"):
        space.swap_out(row)
    run_step(space)
    space.fill(row, [6], [1])
    assert space.can_swap_out(row) is AllocStatus.OK
    space.swap_out(row)
    space.check()
