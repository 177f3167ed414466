"""Promises 15 and 23: the state where a sequence ended is kept, and the next turn of a conversation hits all of it."""

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, RecurrentState, RequestKeys, SlidingWindow
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import ConfigurationError
from tests.space.spaces import hit, new_space, run_step, tokens

HYBRID = FullAttention(4), RecurrentState(16)
WINDOWED = FullAttention(4), SlidingWindow(8, 4), RecurrentState(16)
POOLS = {"device": 401, "state": 41}


def answered(
    space: BlockSpace, prompt: Int32Array, answer: Int32Array, keys: RequestKeys = NO_KEYS, **how: object
) -> int:
    """Serve a turn: a prompt, in chunks, and an answer, of which the last token is not computed; return the hit."""
    row, num_hit = begun(space, prompt, keys)
    for place, token in enumerate(answer):
        assert space.append(row, [token]) is None
        if place < len(answer) - 1:
            run_step(space)
    space.free(row, **({"keeps_end": True} | how))  # type: ignore[arg-type]
    space.check()
    return num_hit


def begun(space: BlockSpace, prompt: Int32Array, keys: RequestKeys = NO_KEYS) -> tuple[int, int]:
    """Compute a prompt; return its row, and the hit."""
    match = space.match(prompt, keys=keys)
    first = match.checkpoint or len(prompt)
    allocation = space.allocate(prompt[:first], keys=keys, match=match)
    assert isinstance(allocation, Allocation)
    run_step(space)
    if first < len(prompt):
        assert space.append(allocation.row, prompt[first:]) is None
        run_step(space)
    space.check()
    return allocation.row, allocation.num_hit_tokens


def cached(space: BlockSpace, pool: str = "state") -> int:
    return next(each.num_cached for each in space.statistics().pools if each.name == pool)


def turn(number: int, length: int) -> Int32Array:
    return np.asarray(tokens(length, first=1000 * number), np.int32)


@pytest.mark.interpreted
def test_promise_23_ten_turns_compute_their_questions_and_one_token() -> None:
    """At the default interval: 406 tokens a turn without the ends, with as many states cached."""
    spaces = [
        new_space(FullAttention(16), RecurrentState(1024), num_blocks={"device": 2001, "state": 101}, max_tokens=8192)
        for _ in range(2)
    ]
    computed: list[list[int]] = [[], []]
    for space, counts, keeps in zip(spaces, computed, (True, False), strict=True):
        conversation = np.zeros(0, np.int32)
        for number in range(10):
            prompt = np.concatenate([conversation, turn(number, 50)])
            answer = turn(100 + number, 500)
            counts.append(len(prompt) - answered(space, prompt, answer, keeps_end=keeps))
            conversation = np.concatenate([prompt, answer])
    assert computed[0] == [50] + [51] * 9
    assert np.mean(computed[1]) > 300
    assert cached(spaces[0]) <= cached(spaces[1])


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [HYBRID, WINDOWED, (RecurrentState(16),)], ids=["full", "windows", "states alone"])
@pytest.mark.parametrize("length", [length for length in range(1, 40) if length != 27])
def test_promise_15_a_next_turn_hits_all_that_was_computed_whatever_its_length(
    groups: tuple[FullAttention | SlidingWindow | RecurrentState, ...], length: int
) -> None:
    pools = {spec.pool: 401 for spec in groups}
    space = new_space(*groups, num_blocks=pools)
    prompt, answer = turn(1, 5), turn(2, length)  # with 27, the end is at the last token of an interval
    answered(space, prompt, answer)
    conversation = np.concatenate([prompt, answer])
    assert answered(space, np.concatenate([conversation, turn(3, 6)]), turn(4, 3)) == len(conversation) - 1


@pytest.mark.interpreted
def test_promise_23_a_turn_that_goes_on_supersedes_the_end_before_it() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    conversation = np.concatenate([turn(1, 5), turn(2, 6)])
    answered(space, turn(1, 5), turn(2, 6))
    longer = np.concatenate([conversation, turn(3, 6)])
    before = cached(space)
    answered(space, longer, turn(4, 4))
    assert cached(space) == before
    assert hit(space, np.concatenate([longer, turn(4, 4), [7]])) == len(longer) + 3


@pytest.mark.interpreted
@pytest.mark.parametrize("least", [0, 1])
def test_promise_29_tokens_of_a_partly_filled_block_are_told_apart(least: int) -> None:
    space = new_space(*HYBRID, num_blocks=POOLS, min_partial_hit=least)
    answered(space, turn(1, 5), turn(2, 6))
    answer = space.match(np.concatenate([turn(1, 5), turn(2, 6), turn(3, 2)]))
    assert (answer.num_tokens, answer.num_whole_tokens) == (10, 8)


@pytest.mark.interpreted
def test_promise_23_two_turns_go_on_from_one_end() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    answered(space, turn(1, 5), turn(2, 6))
    conversation = np.concatenate([turn(1, 5), turn(2, 6)])
    rows = [begun(space, np.concatenate([conversation, turn(number, 5)])) for number in (3, 4)]
    assert [num_hit for _, num_hit in rows] == [10, 10]
    for row, _ in rows:
        space.free(row, keeps_end=True)
        space.check()


@pytest.mark.interpreted
def test_promise_23_a_preempted_row_hits_its_own_end() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row, _ = begun(space, turn(1, 23))
    space.free(row, keeps_end=True)
    assert hit(space, turn(1, 23)) == 20  # the last token is computed for its logits: the prompt's own end
    assert hit(space, turn(1, 30)) == 23


@pytest.mark.interpreted
def test_promise_9_of_a_row_whose_last_step_is_in_flight_no_end_is_kept() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    allocation = space.allocate(turn(1, 10))
    assert isinstance(allocation, Allocation)
    plan = space.plan_step()
    space.free(allocation.row, keeps_end=True)
    space.check()
    space.acknowledge(plan.step_id)
    assert hit(space, turn(1, 20)) == 0


@pytest.mark.interpreted
def test_promise_6_of_forks_that_write_one_block_no_end_is_kept() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row, _ = begun(space, turn(1, 10))
    (child,) = space.fork(row, 1)
    space.free(row, keeps_end=True)
    space.check()
    assert hit(space, turn(1, 20)) == 8
    assert space.append(child, turn(2, 1)) is None
    run_step(space)
    space.free(child, keeps_end=True)
    space.check()
    assert hit(space, np.concatenate([turn(1, 10), turn(2, 5)])) == 11


@pytest.mark.interpreted
def test_promise_25_what_the_open_step_brings_from_elsewhere_has_no_end() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    allocation = space.allocate(turn(1, 12), num_external_tokens=10)
    assert isinstance(allocation, Allocation)
    space.free(allocation.row, keeps_end=True)
    space.check()
    assert hit(space, turn(1, 20)) == 0


@pytest.mark.interpreted
def test_promise_9_a_block_that_the_open_plan_is_to_copy_has_no_end() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row, _ = begun(space, turn(1, 10))
    (child,) = space.fork(row, 1)
    assert space.append(child, turn(2, 1)) is None  # into copies of both last blocks
    space.free(child, keeps_end=True)
    space.check()
    assert hit(space, turn(1, 20)) == 8


@pytest.mark.interpreted
@pytest.mark.parametrize("publish", [False, "prompt"])
def test_promise_27_what_is_not_published_has_no_end(publish: bool | str) -> None:  # noqa: FBT001
    space = new_space(*HYBRID, num_blocks=POOLS)
    allocation = space.allocate(turn(1, 6), publish=publish)  # type: ignore[arg-type]
    assert isinstance(allocation, Allocation)
    run_step(space)
    assert space.append(allocation.row, turn(2, 7)) is None
    run_step(space)
    space.free(allocation.row, keeps_end=True)
    space.check()
    assert hit(space, np.concatenate([turn(1, 6), turn(2, 7), [5, 6]])) <= 4


@pytest.mark.interpreted
def test_promise_10_a_reset_drops_ends_too() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    answered(space, turn(1, 5), turn(2, 6))
    space.reset_prefix_cache()
    space.check()
    assert hit(space, np.concatenate([turn(1, 5), turn(2, 6), [5]])) == 0
    row, _ = begun(space, turn(1, 9))
    space.reset_prefix_cache()
    space.free(row, keeps_end=True)
    assert hit(space, turn(1, 20)) == 0


@pytest.mark.interpreted
def test_promise_8_another_salt_does_not_hit_an_end() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    answered(space, turn(1, 5), turn(2, 6), RequestKeys(salt=b"a"))
    conversation = np.concatenate([turn(1, 5), turn(2, 6), [5]])
    assert space.match(conversation, keys=RequestKeys(salt=b"b")).num_tokens == 0
    assert space.match(conversation, keys=RequestKeys(salt=b"a")).num_tokens == 10


@pytest.mark.interpreted
def test_promise_7_what_lies_behind_an_end_in_its_block_is_not_hit() -> None:
    """The block's tokens behind the end are of an earlier life: here those that the next prompt goes on with."""
    space = new_space(*HYBRID, num_blocks={"device": 3, "state": 41})
    answered(space, turn(1, 4), turn(9, 1), keeps_end=False)
    row, _ = begun(space, turn(1, 6))
    space.free(row, priority=-1)
    answered(space, turn(2, 2), turn(3, 1))
    for behind in (turn(1, 6)[2:], turn(9, 4), turn(1, 6)):
        assert hit(space, np.concatenate([turn(2, 2), behind])) <= 2


@pytest.mark.interpreted
def test_promise_18_an_end_is_told_with_its_tokens() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS, events=True)
    answered(space, turn(1, 5), turn(2, 6))
    ends = [
        num_tokens
        for events in space.drain_events()
        for num_tokens in space.contents_of(events).num_tokens.tolist()
        if num_tokens % 4
    ]
    assert sorted(ends) == [2, 10]  # of the last block of keys, and of the state


def test_keeps_end_is_true_or_false() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row, _ = begun(space, turn(1, 5))
    with pytest.raises(ConfigurationError, match="keeps_end"):
        space.free(row, keeps_end=2)  # type: ignore[arg-type]
