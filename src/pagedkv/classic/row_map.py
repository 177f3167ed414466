"""RowMap: which row serves which sequence.

The space has rows and no sequence ids. Rows may be freed without the map (``manager.space.free``), so an entry is valid
only while its row still serves the same sequence, which the row's generation shows. A stale entry is dropped when its
row is given to another sequence, so there is never more than one entry a row, however many sequences come and go.
"""

from dataclasses import dataclass

from pagedkv.contract.spec import Row
from pagedkv.space import BlockSpace

__all__ = ["Place", "RowMap"]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one sequence.

    Args:
        row: its row.
        generation: :meth:`BlockSpace.generation` of the row when the sequence got it.
        num_cached_tokens: tokens of its prompt that hit when the prompt was allocated.
    """

    row: Row
    generation: int
    num_cached_tokens: int


class RowMap:
    """The map from sequence ids to rows, and back: at most one sequence a row, and one row a sequence."""

    def __init__(self, space: BlockSpace) -> None:
        """Start empty."""
        self._space = space
        self._places: dict[int, Place] = {}
        self._sequence_of: dict[int, int] = {}  # row -> the sequence that got it last

    def __len__(self) -> int:
        """Count the entries, stale ones included: at most ``max_sequences``."""
        return len(self._places)

    def find(self, seq_id: int) -> Place | None:
        """Return the place of a sequence, or None if it has no row (any more). Changes nothing. O(1)."""
        place = self._places.get(seq_id)
        if place is None or self._space.generation_or_none(place.row) != place.generation:
            return None
        return place

    def enter(self, seq_id: int, row: Row, num_cached_tokens: int) -> None:
        """Record that a sequence has got a row; drop the row's former sequence and this one's former row. O(1)."""
        former = self._sequence_of.get(row)
        if former is not None:
            self.leave(former)
        self.leave(seq_id)
        self._places[seq_id] = Place(row, self._space.generation(row), num_cached_tokens)
        self._sequence_of[row] = seq_id

    def leave(self, seq_id: int) -> None:
        """Drop the entry of a sequence, if there is one. O(1)."""
        place = self._places.pop(seq_id, None)
        if place is not None:
            del self._sequence_of[place.row]
