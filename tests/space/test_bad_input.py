"""What bad input gets: an error of ours, with the numbers that explain it, and nothing changed (promise 5).

Sizes, windows and watermarks that cannot work are refused by the configuration: see tests/test_spec.py.
"""

import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import (
    BlockSpace,
    FullAttention,
    MediaSpan,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    StepId,
    hash_request_tokens,
)
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import (
    ConfigurationError,
    FreedSequenceError,
    LostSequenceError,
    NoHostPoolError,
    PagedKVError,
    SequenceError,
    SharedPrefixError,
    StepError,
    SwappedOutError,
    TokenError,
    TooManySequencesError,
    TruncationError,
    UnknownSequenceError,
)
from tests.space.spaces import allocate, new_space, prefill, run_step, tokens, unchanged

RUNNING, FORKED, SWAPPED, VACANT = range(4)  # rows of a busy space

Action = Callable[[BlockSpace], object]
OnRows = Callable[[BlockSpace, list[int]], object]


def busy_space() -> BlockSpace:
    """A space with a row of 10 tokens, its fork, a swapped-out row of 6, and one row that was freed."""
    space = new_space(num_blocks=21, num_host_blocks=11, max_sequences=4, max_tokens=40, receipts=True)
    rows = [prefill(space, tokens(10))]
    rows += space.fork(rows[0]).tolist()
    rows += [prefill(space, tokens(6, first=100)), prefill(space, tokens(5, first=200))]
    space.swap_out([rows[2]])
    space.free([rows[3]])
    run_step(space)
    assert rows == [RUNNING, FORKED, SWAPPED, VACANT]
    return space


def refused(action: Action, error: type[PagedKVError], message: str, space: BlockSpace | None = None) -> None:
    """Assert that an action raises exactly this error, with this message, and changes nothing."""
    space = busy_space() if space is None else space
    with unchanged(space), pytest.raises(error, match=message) as caught:
        action(space)
    assert type(caught.value) is error


# Tokens

BAD_TOKENS: dict[str, tuple[TokenIds, str]] = {
    "above int32": ([1, 2**31], "within int32, got 1 to 2147483648"),
    "below int32": ([-(2**31) - 1, 1], "within int32, got -2147483649 to 1"),
    "above int32 in an array": (np.array([2**40, 5]), "within int32, got 5 to 1099511627776"),
    "beyond int64": ([2**64], "integers within int32, got the type object"),
    "fractions": ([1.0, 2.5], "must be integers within int32, got the type float64"),  # type: ignore[list-item]
    "float array": (np.ones(3, np.float32), "got the type float32"),
    "truth values": ([True, False], "got the type bool"),
    "text": (["1", "2"], "got the type <U1"),  # type: ignore[list-item]
    "nothing in it": ([None], "got the type object"),  # type: ignore[list-item]
    "two dimensions": (np.zeros((2, 3), np.int32), r"one-dimensional, got the shape \(2, 3\)"),
    "no dimension": (np.array(7), r"one-dimensional, got the shape \(\)"),
    "ragged lists": ([[1], [2, 3]], "token ids are no array of integers"),  # type: ignore[list-item]
    "bytes of no integer type": (b"abc", "one-dimensional"),
    "a buffer of floats": (memoryview(array.array("d", [1.0])), "got the type float64"),
}

bad_tokens = pytest.mark.parametrize(("token_ids", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS.keys())


@bad_tokens
def test_a_prompt_that_is_no_row_of_int32_is_refused(token_ids: TokenIds, message: str) -> None:
    refused(lambda space: space.allocate(token_ids), TokenError, message)
    refused(lambda space: space.can_allocate(token_ids), TokenError, message)
    refused(lambda space: space.match(token_ids), TokenError, message)


@pytest.mark.parametrize("empty", [[], np.zeros(0, np.int32), np.zeros(0), bytearray()])
def test_an_empty_prompt_is_refused(empty: TokenIds) -> None:
    message = "an empty prompt cannot be allocated"
    refused(lambda space: space.allocate(empty), TokenError, message)
    refused(lambda space: space.can_allocate(empty), TokenError, message)
    refused(lambda space: space.match(empty), TokenError, message)


# Sizes

TOO_MUCH: dict[str, tuple[Action, type[PagedKVError], str]] = {
    "prompt beyond max_tokens": (
        lambda space: space.allocate(tokens(41)),
        TokenError,
        "41 tokens and 0 lookahead slots exceed max_tokens = 40",
    ),
    "prompt and lookahead beyond max_tokens": (
        lambda space: space.can_allocate(tokens(38), num_lookahead=3),
        TokenError,
        "38 tokens and 3 lookahead slots exceed max_tokens = 40",
    ),
    "row beyond max_tokens": (
        lambda space: space.append([RUNNING], tokens(31), [31]),
        TokenError,
        "row 0 cannot take 31 tokens.* it has 10 tokens, and max_tokens = 40",
    ),
    "lookahead beyond max_tokens": (
        lambda space: space.append([FORKED], tokens(1), num_lookahead=30),
        TokenError,
        "row 1 cannot take 1 tokens.* 30 lookahead slots: it has 10 tokens, and max_tokens = 40",
    ),
    "question beyond max_tokens": (
        lambda space: space.can_append([RUNNING], [31]),
        TokenError,
        "row 0 cannot take 31 tokens",
    ),
    "negative lookahead for a prompt": (
        lambda space: space.allocate(tokens(3), num_lookahead=-1),
        ConfigurationError,
        "num_lookahead must be at least 0, got -1",
    ),
    "negative lookahead": (
        lambda space: space.append([RUNNING], tokens(1), num_lookahead=-2),
        ConfigurationError,
        "num_lookahead must be at least 0, got -2",
    ),
    "negative drafts": (
        lambda space: space.append([RUNNING], tokens(1), num_draft=-3),
        ConfigurationError,
        "num_draft must be at least 0, got -3",
    ),
    "more drafts than tokens": (
        lambda space: space.append([RUNNING], tokens(2), [2], num_draft=3),
        TokenError,
        "row 0 cannot take 2 tokens, 3 of them drafts",
    ),
    "no children": (lambda space: space.fork(RUNNING, 0), ConfigurationError, "at least 1, got 0"),
    "negative children": (lambda space: space.fork(RUNNING, -1), ConfigurationError, "at least 1, got -1"),
}


@pytest.mark.parametrize(("action", "error", "message"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_sizes_that_cannot_be_are_refused(action: Action, error: type[PagedKVError], message: str) -> None:
    refused(action, error, message)


BAD_COUNTS: dict[str, tuple[npt.ArrayLike, str]] = {
    "too few": ([1, 1], "add up to 2, but 3 token ids were given"),
    "too many": ([2, 2], "add up to 4, but 3 token ids were given"),
    "one row's missing": ([3], r"2 rows need as many integer counts, got int64 \(1,\)"),
    "one row's more": ([1, 1, 1], r"2 rows need as many integer counts, got int64 \(3,\)"),
    "negative": ([4, -1], "counts must lie between 0 and max_tokens = 40, got -1 to 4"),
    "beyond int32": ([3 + 2**32, -(2**32)], "counts must lie between 0 and max_tokens"),
    "fractions": ([1.5, 1.5], "2 rows need as many integer counts, got float64"),
    "two dimensions": ([[1, 2]], r"2 rows need as many integer counts, got int64 \(1, 2\)"),
}


@pytest.mark.parametrize(("counts", "message"), BAD_COUNTS.values(), ids=BAD_COUNTS.keys())
def test_counts_that_do_not_add_up_are_refused(counts: npt.ArrayLike, message: str) -> None:
    refused(lambda space: space.append([RUNNING, FORKED], tokens(3), counts), TokenError, message)


def test_drafts_of_a_recurrent_state_are_refused() -> None:
    space = new_space(RecurrentState(4, pool="device"))
    row = prefill(space, tokens(5))
    refused(lambda space: space.append([row], tokens(2), [2], num_draft=1), TokenError, "cannot be rolled back", space)


# Rows

ON_ROWS: dict[str, OnRows] = {
    "append": lambda space, rows: space.append(rows, tokens(len(rows))),
    "append_with_copies": lambda space, rows: space.append_with_copies(rows, tokens(len(rows))),
    "can_append": lambda space, rows: space.can_append(rows),
    "truncate": lambda space, rows: space.truncate(rows, [1] * len(rows)),
    "replace_drafts": lambda space, rows: space.replace_drafts(rows, [], [0] * len(rows)),
    "can_swap_out": lambda space, rows: space.can_swap_out(rows),
    "swap_out": lambda space, rows: space.swap_out(rows),
    "mark_computed": lambda space, rows: space.mark_computed(rows),
    "fork": lambda space, rows: space.fork(rows[0]),
    "computed_block_ids": lambda space, rows: space.computed_block_ids(rows[0]),
}
ON_SWAPPED: dict[str, OnRows] = {
    "can_swap_in": lambda space, rows: space.can_swap_in(rows),
    "swap_in": lambda space, rows: space.swap_in(rows),
}
ON_ANY: dict[str, OnRows] = {
    "free": lambda space, rows: space.free(rows),
    "num_tokens": lambda space, rows: space.num_tokens(rows[0]),
    "block_ids": lambda space, rows: space.block_ids(rows[0]),
    "receipt": lambda space, rows: space.receipt(rows[0]),
}
EVERY = ON_ROWS | ON_SWAPPED | ON_ANY
OF_ONE_ROW = {"fork", "computed_block_ids", "num_tokens", "block_ids", "receipt"}


@pytest.mark.parametrize("on_rows", EVERY.values(), ids=EVERY.keys())
@pytest.mark.parametrize(
    ("row", "message"),
    [(4, "row 4 does not exist: the space has rows 0 to 3"), (-1, "got -1"), (2**31, "got 2147483648")],
)
def test_an_unknown_row_is_refused(on_rows: OnRows, row: int, message: str) -> None:
    refused(lambda space: on_rows(space, [row]), UnknownSequenceError, message)


@pytest.mark.parametrize("on_rows", EVERY.values(), ids=EVERY.keys())
def test_a_freed_row_is_refused(on_rows: OnRows) -> None:
    """Use after free and, with ``free`` itself, double free."""
    message = "row 3 serves no sequence: it was freed, or never allocated"
    refused(lambda space: on_rows(space, [VACANT]), FreedSequenceError, message)


@pytest.mark.parametrize("on_rows", ON_ROWS.values(), ids=ON_ROWS.keys())
def test_a_swapped_out_row_is_refused(on_rows: OnRows) -> None:
    """Growing a swapped-out sequence, and all else that needs its blocks on the device."""
    refused(lambda space: on_rows(space, [SWAPPED]), SwappedOutError, "row 2 is swapped out: swap it in first")


@pytest.mark.parametrize("on_rows", ON_SWAPPED.values(), ids=ON_SWAPPED.keys())
def test_swapping_in_what_is_not_swapped_out_is_refused(on_rows: OnRows) -> None:
    refused(lambda space: on_rows(space, [RUNNING]), SequenceError, "row 0 is not swapped out")


@pytest.mark.parametrize("name", sorted(EVERY.keys() - OF_ONE_ROW))
def test_a_row_named_twice_is_refused(name: str) -> None:
    row = SWAPPED if name in ON_SWAPPED else RUNNING
    refused(lambda space: EVERY[name](space, [row, row]), SequenceError, f"row {row} appears twice in one batch")


@pytest.mark.parametrize("name", sorted(EVERY.keys() - OF_ONE_ROW))
def test_one_bad_row_spoils_the_whole_batch(name: str) -> None:
    """The others of the batch are left as they were."""
    row = SWAPPED if name in ON_SWAPPED else RUNNING
    refused(lambda space: EVERY[name](space, [row, VACANT]), FreedSequenceError, "row 3 serves no sequence")


@pytest.mark.parametrize("on_rows", ON_ROWS.values(), ids=ON_ROWS.keys())
def test_a_row_whose_content_was_lost_is_refused(on_rows: OnRows) -> None:
    """A step that was to copy the fork's block failed: only freeing it is allowed."""
    space = busy_space()
    space.append([FORKED], [1])
    aborted = space.abort(space.plan_step().step_id)
    assert aborted.lost_rows == (FORKED,)
    message = (
        "row 1 lost its content, in an aborted step or with memory given back: free it and allocate its tokens again"
    )
    refused(lambda space: on_rows(space, [FORKED]), LostSequenceError, message, space)
    space.free([FORKED])
    space.check()


@pytest.mark.parametrize("rows", [[0.0], ["0"], [[0, 1]], [True], None], ids=str)
def test_rows_that_are_no_row_of_integers_are_refused(rows: list[int]) -> None:
    refused(lambda space: space.free(rows), UnknownSequenceError, "rows must be a flat array of integers")


def test_more_sequences_than_rows_are_refused() -> None:
    space = busy_space()
    allocate(space, tokens(4, first=300))
    message = "1 more sequences need 1 rows, but only 0 of max_sequences = 4 are vacant"
    refused(lambda space: space.allocate(tokens(4)), TooManySequencesError, message, space)


def test_more_children_than_rows_are_refused() -> None:
    message = "2 more sequences need 2 rows, but only 1 of max_sequences = 4 are vacant"
    refused(lambda space: space.fork(RUNNING, 2), TooManySequencesError, message)


# Rolling back

BAD_LENGTHS: dict[str, tuple[int, type[PagedKVError], str]] = {
    "to nothing": (0, TruncationError, "row 0 has 10 tokens: it cannot be rolled back to 0"),
    "to less than nothing": (-1, TruncationError, "cannot be rolled back to -1"),
    "forwards": (11, TruncationError, "row 0 has 10 tokens: it cannot be rolled back to 11"),
    "below a shared prefix": (
        5,
        SharedPrefixError,
        "row 0 cannot be rolled back from 10 to 5 tokens: other sequences hold its blocks of group 0 beyond 5",
    ),
}


@pytest.mark.parametrize(("length", "error", "message"), BAD_LENGTHS.values(), ids=BAD_LENGTHS.keys())
def test_lengths_that_cannot_be_rolled_back_to_are_refused(
    length: int, error: type[PagedKVError], message: str
) -> None:
    refused(lambda space: space.truncate([RUNNING], [length]), error, message)


def test_one_bad_length_spoils_the_whole_batch() -> None:
    space = new_space()
    rows = [prefill(space, tokens(10)), prefill(space, tokens(10, first=100))]
    refused(lambda space: space.truncate(rows, [3, 11]), TruncationError, "has 10 tokens.* rolled back to 11", space)


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([19, 8, 99], TruncationError, "row 1 cannot .* group 1 has released what position 8 reads"),
        ([19, 20, 8], TruncationError, "row 2 cannot .* group 1 has released what position 8 reads"),
        ([20, 0, 8], TruncationError, "row 1 has 20 tokens: it cannot be rolled back to 0"),
        ([20, 20, 2**40], TruncationError, f"row 2 has 20 tokens: it cannot be rolled back to {2**40}"),
        ([20, 20, 20, 5], SharedPrefixError, "row 3 cannot .* other sequences hold its blocks of group 0 beyond 5"),
    ],
)
def test_of_a_batch_that_cannot_be_rolled_back_the_first_row_at_fault_is_named(
    lengths: list[int], error: type[PagedKVError], message: str
) -> None:
    """Whichever group objects."""
    space = new_space(FullAttention(4), SlidingWindow(12, 4))
    for first in (0, 100, 200, 300):
        prefill(space, tokens(12, first))
    space.append([0, 1, 2, 3], tokens(32), [8] * 4)
    run_step(space)
    space.append([0], [7])
    space.truncate([0], [20])
    space.fork(3)
    refused(lambda space: space.truncate(range(len(lengths)), lengths), error, message, space)


@pytest.mark.parametrize(
    "lengths", [[1], [1, 1, 1], [1.0, 1.0], [[1, 1]]], ids=["too few", "too many", "fractions", "two dimensions"]
)
def test_lengths_that_do_not_fit_the_rows_are_refused(lengths: npt.ArrayLike) -> None:
    refused(
        lambda space: space.truncate([RUNNING, FORKED], lengths),
        TokenError,
        "2 rows need as many integer lengths, got (int64|float64)",
    )


def test_rolling_back_behind_a_window_that_has_moved_on_is_refused() -> None:
    space = new_space(SlidingWindow(4, 4))
    row = prefill(space, tokens(20))
    message = "rolled back from 20 to 8 tokens: group 0 has released what position 8 reads"
    refused(lambda space: space.truncate([row], [8]), TruncationError, message, space)


def test_rolling_a_recurrent_state_back_between_checkpoints_is_refused() -> None:
    space = new_space(RecurrentState(4, pool="device"))
    row = prefill(space, tokens(11))
    message = r"group 0 is past that and 10 is no checkpoint \(every 4 tokens\)"
    refused(lambda space: space.truncate([row], [10]), TruncationError, message, space)


# Swapping


@pytest.mark.parametrize("name", ["swap_out", "swap_in", "can_swap_in"])
def test_swapping_without_a_host_pool_is_refused(name: str) -> None:
    space = new_space()
    row = prefill(space, tokens(5))
    refused(lambda space: EVERY[name](space, [row]), NoHostPoolError, "no host pool.*set num_host_blocks", space)


def test_swapping_out_what_the_open_plan_copies_is_refused() -> None:
    """Its blocks are defined only after the plan has run; ``can_swap_out`` says LATER."""
    space = busy_space()
    space.append([FORKED], [1])
    message = r"rows \[1\] hold blocks that the open plan copies or swaps in"
    refused(lambda space: space.swap_out([FORKED]), SequenceError, message, space)


def test_a_recurrent_state_cannot_be_forked_before_a_plan_computes_it() -> None:
    space = new_space(RecurrentState(4, pool="device"))
    row = allocate(space, tokens(5))
    message = "row 0 has tokens 0 to 5 not planned yet"
    refused(lambda space: space.fork(row), SequenceError, message, space)


# Steps


def test_a_step_that_is_not_in_flight_is_refused() -> None:
    refused(lambda space: space.acknowledge(StepId(7)), StepError, "step 7 .*no step is in flight")
    refused(lambda space: space.abort(StepId(7)), StepError, "step 7 cannot be aborted: in flight are none")


def test_a_step_acknowledged_out_of_order_or_twice_is_refused() -> None:
    space = new_space()
    first, second = space.plan_step(), space.plan_step()
    refused(lambda space: space.acknowledge(second.step_id), StepError, "step 2 .* before step 1", space)
    space.acknowledge(first.step_id)
    refused(lambda space: space.acknowledge(first.step_id), StepError, "step 1 .* before step 2", space)
    refused(
        lambda space: space.abort(first.step_id), StepError, r"step 1 cannot be aborted: in flight are \[2\]", space
    )


# Keys, digests and names

DIGESTS = np.frombuffer(b"".join(hash_request_tokens(range(8), 4)), np.uint8).reshape(2, 32)


def test_digests_are_refused_where_a_hit_may_rest_on_them_alone() -> None:
    space = new_space(FullAttention(4), SlidingWindow(4, 4))
    message = "only where all groups are full attention of one block size"
    refused(lambda space: space.allocate(tokens(9), digests=DIGESTS), ConfigurationError, message, space)


@pytest.mark.parametrize("salt", ["text", 5])
def test_a_salt_that_is_not_bytes_is_refused(salt: bytes) -> None:
    with pytest.raises(ConfigurationError, match="salt"):
        RequestKeys(salt=salt)


def test_a_media_digest_that_is_not_bytes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="digest"):
        MediaSpan(0, 1, "image")  # type: ignore[arg-type]


def test_an_unknown_pool_is_refused() -> None:
    refused(lambda space: space.num_free_blocks("hosts"), ConfigurationError, "'hosts'.*'device'")


@pytest.mark.parametrize("group", [1, -1])
def test_an_unknown_group_is_refused(group: int) -> None:
    for question in (
        lambda space: space.block_ids(RUNNING, group),
        lambda space: space.computed_block_ids(RUNNING, group),
        lambda space: space.block_size(group),
    ):
        refused(question, ConfigurationError, f"group {group}")


def test_scarcity_is_an_answer_not_an_error() -> None:
    """What is not refused: a prompt for which there is no room now."""
    space = new_space(num_blocks=3)
    with unchanged(space):
        shortage = space.allocate(tokens(9))
    assert shortage == Shortage("device", num_needed=3, num_free=2)
    assert str(shortage) == "pool 'device' has 2 free blocks, 3 are needed"
