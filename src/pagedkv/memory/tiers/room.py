"""The bytes of a store: what counts against its cap, and what is to be deleted.

Content counts from before its write begins until its delete is completed. Bytes of the root that are not the store's
count as foreign. Where the medium's free bytes are known, they follow the store's writes and deletes between two
measurements.
"""

from dataclasses import dataclass

__all__ = ["Doomed", "Room"]


@dataclass(slots=True)
class Doomed:
    """Content that is to be deleted, and counts until it is. ``action`` is 0 while the delete waits."""

    nbytes: int
    action: int = 0
    not_before_s: float = 0.0
    is_late: bool = False


class Room:
    """The bytes of one store.

    Args:
        cap_nbytes: most bytes.
        floor_nbytes: free bytes of the medium that stay free.
    """

    def __init__(self, cap_nbytes: int, floor_nbytes: int) -> None:
        self._cap_nbytes = cap_nbytes
        self._floor_nbytes = floor_nbytes
        self._free_nbytes: int | None = None
        self.nbytes = 0
        self.foreign_nbytes = 0
        self.doomed: dict[bytes, Doomed] = {}
        self.doomed_nbytes = 0

    @property
    def left_nbytes(self) -> int:
        """Bytes that may still be written now; negative if too many are there."""
        left = self._cap_nbytes - self.nbytes - self.foreign_nbytes
        return left if self._free_nbytes is None else min(left, self._free_nbytes - self._floor_nbytes)

    @property
    def coming_nbytes(self) -> int:
        """Bytes that may be written once all that is to be deleted is."""
        return self.left_nbytes + self.doomed_nbytes

    def enter(self, nbytes: int) -> None:
        """Count content that is there."""
        self.nbytes += nbytes

    def reserve(self, nbytes: int) -> None:
        """Count content that is about to be written."""
        self.nbytes += nbytes
        if self._free_nbytes is not None:
            self._free_nbytes -= nbytes

    def lose(self, nbytes: int) -> None:
        """Count content no longer, since it is gone."""
        self.nbytes -= nbytes

    def doom(self, key: bytes, nbytes: int) -> None:
        """Note that content, which counts already, is to be deleted."""
        assert key not in self.doomed, "content is to be deleted twice"
        self.doomed[key] = Doomed(nbytes)
        self.doomed_nbytes += nbytes

    def end_delete(self, key: bytes) -> None:
        """Count deleted content no longer."""
        nbytes = self.doomed.pop(key).nbytes
        self.nbytes -= nbytes
        self.doomed_nbytes -= nbytes
        if self._free_nbytes is not None:
            self._free_nbytes += nbytes

    def measure(self, root_nbytes: int, free_nbytes: int | None, unlanded_nbytes: int) -> None:
        """Take what was measured while so many bytes were being written, none to all of which are counted in it."""
        self.foreign_nbytes = max(0, root_nbytes - (self.nbytes - unlanded_nbytes))
        self._free_nbytes = None if free_nbytes is None else free_nbytes - unlanded_nbytes
