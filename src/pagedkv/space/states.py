"""Recurrent states at the ends of prompts and sequences: where they are to be kept, and naming them.

They give the third pass of matching longer hits, which end inside a state's interval, at boundaries of all other
groups; :mod:`pagedkv.space.partial_hits` lets a row continue from one. ``Checkpoints`` records the lengths of the
tails that are kept behind each parent, so that a prompt tries only those. A record is a hint: it holds only while the
block's life is the recorded one, and a hit is granted only for equal digest and tokens.

A recurrent group's block stands for an interval of tokens. While it is partly filled, it is the state that a sequence
advances in place, so it has no name. But the state after the last whole interval of a prompt is worth keeping. Such a
block is named by the *tail* of tokens that it covers. From then on it is not written any more: a row that continues
from it copies it first (:mod:`~pagedkv.space.growing`)::

    tokens     0 ........ 544 ....... 1088 ... 1248 1249
    blocks     [ interval ][ interval ][  tail  ]
                                               ^ named by its parent's digest, 160, and the 160 tokens
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import ROOT_WORDS, ExtraKeyArrays, digest_block, set_digest, set_parent
from pagedkv.blocks.epochs import copy_epochs
from pagedkv.blocks.free_queue import is_leased
from pagedkv.blocks.life_cycle import drop_name, release
from pagedkv.blocks.prefix_index import find, name_block
from pagedkv.blocks.record import (
    AT_END,
    CALLED_OFF,
    EXTRA,
    HOLD_STEP,
    IN_USE,
    KEPT,
    LIFE,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    SHED,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.space.hits import Ending, Known, Lookup, Tail, ending_at, holds_tokens
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    FROZEN,
    FULL,
    KIND,
    LAST_STEP,
    NAME_IN_POOL,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_TOKENS,
    PROMPT_END,
    RUNNING,
    SHEDS,
    STATUS,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
)
from pagedkv.space.state import Checkpoints, Group, NamedLife, SpaceState, TailNote
from pagedkv.space.steps import InFlightStep


def num_named_tokens(state: SpaceState, pool: BlockPool, block: int) -> int | None:
    """Return how many tokens a cached block is named for, if it is a state kept inside an interval; else None."""
    note = None if state.checkpoints is None else state.checkpoints.note_of(pool.name, pool.arrays, block)
    return None if note is None else note.length


def name_states(state: SpaceState, step: InFlightStep) -> None:
    """Name the states of rows that a plan computes exactly up to where one is to be kept."""
    checkpoints, computing, ends = state.checkpoints, step.rows, step.ends
    assert checkpoints is not None
    is_there = (checkpoints.wanted[computing] == ends) & (state.rows[computing, NUM_ACCEPTED] == ends)
    for row, position in zip(computing[is_there].tolist(), ends[is_there].tolist(), strict=True):
        if state.rows[row, FROZEN]:
            continue
        for group in state.state_groups:
            index, length = divmod(position, group.block_size)
            is_digested = state.rows[row, int(group.arrays.parameters[AT]) + NUM_DIGESTED] == index
            if length and is_digested:
                _keep_state(state, checkpoints, group, row, index, length)
        for group in state.shedding_groups:  # so are the windows before it
            state.ends[group.index][row, PROMPT_END] = position


def _keep_state(state: SpaceState, checkpoints: Checkpoints, group: Group, row: int, index: int, length: int) -> None:
    parent = state.chains[group.lane][row]
    note = _keep_tail(state, checkpoints, group, row, index * group.block_size + length, parent)
    if note is not None:
        checkpoints.prompt_ends.setdefault(row, []).append(note)


def _keep_tail(
    state: SpaceState,
    checkpoints: Checkpoints,
    group: Group,
    row: int,
    position: int,
    parent: Uint32Array,
    *,
    is_end: bool = False,
    before: tuple[NamedLife, ...] = (),
) -> NamedLife | None:
    """Name a row's block for the tokens that it has up to a position; None if another block has that name."""
    pool, (index, length) = group.pool, divmod(position, group.block_size)
    extra = extra_of_tail(state, group, row, index, length)
    block = name_tail(*group.view, row, position, parent, state.extra_keys.arrays, extra, is_end)
    if block == NULL_BLOCK:
        return None
    if group.arrays.parameters[SHEDS]:
        pool.arrays.records[block, KEPT] |= AT_END
    life = int(pool.arrays.records[block, LIFE])
    checkpoints.note(pool.name, block, TailNote(group.index, parent.tobytes(), length, life, is_end, before))
    return NamedLife(pool.name, block, life)


def keep_ends(state: SpaceState, batch: Int32Array) -> None:
    """Before rows release their blocks: keep what a sequence that goes on from their ends needs.

    An end is the last position that is computed: of a sequence that was sampled, the one before its last token. States
    are advanced in place, so the state there is the row's own block, and costs nothing to keep. With it the other
    groups keep their last, partly filled blocks. Nothing is kept of a row without a step, or whose last one is in
    flight, since it may fail; of one whose last block others write; of one shorter than a block of full attention; and
    at the last token of an interval, where the row has no block of the one before.
    """
    checkpoints, rows = state.checkpoints, state.rows
    assert checkpoints is not None
    for row in batch[(rows[batch, STATUS] == RUNNING) & (rows[batch, FROZEN] == 0)].tolist():
        position = int(min(rows[row, NUM_PLANNED], rows[row, NUM_ACCEPTED]))
        is_certain = position == rows[row, NUM_PLANNED] and 0 < rows[row, LAST_STEP] <= state.settled_step
        if not is_certain or (state.limits_publishing and position > state.publish_limits[row]):
            continue
        parents = [_parent_of_end(state, group, row, position) for group in state.cached_groups]
        if any(parent is None for parent in parents):
            continue
        before = tuple(checkpoints.prompt_ends.get(row, ()))
        for group, parent in zip(state.cached_groups, parents, strict=True):
            if position % group.block_size and parent is not None:
                _keep_tail(state, checkpoints, group, row, position, parent, is_end=True, before=before)
        for named in checkpoints.continued.pop(row, ()):
            supersede(state.pools[named.pool].arrays, named.block, named.life)


def _parent_of_end(state: SpaceState, group: Group, row: int, position: int) -> Uint32Array | None:
    """Return the digest before the block in which a row's end lies; None if that end cannot be kept."""
    index, length = divmod(position, group.block_size)
    if not length:
        return ROOT_WORDS
    if not _has_to_itself(state, group, row, index):
        return None
    digests, table = group.pool.arrays.digests, group.arrays.table[row]
    num_digested = state.rows[row, int(group.arrays.parameters[AT]) + NUM_DIGESTED]
    if index == 0:  # as the root's child it could be followed, in groups whose hits follow links
        return None if group.keeps_whole_prefix else ROOT_WORDS
    if num_digested > index and table[index - 1] == NULL_BLOCK:
        return None
    parent: Uint32Array = (digests[table[index - 1]] if num_digested > index else state.chains[group.lane][row]).copy()
    return parent if num_digested >= index else None


def _has_to_itself(state: SpaceState, group: Group, row: int, index: int) -> bool:
    """Return whether a row has a block that no other writes, and that no plan in flight copies."""
    if index >= state.rows[row, int(group.arrays.parameters[AT]) + NUM_BLOCKS]:
        return False
    record = group.pool.arrays.records[group.arrays.table[row, index]]
    return bool(record[REF_COUNT] == 1 and record[HOLD_STEP] <= state.settled_step)


@compiled
def supersede(pool: PoolArrays, block: int, life: int) -> None:
    """Drop what a later end takes the place of, unless it is in use, leased, or another block by now."""
    is_free = pool.records[block, LIFE] == life and pool.records[block, REF_COUNT] == 0
    if is_free and pool.records[block, NAME] and not is_leased(pool, block):
        drop_name(pool, block, SHED)


def go_on_from(state: SpaceState, row: int, tails: Sequence[Tail]) -> None:
    """Note from which tails a new row goes on; if that is another sequence's end, its own end will supersede it."""
    checkpoints = state.checkpoints
    assert checkpoints is not None
    checkpoints.begun[row] = {(tail.group, tail.logical_index): tail.parent for tail in tails}
    for tail in tails:
        pool = state.groups[tail.group].pool
        note = checkpoints.note_of(pool.name, pool.arrays, tail.block)
        if note is not None and note.is_end:
            named = NamedLife(pool.name, tail.block, note.life)
            checkpoints.continued.setdefault(row, []).extend((named, *note.before))


def check_states(state: SpaceState) -> None:
    """What is kept inside an interval or block has the digest of its noted tail; no state was written since."""
    assert state.checkpoints is not None
    for group in state.cached_groups:
        _check_noted(state, state.checkpoints, group)
    for group in state.state_groups:
        _check_unwritten(state, state.checkpoints, group)


def _check_noted(state: SpaceState, checkpoints: Checkpoints, group: Group) -> None:
    arrays = group.pool.arrays
    for block in checkpoints.noted_blocks(group.pool.name):
        note = checkpoints.note_of(group.pool.name, arrays, block)
        if note is None or note.group != group.index:
            continue
        where = f"group {group.index}: block {block}"
        assert 0 < note.length < group.block_size, f"{where} is kept for a whole interval"
        parent = np.frombuffer(note.parent, np.uint32)
        tail, extra = arrays.tokens[block, : note.length], int(arrays.records[block, EXTRA])
        digest = np.empty_like(parent)
        digest_block(parent, tail, state.extra_keys.arrays, extra, digest)
        assert (digest == arrays.digests[block]).all(), f"{where} is kept for other tokens"


def _check_unwritten(state: SpaceState, checkpoints: Checkpoints, group: Group) -> None:
    rows, arrays, at = state.rows, group.pool.arrays, int(group.arrays.parameters[AT])
    for row in np.flatnonzero(rows[:, STATUS] == RUNNING).tolist():
        index, length = divmod(int(rows[row, NUM_TOKENS]), group.block_size)
        block = int(group.arrays.table[row, index]) if index < rows[row, at + NUM_BLOCKS] else NULL_BLOCK
        if length and arrays.records[block, NAME] == group.index + 1:
            note = checkpoints.note_of(group.pool.name, arrays, block)
            is_as_kept = note is not None and note.length == length
            assert is_as_kept, f"group {group.index}, row {row}: block {block} is kept, but was written since"


def extra_of_tail(state: SpaceState, group: Group, row: int, index: int, length: int) -> int:
    """Return the extra keys' id for a block's first ``length`` tokens: the block's, without media that begin later."""
    start = index * group.block_size
    if row not in state.media_keys:
        return int(group.pool.arrays.records[group.arrays.table[row, index], EXTRA])
    encoding = keys_of_tail(state.media_keys[row], state.weights.identity, start, start + length)
    return state.extra_keys.intern_all([encoding])[0]


def longest_inside_intervals(known: Known, whole: Ending, checkpoints: Checkpoints) -> Ending:
    """Find the longest hit that ends with states kept inside intervals; the given one if none is longer.

    It ends at the end of a prompt, where the blocks of all other groups end, or at the end of a sequence, which has
    kept its last blocks of all groups.
    """
    state, chains = known.state, known.chains.values()
    most = min([known.prompt.num_hittable, *(chain.num_tokens + chain.group.block_size - 1 for chain in chains)])
    ends = {
        end
        for group in state.state_groups
        for end in ends_of_states(known.lookups[group.index], whole.num_tokens, most, checkpoints)
    }
    for end in sorted(ends, reverse=True):
        tails = _tails_at(known, end)
        longer = None if tails is None else ending_at(known, end, tails)
        if longer is not None:
            return longer._replace(num_partial=end % checkpoints.alignment)
    return whole


def ends_of_states(lookup: Lookup, length: int, most: int, checkpoints: Checkpoints) -> Iterator[int]:
    """Yield the ends, above ``length`` and up to ``most``, of states of a group that were kept inside intervals."""
    group = lookup.group
    num_known = min(lookup.num_known, most // group.block_size)
    for index in range(length // group.block_size, num_known + 1):
        for num_tokens in checkpoints.lengths(group.index, lookup.parent_of(index)):
            end = index * group.block_size + num_tokens
            if length < end <= most:
                yield end


def _tails_at(known: Known, end: int) -> list[Tail | None] | None:
    """Find what all groups have kept at an end inside their blocks; None if one has not: shortest blocks first."""
    tails: list[Tail | None] = []
    for group in sorted(known.state.cached_groups, key=lambda group: group.block_size):
        if end % group.block_size:
            tail = _tail_at(known, group, end)
            if tail is None:
                return None
            tails.append(tail)
    return tails


def _tail_at(known: Known, group: Group, end: int) -> Tail | None:
    """Find what a group has kept of the prompt's first ``end`` tokens, which end inside one of its blocks."""
    chain = known.chains.get(group.index)
    if chain is None:
        return state_at(known, known.lookups[group.index], end)
    index = end // group.block_size
    if len(chain.blocks) < index:
        return None
    return _kept_tail(known, group, end, group.pool.arrays.digests[chain.blocks[index - 1]] if index else ROOT_WORDS)


def state_at(known: Known, lookup: Lookup, end: int) -> Tail | None:
    """Find a group's state behind the prompt's first ``end`` tokens, which end inside an interval."""
    index = end // lookup.group.block_size
    return None if lookup.num_known < index else _kept_tail(known, lookup.group, end, lookup.parent_of(index))


def _kept_tail(known: Known, group: Group, end: int, parent: Uint32Array) -> Tail | None:
    state, prompt = known.state, known.prompt
    index = end // group.block_size
    start = index * group.block_size
    extra = _extra_of_prompt_tail(known, start, end)
    if extra is None:
        return None
    keys = state.extra_keys.arrays
    block = find_tail(group.pool.arrays, group.arrays, parent, prompt.tokens[start:end], keys, extra)
    return Tail(group.index, int(block), index, parent.copy(), end - start) if block != NULL_BLOCK else None


def _extra_of_prompt_tail(known: Known, start: int, end: int) -> int | None:
    """Id of the extra keys of the prompt's positions ``[start, end)``; None if no block carries them."""
    prompt, epoch = known.prompt, known.state.weights.identity
    if not prompt.has_extra_keys(epoch):
        return 0
    return known.state.extra_keys.id_of(keys_of_tail(prompt.keys, epoch, start, end))


def keys_of_tail(keys: RequestKeys, weights_epoch: str, start: int, stop: int) -> bytes:
    """Encode the extra keys of the positions ``[start, stop)`` of a request, in the form that blocks have them."""
    whole = keys.first_block_key(weights_epoch) if start == 0 else b""
    return whole + keys.media_key(start, stop) if keys.media else whole


@compiled
def find_tail(
    pool: PoolArrays,
    group: GroupArrays,
    parent: Uint32Array,
    tokens: Int32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> int:
    """Find the kept state after less than an interval of tokens that follow ``parent``; else the null block."""
    digest_block(parent, tokens, extra_keys, extra, extra_keys.digest)
    block = find(pool, group.parameters[NAME_IN_POOL], extra_keys.digest)
    if block == NULL_BLOCK or pool.records[block, EXTRA] != extra:
        return NULL_BLOCK
    if pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        return NULL_BLOCK
    return block if holds_tokens(pool, block, tokens, 0, len(tokens)) else NULL_BLOCK


@compiled
def name_tail(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    num_tokens: int,
    parent: Uint32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
    is_end: bool,  # noqa: FBT001 - loops take arguments by place
) -> int:
    """Name a block of a row for its tokens below ``num_tokens``, with the extra keys of this tail; return it.

    The null block if the row's is named already, or another one has its name. At a sequence's end, a name for the open
    step's tokens goes: the row leaves without them. In a group whose hits follow links, such a block is nobody's child:
    it is found by its digest alone, since what lies behind its tokens is of an earlier life.
    """
    block_size = group.parameters[BLOCK_SIZE]
    index = num_tokens // block_size
    block = group.table[row, index]
    if is_end and pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        if pool.records[block, NAME]:
            drop_name(pool, block, CALLED_OFF)
        pool.records[block, PENDING_STEP] = 0
    if pool.records[block, NAME]:
        return NULL_BLOCK
    record = rows[row]
    at = group.parameters[AT]
    before, life = record[at + TAIL], record[at + TAIL_LIFE]
    if is_end:
        before = group.table[row, index - 1] if index else NULL_BLOCK
        life = pool.records[before, LIFE] - int(group.parameters[KIND] == FULL)
    length = num_tokens % block_size
    is_named = name_by_tail(pool, group, block, length, parent, extra_keys, extra, before, life)
    return int(block) if is_named else NULL_BLOCK


@inlined
def name_by_tail(
    pool: PoolArrays,
    group: GroupArrays,
    block: int,
    length: int,
    parent: Uint32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
    before: int,
    life: int,
) -> bool:
    """Name a block for its first ``length`` tokens behind ``parent``, unless another block has that name.

    ``before`` in its given life is the block that it follows.
    """
    name = group.parameters[NAME_IN_POOL]
    digest_block(parent, pool.tokens[block, :length], extra_keys, extra, extra_keys.digest)
    if find(pool, name, extra_keys.digest) != NULL_BLOCK:
        return False
    set_digest(pool, block, extra_keys.digest)
    if len(pool.parent_digests):
        set_parent(pool, block, parent)
    pool.records[block, EXTRA] = extra
    name_block(pool, name, block, before, life)
    return True


@compiled
def drop_tail_names(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Remove the names of rows' partly filled blocks, so that the rows continue in place."""
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        num_tokens = rows[row, NUM_TOKENS]
        if num_tokens % block_size == 0:
            continue
        block = group.table[row, num_tokens // block_size]
        if pool.records[block, NAME]:
            drop_name(pool, block)


@compiled
def surrender(pool: PoolArrays, block: int) -> None:
    """Make a checkpoint without other references the next block to be allocated, with its content."""
    drop_name(pool, block)
    release(pool, block, 0)


@compiled
def resume(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int, source: int) -> bool:
    """Let a new row continue from a checkpoint; return whether its own block is to become a copy of ``source``.

    The row has a reference to the checkpoint, which is released, unless the row's own block is the checkpoint.
    """
    own = group.table[row, index]
    pool.records[own, QUEUE] = IN_USE
    if own == source:
        return False
    if len(pool.epochs):
        copy_epochs(pool, source, pool, own)
    pool.records[own, HOLD_STEP] = pool.counts[OPEN_STEP]
    pool.records[source, HOLD_STEP] = pool.counts[OPEN_STEP]
    release(pool, source, rows[row, LAST_STEP])
    return True
