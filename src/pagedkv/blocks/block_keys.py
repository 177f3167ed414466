"""The extra keys of a request, block by block, in one pass over its media.

The encoding is that of :mod:`pagedkv.contract.keys`, where each call encodes one block. Here one pass writes
the media of all blocks into one array, each medium into the keys of all blocks that it overlaps, in the request's
order::

    key of block 0                      | key of block 3     | key of block 4
    medium 0 | medium 2 | medium 1      | medium 1           | medium 1 | medium 3
"""

from itertools import pairwise
from typing import Final

import numpy as np

from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int64Array, Uint8Array
from pagedkv.contract.keys import MEDIA, MediaArrays, RequestKeys

__all__ = ["keys_of_blocks"]

NUM_FIELDS: Final = 2
POSITION_NBYTES: Final = 16
HEAD_NBYTES: Final = 2 + 4 + POSITION_NBYTES + 4  # bytes before a medium's digest


def keys_of_blocks(keys: RequestKeys, weights_epoch: str, block_size: int, first: int, stop: int) -> dict[int, bytes]:
    """Encode the extra keys of logical blocks ``[first, stop)``; blocks without any are left out.

    O(media + blocks from the first to the last that media overlap).
    """
    encodings = _media_keys(keys.media_arrays, block_size, first, stop) if keys.media else {}
    if first == 0 and stop > 0:
        whole = keys.first_block_key(weights_epoch)
        if whole:
            encodings[0] = whole + encodings.get(0, b"")
    return encodings


def _media_keys(media: MediaArrays, block_size: int, first: int, stop: int) -> dict[int, bytes]:
    first = max(first, media.begin // block_size)
    stop = min(stop, -(-media.end // block_size))
    if first >= stop:
        return {}
    begins = np.zeros(stop - first + 1, np.int64)
    _measure(media, block_size, first, begins)
    bounds = begins.tolist()
    data = np.empty(bounds[-1], np.uint8)
    _encode(media, block_size, first, begins, data)
    encoded = data.tobytes()
    return {index: encoded[begin:end] for index, (begin, end) in enumerate(pairwise(bounds), first) if begin < end}


@compiled
def _measure(media: MediaArrays, block_size: int, first: int, begins: Int64Array) -> None:
    """Compute where the key of each block from ``first`` on begins; the last entry is the total length."""
    stop = first + len(begins) - 1
    for span in range(len(media.starts)):
        nbytes = HEAD_NBYTES + media.bounds[span + 1] - media.bounds[span]
        for index in range(max(first, media.starts[span] // block_size), min(stop, -(-media.ends[span] // block_size))):
            begins[index - first + 1] += nbytes
    for index in range(1, len(begins)):
        begins[index] += begins[index - 1]


@compiled
def _encode(media: MediaArrays, block_size: int, first: int, cursors: Int64Array, out: Uint8Array) -> None:
    """Write the keys of all blocks. On entry ``cursors`` are the beginnings of the keys; on return, their ends."""
    stop = first + len(cursors) - 1
    for span in range(len(media.starts)):
        begin, end = media.bounds[span], media.bounds[span + 1]
        for index in range(max(first, media.starts[span] // block_size), min(stop, -(-media.ends[span] // block_size))):
            at = cursors[index - first]
            out[at] = MEDIA
            out[at + 1] = NUM_FIELDS
            _write_integer(out, at + 2, POSITION_NBYTES, 4)
            _write_integer(out, at + 6, media.starts[span] - index * block_size, 8)
            _write_integer(out, at + 14, media.ends[span] - media.starts[span], 8)
            _write_integer(out, at + 22, end - begin, 4)
            for place in range(end - begin):
                out[at + HEAD_NBYTES + place] = media.digests[begin + place]
            cursors[index - first] = at + HEAD_NBYTES + end - begin


@inlined
def _write_integer(out: Uint8Array, at: int, value: int, nbytes: int) -> None:
    """Write an integer, least significant byte first, as two's complement."""
    for place in range(nbytes):
        out[at + place] = (value >> (8 * place)) & 0xFF
