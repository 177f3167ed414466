"""Token ids: every kind of integer buffer that callers have gives the same tokens."""

import array
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.contract.arguments import as_counts, as_token_array
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import TokenError, UnknownSequenceError
from tests.space.spaces import allocate, hit, new_space, unchanged

NUMBERS = list(range(13))


def read_only() -> npt.NDArray[np.int32]:
    tokens = np.array(NUMBERS, np.int32)
    tokens.flags.writeable = False
    return tokens


KINDS: dict[str, TokenIds] = {
    "list": NUMBERS,
    "tuple": tuple(NUMBERS),
    "range": range(13),
    "int32": np.array(NUMBERS, np.int32),
    "int64": np.array(NUMBERS, np.int64),
    "uint8": np.array(NUMBERS, np.uint8),
    "uint64": np.array(NUMBERS, np.uint64),
    "big-endian": np.array(NUMBERS, ">i4"),
    "read-only": read_only(),
    "every other": np.repeat(np.array(NUMBERS, np.int32), 2)[::2],
    "backwards": np.array(NUMBERS[::-1], np.int32)[::-1],
    "array.array": array.array("q", NUMBERS),
    "memoryview": memoryview(array.array("i", NUMBERS)),
    "read-only memoryview": memoryview(np.array(NUMBERS, np.int32).tobytes()).cast("i"),
    "bytearray": bytearray(NUMBERS),
}

kinds = pytest.mark.parametrize("token_ids", KINDS.values(), ids=KINDS.keys())


@kinds
def test_any_integer_buffer_becomes_int32(token_ids: TokenIds) -> None:
    tokens = as_token_array(token_ids)
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == NUMBERS


@pytest.mark.interpreted
@kinds
def test_a_space_takes_any_integer_buffer(token_ids: TokenIds) -> None:
    """As a prompt, as appended tokens and as a question."""
    space = new_space()
    row = allocate(space, token_ids)
    assert space.append([row], token_ids, [13]) is None
    assert hit(space, token_ids) == 12
    assert hit(space, [*NUMBERS, *NUMBERS, 0]) == 24


def test_int32_arrays_are_taken_as_they_are() -> None:
    tokens = np.array(NUMBERS, np.int32)
    assert as_token_array(tokens) is tokens


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, np.int64), np.zeros(0), bytearray()], ids=repr)
def test_no_tokens_are_no_tokens(empty: TokenIds) -> None:
    assert as_token_array(empty).tolist() == []


def test_the_ends_of_int32_are_tokens() -> None:
    ends = [-(2**31), 2**31 - 1]
    assert as_token_array(ends).tolist() == ends


def test_a_space_keeps_no_reference_to_the_callers_array() -> None:
    """What was allocated stays what it was when the caller reuses its buffer."""
    space = new_space()
    tokens = np.array(NUMBERS, np.int32)
    allocate(space, tokens)
    tokens[:] = 99
    assert hit(space, NUMBERS) == 12


ODD_LISTS: list[list[object]] = [
    [1, 2, 3],
    [-(2**31), 2**31 - 1],
    [1, True],
    [True, 1],
    [True, False],
    [np.int64(3), 4],
    [3, np.int8(4)],
    [1, np.True_],
    [1, 2.0],
    [1.0, 2],
    [1, None],
    [1, "2"],
    [1, [2]],
    [[1, 2]],
    [1, 2**31],
    [1, -(2**31) - 1],
    [2**63],
    [1, 2**70],
]


@pytest.mark.parametrize("as_type", [list, tuple])
@pytest.mark.parametrize("odd", ODD_LISTS, ids=repr)
def test_a_sequence_of_numbers_means_what_numpy_takes_it_for(odd: list[object], as_type: type) -> None:
    """Plain integers take a short cut; it takes what the long way takes, and leaves its words to the long way.

    Booleans are no numbers, also beside integers, where NumPy takes them for 1 and 0.
    """
    has_booleans = not {bool, np.bool_}.isdisjoint(map(type, odd))
    try:
        expected = as_token_array(np.asarray([None] if has_booleans else odd))
    except (TokenError, ValueError, OverflowError):
        with pytest.raises(TokenError):
            as_token_array(as_type(odd))
    else:
        tokens = as_token_array(as_type(odd))
        assert tokens.dtype == np.int32
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("odd", [[True, 1], [1, True], [0, np.False_], (2, True)], ids=repr)
def test_booleans_are_no_token_ids_rows_or_counts(odd: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """``[True, 1]`` was taken for token ids, and ``[True]`` was not."""
    space = new_space()
    rows = [allocate(space, NUMBERS) for _ in range(3)]
    for misuse, error in (
        (lambda: space.allocate(odd), TokenError),
        (lambda: space.append(rows[:2], odd), TokenError),
        (lambda: space.append(rows[:2], NUMBERS[:2], odd), TokenError),
        (lambda: space.append(odd, NUMBERS[:2]), UnknownSequenceError),
    ):
        with unchanged(space), pytest.raises(error, match="must be integers"):
            misuse()


def test_numbers_that_int64_does_not_hold_are_not_wrapped_into_it() -> None:
    """``uint64`` beyond int64 came out negative, or as another count."""
    assert as_counts(np.array([2**63 - 1], np.uint64), 1, "counts").tolist() == [2**63 - 1]
    for numbers in (np.array([2**63], np.uint64), np.array([1, 2**64 - 1], np.uint64), [2**63]):
        with pytest.raises(TokenError, match="counts must lie within int64, got"):
            as_counts(numbers, len(numbers), "counts")
