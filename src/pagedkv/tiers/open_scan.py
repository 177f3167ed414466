"""OpenScan: what has changed in a store since a scan of its body began, while writes and deletes went on.

A scan takes long, so what it lists, or leaves out, may be older than the index. Two rules make its result safe:

- A key that was removed since the scan began may be listed although its content is deleted. It is not entered.
- An entry that was published since then may be left out although it is there. Only an entry that was in the index
  before, and was neither listed nor published since, has vanished.
"""

from collections.abc import Iterable
from typing import final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array

__all__ = ["OpenScan"]


@final
class OpenScan:
    """A scan under way.

    Args:
        max_entries: most entries of the index; one byte each while the scan is open.
        departing: keys whose deletes are not completed yet.
        purges: the store was reset since the last whole scan, so what the index does not have is older than the reset.

    Attributes:
        first_unseen: the entry up to which vanished ones were looked for.
    """

    def __init__(self, max_entries: int, departing: Iterable[bytes], *, purges: bool) -> None:
        self.purges = purges
        self.first_unseen = 1
        self._departed = set(departing)
        self._is_seen = np.zeros(max_entries + 1, np.bool_)

    def see(self, entries: Int32Array | int) -> None:
        """Note entries that were listed, or were published since the scan began."""
        self._is_seen[entries] = True

    def depart(self, key: bytes) -> None:
        """Note a key whose content is to be deleted."""
        self._departed.add(key)

    def has_departed(self, key: bytes) -> bool:
        """Whether a key may be listed although its content is deleted. Changes nothing."""
        return key in self._departed

    def unseen(self, entries: npt.NDArray[np.int64]) -> list[int]:
        """Return those of these entries that were neither listed nor published. Changes nothing."""
        return [int(entry) for entry in entries[~self._is_seen[entries]]]
