"""Leases across groups: what prompts hit, or ended sequences leave, is kept until a time of the space's clock.

:mod:`pagedkv.memory.pool.leasing` says how leases change the order of eviction. They never change whether a block can
be taken, so admission ignores leases.
"""

import numpy as np

from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.pool.leasing import HIGH
from pagedkv.memory.space.clock import as_seconds
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.state import SpaceState
from pagedkv.memory.tables.leasing import lease_blocks, lease_row
from pagedkv.memory.tables.rows import RUNNING, STATUS

__all__ = ["as_end", "as_intent", "lease_hit", "lease_rows"]


def as_end(state: SpaceState, until: object) -> float:
    """Check the end of a lease. Raises ConfigurationError if it is past or infinite."""
    _require_leases(state)
    time = as_seconds(until, "the end of a lease")
    if time <= state.now_s:
        raise ConfigurationError(
            f"a lease until {time} seconds would be over: the clock shows {state.now_s}; advance() sets it"
        )
    return time


def _require_leases(state: SpaceState) -> None:
    if not state.config.leases:
        raise ConfigurationError("no leases are kept: set leases=True in the configuration")


def lease_hit(state: SpaceState, hit: PrefixHit, until_s: float) -> None:
    """Lease the blocks that a prompt hits, including those inside which the hit ends."""
    state.is_changing = True
    for group in state.cached_groups:
        lease_blocks(group.pool.arrays, group.arrays, hit.block_ids[group.index], until_s)
    for tail in hit.tails:
        group = state.groups[tail.group]
        lease_blocks(group.pool.arrays, group.arrays, np.array([tail.block], np.int32), until_s)
    state.is_changing = False


def as_intent(state: SpaceState, superseded_by: object, keep_until_s: object, priority: object) -> float | None:
    """Check the arguments about what ended sequences leave; return until when to keep it, None for no lease.

    Raises:
        ConfigurationError: more than one of them is given, or an impossible one.
    """
    retention = as_count(priority, "priority", least=-1, most=1)
    if (superseded_by is not None) + (keep_until_s is not None) + (retention != 0) > 1:
        raise ConfigurationError("superseded_by, keep_until_s and priority exclude each other: give one")
    if keep_until_s is not None:
        return as_end(state, keep_until_s)
    if retention == 1:
        _require_leases(state)
        return HIGH
    return None


def lease_rows(state: SpaceState, batch: Int32Array, until_s: float) -> None:
    """Lease what running rows are about to release."""
    if not state.config.prefix_caching:
        return
    for row in batch[state.rows[batch, STATUS] == RUNNING].tolist():
        for group in state.cached_groups:
            lease_row(*group.view, row, until_s)
