"""What a block contains, and its identity: a SHA-256 chain over parent, tokens and extra keys.

Digests are the same on every machine. The message of a block, all integers little-endian::

    parent digest (32 bytes) | number of tokens, uint32 | tokens, int32 each | extra keys, as encoded

The parent of a sequence's first block is ``ROOT_DIGEST``, the hash of this encoding's name; a change of
the encoding changes that name. Where names cover tokens ahead, the tokens of a message are the block's and those ahead,
which the next block has as well, and the encoding's name has their number: no digest of one chain occurs in another.
``hash_block_tokens`` and ``hash_request_tokens`` are the plain reference, for users and for other cache tiers. The
compiled loops below give the same bytes (tested) for whole batches of rows, without a Python object for each block.

Extra keys are encoded as in :mod:`pagedkv.contract.keys`, where each call encodes one block. Here one pass writes the
media of all blocks into one array, each medium into the keys of all blocks that it overlaps, in the request's order::

    key of block 0                      | key of block 3     | key of block 4
    medium 0 | medium 2 | medium 1      | medium 1           | medium 1 | medium 3

Every distinct encoding gets a small id that a block's record can store. Equal ids mean equal bytes, so a hit's extra
keys are verified by one comparison. The ids of encodings that no block has any more are reused, so that a million
different salts do not grow the table.

A pool records the tokens, digests and extra keys of its blocks. By the arrays ``tokens`` and ``digests`` hits are
verified and found; ``parent_digests`` are for events. Names are set by :mod:`~pagedkv.blocks.prefix_index`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.record import EXTRA, PoolArrays
from pagedkv.blocks.sha256 import sha256_message
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arguments import as_count, as_token_array
from pagedkv.contract.arrays import DIGEST_NBYTES, DIGEST_WORDS, Int32Array, Int64Array, Uint8Array, Uint32Array
from pagedkv.contract.keys import MEDIA, NO_KEYS, MediaArrays, RequestKeys
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError

ROOT_DIGEST: Final = hashlib.sha256(b"pagedkv block chain 1").digest()
ROOT_WORDS: Final = np.frombuffer(ROOT_DIGEST, ">u4").astype(np.uint32)


def root_digest(num_ahead: int = 0) -> bytes:
    """Return the parent of first blocks whose names cover so many tokens ahead: ``ROOT_DIGEST`` for none."""
    return hashlib.sha256(f"pagedkv block chain 1, {num_ahead} ahead".encode()).digest() if num_ahead else ROOT_DIGEST


def hash_block_tokens(parent_digest: bytes, token_ids: TokenIds, extra_keys: bytes = b"") -> bytes:
    """Digest of one full block.

    Args:
        parent_digest: digest of the block before it; ``ROOT_DIGEST`` for a first block.
        token_ids: the block's tokens, int32 ``[block_size]``.
        extra_keys: encoded keys (:class:`~pagedkv.contract.keys.RequestKeys`), empty for most blocks.

    Raises:
        ConfigurationError: a parent's digest that is not 32 bytes, or extra keys that are not bytes.
        TokenError: token ids that are not int32.

    >>> hash_block_tokens(ROOT_DIGEST, [1, 2, 3, 4]).hex()[:16]
    'a4e76dd5e10ec71c'
    """
    if not isinstance(parent_digest, bytes) or len(parent_digest) != DIGEST_NBYTES:
        raise ConfigurationError(
            f"parent_digest comes first, {DIGEST_NBYTES} bytes, ROOT_DIGEST for a first block; got {parent_digest!r}"
        )
    if not isinstance(extra_keys, bytes):
        raise ConfigurationError(f"extra_keys must be encoded keys, as bytes, got {extra_keys!r}")
    tokens = as_token_array(token_ids).astype("<i4")
    message = parent_digest + len(tokens).to_bytes(4, "little") + tokens.tobytes() + extra_keys
    return hashlib.sha256(message).digest()


def hash_request_tokens(
    token_ids: TokenIds,
    block_size: int,
    keys: RequestKeys = NO_KEYS,
    weights_epoch: str = "",
    *,
    num_ahead: int = 0,
) -> list[bytes]:
    """Digests of all full blocks of a request, first to last. O(tokens).

    With ``num_ahead``, those of a group whose names cover so many tokens ahead: only blocks behind which so many tokens
    are known. In other libraries, the function of this name takes the block size first, or a hash function before it.

    Raises:
        ConfigurationError: a block size below 1, ``num_ahead`` below 0, keys that are no RequestKeys, or arguments in
            another order.
        TokenError: token ids that are not int32.
    """
    if callable(token_ids) or isinstance(token_ids, int | np.integer) or not isinstance(block_size, int | np.integer):
        raise ConfigurationError(
            "the order is hash_request_tokens(token_ids, block_size, keys, weights_epoch), without a hash function: "
            f"got {_kind(token_ids)} for token_ids and {_kind(block_size)} for block_size"
        )
    block_size = as_count(block_size, "block_size", least=1)
    if not isinstance(keys, RequestKeys) or not isinstance(weights_epoch, str):
        raise ConfigurationError(f"keys must be RequestKeys and weights_epoch text, got {keys!r} and {weights_epoch!r}")
    num_ahead = as_count(num_ahead, "num_ahead")
    tokens, covered = as_token_array(token_ids), block_size + num_ahead
    digests: list[bytes] = []
    parent = root_digest(num_ahead)
    for start in range(0, len(tokens) - covered + 1, block_size):
        extra = keys.media_key(start, start + covered)
        if start == 0:
            extra = keys.first_block_key(weights_epoch) + extra
        parent = hash_block_tokens(parent, tokens[start : start + covered], extra)
        digests.append(parent)
    return digests


def _kind(argument: object) -> str:
    return f"{argument!r}" if isinstance(argument, int) else type(argument).__name__


def words_of_digests(digests: npt.ArrayLike, num_blocks: int) -> Uint32Array:
    """Turn digests from a caller (uint8 ``[num_blocks, 32]``) into words, ``[num_blocks, 8]``."""
    as_bytes = np.ascontiguousarray(digests, np.uint8).reshape(num_blocks, DIGEST_NBYTES)
    return as_bytes.view(">u4").astype(np.uint32)


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


@inlined
def digest_block(
    parent: Uint32Array,
    tokens: Int32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
    out: Uint32Array,
) -> None:
    """Digest one block into ``out``."""
    message = extra_keys.message
    words = message.view(np.uint32)
    for word in range(DIGEST_WORDS):
        value = parent[word]
        words[word] = (
            (value >> np.uint32(24))
            | ((value >> np.uint32(8)) & np.uint32(0xFF00))
            | ((value << np.uint32(8)) & np.uint32(0xFF0000))
            | (value << np.uint32(24))
        )
    words[DIGEST_WORDS] = len(tokens)
    signed = words.view(np.int32)
    for index in range(len(tokens)):
        signed[DIGEST_WORDS + 1 + index] = tokens[index]
    length = DIGEST_NBYTES + 4 + 4 * len(tokens)
    begin, end = extra_keys.bounds[extra]
    for index in range(end - begin):
        message[length + index] = extra_keys.data[begin + index]
    sha256_message(message, length + end - begin, out)


@compiled
def digest_prompt(
    tokens: Int32Array,
    block_size: int,
    num_blocks: int,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    out: Uint32Array,
) -> None:
    """Digest the first ``num_blocks`` full blocks of a prompt into ``out``."""
    digest_covered(tokens, block_size, block_size, ROOT_WORDS, num_blocks, extra_ids, extra_keys, out)


@compiled
def digest_covered(
    tokens: Int32Array,
    block_size: int,
    covered: int,
    root: Uint32Array,
    num_blocks: int,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    out: Uint32Array,
) -> None:
    """Digest the first ``num_blocks`` full blocks of a prompt into ``out``, by names that may cover tokens ahead.

    Args:
        covered: tokens that each name covers, from its block's first one on: the block size, or more.
        root: the parent of the first block.
    """
    parent = root
    for index in range(num_blocks):
        extra = extra_ids[index] if index < len(extra_ids) else 0
        block_tokens = tokens[index * block_size : index * block_size + covered]
        digest_block(parent, block_tokens, extra_keys, extra, out[index])
        parent = out[index]


NUM_FIELDS: Final = 2
POSITION_NBYTES: Final = 16
HEAD_NBYTES: Final = 2 + 4 + POSITION_NBYTES + 4  # bytes before a medium's digest


def keys_of_blocks(
    keys: RequestKeys, weights_epoch: str, block_size: int, first: int, stop: int, num_ahead: int = 0
) -> dict[int, bytes]:
    """Encode the extra keys of logical blocks ``[first, stop)``; blocks without any are left out.

    Media that begin in the ``num_ahead`` tokens behind a block belong to it as well. O(media + blocks from the first to
    the last that media overlap).
    """
    encodings = _media_keys(keys.media_arrays, block_size, first, stop, num_ahead) if keys.media else {}
    if first == 0 and stop > 0:
        whole = keys.first_block_key(weights_epoch)
        if whole:
            encodings[0] = whole + encodings.get(0, b"")
    return encodings


def _media_keys(media: MediaArrays, block_size: int, first: int, stop: int, num_ahead: int) -> dict[int, bytes]:
    first = max(first, (media.begin - num_ahead) // block_size)
    stop = min(stop, -(-media.end // block_size))
    if first >= stop:
        return {}
    begins = np.zeros(stop - first + 1, np.int64)
    _measure(media, block_size, num_ahead, first, begins)
    bounds = begins.tolist()
    data = np.empty(bounds[-1], np.uint8)
    _encode(media, block_size, num_ahead, first, begins, data)
    encoded = data.tobytes()
    return {index: encoded[begin:end] for index, (begin, end) in enumerate(pairwise(bounds), first) if begin < end}


@compiled
def _measure(media: MediaArrays, block_size: int, num_ahead: int, first: int, begins: Int64Array) -> None:
    """Compute where the key of each block from ``first`` on begins; the last entry is the total length."""
    stop = first + len(begins) - 1
    for span in range(len(media.starts)):
        nbytes = HEAD_NBYTES + media.bounds[span + 1] - media.bounds[span]
        begin = max(first, (media.starts[span] - num_ahead) // block_size)
        for index in range(begin, min(stop, -(-media.ends[span] // block_size))):
            begins[index - first + 1] += nbytes
    for index in range(1, len(begins)):
        begins[index] += begins[index - 1]


@compiled
def _encode(
    media: MediaArrays, block_size: int, num_ahead: int, first: int, cursors: Int64Array, out: Uint8Array
) -> None:
    """Write the keys of all blocks. On entry ``cursors`` are the beginnings of the keys; on return, their ends."""
    stop = first + len(cursors) - 1
    for span in range(len(media.starts)):
        begin, end = media.bounds[span], media.bounds[span + 1]
        touched = max(first, (media.starts[span] - num_ahead) // block_size)
        for index in range(touched, min(stop, -(-media.ends[span] // block_size))):
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


NO_EXTRA: Final = 0
MESSAGE_NBYTES: Final = 256  # more than enough for parent, length and SHA-256's padding; tokens and keys are added


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


@inlined
def copy_content(source: PoolArrays, block: int, destination: PoolArrays, place: int, num_tokens: int) -> None:
    """Copy the recorded extra keys and tokens of a block to another, here or on the other side (host or device)."""
    destination.records[place, EXTRA] = source.records[block, EXTRA]
    for slot in range(num_tokens):
        destination.tokens[place, slot] = source.tokens[block, slot]


@inlined
def set_digest(pool: PoolArrays, block: int, digest: Uint32Array) -> None:
    """Record a block's digest."""
    for word in range(DIGEST_WORDS):
        pool.digests[block, word] = digest[word]


@inlined
def set_parent(pool: PoolArrays, block: int, digest: Uint32Array) -> None:
    """Record the digest of the block before a block, in a pool that keeps it."""
    for word in range(DIGEST_WORDS):
        pool.parent_digests[block, word] = digest[word]


@inlined
def copy_digest(source: PoolArrays, block: int, destination: PoolArrays, place: int) -> None:
    """Copy the recorded digests of a block and its parent to another block, in any pool or on the other side."""
    set_digest(destination, place, source.digests[block])
    if len(source.parent_digests):
        set_parent(destination, place, source.parent_digests[block])


def set_digests(pool: PoolArrays, block_ids: Int32Array, chain: Uint32Array) -> None:
    """Record the digests of a sequence's last blocks.

    Args:
        block_ids: int32 ``[blocks]``.
        chain: uint32 ``[at least blocks, 8]``, the digests of the whole sequence.
    """
    first = len(chain) - len(block_ids)
    pool.digests[block_ids] = chain[first:]
    if len(pool.parent_digests):
        pool.parent_digests[block_ids] = np.concatenate([ROOT_WORDS[np.newaxis], chain])[first:-1]


def without_root(parents: Uint32Array) -> Uint32Array:
    """Return digests of parents, uint32 ``[n, 8]``, with zeros for the root: events and snapshots contain them so."""
    return np.where((parents == ROOT_WORDS).all(axis=1, keepdims=True), np.uint32(0), parents)
