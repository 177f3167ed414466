"""Forks at a prefix: rows that continue from an earlier position of another, or learn from which position they can."""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import (
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    PrefixGone,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
)
from pagedkv.errors import ConfigurationError, PagedKVError, SequenceError, TooManySequencesError
from tests.space.spaces import acknowledge, allocate, held, hit, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

STATE = RecurrentState(4, pool="device")


def branched(space: BlockSpace, row: int, at: int, num_children: int = 1) -> list[int]:
    """Fork a row at a prefix that it holds."""
    children = space.fork(row, num_children, at=at)
    assert not isinstance(children, Shortage | PrefixGone), str(children)
    space.check()
    rows: list[int] = children.tolist()
    return rows


# What is shared, and what is copied


def test_promise_6_full_blocks_are_shared_and_one_copy_of_the_last_serves_all_children() -> None:
    space = new_space()
    row = prefill(space, tokens(11))
    children = branched(space, row, 6, 3)
    mine = space.block_ids(row)
    assert [space.block_ids(child)[0] for child in children] == [mine[0]] * 3
    (copy,) = {space.block_ids(child)[1] for child in children}
    assert copy not in mine
    plan = space.plan_step()
    ((source,), (target,)) = (plan.copies[0].src_ids.tolist(), plan.copies[0].dst_ids.tolist())
    assert (source, target) == (mine[1], copy)
    assert plan.compute.num_tokens == 0, "the tokens are computed"
    assert space.lengths(children).tolist() == [6, 6, 6]


def test_promise_6_at_the_end_of_a_block_nothing_is_copied() -> None:
    space = new_space()
    row = prefill(space, tokens(11))
    (child,) = branched(space, row, 8)
    assert space.block_ids(child) == space.block_ids(row)[:2]
    assert not run_step(space).copies


def test_promise_6_at_its_own_length_a_row_is_forked_as_ever() -> None:
    space = new_space()
    row = prefill(space, tokens(11))
    (child,) = branched(space, row, 11)
    assert space.block_ids(child) == space.block_ids(row)
    assert not run_step(space).copies


def test_promise_6_the_parent_stays_findable_and_each_row_finds_its_own_end() -> None:
    """Also when the parent goes first: the child writes into its copy."""
    space = new_space()
    row = prefill(space, tokens(11))
    (child,) = branched(space, row, 6)
    space.free([row])
    space.append(child, [60, 70, 80])
    run_step(space)
    assert (hit(space, tokens(12)), hit(space, [*range(6), 60, 70, 80])) == (8, 8)
    space.free([child])
    space.check()


def test_promise_6_the_parent_may_be_rolled_back_to_where_the_child_begins() -> None:
    space = new_space()
    row = prefill(space, tokens(11))
    branched(space, row, 9)
    space.truncate([row], [9])
    space.check()


def test_promise_6_keys_are_those_of_the_parent() -> None:
    space, keys = new_space(), RequestKeys(salt=b"ours")
    row = prefill(space, tokens(7), keys)
    (child,) = branched(space, row, 2)
    space.append(child, [20, 30])
    run_step(space)
    continued = [0, 1, 20, 30, 4]
    assert (hit(space, continued, keys), hit(space, continued)) == (4, 0)


def test_promise_6_drafts_of_the_parent_are_drafts_of_the_child() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append(row, [6, 7, 8], num_draft=2)
    run_step(space)
    (child,) = branched(space, row, 8)
    assert hit(space, tokens(9)) == 4
    space.append(child, [80])
    assert hit(space, [*range(8), 80]) == 8, "appending accepts them"
    space.check()


# What is not computed yet


@pytest.mark.parametrize("at", range(1, 11))
@pytest.mark.parametrize("num_computed", [0, 5, 8])
def test_promise_6_a_copy_is_computed_again_as_far_as_the_open_step_computes_its_block(
    at: int, num_computed: int
) -> None:
    """Copies are made before the forward pass. Shared blocks are computed by the parent, for both."""
    space = new_space()
    if num_computed:
        row = prefill(space, tokens(num_computed))
        space.append(row, tokens(11)[num_computed:])
    else:
        row = allocate(space, tokens(11))
    (child,) = branched(space, row, at)
    compute = space.plan_step().compute
    bounds = np.stack([compute.starts, compute.ends], axis=1).tolist()
    ranges = dict(zip(compute.rows.tolist(), bounds, strict=True))
    assert ranges.pop(row) == [num_computed, 11]
    start = max(at // 4 * 4, num_computed)
    assert ranges == ({child: [start, at]} if start < at else {})


def test_promise_6_a_child_computes_for_itself_when_its_parent_goes() -> None:
    space = new_space()
    row = allocate(space, tokens(11))
    (child,) = branched(space, row, 6)
    space.free([row])
    space.check()
    compute = space.plan_step().compute
    assert (compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist()) == ([child], [0], [6])


def test_promise_6_a_child_is_lost_with_the_step_that_was_to_compute_its_blocks() -> None:
    space = new_space()
    row = allocate(space, tokens(11))
    plan = space.plan_step()
    (child,) = branched(space, row, 8)
    assert space.abort(plan.step_id).lost_rows == (child,)
    space.check()


def test_promise_20_a_row_with_unknown_tokens_is_forked_where_they_are_known() -> None:
    space = new_space()
    row = allocate(space, tokens(7))
    first = space.plan_step()
    space.append([row], None, [3])
    with unchanged(space), pytest.raises(SequenceError, match="3 of its 10 tokens are unknown"):
        space.fork(row, at=8)
    (child,) = branched(space, row, 6)
    space.append(child, [60, 70])
    second = space.plan_step()
    space.fill([row], [7])
    space.append([child], None)
    third = space.plan_step()
    space.fill([child], [80])
    space.check()
    acknowledge(space, first, second, third)
    assert (space.num_tokens(row), space.num_tokens(child)) == (10, 9)
    assert hit(space, [*range(6), 60, 70, 80]) == 8


# Windows and states


@pytest.mark.parametrize(
    ("groups", "possible"),
    [
        ((SlidingWindow(4, 2),), [11, 12]),
        ((SlidingWindow(4, 2, num_sink_tokens=3),), [1, 2, 3, 4, 11, 12]),
        ((ChunkedLocal(6, 2),), [6, 12]),
        ((ChunkedLocal(5, 2),), [10, 11, 12]),
        ((STATE,), [12]),
        ((FullAttention(3), SlidingWindow(4, 2), ChunkedLocal(5, 2)), [11, 12]),
        ((FullAttention(3), STATE), [12]),
    ],
    ids=str,
)
def test_promise_16_an_answer_names_the_longest_prefix_that_every_group_can_give(
    groups: tuple[GroupSpec, ...], possible: list[int]
) -> None:
    """Of 12 computed tokens. What lies behind the window of a position may be gone, and a state has moved on."""
    for at in range(1, 13):
        space = new_space(*groups)
        row = prefill(space, tokens(12))
        longest = max([length for length in possible if length <= at], default=0)
        if longest == at:
            branched(space, row, at)
            continue
        with unchanged(space):
            assert space.fork(row, at=at) == PrefixGone(at, longest)


def test_promise_15_a_state_is_forked_at_a_checkpoint_that_the_row_still_holds() -> None:
    space = new_space(FullAttention(4), STATE)
    row = allocate(space, tokens(11))
    assert space.fork(row, at=8) == PrefixGone(8, 0), "no step computes it yet"
    plan = space.plan_step()
    (child,) = branched(space, row, 8)
    assert held(space, child, 1) == held(space, row, 1)[:2]
    space.append(child, [80])
    second = space.plan_step()
    assert not second.copies, "the state of a checkpoint is read, and the next one written elsewhere"
    acknowledge(space, plan, second)
    space.check()
    assert space.fork(row, at=8) == PrefixGone(8, 0), "it went back to the pool"


def test_promise_15_a_state_is_forked_where_it_stands_before_what_the_open_step_computes() -> None:
    space = new_space(FullAttention(4), STATE)
    row = prefill(space, tokens(10))
    space.append(row, [10, 11])
    (child,) = branched(space, row, 10)
    (moves,) = space.plan_step().copies
    assert len(moves.src_ids) == 2
    assert held(space, child, 1)[-1] in moves.dst_ids.tolist()


# Refusals


def test_promise_2_a_shortage_of_blocks_to_copy_into_changes_nothing() -> None:
    space = new_space(num_blocks=4)
    row = prefill(space, tokens(11))
    with unchanged(space):
        assert space.fork(row, at=6) == Shortage("device", num_needed=1, num_free=0)
    branched(space, row, 8)


MISUSES: dict[str, tuple[type[PagedKVError], str, Callable[[BlockSpace, int], object]]] = {
    "beyond its tokens": (SequenceError, "at 12 tokens: it has 11", lambda space, row: space.fork(row, at=12)),
    "nothing": (ConfigurationError, "at must be at least 1", lambda space, row: space.fork(row, at=0)),
    "a negative number": (ConfigurationError, "at must be at least 1", lambda space, row: space.fork(row, at=-1)),
    "too many": (TooManySequencesError, "16 more sequences", lambda space, row: space.fork(row, 16, at=6)),
    "a vacant row": (SequenceError, "serves no sequence", lambda space, row: space.fork(row + 1, at=6)),
}


@pytest.mark.parametrize("name", MISUSES)
def test_promise_5_misuse_changes_nothing(name: str) -> None:
    space = new_space()
    row = prefill(space, tokens(11))
    error, message, act = MISUSES[name]
    with unchanged(space), pytest.raises(error, match=message):
        act(space, row)
