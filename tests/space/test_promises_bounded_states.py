"""Promise 23: no more checkpoints stay cached than ``max_checkpoints``, and the least valuable go first."""

import pytest

from pagedkv import Allocation, BlockSpace, CacheEventKind, FullAttention, RecurrentState
from pagedkv.blocks.cached_bounds import AFTER, MOST, NUM_BOUNDED
from pagedkv.blocks.record import NAME
from tests.space.spaces import acknowledge, hit, new_space, run_step, tokens, unchanged


def bounded(most: int | None, num_states: int = 30, *, pool: str = "state", **settings: object) -> BlockSpace:
    """Blocks of 4 tokens, and a state every 16, of which so many stay cached."""
    groups = FullAttention(4), RecurrentState(16, pool=pool, max_checkpoints=most)
    num_blocks = {"device": 301, "state": num_states + 1} if pool == "state" else {"device": 301}
    return new_space(*groups, num_blocks=num_blocks, **settings)  # type: ignore[arg-type]


def serve(space: BlockSpace, length: int, first: int = 0) -> int:
    """Serve a prompt from beginning to end, its last state kept; return how many tokens hit."""
    prompt = tokens(length, first)
    answer = space.match(prompt)
    allocation = space.allocate(prompt[: answer.checkpoint or length], match=answer)
    assert isinstance(allocation, Allocation)
    run_step(space)
    rest = prompt[space.num_tokens(allocation.row) :]
    if len(rest):
        assert space.append(allocation.row, rest) is None
        run_step(space)
    space.free(allocation.row)
    space.check()
    return answer.num_tokens


def num_cached_states(space: BlockSpace) -> int:
    """Count the states that are cached and unreferenced."""
    return next(pool.num_cached for pool in space.statistics().pools if pool.name == "state")


@pytest.mark.interpreted
def test_promise_23_no_more_states_stay_cached_than_the_bound() -> None:
    space = bounded(3)
    for first in range(0, 5000, 1000):
        serve(space, 70, first)
        assert num_cached_states(space) == 3
    assert space.num_free_blocks("state") == 30


@pytest.mark.interpreted
def test_promise_23_without_a_bound_they_fill_the_pool() -> None:
    space = bounded(None)
    for first in range(0, 5000, 1000):
        serve(space, 70, first)
    assert num_cached_states(space) == 25


@pytest.mark.interpreted
def test_promise_23_states_that_a_prompt_has_passed_go_before_those_at_ends() -> None:
    """Five states each: of two prompts the ends stay, and the last interval of the second, the younger one."""
    space = bounded(3)
    for first in (0, 1000):
        serve(space, 70, first)
    ends = [16, 32, 48, 64, 68]
    assert [hit(space, [*range(length), 7]) for length in ends] == [0, 0, 0, 0, 68]
    assert sum(hit(space, [*range(1000, 1000 + length), 7]) == length for length in ends[:4]) == 1
    assert hit(space, [*range(1000, 1068), 7]) == 68


@pytest.mark.interpreted
def test_promise_23_of_ends_the_older_goes_first() -> None:
    space = bounded(2)
    for first in (0, 1000, 2000):
        serve(space, 14, first)
    assert [hit(space, tokens(14, first)) for first in (0, 1000, 2000)] == [0, 12, 12]


@pytest.mark.interpreted
def test_promise_23_what_was_hit_again_is_the_younger() -> None:
    space = bounded(2)
    for first in (0, 1000, 0, 2000):
        serve(space, 14, first)
    assert [hit(space, tokens(14, first)) for first in (0, 1000, 2000)] == [12, 0, 12]


@pytest.mark.interpreted
def test_promise_23_ends_go_before_junctions_though_these_are_older() -> None:
    """Two questions behind 32 tokens: the second leaves a known chain there, and the third hits."""
    space = bounded(2)
    document = list(range(32))
    rows = []
    for first in (1000, 2000, 3000):
        question = [*document, *range(first, first + 6)]
        answer = space.match(question)
        allocation = space.allocate(question, match=answer)
        assert isinstance(allocation, Allocation)
        run_step(space)
        rows.append(answer.num_tokens)
        space.free(allocation.row)
        space.check()
    assert rows[2] == 32
    for first in (5000, 6000, 7000):
        serve(space, 14, first)
    assert hit(space, [*document, 7]) == 32
    assert hit(space, tokens(14, 7000)) == 12
    assert hit(space, tokens(14, 6000)) == 0


@pytest.mark.interpreted
def test_promise_23_states_in_use_do_not_count() -> None:
    space = bounded(1)
    rows = []
    for first in (0, 1000, 2000):
        allocation = space.allocate(tokens(16, first))
        assert isinstance(allocation, Allocation)
        run_step(space)
        rows.append(allocation.row)
    assert [hit(space, [*tokens(16, first), 7]) for first in (0, 1000, 2000)] == [16, 16, 16]
    space.free(rows)
    space.check()
    assert num_cached_states(space) == 1


@pytest.mark.interpreted
def test_promise_23_states_that_wait_for_a_step_count_when_it_is_over() -> None:
    space = bounded(1)
    rows = [space.allocate(tokens(16, first)) for first in (0, 1000)]
    plan = space.plan_step()
    for row in rows:
        assert isinstance(row, Allocation)
        space.free(row.row)
    space.check()
    assert num_cached_states(space) == 0
    acknowledge(space, plan)
    space.check()
    assert num_cached_states(space) == 1


@pytest.mark.interpreted
def test_promise_23_leased_states_go_last() -> None:
    space = bounded(2, leases=True)
    space.advance(1.0)
    serve(space, 14)
    space.lease(tokens(14), until_s=100.0)
    for first in (1000, 2000, 3000):
        serve(space, 14, first)
    assert [hit(space, tokens(14, first)) for first in (0, 1000, 2000, 3000)] == [12, 0, 0, 12]


@pytest.mark.interpreted
def test_promise_23_in_a_shared_pool_states_leave_the_rest_of_the_room_to_others() -> None:
    """A block for 4 tokens has the bytes of a state here: nothing of ten prompts is evicted but states.

    Each leaves two at ends: the prompt's, and the last interval before the sequence's.
    """
    space = bounded(4, pool="device")
    for first in range(0, 10_000, 1000):
        serve(space, 70, first)
    statistics = space.statistics().pools[0]
    assert statistics.num_evictions == 0
    assert statistics.num_cached == 4 + 10 * 17
    assert [hit(space, tokens(70, first)) for first in range(0, 10_000, 1000)] == [0] * 8 + [68] * 2


@pytest.mark.interpreted
def test_promise_23_each_group_has_its_own_bound() -> None:
    groups = FullAttention(4), RecurrentState(16, max_checkpoints=1), RecurrentState(16, max_checkpoints=2)
    space = new_space(*groups, num_blocks={"device": 301, "state": 41})
    for first in (0, 1000, 2000):
        serve(space, 14, first)
    assert num_cached_states(space) == 3
    assert [hit(space, tokens(14, first)) for first in (0, 1000, 2000)] == [0, 0, 12]


@pytest.mark.interpreted
def test_promise_23_events_tell_what_the_bound_gave_up() -> None:
    space = bounded(1, events=True)
    for first in (0, 1000):
        serve(space, 14, first)
    of_states = next(events for events in space.drain_events() if events.pool == "state")
    assert of_states.kinds.tolist() == [CacheEventKind.STORED] * 2 + [CacheEventKind.REMOVED]


@pytest.mark.interpreted
def test_promise_23_questions_change_nothing_where_states_are_bounded() -> None:
    space = bounded(1)
    serve(space, 14)
    with unchanged(space):
        assert hit(space, tokens(14)) == 12
        space.can_allocate(tokens(14))


@pytest.mark.interpreted
def test_a_bound_that_is_not_kept_is_found() -> None:
    """Negative controls: check() counts, and looks at the links."""
    space = bounded(2)
    for first in (0, 1000):
        serve(space, 14, first)
    arrays = space._state.pools["state"].arrays
    name = next(row for row in range(31, len(arrays.bounds)) if arrays.bounds[row, MOST])
    for column, value in ((MOST, 1), (NUM_BOUNDED, 1), (NUM_BOUNDED, 3), (AFTER, 0)):
        before = int(arrays.bounds[name, column])
        arrays.bounds[name, column] = value
        with pytest.raises(AssertionError, match="bound on cached blocks"):
            space.check()
        arrays.bounds[name, column] = before
    space.check()
    assert arrays.records[int(arrays.bounds[name, AFTER]), NAME] == 2
