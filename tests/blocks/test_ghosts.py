"""Ghosts: driven against a list for each set, with digests that crowd into few of them."""

from typing import Final

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagedkv.blocks.ghosts import (
    GHOSTS_A_SET,
    find_ghost,
    ghost_age,
    ghost_cause,
    has_forgotten,
    is_ghost,
    new_ghosts,
    recall,
    remember,
)
from pagedkv.blocks.record import EVICTED, NAME, NUM_ACQUIRED, NUM_CAUSES, FeaturedArrays, PoolArrays, new_pool_arrays
from pagedkv.contract.arrays import Uint32Array

pytestmark = pytest.mark.interpreted

NUM_SETS: Final = 3
BLOCK: Final = 1  # which stands for any content
FIRST_WORDS: Final = (0, 5, 2**31, 2**32 - 1)  # two of the first set, one of each other

NUMBERS: Final = st.sampled_from((0, 16, 2**32 - 16))

Content = tuple[int, int, int, int]
"""A group's name, and the first words of a digest. Of one set, no two have the same second and third word: then they
would be one content to the table, as digests are whose fragments are equal.
"""


def content_of(name: int, first: int, second: int, third: int) -> Content:
    return name, first, second + 10 * FIRST_WORDS.index(first), third


contents = st.builds(content_of, st.integers(1, 2), st.sampled_from(FIRST_WORDS), st.integers(0, 3), NUMBERS)


def new_arrays(num_ghosts: int = NUM_SETS * GHOSTS_A_SET) -> PoolArrays:
    return FeaturedArrays._make(new_pool_arrays(4, 1, caching=True))._replace(ghosts=new_ghosts(num_ghosts))


def put(arrays: PoolArrays, content: Content) -> Uint32Array:
    """Let the block have a name and a digest; return the digest."""
    name, *words = content
    arrays.records[BLOCK, NAME] = name
    arrays.digests[BLOCK] = [*words, 7, 7, 7, 7, 7]
    digest: Uint32Array = arrays.digests[BLOCK]
    return digest


class GhostMachine(RuleBasedStateMachine):
    """A table of ghosts, and for each set a list of what it must remember, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = new_arrays()
        self.sets: list[list[tuple[Content, int, int]]] = [[] for _ in range(NUM_SETS)]
        self.has_lost = [False] * NUM_SETS

    @rule(content=contents, cause=st.integers(1, NUM_CAUSES - 1))
    def goes(self, content: Content, cause: int) -> None:
        """Content goes that is not gone."""
        kept = self._set_of(content)
        if any(other == content for other, _, _ in kept):
            return
        put(self.arrays, content)
        place = remember(self.arrays, BLOCK, cause)
        kept.append((content, cause, int(self.arrays.counts[NUM_ACQUIRED])))
        if len(kept) > GHOSTS_A_SET:
            kept.remove(min(kept, key=lambda ghost: ghost[2]))
            self.has_lost[place // GHOSTS_A_SET] = True
        self.arrays.counts[NUM_ACQUIRED] += 1  # so that no two go at one time

    @rule(content=contents)
    def comes_back(self, content: Content) -> None:
        """Content is named again."""
        put(self.arrays, content)
        place = find_ghost(self.arrays, content[0], self.arrays.digests[BLOCK])
        assert recall(self.arrays, BLOCK) == place
        kept = self._set_of(content)
        was_there = [ghost for ghost in kept if ghost[0] == content]
        assert (place >= 0) == bool(was_there)
        for ghost in was_there:
            kept.remove(ghost)

    @rule(count=st.integers(1, 10))
    def time_passes(self, count: int) -> None:
        """The pool hands blocks out."""
        self.arrays.counts[NUM_ACQUIRED] += count

    @rule(content=contents)
    def ask(self, content: Content) -> None:
        """What is remembered is found, with cause and age, at a place of its own; nothing else is."""
        digest = put(self.arrays, content)
        place = find_ghost(self.arrays, content[0], digest)
        known = {other: (cause, clock) for other, cause, clock in self._set_of(content)}
        assert (place >= 0) == (content in known)
        if content in known:
            cause, clock = known[content]
            assert ghost_cause(self.arrays, place) == cause
            assert ghost_age(self.arrays, place) == self.arrays.counts[NUM_ACQUIRED] - clock
        assert has_forgotten(self.arrays, digest) == self.has_lost[self._number_of(content)]

    @invariant()
    def as_many(self) -> None:
        """As many ghosts as the lists have."""
        num_there = sum(is_ghost(self.arrays, place) for place in range(NUM_SETS * GHOSTS_A_SET))
        assert num_there == sum(map(len, self.sets))

    @staticmethod
    def _number_of(content: Content) -> int:
        return content[1] * NUM_SETS // 2**32

    def _set_of(self, content: Content) -> list[tuple[Content, int, int]]:
        return self.sets[self._number_of(content)]


GhostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestGhosts = GhostMachine.TestCase


def test_no_table_remembers_nothing_and_may_have_forgotten_all() -> None:
    arrays = new_arrays(0)
    digest = put(arrays, (1, 2, 3, 4))
    assert remember(arrays, BLOCK, EVICTED) == recall(arrays, BLOCK) == find_ghost(arrays, 1, digest) == -1
    assert has_forgotten(arrays, digest)
    assert arrays.ghosts.nbytes == 0


@pytest.mark.parametrize(("num_ghosts", "num_sets"), [(1, 1), (5, 1), (6, 2), (1000, 200)])
def test_a_table_has_room_for_as_many_as_it_was_made_for(num_ghosts: int, num_sets: int) -> None:
    assert new_ghosts(num_ghosts).shape == (num_sets, 16)


def test_an_age_survives_the_clock_that_wraps_around() -> None:
    arrays = new_arrays()
    arrays.counts[NUM_ACQUIRED] = 2**32 - 3
    digest = put(arrays, (1, 2, 3, 4))
    place = remember(arrays, BLOCK, EVICTED)
    arrays.counts[NUM_ACQUIRED] += 10
    assert ghost_age(arrays, place) == 10
    assert find_ghost(arrays, 1, digest) == place


def test_a_ghost_stays_at_its_place() -> None:
    """So that a policy can keep what it likes beside it."""
    arrays = new_arrays(GHOSTS_A_SET)
    places = []
    for number in range(GHOSTS_A_SET):
        put(arrays, (1, 0, number, 0))
        places.append(remember(arrays, BLOCK, EVICTED))
    put(arrays, (1, 0, 0, 0))
    recall(arrays, BLOCK)
    assert sorted(places) == list(range(GHOSTS_A_SET))
    for number in range(1, GHOSTS_A_SET):
        assert find_ghost(arrays, 1, put(arrays, (1, 0, number, 0))) == places[number]


def test_digests_of_different_sets_are_spread_over_all() -> None:
    arrays = new_arrays(GHOSTS_A_SET * 64)
    random = np.random.default_rng(0)
    sets = set()
    for _ in range(400):
        put(arrays, (1, *map(int, random.integers(0, 2**32, 3))))  # type: ignore[arg-type]
        sets.add(remember(arrays, BLOCK, EVICTED) // GHOSTS_A_SET)
    assert len(sets) == 64
