"""Promise 28: weights change while sequences run; hits rest on weights of a few epochs back at most."""

from typing import Any

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    EpochSpan,
    FullAttention,
    GroupSpec,
    Load,
    RecurrentState,
    SlidingWindow,
    SpaceConfig,
    StoredBlock,
)
from pagedkv.errors import ConfigurationError, PagedKVError
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
    unchanged,
)

pytestmark = pytest.mark.interpreted

MIXES: list[tuple[GroupSpec, ...]] = [
    (FullAttention(4),),
    (FullAttention(4), SlidingWindow(8, 4)),
    (SlidingWindow(8, 4),),
    (FullAttention(4), RecurrentState(8, pool="device")),
]
PROMPT = tokens(33)


def counting(*groups: GroupSpec, lag: int = 0, num_blocks: int = 101, num_host_blocks: int = 0) -> BlockSpace:
    """Build a space that counts epochs, from 0 on."""
    return new_space(
        *groups, num_blocks=num_blocks, num_host_blocks=num_host_blocks, weights_epoch=0, max_epoch_lag=lag
    )


def ranges(space: BlockSpace, row: int) -> list[tuple[int, int]]:
    """The epochs of each position of a row."""
    return [(span.oldest, span.newest) for span in space.epochs(row) for _ in range(span.start, span.stop)]


def test_promise_28_a_lost_row_tells_what_its_blocks_on_the_device_hold() -> None:
    space = counting(FullAttention(4), num_host_blocks=2)
    row = prefill(space, PROMPT)
    epochs = space.epochs(row)
    space.invalidate_memory()
    assert max(space.block_ids(row)) > 2
    assert space.epochs(row) == epochs


def test_promise_28_a_group_may_hit_younger_weights_than_the_group_beside_it() -> None:
    space = counting(FullAttention(2), SlidingWindow(4, 1, num_sink_tokens=1), lag=1)
    prefill(space, [7, 1, 2, 3, 4, 5, 6, 8])
    space.set_weights_epoch(1)
    space.mark_computed(allocate(space, [7]))  # a block of the window, half a block of full attention
    row = allocate(space, [7, 1, 2, 3, 4, 5, 6, 8, 9])
    run_step(space)
    assert ranges(space, row) == [(0, 1)] + 7 * [(0, 0)] + [(0, 1)]


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_promise_28_hits_rest_on_weights_of_so_many_epochs_back(groups: tuple[GroupSpec, ...], lag: int) -> None:
    space = counting(*groups, lag=lag)
    cache(space, PROMPT)
    for epoch in range(1, 6):
        space.set_weights_epoch(epoch)
        space.check()
        assert space.weights_epoch == epoch
        assert hit(space, PROMPT) == (32 if epoch <= lag else 0)


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_28_hundreds_of_rows_run_on(groups: tuple[GroupSpec, ...]) -> None:
    num_rows = 300
    config = SpaceConfig(
        groups, num_blocks=5_000, max_sequences=num_rows, max_tokens=64, weights_epoch=7, max_epoch_lag=1
    )
    space = BlockSpace(config)
    rows = np.array([allocate(space, tokens(9, first=20 * place)) for place in range(num_rows)], np.int32)
    run_step(space)
    tables = [space.block_ids(row) for row in rows]
    in_flight = None
    for epoch in range(8, 12):
        assert space.append(rows, np.arange(num_rows) + 9000 * epoch) is None
        plan = space.plan_step()
        space.set_weights_epoch(epoch)  # the plan was made before
        if in_flight is not None:
            acknowledge(space, in_flight)
        in_flight = plan
        space.check()
    assert in_flight is not None
    acknowledge(space, in_flight)
    if len(groups) == 1 and isinstance(groups[0], FullAttention):
        assert [space.block_ids(row)[:3] for row in rows] == tables
        assert {space.epochs(row) for row in rows} == {
            (EpochSpan(0, 8, 7, 7), EpochSpan(8, 12, 7, 9), EpochSpan(12, 13, 7, 10)),
        }
    assert not any(hit(space, tokens(9, first=20 * place)) for place in range(0, num_rows, 17))


def test_promise_28_a_chain_goes_on_through_epochs_as_long_as_its_beginning_may_be_hit() -> None:
    space = counting(lag=2)
    row = prefill(space, PROMPT[:9])
    for epoch in (1, 2):
        space.set_weights_epoch(epoch)
        space.append([row], PROMPT[space.num_tokens(row) :][:8], [8])
        run_step(space)
    assert ranges(space, row) == [(0, 0)] * 8 + [(0, 1)] * 8 + [(0, 2)] * 9
    assert hit(space, PROMPT) == 24
    other = prefill(space, np.append(PROMPT[:24], [7]))
    assert ranges(space, other) == [(0, 0)] * 8 + [(0, 1)] * 8 + [(0, 2)] * 9
    space.set_weights_epoch(3)
    space.append([row], PROMPT[25:], [8])
    run_step(space)
    assert hit(space, PROMPT) == 0, "all of it rests on epoch 0"
    assert ranges(space, row)[-1] == (0, 3)
    space.free([row, other])
    assert space.num_cached_blocks() == 0
    space.check()


def test_promise_28_a_plan_computes_with_the_weights_that_were_in_force_when_it_was_made() -> None:
    space = counting(lag=5)
    row = allocate(space, PROMPT[:8])
    plan = space.plan_step()
    space.set_weights_epoch(1)
    space.append([row], PROMPT[8:16], [8])
    waiting = allocate(space, tokens(8, first=500))
    sharing = allocate(space, tokens(9, first=500))
    assert space.epochs(waiting) == space.epochs(sharing) == ()
    space.set_weights_epoch(2)  # nothing of the open step is planned yet
    acknowledge(space, plan, space.plan_step())
    assert ranges(space, row) == [(0, 0)] * 8 + [(0, 2)] * 8
    assert ranges(space, waiting) == [(2, 2)] * 8
    assert ranges(space, sharing) == [(2, 2)] * 9
    space.set_weights_epoch(7)
    assert hit(space, PROMPT) == 0
    assert hit(space, tokens(9, first=500)) == 8


def test_promise_28_what_the_open_step_goes_on_computing_may_be_too_old_before_it_is_planned() -> None:
    space = counting(lag=1)
    row = prefill(space, PROMPT[:9])
    space.append([row], PROMPT[9:17], [8])
    assert hit(space, PROMPT) == 16
    space.set_weights_epoch(2)
    space.check()
    assert hit(space, PROMPT) == 0
    run_step(space)
    assert hit(space, PROMPT) == 0
    space.check()


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_28_fresher_content_takes_the_name_and_older_is_not_merged_with_it(
    groups: tuple[GroupSpec, ...],
) -> None:
    space = counting(*groups, lag=1)
    old = prefill(space, PROMPT[:9])
    space.set_weights_epoch(1)
    answer = space.match(PROMPT[:9], max_hit_tokens=0)
    new = space.allocate(PROMPT[:9], match=answer)
    assert isinstance(new, Allocation)
    run_step(space)
    run_step(space)
    space.check()
    assert not {*space.block_ids(old)} & {*space.block_ids(new.row)} - {0}
    assert (ranges(space, old)[-1], ranges(space, new.row)[-1]) == ((0, 0), (1, 1))
    space.set_weights_epoch(2)
    assert hit(space, PROMPT[:9]) == 8, "the fresher one carries the name"
    space.append([old, new.row], [1, 2])
    run_step(space)
    space.free([old, new.row])
    space.check()


def test_promise_28_content_of_equal_epochs_is_merged() -> None:
    space = counting(lag=1)
    space.set_weights_epoch(1)
    first = prefill(space, PROMPT[:9])
    second = space.allocate(PROMPT[:9], match=space.match(PROMPT[:9], max_hit_tokens=0))
    assert isinstance(second, Allocation)
    run_step(space)
    assert space.block_ids(first)[:2] == space.block_ids(second.row)[:2]


def test_promise_28_rows_on_the_host_come_back_as_they_were() -> None:
    space = counting(lag=1, num_host_blocks=30)
    row, other = prefill(space, PROMPT[:17]), prefill(space, tokens(9, first=500))
    before = space.epochs(row)
    space.swap_out([row])
    run_step(space)
    assert space.epochs(row) == before
    space.set_weights_epoch(1)
    fresh = space.allocate(PROMPT[:17], match=space.match(PROMPT[:17], max_hit_tokens=0))
    assert isinstance(fresh, Allocation)
    run_step(space)
    moves = space.swap_in([row])
    assert isinstance(moves, tuple)
    assert len(moves[0].dst_ids) == 5, "what is there is of other weights"
    run_step(space)
    assert space.epochs(row) == before
    space.set_weights_epoch(2)
    assert hit(space, PROMPT) == 16
    space.swap_out([other])
    space.set_weights_epoch(9)
    space.check()
    assert all(pool.num_named == 0 for pool in (*space.statistics().pools, *space.statistics().host_pools))


def test_promise_28_failed_steps_leave_no_epoch_behind() -> None:
    space = counting(lag=9)
    row, old = allocate(space, PROMPT[:9]), prefill(space, tokens(6, first=500))
    space.append([old], tokens(3), [3])
    plan = space.plan_step()
    space.append([row], [1])
    later = space.plan_step()
    space.set_weights_epoch(4)
    space.abort(plan.step_id)
    assert later.step_id > plan.step_id
    run_step(space)
    assert ranges(space, old) == [(0, 0)] * 4 + [(0, 4)] * 5
    again = allocate(space, tokens(5, first=700))
    doomed = space.plan_step()
    space.set_weights_epoch(5)
    space.abort(doomed.step_id)
    run_step(space)
    assert ranges(space, again) == [(5, 5)] * 5
    space.check()


def test_promise_28_refused_drafts_move_what_later_weights_compute_into_other_blocks() -> None:
    space = counting(lag=9)
    row = prefill(space, PROMPT[:8])
    space.append([row], [8])
    space.append([row], None, [3])
    first = space.plan_step()  # computes 8 to 11, and samples 9 to 12
    space.append([row], None, [4])
    space.set_weights_epoch(1)
    second = space.plan_step()  # computes 12 to 15
    assert ranges(space, row) == [(0, 0)] * 12 + [(0, 1)] * 4
    acknowledge(space, first)
    space.fill([row], [50], [1])  # three are refused: it computes 9 to 12
    acknowledge(space, second)
    assert ranges(space, row) == [(0, 0)] * 8 + [(0, 1)] * 5
    space.check()


def test_promise_28_content_from_elsewhere_has_the_epochs_that_are_told_of_it() -> None:
    space = counting(lag=2)
    space.set_weights_epoch(5)
    load = space.load(PROMPT, 16, epochs=[4, 5])  # type: ignore[arg-type]  # a list is a pair, too
    older = space.load(tokens(9, first=500), 8, epochs=(3, 3))
    now = space.load(tokens(9, first=700), 8)
    assert isinstance(load, Load)
    assert isinstance(older, Load)
    assert isinstance(now, Load)
    space.set_weights_epoch(6)
    for answer in (load, older, now):
        space.finish_load(answer)
    space.check()
    assert [hit(space, tokens(17, first=first)) for first in (0, 500, 700)] == [16, 0, 8]
    row = prefill(space, PROMPT[:17])
    assert ranges(space, row) == [(4, 5)] * 16 + [(4, 6)]
    for wrong in ((3, 5), (6, 5), (5, 7), (-1, 6), 5, (5,), ("a", "b")):
        epochs: Any = wrong
        with unchanged(space), pytest.raises(ConfigurationError):
            space.load(tokens(9, first=900), 8, epochs=epochs)


def test_promise_28_a_loaded_prefix_is_as_old_as_what_it_continues() -> None:
    space = counting(lag=2)
    cache(space, PROMPT[:9])
    space.set_weights_epoch(2)
    load = space.load(PROMPT, 16)
    assert isinstance(load, Load)
    assert load.num_hit_tokens == 8
    space.finish_load(load)
    assert ranges(space, prefill(space, PROMPT[:17]))[8] == (0, 2)
    space.set_weights_epoch(3)
    assert hit(space, PROMPT) == 0


def test_promise_28_forks_tell_the_epochs_of_their_parents() -> None:
    space = counting(lag=9)
    row = prefill(space, PROMPT[:6])
    space.set_weights_epoch(1)
    (child,) = space.fork(row).tolist()
    (waiting,) = space.fork(allocate(space, tokens(5, first=500))).tolist()
    space.append([row, child], [1, 2])
    run_step(space)
    assert ranges(space, row) == ranges(space, child) == [(0, 0)] * 4 + [(0, 1)] * 3
    space.set_weights_epoch(2)
    space.append([waiting], tokens(8), [8])
    run_step(space)
    assert ranges(space, waiting) == [(1, 1)] * 4 + [(1, 2)] * 9
    forked = space.fork(row, at=5)
    assert isinstance(forked, np.ndarray)
    begun = int(forked[0])
    assert ranges(space, begun)[:4] == [(0, 0)] * 4
    space.check()


def test_promise_28_who_shares_what_is_declared_computed_is_as_old() -> None:
    space = counting(lag=1)
    row = allocate(space, PROMPT[:9])
    sharing = allocate(space, PROMPT[:10])
    space.mark_computed([row])
    space.check()
    assert ranges(space, sharing) == [(0, 0)] * 8
    space.set_weights_epoch(2)
    space.check()
    run_step(space)
    assert ranges(space, sharing)[-1] == (0, 2)
    assert hit(space, PROMPT) == 0
    space.check()


def test_promise_28_a_stored_block_tells_its_epochs_and_its_digest_leaves_them_out() -> None:
    space, plain = counting(lag=1), new_space()
    row = prefill(space, PROMPT[:5])
    prefill(plain, PROMPT[:5])
    space.set_weights_epoch(1)
    digest = only_pool(space).block(space.block_ids(row)[0]).digest
    assert digest is not None
    stored = space.stored_block(digest)
    assert isinstance(stored, StoredBlock)
    assert stored.epochs == (0, 0)
    answer = plain.stored_block(digest)
    assert isinstance(answer, StoredBlock)
    assert answer.epochs is None
    allocate(space, tokens(4, first=500))
    open_digests = space.stored_blocks().digests
    undated = [space.stored_block(other) for other in open_digests if other.tobytes() != digest]
    assert [block is not None and block.epochs for block in undated] == [None]


# Bad input


def test_promise_28_an_epoch_that_goes_back_is_refused_with_nothing_changed() -> None:
    space = counting(lag=2)
    row = prefill(space, PROMPT)
    space.set_weights_epoch(5)
    space.set_weights_epoch(5)
    wrong: Any
    for wrong in (4, 0, -1, "6", "", None, 6.0, True, 2**31 - 1, b"6"):
        with unchanged(space), pytest.raises(ConfigurationError):
            space.set_weights_epoch(wrong)
    assert space.weights_epoch == 5
    assert space.num_tokens(row) == 33


def test_promise_28_where_epochs_are_text_none_is_told() -> None:
    space = new_space(weights_epoch="a")
    row = prefill(space, PROMPT)
    with unchanged(space), pytest.raises(ConfigurationError, match="epochs are not counted"):
        space.epochs(row)
    with unchanged(space), pytest.raises(ConfigurationError, match="where SpaceConfig"):
        space.set_weights_epoch(1)
    with unchanged(space), pytest.raises(ConfigurationError, match="they are not counted"):
        space.load(PROMPT, 8, epochs=(0, 0))
    with pytest.raises(PagedKVError):
        counting().epochs(0)


@pytest.mark.parametrize("wrong", [{"max_epoch_lag": 1}, {"weights_epoch": -1}, {"weights_epoch": None}])
def test_promise_28_a_configuration_counts_upwards_from_a_number(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="weights_epoch"):
        new_space(**wrong)


def test_promise_28_it_costs_nothing_where_epochs_are_not_counted() -> None:
    without, with_epochs = only_pool(new_space()), only_pool(counting())
    assert without.arrays.epochs.nbytes == 0
    assert with_epochs.nbytes - without.nbytes == 8 * with_epochs.num_blocks


@pytest.mark.parametrize("lag", [0, 1])
def test_promise_28_a_block_that_begins_with_a_copy_of_older_content_is_as_old(lag: int) -> None:
    config = SpaceConfig((FullAttention(4),), 30, weights_epoch=0, max_epoch_lag=lag, min_partial_hit=1)
    space = BlockSpace(config)
    prefill(space, tokens(9))
    begun = np.array([*tokens(9)[:3].tolist(), 900, 901, 902], np.int32)
    first = space.allocate(begun)
    assert isinstance(first, Allocation)
    assert first.num_hit_tokens == 3
    if lag:
        space.set_weights_epoch(1)
        second = space.allocate(np.append(begun[:4], tokens(5, first=800)))
        assert isinstance(second, Allocation)
        assert second.num_hit_tokens == 4
    space.set_weights_epoch(lag + 1)
    run_step(space)
    space.check()
    assert hit(space, np.append(begun[:4], [7])) == 0


def test_what_a_failed_step_has_dated_says_nothing_of_a_fork_that_waits_for_the_next_one() -> None:
    """Behind the prompt nothing is published, so that nothing dates it before it is planned again."""
    space = new_space(weights_epoch=0)
    answer = space.allocate(tokens(8), publish="prompt")
    assert isinstance(answer, Allocation)
    space.append(answer.row, tokens(4, first=8), [4])
    space.abort(space.plan_step().step_id)
    space.fork(answer.row)
    space.check()


def test_promise_28_what_is_copied_of_a_block_keeps_its_epochs_before_anything_is_computed() -> None:
    space = new_space(FullAttention(4), num_blocks=40, weights_epoch=0, max_epoch_lag=2, min_partial_hit=1)
    space.free(prefill(space, [1, 2, 3, 4, 5, 6, 7, 8]))
    space.set_weights_epoch(1)
    row = allocate(space, [1, 2, 3, 4, 5, 6, 9, 9])
    forked = space.fork(row, 1, at=6)
    assert isinstance(forked, np.ndarray)
    child = int(forked[0])
    assert ranges(space, child) == 6 * [(0, 0)]
    run_step(space)
    assert ranges(space, child) == 6 * [(0, 0)]
    assert ranges(space, row)[-1] == (0, 1)
