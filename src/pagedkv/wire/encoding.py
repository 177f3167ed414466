r"""Changes of a cache as MessagePack, in the form of vLLM 0.33: copied, put in order, encoded.

The engine's thread only copies arrays, as :class:`Changes`. All work for each block is done by the publisher's thread.

A snapshot has every block after its parent, and the blocks of a chain together. A chain of blocks is one event on the
wire, which has the parent of its first block alone. If several blocks have the same parent, the first of them continues
the parent's chain, and each other one begins a chain::

    blocks          a - b - c - d          chains    a b c d
                         \- e - f                    e f

The order is computed by NumPy, since a snapshot may have a million blocks: one sort finds the parents, and log2(longest
chain) passes find the depth of every block.

Maps have vLLM's fields in vLLM's order, and fields with default values are left out as by vLLM, so that equal events
are equal bytes (``tests/peers`` compares them). A batch is ``[time, events, rank, lifetime]``. The fourth field is an
addition: vLLM's msgspec classes, and readers that skip fields after the third, ignore it. In a part of a snapshot a
fifth field is the number of blocks of the whole snapshot.

    block hashes    digests of 32 bytes
    parent          None for a first block; 32 zero bytes for an unknown parent; no block has this digest
    extra keys      for each block: name of the adapter, ``(digest, offset)`` of media, salt
    block_size      the tokens of a block: fewer than others for a state that is stored inside an interval

Entries of tiers are events of their medium without tokens, parents and extra keys, like vLLM's own events of offloaded
blocks: a hash is an entry's key, and ``block_size`` is the number of tokens of a run.

A block that is stored and evicted between two steps is in no event, since its tokens are gone and no prompt can hit it.
A clear removes all blocks, so events of a batch before a clear are left out.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias, assert_never, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import CLEARED, GAP, REMOVED, STORED, BlockContents, CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.arrays import DIGEST_NBYTES, BoolArray, Int32Array, Int64Array
from pagedkv.contract.extras import needing
from pagedkv.contract.keys import LORA, MEDIA, SALT, fields_of
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    keeps_state,
)
from pagedkv.wire.decoding import DEVICE, UNKNOWN_PARENT

with needing("record", "a stream of KV events"):
    import msgspec

BLOCKS_OF_PART: Final = 1000
"""Most blocks of a part of a snapshot, so that a part has some 100 KB."""
ExtraKeys: TypeAlias = list[tuple[Any, ...] | None]


def in_parent_order(blocks: StoredBlocks) -> Int64Array:
    """Return the indices of blocks in an order in which each follows its parent, if listed: int64 ``[n]``.

    Cost: O(n log n).
    """
    parents = _parents(blocks)
    count = len(parents)
    has_parent = parents < count
    continues = np.zeros(count, np.bool_)  # the first child of each parent
    children = np.flatnonzero(has_parent)
    _, firsts = np.unique(parents[children], return_index=True)
    continues[children[firsts]] = True
    depths, _ = _distances(parents)
    offsets, heads = _distances(np.where(continues, parents, count))
    return np.lexsort((offsets, heads, depths[heads]))


def _parents(blocks: StoredBlocks) -> Int64Array:
    """Return the index of each block's parent; the number of blocks for a parent that is not listed."""
    count = len(blocks)
    parents = np.full(count, count, np.int64)
    for group in np.unique(blocks.groups).tolist():
        members = np.flatnonzero(blocks.groups == group)
        names, wanted = _leading_words(blocks.digests[members]), _leading_words(blocks.parent_digests[members])
        order = np.argsort(names, kind="stable")
        places = order[np.minimum(np.searchsorted(names[order], wanted), len(members) - 1)]
        found = members[places]
        is_parent = (blocks.digests[found] == blocks.parent_digests[members]).all(axis=1)
        parents[members[is_parent]] = found[is_parent]
    return parents


def _leading_words(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the first 8 of the 32 bytes of each digest, for sorting; callers compare whole digests afterwards."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64).ravel()


def _distances(parents: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distance of each block from the root of its tree, and the root's index, by pointer jumping."""
    count = len(parents)
    roots = np.arange(count)
    distances = (parents < count).astype(np.int64)
    above = np.where(parents < count, parents, roots)
    while True:
        more = distances[above]
        if not more.any():
            return distances, above
        distances = distances + more
        above = above[above]


class CachedSpace(Protocol):
    """The methods of :class:`~pagedkv.BlockSpace` that this module calls; documented there."""

    @property
    def config(self) -> SpaceConfig: ...  # noqa: D102 - see above

    def contents_of(self, blocks: CacheEvents | StoredBlocks) -> BlockContents: ...  # noqa: D102

    def drain_events(self) -> tuple[CacheEvents, ...]: ...  # noqa: D102

    def stored_blocks(self, pool: str | None = None) -> StoredBlocks: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class ChangedPool:
    """Events of one pool, and the contents of its stored blocks."""

    events: CacheEvents
    contents: BlockContents


@dataclass(frozen=True, slots=True, eq=False)
class ListedPool:
    """All cached blocks of one pool, and their contents."""

    blocks: StoredBlocks
    contents: BlockContents


Changes: TypeAlias = tuple[ChangedPool | ListedPool | TierEvents, ...]
"""Events of pools; or all blocks of all pools, which replace all blocks that were sent before. And events of tiers."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """All cached blocks at one moment between two batches.

    Args:
        next_batch: number of the first batch whose events the snapshot does not contain.
        pools: the blocks of each pool.
        tiers: the entries of each medium below device memory.
    """

    next_batch: int
    pools: tuple[ListedPool, ...]
    tiers: tuple[TierEvents, ...] = ()


def changes_of(space: CachedSpace, events: Sequence[CacheEvents], tiers: Sequence[TierEvents] = ()) -> Changes:
    """Copy the contents of stored blocks. Changes nothing.

    If the space's log of events was too short (GAP), the result lists all blocks instead, so that consumers are
    complete again.

    Args:
        space: the space from which the events were drained.
        events: events of each pool, from :meth:`BlockSpace.drain_events <pagedkv.BlockSpace.drain_events>`; the space
            must not have changed since.
        tiers: events of each medium below device memory.

    Cost: O(events x block size); after a GAP O(blocks x block size).
    """
    if any((each.kinds == GAP).any() for each in events):
        return (*listed_pools(space), *tiers)
    changed = ((each, space.contents_of(each)) for each in events if len(each))
    return (
        *(ChangedPool(each, _without_ends(space.config.groups, each.groups, contents)) for each, contents in changed),
        *tiers,
    )


def _without_ends(groups: Sequence[GroupSpec], of_blocks: Int32Array, contents: BlockContents) -> BlockContents:
    """Count blocks that are kept for the end of a sequence as gone: who follows a cache counts whole blocks of keys."""
    sizes = np.array([0 if keeps_state(group) else group.block_size for group in groups], np.int32)
    is_end = contents.num_tokens < sizes[of_blocks]
    return replace(contents, num_tokens=np.where(is_end, 0, contents.num_tokens)) if is_end.any() else contents


def listed_pools(space: CachedSpace) -> tuple[ListedPool, ...]:
    """Copy all cached blocks of all pools. Changes nothing. O(blocks x block size)."""
    listed = [space.stored_blocks(pool) for pool in space.config.pool_names]
    return tuple(_whole_blocks(space, blocks, space.contents_of(blocks)) for blocks in listed)


def _whole_blocks(space: CachedSpace, blocks: StoredBlocks, contents: BlockContents) -> ListedPool:
    """Leave the ends of sequences out of a list."""
    num_tokens = _without_ends(space.config.groups, blocks.groups, contents).num_tokens
    kept = np.flatnonzero(num_tokens)
    if len(kept) == len(blocks):
        return ListedPool(blocks, contents)
    keys = {
        place: contents.extra_keys[index] for place, index in enumerate(kept.tolist()) if index in contents.extra_keys
    }
    return ListedPool(
        StoredBlocks(
            blocks.pool,
            blocks.groups[kept],
            blocks.block_ids[kept],
            blocks.digests[kept],
            blocks.parent_digests[kept],
            blocks.is_parent_known[kept],
        ),
        BlockContents(contents.token_ids[kept], num_tokens[kept], keys),
    )


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """An event."""


class BlockStored(_Event):
    """Consecutive blocks of one prefix. The last four fields are never set, but are counted in the map's header."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(_Event):
    """Blocks that cannot be hit any more."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """No block can be hit any more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Stored blocks in the order in which they are sent."""

    groups: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]
    parent_digests: npt.NDArray[np.uint8]
    is_parent_known: BoolArray
    contents: BlockContents


@final
class BatchEncoder:
    """Encodes the batches of one process. Stores the adapter of every block that has one.

    Args:
        groups: the model's KV-cache groups.
        lifetime: name of the process.
        rank: rank of the data-parallel engine.
    """

    def __init__(self, groups: Sequence[GroupSpec], lifetime: str, rank: int = 0) -> None:
        self._kinds = [_kind_of(group) for group in groups]
        self._windows = [_window_of(group) for group in groups]
        self._lifetime = lifetime
        self._rank = rank
        self._adapters: dict[tuple[int, bytes], str] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def batch(self, sent_s: float, changes: Changes) -> bytes:
        """Encode changes as one batch.

        Args:
            sent_s: seconds since 1970.
            changes: changes of the pools; empty for a heartbeat.

        Cost: O(tokens); some 150 us for 4 blocks of 16 tokens.
        """
        return self._encoder.encode([sent_s, self._events(changes), self._rank, self._lifetime])

    def snapshot(self, sent_s: float, pools: Sequence[ListedPool], tiers: Sequence[TierEvents] = ()) -> Iterator[bytes]:
        """Yield all blocks and entries, encoded in at least one part, of up to a thousand. Parents precede children."""
        num_blocks = sum(len(pool.blocks) for pool in pools) + sum(map(len, tiers))
        adapters: dict[tuple[int, bytes], str] = {}
        part: list[_Event] = []
        count = 0
        has_part = False
        for event in chain(self._listed(pools, adapters, BLOCKS_OF_PART), _of_tiers(tiers, BLOCKS_OF_PART)):
            assert isinstance(event, BlockStored)
            if count + len(event.block_hashes) > BLOCKS_OF_PART:
                yield self._part(sent_s, part, num_blocks)
                part, count, has_part = [], 0, True
            part.append(event)
            count += len(event.block_hashes)
        if part or not has_part:
            yield self._part(sent_s, part, num_blocks)

    def _part(self, sent_s: float, events: list[_Event], num_blocks: int) -> bytes:
        return self._encoder.encode([sent_s, events, self._rank, self._lifetime, num_blocks])

    def _events(self, changes: Changes) -> list[_Event]:
        listed = [pool for pool in changes if isinstance(pool, ListedPool)]
        changed = [pool for pool in changes if isinstance(pool, ChangedPool)]
        is_cleared = bool(listed) or any((pool.events.kinds == CLEARED).any() for pool in changed)
        events: list[_Event] = []
        if is_cleared:
            self._adapters.clear()
            events.append(AllBlocksCleared())
        events += self._listed(listed, self._adapters)
        for pool in changed:
            events += self._changed(pool)
        events += _of_tiers([tier for tier in changes if isinstance(tier, TierEvents)])
        return events

    def _listed(
        self, pools: Sequence[ListedPool], adapters: dict[tuple[int, bytes], str], most: int | None = None
    ) -> Iterator[BlockStored]:
        for pool in pools:
            blocks, order = pool.blocks, in_parent_order(pool.blocks)
            stored = _Blocks(
                blocks.groups, blocks.digests, blocks.parent_digests, blocks.is_parent_known, pool.contents
            )
            yield from self._stored(stored, order, adapters, most)

    def _changed(self, pool: ChangedPool) -> Iterator[_Event]:
        """Yield the events of one pool since it was last cleared, a run of one kind at a time."""
        events = pool.events
        kinds = events.kinds
        cleared = np.flatnonzero(kinds == CLEARED)
        first = int(cleared[-1]) + 1 if len(cleared) else 0
        indices = first + np.flatnonzero(_is_sent(pool, first))
        blocks = _Blocks(
            events.groups, events.digests, events.parent_digests, np.ones(len(kinds), np.bool_), pool.contents
        )
        for run in _runs(indices, np.diff(kinds[indices]) != 0):
            if kinds[run[0]] == STORED:
                yield from self._stored(blocks, run, self._adapters)
            else:
                yield from self._removed(events.groups, events.digests, run)

    def _removed(
        self, groups: npt.NDArray[np.int32], digests: npt.NDArray[np.uint8], run: Int64Array
    ) -> Iterator[BlockRemoved]:
        for some in _runs(run, np.diff(groups[run]) != 0):
            group, hashes = int(groups[some[0]]), _hashes(digests[some])
            if self._adapters:
                for digest in hashes:
                    self._adapters.pop((group, digest), None)
            yield BlockRemoved(hashes, DEVICE, group)

    def _stored(
        self, blocks: _Blocks, order: Int64Array, adapters: dict[tuple[int, bytes], str], most: int | None = None
    ) -> Iterator[BlockStored]:
        """Yield an event for each chain of blocks, or for each ``most`` blocks of it."""
        if not len(order):
            return
        groups, num_tokens = blocks.groups[order], blocks.contents.num_tokens[order]
        breaks = (blocks.parent_digests[order[1:]] != blocks.digests[order[:-1]]).any(axis=1)
        breaks |= (groups[1:] != groups[:-1]) | (num_tokens[1:] != num_tokens[:-1])
        for run in _runs(order, breaks):
            for begin in range(0, len(run), most or len(run)):
                yield self._chain(blocks, run[begin : begin + (most or len(run))], adapters)

    def _chain(self, blocks: _Blocks, chain: Int64Array, adapters: dict[tuple[int, bytes], str]) -> BlockStored:
        first = int(chain[0])
        group, size = int(blocks.groups[first]), int(blocks.contents.num_tokens[first])
        hashes = _hashes(blocks.digests[chain])
        parent = blocks.parent_digests[first].tobytes()
        encodings = blocks.contents.extra_keys
        keys = [_keys_of(encodings[index]) if index in encodings else NO_KEYS for index in chain.tolist()]
        adapter = keys[0].adapter or (adapters.get((group, parent)) if adapters else None)
        if adapter is not None:
            adapters.update(((group, digest), adapter) for digest in hashes)
        return BlockStored(
            hashes,
            (None if blocks.is_parent_known[first] else UNKNOWN_PARENT) if parent == UNKNOWN_PARENT else parent,
            blocks.contents.token_ids[chain, :size].ravel().tolist(),
            size,
            None,
            DEVICE,
            adapter,
            [each.with_adapter(adapter) for each in keys],
            group,
            self._kinds[group],
            self._windows[group],
        )


@dataclass(frozen=True, slots=True)
class _Keys:
    """A block's extra keys as they are sent."""

    adapter: str | None = None
    others: tuple[Any, ...] = ()

    def with_adapter(self, adapter: str | None) -> tuple[Any, ...] | None:
        """Return the keys with the sequence's adapter, which only the first block's encoding has."""
        return (*([] if adapter is None else [adapter]), *self.others) or None


NO_KEYS: Final = _Keys()


def _keys_of(encoding: bytes) -> _Keys:
    adapter, media, salts = None, list[Any](), list[Any]()
    for tag, fields in fields_of(encoding):
        if tag == LORA:
            adapter = fields[0].decode(errors="replace")
        elif tag == MEDIA:
            media.append((fields[1].hex(), struct.unpack_from("<q", fields[0])[0]))
        elif tag == SALT:
            salts.append(_as_text(fields[0]))
    return _Keys(adapter, (*media, *salts))


def _as_text(salt: bytes) -> str:
    try:
        return salt.decode()
    except UnicodeDecodeError:
        return salt.hex()


def _of_tiers(tiers: Sequence[TierEvents], most: int | None = None) -> Iterator[BlockStored | BlockRemoved]:
    """Yield the events of entries of tiers, a run of one kind at a time, of at most ``most`` entries."""
    for tier in tiers:
        for run in _runs(np.arange(len(tier)), np.diff(tier.kinds) != 0):
            for begin in range(0, len(run), most or len(run)):
                keys = _hashes(tier.keys[run[begin : begin + (most or len(run))]])
                if tier.kinds[run[0]] == STORED:
                    yield BlockStored(keys, None, [], tier.run_tokens, None, tier.medium, None)
                else:
                    yield BlockRemoved(keys, tier.medium)


def _is_sent(pool: ChangedPool, first: int) -> BoolArray:
    """Return which events from ``first`` on are sent: all but those of blocks that were stored and evicted since."""
    kinds = pool.events.kinds[first:]
    is_sent: BoolArray = (kinds == STORED) | (kinds == REMOVED)
    is_gone: BoolArray = (kinds == STORED) & (pool.contents.num_tokens[first:] == 0)
    if not is_gone.any():
        return is_sent
    is_sent &= ~is_gone
    gone: set[tuple[int, bytes]] = set()
    groups, digests = pool.events.groups[first:].tolist(), _hashes(pool.events.digests[first:])
    for index, key in enumerate(zip(groups, digests, strict=True)):
        if is_gone[index]:
            gone.add(key)
        elif kinds[index] == REMOVED and key in gone:
            gone.discard(key)
            is_sent[index] = False
    return is_sent


def _runs(indices: Int64Array, breaks: BoolArray) -> list[Int64Array]:
    """Split indices after each break."""
    return [run for run in np.split(indices, np.flatnonzero(breaks) + 1) if len(run)]


def _hashes(digests: npt.NDArray[np.uint8]) -> list[bytes]:
    whole = digests.tobytes()
    return [whole[begin : begin + DIGEST_NBYTES] for begin in range(0, len(whole), DIGEST_NBYTES)]


def _window_of(group: GroupSpec) -> int | None:
    """Return the field ``kv_cache_spec_sliding_window`` of a group."""
    match group:
        case SlidingWindow(window=window):
            return window
        case FullAttention() | ChunkedLocal() | CrossAttention() | RecurrentState():
            return None
        case _:
            assert_never(group)


def _kind_of(group: GroupSpec) -> str:
    """Return vLLM's name of a group's rule."""
    match group:
        case FullAttention():
            return "full_attention"
        case SlidingWindow():
            return "sliding_window"
        case ChunkedLocal():
            return "chunked_local_attention"
        case CrossAttention():
            return "cross_attention"
        case RecurrentState():
            return "mamba"
        case _:
            assert_never(group)
