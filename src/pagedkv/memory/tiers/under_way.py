"""What is under way in a store: offers and writes, as records that the core changes."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["InFlight", "Offer", "Writing"]


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

    writes: dict[int, Writing] = field(default_factory=dict)
