"""Collecting a hit of a given length: the whole blocks of all groups before its end, if none lacks or awaits any."""

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK, PENDING_STEP
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.matching.known import Ending, Known
from pagedkv.space.tails import Tail

__all__ = ["ending_at"]


def ending_at(known: Known, end: int, tails: list[Tail | None]) -> Ending | None:
    """Collect the blocks of a hit of ``end`` tokens; None if a group lacks any, or any is pending.

    Args:
        known: what is known of the prompt.
        end: the end of the hit.
        tails: the tail of each group that has no boundary there, None if it lacks one.
    """
    block_ids = _blocks_up_to(known, end)
    found = [tail for tail in tails if tail is not None]
    if len(found) < len(tails) or block_ids is None or _is_any_pending(known, block_ids, found):
        return None
    return Ending(end, block_ids, tuple(found))


def _blocks_up_to(known: Known, end: int) -> list[Int32Array] | None:
    """Collect the whole blocks of a hit of ``end`` tokens; None if a group lacks any."""
    block_ids, loops = known.chain_blocks(end), known.state.loops
    for index, lookup in known.lookups.items():
        group, arguments = lookup
        block_ids[index] = np.zeros(end // group.block_size, np.int32)
        if end % group.block_size and group in known.state.state_groups:
            continue  # a state inside an interval stands for all before it
        if lookup.num_known < end // group.block_size or loops.missing_block(*arguments, end, end) >= 0:
            return None
        num_blocks = len(block_ids[index])
        loops.collect_servable(*arguments, end, end, block_ids[index], np.full(2, num_blocks, np.int32))
    return block_ids


def _is_any_pending(known: Known, block_ids: list[Int32Array], tails: list[Tail]) -> bool:
    """Return whether the open step computes any of these blocks."""
    for group, held in zip(known.state.groups, block_ids, strict=True):
        mine = [*held[held != NULL_BLOCK].tolist(), *(tail.block for tail in tails if tail.group == group.index)]
        if (group.pool.arrays.records[mine, PENDING_STEP] == known.state.open_step).any():
            return True
    return False
