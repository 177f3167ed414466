"""The cached content of pools: for consumers of events, also after a gap, and for tiers that fetch content.

Read from the pools on request. The parent of a block is known if the space records events, which keep its digest;
otherwise as long as the parent's block holds that content, and behind a window it may be gone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import ROOT_DIGEST, hash_block_tokens, without_root, words_of_digests
from pagedkv.blocks.free_queue import blocks_of_list, protected_sentinel, spare_sentinel
from pagedkv.blocks.record import EXTRA, LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE, PENDING_STEP, SETTLED_STEP
from pagedkv.contract.answers import STORED, BlockContents, CacheEvents, StoredBlocks
from pagedkv.contract.arrays import DIGEST_NBYTES, Int32Array
from pagedkv.errors import BlockError
from pagedkv.space.epochs import epochs_of
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.states import num_named_tokens


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """One block of the prefix index, with its content.

    ``hash_block_tokens(parent_digest, token_ids, extra_keys)`` is its digest, unless the caller gave another one.

    Args:
        pool: name of its pool; group: index of its group; block_id: its id.
        digest: the digest by which it is found.
        parent_digest: digest of the block before it; ``ROOT_DIGEST`` for a first one, None if it is not known any more.
        token_ids: read-only int32 ``[block_size]``; fewer for a state that is kept inside an interval.
        extra_keys: its encoded extra keys (:class:`~pagedkv.RequestKeys`), empty for most blocks.
        is_computed: whether no step in flight or open still computes it, or moves its content in.
        epochs: the oldest and the newest epoch of the weights that contributed to it, if epochs are counted; a part of
            its identity, beside the digest. None if they are not, and for blocks that the open step computes.
    """

    pool: str
    group: int
    block_id: int
    digest: bytes
    parent_digest: bytes | None
    token_ids: Int32Array
    extra_keys: bytes
    is_computed: bool
    epochs: tuple[int, int] | None = None


def look_up(state: SpaceState, group: Group, digest: object) -> StoredBlock | None:
    """Return the block with a digest in one group, or None.

    Raises:
        BlockError: ``digest`` is no digest.
    """
    wanted = _as_digest(digest)
    pool = group.pool
    block = pool.prefix_index.find(group.index, wanted)
    if block is None:
        return None
    token_ids = _tokens_of(state, group, block).copy()
    token_ids.flags.writeable = False
    return StoredBlock(
        pool=pool.name,
        group=group.index,
        block_id=block,
        digest=wanted,
        parent_digest=_parent_of(state, pool, block),
        token_ids=token_ids,
        extra_keys=_extra_keys_of(state, pool, block),
        is_computed=bool(pool.arrays.records[block, PENDING_STEP] <= pool.arrays.counts[SETTLED_STEP]),
        epochs=epochs_of(pool, block) if state.counts_epochs else None,
    )


def list_stored(state: SpaceState, pool: BlockPool) -> StoredBlocks:
    """List every named block of a pool. O(blocks)."""
    return _listed(state, pool, pool.prefix_index.named_blocks().astype(np.int32))


def next_victims(state: SpaceState, pool: BlockPool, num_blocks: int) -> StoredBlocks:
    """List the cached blocks among those that the next allocations take, in their order. O(num_blocks)."""
    num_blocks = min(num_blocks, pool.num_free)
    records = pool.arrays.records
    sentinels = (NULL_BLOCK, spare_sentinel(records), protected_sentinel(records))
    cold, spare, protected = (np.array(blocks_of_list(records, each, num_blocks), np.int32) for each in sentinels)
    is_cached = records[cold, NAME] != 0
    line = np.concatenate((cold[~is_cached], spare, cold[is_cached], protected))[:num_blocks]
    return _listed(state, pool, line[records[line, NAME] != 0])


def _listed(state: SpaceState, pool: BlockPool, blocks: Int32Array) -> StoredBlocks:
    """Describe named blocks of a pool."""
    records, digests = pool.arrays.records, pool.arrays.digests
    groups = records[blocks, NAME] - 1
    if len(pool.arrays.parent_digests):
        parent_words = without_root(pool.arrays.parent_digests[blocks])
        is_known = np.ones(len(blocks), np.bool_)
        return StoredBlocks(pool.name, groups, blocks, _as_bytes(digests[blocks]), _as_bytes(parent_words), is_known)
    parents = records[blocks, PARENT]
    has_parent = (parents != NULL_BLOCK) & (records[parents, LIFE] == records[blocks, PARENT_LIFE])
    parent_digests = np.zeros((len(blocks), DIGEST_NBYTES), np.uint8)
    parent_digests[has_parent] = _as_bytes(digests[parents[has_parent]])
    keeps_whole_prefix = np.array([group.keeps_whole_prefix for group in state.groups], np.bool_)
    is_first = (parents == NULL_BLOCK) & keeps_whole_prefix[groups]
    for index in np.flatnonzero((parents == NULL_BLOCK) & ~is_first).tolist():
        is_first[index] = _is_first(state, pool, int(blocks[index]))
    return StoredBlocks(pool.name, groups, blocks, _as_bytes(digests[blocks]), parent_digests, has_parent | is_first)


def contents_of(state: SpaceState, pool: BlockPool, blocks: CacheEvents | StoredBlocks) -> BlockContents:
    """Copy what blocks of a pool hold. O(blocks x block size)."""
    arrays, ids, groups = pool.arrays, blocks.block_ids, blocks.groups
    is_wanted = blocks.kinds == STORED if isinstance(blocks, CacheEvents) else np.ones(len(ids), np.bool_)
    ids = np.where(is_wanted, ids, NULL_BLOCK)
    is_there = is_wanted & (arrays.records[ids, NAME] == groups + 1)
    is_there &= (arrays.digests[ids] == words_of_digests(blocks.digests, len(ids))).all(axis=1)
    for index in np.flatnonzero(is_wanted & ~is_there).tolist():  # another block may hold the content by now
        block = pool.prefix_index.find(int(groups[index]), blocks.digests[index].tobytes())
        if block is not None:
            ids[index], is_there[index] = block, True
    sizes = np.array([group.block_size for group in state.groups], np.int32)
    num_tokens = np.where(is_there, sizes[groups], 0).astype(np.int32)
    for index in np.flatnonzero(is_there).tolist() if state.checkpoints else ():
        num_tokens[index] = num_named_tokens(state, pool, int(ids[index])) or num_tokens[index]
    has_keys = np.flatnonzero(is_there & (arrays.records[ids, EXTRA] != 0)).tolist()
    keys = {index: _extra_keys_of(state, pool, int(ids[index])) for index in has_keys}
    return BlockContents(arrays.tokens[ids], num_tokens, keys)


def _as_digest(digest: object) -> bytes:
    """Convert a digest, given as bytes or as a row of the digests of events."""
    if isinstance(digest, np.ndarray) and digest.dtype == np.uint8:
        digest = digest.tobytes()
    if not isinstance(digest, bytes) or len(digest) != DIGEST_NBYTES:
        raise BlockError(f"a digest is {DIGEST_NBYTES} bytes, got {digest!r}")
    return digest


def _as_bytes(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    return words.astype(">u4").view(np.uint8).reshape(len(words), DIGEST_NBYTES)


def _parent_of(state: SpaceState, pool: BlockPool, block: int) -> bytes | None:
    if len(pool.arrays.parent_digests):
        return _as_bytes(pool.arrays.parent_digests[[block]]).tobytes()
    record = pool.arrays.records[block]
    parent = int(record[PARENT])
    if parent == NULL_BLOCK:
        return ROOT_DIGEST if _is_first(state, pool, block) else None
    if pool.arrays.records[parent, LIFE] != record[PARENT_LIFE]:
        return None
    return _as_bytes(pool.arrays.digests[[parent]]).tobytes()


def _is_first(state: SpaceState, pool: BlockPool, block: int) -> bool:
    """Return whether a block without a parent begins a sequence; else its parent was not cached at publication."""
    record = pool.arrays.records[block]
    if record[PARENT] != NULL_BLOCK:
        return False
    group = state.groups[int(record[NAME]) - 1]
    if group.keeps_whole_prefix:
        return True
    digest = hash_block_tokens(ROOT_DIGEST, _tokens_of(state, group, block), _extra_keys_of(state, pool, block))
    return digest == _as_bytes(pool.arrays.digests[[block]]).tobytes()


def _tokens_of(state: SpaceState, group: Group, block: int) -> Int32Array:
    """Tokens of a named block: all of its size, or the tail for which a state is kept."""
    num_tokens = num_named_tokens(state, group.pool, block) or group.block_size
    token_ids: Int32Array = group.pool.arrays.tokens[block, :num_tokens]
    return token_ids


def _extra_keys_of(state: SpaceState, pool: BlockPool, block: int) -> bytes:
    arrays = state.extra_keys.arrays
    begin, end = arrays.bounds[pool.arrays.records[block, EXTRA]].tolist()
    return arrays.data[begin:end].tobytes()
