"""Groups that stay out of prefix caching beside groups that have it: hits spare them nothing, and cost them nothing."""

from typing import Any

import numpy as np
import pytest

from pagedkv import AllocStatus, BlockSpace, FullAttention, RecurrentState, SlidingWindow, StepPlan
from pagedkv.errors import ConfigurationError, PlanError, TruncationError
from tests.plan_packing import sealed
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    hit,
    new_space,
    prefill,
    run_step,
    starts_of,
    tokens,
    unchanged,
)

pytestmark = pytest.mark.interpreted

DRAFTS = FullAttention(2, prefix_caching=False)


def with_drafts(num_host_blocks: int = 0) -> BlockSpace:
    """A space whose second group stays out."""
    return new_space(FullAttention(4), DRAFTS, num_blocks=200, num_host_blocks=num_host_blocks)


@pytest.mark.parametrize("group", [2, 99, -1, -5, "x", None, True, 0.0])
def test_a_group_that_a_plan_does_not_have_has_no_ranges(group: Any) -> None:  # noqa: ANN401 - wrong on purpose
    space = with_drafts()
    allocate(space, tokens(9))
    plan = space.plan_step()
    with pytest.raises(PlanError, match=r"group must be"):
        plan.compute_in(group)


def test_a_hit_waits_for_no_such_group_and_leaves_it_all_to_compute() -> None:
    space = with_drafts()
    cache(space, tokens(9))
    question = space.match(tokens(9))
    assert question.num_tokens == 8
    assert [len(blocks) for blocks in question.block_ids] == [2, 0]
    assert question.num_blocks_needed == {"device": 1 + 2 + 5}
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    assert starts_of(plan) == ([8], [0])
    assert plan.compute_in(1).ends.tolist() == [9]
    assert plan.compute_in(0) is plan.compute
    assert len(space.slot_mapping(plan)) == 1
    slots = space.slot_mapping(plan, 1)
    blocks = np.repeat(space.block_ids(row, 1), 2)[:9]
    np.testing.assert_array_equal(slots, blocks * 2 + np.arange(9) % 2)
    acknowledge(space, plan)
    space.append(row, [9])
    assert starts_of(space.plan_step()) == ([9], [9])
    space.check()


def test_its_blocks_are_never_found() -> None:
    space = new_space(FullAttention(4), DRAFTS, num_blocks=200, events=True)
    row = prefill(space, tokens(12))
    (events,) = space.drain_events()
    assert set(events.groups.tolist()) == {0}
    assert len(space.stored_blocks().block_ids) == 3
    space.free(row)
    assert space.num_cached_blocks() == 3


def test_a_failed_step_leaves_the_hit_to_be_computed_again() -> None:
    space = with_drafts()
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    assert space.abort(plan.step_id).rewound_rows == (row,)
    assert starts_of(space.plan_step()) == ([8], [0])
    space.check()


def test_what_is_declared_computed_is_so_in_every_group() -> None:
    space = with_drafts()
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    space.mark_computed(row)
    assert space.plan_step().compute.rows.tolist() == []
    assert space.computed_block_ids(row, 1) == space.block_ids(row, 1)[:4]


def test_a_fork_inherits_what_its_parent_was_to_compute() -> None:
    space = with_drafts()
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    (child,) = space.fork(row)
    space.free(row)
    plan = space.plan_step()
    assert plan.compute.rows.tolist() == [child]
    assert starts_of(plan) == ([8], [0])
    space.check()


def test_a_fork_that_only_reserves_slots_in_a_block_still_to_be_computed_is_planned() -> None:
    """Its copy of the block is made before the step computes it, so it computes the same once more."""
    space = new_space(FullAttention(4), FullAttention(3, prefix_caching=False))
    row = allocate(space, tokens(4))
    (child,) = space.fork(row)
    space.append(child, [], [0], num_lookahead=1)
    plan = space.plan_step()
    assert plan.compute.rows.tolist() == [row, child]
    assert plan.compute_in(1).starts.tolist() == [0, 3]
    space.check()


def test_swapped_out_before_its_step_it_computes_the_hit_when_it_is_back() -> None:
    space = with_drafts(num_host_blocks=50)
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    assert space.swap_out(row)
    assert run_step(space).compute.rows.tolist() == []
    assert space.swap_in(row)
    plan = run_step(space)
    assert starts_of(plan) == ([8], [0])
    space.check()


def test_rolling_back_into_a_hit_that_is_still_to_be_computed_is_refused() -> None:
    space = with_drafts()
    cache(space, tokens(8))
    row = allocate(space, tokens(6))
    with unchanged(space), pytest.raises(TruncationError, match="group 1 is still to compute it; plan the step first"):
        space.truncate(row, [4])
    run_step(space)
    space.truncate(row, [4])
    assert space.lengths(row).tolist() == [4]
    space.check()


def test_a_row_rolled_back_into_its_hit_is_lost_with_the_step_that_was_to_compute_it() -> None:
    """No plan could have it: the groups that hit have nothing to compute."""
    space = with_drafts()
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    space.truncate(row, [8])
    aborted = space.abort(plan.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((), (row,))
    space.check()
    space.free(row)
    space.check()


def test_a_state_outside_does_not_keep_others_from_hitting_what_the_step_computes() -> None:
    space = new_space(FullAttention(4), RecurrentState(4, prefix_caching=False), num_blocks={"device": 50, "state": 9})
    first = allocate(space, tokens(9))
    second = allocate(space, tokens(9))
    assert space.block_ids(first)[:2] == space.block_ids(second)[:2]
    plan = space.plan_step()
    assert starts_of(plan) == ([0, 8], [0, 0])
    space.check()


def test_a_window_outside_is_computed_from_the_first_token_and_slides_behind() -> None:
    space = new_space(FullAttention(4), SlidingWindow(window=4, block_size=2, prefix_caching=False))
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    assert starts_of(plan) == ([8], [0])
    assert all(space.block_ids(row, 1))
    acknowledge(space, plan)
    assert [bool(block) for block in space.block_ids(row, 1)] == [False, False, False, True, True]


def test_the_first_chunk_of_a_prompt_holds_all_of_a_window_outside() -> None:
    """The hit is 16 tokens; the chunks behind it have 4: the window of the first one holds ten blocks of 2."""
    groups = FullAttention(4), SlidingWindow(window=4, block_size=2, prefix_caching=False)
    for num_blocks, status in ((1 + 4 + 10 + 1, AllocStatus.OK), (4 + 10 + 1, AllocStatus.LATER)):
        space = new_space(*groups, num_blocks=num_blocks)
        cache(space, tokens(9))
        cache(space, tokens(17))
        assert hit(space, tokens(24)) == 16
        assert space.can_allocate(tokens(24), max_chunk=4) is status


def test_promise_01_a_prompt_that_fits_an_empty_pool_but_not_with_its_hit_waits_while_others_run() -> None:
    """Its first chunk would hold all of the hit in the window outside: 20 blocks of 19, and 13 without the hit."""
    space = new_space(FullAttention(4), SlidingWindow(4, 4, prefix_caching=False), num_blocks=20)
    cache(space, tokens(36))
    for num_tokens, first in ((20, 100), (8, 200)):
        prefill(space, tokens(num_tokens, first=first))
    assert hit(space, tokens(40)) == 36
    assert space.can_allocate(tokens(40), max_chunk=4) is AllocStatus.LATER


def test_a_state_outside_begins_with_its_sequence() -> None:
    space = new_space(FullAttention(4), RecurrentState(4, prefix_caching=False), num_blocks={"device": 50, "state": 9})
    cache(space, tokens(9))
    row = allocate(space, tokens(9))
    assert starts_of(space.plan_step()) == ([8], [0])
    assert len(space.block_ids(row, 1)) == 1


def test_without_prefix_caching_at_all_a_plan_has_one_start_for_every_group() -> None:
    space = new_space(FullAttention(4), DRAFTS, prefix_caching=False)
    allocate(space, tokens(9))
    plan = space.plan_step()
    assert plan.compute_in(1) is plan.compute
    assert not plan.compute_outside


def test_a_plan_from_elsewhere_tells_the_starts() -> None:
    space = with_drafts()
    cache(space, tokens(9))
    allocate(space, tokens(9))
    plan = space.plan_step()
    assert starts_of(StepPlan.from_buffer(plan.buffer.tobytes())) == ([8], [0])


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (-4, 10, "begins at 10 in group 1, and ends at 9"),
        (-4, -1, "negative"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(word: int, value: int, message: str) -> None:
    space = with_drafts()
    cache(space, tokens(9))
    allocate(space, tokens(9))
    words = space.plan_step().buffer.copy()
    words[word] = value
    with pytest.raises(PlanError, match=message):
        StepPlan.from_buffer(sealed(words.tobytes()))


def test_one_group_at_least_has_prefix_caching() -> None:
    with pytest.raises(ConfigurationError, match="every group stays out of prefix caching"):
        new_space(DRAFTS)


def test_staying_out_is_a_question_of_yes_or_no() -> None:
    with pytest.raises(ConfigurationError, match="prefix_caching must be True or False, got 'no'"):
        FullAttention(4, prefix_caching="no")  # type: ignore[arg-type]
