"""Attacks that once got through: numbers that wrap, stale handles, edited plans, endless runs."""

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from pagedkv import (
    BlockSpace,
    FullAttention,
    MediaSpan,
    PagedKVError,
    RequestKeys,
    Shortage,
    SpaceConfig,
)
from pagedkv.blocks.record import OPEN_STEP, SETTLED_STEP
from pagedkv.errors import StepError
from tests.space.spaces import unchanged


def new_space() -> BlockSpace:
    return BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=400, max_sequences=8, max_tokens=64))


def admit(space: BlockSpace, tokens: list[int]) -> int:
    allocation = space.allocate(tokens)
    assert not isinstance(allocation, Shortage)
    return allocation.row


WRAPPING = {
    "lookahead of an append": lambda space: space.append([0], [1], num_lookahead=np.uint8(250)),
    "lookahead of a prompt": lambda space: space.allocate(list(range(60)), num_lookahead=np.int8(100)),
    "lookahead beyond 64 bits": lambda space: space.append([0], [1], num_lookahead=2**70),
    "drafts beyond 64 bits": lambda space: space.append([0], [1], num_draft=2**63),
    "a lookahead that is no number": lambda space: space.allocate([1], num_lookahead=float("nan")),
    "half a lookahead slot": lambda space: space.allocate([1], num_lookahead=1.5),
    "a fork of a list": lambda space: space.fork([0]),
    "a fork of nothing": lambda space: space.fork([]),
    "half a child": lambda space: space.fork(0, 1.5),
    "keys that are none": lambda space: space.allocate([1], keys=None),
    "an epoch that is no text": lambda space: space.set_weights_epoch(5),
}


@pytest.mark.parametrize("attack", WRAPPING.values(), ids=WRAPPING.keys())
def test_numbers_that_would_wrap_are_refused_with_nothing_changed(attack: Callable[[BlockSpace], object]) -> None:
    space = new_space()
    admit(space, list(range(8)))
    with unchanged(space), pytest.raises(PagedKVError):
        attack(space)


def test_small_numpy_integers_count_like_any_other() -> None:
    block_size, num_blocks = cast("int", np.uint8(4)), cast("int", np.uint8(255))
    space = BlockSpace(SpaceConfig((FullAttention(block_size),), num_blocks=num_blocks))
    row = admit(space, list(range(250)))
    assert space.append(np.array(row, np.uint8), np.arange(3, dtype=np.uint8), np.array([3], np.uint8)) is None
    assert len(space.block_ids(row)) == 64


def test_a_plan_is_refused_where_its_number_is_wanted() -> None:
    space = new_space()
    with pytest.raises(StepError, match=r"plan\.step_id"):
        space.acknowledge(space.plan_step())  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 2**40), (2**70, 1), (1.5, 2), (True, 1)])
def test_impossible_media_are_refused(start: int, num_tokens: int) -> None:
    with pytest.raises(PagedKVError, match="media span"):
        MediaSpan(start, num_tokens, b"image")


def test_keys_do_not_change_with_the_list_they_were_made_from() -> None:
    media = [MediaSpan(0, 1, b"image")]
    keys = RequestKeys(media=media)  # type: ignore[arg-type]
    media.clear()
    assert len(keys.media) == 1


def test_a_plan_cannot_be_edited() -> None:
    space = new_space()
    row = admit(space, [1, 2, 3])
    children = space.fork(row, 2)
    space.append(children, [4, 5])
    plan = space.plan_step()
    for array in (plan.compute.rows, plan.table_writes[0].block_ids, plan.copies[0].dst_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 7


def test_duplicates_that_nobody_plans_do_not_pile_up() -> None:
    space = new_space()
    for _ in range(3000):
        first, second = admit(space, [1, 2, 3]), admit(space, [1, 2, 3])
        space.append([first, second], [4, 4])
        space.free([first, second])
    assert len(space._ledger.duplicates) <= 1024


def test_promise_12_deferred_frees_survive_the_end_of_32_bit_step_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks note steps in 32 bits; the space renumbers them in time, with steps in flight, unseen by callers."""
    monkeypatch.setattr("pagedkv.space.state.STEPS_BEFORE_RENUMBERING", 50)
    space = new_space()
    row = admit(space, [1, 2, 3, 4, 5])
    in_flight = []
    for step in range(1, 500):
        if step % 20 == 0:
            space.free(row)
            row = admit(space, [1, 2, 3, 4, 5])
        assert space.append(row, [7]) is None
        in_flight.append(space.plan_step().step_id)
        assert in_flight[-1] == step
        if len(in_flight) > 2:
            space.acknowledge(in_flight.pop(0))
        if step % 20 == 0:
            assert space.statistics().pools[0].num_deferred > 0
        space.check()
    counts = space._state.groups[0].pool.arrays.counts
    assert counts[SETTLED_STEP] < counts[OPEN_STEP] <= 50
    aborted = space.abort(in_flight[0])
    assert aborted.step_ids == tuple(in_flight)
    space.check()


def test_appending_to_many_forks_of_an_unplanned_prompt_settles_who_computes_once() -> None:
    space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=5000, max_sequences=1025))
    row = admit(space, [1, 2, 3, 4, 5])
    children = space.fork(row, 1024)
    assert space.append(children, np.arange(1024)) is None
    plan = space.plan_step()
    starts = dict(zip(plan.compute.rows.tolist(), plan.compute.starts.tolist(), strict=True))
    assert starts[row] == 0
    assert {starts[child] for child in children.tolist()} == {4}
    space.check()
