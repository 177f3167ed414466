"""The table of blocks and replicas against a dictionary of sets."""

from typing import Final

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError
from pagedkv.routing.residency import Residency, leading_blocks

pytestmark = pytest.mark.interpreted

WORDS: Final = np.random.default_rng(1).integers(0, 2**32, (40, 8), dtype=np.uint32)


def groups_of(count: int, group: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.full(count, group, np.int32)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "clear"]),
        st.lists(st.integers(0, 39), max_size=6),
        st.integers(0, 2),
        st.sampled_from([0, 1, 31, 32, 63]),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_it_has_what_a_dictionary_of_sets_has(operations: list[tuple[str, list[int], int, int]]) -> None:
    table = Residency()
    expected: dict[tuple[int, int], set[int]] = {}
    for operation, blocks, group, replica in operations:
        digests = WORDS[blocks]
        if operation == "add":
            table.add(digests, groups_of(len(blocks), group), replica)
            for block in blocks:
                expected.setdefault((group, block), set()).add(replica)
        elif operation == "remove":
            had = {block for block in blocks if replica in expected.get((group, block), set())}
            assert table.remove(digests, groups_of(len(blocks), group), replica) == len(had)
            for block in blocks:
                expected.get((group, block), set()).discard(replica)
        else:
            table.clear(replica)
            for having in expected.values():
                having.discard(replica)
    for group in range(3):
        bits = table.look_up(WORDS, group)
        found = [{replica for replica in range(64) if int(each) >> replica & 1} for each in bits]
        assert found == [expected.get((group, block), set()) for block in range(len(WORDS))]
    assert len(table) == sum(map(bool, expected.values()))


HELD = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39), st.sampled_from([0, 1, 31, 63])), max_size=60)


@given(HELD, st.integers(0, 40), st.sampled_from([0, 1 << 31 | 3, 1 << 63 | 1]))
def test_leading_blocks_end_at_the_first_that_is_missing(
    held: list[tuple[int, int, int]], num_blocks: int, replicas: int
) -> None:
    """Table 0 has what replicas hold, 1 and 2 what they are promised; all have the first blocks of one replica."""
    tables = [Residency() for _ in range(3)]
    has = (
        {(table, block, 0) for table in (0,) for block in range(7)}
        | {(1, block, 0) for block in range(7, 12)}
        | set(held)
    )
    for table, block, replica in has:
        tables[table].add(WORDS[[block]], groups_of(1, 5), replica)
    held_leading, had_leading = leading_blocks(tables[0], (tables[1], tables[2]), WORDS[:num_blocks], 5, replicas)

    def leading(replica: int, among: tuple[int, ...]) -> int:
        lacks = [block for block in range(num_blocks) if not any((table, block, replica) in has for table in among)]
        return min(lacks, default=num_blocks)

    for replica in (0, 1, 31, 63):
        counts = replicas >> replica & 1
        assert held_leading[replica] == counts * leading(replica, (0,))
        assert had_leading[replica] == counts * leading(replica, (0, 1, 2))


def test_it_grows_and_drops_what_no_replica_has() -> None:
    table = Residency()
    rng = np.random.default_rng(2)
    digests = rng.integers(0, 2**32, (5000, 8), dtype=np.uint32)
    for first in range(0, 5000, 100):
        table.add(digests[first : first + 100], groups_of(100, 0), 3)
        if first >= 1000:
            table.remove(digests[first - 1000 : first - 900], groups_of(100, 0), 3)
    assert len(table) == table.num_blocks_of(3) == 1000
    assert (table.look_up(digests[-1000:]) == 8).all()
    assert not table.look_up(digests[:-1000]).any()
    assert table.nbytes <= 24 * 8192


def test_room_is_made_at_once_and_kept() -> None:
    table = Residency(100_000)
    table.add(WORDS, groups_of(40, 0), 3)
    table.empty()
    assert table.nbytes == 24 * 2**18
    assert not len(table)
    assert not table.look_up(WORDS).any()


@pytest.mark.parametrize("digests", [np.zeros((2, 8), np.int64), np.zeros((2, 4), np.uint32), np.zeros(8, np.uint32)])
def test_other_arrays_are_refused(digests: np.ndarray) -> None:
    with pytest.raises(ConfigurationError, match="digests must be uint32"):
        Residency().add(digests, groups_of(2, 0), 0)
    with pytest.raises(ConfigurationError, match="groups must be int32"):
        Residency().add(WORDS[:2], groups_of(3, 0), 0)
    with pytest.raises(ConfigurationError, match="replica"):
        Residency().add(WORDS[:2], groups_of(2, 0), 64)
