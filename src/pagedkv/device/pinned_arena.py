"""PinnedArena: allocates buffers of any size in a region of pinned host memory; a buffer lives as long as its views.

A GPU copies from and to such buffers without the host. Buffers are allocated by first fit, and adjacent free extents
are merged, so that the region does not fragment for buffers of one size::

    | buffer | free | buffer       | free                |
"""

import weakref
from bisect import bisect_left
from collections import deque
from threading import Lock
from typing import Final, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import as_count
from pagedkv.device.pinned_pages import allocate_pages, pin, unpin

__all__ = ["PinnedArena"]

MOST_NBYTES: Final = 2**46


@final
class PinnedArena:
    """Buffers in one region of host memory. Any thread may take and release them.

    Args:
        nbytes: size of the region.
        what: name of the region in messages.
        is_pinned: whether to pin the region; False without a GPU.
        alignment: every buffer begins at a multiple of this number of bytes.

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
        """Allocate a buffer of undefined content; return None if there is no room now. O(free extents).

        The buffer is released with its last view. A GPU's copy does not count as a view: the caller of the copy must
        keep one until the copy has ended.
        """
        size = max(1, -(-nbytes // self._alignment)) * self._alignment
        with self._lock:
            self._collect_released()
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
        """Free bytes, in extents of any size."""
        with self._lock:
            self._collect_released()
            return sum(self._sizes.values())

    def _cut(self, place: int, start: int, size: int) -> None:
        """Allocate the first bytes of a free extent."""
        left = self._sizes.pop(start) - size
        if left:
            self._starts[place] = start + size
            self._sizes[start + size] = left
        else:
            del self._starts[place]

    def _collect_released(self) -> None:
        """Free the buffers released since the last call. Finalizers, which run at any time, only append to a list."""
        while self._released:
            self._enter(*self._released.popleft())

    def _enter(self, start: int, size: int) -> None:
        """Add a free extent, and merge it with its neighbours."""
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + size:
            size += self._sizes.pop(self._starts.pop(place))
        before = self._starts[place - 1] if place else -1
        if place and before + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(place, start)
            self._sizes[start] = size
