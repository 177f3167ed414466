"""What windows release and what they keep cached, across groups: at ends of prompts and sequences, and at junctions."""

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.space.feature import SpaceFeature
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.tables.retaining import (
    JUNCTION,
    PROMPT_END,
    PROMPT_LENGTH,
    keep_ends,
    move_end_on,
    note_junction,
)
from pagedkv.memory.tables.rows import HIT_ALIGNMENT
from pagedkv.memory.tables.sliding import slide

__all__ = ["RetentionFeature", "slide_group"]


class RetentionFeature(SpaceFeature):
    """The part of the operations that records up to where later prompts can hit, for groups that shed blocks."""

    def __init__(self, state: SpaceState) -> None:
        """Use the state of a space. O(1)."""
        self._state = state

    def prompt_known(self, row: int, num_tokens: int, hit: PrefixHit) -> None:
        """Keep the blocks before the prompt's end, and before the place where it leaves a known chain."""
        _note_prompt(self._state, row, num_tokens, hit)

    def forked(self, parent: int, children: Int32Array) -> None:
        """Copy the parent's places to its children."""
        for group in self._state.shedding_groups:
            group.ends[children] = group.ends[parent]

    def leaving(self, batch: Int32Array) -> None:
        """Mark the blocks to be kept before the rows release them."""
        _note_ends(self._state, batch)

    def cleared(self, batch: Int32Array) -> None:
        """Clear the places of the rows."""
        for group in self._state.shedding_groups:
            group.ends[batch] = 0


def _note_prompt(state: SpaceState, row: int, num_tokens: int, hit: PrefixHit) -> None:
    """Record where a prompt of this many tokens ends and where it leaves a known chain; mark the end of its hit."""
    alignment = int(state.shedding_groups[0].arrays.parameters[HIT_ALIGNMENT])
    for group in state.shedding_groups:
        group.ends[row, PROMPT_END] = (num_tokens - 1) // alignment * alignment
        group.ends[row, PROMPT_LENGTH] = num_tokens
        group.ends[row, JUNCTION] = hit.junction
        pool, hits = group.pool.arrays, hit.block_ids[group.index]
        if hit.junction == hit.num_whole_tokens:
            note_junction(pool, hits)
        else:
            chain = _chain_beside(state, group)
            chain_hits = hits[:0] if chain is group else hit.block_ids[chain.index]
            move_end_on(pool, group.arrays, hits, chain.pool.arrays, chain_hits)


def _note_ends(state: SpaceState, batch: Int32Array) -> None:
    """Mark the blocks to be kept of rows that are about to release their blocks on the device."""
    for group in state.shedding_groups:
        chain = _chain_beside(state, group)
        keep_ends(*group.view, batch, group.ends, chain.pool.arrays, chain.arrays)


def slide_group(state: SpaceState, group: Group, batch: Int32Array, computed: Int32Array) -> None:
    """Release the blocks of a group that rows no longer need, with ``computed[i]`` tokens of ``batch[i]`` computed."""
    chain = _chain_beside(state, group)
    slide(*group.view, batch, computed, group.ends, chain.pool.arrays, chain.arrays)


def _chain_beside(state: SpaceState, group: Group) -> Group:
    """Find a group with the same digests that keeps whole prefixes; the group itself if there is none."""
    beside = state.lanes[group.lane] if group in state.shedding_groups else ()
    return next((other for other in beside if other.keeps_whole_prefix), group)
