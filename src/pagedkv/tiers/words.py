"""The words of a store: keys of entries, settings, actions and faults, answers and events.

A core, its driver and its callers share them. Keys are 32 bytes each: rows of an array for compiled loops, and bytes
for dictionaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import as_choice, as_count, as_number
from pagedkv.contract.arrays import Uint32Array
from pagedkv.contract.space_config import DEFAULT_EVICTION, EVICTION_POLICIES
from pagedkv.errors import ConfigurationError

KEY_NBYTES: Final = 32
ZERO_KEY: Final = bytes(KEY_NBYTES)
NUM_AXES: Final = 2


def as_keys(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return keys, uint8 ``[n, 32]``, as a contiguous array. Raises ConfigurationError for other shapes or types."""
    is_array = isinstance(keys, np.ndarray)
    if not is_array or keys.dtype != np.uint8 or keys.ndim != NUM_AXES or keys.shape[1] != KEY_NBYTES:
        kind = f"{keys.dtype} {keys.shape}" if is_array else type(keys).__name__
        raise ConfigurationError(f"keys must be uint8 [n, {KEY_NBYTES}], got {kind}")
    return np.ascontiguousarray(keys)


def names_of(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """Turn keys, uint8 ``[n, 32]``, into bytes. O(n)."""
    return [row.tobytes() for row in keys]


def words_of(keys: npt.NDArray[np.uint8]) -> Uint32Array:
    """Turn keys, uint8 ``[n, 32]``, into words, uint32 ``[n, 8]``."""
    return np.ascontiguousarray(keys, np.uint8).view(">u4").astype(np.uint32)


def array_of(names: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Put keys into an array: uint8 ``[n, 32]``."""
    return np.frombuffer(b"".join(names), np.uint8).reshape(len(names), KEY_NBYTES)


ADMISSIONS: Final = ("second-offer", "always")
MOST_NBYTES: Final = 2**62
SIZES: Final = {
    "cap_nbytes": (1, MOST_NBYTES),
    "max_entries": (1, 2**31 - 2),
    "floor_nbytes": (0, MOST_NBYTES),
    "max_reads": (1, 2**16),
    "max_writes": (1, 2**16),
    "max_deletes": (1, 2**16),
    "max_queued_nbytes": (0, MOST_NBYTES),
    "breaker_failures": (1, 2**31 - 1),
    "max_events": (0, 2**31 - 1),
}
TIMES: Final = ("read_timeout_s", "write_timeout_s", "breaker_pause_s", "breaker_longest_pause_s", "full_pause_s")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of a store; checked when built.

    Args:
        cap_nbytes: most bytes of entries, including those being written or deleted and foreign files of the root.
        max_entries: most entries; about 98 bytes of index each.
        floor_nbytes: bytes of the medium that stay free.
        eviction: the eviction policy, as in ``SpaceConfig.eviction``.
        admission: "second-offer" stores content that is offered a second time; "always" stores all.
        max_reads, max_writes, max_deletes: actions in flight at once.
        max_queued_nbytes: most bytes of offered content that waits; further offers are dropped.
        read_timeout_s, write_timeout_s: seconds after which an action in flight counts as failed; deletes as writes.
        breaker_failures: failures in a row that open the circuit breaker.
        breaker_pause_s, breaker_longest_pause_s: its pauses.
        full_pause_s: how long nothing is written after the medium was full.
        salt_share: most bytes of entries under one salt, as a share of ``cap_nbytes``; a salt at its share evicts its
            own entries. 1: no such cap. Content without a salt has none.
        max_events: most events kept until drained, beyond which the oldest are lost; 0: none is recorded.

    Raises:
        ConfigurationError: a setting out of range.
    """

    cap_nbytes: int
    max_entries: int
    floor_nbytes: int = 0
    eviction: str = DEFAULT_EVICTION
    admission: str = "second-offer"
    max_reads: int = 8
    max_writes: int = 4
    max_deletes: int = 16
    max_queued_nbytes: int = 256 * 2**20
    read_timeout_s: float = 2.0
    write_timeout_s: float = 10.0
    breaker_failures: int = 5
    breaker_pause_s: float = 1.0
    breaker_longest_pause_s: float = 60.0
    full_pause_s: float = 1.0
    salt_share: float = 1.0
    max_events: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=least, most=most))
        for name in TIMES:
            seconds = as_number(getattr(self, name), name)
            if seconds <= 0:
                raise ConfigurationError(f"{name} must be above 0, got {seconds}")
            object.__setattr__(self, name, seconds)
        share = as_number(self.salt_share, "salt_share")
        if not 0 < share <= 1:
            raise ConfigurationError(f"salt_share must be above 0 and at most 1, got {share}")
        object.__setattr__(self, "salt_share", share)
        as_choice(self.eviction, EVICTION_POLICIES, "eviction")
        as_choice(self.admission, ADMISSIONS, "admission")


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
