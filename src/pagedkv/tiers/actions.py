"""The words between a store core, its driver and its callers: actions, faults and answers."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Action",
    "Answer",
    "Delete",
    "Fault",
    "LoadEnd",
    "Loaded",
    "Offered",
    "Read",
    "StoreEventKind",
    "StoreEvents",
    "StoreOutcome",
    "Write",
]


@dataclass(frozen=True, slots=True)
class Read:
    """Read and verify the frame of a key.

    Args:
        action: number, to be reported.
        key: 32 bytes.
        nbytes: its size as the index has it.
        deadline_s: by the core's steady clock; a later result is used by no request.
    """

    action: int
    key: bytes
    nbytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Write:
    """Write a frame so that it appears whole or not at all.

    Args:
        action: number, to be reported.
        key: 32 bytes.
        nbytes: its size.
        offer, place: the content: that many in the keys of that offer.
        deadline_s: by the core's steady clock.
    """

    action: int
    key: bytes
    nbytes: int
    offer: int
    place: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete what is stored under a key, if anything is.

    Args:
        action: number, to be reported.
        key: 32 bytes.
        deadline_s: by the core's steady clock.
    """

    action: int
    key: bytes
    deadline_s: float


Action: TypeAlias = Read | Write | Delete


class Fault(StrEnum):
    """Why an action failed.

    ``GONE``: nothing is stored under the key. ``CORRUPT``: the frame was refused. ``FULL``: no space. ``TIMEOUT`` and
    ``IO``: the body is slow or broken, which the circuit breaker counts.
    """

    GONE = "gone"
    CORRUPT = "corrupt"
    FULL = "full"
    TIMEOUT = "timeout"
    IO = "io"


class LoadEnd(StrEnum):
    """Why the entry behind what was loaded was not."""

    NONE = "none"
    ABSENT = "absent"
    LATE = "late"
    GONE = "gone"
    CORRUPT = "corrupt"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    OUT_OF_SERVICE = "out of service"


class StoreOutcome(StrEnum):
    """What became of an offered entry."""

    STORED = "stored"
    PRESENT = "present"
    NOT_ADMITTED = "not admitted"
    BUSY = "busy"
    NO_ROOM = "no room"
    LATE = "late"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    OUT_OF_SERVICE = "out of service"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to a load.

    Args:
        ticket: the ticket of the load.
        num_entries: leading keys whose entries were loaded and verified.
        cause: why the next one was not; NONE if all were.
        nbytes: their bytes.
        wait_s: seconds from the begin of the load to its answer.
    """

    ticket: int
    num_entries: int
    cause: LoadEnd
    nbytes: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Offered:
    """The answer to one key of an offer. The caller may release the content.

    Args:
        offer: the offer.
        place: index of the key.
        outcome: what became of it.
    """

    offer: int
    place: int
    outcome: StoreOutcome


Answer: TypeAlias = Loaded | Offered


class StoreEventKind(IntEnum):
    """What happened to an entry."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3
    GAP = 4


@dataclass(frozen=True, slots=True)
class StoreEvents:
    """Events of a store, oldest first; a GAP comes first if older ones were lost.

    Args:
        kinds: int32 ``[n]``, values of :class:`StoreEventKind`.
        keys: uint8 ``[n, 32]``; zeros for CLEARED and GAP.
    """

    kinds: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        """Count the events."""
        return len(self.kinds)
