"""Host memory that bodies allocate buffers from: plain memory, or pinned memory for an engine on a GPU."""

from collections.abc import Sequence
from typing import Protocol, final

import numpy as np

from pagedkv.tiers.checksums import Buffer

__all__ = ["HostMemory", "PageableMemory", "copy_pieces"]


class HostMemory(Protocol):
    """Memory that buffers are taken from."""

    def take(self, nbytes: int) -> memoryview | None:
        """Take a buffer, which stays in use until no view of it is left; None if there is no room now."""


@final
class PageableMemory:
    """Plain memory of the process."""

    def take(self, nbytes: int) -> memoryview | None:
        """Allocate a buffer. Raises MemoryError."""
        return np.empty(nbytes, np.uint8).data


def copy_pieces(pieces: Sequence[Buffer], buffer: memoryview) -> None:
    """Copy pieces into a buffer of their total length, in order; other threads can run meanwhile. O(bytes)."""
    destination, end = np.asarray(buffer), 0
    for piece in pieces:
        source = np.asarray(memoryview(piece).cast("B"))
        destination[end : end + len(source)] = source
        end += len(source)
