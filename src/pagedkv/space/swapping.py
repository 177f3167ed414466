"""Preempting by swapping: sequences move to the host pools and back, as planned copies.

Content that the destination holds already is shared there, not copied: blocks that a swapped-out prefix left in the
device's prefix cache, and blocks that another sequence has brought to the host. Host blocks stay cached until evicted.

A block that several of the moved rows share is moved once, and shared again on the other side. Content that is already
on the other side (its *twin*: a full block of the same chain, named there) is shared instead of moved. Source and
destination of a move are held for the open step, in which the move is carried out.

First, :func:`survey` counts what a move needs. Then :func:`claim_twins` takes references to the twins of all groups,
before :func:`move_rows` allocates blocks, which might evict a twin.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.blocks import tenant_charges
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import copy_content, copy_digest
from pagedkv.blocks.epochs import copy_epochs, same_epochs
from pagedkv.blocks.life_cycle import acquire, release, reuse
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.blocks.record import (
    EXTRA,
    FREE,
    LIFE,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    PoolArrays,
    become_copy,
)
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_counts
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import BlockMoves
from pagedkv.contract.spec import AllocStatus, keeps_state
from pagedkv.errors import NoHostPoolError, SequenceError, TokenError
from pagedkv.space.drafting import free_slots, why_drafts_stay
from pagedkv.space.growing import hand_over, stop_relying
from pagedkv.space.publishing import publish, publish_block
from pagedkv.space.releasing import blocks_of
from pagedkv.space.replaying import why_replay_stays
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    COVERED,
    FROZEN,
    FULL,
    KIND,
    LAST_STEP,
    NAME_IN_POOL,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_POSITIONS,
    NUM_PUBLISHED,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    SWAPPED,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
    blocks_for,
    charge_to_tenant_of_row,
    clear_changes,
    note_change,
)
from pagedkv.space.state import NEW_PLACE, Arrival, Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.space.tenants import charge_to, keep_caps
from pagedkv.space.windows import keep_what_leaves, shed_dropped

PoolOf = Callable[[Group], BlockPool]


@dataclass(frozen=True, slots=True)
class _Survey:
    """What moving a batch takes, by pool name.

    Args:
        num_taken: free blocks of the destination; num_distinct: blocks that would be taken if it held nothing.
        moved_to: the destination of each block of a source pool, as in :func:`~pagedkv.space.swapping.survey`.
    """

    num_taken: dict[str, int]
    num_distinct: dict[str, int]
    moved_to: dict[str, Int32Array]

    def twins(self, pool: str) -> Int32Array:
        """Blocks of the destination that are shared, each once: int32 ``[any]``. O(blocks)."""
        places = self.moved_to[pool]
        twins: Int32Array = np.unique(-places[(places < 0) & (places != NEW_PLACE)])
        return twins

    def num_places(self, pool: str) -> int:
        """Count the blocks of the destination that the batch holds afterwards: new ones, and those shared there.

        This is also the least that an empty pool needs: it needs exactly as many if each block has a twin of its own or
        none, and more if several blocks have the same twin. O(blocks of the source).
        """
        return int(np.count_nonzero(self.moved_to[pool] == NEW_PLACE)) + len(self.twins(pool))


def _survey(state: SpaceState, batch: Int32Array, source_of: PoolOf, destination_of: PoolOf) -> _Survey:
    found = _Survey(dict.fromkeys(state.pools, 0), dict.fromkeys(state.pools, 0), {})
    claimed: dict[str, Int32Array] = {}
    for group in state.all_groups:
        name, source, destination = group.pool.name, source_of(group), destination_of(group)
        num_taken, num_distinct = survey(
            source.arrays,
            destination.arrays,
            group.arrays,
            state.rows,
            batch,
            found.moved_to.setdefault(name, np.zeros(source.num_blocks, np.int32)),
            claimed.setdefault(name, np.zeros(destination.num_blocks, np.int32)),
        )
        found.num_taken[name] += num_taken
        found.num_distinct[name] += num_distinct
    return found


def _device_pool(group: Group) -> BlockPool:
    return group.pool


def _host_pool(group: Group) -> BlockPool:
    if group.host_pool is None:
        raise NoHostPoolError(
            f"group {group.index} draws from pool {group.pool.name!r}, which has no host pool: set num_host_blocks"
        )
    return group.host_pool


def _is_written(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> bool:
    """Return whether the open plan writes a block of these rows before the forward pass."""
    if not ledger.has_device_writes:
        return False
    for group in state.all_groups:
        for row in batch.tolist():
            num_blocks = blocks_for(int(state.rows[row, group.positions]), group.block_size)
            if ledger.is_written(group.pool.name, group.arrays.table[row, :num_blocks].tolist()):
                return True
    return False


def swap_out_status(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> AllocStatus:
    """Return whether the host pools can take these running rows. Changes nothing."""
    if any(group.host_pool is None for group in state.all_groups):
        return AllocStatus.NEVER
    found = _survey(state, batch, _device_pool, _host_pool)
    if any(found.num_places(name) > pool.num_usable for name, pool in state.host_pools.items()):
        return AllocStatus.NEVER
    if _is_written(state, ledger, batch) or _why_stays(state, batch):
        return AllocStatus.LATER
    fits = all(count <= state.host_pools[name].num_free for name, count in found.num_taken.items())
    return AllocStatus.OK if fits else AllocStatus.LATER


def _require_movable(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Raise SequenceError if anything keeps rows on the device until a step is acknowledged."""
    if _is_written(state, ledger, batch):
        raise SequenceError(
            f"rows {batch.tolist()} hold blocks that the open plan copies or swaps in: plan the step first"
        )
    why = _why_stays(state, batch)
    if why is not None:
        raise SequenceError(why)


def _why_stays(state: SpaceState, batch: Int32Array) -> str | None:
    """Return the sentence that refuses to swap these rows out until a step is acknowledged; None if they can be."""
    return (why_drafts_stay(state, batch) if state.draft_tables else None) or why_replay_stays(state, batch)


def swap_out(state: SpaceState, ledger: StepLedger, batch: Int32Array, mark: int) -> tuple[BlockMoves, ...] | Shortage:
    """Move running rows to the host pools; their device blocks are freed when the plan is acknowledged."""
    for group in state.all_groups:
        _host_pool(group)
    _require_movable(state, ledger, batch)
    found = _survey(state, batch, _device_pool, _host_pool)
    for name, count in found.num_taken.items():
        if count > state.host_pools[name].num_free:
            return Shortage(f"{name} (host)", int(count), state.host_pools[name].num_free)
    with state.changing:
        for tell in state.observers.leaving:
            tell(batch)
        for row in batch.tolist():
            hand_over(state, row, mark)
            stop_relying(state, row)
        moves = _leave_device(state, batch, found)
        state.rows[batch, STATUS] = SWAPPED
        for name, pairs in moves.items():
            ledger.add_swaps_out(name, pairs)
        if state.config.prefix_caching:
            for group in state.groups:
                name_moved(_host_pool(group).arrays, group.arrays, state.rows, batch)
        answer = _as_block_moves(moves)
        for tell in state.observers.swapped_out:
            tell(batch)
    return answer


def _leave_device(state: SpaceState, batch: Int32Array, found: _Survey) -> dict[str, Int32Array]:
    """Move all groups' blocks to the host as surveyed; of windows, only what later prompts can hit stays cached."""
    left = [(group, blocks_of(group, batch)) for group in state.shedding_groups]
    if state.shedding_groups:
        keep_what_leaves(state, batch)
    if state.draft_tables:
        free_slots(state, batch, is_leaving=True)
    moves = _move(state, batch, found, _device_pool, _host_pool)
    for group, blocks in left:
        shed_dropped(state, group.pool, blocks)
    return moves


def as_next_counts(
    state: SpaceState, batch: Int32Array, counts: npt.ArrayLike | None, num_lookahead: int
) -> Int32Array:
    """Check how many tokens rows get next; None means one each, as far as ``max_tokens`` leaves room.

    Raises:
        TokenError: counts that are not integers, not one for each row, negative, or beyond ``max_tokens``.
    """
    room: Int32Array = state.config.max_tokens - state.rows[batch, NUM_TOKENS]
    if counts is None:
        return np.minimum(room, 1).astype(np.int32)
    wanted = as_counts(counts, len(batch), "counts")
    if (wanted < 0).any() or (wanted > room - num_lookahead).any():
        raise TokenError(
            f"counts must be at least 0 and leave room for {num_lookahead} lookahead slots within max_tokens = "
            f"{state.config.max_tokens}, got {wanted.tolist()}; the rows have room for {room.tolist()} more tokens"
        )
    return wanted.astype(np.int32)


def swap_in_status(
    state: SpaceState, batch: Int32Array, counts: Int32Array, num_lookahead: int, num_reserved: int
) -> AllocStatus:
    """Return whether the device pools can take these swapped-out rows back, with the tokens that they get next.

    Rows that fit now are never NEVER, even if they fit only because they share blocks there. Changes nothing.
    """
    found, arrival = _survey_arrival(state, batch)
    for tenant, places in state.room.by_tenant(batch):
        for group in state.groups:
            num_grown = _num_grown(state, group, batch[places], counts[places], num_lookahead)
            arrival.num_taken[tenant][group.pool.name] += num_grown
            arrival.num_distinct[tenant][group.pool.name] += num_grown
    for payer in tuple(arrival.num_taken)[:1] if num_reserved else ():  # the rows of a request have one tenant
        for group in state.groups:
            num_reserved_blocks = group.num_slots_blocks(0, num_reserved)
            arrival.num_taken[payer][group.pool.name] += num_reserved_blocks
            arrival.num_distinct[payer][group.pool.name] += num_reserved_blocks
    if state.room.fits_now(arrival.num_taken):
        return AllocStatus.OK
    if state.room.fits_empty_pools(arrival.num_distinct):
        return AllocStatus.LATER
    twins = {name: found.twins(name) for name in state.pools}
    return AllocStatus.LATER if state.room.fits_beside(arrival.num_taken, twins) else AllocStatus.NEVER


def _survey_arrival(state: SpaceState, batch: Int32Array) -> tuple[_Survey, Arrival]:
    """Find out what swapping rows in takes, by pool and by tenant."""
    found = _survey(state, batch, _host_pool, _device_pool)
    return found, state.room.by_arrival(batch, found.num_taken, found.num_distinct, found.moved_to)


def _num_grown(state: SpaceState, group: Group, batch: Int32Array, counts: Int32Array, num_lookahead: int) -> int:
    """Count the blocks that rows take beyond those swapped in: new ones, and copies on write.

    All rows that write into a shared, partly filled block copy it, except the last one that holds it.
    """
    reserve = 0 if keeps_state(group.spec) else num_lookahead
    holders: Counter[int] = Counter()
    writers: Counter[int] = Counter()
    num_new = 0
    for row, num_tokens, count in zip(
        batch.tolist(), state.rows[batch, NUM_TOKENS].tolist(), counts.tolist(), strict=True
    ):
        num_new += blocks_for(num_tokens + count + reserve, group.block_size) - blocks_for(num_tokens, group.block_size)
        if num_tokens % group.block_size:
            block = int(group.arrays.table[row, num_tokens // group.block_size])
            holders[block] += 1
            writers[block] += count + reserve > 0
    return num_new + sum(min(num_writers, holders[block] - 1) for block, num_writers in writers.items())


def swap_in(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> tuple[BlockMoves, ...] | Shortage:
    """Move swapped-out rows back; their host blocks are freed when the plan is acknowledged."""
    found, arrival = _survey_arrival(state, batch)
    shortage = state.room.find_shortage(arrival.num_taken)
    if shortage is not None:
        return shortage
    with state.changing:
        for tenant, twins in arrival.twins.items():
            charge_to(state, tenant)
            for name, blocks in twins.items():
                tenant_charges.charge_hits(state.pools[name].arrays, blocks)
        moves = _move(state, batch, found, _host_pool, _device_pool)
        for tenant in arrival.twins:
            keep_caps(state, tenant)
        state.rows[batch, STATUS] = RUNNING
        for group in state.all_groups:
            arrive(*group.view, batch)
        for name, pairs in moves.items():
            ledger.add_swaps_in(name, pairs)
        publish(state, ledger, batch)
        answer = _as_block_moves(moves)
        if state.receipts is not None:
            state.receipts.returned(batch, state.open_step_id)
        for tell in state.observers.returned:
            tell(batch)
    return answer


def _move(
    state: SpaceState, batch: Int32Array, found: _Survey, source_of: PoolOf, destination_of: PoolOf
) -> dict[str, Int32Array]:
    """Move all groups' blocks as surveyed; return the pairs (source, destination) by pool name."""
    for name, pool in {group.pool.name: destination_of(group) for group in state.all_groups}.items():
        claim_twins(pool.arrays, found.moved_to[name])
    pairs: dict[str, list[Int32Array]] = {}
    for group in state.all_groups:
        source, destination = source_of(group), destination_of(group)
        scratch = np.empty((min(source.num_blocks, destination.num_blocks), 2), np.int32)
        num_moves = move_rows(
            source.arrays,
            destination.arrays,
            group.arrays,
            state.rows,
            batch,
            found.moved_to[group.pool.name],
            scratch,
        )
        pairs.setdefault(group.pool.name, []).append(scratch[:num_moves])
    return {name: np.concatenate(parts) for name, parts in pairs.items()}


def _as_block_moves(moves: dict[str, Int32Array]) -> tuple[BlockMoves, ...]:
    return tuple(
        BlockMoves(name, pairs[:, 0].copy(), pairs[:, 1].copy()) for name, pairs in moves.items() if len(pairs)
    )


@compiled
def survey(
    source: PoolArrays,
    destination: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    moved_to: Int32Array,
    claimed: Int32Array,
) -> tuple[int, int]:
    """Count the free blocks of the destination that moving a batch of rows takes. Changes no state.

    Args:
        moved_to: int32 ``[source blocks]``, zeros at first; becomes minus the twin of each block, or
            ``NEW_PLACE`` if it has none.
        claimed: int32 ``[destination blocks]``, zeros at first; marks twins that were counted.

    Returns the number of free blocks, including free twins, and the number of different blocks moved or shared.
    """
    num_taken = 0
    num_distinct = 0
    for row in batch:
        num_blocks = blocks_for(rows[row, group.parameters[NUM_POSITIONS]], group.parameters[BLOCK_SIZE])
        parent = NULL_BLOCK
        for index in range(num_blocks):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if moved_to[block] == 0:
                twin = find_twin(source, destination, group, rows, row, index, parent)
                moved_to[block] = NEW_PLACE if twin == NULL_BLOCK else -twin
                num_distinct += 1
                if twin == NULL_BLOCK:
                    num_taken += 1
                elif not claimed[twin]:
                    claimed[twin] = 1
                    num_taken += destination.records[twin, QUEUE] == FREE
            parent = NULL_BLOCK if moved_to[block] == NEW_PLACE else -moved_to[block]
    return num_taken, num_distinct


@compiled
def find_twin(
    source: PoolArrays,
    destination: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    index: int,
    parent: int,
) -> int:
    """Find the settled content of a row's full block on the other side; the null block if there is none.

    ``parent`` is the twin of the block before it, needed in a group that keeps whole prefixes.
    """
    block = group.table[row, index]
    is_whole = index < num_findable(group, rows, row)
    if not is_whole or source.records[block, PENDING_STEP] > source.counts[SETTLED_STEP]:
        return NULL_BLOCK
    if group.parameters[KIND] == FULL and index > 0 and parent == NULL_BLOCK:
        return NULL_BLOCK
    name = group.parameters[NAME_IN_POOL]
    twin = find(destination, name, source.digests[block])
    if twin == NULL_BLOCK or destination.records[twin, PENDING_STEP] > destination.counts[SETTLED_STEP]:
        return NULL_BLOCK
    if group.parameters[KIND] == FULL and not is_child_of(destination, name, twin, parent):
        return NULL_BLOCK
    difference = destination.records[twin, EXTRA] ^ source.records[block, EXTRA]
    for slot in range(group.parameters[COVERED]):
        difference |= destination.tokens[twin, slot] ^ source.tokens[block, slot]
    if len(source.epochs) and not same_epochs(source, block, destination, twin):
        return NULL_BLOCK
    return twin if difference == 0 else NULL_BLOCK


@compiled
def num_findable(group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Count a row's leading full blocks that have digests and are computed or planned."""
    if rows[row, FROZEN]:
        return 0
    num_computed = min(rows[row, NUM_PLANNED], rows[row, group.parameters[PLANNED]]) // group.parameters[BLOCK_SIZE]
    return int(min(num_computed, rows[row, group.parameters[AT] + NUM_DIGESTED]))


@compiled
def claim_twins(destination: PoolArrays, moved_to: Int32Array) -> None:
    """Take a reference to every twin that a survey has found."""
    for block in range(len(moved_to)):
        if NEW_PLACE < moved_to[block] < 0:
            reuse(destination, -moved_to[block])


@compiled
def move_rows(
    source: PoolArrays,
    destination: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    moved_to: Int32Array,
    moves: Int32Array,
) -> int:
    """Move the blocks of a batch of rows, after a survey of them and after their twins were claimed.

    Args:
        moved_to: int32 ``[source blocks]``, as :func:`survey` left it; becomes the new block of each block.
        moves: int32 ``[n, 2]``, ``(source, destination)`` of each move.

    Returns the number of moves.
    """
    num_moves = 0
    at = group.parameters[AT]
    for row in batch:
        num_blocks = blocks_for(rows[row, group.parameters[NUM_POSITIONS]], group.parameters[BLOCK_SIZE])
        charge_to_tenant_of_row(destination, rows, row)
        for index in range(num_blocks):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if moved_to[block] == NEW_PLACE:
                moved_to[block] = move_block(source, destination, block)
                moves[num_moves, 0] = block
                moves[num_moves, 1] = moved_to[block]
                num_moves += 1
            elif moved_to[block] < 0:
                moved_to[block] = -moved_to[block]  # its first reference was taken when it was claimed
            else:
                destination.records[moved_to[block], REF_COUNT] += 1
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            block = group.table[row, index]
            if block != NULL_BLOCK:
                group.table[row, index] = moved_to[block] if index < num_blocks else NULL_BLOCK
                release(source, block, rows[row, LAST_STEP])
        rows[row, at + NUM_BLOCKS] = num_blocks
        clear_changes(rows, row, at)  # the device has no table of this row until it arrives again
    return num_moves


@compiled
def move_block(source: PoolArrays, destination: PoolArrays, block: int) -> int:
    """Allocate a block on the other side for a block's content, and hold both until the open step is over."""
    place = acquire(destination)
    become_copy(source.records, block, destination.records, place, source.counts[OPEN_STEP])
    copy_content(source, block, destination, place, source.tokens.shape[1])
    if len(source.digests):
        copy_digest(source, block, destination, place)
    if len(source.epochs):
        copy_epochs(source, block, destination, place)
    return place


@compiled
def name_moved(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Name the settled full blocks that rows brought to a host pool, so that they can be twins later."""
    for row in batch:
        parent = NULL_BLOCK
        parent_life = pool.records[NULL_BLOCK, LIFE]
        for index in range(num_findable(group, rows, row)):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                parent = NULL_BLOCK  # what comes after a gap has no parent here
                parent_life = pool.records[NULL_BLOCK, LIFE]
                continue
            if pool.records[block, PENDING_STEP] > pool.counts[SETTLED_STEP]:
                break
            carrier = block
            if not pool.records[block, NAME]:
                carrier = publish_block(pool, group, block, parent, parent_life)
            if carrier != block or not pool.records[block, NAME]:
                break  # the blocks after it could not be found by links
            parent = block
            parent_life = pool.records[block, LIFE]


@compiled
def arrive(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Add swapped-in rows to the open step: uncomputed blocks become pending, and all are published anew.

    What any of the rows has computed is not pending, though another that shares it may compute it again.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        record = rows[row]
        planned = record[group.parameters[PLANNED]]
        for index in range(planned // block_size, record[at + NUM_BLOCKS]):
            if group.table[row, index] != NULL_BLOCK and planned < record[group.parameters[NUM_POSITIONS]]:
                pool.records[group.table[row, index], PENDING_STEP] = pool.counts[OPEN_STEP]
        if group.parameters[CACHING]:
            rows[row, at + NUM_PUBLISHED] = 0
            rows[row, at + TAIL] = NULL_BLOCK
            rows[row, at + TAIL_LIFE] = 0
        note_change(rows, row, at, 0, record[at + NUM_BLOCKS])
    for row in batch:
        planned = rows[row, group.parameters[PLANNED]]
        is_planned = planned >= rows[row, group.parameters[NUM_POSITIONS]]
        stop = rows[row, at + NUM_BLOCKS] if is_planned else planned // block_size
        for index in range(stop):
            block = group.table[row, index]
            if block != NULL_BLOCK and pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
                pool.records[block, PENDING_STEP] = rows[row, LAST_STEP]
