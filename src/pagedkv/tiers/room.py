"""The bytes of a store: what counts against its cap.

Content counts from before its write begins until its delete is completed. Bytes of the root that are not the store's
count as foreign. Where the medium's free bytes are known, they follow the store's writes and deletes between two
measurements.
"""

__all__ = ["Room"]


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

    @property
    def left_nbytes(self) -> int:
        """Bytes that may still be written now; negative if the cap is exceeded."""
        left = self._cap_nbytes - self.nbytes - self.foreign_nbytes
        return left if self._free_nbytes is None else min(left, self._free_nbytes - self._floor_nbytes)

    def enter(self, nbytes: int) -> None:
        """Count content that is there."""
        self.nbytes += nbytes

    def adopt(self, nbytes: int) -> None:
        """Count foreign content as the store's own. The sum stays, or grows if the content was not measured yet."""
        self.nbytes += nbytes
        self.foreign_nbytes = max(0, self.foreign_nbytes - nbytes)

    def disown(self, nbytes: int) -> None:
        """Count content of the store as foreign, until the next measurement. The sum stays."""
        self.nbytes -= nbytes
        self.foreign_nbytes += nbytes

    def could_own(self, nbytes: int) -> bool:
        """Whether the store's own content is within the cap with so many more bytes. Changes nothing."""
        return self.nbytes + nbytes <= self._cap_nbytes

    def reserve(self, nbytes: int) -> None:
        """Count content that is about to be written."""
        self.nbytes += nbytes
        if self._free_nbytes is not None:
            self._free_nbytes -= nbytes

    def release(self, nbytes: int) -> None:
        """Stop counting content, since it is deleted."""
        self.nbytes -= nbytes
        if self._free_nbytes is not None:
            self._free_nbytes += nbytes

    def measure(self, root_nbytes: int, free_nbytes: int | None, unlanded_nbytes: int) -> None:
        """Take what was measured while so many bytes were being written, none to all of which are counted in it."""
        self.foreign_nbytes = max(0, root_nbytes - (self.nbytes - unlanded_nbytes))
        self._free_nbytes = None if free_nbytes is None else free_nbytes - unlanded_nbytes
