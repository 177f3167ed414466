"""Requests without their texts: what begins alike still does, and nothing else is left."""

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import anonymized

SALT = b"salt"


def request_of(tokens: list[int], session: str | None = None) -> Request:
    return Request(0.0, len(tokens), 2, None, 0, session, 1, 0, np.array(tokens, np.int32), np.array([1, 2], np.int32))


def ids_of(requests: list[Request], salt: bytes = SALT, block_size: int = 2) -> list[list[int]]:
    found = list(anonymized(requests, salt, block_size))
    return [each.block_ids.tolist() for each in found if each.block_ids is not None]


def test_equal_beginnings_have_equal_ids_and_others_none() -> None:
    first, second, third = ids_of([request_of([1, 2, 3, 4, 5]), request_of([1, 2, 3, 9]), request_of([7, 2, 3, 4])])
    assert len(first) == 2  # full blocks alone
    assert first[0] == second[0]
    assert not {first[1], *third} & {*second}
    assert third[1] != first[1]  # equal tokens behind other ones are another block


def test_no_token_and_no_name_is_left() -> None:
    (found,) = anonymized([request_of([1, 2, 3, 4], "ann@example.org")], SALT, 2)
    assert found.prompt_token_ids is None
    assert found.output_token_ids is None
    assert (found.input_length, found.output_length, found.block_size) == (4, 2, 2)
    assert found.session is not None
    assert "ann" not in found.session


def test_without_the_salt_nothing_can_be_recognised() -> None:
    request = request_of([1, 2, 3, 4], "ann")
    assert ids_of([request]) == ids_of([request])
    assert not set(ids_of([request])[0]) & set(ids_of([request], b"another")[0])
    (one,), (other,) = (list(anonymized([request], salt, 2)) for salt in (b"a", b"b"))
    assert one.session != other.session


def test_lengths_alone_stay_as_they_are() -> None:
    (found,) = anonymized([Request(1.5, 10, 3)], SALT)
    assert (found.arrival_s, found.input_length, found.output_length, found.block_ids) == (1.5, 10, 3, None)


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`block_size` must be at least 1 token, got 0"):
        list(anonymized([], SALT, 0))
