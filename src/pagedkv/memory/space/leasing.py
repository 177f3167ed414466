"""Leases across groups: what prompts hit, or ended sequences leave, is kept until a time of the space's clock.

What leases do to the order in which blocks are handed out is said in :mod:`pagedkv.memory.pool.leasing`. That a block
is handed out at all never depends on them, so admission does not look at leases.
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
    """Check when a lease is to end. Raises ConfigurationError if that is past, or never."""
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
    """Keep what a prompt hits, what it ends inside of included."""
    state.is_changing = True
    for group in state.cached_groups:
        lease_blocks(group.pool.arrays, group.arrays, hit.block_ids[group.index], until_s)
    for tail in hit.tails:
        group = state.groups[tail.group]
        lease_blocks(group.pool.arrays, group.arrays, np.array([tail.block], np.int32), until_s)
    state.is_changing = False


def as_intent(state: SpaceState, superseded_by: object, keep_until_s: object, priority: object) -> float | None:
    """Check what is to become of what ended sequences leave; return until when to keep it, None for no lease.

    Raises:
        ConfigurationError: more than one wish, or one that cannot be.
    """
    wish = as_count(priority, "priority", least=-1, most=1)
    if (superseded_by is not None) + (keep_until_s is not None) + (wish != 0) > 1:
        raise ConfigurationError("superseded_by, keep_until_s and priority exclude each other: give one")
    if keep_until_s is not None:
        return as_end(state, keep_until_s)
    if wish == 1:
        _require_leases(state)
        return HIGH
    return None


def lease_rows(state: SpaceState, batch: Int32Array, until_s: float) -> None:
    """Keep what rows that run are about to give up."""
    if not state.config.prefix_caching:
        return
    for row in batch[state.rows[batch, STATUS] == RUNNING].tolist():
        for group in state.cached_groups:
            lease_row(*group.view, row, until_s)
