"""Interned extra keys: every distinct encoding gets a small id that a block's record can store.

Equal ids mean equal bytes, so a hit's extra keys are verified by one comparison. The ids of encodings that no
block has any more are reused, so that a million different salts do not grow the table.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.blocks import DIGEST_WORDS
from pagedkv.contract.arrays import Int64Array, Uint8Array, Uint32Array

__all__ = ["NO_EXTRA", "ExtraKeyArrays", "ExtraKeyTable"]

NO_EXTRA: Final = 0


MESSAGE_NBYTES: Final = 256  # more than enough for parent, length and SHA-256's padding; tokens and keys are added


class ExtraKeyArrays(NamedTuple):
    """The inputs of a block's digest besides the block, as arrays for compiled loops.

    Args:
        data: uint8; the encoding of key i is ``data[bounds[i, 0] : bounds[i, 1]]``.
        bounds: int64 ``[keys, 2]``.
        message: uint8, scratch memory with room for the message of any block.
        digest: uint32 ``[8]``, scratch.
    """

    data: Uint8Array
    bounds: Int64Array
    message: Uint8Array
    digest: Uint32Array


class ExtraKeyTable:
    """The table of extra keys and their ids. Id 0 means "no extra keys"."""

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
        """Return the id of an encoding, or None if no block has it. Changes nothing. O(1)."""
        return self._ids.get(encoding)

    def encoding_of(self, key_id: int) -> bytes:
        """Return the encoding of an id that is in use. O(length)."""
        begin, end = self.arrays.bounds[key_id].tolist()
        return self.arrays.data[begin:end].tobytes()

    @property
    def num_ids(self) -> int:
        """One more than the largest id given so far, whether in use or vacant."""
        return len(self._ids) + len(self._vacant)

    def intern_all(self, encodings: Sequence[bytes]) -> list[int]:
        """Return the ids of many encodings, which may be new. O(length of all), amortised."""
        known = self._ids
        new: dict[bytes, int] = {}
        for encoding in encodings:
            if encoding not in known:
                known[encoding] = new[encoding] = self._vacant.pop() if self._vacant else len(known)
        if new:
            self._write(new)
        return [known[encoding] for encoding in encodings]

    def retain(self, used_ids: Iterable[int]) -> None:
        """Remove all keys except these and the empty one."""
        used = {NO_EXTRA, *used_ids}
        kept = {encoding: key_id for encoding, key_id in self._ids.items() if key_id in used}
        self._vacant += [key_id for key_id in self._ids.values() if key_id not in used]
        self._ids = kept
        self._end = 0
        self.arrays = self._arrays(np.zeros(0, np.uint8), np.zeros((1, 2), np.int64))
        self._write(kept)

    def _write(self, ids: dict[bytes, int]) -> None:
        """Append encodings to the data, and record their bounds by id."""
        data, bounds, *_ = self.arrays
        key_ids = np.fromiter(ids.values(), np.int64, len(ids))
        ends = self._end + np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)))
        end, most = int(ends[-1]), int(key_ids.max())
        if end > len(data):
            data = np.concatenate([data, np.zeros(max(end - len(data), len(data), 256), np.uint8)])
        if most >= len(bounds):
            bounds = np.concatenate([bounds, np.zeros((max(most + 1 - len(bounds), len(bounds)), 2), np.int64)])
        data[self._end : end] = np.frombuffer(b"".join(ids), np.uint8)
        bounds[key_ids, 0] = np.append(self._end, ends[:-1])
        bounds[key_ids, 1] = ends
        self._end = end
        if data is not self.arrays.data or bounds is not self.arrays.bounds:
            self.arrays = self._arrays(data, bounds)

    def _arrays(self, data: Uint8Array, bounds: Int64Array) -> ExtraKeyArrays:
        message = np.zeros(MESSAGE_NBYTES + 4 * self._block_size + (len(data) + 3) // 4 * 4, np.uint8)
        return ExtraKeyArrays(data, bounds, message, np.zeros(DIGEST_WORDS, np.uint32))
