"""Freeing sequences, changing the order of eviction of what they left, and emptying the whole prefix cache.

The space's clock stands here, too: the caller's seconds, by which leases end and eviction policies measure ages. It is
the core's only clock, and stands still between calls of ``advance``.

Leases keep what prompts hit, or ended sequences leave, until a time of that clock. :mod:`pagedkv.blocks.leasing` says
how they change the order of eviction. They never change whether a block can be taken, so admission ignores leases. A
leased block of a window group is kept for the reason ``AT_END``, so it is not shed as long as the lease lasts.
"""

import math
from numbers import Real
from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.eviction.policy import note_request
from pagedkv.blocks.eviction.priority import PRIORITY, set_priority
from pagedkv.blocks.free_queue import is_spare
from pagedkv.blocks.leasing import lease
from pagedkv.blocks.life_cycle import NO_STEP, make_cached, make_unheld_spare, release, reuse
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import (
    AT_END,
    FREE,
    HIGH_PRIORITY,
    KEPT,
    LIFE,
    NAME,
    NO_TENANT,
    NULL_BLOCK,
    OTHER_EPOCH,
    QUEUE,
    RESET,
    PoolArrays,
)
from pagedkv.blocks.victims import end_overdue, evict_cached
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arguments import NO_NUMBERS, as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import LARGEST_PRIORITY
from pagedkv.errors import ConfigurationError
from pagedkv.space.drafting import free_slots
from pagedkv.space.growing import hand_over
from pagedkv.space.hits import PrefixHit
from pagedkv.space.loading import freeze_loads
from pagedkv.space.rows import (
    AT,
    FROZEN,
    LAST_STEP,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    SHEDS,
    STATUS,
    SWAPPED,
    TAIL,
    TAIL_LIFE,
    VACANT,
    GroupArrays,
    shed_at_release,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.states import keep_ends
from pagedkv.space.steps import StepLedger
from pagedkv.space.windows import carrier_of, keep_what_leaves

NO_OUTPUTS: Final = np.zeros(0, np.int32)
"""The argument if the numbers of generated tokens are unknown for all rows."""


class Leaving(NamedTuple):
    """Options for rows that are freed.

    Args:
        num_outputs: int32 ``[rows]``, the tokens that each has generated, or empty if unknown.
        goes_first: whether cached blocks that no other row holds are evicted before all others.
        goes_last: whether what they leave is evicted after all other unleased blocks.
        keep_until_s: until when a lease keeps what they leave; None for no lease.
        keeps_end: whether the states at their ends are kept, for sequences that go on from there.
        number: by which the eviction policy ``priority`` orders what they leave.
    """

    num_outputs: Int32Array = NO_OUTPUTS
    goes_first: bool = False
    goes_last: bool = False
    keep_until_s: float | None = None
    keeps_end: bool = False
    number: int = 0


NOTHING_WANTED: Final = Leaving()


def as_leaving(state: SpaceState, superseded_by: object, keep_until_s: object, priority: object) -> Leaving:
    """Check the arguments about what ended sequences leave.

    Raises:
        ConfigurationError: more than one of them is given, or an impossible one.
    """
    by_number = state.config.eviction == PRIORITY.name
    most = LARGEST_PRIORITY if by_number else 1
    number = as_count(priority, "priority", least=-most, most=most)
    retention = 0 if by_number else number
    if (superseded_by is not None) + (keep_until_s is not None) + (retention != 0) > 1:
        raise ConfigurationError("superseded_by, keep_until_s and priority exclude each other: give one")
    if retention == 1:
        require_leases(state)
    end = None if keep_until_s is None else as_lease_end(state, keep_until_s)
    goes_first, goes_last = superseded_by is not None or retention < 0, retention == 1
    is_ordered = by_number and state.config.prefix_caching
    return Leaving(NO_OUTPUTS, goes_first, goes_last, end, number=number if is_ordered else 0)


def free(  # noqa: C901, PLR0912 - what only some spaces have is called where it happens
    state: SpaceState, batch: Int32Array, mark: int, leaving: Leaving
) -> None:
    """Free the rows of a checked batch and release all their blocks, in the batch's order."""
    rows = state.rows
    with state.changing:
        for tell in state.observers.leaving:
            tell(batch)
        num_unplanned, num_on_host = state.loops[count_leaving](rows, batch, state.scratch.rows)
        for row in state.scratch.rows[:num_unplanned].tolist():
            hand_over(state, row, mark)
        on_device, on_host, outputs = batch, batch[:0], leaving.num_outputs
        if num_on_host:
            is_there = (rows[batch, STATUS] == SWAPPED) | (rows[batch, STATUS] == LOST_ON_HOST)
            on_device, on_host = batch[~is_there], batch[is_there]
            outputs = outputs[~is_there] if len(outputs) else NO_OUTPUTS
        if leaving.keeps_end and state.checkpoints is not None and not state.draft_tables:
            keep_ends(state, on_device)
        if state.shedding_groups:
            keep_what_leaves(state, on_device)
        if state.draft_tables:
            free_slots(state, on_device, is_leaving=True)
        until_s = HIGH_PRIORITY if leaving.goes_last else leaving.keep_until_s
        if until_s is not None:
            _lease_rows(state, on_device, until_s)
        for pool in state.all_pools if leaving.number else ():
            set_priority(pool.arrays, leaving.number)
        going_first = [(group, blocks_of(group, on_device)) for group in state.groups if leaving.goes_first]
        for group in state.all_groups:
            state.loops[release_rows](*group.view, on_device, outputs)
            if group.host_pool is not None and len(on_host):
                state.loops[release_rows](group.host_pool.arrays, group.arrays, rows, on_host, NO_OUTPUTS)
        for group, blocks in going_first:
            make_unheld_spare(group.pool.arrays, blocks)
        for pool in state.all_pools if leaving.number else ():
            set_priority(pool.arrays, 0)
        state.vacate(batch)
        if state.receipts is not None:
            state.receipts.freed(batch)
        for tell in state.observers.freed:
            tell(batch)


def blocks_of(group: Group, batch: Int32Array) -> Int32Array:
    """Return the blocks of rows in a group, with repeats, the tail of all sequences first: int32 ``[any]``."""
    entries = group.arrays.table[batch].T[::-1].ravel()
    blocks: Int32Array = entries[entries != NULL_BLOCK]
    return blocks


def supersede(state: SpaceState, hit: PrefixHit) -> None:
    """Evict the unreferenced and unleased blocks of a hit before all other cached blocks, the tail first."""
    with state.changing:
        for group in state.cached_groups:
            tails = [tail.block for tail in hit.tails if tail.group == group.index]
            blocks = np.append(hit.block_ids[group.index], np.array(tails, np.int32))[::-1]
            make_unheld_spare(group.pool.arrays, blocks[blocks != NULL_BLOCK].astype(np.int32))


def touch(state: SpaceState, hit: PrefixHit) -> None:
    """Make the unreferenced blocks of a hit the last that are evicted, as if they had been hit and released now."""
    with state.changing:
        for group in state.cached_groups:
            tails = [tail.block for tail in hit.tails if tail.group == group.index]
            touch_blocks(group.pool.arrays, group.arrays, np.append(hit.block_ids[group.index], tails).astype(np.int32))


def evict(state: SpaceState, pool: BlockPool, num_blocks: int) -> int:
    """Evict cached blocks of a pool before their room is needed; return how many there were."""
    with state.changing:
        pool.charge_to(NO_TENANT)
        return evict_cached(pool.arrays, num_blocks)


def reset_prefix_cache(state: SpaceState, ledger: StepLedger, weights_epoch: str | None = None) -> None:
    """Empty the prefix index; running sequences keep their blocks but publish nothing from now on.

    Their content was computed before the reset (with the old weights, if these change), so no later sequence may hit
    it. ``weights_epoch``: the version of the weights from now on, if these change.
    """
    with state.changing:
        for pool in state.all_pools:
            pool.clear_names(RESET if weights_epoch is None else OTHER_EPOCH)
        state.rows[state.rows[:, STATUS] != VACANT, FROZEN] = 1
        ledger.forget_duplicates()
        freeze_loads(state)
        if weights_epoch is not None:
            state.weights.begin(weights_epoch)


UNKNOWN: Final = -1


@takes(Like.ROWS, Like.IDS, Like.IDS)
@compiled
def count_leaving(rows: Int32Array, batch: Int32Array, unplanned: Int32Array) -> tuple[int, int]:
    """Count the rows of a batch that have something to compute in the open step, and those that are on the host.

    Args:
        unplanned: int32 ``[any]``; receives the former.
    """
    num_unplanned = num_on_host = 0
    for row in batch:
        status = rows[row, STATUS]
        if status == RUNNING and rows[row, NUM_PLANNED] < rows[row, NUM_TOKENS]:
            unplanned[num_unplanned] = row
            num_unplanned += 1
        elif status in (SWAPPED, LOST_ON_HOST):
            num_on_host += 1
    return num_unplanned, num_on_host


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.IDS)
@compiled
def release_rows(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, num_outputs: Int32Array
) -> None:
    """Release every block of a batch of rows, the tail of each sequence first, after notifying the eviction policy.

    Args:
        num_outputs: int32 ``[rows]``, the tokens that each has generated, or empty if unknown.
    """
    at = group.parameters[AT]
    for place in range(len(batch)):
        row = batch[place]
        output = num_outputs[place] if len(num_outputs) else UNKNOWN
        note_request(pool, group.table[row, : rows[row, at + NUM_BLOCKS]], output)
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if group.parameters[SHEDS]:
                shed_at_release(pool, block)
            release(pool, block, rows[row, LAST_STEP])
            group.table[row, index] = NULL_BLOCK
        rows[row, at + NUM_BLOCKS] = 0


LATEST_S: Final = 2.0**40  # so that microseconds fit in 64 bits


def as_time(state: SpaceState, now: object) -> float:
    """Check a time to which the clock is set. Raises ConfigurationError if it goes back, or is no time."""
    time = _as_seconds(now, "now")
    if time < state.now_s:
        raise ConfigurationError(f"the clock cannot go back from {state.now_s} to {time} seconds")
    return time


def _as_seconds(value: object, what: str) -> float:
    """Check a time. Raises ConfigurationError if it is none."""
    message = f"{what} must be a number of seconds from 0 to {LATEST_S:.0f}, got {value!r}"
    if isinstance(value, NO_NUMBERS) or not isinstance(value, Real):
        raise ConfigurationError(message)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds <= LATEST_S:
        raise ConfigurationError(message)
    return seconds


def as_lease_end(state: SpaceState, until: object) -> float:
    """Check the end of a lease. Raises ConfigurationError if it is past or infinite."""
    require_leases(state)
    time = _as_seconds(until, "the end of a lease")
    if time <= state.now_s:
        raise ConfigurationError(
            f"a lease until {time} seconds would be over: the clock shows {state.now_s}; advance() sets it"
        )
    return time


def require_leases(state: SpaceState) -> None:
    """Raise ConfigurationError if the space keeps no leases."""
    if not state.config.leases:
        raise ConfigurationError("no leases are kept: set leases=True in the configuration")


def advance(state: SpaceState, now_s: float) -> None:
    """Set the clock. O(log leased blocks) for each block whose lease has ended."""
    with state.changing:
        state.now_s = now_s
        for pool in state.pools.values():
            pool.advance(now_s)
        for pool in state.pools.values() if state.config.leases else ():
            end_overdue(pool.arrays, now_s)
        for tell in state.observers.advanced:
            tell(now_s)


def lease_hit(state: SpaceState, hit: PrefixHit, until_s: float) -> None:
    """Lease the blocks that a prompt hits, including those inside which the hit ends."""
    with state.changing:
        for tail in hit.tails:
            group = state.groups[tail.group]
            lease_blocks(group.pool.arrays, group.arrays, np.array([tail.block], np.int32), until_s)
        for group in state.cached_groups:
            lease_blocks(group.pool.arrays, group.arrays, hit.block_ids[group.index], until_s)


@compiled
def touch_blocks(pool: PoolArrays, group: GroupArrays, blocks: Int32Array) -> None:
    """Hit the free ones of some blocks and release them, the tail before the head."""
    for block in blocks[::-1]:
        if block == NULL_BLOCK or pool.records[block, QUEUE] != FREE:
            continue
        reuse(pool, block)
        if group.parameters[SHEDS]:
            pool.records[block, KEPT] |= AT_END
        release(pool, block, NO_STEP)


def _lease_rows(state: SpaceState, batch: Int32Array, until_s: float) -> None:
    """Lease what running rows are about to release."""
    for row in batch[state.rows[batch, STATUS] == RUNNING].tolist() if state.config.prefix_caching else ():
        for group in state.cached_groups:
            lease_row(*group.view, row, until_s)


@compiled
def lease_block(pool: PoolArrays, group: GroupArrays, block: int, until: float) -> None:
    """Lease one block, if it has a name."""
    if block == NULL_BLOCK or not pool.records[block, NAME]:
        return
    if is_spare(pool, block):
        make_cached(pool, block)
    if group.parameters[SHEDS]:
        pool.records[block, KEPT] |= AT_END
    lease(pool, block, until)


@compiled
def lease_blocks(pool: PoolArrays, group: GroupArrays, blocks: Int32Array, until: float) -> None:
    """Lease the blocks of a hit, null blocks excepted, the tail before the head: in the order of a release."""
    for block in blocks[::-1]:
        lease_block(pool, group, block, until)


@compiled
def lease_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, until: float) -> None:
    """Lease the named content of a row, in whichever block has the name, and the last state that it has left.

    The tail comes before the head, as in a release: another block may have the name, and be free.
    """
    at = group.parameters[AT]
    tail = rows[row, at + TAIL]
    if pool.records[tail, LIFE] == rows[row, at + TAIL_LIFE]:
        lease_block(pool, group, tail, until)
    for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
        if group.table[row, index] != NULL_BLOCK:
            lease_block(pool, group, carrier_of(pool, group, rows, row, index), until)
