"""Bodies: where the bytes of a store are kept. One small protocol, what its implementations share, and host memory.

A body stores frames by key. It decides nothing: caps, admission, retries, deadlines and verification belong to the core
and its driver. Its methods block, are called from several threads at once, and fail with ``OSError`` (``TimeoutError``
among them), never with another class.

Buffers come from plain memory, or from pinned memory for an engine on a GPU. A body in this process's memory has one
buffer an entry. Its frames have identity and tokens, which are compared as in every body, but no check of the bytes,
since these never leave the process. Entries end with the process, and no shared memory and no file remains.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Protocol, final

import numpy as np

from pagedkv.tiers.frame import Buffer
from pagedkv.tiers.words import KEY_NBYTES, Fault

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
USER: Final = re.compile(r"(?<=//)\S*@")
"""User and password of a URL, whatever characters they have."""
QUERY: Final = re.compile(r"(?<=\w)\?\S*")
MOST_TEXT: Final = 300


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry that a scan found.

    Args:
        key: 32 bytes.
        nbytes: its size.
        used_s: when it was last written or used, on a clock of the body's own.
    """

    key: bytes
    nbytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a body occupies.

    Args:
        nbytes: bytes of the whole root, foreign ones included.
        free_nbytes: free bytes of the medium; None if the medium has no such number.
    """

    nbytes: int
    free_nbytes: int | None


class Body(Protocol):
    """Where the bytes of one store are kept.

    Attributes:
        medium: name of the medium, for statistics and receipts: "host", "folder", "redis", "object".
        is_trusted: the bytes never leave this process's memory, so frames carry no check.
        is_immediate: whether a read takes microseconds, so that the loading thread itself reads.
    """

    medium: str
    is_trusted: bool
    is_immediate: bool

    def scan(self) -> Iterator[Stored]:
        """List the entries, in any order. Foreign content is quarantined, or left alone where it is not the body's."""
        ...

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Read an entry of about ``nbytes``; None if it does not exist."""
        ...

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Write an entry from pieces, so that it appears whole or not at all."""
        ...

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete an entry; return whether there was one."""
        ...

    def usage(self) -> Usage:
        """Measure the bytes in use and the free bytes."""
        ...

    def close(self) -> None:
        """Release connections and file descriptors."""
        ...


def fault_of(problem: OSError) -> Fault:
    """Return the fault that an error of a body stands for."""
    if isinstance(problem, TimeoutError):
        return Fault.TIMEOUT
    return Fault.FULL if problem.errno in NO_SPACE else Fault.IO


def without_secrets(url: str) -> str:
    """Leave user, password and query out of a URL.

    >>> without_secrets("redis://:secret@localhost:6379/0?password=another")
    'redis://localhost:6379/0'
    """
    return QUERY.sub("", USER.sub("", url))


def brief(problem: Exception, url: str = "") -> str:
    """Return the message of a medium's error as one short line, without secrets of URLs, or parts of those of ``url``.

    >>> brief(OSError("GET redis://:secret@localhost failed"))
    'GET redis://localhost failed'
    """
    text = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    text = without_secrets(text)
    for secrets in USER.findall(url):
        for secret in filter(None, re.split("[:@/]", secrets)):
            text = text.replace(secret, "***")
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def name_of_key(key: bytes) -> str:
    """Return the name of a key in media whose names are texts: 64 hexadecimal digits."""
    return key.hex()


def key_of_name(name: str) -> bytes | None:
    """Return the key of a name, or None if the name is not that of a key."""
    is_ours = len(name) == 2 * KEY_NBYTES and set(name) <= set("0123456789abcdef")
    return bytes.fromhex(name) if is_ours else None


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
