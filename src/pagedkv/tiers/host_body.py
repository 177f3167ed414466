"""A body in this process's memory: one buffer an entry.

Its frames have identity and tokens, which are compared as in every body, but no check of the bytes, since these never
leave the process. Entries end with the process, and no shared memory and no file remains.
"""

import errno
from collections.abc import Iterator, Sequence
from threading import Lock

from pagedkv.tiers.body import Stored, Usage
from pagedkv.tiers.checksums import Buffer
from pagedkv.tiers.host_memory import HostMemory, PageableMemory, copy_pieces

__all__ = ["HostBody"]


class HostBody:
    """Entries in host memory, each copied once when it is written. Reads return views, no copies.

    Args:
        memory: memory that entries are allocated from; None: plain memory of the process.
    """

    medium = "host"
    is_trusted = True
    is_immediate = True

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._memory = PageableMemory() if memory is None else memory
        self._entries: dict[bytes, memoryview] = {}
        self._nbytes = 0
        self._lock = Lock()

    def scan(self) -> Iterator[Stored]:
        """List the entries."""
        with self._lock:
            entries = list(self._entries.items())
        return (Stored(key, len(entry), 0.0) for key, entry in entries)

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Return an entry, or None. O(1)."""
        del nbytes, timeout_s
        with self._lock:
            return self._entries.get(key)

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Copy an entry. Raises OSError, ENOMEM, if there is no room."""
        del timeout_s
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        entry = self._memory.take(nbytes)
        if entry is None:
            raise OSError(errno.ENOMEM, f"host memory has no {nbytes:,} bytes left in one piece")
        copy_pieces(pieces, entry)
        entry = entry.toreadonly()
        with self._lock:
            self._nbytes += nbytes - len(self._entries.get(key, b""))
            self._entries[key] = entry

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Remove an entry; its memory stays valid as long as a reader has a view of it."""
        del timeout_s
        with self._lock:
            entry = self._entries.pop(key, None)
            self._nbytes -= len(entry or b"")
        return entry is not None

    def usage(self) -> Usage:
        """Count the bytes of entries."""
        return Usage(self._nbytes, None)

    def close(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0
