"""Admission by second offer: content is stored when it is offered for the second time.

Most blocks of a trace never recur, so a store that wrote all of them would wear its disk in vain. The table has 16-bit
fragments of the keys that were offered once, in sets of eight, the latest first; a new fragment replaces the oldest of
its set. In one of 8,000 offers a fragment matches by accident, and an entry is stored at its first offer. Hits do not
depend on the table.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Uint32Array

__all__ = ["OfferedOnce"]

WAYS: Final = 8
FRAGMENT_MASK: Final = 0xFFFF
SPREAD: Final = 0x9E3779B1
WORD: Final = 2**32 - 1
WORD_BITS: Final = 32


@compiled
def _note_offers(table: npt.NDArray[np.uint16], keys: Uint32Array, was_offered: npt.NDArray[np.uint8]) -> None:
    """Record the keys, and write to ``was_offered`` which of them the table had before."""
    for place in range(len(keys)):
        mixed = ((int(keys[place, 0]) ^ int(keys[place, 2])) * SPREAD) & WORD
        row = (mixed * len(table)) >> WORD_BITS
        fragment = (int(keys[place, 1]) ^ int(keys[place, 3])) & FRAGMENT_MASK
        if fragment == 0:
            fragment = 1
        way = 0
        while way < WAYS - 1 and table[row, way] != fragment:
            way += 1
        was_offered[place] = table[row, way] == fragment
        while way > 0:
            table[row, way] = table[row, way - 1]
            way -= 1
        table[row, 0] = fragment


class OfferedOnce:
    """The keys that were offered recently.

    Args:
        num_keys: keys that the table has room for, rounded up to whole sets; 2 bytes each.
    """

    def __init__(self, num_keys: int) -> None:
        self._table = np.zeros((-(-num_keys // WAYS), WAYS), np.uint16)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def note(self, keys: Uint32Array) -> npt.NDArray[np.bool_]:
        """Record keys, uint32 ``[n, 8]``, and return which were offered before. O(n)."""
        was_offered = np.zeros(len(keys), np.uint8)
        _note_offers(self._table, keys, was_offered)
        return was_offered.astype(bool)
