"""Prompts that end in guesses, and tokens for one row without counts."""

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, RecurrentState, Shortage, SlidingWindow, hash_request_tokens
from pagedkv.errors import (
    ConfigurationError,
    PagedKVError,
    SequenceError,
    SharedPrefixError,
    TokenError,
)
from tests.space.spaces import allocate, cache, hit, new_space, only_pool, prefill, run_step, tokens, unchanged


def allocate_drafts(space: BlockSpace, length: int, num_draft: int, num_lookahead: int = 0) -> Allocation:
    allocation = space.allocate(tokens(length), num_draft=num_draft, num_lookahead=num_lookahead)
    assert isinstance(allocation, Allocation)
    space.check()
    return allocation


@pytest.mark.parametrize(
    "groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(6, 4))], ids=["full", "hybrid"]
)
def test_guesses_of_a_prompt_are_computed_and_published_when_accepted(
    groups: tuple[FullAttention | SlidingWindow, ...],
) -> None:
    space = new_space(*groups)
    row = allocate_drafts(space, 12, num_draft=5).row
    plan = run_step(space)
    assert (plan.compute.starts.tolist(), plan.compute.ends.tolist()) == ([0], [12])
    assert hit(space, tokens(13)) == 4
    space.truncate(row, [8])
    assert (space.num_tokens(row), hit(space, tokens(13))) == (8, 8)
    space.check()


def test_guesses_are_all_accepted_by_the_next_append() -> None:
    space = new_space()
    row = allocate_drafts(space, 12, num_draft=5).row
    run_step(space)
    space.append(row, [12])
    assert hit(space, tokens(13)) == 12
    space.check()


def test_a_hit_ends_before_the_last_certain_token() -> None:
    """Its logits judge the first guess, so it must be computed, though its block is cached."""
    space = new_space()
    cache(space, tokens(16))
    assert allocate_drafts(space, 14, num_draft=2).num_hit_tokens == 8
    assert allocate_drafts(space, 14, num_draft=1).num_hit_tokens == 12
    assert allocate_drafts(space, 14, num_draft=6).num_hit_tokens == 4


def test_an_earlier_match_of_the_whole_prompt_is_taken() -> None:
    space = new_space()
    cache(space, tokens(8))
    prompt = tokens(14)
    answer = space.match(prompt)
    assert space.allocate(prompt, num_draft=3, match=answer) == Allocation(0, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_guesses_take_the_blocks_of_their_slots_or_nothing(num_lookahead: int) -> None:
    num_blocks = -(-(10 + num_lookahead) // 4)
    space = new_space(num_blocks=1 + num_blocks)
    row = allocate_drafts(space, 10, num_draft=4, num_lookahead=num_lookahead).row
    assert len(space.block_ids(row)) == num_blocks
    space = new_space(num_blocks=num_blocks)
    with unchanged(space):
        answer = space.allocate(tokens(10), num_draft=4, num_lookahead=num_lookahead)
    assert answer == Shortage("device", num_blocks, num_blocks - 1)


def test_digests_are_those_of_the_certain_tokens() -> None:
    space = new_space()
    digests = np.frombuffer(b"".join(hash_request_tokens(range(8), 4)), np.uint8).reshape(2, 32)
    space.allocate(tokens(12), num_draft=4, digests=digests)
    named = only_pool(space).prefix_index.named_blocks()
    assert len(named) == 2


REFUSED: dict[str, tuple[dict[str, int], type[PagedKVError], str]] = {
    "all are guesses": ({"num_draft": 9}, TokenError, "num_draft = 9 leaves none of 9 tokens certain"),
    "more than all": ({"num_draft": 10}, TokenError, "num_draft = 10 leaves none of 9 tokens certain"),
    "negative": ({"num_draft": -1}, ConfigurationError, "num_draft must be at least 0, got -1"),
    "a fraction": ({"num_draft": 1.0}, ConfigurationError, "num_draft must be an integer"),  # type: ignore[dict-item]
    "for several": ({"num_draft": 1, "num_sequences": 2}, ConfigurationError, "fork first, then append drafts to each"),
    "too long": ({"num_draft": 2, "num_lookahead": 992}, TokenError, "exceed max_tokens = 1000"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_guesses_that_cannot_be_are_refused(arguments: dict[str, int], error: type[PagedKVError], message: str) -> None:
    space = new_space()
    with unchanged(space), pytest.raises(error, match=message):
        space.allocate(tokens(9), **arguments)  # type: ignore[arg-type]


def test_guesses_for_a_recurrent_state_are_refused() -> None:
    space = new_space(RecurrentState(4, pool="device"))
    with (
        unchanged(space),
        pytest.raises(TokenError, match="recurrent state: allocate the certain tokens, then append the drafts"),
    ):
        space.allocate(tokens(9), num_draft=1)


@pytest.mark.parametrize("row_type", [int, np.int32])
def test_all_tokens_are_one_rows(row_type: type) -> None:
    space = new_space()
    row = row_type(prefill(space, tokens(5)))
    assert space.append(row, tokens(6, first=5)) is None
    assert space.append(row, tokens(2, first=11), num_draft=1) is None
    assert space.append_with_copies(row, [13]) == []
    assert space.append(row, [], num_lookahead=9) is None
    assert (space.num_tokens(row), len(space.block_ids(row))) == (14, 6)
    assert hit(space, tokens(15)) == 12
    space.check()


def test_tokens_for_a_batch_are_one_each_also_if_it_has_one_row() -> None:
    """A batch that shrinks to one row does not change what its tokens mean."""
    space = new_space()
    rows = [prefill(space, tokens(5)), prefill(space, tokens(5, first=100))]
    assert space.append(rows, [1, 2]) is None
    message = "the counts add up to 1, but 2 token ids were given"
    for batch in ([rows[0]], np.array(rows[:1]), np.array(rows[:1], np.int32)):
        with unchanged(space), pytest.raises(TokenError, match=message):
            space.append(batch, [1, 2])
    with unchanged(space), pytest.raises(TokenError, match="the counts add up to 2, but 3 token ids were given"):
        space.append(rows, [1, 2, 3])


# Numbers of guesses of each row


def rows_of(space: BlockSpace, lengths: list[int]) -> list[int]:
    """Admit prompts that have nothing in common, and compute them."""
    rows = [prefill(space, tokens(length, 100 * place)) for place, length in enumerate(lengths)]
    space.check()
    return rows


@pytest.mark.parametrize(
    "groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(6, 4))], ids=["full", "hybrid"]
)
def test_each_row_may_have_its_own_number_of_guesses(groups: tuple[FullAttention | SlidingWindow, ...]) -> None:
    space, apart = new_space(*groups), new_space(*groups)
    counts, num_draft = [4, 0, 5, 1], [3, 0, 0, 1]
    rows = rows_of(space, [5, 6, 7, 8])
    assert rows_of(apart, [5, 6, 7, 8]) == rows
    new = [tokens(count, 1000 + 10 * place) for place, count in enumerate(counts)]
    assert space.can_append(rows, counts, num_draft=num_draft)
    assert space.append(rows, np.concatenate(new), counts, num_draft=num_draft) is None
    for row, mine, drafts in zip(rows, new, num_draft, strict=True):
        assert apart.append([row], mine, [len(mine)], num_draft=drafts) is None
    space.check()
    assert space.lengths(rows).tolist() == apart.lengths(rows).tolist() == [9, 6, 12, 9]
    for each in (space, apart):
        run_step(each)
        each.check()
    for place, row in enumerate(rows):
        text = np.concatenate([tokens(5 + place, 100 * place), new[place], [9999]])
        assert hit(space, text) == hit(apart, text), f"row {row}"
    assert hit(space, np.concatenate([tokens(7, 200), new[2], [9999]])) == 12, "none of these were guesses"
    assert hit(space, np.concatenate([tokens(5), new[0], [9999]])) == 4, "three of these are"


def test_rows_that_share_a_block_copy_it_once_whatever_they_guess() -> None:
    """Two rows write into it: one takes a copy, the other what is left, in whichever order they grow."""
    for num_draft in ([1, 0], [0, 1], [1, 1]):
        space = new_space(num_blocks=1 + 3)
        row = prefill(space, tokens(6))
        rows = [row, *space.fork(row)]
        assert space.can_append(rows, [1, 1], num_draft=num_draft)
        copies = space.append_with_copies(rows, [7, 8], [1, 1], num_draft=num_draft)
        assert not isinstance(copies, Shortage)
        assert len(copies) == 1
        space.check()


def test_rows_grow_all_or_none_whatever_they_guess() -> None:
    space = new_space(num_blocks=1 + 4)
    rows = rows_of(space, [4, 4])
    with unchanged(space):
        assert not space.can_append(rows, [5, 4], num_draft=[4, 0])
        assert space.append(rows, tokens(9, 50), [5, 4], num_draft=[4, 0]) == Shortage("device", 3, 2)
    with unchanged(space), pytest.raises(TokenError, match="row 1 cannot take 1 tokens, 2 of them drafts"):
        space.append(rows, tokens(4, 50), [3, 1], num_draft=[0, 2])
    with unchanged(space), pytest.raises(TokenError, match="2 rows need as many integer num_draft"):
        space.append(rows, tokens(4, 50), [3, 1], num_draft=[0, 1, 0])
    with unchanged(space), pytest.raises(TokenError, match=r"num_draft must lie between 0 and .*, got -1 to 1"):
        space.append(rows, tokens(4, 50), [3, 1], num_draft=[1, -1])


def test_states_are_kept_for_each_row_s_own_guesses() -> None:
    space = new_space(
        RecurrentState(4, pool="device", num_draft_states=3),
        FullAttention(4, "full"),
        num_blocks={"device": 20, "full": 20},
    )
    rows = rows_of(space, [5, 6])
    free = space.num_free_blocks("device")
    assert space.append(rows, tokens(5, 50), [4, 1], num_draft=[3, 0]) is None
    assert free - space.num_free_blocks("device") >= 3, "a state for each guess"
    space.check()
    run_step(space)
    space.truncate(rows, [6, 7])
    space.check()
    with (
        unchanged(space),
        pytest.raises(TokenError, match="num_draft = 4, but a recurrent state cannot be rolled back"),
    ):
        space.append(rows, tokens(5, 50), [4, 1], num_draft=[4, 0])


# Drafts whose ids come late


def draft_late(space: BlockSpace, row: int, num_draft: int) -> None:
    """Append a certain token and unknown drafts; a step computes them."""
    length = space.num_tokens(row)
    space.append(row, [length, *[-1] * num_draft], [1 + num_draft], num_draft=num_draft)
    run_step(space)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(6, 2))], ids=["full", "hybrid"]
)
def test_promise_11_drafts_that_are_replaced_behind_their_plan_are_published_as_what_they_became(
    groups: tuple[FullAttention | SlidingWindow, ...],
) -> None:
    space = new_space(*groups)
    row = prefill(space, tokens(5))
    draft_late(space, row, 5)
    with unchanged(space):
        space.replace_drafts(row, [], [0])
    space.replace_drafts(row, tokens(5, first=6), [5])
    assert hit(space, tokens(12)) == 4  # they are drafts still
    space.truncate(row, [9])
    space.check()
    assert hit(space, tokens(12)) == 8
    space.append(row, tokens(3, first=9), [3])
    assert hit(space, tokens(13)) == 12
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(6, 4))], ids=["full", "hybrid"]
)
def test_promise_09_replaced_drafts_are_not_found_as_what_a_fork_accepted(
    groups: tuple[FullAttention | SlidingWindow, ...],
) -> None:
    """The fork named the block with the drafts, and ended; the row still has it."""
    space = new_space(*groups)
    row = prefill(space, tokens(6))
    space.append(row, [6, 7], [2], num_draft=2)
    run_step(space)
    (fork,) = space.fork(row)
    space.append(fork, [8])
    run_step(space)
    space.free(fork)
    assert hit(space, tokens(9)) == 8
    space.replace_drafts(row, [70, 80], [2])
    space.check()
    other = [*tokens(6), 70, 80, 8]
    assert (hit(space, tokens(9)), hit(space, other)) == (4, 4), "the drafts are not accepted"
    space.append(row, [8])
    run_step(space)
    assert (hit(space, tokens(9)), hit(space, other)) == (4, 8)
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("is_unknown", [False, True], ids=["replaced", "unknown"])
def test_promise_07_drafts_that_become_others_are_not_merged_with_what_a_fork_accepted(*, is_unknown: bool) -> None:
    """The fork's block was a duplicate of another row's, to be merged once its step is over."""
    space = new_space()
    row = prefill(space, tokens(6))
    space.append(row, [6, 7], [2], num_draft=2)
    other = allocate(space, tokens(8))
    (fork,) = space.fork(row)
    space.append(fork, [8])
    space.free(fork)
    before = space.block_ids(row)
    if is_unknown:
        space.append(row, None)
    else:
        space.replace_drafts(row, [70, 80], [2])
    run_step(space)
    space.check()
    assert space.block_ids(row)[:2] == before[:2]
    assert space.block_ids(row)[1] != space.block_ids(other)[1]


def test_check_notices_a_name_for_other_content() -> None:
    space = new_space(FullAttention(4), SlidingWindow(6, 4))
    row = prefill(space, tokens(8))
    block = space.block_ids(row, 1)[1]
    only_pool(space).arrays.tokens[block, 2] += 1
    with pytest.raises(AssertionError, match=f"block {block} is named for other content"):
        space.check()


def test_promise_23_a_kept_state_behind_replaced_drafts_is_hit_by_what_they_became() -> None:
    groups, num_blocks = (FullAttention(4), RecurrentState(8, num_draft_states=5)), {"device": 31, "state": 31}
    space = new_space(*groups, num_blocks=num_blocks)
    row = prefill(space, tokens(5))
    draft_late(space, row, 5)
    space.replace_drafts(row, tokens(5, first=6), [5])
    space.check()
    space.truncate(row, [9])
    space.check()
    space.append(row, [9])
    run_step(space)
    assert hit(space, tokens(12)) == 8
    assert hit(space, [*tokens(7), 0, 0, 0]) == 0


def test_the_last_drafts_alone_may_be_replaced_of_several_rows() -> None:
    space = new_space()
    rows = [prefill(space, tokens(7)), prefill(space, tokens(5, first=100))]
    for row in rows:
        space.append(row, [1, 2, 3], [3], num_draft=2)
    space.replace_drafts(rows, [20, 21, 22], [1, 2])
    space.truncate(rows, [9, 8])
    space.append(rows, [9, 108])
    run_step(space)
    assert hit(space, [*tokens(7), 1]) == 7 // 4 * 4
    assert hit(space, [*tokens(7), 1, 2, 3]) == 8
    assert hit(space, [*tokens(5, first=100), 1, 21, 22, 0]) == 8
    assert hit(space, [*tokens(5, first=100), 1, 2, 3, 0]) == 4
    space.check()


def test_what_is_no_draft_of_the_row_alone_is_not_replaced() -> None:
    space = new_space()
    row = prefill(space, tokens(5))
    draft_late(space, row, 2)
    with unchanged(space), pytest.raises(TokenError, match=r"row 0 cannot be given 3 other drafts: 2 of its 8 tokens"):
        space.replace_drafts(row, [1, 2, 3], [3])
    with unchanged(space), pytest.raises(TokenError, match="do not add up to the 1 token ids"):
        space.replace_drafts(row, [1], [2])
    (child,) = space.fork(row)
    with unchanged(space), pytest.raises(SharedPrefixError, match="hold its positions 6 to 7 in group 0"):
        space.replace_drafts(row, [1, 2], [2])
    space.free(child)
    space.replace_drafts(row, [6, 7], [2])
    space.truncate(row, [8])
    with unchanged(space), pytest.raises(TokenError, match="0 of its 8 tokens are drafts"):
        space.replace_drafts(row, [1])
    space.append(row, None)
    with unchanged(space), pytest.raises(SequenceError, match="row 0 cannot be given other drafts: 1 of its 9"):
        space.replace_drafts(row, [], [0])
