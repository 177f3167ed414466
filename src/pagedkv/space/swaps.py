"""Preempting by swapping: sequences move to the host pools and back, as planned copies."""

from collections.abc import Callable

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.core.pool import BlockPool
from pagedkv.core.rows import NUM_TOKENS, RUNNING, STATUS, SWAPPED
from pagedkv.core.swapping import arrive, count_distinct, move_rows
from pagedkv.core.tables import blocks_for
from pagedkv.errors import NoHostPoolError, SequenceError
from pagedkv.plan import BlockMoves, Shortage
from pagedkv.space.admission import kept_free
from pagedkv.space.naming import publish
from pagedkv.space.sharing import hand_over, stop_relying
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.spec import AllocStatus

__all__ = ["swap_in", "swap_in_status", "swap_out", "swap_out_status"]


def _distinct_by_pool(
    state: SpaceState, batch: Int32Array, pool_of: Callable[[Group], BlockPool]
) -> dict[str, tuple[BlockPool, int]]:
    """Count the different blocks with content that these rows hold in each pool."""
    counted: dict[str, tuple[BlockPool, int]] = {}
    seen = {id(pool_of(group)): np.zeros(pool_of(group).num_blocks, np.int32) for group in state.groups}
    for group in state.groups:
        pool = pool_of(group)
        before = counted.get(pool.name, (pool, 0))[1]
        counted[pool.name] = pool, before + count_distinct(group.arrays, state.rows, batch, seen[id(pool)])
    return counted


def _device_pool(group: Group) -> BlockPool:
    return group.pool


def _host_pool(group: Group) -> BlockPool:
    if group.host_pool is None:
        raise NoHostPoolError(
            f"group {group.index} draws from pool {group.pool.name!r}, which has no host pool: set num_host_blocks"
        )
    return group.host_pool


def _is_written(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> bool:
    """Tell whether the open plan writes, before the forward pass, a block of these rows."""
    if not ledger.has_device_writes:
        return False
    for group in state.groups:
        for row in batch.tolist():
            num_blocks = blocks_for(int(state.rows[row, NUM_TOKENS]), group.block_size)
            if ledger.is_written(group.pool.name, group.arrays.table[row, :num_blocks].tolist()):
                return True
    return False


def swap_out_status(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> AllocStatus:
    """Tell whether the host pools can take these running rows. Changes nothing."""
    if any(group.host_pool is None for group in state.groups):
        return AllocStatus.NEVER
    counted = _distinct_by_pool(state, batch, _device_pool)
    if any(count > state.host_pools[name].num_usable for name, (_, count) in counted.items()):
        return AllocStatus.NEVER
    if _is_written(state, ledger, batch):
        return AllocStatus.LATER
    fits = all(count <= state.host_pools[name].num_free for name, (_, count) in counted.items())
    return AllocStatus.OK if fits else AllocStatus.LATER


def swap_out(state: SpaceState, ledger: StepLedger, batch: Int32Array, mark: int) -> tuple[BlockMoves, ...] | Shortage:
    """Move running rows to the host pools; their device blocks go back when the plan is acknowledged."""
    for group in state.groups:
        _host_pool(group)
    if _is_written(state, ledger, batch):
        raise SequenceError(
            f"rows {batch.tolist()} hold blocks that the open plan copies or swaps in: plan the step first"
        )
    for name, (_, count) in _distinct_by_pool(state, batch, _device_pool).items():
        if count > state.host_pools[name].num_free:
            return Shortage(f"{name} (host)", count, state.host_pools[name].num_free)
    state.reserve_events(len(batch), int(state.rows[batch, NUM_TOKENS].sum()))
    for row in batch.tolist():
        hand_over(state, row, mark)
        stop_relying(state, row)
    moves = _move(state, batch, _device_pool, _host_pool)
    state.rows[batch, STATUS] = SWAPPED
    for name, pairs in moves.items():
        ledger.add_swaps_out(name, pairs)
    return _as_block_moves(moves)


def swap_in_status(state: SpaceState, batch: Int32Array, num_lookahead: int) -> AllocStatus:
    """Tell whether the device pools can take these swapped-out rows back, and slots beyond. Changes nothing."""
    needed = {name: count for name, (_, count) in _distinct_by_pool(state, batch, _host_pool).items()}
    for group in state.groups:
        for num_tokens in state.rows[batch, NUM_TOKENS].tolist():
            beyond = group.num_slots_blocks(num_tokens, num_lookahead) - group.num_slots_blocks(num_tokens, 0)
            needed[group.pool.name] += beyond
    if any(count > state.pools[name].num_usable for name, count in needed.items()):
        return AllocStatus.NEVER
    for name, count in needed.items():
        if count > state.pools[name].num_free - kept_free(state, state.pools[name]):
            return AllocStatus.LATER
    return AllocStatus.OK


def swap_in(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> tuple[BlockMoves, ...] | Shortage:
    """Move swapped-out rows back; their host blocks go back when the plan is acknowledged."""
    for name, (_, count) in _distinct_by_pool(state, batch, _host_pool).items():
        if count > state.pools[name].num_free:
            return Shortage(name, count, state.pools[name].num_free)
    state.reserve_events(len(batch), int(state.rows[batch, NUM_TOKENS].sum()))
    moves = _move(state, batch, _host_pool, _device_pool)
    state.rows[batch, STATUS] = RUNNING
    for group in state.groups:
        arrive(group.pool.arrays, group.arrays, state.rows, batch)
    for name, pairs in moves.items():
        ledger.add_swaps_in(name, pairs)
    publish(state, ledger, batch)
    return _as_block_moves(moves)


def _move(
    state: SpaceState,
    batch: Int32Array,
    source_of: Callable[[Group], BlockPool],
    destination_of: Callable[[Group], BlockPool],
) -> dict[str, Int32Array]:
    """Move all groups' blocks; return the pairs (source, destination) by pool name."""
    moved_to = {id(source_of(group)): np.zeros(source_of(group).num_blocks, np.int32) for group in state.groups}
    pairs: dict[str, list[Int32Array]] = {}
    for group in state.groups:
        source, destination = source_of(group), destination_of(group)
        scratch = np.empty((min(source.num_blocks, destination.num_blocks), 2), np.int32)
        num_moves = move_rows(
            source.arrays, destination.arrays, group.arrays, state.rows, batch, moved_to[id(source)], scratch
        )
        pairs.setdefault(group.pool.name, []).append(scratch[:num_moves])
    return {name: np.concatenate(parts) for name, parts in pairs.items()}


def _as_block_moves(moves: dict[str, Int32Array]) -> tuple[BlockMoves, ...]:
    return tuple(
        BlockMoves(name, pairs[:, 0].copy(), pairs[:, 1].copy()) for name, pairs in moves.items() if len(pairs)
    )
