"""A region of pinned host memory that gives out buffers of any size, each taken until no view of it is left.

A GPU copies from and to such buffers without the host. Buffers are given by first fit, and neighbours that are free are
one extent again, so that buffers of one size leave no holes of others::

    | buffer | free | buffer       | free                |
"""

import weakref
from bisect import bisect_left
from collections import deque
from threading import Lock
from typing import Final, final

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.device.pinned_pages import allocate_pages, pin, unpin

__all__ = ["PinnedArena"]

MOST_NBYTES: Final = 2**46


@final
class PinnedArena:
    """Buffers in one region of host memory. Any thread may take and release them.

    Args:
        nbytes: size of the region.
        what: for messages.
        is_pinned: False where there is no GPU.
        alignment: bytes; every buffer begins at a multiple of it.

    Raises:
        ConfigurationError: there is not enough memory, or it cannot be pinned.
    """

    def __init__(self, nbytes: int, what: str, *, is_pinned: bool = True, alignment: int = 4096) -> None:
        self.nbytes = as_count(nbytes, f"the size of {what}", least=1, most=MOST_NBYTES)
        self._alignment = alignment
        memory = allocate_pages(nbytes, what)
        self._bytes: npt.NDArray[np.uint8] = memory.numpy()
        self.address: int = memory.data_ptr()
        if is_pinned:
            pin(memory)
            weakref.finalize(self, unpin, memory).atexit = False
        self._lock = Lock()
        self._starts = [0]
        self._sizes = {0: nbytes}
        self._released: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> memoryview | None:
        """Take a buffer, of undefined content; None if there is no room now. O(free extents).

        It is released when no view of it is left. A copy by a GPU is no view: its caller keeps one until it has ended.
        """
        size = max(1, -(-nbytes // self._alignment)) * self._alignment
        with self._lock:
            self._take_back()
            for place, start in enumerate(self._starts):
                if self._sizes[start] >= size:
                    self._cut(place, start, size)
                    buffer = self._bytes[start : start + nbytes]
                    weakref.finalize(buffer, self._released.append, (start, size)).atexit = False
                    return buffer.data
        return None

    def holds(self, address: int) -> bool:
        """Whether an address is in the region. Changes nothing."""
        return self.address <= address < self.address + self.nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not taken, in extents of any size."""
        with self._lock:
            self._take_back()
            return sum(self._sizes.values())

    def _cut(self, place: int, start: int, size: int) -> None:
        """Take the head of a free extent."""
        left = self._sizes.pop(start) - size
        if left:
            self._starts[place] = start + size
            self._sizes[start + size] = left
        else:
            del self._starts[place]

    def _take_back(self) -> None:
        """Enter what was released since the last call; finalizers run at any moment, so they only append."""
        while self._released:
            self._enter(*self._released.popleft())

    def _enter(self, start: int, size: int) -> None:
        """Enter a free extent, and merge it with its neighbours."""
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + size:
            size += self._sizes.pop(self._starts.pop(place))
        before = self._starts[place - 1] if place else -1
        if place and before + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(place, start)
            self._sizes[start] = size
