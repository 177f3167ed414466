"""The life cycle of a block: allocate, share, release, hold, evict, and lose its name, as compiled functions.

The places of a block, and the transitions between them::

            acquire                     release, count 0, no step needs it: cached -> back, else -> front
    FREE ------------> IN USE --------------------------------------------------------> FREE
      ^                 |   ^
      |                 |   | reuse (a prefix hit)
      |   settle        v   |
      +-------------- DEFERRED   release, count 0, a step in flight or a planned copy may still use the block

    FREE <-- bring_back, take_away --> ABSENT      the block's memory is given back, and is there again

Steps are numbered. ``OPEN_STEP`` is being put together, every step up to ``SETTLED_STEP`` is over, and those between
are in flight. A reference is released together with the last step that may use the block on account of that reference.
The block's ``HOLD_STEP`` is raised to that step, even while other references remain, so that after the last release the
block waits for the latest of these steps. Every step has a list of the blocks that wait for it, so the cost of settling
a step is proportional to the blocks that it frees.

Free blocks are ordered by :mod:`~pagedkv.blocks.free_queue`. Sequences and tables are handled elsewhere. A free block
is of one of these kinds, and blocks are allocated in this order::

    without content | spare | cached, in the policy's order | leased, the largest lease first

Leased and spare blocks are excluded from the eviction policy. Every free named block is in a list of its tenant, and
counts towards the limit of its group. A tenant at its cap loses a block of its own. Features act where they are called
here and in :mod:`~pagedkv.blocks.prefix_index`, if the pool has their array; machine code of pools without any feature
contains none of them (:func:`~pagedkv.compilation.compiled.featured`).

*Spare* blocks are named blocks that are not expected to be hit. They can be hit until they are allocated for other
content; those that became spare first are evicted first. To exclude them, the eviction policy is called as if the name
were dropped (``note_drop``), and set again at a hit. Callers decide which blocks are spare:
:mod:`pagedkv.space.windows`, and the code that frees superseded sequences. The mark is a value of ``KEPT``. In groups
that are walked this is the column of the prefetch hint, so a spare block has no hint.
"""

from pagedkv.blocks import cached_bounds, free_queue, tenant_charges
from pagedkv.blocks.epochs import undate
from pagedkv.blocks.eviction import policy
from pagedkv.blocks.free_queue import is_leased, is_spare
from pagedkv.blocks.leasing import enqueue_leased, is_due, unlink_named
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import lose_content, unname
from pagedkv.blocks.record import (
    ABSENT,
    CALLED_OFF,
    CHARGED,
    DEFERRED,
    EVICTED,
    EXTRA,
    FREE,
    HOLD_STEP,
    IN_ORDER,
    KEPT,
    LIFE,
    NAME,
    NEW,
    NEXT,
    NO_TENANT,
    NULL_BLOCK,
    NUM_ABSENT,
    NUM_ACQUIRED,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_EVICTED,
    NUM_FREE,
    NUM_HIT_BLOCKS,
    NUM_LEASED,
    OPEN_STEP,
    OVERWRITTEN,
    PENDING_STEP,
    PREVIOUS,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    SHED,
    SPARE,
    PoolArrays,
)
from pagedkv.blocks.victims import end_largest_lease, make_room
from pagedkv.compilation.compiled import compiled, featured, inlined, unsigned
from pagedkv.contract.arrays import Int32Array


@inlined
def acquire(pool: PoolArrays) -> int:
    """Allocate the next free block, evicting its content if it is cached; the caller has checked that there is one."""
    block = unsigned(pool.records[NULL_BLOCK, NEXT])
    if _is_plain(pool, block):
        free_queue.remove(pool.records, pool.counts, block)
    else:
        block = unsigned(_make_vacant_by_call(pool))
    _start_life(pool, block)
    pool.counts[NUM_ACQUIRED] += 1
    return block


@inlined
def acquire_often(pool: PoolArrays) -> int:
    """Allocate as :func:`acquire` does, but always inlined, so that loops over blocks pass no arrays to a call."""
    block = _make_vacant(pool)
    _start_life(pool, block)
    pool.counts[NUM_ACQUIRED] += 1
    return block


@compiled
def acquire_all(pool: PoolArrays, blocks: Int32Array) -> None:
    """Allocate as many free blocks as fit into ``blocks``; the caller has checked that there are so many.

    Blocks without content are taken from the front of the list as one piece: 3 ns each, where one by one takes 8.
    """
    records, counts = pool.records, pool.counts
    num_taken = 0
    first = unsigned(records[NULL_BLOCK, NEXT])
    while num_taken < len(blocks) and _is_plain(pool, first):
        following = unsigned(records[first, NEXT])
        _start_life(pool, first)
        blocks[num_taken] = first
        num_taken += 1
        first = following
    records[NULL_BLOCK, NEXT] = first
    records[first, PREVIOUS] = NULL_BLOCK
    counts[NUM_FREE] -= num_taken
    counts[NUM_ACQUIRED] += num_taken
    for index in range(num_taken, len(blocks)):
        block = unsigned(_make_vacant(pool))
        _start_life(pool, block)
        counts[NUM_ACQUIRED] += 1
        blocks[index] = block


@inlined
def _is_plain(pool: PoolArrays, first: int) -> bool:
    """Whether the first block of the cold list has no content, so that none is evicted, and takes are not counted."""
    return bool(first != NULL_BLOCK and not pool.records[first, NAME]) and not tenant_charges.has_tenants(pool)


@inlined
def _make_vacant(pool: PoolArrays) -> int:
    """Take the next free block out of its list and remove its name, if it has one."""
    if len(pool.tenants):
        make_room(pool)
    if pool.counts[NUM_LEASED] and pool.counts[NUM_LEASED] == pool.counts[NUM_FREE]:
        end_largest_lease(pool, tenant_charges.ANY)
    records = pool.records
    block = free_queue.first(records)
    if not records[block, NAME]:
        free_queue.remove(records, pool.counts, block)
    else:
        if not is_spare(pool, block):
            block = unsigned(policy.choose_victim(pool, block))
        unlink_named(pool, block)
        lose_content(pool, block)
    if len(pool.tenants):
        tenant_charges.take(pool, block)
    return block


@compiled
def _make_vacant_by_call(pool: PoolArrays) -> int:
    """Call :func:`_make_vacant` as a function of its own, which keeps loops that rarely allocate a block small."""
    return int(_make_vacant(pool))


@inlined
def _start_life(pool: PoolArrays, block: int) -> None:
    """Start a new life of a block that was taken from the free ones, with one reference and no content."""
    records = pool.records
    records[block, REF_COUNT] = 1
    records[block, LIFE] += 1
    records[block, HOLD_STEP] = 0
    records[block, PENDING_STEP] = 0
    records[block, QUEUE] = NEW
    records[block, EXTRA] = 0  # no extra keys
    if len(pool.epochs):
        undate(pool, block)


@inlined
def claim(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a block that has content, in any place."""
    records = pool.records
    if is_spare(pool, block):
        renew(pool, block)
    if records[block, QUEUE] == FREE:
        unlink_named(pool, block)
        if is_leased(pool, block):
            policy.note_name(pool, block)
        if len(pool.tenants):
            tenant_charges.resume(pool, block)
        policy.note_claim(pool, block)
    elif records[block, QUEUE] == DEFERRED:
        free_queue.stop_waiting(pool.records, pool.counts, block)
    records[block, REF_COUNT] += 1


@inlined
def reuse(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a named block, for a sequence that hits it."""
    claim(pool, block)
    policy.note_reuse(pool, block)


@inlined
def adopt(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a named block, for a sequence that has computed the same content again."""
    claim(pool, block)
    policy.note_recomputed(pool, block)


@takes(Like.POOL, Like.IDS)
@compiled
def reuse_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Take one more reference to each block of a prefix hit (null blocks are skipped)."""
    for block in block_ids:
        if block != NULL_BLOCK:
            reuse(pool, block)
            pool.counts[NUM_HIT_BLOCKS] += 1


@inlined
def release(pool: PoolArrays, block: int, last_step: int) -> None:
    """Release one reference; the last release frees the block or defers it.

    ``last_step`` is the last planned step that may use the block on account of this reference.
    """
    records = pool.records
    records[block, REF_COUNT] -= 1
    counts = pool.counts
    if not counts[IN_ORDER]:
        records[block, HOLD_STEP] = max(records[block, HOLD_STEP], last_step)
    if records[block, REF_COUNT] > 0:
        return
    if records[block, NAME] and records[block, PENDING_STEP] == counts[OPEN_STEP]:
        drop_name(pool, block, CALLED_OFF)  # the row that was to compute it in the open step is gone
    if records[block, HOLD_STEP] > counts[SETTLED_STEP]:
        free_queue.wait_for(records, counts, block, records[block, HOLD_STEP])
    else:
        _enqueue(pool, block)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced block into a list by its content: at the front if it has none, else with cached blocks."""
    if len(pool.tenants):
        tenant_charges.rest(pool, block)
    if is_leased(pool, block) and is_due(pool, block):
        pool.leases[block] = 0
    if not pool.records[block, NAME]:
        free_queue.prepend(pool.records, pool.counts, block)
        return
    if is_leased(pool, block):
        enqueue_leased(pool, block)
    elif is_spare(pool, block):
        enqueue_spare(pool, block)
    else:
        policy.enqueue(pool, block)
    if len(pool.tenants):
        tenant_charges.join(pool, block)
    if len(pool.bounds):
        _enforce_bound(pool, block)


@featured
@compiled
def _enforce_bound(pool: PoolArrays, block: int) -> None:
    """Enforce the limit of a group, of which a block has become cached: evict its least valuable block if necessary."""
    if cached_bounds.stand(pool, block):
        least = cached_bounds.least_valuable(pool, block)
        drop_name(pool, least, SHED if is_spare(pool, least) else EVICTED)


@takes(Like.POOL, Like.NUMBER)
@compiled
def settle_until(pool: PoolArrays, step: int) -> None:
    """Record that every step up to ``step`` is over, and free the blocks that waited for these steps."""
    settled = pool.counts[SETTLED_STEP]
    pool.counts[SETTLED_STEP] = step
    if pool.counts[NUM_DEFERRED]:
        for over in range(settled + 1, min(step, settled + NUM_DEFERRED_LISTS) + 1):
            _free_deferred(pool, free_queue.deferred_sentinel(pool.records, over), step)


@compiled
def _free_deferred(pool: PoolArrays, sentinel: int, step: int) -> None:
    """Free the blocks of one list that wait for no step after ``step``, in the order of their release."""
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
    """Remove a block's name, so that its content cannot be hit; a free block then has no content any more.

    ``cause``: why, to be stored in a ghost (:mod:`pagedkv.blocks.record`).
    """
    lose_name(pool, block, cause)


@inlined
def lose_name(pool: PoolArrays, block: int, cause: int) -> None:
    """Remove a name as :func:`drop_name` does, inlined into the caller."""
    is_free = pool.records[block, QUEUE] == FREE
    if not (is_free and (is_spare(pool, block) or is_leased(pool, block))):
        policy.note_drop(pool, block)  # a spare or leased free block was dropped when it became so
    if is_free:
        unlink_named(pool, block)
    unname(pool, block, cause)
    if is_free:
        if len(pool.tenants):
            tenant_charges.leave(pool, block)
            pool.tenants[block, CHARGED] = NO_TENANT
        free_queue.prepend(pool.records, pool.counts, block)


@compiled
def lower_hold(pool: PoolArrays, block: int, step: int) -> None:
    """Lower the last step that a block waits for to ``step``."""
    records, counts = pool.records, pool.counts
    records[block, HOLD_STEP] = step
    if records[block, QUEUE] != DEFERRED:
        return
    free_queue.stop_waiting(records, counts, block)
    if step > counts[SETTLED_STEP]:
        free_queue.wait_for(records, counts, block, step)
    else:
        _enqueue(pool, block)


@compiled
def enqueue_spare(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced named block at the back of the spare list."""
    policy.note_drop(pool, block)
    free_queue.insert_before(pool.records, pool.counts, free_queue.spare_sentinel(pool.records), block)


@compiled
def make_spare(pool: PoolArrays, block: int) -> None:
    """Mark an unreferenced named block, free or deferred, as spare."""
    if is_spare(pool, block):
        return
    pool.records[block, KEPT] = SPARE
    if pool.records[block, QUEUE] == FREE:
        policy.note_drop(pool, block)
        _move_to_back(pool, block)


@compiled
def _move_to_back(pool: PoolArrays, block: int) -> None:
    """Move a free spare block, whose mark may be new, to the back of the spare blocks, and of its tenant's."""
    free_queue.remove(pool.records, pool.counts, block)
    free_queue.insert_before(pool.records, pool.counts, free_queue.spare_sentinel(pool.records), block)
    if len(pool.tenants):
        tenant_charges.leave(pool, block)
        tenant_charges.join(pool, block)


@compiled
def make_unheld_spare(pool: PoolArrays, blocks: Int32Array) -> None:
    """Mark those blocks as spare that are named and unreferenced, even if kept for a reason, except by a feature.

    They are evicted in this order, also those that are spare already, since they were shed when they were released.
    """
    for block in blocks:
        if pool.records[block, NAME] and pool.records[block, REF_COUNT] == 0 and not is_leased(pool, block):
            if is_spare(pool, block) and pool.records[block, QUEUE] == FREE:
                _move_to_back(pool, block)
            make_spare(pool, block)


@compiled
def make_cached(pool: PoolArrays, block: int) -> None:
    """Make an unreferenced spare block an ordinary cached one."""
    renew(pool, block)
    if pool.records[block, QUEUE] == FREE:
        free_queue.remove(pool.records, pool.counts, block)
        policy.enqueue(pool, block)
        if len(pool.tenants):
            tenant_charges.leave(pool, block)
            tenant_charges.join(pool, block)


@compiled
def renew(pool: PoolArrays, block: int) -> None:
    """Remove the spare mark of a block that is about to be taken out of its place."""
    pool.records[block, KEPT] = 0
    if pool.records[block, QUEUE] == FREE:
        policy.note_name(pool, block)


NO_STEP = 0  # an external reader is part of no step, so a block that it releases waits for none on its account


@compiled
def claim_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Take one more reference to each block. It is not a hit, so the eviction policy is not notified."""
    for block in block_ids:
        claim(pool, block)


@compiled
def release_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Release one reference to each block, the last block first, as for a freed sequence."""
    for place in range(len(block_ids) - 1, -1, -1):
        release(pool, block_ids[place], NO_STEP)


@compiled
def take_away(pool: PoolArrays, blocks: Int32Array) -> None:
    """Make free blocks absent; those that are cached are evicted."""
    records, counts = pool.records, pool.counts
    for block in blocks:
        if records[block, NAME]:
            counts[NUM_EVICTED] += 1
            drop_name(pool, block, SHED if is_spare(pool, block) else EVICTED)
        free_queue.remove(records, counts, block)
        records[block, QUEUE] = ABSENT
    counts[NUM_ABSENT] += len(blocks)


@compiled
def bring_back(pool: PoolArrays, blocks: Int32Array) -> None:
    """Make absent blocks free. The first of them is allocated next."""
    for place in range(len(blocks) - 1, -1, -1):
        free_queue.prepend(pool.records, pool.counts, blocks[place])
    pool.counts[NUM_ABSENT] -= len(blocks)
