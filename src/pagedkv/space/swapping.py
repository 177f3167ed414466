"""Preempting by swapping: sequences move to the host pools and back, as planned copies.

Content that the destination holds already is shared there, not copied: blocks that a swapped-out prefix left in the
device's prefix cache, and blocks that another sequence has brought to the host. Host blocks stay cached until evicted.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_counts
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import BlockMoves
from pagedkv.contract.spec import AllocStatus, keeps_state
from pagedkv.errors import NoHostPoolError, SequenceError, TokenError
from pagedkv.space.pending import hand_over, stop_relying
from pagedkv.space.publishing import publish
from pagedkv.space.releasing import blocks_of
from pagedkv.space.shortage import Arrival
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.row_record import set_status
from pagedkv.tables.rows import NUM_TOKENS, RUNNING, SWAPPED, blocks_for
from pagedkv.tables.swapping import NEW_PLACE, arrive, claim_twins, move_rows, name_moved, survey

__all__ = ["as_next_counts", "swap_in", "swap_in_status", "swap_out", "swap_out_status"]

PoolOf = Callable[[Group], BlockPool]


@dataclass(frozen=True, slots=True)
class _Survey:
    """What moving a batch takes, by pool name.

    Args:
        num_taken: free blocks of the destination; num_distinct: blocks that would be taken if it held nothing.
        moved_to: the destination of each block of a source pool, as in :func:`~pagedkv.tables.swapping.survey`.
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
    for group in state.groups:
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
    for group in state.groups:
        for row in batch.tolist():
            num_blocks = blocks_for(int(state.rows[row, NUM_TOKENS]), group.block_size)
            if ledger.is_written(group.pool.name, group.arrays.table[row, :num_blocks].tolist()):
                return True
    return False


def swap_out_status(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> AllocStatus:
    """Return whether the host pools can take these running rows. Changes nothing."""
    if any(group.host_pool is None for group in state.groups):
        return AllocStatus.NEVER
    found = _survey(state, batch, _device_pool, _host_pool)
    if any(found.num_places(name) > pool.num_usable for name, pool in state.host_pools.items()):
        return AllocStatus.NEVER
    if _is_written(state, ledger, batch) or any(feature.what_keeps(batch) for feature in state.features):
        return AllocStatus.LATER
    fits = all(count <= state.host_pools[name].num_free for name, count in found.num_taken.items())
    return AllocStatus.OK if fits else AllocStatus.LATER


def _require_movable(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Raise SequenceError if anything keeps rows on the device until a step is acknowledged."""
    if _is_written(state, ledger, batch):
        raise SequenceError(
            f"rows {batch.tolist()} hold blocks that the open plan copies or swaps in: plan the step first"
        )
    for feature in state.features:
        why = feature.what_keeps(batch)
        if why is not None:
            raise SequenceError(why)


def swap_out(state: SpaceState, ledger: StepLedger, batch: Int32Array, mark: int) -> tuple[BlockMoves, ...] | Shortage:
    """Move running rows to the host pools; their device blocks are freed when the plan is acknowledged."""
    for group in state.groups:
        _host_pool(group)
    _require_movable(state, ledger, batch)
    found = _survey(state, batch, _device_pool, _host_pool)
    for name, count in found.num_taken.items():
        if count > state.host_pools[name].num_free:
            return Shortage(f"{name} (host)", int(count), state.host_pools[name].num_free)
    state.is_changing = True
    for observer in state.observers.leaving:
        observer.leaving(batch)
    for row in batch.tolist():
        hand_over(state, row, mark)
        stop_relying(state, row)
    moves = _leave_device(state, batch, found)
    set_status(state.rows, batch, SWAPPED)
    for name, pairs in moves.items():
        ledger.add_swaps_out(name, pairs)
    if state.config.prefix_caching:
        for group in state.groups:
            name_moved(_host_pool(group).arrays, group.arrays, state.rows, batch)
    answer = _as_block_moves(moves)
    for observer in state.observers.swapped_out:
        observer.swapped_out(batch)
    state.is_changing = False
    return answer


def _leave_device(state: SpaceState, batch: Int32Array, found: _Survey) -> dict[str, Int32Array]:
    """Move all groups' blocks to the host as surveyed; of windows, only what later prompts can hit stays cached."""
    left = [(group, blocks_of(group, batch)) for group in state.shedding_groups]
    for feature in state.features:
        feature.leaving(batch)
    moves = _move(state, batch, found, _device_pool, _host_pool)
    for group, blocks in left:
        for feature in state.features:
            feature.dropped(group.pool, blocks)
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


def swap_in_status(state: SpaceState, batch: Int32Array, counts: Int32Array, num_lookahead: int) -> AllocStatus:
    """Return whether the device pools can take these swapped-out rows back, with the tokens that they get next.

    Rows that fit now are never NEVER, even if they fit only because they share blocks there. Changes nothing.
    """
    found, arrival = _survey_arrival(state, batch)
    for tenant, places in state.room.by_tenant(batch):
        for group in state.groups:
            num_grown = _num_grown(state, group, batch[places], counts[places], num_lookahead)
            arrival.num_taken[tenant][group.pool.name] += num_grown
            arrival.num_distinct[tenant][group.pool.name] += num_grown
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
    state.is_changing = True
    for tenant, twins in arrival.twins.items():
        for feature in state.features:
            feature.taking(tenant)
            for name, blocks in twins.items():
                feature.reviving(state.pools[name], blocks)
    moves = _move(state, batch, found, _host_pool, _device_pool)
    for tenant in arrival.twins:
        for feature in state.features:
            feature.taken(tenant)
    set_status(state.rows, batch, RUNNING)
    for group in state.groups:
        arrive(*group.view, batch)
    for name, pairs in moves.items():
        ledger.add_swaps_in(name, pairs)
    publish(state, ledger, batch)
    answer = _as_block_moves(moves)
    for observer in state.observers.returned:
        observer.returned(batch)
    state.is_changing = False
    return answer


def _move(
    state: SpaceState, batch: Int32Array, found: _Survey, source_of: PoolOf, destination_of: PoolOf
) -> dict[str, Int32Array]:
    """Move all groups' blocks as surveyed; return the pairs (source, destination) by pool name."""
    for name, pool in {group.pool.name: destination_of(group) for group in state.groups}.items():
        claim_twins(pool.arrays, found.moved_to[name])
    pairs: dict[str, list[Int32Array]] = {}
    for group in state.groups:
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
