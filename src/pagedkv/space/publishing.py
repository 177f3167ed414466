"""Publishing blocks that rows complete, across groups: extra keys, digests once a lane, then the prefix index.

A *lane* is all groups of one block size whose names cover as many tokens ahead; each row has one chain of digests
there. A block is *named* while it is in the prefix index, under its group and its digest.

This module decides which of two blocks with equal content has the name. A hit in a group that keeps its whole prefix is
verified by links from parent to child. Groups that may have lost parts of a prefix are verified by the digest chain,
which pagedkv then computes itself.

Where names cover tokens ahead, a block has these beside its own, from its block size on. They are written with its
digest, when they are accepted; so all that compares tokens compares them too::

    tokens of the sequence   a b c d | e f g h | i j
    block 0, one ahead      [a b c d | e]                  named once e is accepted
    block 1                           [e f g h | i]        its parent is the digest over a to e

*Duplicates* are live blocks with the same content as a named block, replaced by it once that is safe. Two rows may
compute the same content, one after the other or in one step. The first block to be published gets the name (it is the
*carrier*); the second stays unnamed until both are settled. Then every row that holds the duplicate is pointed at the
carrier, and the duplicate is freed. If the carrier is gone by then, the duplicate is published instead.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.digests import ExtraKeyArrays, copy_digest, digest_block, keys_of_blocks, set_parent
from pagedkv.blocks.epochs import is_fresher, same_epochs
from pagedkv.blocks.eviction.policy import FETCHED_AHEAD, expect
from pagedkv.blocks.life_cycle import adopt, drop_name, release
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import find, is_child_of, name_block
from pagedkv.blocks.record import (
    AHEAD,
    EXTRA,
    LIFE,
    LOOKAHEAD,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PARENT,
    PARENT_LIFE,
    PENDING_STEP,
    REF_COUNT,
    SETTLED_STEP,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import DIGEST_WORDS, Int32Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.space.epochs import date_open
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    COVERED,
    FROZEN,
    FULL,
    KIND,
    LAST_STEP,
    NAME_IN_POOL,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    RUNNING,
    STATUS,
    SURE,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
    first_sure_block,
    note_change,
    num_sealed,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger


def publish(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Digest and publish every full block of accepted tokens that these rows have completed, within their limits."""
    if not state.config.prefix_caching:
        return
    accepted = state.rows[batch, NUM_ACCEPTED] if state.limits_publishing else None
    if accepted is not None:
        state.rows[batch, NUM_ACCEPTED] = np.minimum(accepted, state.publish_limits[batch])
    num_unpublished: dict[int, int] = {}
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        first = lane[0]
        num_blocks = state.loops[digest_new_blocks](*first.view, batch, chains, state.extra_keys.arrays)
        num_unpublished[first.index] = num_blocks
        for group in lane[1:]:
            num_unpublished[group.index] = copy_new_digests(first.pool.arrays, first.arrays, *group.view, batch)
    for group in state.cached_groups:
        if state.counts_epochs:
            date_open(*group.view, batch, state.oldest_epochs)
        if num_unpublished[group.index] == 0:
            continue
        found = np.empty((num_unpublished[group.index], NUM_DUPLICATE_FIELDS), np.int32)
        num_found = state.loops[publish_new_blocks](*group.view, batch, found)
        if num_found:
            ledger.duplicates[group.index].append(found[:num_found])
    if accepted is not None:
        state.rows[batch, NUM_ACCEPTED] = accepted


def tag_blocks(state: SpaceState, row: int, keys: RequestKeys) -> None:
    """Set the extra keys of a row's blocks that are not digested yet."""
    _sweep_keys(state)
    for group in state.cached_groups:
        at = int(group.arrays.parameters[AT])
        first, stop = int(state.rows[row, at + NUM_DIGESTED]), int(state.rows[row, at + NUM_BLOCKS])
        encodings = keys_of_blocks(keys, state.weights.identity, group.block_size, first, stop, group.num_ahead)
        if encodings:
            tag(state, group, group.arrays.table[row, first:stop], first, encodings)


def tag(state: SpaceState, group: Group, blocks: Int32Array, first: int, encodings: dict[int, bytes]) -> None:
    """Set the extra keys of unnamed blocks, the first of which is logical block ``first``."""
    places = [index for index in encodings if index >= first]
    named = blocks[np.array(places, np.intp) - first]
    ids = np.array(state.extra_keys.intern_all([encodings[index] for index in places]), np.int32)
    is_new = (named != NULL_BLOCK) & (group.pool.arrays.records[named, NAME] == 0)  # else it is a kept state
    group.pool.arrays.records[named[is_new], EXTRA] = ids[is_new]


def _sweep_keys(state: SpaceState) -> None:
    """Forget the extra keys that no block carries any more, once there are many."""
    if len(state.extra_keys) < state.keys_before_sweep:
        return
    is_used = np.zeros(state.extra_keys.num_ids, np.bool_)
    for pool in state.all_pools:
        is_used[pool.arrays.records[:, EXTRA]] = True
    used = np.flatnonzero(is_used).tolist()
    state.extra_keys.retain(used)
    state.keys_before_sweep = max(state.keys_before_sweep, 2 * len(state.extra_keys))


# Fields of a duplicate. They include lives, since blocks may have other content by the time it is merged.
# They do not include the row, which may be gone by then, while its forks refer to the block.
INDEX: Final = 0  # logical block
BLOCK: Final = 1
BLOCK_LIFE: Final = 2
CARRIER: Final = 3
CARRIER_LIFE: Final = 4
NUM_DUPLICATE_FIELDS: Final = 5


@inlined
def same_content(pool: PoolArrays, left: int, right: int, covered: int) -> bool:
    """Whether two full blocks have equal extra keys, and equal tokens that their names cover."""
    if pool.records[left, EXTRA] != pool.records[right, EXTRA]:
        return False
    difference = 0
    for index in range(covered):
        difference |= pool.tokens[left, index] ^ pool.tokens[right, index]
    return difference == 0


@inlined
def publish_block(pool: PoolArrays, group: GroupArrays, block: int, parent: int, parent_life: int) -> int:
    """Name a block, or find the block that has its name already; return the block with the name.

    Content to which older weights contributed counts as different. A fresher block takes over the name; others stay
    unnamed, and are returned themselves.
    """
    name = group.parameters[NAME_IN_POOL]
    by_links = group.parameters[KIND] == FULL
    other = find(pool, name, pool.digests[block])
    if other == NULL_BLOCK:
        name_block(pool, name, block, parent, parent_life)
        return block
    if not same_content(pool, other, block, group.parameters[COVERED]):
        return block  # a forged digest: the new block stays unnamed, and no row gets the other's content by a hit
    record = pool.records[other]
    if not by_links or (record[PARENT] == parent and record[PARENT_LIFE] == parent_life):
        if len(pool.epochs) == 0 or same_epochs(pool, other, pool, block):
            return other
        if not is_fresher(pool, block, other):
            return block
    elif parent != NULL_BLOCK and (not pool.records[parent, NAME] or pool.records[parent, LIFE] != parent_life):
        return block  # its own chain is broken: if its parent is published again, so is this block
    drop_name(pool, other)  # its chain is broken, so it could not be hit; or older weights contributed to it
    name_block(pool, name, block, parent, parent_life)
    return block


@compiled
def rewind_tail(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int) -> None:
    """Set the parent of the next block to be published: the block with the name of the last published content."""
    at = group.parameters[AT]
    record = rows[row]
    last = record[at + NUM_PUBLISHED] - 1
    tail = group.table[row, last] if last >= 0 else NULL_BLOCK
    if group.parameters[KIND] == FULL and tail != NULL_BLOCK and not pool.records[tail, NAME]:
        tail = carrier_of_duplicate(pool, group, row, last)
    rows[row, at + TAIL] = tail
    rows[row, at + TAIL_LIFE] = pool.records[tail, LIFE]


@compiled
def carrier_of_duplicate(pool: PoolArrays, group: GroupArrays, row: int, last: int) -> int:
    """Find the block that has the name of an unnamed block's content; the unnamed block itself if there is none.

    It is found link by link from the last named block before it, since a digest alone, which a caller may have forged,
    does not make a parent. O(unnamed blocks before it), which are few, since duplicates are merged soon (all, in a
    frozen row).
    """
    name = group.parameters[NAME_IN_POOL]
    first = last
    while first > 0 and not pool.records[group.table[row, first - 1], NAME]:
        first -= 1
    carrier = group.table[row, first - 1] if first > 0 else NULL_BLOCK
    for index in range(first, last + 1):
        block = group.table[row, index]
        child = find(pool, name, pool.digests[block])
        if child == NULL_BLOCK or not is_child_of(pool, name, child, carrier):
            return int(group.table[row, last])
        if not same_content(pool, child, block, group.parameters[COVERED]):
            return int(group.table[row, last])
        carrier = child
    return int(carrier)


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.PAIRS)
@compiled
def publish_new_blocks(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    duplicates: Int32Array,
) -> int:
    """Publish all digested blocks of a batch of rows that were not published yet; return the number of duplicates.

    A duplicate is a block in use whose content is named by another block.

    Args:
        duplicates: int32 ``[digested blocks that were not published, NUM_DUPLICATE_FIELDS]``.
    """
    at = group.parameters[AT]
    num_duplicates = 0
    for row in batch:
        record = rows[row]
        num_digested = record[at + NUM_DIGESTED]
        if record[FROZEN] or record[at + NUM_PUBLISHED] >= num_digested:
            continue
        for index in range(record[at + NUM_PUBLISHED], num_digested):
            block = group.table[row, index]
            expect(pool, pool.digests[group.table[row, min(index + FETCHED_AHEAD, num_digested - 1)], 0])
            rows[row, at + NUM_PUBLISHED] = index + 1
            if block == NULL_BLOCK:  # a gap, of a row that was swapped: what comes after it has no parent here
                rows[row, at + TAIL] = NULL_BLOCK
                rows[row, at + TAIL_LIFE] = pool.records[NULL_BLOCK, LIFE]
                continue
            if group.parameters[SURE] and index < first_sure_block(group, rows, row):
                continue
            carrier = publish_block(pool, group, block, record[at + TAIL], record[at + TAIL_LIFE])
            if group.parameters[KIND] == FULL and index >= LOOKAHEAD:
                pool.records[group.table[row, index - LOOKAHEAD], AHEAD] = carrier
            rows[row, at + TAIL] = carrier
            rows[row, at + TAIL_LIFE] = pool.records[carrier, LIFE]
            if carrier != block:
                entry = duplicates[num_duplicates]
                entry[INDEX] = index
                entry[BLOCK] = block
                entry[BLOCK_LIFE] = pool.records[block, LIFE]
                entry[CARRIER] = carrier
                entry[CARRIER_LIFE] = pool.records[carrier, LIFE]
                num_duplicates += 1
    return num_duplicates


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.WORDS, Like.EXTRA_KEYS)
@compiled
def digest_new_blocks(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    chains: Uint32Array,
    extra_keys: ExtraKeyArrays,
) -> int:
    """Digest every full block of accepted tokens that a batch of rows has completed.

    ``chains[row]`` is the digest of the row's last digested block, or the root. Returns how many digested blocks were
    not offered to the index yet.
    """
    num_unpublished = 0
    at = group.parameters[AT]
    block_size, covered = group.parameters[BLOCK_SIZE], group.parameters[COVERED]
    for row in batch:
        if rows[row, FROZEN]:
            continue
        for index in range(rows[row, at + NUM_DIGESTED], num_sealed(group, rows[row, NUM_ACCEPTED])):
            block = group.table[row, index]
            if covered > block_size:
                if not is_completed(pool, group, rows, row, index):
                    break
                seal(pool, group, rows, row, index)
            extra = pool.records[block, EXTRA]
            digest_block(chains[row], pool.tokens[block, :covered], extra_keys, extra, pool.digests[block])
            if len(pool.parent_digests):
                set_parent(pool, block, chains[row])
            for word in range(DIGEST_WORDS):
                chains[row, word] = pool.digests[block, word]
            rows[row, at + NUM_DIGESTED] = index + 1
        num_unpublished += max(0, rows[row, at + NUM_DIGESTED] - rows[row, at + NUM_PUBLISHED])
    return num_unpublished


@compiled
def is_completed(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int) -> bool:
    """Whether the step that computes the last entry of a row's full block is planned, or is that of the block's tokens.

    With more than one token ahead it may be a later one.
    """
    block_size = group.parameters[BLOCK_SIZE]
    last = index * block_size + group.parameters[COVERED] - 2  # the position with which that entry is computed
    is_pending = pool.records[group.table[row, index], PENDING_STEP] == pool.counts[OPEN_STEP]
    return bool(is_pending or last < (index + 1) * block_size or rows[row, NUM_PLANNED] > last)


@compiled
def seal(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int) -> None:
    """Write the tokens ahead of a row's full block beside its own. It is pending until its last entry is computed."""
    block_size, covered = group.parameters[BLOCK_SIZE], group.parameters[COVERED]
    block, behind = group.table[row, index], group.table[row, index + 1]
    if covered > block_size + 1:
        pool.records[block, PENDING_STEP] = max(pool.records[block, PENDING_STEP], rows[row, LAST_STEP])
    for place in range(covered - block_size):
        pool.tokens[block, block_size + place] = pool.tokens[behind, place]


@compiled
def copy_new_digests(
    source_pool: PoolArrays,
    source: GroupArrays,
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
) -> int:
    """Copy the digests that a group of equal block size has just got for the same rows to another group.

    Returns how many digested blocks of that group were not offered to the index yet.
    """
    num_unpublished = 0
    source_at = source.parameters[AT]
    at = group.parameters[AT]
    for row in batch:
        for index in range(rows[row, at + NUM_DIGESTED], rows[row, source_at + NUM_DIGESTED]):
            if group.parameters[COVERED] > group.parameters[BLOCK_SIZE]:
                seal(pool, group, rows, row, index)
            copy_digest(source_pool, source.table[row, index], pool, group.table[row, index])
        rows[row, at + NUM_DIGESTED] = rows[row, source_at + NUM_DIGESTED]
        num_unpublished += max(0, rows[row, at + NUM_DIGESTED] - rows[row, at + NUM_PUBLISHED])
    return num_unpublished


def merge(state: SpaceState, ledger: StepLedger, duplicates: list[list[Int32Array]]) -> None:
    """Merge those duplicates that are settled, by group; the others wait for the next step to end."""
    republishing = np.zeros(len(state.rows), np.int32)
    for group, parts in zip(state.groups, duplicates, strict=True):
        if not parts:
            continue
        found = np.concatenate(parts)
        num_before = int(republishing.max())
        indexes, fates = np.unique(found[:, INDEX]), np.zeros(group.pool.num_blocks, np.int32)
        num_waiting = state.loops[merge_duplicates](*group.view, found, indexes, fates, republishing, num_before)
        if num_waiting:
            ledger.duplicates[group.index].append(found[:num_waiting])
    if republishing.any():
        rows = np.flatnonzero(republishing).astype(np.int32)
        in_order = rows[np.argsort(republishing[rows], kind="stable")]  # the order in which duplicates were found
        publish(state, ledger, in_order)


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.PAIRS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER)
@compiled
def merge_duplicates(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    duplicates: Int32Array,
    indexes: Int32Array,
    fates: Int32Array,
    republishing: Int32Array,
    num_before: int,
) -> int:
    """Merge every duplicate if its content and its carrier's content are settled.

    Blocks that turned out, when they were planned, to be computed by different weights are no duplicates. What happens
    to each is decided first; then one pass over the tables does it, however many duplicates there are.

    Args:
        duplicates: int32 ``[n, NUM_DUPLICATE_FIELDS]``; on return the first ones are those that still wait.
        indexes: int32 ``[any]``, their logical blocks, ascending and distinct.
        fates: int32 ``[blocks]``, zeros; receives the carrier that replaces each duplicate, or the negative of a number
            for rows that have to publish it again.
        republishing: int32 ``[max_sequences]``, zeros at first; receives a number for each row that must publish again,
            since its carrier is gone: in the order of the duplicates, from ``num_before + 1`` on.

    Returns how many duplicates wait.
    """
    settled = pool.counts[SETTLED_STEP]
    num_waiting = 0
    for place in range(len(duplicates)):
        entry = duplicates[place]
        block, carrier = entry[BLOCK], entry[CARRIER]
        is_held = pool.records[block, REF_COUNT] > 0 and pool.records[block, LIFE] == entry[BLOCK_LIFE]
        if not is_held or pool.records[block, NAME]:
            continue
        if not pool.records[carrier, NAME] or pool.records[carrier, LIFE] != entry[CARRIER_LIFE]:
            if fates[block] == 0:
                fates[block] = -(num_before + place + 1)
        elif max(pool.records[block, PENDING_STEP], pool.records[carrier, PENDING_STEP]) > settled:
            for field in range(NUM_DUPLICATE_FIELDS):
                duplicates[num_waiting, field] = entry[field]
            num_waiting += 1
        elif len(pool.epochs) == 0 or same_epochs(pool, block, pool, carrier):
            fates[block] = carrier
    _meet_fates(pool, group, rows, indexes, fates, republishing)
    return num_waiting


@compiled
def _meet_fates(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    indexes: Int32Array,
    fates: Int32Array,
    republishing: Int32Array,
) -> None:
    """In every running row, replace duplicates by their carriers, or have the row publish them again."""
    at = group.parameters[AT]
    for row in range(len(rows)):
        if rows[row, STATUS] != RUNNING:
            continue
        for place in range(len(indexes)):
            index = indexes[place]
            if index >= rows[row, at + NUM_BLOCKS]:
                break
            block = group.table[row, index]
            if fates[block] > 0:
                adopt(pool, fates[block])
                group.table[row, index] = fates[block]
                release(pool, block, rows[row, LAST_STEP])
                note_change(rows, row, at, index, index + 1)
            elif fates[block] < 0:
                unpublish_from(pool, group, rows, row, index)
                if republishing[row] == 0 or republishing[row] > -fates[block]:
                    republishing[row] = -fates[block]


@compiled
def unpublish_from(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int) -> None:
    """Make a row publish again from the first block of the unnamed stretch up to logical block ``index``."""
    at = group.parameters[AT]
    first = index
    while (
        first > 0 and group.table[row, first - 1] != NULL_BLOCK and not pool.records[group.table[row, first - 1], NAME]
    ):
        first -= 1
    if rows[row, at + NUM_PUBLISHED] > first:
        rows[row, at + NUM_PUBLISHED] = first
        rewind_tail(pool, group, rows, row)
