"""What is under way in a store: asks, reads, offers and writes, as records that the core changes."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.memory.tiers.actions import LoadEnd

__all__ = ["InFlight", "Offer", "Reading", "Ticket", "Writing"]


@dataclass(slots=True)
class Ticket:
    """An ask: ``limit`` leading keys can still be loaded, ``num_leading`` of them are, ``cause`` ends them."""

    keys: list[bytes]
    entries: npt.NDArray[np.int32]
    is_done: bytearray
    sizes: npt.NDArray[np.int32]
    begun_s: float
    limit: int
    cause: LoadEnd
    num_leading: int = 0


@dataclass(slots=True)
class Reading:
    """The one read of a key: waiting asks with the place of the key in each. ``action`` is 0 while it is queued."""

    entry: int
    nbytes: int
    waiters: list[tuple[int, int]]
    action: int = 0
    begun_s: float = 0.0
    is_late: bool = False


@dataclass(slots=True)
class Offer:
    """An offer: the entries that it holds by place, and how many of its keys have no answer yet."""

    keys: list[bytes]
    sizes: list[int]
    parent: bytes
    held: npt.NDArray[np.int32]
    num_open: int


@dataclass(slots=True)
class Writing:
    """A write in flight, and the key of the entry that it continues.

    One that ``is_written`` succeeded and waits for the write of that entry to end.
    """

    key: bytes
    parent: bytes
    entry: int
    nbytes: int
    offer: int
    place: int
    is_late: bool = False
    is_doomed: bool = False
    is_written: bool = False


@dataclass(slots=True)
class InFlight:
    """Actions in flight, by their numbers."""

    reads: dict[int, bytes] = field(default_factory=dict)
    writes: dict[int, Writing] = field(default_factory=dict)
