"""The life cycle of a block: take, share, release, hold, evict, and the loss of its name, as compiled functions.

A block's journey::

            acquire                     release, count 0, no step needs it: cached -> back, else -> front
    FREE ------------> IN USE --------------------------------------------------------> FREE
      ^                 |   ^
      |                 |   | reuse (a prefix hit)
      |   settle        v   |
      +-------------- DEFERRED   release, count 0, a step in flight or a planned copy may still use it

Steps are numbered. ``OPEN_STEP`` is being put together, every step up to ``SETTLED_STEP`` is over, those between are in
flight. A reference is given back with the step that may be the last to touch the block for that holder's sake, and the
block's hold is raised to that, also while references remain: with the last one gone, it waits for the latest of all
these steps. Every step has a list of the blocks that wait for it, so that settling costs what it frees.

Decides when a block changes; the columns are changed by :mod:`~pagedkv.memory.pool.block_record`, the order of free
blocks by :mod:`~pagedkv.memory.pool.free_queue`. Does not know sequences or tables, nor what stands beside it: features
act at moments (:mod:`~pagedkv.memory.pool.moments`).
"""

from pagedkv.memory.compilation.compiled import compiled, inlined, unsigned
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool import free_queue, moments
from pagedkv.memory.pool.block_record import add_references, begin_life, drop_reference, hold_until, raise_hold
from pagedkv.memory.pool.blocks import (
    DEFERRED,
    FREE,
    HOLD_STEP,
    IN_ORDER,
    NAME,
    NEXT,
    NULL_BLOCK,
    NUM_ACQUIRED,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_EVICTED,
    NUM_HIT_BLOCKS,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    PoolArrays,
)
from pagedkv.memory.pool.causes import CALLED_OFF, EVICTED, OVERWRITTEN, SHED
from pagedkv.memory.pool.contents import clear_extra
from pagedkv.memory.pool.prefix_index import forget, unname
from pagedkv.memory.pool.spare_blocks import enqueue_spare, is_spare, renew
from pagedkv.memory.pool.step_numbers import note_settled

__all__ = [
    "acquire",
    "acquire_all",
    "acquire_often",
    "adopt",
    "claim",
    "drop_name",
    "lose_content",
    "lose_name",
    "lower_hold",
    "release",
    "reuse",
    "reuse_all",
    "settle",
]


@inlined
def acquire(pool: PoolArrays) -> int:
    """Hand out the next free block, evicting what it cached; the caller has checked that there is one."""
    block = unsigned(pool.records[NULL_BLOCK, NEXT])
    if _is_plain(pool, block):
        free_queue.remove(pool.records, pool.counts, block)
    else:
        block = unsigned(_vacate(pool))
    _begin(pool, block)
    pool.counts[NUM_ACQUIRED] += 1
    return block


@inlined
def acquire_often(pool: PoolArrays) -> int:
    """Do what :func:`acquire` does, for loops that take block after block: no call hands over the pool."""
    block = _make_vacant(pool)
    _begin(pool, block)
    pool.counts[NUM_ACQUIRED] += 1
    return block


@compiled
def acquire_all(pool: PoolArrays, blocks: Int32Array) -> None:
    """Hand out as many free blocks as fit into ``blocks``; the caller has checked that there are so many.

    Those without content go from the front of the list in one piece: 3 ns each, where one by one takes 8.
    """
    for index in range(_take_plain(pool, blocks), len(blocks)):
        block = unsigned(_make_vacant(pool))
        _begin(pool, block)
        pool.counts[NUM_ACQUIRED] += 1
        blocks[index] = block


@inlined
def _take_plain(pool: PoolArrays, blocks: Int32Array) -> int:
    """Hand out what is at the front and has no content, as far as it fits; return how many there were."""
    num_taken = 0
    block = unsigned(pool.records[NULL_BLOCK, NEXT])
    while num_taken < len(blocks) and _is_plain(pool, block):
        following = unsigned(pool.records[block, NEXT])
        _begin(pool, block)
        blocks[num_taken] = block
        num_taken += 1
        block = following
    free_queue.begin_with(pool.records, pool.counts, block, num_taken)
    pool.counts[NUM_ACQUIRED] += num_taken
    return num_taken


@inlined
def _is_plain(pool: PoolArrays, first: int) -> bool:
    """Tell whether the first of the cold list has no content, so that nothing goes for it, and nothing counts takes."""
    return bool(first != NULL_BLOCK and not pool.records[first, NAME]) and not moments.counts_takes(pool)


@inlined
def _make_vacant(pool: PoolArrays) -> int:
    """Take the next free block out and make it forget what it cached."""
    moments.make_room(pool)
    records = pool.records
    block = free_queue.first(records)
    if not records[block, NAME]:
        free_queue.remove(records, pool.counts, block)
    else:
        if not is_spare(pool, block):
            block = unsigned(moments.choose_victim(pool, block))
        moments.unlink(pool, block)
        lose_content(pool, block)
    moments.note_take(pool, block)
    return block


@inlined
def lose_content(pool: PoolArrays, block: int) -> None:
    """Forget the name of a block that was cached, and was taken out of its list to make room."""
    pool.counts[NUM_EVICTED] += 1
    cause = SHED
    if not is_spare(pool, block):
        cause = EVICTED
        moments.note_eviction(pool, block)
    unname(pool, block, cause)


@compiled
def _vacate(pool: PoolArrays) -> int:
    """Do that in a call of its own: so little of it stands in loops that take a block now and then."""
    return int(_make_vacant(pool))


@inlined
def _begin(pool: PoolArrays, block: int) -> None:
    """Let a block begin another life, with a first reference."""
    begin_life(pool.records, block)
    clear_extra(pool.records, block)
    moments.note_begin(pool, block)


@inlined
def claim(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a block that has content, wherever it is."""
    records = pool.records
    if is_spare(pool, block):
        renew(pool, block)
    if records[block, QUEUE] == FREE:
        moments.unlink(pool, block)
        moments.note_claim(pool, block)
    elif records[block, QUEUE] == DEFERRED:
        free_queue.stop_waiting(pool.records, pool.counts, block)
    add_references(records, block, 1)


@inlined
def reuse(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a named block, for a sequence that hits it."""
    claim(pool, block)
    moments.note_reuse(pool, block)


@inlined
def adopt(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a named block, for a sequence that has computed its content once more."""
    claim(pool, block)
    moments.note_recomputed(pool, block)


@compiled
def reuse_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Take one more reference to each block of a prefix hit (null blocks are passed over)."""
    for block in block_ids:
        if block != NULL_BLOCK:
            reuse(pool, block)
            pool.counts[NUM_HIT_BLOCKS] += 1


@inlined
def release(pool: PoolArrays, block: int, last_step: int) -> None:
    """Give one reference back; the last one sends the block to the free queue or defers it.

    ``last_step`` is the last planned step that may touch the block for the sake of whoever gives it back.
    """
    records = pool.records
    drop_reference(records, block)
    counts = pool.counts
    if not counts[IN_ORDER]:
        raise_hold(records, block, last_step)
    if records[block, REF_COUNT] > 0:
        return
    if records[block, NAME] and records[block, PENDING_STEP] == counts[OPEN_STEP]:
        forget(pool, block, CALLED_OFF)  # nobody is left to compute what was promised for the open step
    if records[block, HOLD_STEP] > counts[SETTLED_STEP]:
        free_queue.wait_for(records, counts, block, records[block, HOLD_STEP])
    else:
        _enqueue(pool, block)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced block where its content says: the front if it has none, else among its like."""
    moments.note_rest(pool, block)
    if not pool.records[block, NAME]:
        free_queue.prepend(pool.records, pool.counts, block)
        return
    if is_spare(pool, block) and not moments.stays(pool, block):
        enqueue_spare(pool, block)
    else:
        moments.enqueue(pool, block)
    moments.note_cached(pool, block)


@compiled
def settle(pool: PoolArrays, step: int) -> None:
    """Note that every step up to ``step`` is over, and free what waited for them."""
    settled = pool.counts[SETTLED_STEP]
    note_settled(pool.counts, step)
    if pool.counts[NUM_DEFERRED]:
        for over in range(settled + 1, min(step, settled + NUM_DEFERRED_LISTS) + 1):
            _free_deferred(pool, free_queue.deferred_sentinel(pool.records, over), step)


@compiled
def _free_deferred(pool: PoolArrays, sentinel: int, step: int) -> None:
    """Free the blocks of one list that wait for no later step than ``step``, in the order of their release."""
    records = pool.records
    block = records[sentinel, NEXT]
    while block != sentinel:
        following = records[block, NEXT]
        if records[block, HOLD_STEP] <= step:
            free_queue.stop_waiting(records, pool.counts, block)
            _enqueue(pool, block)
        block = following


@compiled
def drop_name(pool: PoolArrays, block: int, cause: int = OVERWRITTEN) -> None:
    """Make a named block's content unfindable; if it is free, it has no content any more.

    ``cause``: why, for whoever asks later (:mod:`pagedkv.memory.pool.causes`).
    """
    lose_name(pool, block, cause)


@inlined
def lose_name(pool: PoolArrays, block: int, cause: int) -> None:
    """Do what :func:`drop_name` does, compiled into the caller."""
    is_free = pool.records[block, QUEUE] == FREE
    if not (is_free and is_spare(pool, block)):
        moments.note_drop(pool, block)  # else it was dropped when it became spare
    if is_free:
        moments.unlink(pool, block)
    unname(pool, block, cause)
    if is_free:
        moments.note_vacant(pool, block)
        free_queue.prepend(pool.records, pool.counts, block)


@compiled
def lower_hold(pool: PoolArrays, block: int, step: int) -> None:
    """Note that ``step`` is the last that a block waits for, which waited for a later one."""
    records, counts = pool.records, pool.counts
    hold_until(records, block, step)
    if records[block, QUEUE] != DEFERRED:
        return
    free_queue.stop_waiting(records, counts, block)
    if step > counts[SETTLED_STEP]:
        free_queue.wait_for(records, counts, block, step)
    else:
        _enqueue(pool, block)
