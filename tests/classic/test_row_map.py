"""RowMap: which row serves which sequence, whoever frees the rows."""

import numpy as np
import pytest

from pagedkv import Sequence, SequenceGroup
from pagedkv.classic.row_map import RowMap
from pagedkv.contract.spec import Row
from tests.classic.managers import new_manager
from tests.space.spaces import allocate, new_space

MAX_SEQUENCES = 8


def test_sequences_freed_through_the_other_door_do_not_pile_up() -> None:
    """At most one place a row is remembered, after 10,000 sequences."""
    manager = new_manager()
    for number in range(10_000):
        seq = Sequence(number, [1, 2, 3])
        manager.allocate(SequenceGroup("request", [seq]))
        manager.space.free(manager.row_of(seq))
    assert len(manager._places) <= manager.space.config.max_sequences


@pytest.mark.parametrize("seed", range(5))
def test_places_are_those_of_a_list_of_who_is_alive(seed: int) -> None:
    """Against a plain dict, which is told of every sequence freed, through either door; ids are used again."""
    rng = np.random.default_rng(seed)
    space = new_space(max_sequences=MAX_SEQUENCES)
    places, alive = RowMap(space), dict[int, int]()
    for step in range(1000):
        seq_id = int(rng.integers(12))
        if seq_id in alive:
            space.free(alive.pop(seq_id))
            if rng.random() < 0.5:
                places.leave(seq_id)
        elif len(alive) < MAX_SEQUENCES:
            alive[seq_id] = allocate(space, [1, 2, 3])
            places.enter(seq_id, Row(alive[seq_id]), num_cached_tokens=step)
        found = {known: place.row for known in range(12) if (place := places.find(known)) is not None}
        assert found == alive
        assert len(alive) <= len(places) <= MAX_SEQUENCES
