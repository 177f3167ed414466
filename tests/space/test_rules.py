"""The retention rules against their definition: which position does which query read."""

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.space.rows import CHUNK, FULL, RECURRENT, WINDOW, first_block_of_hit, first_needed_token

KINDS = {"full": FULL, "window": WINDOW, "chunk": CHUNK, "recurrent": RECURRENT}


def reads(kind: int, span: int, query: int, position: int) -> bool:
    """The definition, as spec.py's table gives it: does computing ``query`` read ``position``."""
    if kind == FULL:
        return position <= query
    if kind == WINDOW:
        return query - span < position <= query
    if kind == CHUNK:
        return position <= query and position // span == query // span
    return position == query - 1  # the state after the token before


def first_read(kind: int, span: int, query: int) -> int:
    """First position that ``query`` or any later one reads or writes, by trying all."""
    later = range(query, query + 2 * span + 1)
    return min(
        position
        for position in range(query + 2 * span + 1)
        if any(position == asked or reads(kind, span, asked, position) for asked in later)
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("span", [1, 2, 5])
def test_what_is_needed_is_what_is_read(kind: int, span: int) -> None:
    needed = [first_needed_token(kind, span, query) for query in range(25)]
    assert needed == [first_read(kind, span, query) for query in range(25)]


@settings(deadline=None)
@given(
    kind=st.sampled_from(list(KINDS.values())),
    span=st.integers(1, 40),
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 9),
)
def test_a_hit_needs_the_blocks_that_are_read_and_the_last_one_at_least(
    kind: int, span: int, num_blocks: int, block_size: int
) -> None:
    """The next query reads from there on; and without any block nothing shows that these tokens were computed."""
    length = num_blocks * block_size
    read = {
        position // block_size
        for position in range(length)
        if any(reads(kind, span, query, position) for query in range(length, length + span + 1))
    }
    assert first_block_of_hit(kind, span, length, block_size, 1) == min(read | {num_blocks - 1})
    assert first_block_of_hit(kind, span, length, block_size, 0) == min(read | {num_blocks})


def test_an_empty_hit_needs_nothing() -> None:
    assert [first_block_of_hit(kind, 8, 0, 4, 1) for kind in KINDS.values()] == [0] * len(KINDS)
