"""Recurrent states at the ends of prompts: where they are to be kept, and naming those that a plan computes.

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

from collections.abc import Iterator

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import ExtraKeyArrays, digest_block, set_digest, set_parent
from pagedkv.blocks.epochs import copy_epochs
from pagedkv.blocks.life_cycle import drop_name, release
from pagedkv.blocks.prefix_index import find, name_block
from pagedkv.blocks.record import (
    AT_END,
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
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.space.hits import Ending, Known, Lookup, Tail, ending_at, holds_tokens
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    FROZEN,
    LAST_STEP,
    NAME_IN_POOL,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_TOKENS,
    PROMPT_END,
    RUNNING,
    SHEDS,
    STATUS,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
)
from pagedkv.space.state import Checkpoints, Group, SpaceState, TailNote
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
    pool, parent = group.pool, state.chains[group.lane][row]
    extra = _extra_of_tail(state, group, row, index, length)
    block = name_tail(*group.view, row, parent, state.extra_keys.arrays, extra)
    if block == NULL_BLOCK:
        return
    if group.arrays.parameters[SHEDS]:
        pool.arrays.records[block, KEPT] |= AT_END
    life = int(pool.arrays.records[block, LIFE])
    checkpoints.note(pool.name, block, TailNote(group.index, parent.tobytes(), length, life))


def check_states(state: SpaceState) -> None:
    """A state kept inside an interval has the digest of its noted tail, and was not written since."""
    assert state.checkpoints is not None
    for group in state.state_groups:
        _check_noted(state, state.checkpoints, group)
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


def _extra_of_tail(state: SpaceState, group: Group, row: int, index: int, length: int) -> int:
    """Return the extra keys' id for a block's first ``length`` tokens: the block's, without media that begin later."""
    start = index * group.block_size
    if row not in state.media_keys:
        return int(group.pool.arrays.records[group.arrays.table[row, index], EXTRA])
    encoding = keys_of_tail(state.media_keys[row], state.weights.identity, start, start + length)
    return state.extra_keys.intern_all([encoding])[0]


def longest_inside_intervals(known: Known, whole: Ending, checkpoints: Checkpoints) -> Ending:
    """Find the longest hit that ends with states kept inside intervals; the given one if none is longer."""
    ends = {
        end
        for group in known.state.state_groups
        for end in ends_of_states(known.lookups[group.index], whole.num_tokens, known.limit, checkpoints)
    }
    for end in sorted(ends, reverse=True):
        tails = [
            state_at(known, known.lookups[group.index], end)
            for group in known.state.state_groups
            if end % group.block_size
        ]
        longer = ending_at(known, end, tails)
        if longer is not None:
            return longer
    return whole


def ends_of_states(lookup: Lookup, length: int, most: int, checkpoints: Checkpoints) -> Iterator[int]:
    """Yield the ends, above ``length`` and up to ``most``, of states of a group that were kept inside intervals."""
    group = lookup.group
    num_known = min(lookup.num_known, most // group.block_size)
    for index in range(length // group.block_size, num_known + 1):
        for num_tokens in checkpoints.lengths(group.index, lookup.parent_of(index)):
            end = index * group.block_size + num_tokens
            if length < end <= most and end % checkpoints.alignment == 0:
                yield end


def state_at(known: Known, lookup: Lookup, end: int) -> Tail | None:
    """Find a group's state behind the prompt's first ``end`` tokens, which end inside an interval."""
    state, prompt, (group, _) = known.state, known.prompt, lookup
    index = end // group.block_size
    start = index * group.block_size
    extra = _extra_of_prompt_tail(known, start, end)
    if lookup.num_known < index or extra is None:
        return None
    parent, keys = lookup.parent_of(index), state.extra_keys.arrays
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
    parent: Uint32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> int:
    """Name the block that a row has partly filled, with the extra keys of its tail; return it.

    The null block if the row's is named already, or another one has its name.
    """
    block_size = group.parameters[BLOCK_SIZE]
    num_tokens = rows[row, NUM_TOKENS]
    block = group.table[row, num_tokens // block_size]
    if pool.records[block, NAME]:
        return NULL_BLOCK
    name = group.parameters[NAME_IN_POOL]
    tail = pool.tokens[block, : num_tokens % block_size]
    digest_block(parent, tail, extra_keys, extra, extra_keys.digest)
    if find(pool, name, extra_keys.digest) != NULL_BLOCK:
        return NULL_BLOCK
    set_digest(pool, block, extra_keys.digest)
    set_parent(pool, block, parent)
    pool.records[block, EXTRA] = extra
    record = rows[row]
    at = group.parameters[AT]
    name_block(pool, name, block, record[at + TAIL], record[at + TAIL_LIFE])
    return int(block)


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
