"""The last pass: a hit that ends where windows have lost what it needs, if they may be computed again.

:mod:`pagedkv.space.replaying` draws the use of such a hit. It ends where full attention ends; window groups have
their sinks, which are never computed again.
"""

import math
from typing import NamedTuple

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK, OPEN_STEP, PENDING_STEP
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import replay_of
from pagedkv.space.matching.chains import Chain
from pagedkv.space.matching.known import Ending, Known, Lookup
from pagedkv.space.state import Group, SpaceState
from pagedkv.tables.matching import find_block
from pagedkv.tables.rows import ENDS_HITS, KIND, NUM_SINK_BLOCKS, SPAN
from pagedkv.tables.rules import first_block_of_hit

__all__ = ["first_sure", "longest_with_replay"]


class _Extent(NamedTuple):
    """The extent of a replay for a hit of some length.

    Args:
        start: first position that it computes, at a block boundary of all window groups.
        is_exact: whether every layer has all that the blocks of the last window need.
    """

    start: int
    is_exact: bool


def longest_with_replay(known: Known, num_hits: int) -> Ending | None:
    """Find the longest hit that ends with a replay.

    None if that is not allowed, or is no longer than the ``num_hits`` tokens that hit without replay.
    """
    state = known.state
    end = known.aligned(min(_num_settled(chain) for chain in known.chains.values()))
    if end <= num_hits:
        return None
    start, is_exact = _extent(state, end)
    if start <= num_hits or end - start > known.prompt.max_replay_tokens:
        return None
    block_ids = known.chain_blocks(end)
    for group in state.replaying_groups:
        before = _blocks_before(known.lookups[group.index], start)
        if before is None:
            return None
        block_ids[group.index] = before
    return Ending(end, block_ids, num_replayed=end - start, is_exact=is_exact)


def first_sure(group: Group, end: int) -> int:
    """Return the first logical block that a hit of ``end`` tokens needs."""
    kind, span, ends_hits = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, ENDS_HITS))
    return int(first_block_of_hit(kind, span, end, group.block_size, ends_hits))


def _num_settled(chain: Chain) -> int:
    """Count the tokens of a chain before those that the open step computes, which a new row could not take over."""
    arrays = chain.group.pool.arrays
    is_open = arrays.records[chain.blocks, PENDING_STEP] == arrays.counts[OPEN_STEP]
    return (int(is_open.argmax()) if is_open.any() else len(chain.blocks)) * chain.group.block_size


def _extent(state: SpaceState, end: int) -> _Extent:
    """Return where the replay of a hit begins: as far back as configured, or where it is exact, if that suffices."""
    groups = state.replaying_groups
    replays = [replay for group in groups if (replay := replay_of(group.spec))]
    sure = min(first_sure(group, end) * group.block_size for group in groups)
    reach = max(int(group.arrays.parameters[SPAN]) for group in groups) - 1
    num_replay_tokens, num_layers = max(it.num_tokens for it in replays), max(it.num_layers for it in replays)
    start = min(
        sure - 1, end - num_replay_tokens
    )  # one block more than is kept: while it is there, the replay's step is not over
    if num_replay_tokens >= num_layers * reach:
        start = min(start, sure - (num_layers - 1) * reach)
    alignment = math.lcm(*(group.block_size for group in groups))
    start = start // alignment * alignment
    return _Extent(start, sure - start >= (num_layers - 1) * reach)


def _blocks_before(lookup: Lookup, start: int) -> Int32Array | None:
    """Return a window group's sinks before a replay; None if it lacks any, or the replay begins inside them."""
    group, arguments = lookup
    num_blocks, num_sinks = start // group.block_size, int(group.arrays.parameters[NUM_SINK_BLOCKS])
    if num_blocks < num_sinks:
        return None
    sinks = [int(find_block(*arguments, index)) for index in range(num_sinks)]
    arrays = group.pool.arrays
    is_open = (arrays.records[sinks, PENDING_STEP] == arrays.counts[OPEN_STEP]).any() if sinks else False
    if NULL_BLOCK in sinks or is_open:
        return None
    return np.array(sinks + [NULL_BLOCK] * (num_blocks - num_sinks), np.int32)
