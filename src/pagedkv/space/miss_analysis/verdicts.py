"""The second pass: what happened to the block that ends a hit, by the first cause of the list that applies."""

from typing import Final

import numpy as np

from pagedkv.blocks import ghosts
from pagedkv.blocks.blocks import EXTRA, LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE, SUCCESSOR, PoolArrays
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import EPOCH, LORA, MEDIA, SALT, differing_tags
from pagedkv.contract.miss_causes import MissCause
from pagedkv.contract.spec import keeps_state
from pagedkv.space.miss_analysis.case import Case, Lack, Verdict, name_of
from pagedkv.space.miss_analysis.prompt_digests import digest_of_first, encoding_of
from pagedkv.space.state import Group
from pagedkv.tables.block_fates import CAUSE_OF_GHOST
from pagedkv.tables.matching import holds_tokens

__all__ = ["cause_of_ghost", "verdict_of"]

OTHER_KEYS: Final = {  # if several differ, the first of them is the cause
    EPOCH: MissCause.OTHER_EPOCH,
    LORA: MissCause.OTHER_ADAPTER,
    SALT: MissCause.OTHER_SALT,
    MEDIA: MissCause.OTHER_MEDIA,
}


def verdict_of(case: Case, lack: Lack) -> Verdict:
    """Return what happened to the block that ends the hit."""
    return (
        _from_its_name(case, lack)
        or _from_ghosts(case, lack)
        or _from_siblings(case, lack)
        or Verdict(_cause_without_trace(case, lack), lack.start)
    )


# It is in the prefix index


def _from_its_name(case: Case, lack: Lack) -> Verdict | None:
    """Return why a block in the prefix index was not found, or cannot be hit; None if it is not there."""
    group, digest = lack.group, lack.digests[lack.place]
    block = find(group.pool.arrays, name_of(group), digest)
    if block == NULL_BLOCK or not _holds(case, lack, block):
        return None
    if group.keeps_whole_prefix:
        assert lack.parent is not None
        if not is_child_of(group.pool.arrays, name_of(group), block, lack.parent):
            return Verdict(MissCause.ORPHANED, lack.start)
    brought = case.prompt.digests
    is_forged = len(brought) > 0 and (brought[lack.place] != digest).any()
    return Verdict(MissCause.OTHER_DIGEST if is_forged else MissCause.BEING_COMPUTED, lack.start)


def _holds(case: Case, lack: Lack, block: int) -> bool:
    """Return whether a block holds the tokens and extra keys of the missing one, since a digest may be forged."""
    arrays = lack.group.pool.arrays
    encoding = case.state.extra_keys.encoding_of(int(arrays.records[block, EXTRA]))
    is_same = holds_tokens(arrays, block, case.prompt.tokens, lack.start, lack.group.block_size)
    return is_same and encoding == encoding_of(case, lack.group, lack.place)


# It is gone


def _from_ghosts(case: Case, lack: Lack) -> Verdict | None:
    """Return the cause in a ghost of the block, under this weights epoch or an earlier one."""
    ghost = _ghost(lack.group, lack.digests[lack.place])
    if ghost is None and lack.place == 0:
        ghost = _ghost_of_earlier_epoch(case, lack.group)
    return None if ghost is None else Verdict(ghost[0], lack.start, age=ghost[1])


def _ghost_of_earlier_epoch(case: Case, group: Group) -> tuple[MissCause, int] | None:
    """Return how long ago the prompt's first block left the cache, if a ghost of it under an earlier epoch is left."""
    for epoch in case.state.former_epochs:
        ghost = _ghost(group, digest_of_first(case.prompt, epoch, group.block_size))
        if ghost is not None:
            return MissCause.OTHER_EPOCH, ghost[1]
    return None


def _ghost(group: Group, digest: Uint32Array) -> tuple[MissCause, int] | None:
    """Return why content left the cache, and how long ago; None without a ghost of it."""
    pool = group.pool.arrays
    place = ghosts.find_ghost(pool, name_of(group), digest)
    if place < 0:
        return None
    return cause_of_ghost(group, ghosts.ghost_cause(pool, place)), ghosts.ghost_age(pool, place)


def cause_of_ghost(group: Group, ghost: int) -> MissCause:
    """Convert a ghost's cause to a public one."""
    cause = CAUSE_OF_GHOST[ghost]
    is_gap = cause in {MissCause.SUPERSEDED, MissCause.OVERWRITTEN} and not group.keeps_whole_prefix
    return _cause_of_gap(group) if is_gap else cause


def _cause_of_gap(group: Group) -> MissCause:
    """Return the cause for a group that has dropped what other groups have."""
    return MissCause.STATE_GONE if keeps_state(group.spec) else MissCause.WINDOW_GONE


# Other content is cached in its place


def _from_siblings(case: Case, lack: Lack) -> Verdict | None:
    """Return how the cached blocks behind the same parent differ."""
    arrays, size = lack.group.pool.arrays, lack.group.block_size
    siblings = _siblings(case, lack)
    if not len(siblings):
        return None
    wanted = case.prompt.tokens[lack.start : lack.start + size]
    in_common = np.cumprod(arrays.tokens[siblings, :size] == wanted, axis=1).sum(axis=1)
    same = siblings[in_common == size]
    if len(same):
        return Verdict(_cause_of_keys(case, lack, same), lack.start)
    own = case.state.extra_keys.id_of(encoding_of(case, lack.group, lack.place))
    is_own = arrays.records[siblings, EXTRA] == own
    siblings, in_common = siblings[is_own], in_common[is_own]
    if not len(in_common) or lack.start + in_common.max() == 0:
        return None
    longest = int(in_common.max())
    stood = siblings[int(in_common.argmax())]
    return Verdict(MissCause.CHANGED_TOKENS, lack.start + longest, int(arrays.tokens[stood, longest]))


def _siblings(case: Case, lack: Lack) -> Int32Array:
    """List the cached blocks with the same parent as the missing block: all of them, or the latest."""
    if lack.parent is None:
        return np.zeros(0, np.int32)
    arrays = lack.group.pool.arrays
    among = np.arange(1, lack.group.pool.num_blocks, dtype=np.int32)
    if not case.is_thorough:
        among = arrays.records[lack.parent, SUCCESSOR].reshape(1)
    return _children(arrays, name_of(lack.group), among, lack.parent)


def _children(pool: PoolArrays, name: int, among: Int32Array, parent: int) -> Int32Array:
    """Return those of some blocks that are children of a block in its present life."""
    records = pool.records[among]
    is_child = (records[:, NAME] == name) & (records[:, PARENT] == parent)
    children: Int32Array = among[is_child & (records[:, PARENT_LIFE] == pool.records[parent, LIFE])]
    return children


def _cause_of_keys(case: Case, lack: Lack, same: Int32Array) -> MissCause:
    """Return which extra key differs from that of the same tokens that differ in the fewest keys."""
    own, table = encoding_of(case, lack.group, lack.place), case.state.extra_keys
    others = {int(extra) for extra in lack.group.pool.arrays.records[same, EXTRA]}
    fewest = min((differing_tags(own, table.encoding_of(extra)) for extra in sorted(others)), key=len)
    return next((cause for tag, cause in OTHER_KEYS.items() if tag in fewest), MissCause.OTHER_DIGEST)


# There is no trace of it


def _cause_without_trace(case: Case, lack: Lack) -> MissCause:
    """Return the cause for a block that left no name and no ghost, and has no other content in its place."""
    group = lack.group
    if not group.keeps_whole_prefix and any(other.keeps_whole_prefix for other in case.state.cached_groups):
        return _cause_of_gap(group)
    is_forgotten = ghosts.has_forgotten(group.pool.arrays, lack.digests[lack.place])
    return MissCause.UNKNOWN if is_forgotten else MissCause.NEVER_STORED
