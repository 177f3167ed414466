"""Direct I/O: writes and reads of files that bypass the page cache, and the aligned buffers that they need."""

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Final

from pagedkv.tiers.checksums import Buffer

__all__ = ["AlignedBuffers", "can_be_direct", "read_direct", "whole_sectors", "write_all", "write_direct"]

SECTOR: Final = 4096
MOST_BUFFERS: Final = 32
NUM_REFERENCES_OF_A_FREE_BUFFER: Final = 2  # the list's, and the argument of the question itself


def write_all(descriptor: int, pieces: Sequence[Buffer]) -> None:
    """Write all pieces, up to 64 of them a call."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    while views:
        num_written = os.writev(descriptor, views[:64])
        while views and num_written >= views[0].nbytes:
            num_written -= views.pop(0).nbytes
        if num_written:
            views[0] = views[0][num_written:]


def can_be_direct(folder: Path) -> bool:
    """Whether the file system of a folder has direct I/O. Writes a small file there, which other processes may delete.

    Its name is used once: a process in another container may have this one's number.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    probe = folder / f"direct.{os.getpid()}.{token_hex(4)}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        probe.unlink(missing_ok=True)
        with mmap.mmap(-1, SECTOR) as page:
            return os.write(descriptor, page) == SECTOR
    except OSError:
        return False
    finally:
        os.close(descriptor)


def whole_sectors(nbytes: int) -> int:
    """Round a number of bytes up to whole sectors, at least one."""
    return max(SECTOR, -(-nbytes // SECTOR) * SECTOR)


class AlignedBuffers:
    """Buffers of whole sectors, which are used again when no view of them is left.

    A new buffer of 2 MiB costs 512 page faults, which take longer than a read of 2 MiB from a fast disk. A view refers
    to its buffer, so a buffer that only this list refers to is free.
    """

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap] = []
        self._lock = Lock()

    def take(self, nbytes: int) -> memoryview:
        """Return a view of whole sectors, at least ``nbytes``; its buffer stays in use while any view of it exists."""
        padded = whole_sectors(nbytes)
        with self._lock:
            for place in range(len(self._buffers)):
                is_free = sys.getrefcount(self._buffers[place]) == NUM_REFERENCES_OF_A_FREE_BUFFER
                if is_free and len(self._buffers[place]) == padded:
                    self._buffers.append(self._buffers.pop(place))
                    return memoryview(self._buffers[-1])
            buffer = mmap.mmap(-1, padded)
            self._buffers.append(buffer)
            del self._buffers[:-MOST_BUFFERS]
            return memoryview(buffer)


def write_direct(descriptor: int, pieces: Sequence[Buffer], nbytes: int, aligned: memoryview) -> None:
    """Write pieces by direct I/O, through an aligned buffer of whole sectors; then cut the file to ``nbytes``."""
    end = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        aligned[end : end + view.nbytes] = view
        end += view.nbytes
    aligned[end:] = bytes(aligned.nbytes - end)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    at = 0
    while at < aligned.nbytes:
        at += os.write(descriptor, aligned[at:])
        at -= at % SECTOR if at < aligned.nbytes else 0
    os.ftruncate(descriptor, nbytes)


def read_direct(path: Path, take: Callable[[int], memoryview]) -> Buffer:
    """Read a file by direct I/O into an aligned buffer from ``take``, and renew its modification time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT)
    try:
        with contextlib.suppress(OSError):
            os.utime(descriptor)
        nbytes = os.fstat(descriptor).st_size
        view, at = take(nbytes), 0
        while at < nbytes and (num_read := os.preadv(descriptor, [view[at:]], at)):
            at += num_read
        return view[: min(at, nbytes)]
    finally:
        os.close(descriptor)
