"""RowMap: which row serves which sequence.

The space knows rows and no ids. Rows may be freed behind the map's back (``manager.space.free``), so a place is good
only while its row still serves the same sequence, which the row's generation tells. A stale place is dropped when its
row is given to another sequence: so there is never more than one place a row, however many sequences come and go.
"""

from dataclasses import dataclass

from pagedkv.memory.contract.spec import Row
from pagedkv.memory.space import BlockSpace

__all__ = ["Place", "RowMap"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sequence is.

    Args:
        row: its row.
        generation: what :meth:`BlockSpace.generation` said of the row when the sequence got it.
        num_cached_tokens: tokens of its prompt that hit when the prompt was allocated.
    """

    row: Row
    generation: int
    num_cached_tokens: int


class RowMap:
    """The map from sequence ids to rows, and back: at most one sequence a row, and one row a sequence."""

    def __init__(self, space: BlockSpace) -> None:
        """Begin with nobody."""
        self._space = space
        self._places: dict[int, Place] = {}
        self._sequence_of: dict[int, int] = {}  # row -> the sequence that got it last

    def __len__(self) -> int:
        """Places that are remembered, stale ones included: at most ``max_sequences``."""
        return len(self._places)

    def find(self, seq_id: int) -> Place | None:
        """Tell where a sequence is, or None if it has no row (any more). Changes nothing. O(1)."""
        place = self._places.get(seq_id)
        if place is None or self._space.generation_or_none(place.row) != place.generation:
            return None
        return place

    def enter(self, seq_id: int, row: Row, num_cached_tokens: int) -> None:
        """Note that a sequence has just got a row; who was noted there, and where it was before, is forgotten. O(1)."""
        former = self._sequence_of.get(row)
        if former is not None:
            self.leave(former)
        self.leave(seq_id)
        self._places[seq_id] = Place(row, self._space.generation(row), num_cached_tokens)
        self._sequence_of[row] = seq_id

    def leave(self, seq_id: int) -> None:
        """Forget a sequence, if it is known. O(1)."""
        place = self._places.pop(seq_id, None)
        if place is not None:
            del self._sequence_of[place.row]
