"""Arguments of a type that Python would let through: refused with an error of ours, and nothing changed (promise 5).

What has the right type and the wrong value is in test_bad_input.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import BlockSpace, hash_block_tokens, hash_request_tokens
from pagedkv.errors import ConfigurationError, PagedKVError, TokenError, UnknownSequenceError
from tests.space.spaces import new_space, prefill, tokens, unchanged

ROW = 0
NO_NUMBERS = [np.array([1, 2]), np.array([0]), None, 0.0, False, "0", np.ma.masked]


def space_with_a_row() -> BlockSpace:
    space = new_space(num_host_blocks=20)
    assert prefill(space, tokens(10)) == ROW
    return space


def refused(action: Callable[[BlockSpace], object], error: type[PagedKVError], message: str) -> None:
    """Assert that an action raises exactly this error, with this message, and changes nothing."""
    space = space_with_a_row()
    with unchanged(space), pytest.raises(error, match=message) as caught:
        action(space)
    assert type(caught.value) is error


@pytest.mark.parametrize("number", NO_NUMBERS, ids=repr)
def test_a_number_of_slots_that_is_none_is_refused(number: int) -> None:
    reserve, drafts = "num_lookahead must be an integer, got", "num_draft must be an integer, got"
    refused(lambda space: space.append([ROW], [1], num_lookahead=number), ConfigurationError, reserve)
    if not (isinstance(number, np.ndarray) and number.ndim):  # those are one a row
        refused(lambda space: space.append([ROW], [1], num_draft=number), ConfigurationError, drafts)
    refused(lambda space: space.can_append([ROW], num_lookahead=number), ConfigurationError, reserve)
    refused(lambda space: space.allocate([1], num_lookahead=number), ConfigurationError, reserve)
    refused(lambda space: space.can_allocate([1], num_lookahead=number), ConfigurationError, reserve)


@pytest.mark.parametrize(
    "numbers", [[0, 1], [[0]], ["0"], [None], [0.0], [True], [[0], [0, 1]], np.ma.array([0])], ids=repr
)
def test_numbers_of_guesses_that_are_not_one_a_row_are_refused(numbers: list[int]) -> None:
    refused(lambda space: space.append([ROW], [1], num_draft=numbers), TokenError, "num_draft")


def test_numbers_of_slots_may_be_numpys() -> None:
    space = space_with_a_row()
    assert space.append([ROW], [1, 2], [2], num_lookahead=np.int8(3), num_draft=np.uint8(1)) is None  # type: ignore[arg-type]
    assert len(space.block_ids(ROW)) == 4


def test_a_row_that_no_table_has_serves_no_sequence() -> None:
    space = space_with_a_row()
    with unchanged(space):
        assert space.generation_or_none(9999) is None
        assert space.generation_or_none(ROW + 1) is None
        assert space.generation_or_none(ROW) == space.generation(ROW)


# Masked arrays


def masked(*numbers: int, mask: bool) -> npt.NDArray[np.int32]:
    """An array whose last number is masked, or whose mask is there and empty."""
    array: npt.NDArray[np.int32] = np.ma.array(np.array(numbers, np.int32), mask=[False] * (len(numbers) - 1) + [mask])
    return array


@pytest.mark.parametrize("mask", [True, False])
def test_masked_arrays_are_refused(*, mask: bool) -> None:
    """Also without a masked number: whether a program works must not depend on the numbers of one call."""
    prompt, row, two = masked(1, 2, 3, mask=mask), masked(ROW, mask=mask), masked(2, mask=mask)
    for action in (
        lambda space: space.allocate(prompt),
        lambda space: space.can_allocate(prompt),
        lambda space: space.match(prompt),
        lambda space: space.append([ROW], prompt, [3]),
    ):
        refused(action, TokenError, "token ids must be a plain array, got a masked one")
    refused(lambda space: space.append([ROW], [1, 2], two), TokenError, "counts must be a plain array, got a masked")
    refused(lambda space: space.truncate([ROW], two), TokenError, "lengths must be a plain array, got a masked one")
    for action in (
        lambda space: space.append(row, [1]),
        lambda space: space.free(row),
        lambda space: space.lengths(row),
        lambda space: space.swap_out(row),
    ):
        refused(action, UnknownSequenceError, "rows must be a plain array, got a masked one")
    with pytest.raises(TokenError, match="masked"):
        hash_request_tokens(prompt, 1)


def test_other_kinds_of_arrays_are_taken_for_what_they_hold() -> None:
    class Tagged(np.ndarray[Any, Any]):
        pass

    space = space_with_a_row()
    assert space.append(np.array([ROW], np.int32).view(Tagged), tokens(2).view(Tagged), [2]) is None
    assert space.num_tokens(ROW) == 12


# Digests

FLAT = np.frombuffer(b"".join(hash_request_tokens(range(8), 4)), np.uint8)
EXPECTED = r"digests must be uint8 \[2, 32\], one for each full block, got"
MIS_SHAPED = {
    "flat": (FLAT, r"got uint8 \[64\]"),
    "transposed": (FLAT.reshape(2, 32).T, r"got uint8 \[32, 2\]"),
    "three dimensions": (FLAT.reshape(1, 2, 32), r"got uint8 \[1, 2, 32\]"),
    "a list of bytes": (hash_request_tokens(range(8), 4), r"np.frombuffer\(b''.join\(digests\)"),
    "ragged": ([[1, 2], [3]], "digests are no array of integers"),
    "masked": (np.ma.array(FLAT.reshape(2, 32)), "digests must be a plain array, got a masked one"),
    "a number": (7, r"digests must be uint8 \[2, 32\], .* got int64 \[\]"),
    "too few": (FLAT.reshape(2, 32)[:1], EXPECTED),
    "of another type": (FLAT.reshape(2, 32).astype(np.int32), EXPECTED),
    "too short": (FLAT.reshape(2, 32)[:, :31], EXPECTED),
    "too many": (np.zeros((3, 32), np.uint8), EXPECTED),
}


@pytest.mark.parametrize(("digests", "message"), MIS_SHAPED.values(), ids=MIS_SHAPED.keys())
def test_digests_of_another_shape_are_refused(digests: npt.ArrayLike, message: str) -> None:
    refused(lambda space: space.allocate(tokens(9), digests=digests), ConfigurationError, message)
    refused(lambda space: space.match(tokens(9), digests=digests), ConfigurationError, message)
    refused(lambda space: space.can_allocate(tokens(9), digests=digests), ConfigurationError, message)


# Digests of requests, in the order of arguments that other libraries have

CLASSIC_ORDERS: dict[str, tuple[Any, ...]] = {
    "block size first": (16, [1, 2, 3]),
    "NumPy's block size first": (np.int64(16), np.arange(3)),
    "hash function first": (hash, 16, [1, 2, 3]),
    "hash function and tokens": (hash, [1, 2, 3]),
    "tokens twice": ([1, 2, 3], [1, 2, 3]),
    "no block size": ([1, 2, 3], None),
}


@pytest.mark.parametrize("arguments", CLASSIC_ORDERS.values(), ids=CLASSIC_ORDERS.keys())
def test_the_classic_order_of_arguments_is_told_from_ours(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"the order is hash_request_tokens\(token_ids, block_size, keys"):
        hash_request_tokens(*arguments)


def test_keys_and_epochs_of_another_type_have_no_digests() -> None:
    with pytest.raises(ConfigurationError, match="weights_epoch text, got b'salt' and ''"):
        hash_request_tokens([1, 2], 1, b"salt")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"weights_epoch text, got RequestKeys.* and 7$"):
        hash_request_tokens([1, 2], 1, weights_epoch=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("parent", [None, b"", b"short", "text", hash, [1, 2]], ids=repr)
def test_a_parent_that_is_no_digest_is_refused(parent: bytes) -> None:
    with pytest.raises(ConfigurationError, match="parent_digest comes first, 32 bytes, ROOT_DIGEST for a first block"):
        hash_block_tokens(parent, [1, 2])


def test_extra_keys_that_are_not_encoded_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="extra_keys must be encoded keys, as bytes, got 'salt'"):
        hash_block_tokens(bytes(32), [1, 2], "salt")  # type: ignore[arg-type]
