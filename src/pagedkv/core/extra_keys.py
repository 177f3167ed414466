"""Extra keys, interned: every different encoding gets a small id that a block's record can hold.

Equal ids mean equal bytes, so verifying a hit's extra keys is one comparison. Ids of encodings that no
block carries any more are given to new ones, so that a million different salts do not grow the table.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from pagedkv.core.blocks import DIGEST_WORDS, Int64Array, Uint8Array, Uint32Array

__all__ = ["NO_EXTRA", "ExtraKeyArrays", "ExtraKeyTable"]

NO_EXTRA: Final = 0


MESSAGE_NBYTES: Final = 256  # parent, length and SHA-256's padding, generously; tokens and keys come on top


class ExtraKeyArrays(NamedTuple):
    """What digesting a block takes besides the block, as compiled loops take it.

    Args:
        data: uint8; the encoding of key i is ``data[bounds[i, 0] : bounds[i, 1]]``.
        bounds: int64 ``[keys, 2]``.
        message: uint8, scratch in which the message of any block fits.
        digest: uint32 ``[8]``, scratch.
    """

    data: Uint8Array
    bounds: Int64Array
    message: Uint8Array
    digest: Uint32Array


class ExtraKeyTable:
    """Owner of the ids of extra keys. Id 0 is "no extra key"."""

    def __init__(self, block_size: int) -> None:
        """Start with no keys, for blocks of at most ``block_size`` tokens."""
        self._block_size = block_size
        self._ids: dict[bytes, int] = {b"": NO_EXTRA}
        self._vacant: list[int] = []
        self._end = 0
        self.arrays = self._arrays(np.zeros(0, np.uint8), np.zeros((1, 2), np.int64))

    def __len__(self) -> int:
        """Count the keys that have an id, the empty one included."""
        return len(self._ids)

    def id_of(self, encoding: bytes) -> int | None:
        """Tell the id of an encoding, or None when no block can carry it. Changes nothing. O(1)."""
        return self._ids.get(encoding)

    def intern(self, encoding: bytes) -> int:
        """Give an encoding its id. O(length), amortised."""
        known = self._ids.get(encoding)
        if known is not None:
            return known
        new_id = self._vacant.pop() if self._vacant else len(self._ids)  # ids in use and vacant are 0..n-1
        self._ids[encoding] = new_id
        self._write(new_id, encoding)
        return new_id

    def retain(self, used_ids: Iterable[int]) -> None:
        """Forget every key but these (and the empty one)."""
        used = {NO_EXTRA, *used_ids}
        kept = {encoding: key_id for encoding, key_id in self._ids.items() if key_id in used}
        self._vacant += [key_id for key_id in self._ids.values() if key_id not in used]
        self._ids = kept
        self.arrays = self._arrays(np.zeros(0, np.uint8), np.zeros((1, 2), np.int64))
        self._end = 0
        for encoding, key_id in kept.items():
            self._write(key_id, encoding)

    def _write(self, key_id: int, encoding: bytes) -> None:
        data, bounds, *_ = self.arrays
        end = self._end + len(encoding)
        if end > len(data):
            data = np.concatenate([data, np.zeros(max(end - len(data), len(data), 256), np.uint8)])
        if key_id >= len(bounds):
            bounds = np.concatenate([bounds, np.zeros((max(key_id + 1 - len(bounds), len(bounds)), 2), np.int64)])
        data[self._end : end] = np.frombuffer(encoding, np.uint8)
        bounds[key_id] = self._end, end
        self._end = end
        self.arrays = self._arrays(data, bounds)

    def _arrays(self, data: Uint8Array, bounds: Int64Array) -> ExtraKeyArrays:
        message = np.zeros(MESSAGE_NBYTES + 4 * self._block_size + (len(data) + 3) // 4 * 4, np.uint8)
        return ExtraKeyArrays(data, bounds, message, np.zeros(DIGEST_WORDS, np.uint32))
