"""What a match answers, and that one match serves match, can_allocate and allocate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    FullAttention,
    GroupSpec,
    PrefixHit,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    TenantLimits,
)
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.matching import match_chain
from tests.space.spaces import acknowledge, allocate, cache, held, new_space, prefill, run_step, tokens, unchanged

OURS = RequestKeys(salt=b"ours")
PROMPT = tokens(11)
FULL = (FullAttention(4),)
HYBRID = (FullAttention(4), SlidingWindow(4, 4))
WINDOW = (SlidingWindow(4, 4),)
STATE = (RecurrentState(4, pool="device"),)


def count_walks(space: BlockSpace) -> list[int]:
    """Have every walk along a chain noted in the list."""
    loops: Any = space._state.loops
    walk: Callable[..., tuple[int, int, int]] = loops[match_chain]
    walks: list[int] = []

    def counted(*arguments: object) -> tuple[int, int, int]:
        walks.append(len(walks))
        return walk(*arguments)

    loops[match_chain] = counted
    return walks


# What an answer contains


@pytest.mark.interpreted
def test_an_answer_names_the_blocks_that_hit() -> None:
    space = new_space()
    row = prefill(space, PROMPT)
    answer = space.match(tokens(20))
    assert answer.num_tokens == 8
    assert [blocks.tolist() for blocks in answer.block_ids] == [space.block_ids(row)[:2]]


def test_an_answer_names_the_blocks_of_each_group_and_none_where_a_window_needs_none() -> None:
    space = new_space(*HYBRID)
    row = allocate(space, PROMPT)
    in_full, in_window = space.block_ids(row, 0), space.block_ids(row, 1)
    run_step(space)
    assert [blocks.tolist() for blocks in space.match(tokens(20)).block_ids] == [in_full[:2], [0, in_window[1]]]


def test_nothing_cached_is_an_answer_too() -> None:
    for caching in (True, False):
        answer = new_space(*HYBRID, prefix_caching=caching).match(PROMPT)
        assert answer.num_tokens == 0
        assert [len(blocks) for blocks in answer.block_ids] == [0, 0]
        assert answer.num_blocks_needed == {"device": 6}


@pytest.mark.parametrize("groups", [FULL, HYBRID, WINDOW, STATE], ids=str)
@pytest.mark.parametrize("is_held", [True, False])
def test_an_answer_tells_how_many_free_blocks_an_allocation_takes(
    groups: tuple[GroupSpec, ...], *, is_held: bool
) -> None:
    """New blocks, and unreferenced hits: both are free blocks before, and not after."""
    space = new_space(*groups)
    row = prefill(space, PROMPT)
    if not is_held:
        space.free(row)
    before = space.num_free_blocks()
    answer = space.match(tokens(20))
    assert answer.num_tokens == 8
    nobody_holds = space.ref_counts() == 0
    assert answer.num_free == tuple(int((nobody_holds[blocks] & (blocks != 0)).sum()) for blocks in answer.block_ids)
    assert answer.num_free[0] == (0 if is_held and groups[0] == FULL[0] else np.count_nonzero(answer.block_ids[0]))
    allocate(space, tokens(20))
    assert answer.num_blocks_needed == {"device": before - space.num_free_blocks()}


def test_what_an_answer_tells_is_told_by_pool() -> None:
    space = new_space(
        FullAttention(4, pool="first"), FullAttention(2, pool="second"), num_blocks={"first": 9, "second": 9}
    )
    cache(space, PROMPT)
    answer = space.match(PROMPT)
    assert answer.num_tokens == 8
    assert answer.num_blocks_needed == {"first": 3, "second": 6}
    assert "num_tokens=8" in repr(answer)


def test_the_blocks_of_an_answer_cannot_be_overwritten() -> None:
    for groups in (FULL, HYBRID):
        space = new_space(*groups)
        cache(space, PROMPT)
        for blocks in space.match(PROMPT).block_ids:
            with pytest.raises(ValueError, match="read-only"):
                blocks[0] = 7


# One walk


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=str)
def test_a_prompt_is_walked_once_for_three_questions(groups: tuple[GroupSpec, ...]) -> None:
    space, same = new_space(*groups), new_space(*groups)
    for each in (space, same):
        cache(each, PROMPT)
    walks = count_walks(space)
    answer = space.match(PROMPT)
    assert space.can_allocate(PROMPT, match=answer) is AllocStatus.OK
    assert space.allocate(PROMPT, match=answer) == same.allocate(PROMPT) == Allocation(row=0, num_hit_tokens=8)  # type: ignore[arg-type]
    assert len(walks) == 1
    assert [held(space, 0, group) for group in range(len(groups))] == [
        held(same, 0, group) for group in range(len(groups))
    ]
    space.check()


def test_equal_tokens_in_another_array_are_the_same_prompt() -> None:
    space = new_space()
    cache(space, PROMPT)
    answer = space.match(PROMPT.tolist())
    walks = count_walks(space)
    assert space.allocate(tuple(PROMPT.tolist()), match=answer) == Allocation(row=0, num_hit_tokens=8)  # type: ignore[arg-type]
    assert not walks


@pytest.mark.parametrize("groups", [FULL, HYBRID, WINDOW, STATE], ids=str)
def test_the_first_chunk_of_a_prompt_takes_the_answer_for_the_whole(groups: tuple[GroupSpec, ...]) -> None:
    for length in range(1, 21):
        space, same = new_space(*groups), new_space(*groups)
        for each in (space, same):
            cache(each, PROMPT)
        answer = space.match(tokens(20))
        mine, other = space.allocate(tokens(length), match=answer), same.allocate(tokens(length))
        assert isinstance(mine, Allocation)
        assert isinstance(other, Allocation)
        assert (mine.row, mine.num_hit_tokens) == (other.row, other.num_hit_tokens)
        assert [held(space, 0, group) for group in range(len(groups))] == [
            held(same, 0, group) for group in range(len(groups))
        ]
        space.check()


def test_a_chunk_beyond_the_hit_is_not_walked() -> None:
    space = new_space()
    cache(space, PROMPT)
    answer = space.match(tokens(20))
    walks = count_walks(space)
    assert space.allocate(tokens(9), match=answer) == Allocation(row=0, num_hit_tokens=8)  # type: ignore[arg-type]
    assert not walks
    assert space.allocate(tokens(8), match=space.match(tokens(20))) == Allocation(row=1, num_hit_tokens=4)  # type: ignore[arg-type]


def test_a_shortage_changes_nothing_so_the_answer_still_holds() -> None:
    space = new_space(num_blocks=7)
    cache(space, tokens(8))
    row = allocate(space, tokens(8, first=100))
    answer = space.match(tokens(20))
    walks = count_walks(space)
    for _ in range(2):
        with unchanged(space):
            assert space.allocate(tokens(20), match=answer) == Shortage("device", num_needed=5, num_free=4)
    assert not walks
    space.free(row)
    assert isinstance(space.allocate(tokens(20), match=answer), Allocation)
    assert len(walks) == 1


def test_a_refusal_changes_nothing_so_the_answer_still_holds() -> None:
    space = new_space(*FULL)
    cache(space, PROMPT)
    row, answer = prefill(space, tokens(5, first=50)), space.match(PROMPT)
    walks = count_walks(space)
    with pytest.raises(TokenError, match="the counts add up to 2, but 1 token ids were given"):
        space.append([row], [7], [2])
    assert isinstance(space.allocate(PROMPT, match=answer), Allocation)
    assert not walks


# An answer holds until the space changes

RUNNING, SWAPPED, STEPS = 0, 1, 2


def busy() -> BlockSpace:
    """Row 0 is running, row 1 swapped out, a block is held, a step is in flight, and another is open."""
    space = new_space(num_host_blocks=20, leases=True, tenants={"idle": TenantLimits()})
    prefill(space, tokens(10, first=100))
    prefill(space, tokens(6, first=200))
    cache(space, PROMPT)
    space.swap_out([SWAPPED])
    run_step(space)
    space.hold(space.block_ids(RUNNING)[:1])
    space.append([RUNNING], [7])
    space.plan_step()
    space.append([RUNNING], [8])
    return space


def last_step(space: BlockSpace) -> Any:  # noqa: ANN401 - a number that the space chooses
    return space._ledger.in_flight[0].plan.step_id


def settled(space: BlockSpace) -> BlockSpace:
    """End every step in flight, and the open one."""
    space.plan_step()
    while space._ledger.in_flight:
        space.acknowledge(space._ledger.in_flight[0].plan.step_id)
    return space


def with_unknown(space: BlockSpace) -> BlockSpace:
    """Append a token that the step in flight samples."""
    space.plan_step()
    space.append([RUNNING], None)
    return space


def with_draft(space: BlockSpace) -> BlockSpace:
    """Append a draft."""
    space.append([RUNNING], [9], num_draft=1)
    return space


def with_load(space: BlockSpace) -> BlockSpace:
    """Begin to load a prefix."""
    assert space.load(tokens(9, first=700), 8) is not None
    return space


ACTIONS: dict[str, Callable[[BlockSpace], object]] = {
    "allocate": lambda space: space.allocate(PROMPT),
    "append": lambda space: space.append([RUNNING], [7]),
    "fill": lambda space: with_unknown(space).fill([RUNNING], [7]),
    "append_with_copies": lambda space: space.append_with_copies([RUNNING], [7]),
    "truncate": lambda space: space.truncate([RUNNING], [11]),
    "replace_drafts": lambda space: with_draft(space).replace_drafts([RUNNING], [10]),
    "fork": lambda space: space.fork(RUNNING),
    "free": lambda space: space.free([RUNNING]),
    "swap_out": lambda space: space.swap_out([RUNNING]),
    "swap_in": lambda space: space.swap_in([SWAPPED]),
    "hold": lambda space: space.hold(space.block_ids(RUNNING)[:2]),
    "release": lambda space: space.release(next(iter(space._state.held))),
    "load": lambda space: space.load(tokens(9, first=700), 8),
    "forget": lambda space: space.forget(tokens(9, first=700)),
    "forget_branch": lambda space: space.forget_branch(tokens(9, first=700)),
    "lease": lambda space: space.lease(PROMPT, 20.0),
    "advance": lambda space: space.advance(5.0),
    "finish_load": lambda space: with_load(space).finish_load(next(iter(space._state.loads))),
    "withdraw": lambda space: space.withdraw(space.block_ids(RUNNING)[:2]),
    "plan_step": lambda space: space.plan_step(),
    "acknowledge": lambda space: space.acknowledge(last_step(space)),
    "abort": lambda space: space.abort(last_step(space)),
    "mark_computed": lambda space: space.mark_computed([RUNNING]),
    "reset_prefix_cache": lambda space: space.reset_prefix_cache(),
    "invalidate_memory": lambda space: settled(space).invalidate_memory(),
    "set_weights_epoch": lambda space: space.set_weights_epoch("two"),
    "supersede": lambda space: space.supersede(tokens(9, first=700)),
    "touch": lambda space: space.touch(PROMPT),
    "evict": lambda space: space.evict(1),
    "shrink": lambda space: space.shrink(2),
    "grow": lambda space: space.grow(0),
    "set_tenant": lambda space: space.set_tenant("another", TenantLimits()),
    "remove_tenant": lambda space: space.remove_tenant("idle"),
}
OF_STATES = {"keep_states"}  # an action too, but this space has no states
QUESTIONS = {
    "match",
    "explain",
    "config",
    "now_s",
    "most_blocks",
    "exceeds_cap",
    "tenant_shares",
    "match_each",
    "can_allocate",
    "num_allocatable",
    "can_append",
    "can_swap_out",
    "can_swap_in",
    "block_size",
    "slot_mapping",
    "page_lists",
    "num_tokens",
    "generation",
    "generation_or_none",
    "weights_epoch",
    "epochs",
    "block_ids",
    "block_table",
    "draft_block_ids",
    "num_blocks",
    "lengths",
    "encoder_lengths",
    "ref_counts",
    "computed_block_ids",
    "num_free_blocks",
    "num_cached_blocks",
    "num_deferred_blocks",
    "num_live_blocks",
    "num_absent_blocks",
    "statistics",
    "receipt",
    "explanation",
    "contents_of",
    "stored_block",
    "stored_blocks",
    "next_victims",
    "advance",  # sets the time, which no answer depends on
    "has_events",
    "drain_events",  # takes what was noted of the past
    "observe",  # what follows the space changes nothing of it
    "check",
}


def test_every_method_is_a_question_or_an_action() -> None:
    """So that a new one is not forgotten in the next test."""
    assert {name for name in dir(BlockSpace) if not name.startswith("_")} == QUESTIONS | ACTIONS.keys() | OF_STATES


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_after_any_action_the_prompt_is_walked_again(action: Callable[[BlockSpace], object]) -> None:
    space = busy()
    answer = space.match(PROMPT)
    assert answer.num_tokens == 8
    action(space)
    expected = space.match(PROMPT).num_tokens
    walks = count_walks(space)
    allocation = space.allocate(PROMPT, match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.num_hit_tokens == expected
    assert len(walks) == 1
    space.check()


def test_an_answer_about_evicted_blocks_hands_none_out() -> None:
    space = new_space(num_blocks=9)
    cache(space, PROMPT)
    answer = space.match(PROMPT)
    row = allocate(space, tokens(32, first=100))
    space.free(row)
    assert space.allocate(PROMPT, match=answer) == Allocation(row=row, num_hit_tokens=0)  # type: ignore[arg-type]
    space.check()


# An answer to another question is refused


def test_the_answer_of_another_space_is_refused() -> None:
    answer = new_space().match(PROMPT)
    space = new_space()
    with unchanged(space), pytest.raises(ConfigurationError, match="another block space"):
        space.allocate(PROMPT, match=answer)


def test_the_answer_for_other_keys_is_refused_and_the_keys_not_told() -> None:
    space = new_space()
    cache(space, PROMPT)
    answer = space.match(PROMPT)
    with unchanged(space), pytest.raises(ConfigurationError, match="other keys") as caught:
        space.can_allocate(PROMPT, keys=OURS, match=answer)
    assert "ours" not in str(caught.value)
    assert space.allocate(PROMPT, keys=OURS, match=space.match(PROMPT, keys=RequestKeys(salt=b"ours"))) is not None


@pytest.mark.parametrize("is_outdated", [False, True])
def test_the_answer_for_another_prompt_is_refused(*, is_outdated: bool) -> None:
    space = new_space()
    cache(space, PROMPT)
    answer = space.match(PROMPT)
    if is_outdated:
        run_step(space)
    other = PROMPT.copy()
    other[9] = 99
    with unchanged(space):
        with pytest.raises(TokenError, match="a prompt of 11 tokens, not for one of 12"):
            space.allocate(tokens(12), match=answer)
        with pytest.raises(TokenError, match="another prompt: token 9 was 9, it is 99 now"):
            space.allocate(other, match=answer)


@pytest.mark.parametrize("groups", [FULL, HYBRID, WINDOW, STATE], ids=str)
@pytest.mark.parametrize("place", [0, 7])
def test_a_prompt_that_was_overwritten_in_between_is_refused(groups: tuple[GroupSpec, ...], place: int) -> None:
    """Also where a window no longer holds the block that the token was in: the content behind it depends on it."""
    space = new_space(*groups)
    cache(space, PROMPT)
    prompt = PROMPT.copy()
    answer = space.match(prompt)
    assert answer.num_tokens == 8
    prompt[place] = 99
    with unchanged(space), pytest.raises(TokenError, match="match is the answer for another prompt"):
        space.allocate(prompt, match=answer)


def test_what_no_match_returned_is_refused() -> None:
    space = new_space()
    with (
        unchanged(space),
        pytest.raises(ConfigurationError, match="match must be what"),
    ):
        space.allocate(PROMPT, match=8)  # type: ignore[arg-type]


def test_an_overwritten_end_only_makes_the_hit_what_it_was() -> None:
    """What no block holds yet is taken as it is now."""
    space = new_space()
    cache(space, PROMPT)
    prompt = PROMPT.copy()
    answer = space.match(prompt)
    prompt[9] = 99
    row = space.allocate(prompt, match=answer)
    assert isinstance(row, Allocation)
    acknowledge(space, space.plan_step())
    space.append([row.row], [1])
    assert space.match([*prompt.tolist(), 1, 2]).num_tokens == 12
    assert isinstance(answer, PrefixHit)
