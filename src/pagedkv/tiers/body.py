"""Bodies: where the bytes of a store are kept. One small protocol, and what its implementations share.

A body stores frames by key. It decides nothing: caps, admission, retries, deadlines and verification belong to the core
and its driver. Its methods block, are called from several threads at once, and fail with ``OSError`` (``TimeoutError``
among them), never with another class.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pagedkv.tiers.actions import Fault
from pagedkv.tiers.checksums import Buffer

__all__ = ["Body", "Stored", "Usage", "brief", "fault_of", "key_of_name", "name_of_key", "without_secrets"]

KEY_NBYTES: Final = 32
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
