"""Recurrent states at the ends of prompts: where they are to be kept, and naming those that a plan computes.

:mod:`pagedkv.tables.checkpoints` draws a kept state; :mod:`pagedkv.space.matching` finds one for a
prompt, and :mod:`pagedkv.space.continuing` lets a row continue from it.
"""

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import EXTRA, LIFE, NAME, NULL_BLOCK
from pagedkv.blocks.digests import digest_block
from pagedkv.blocks.keep_reasons import AT_END, add_reasons_of
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.checkpoints import Checkpoints, TailNote, keys_of_tail
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.hits import PrefixHit
from pagedkv.space.matching.intervals import longest_inside_intervals
from pagedkv.space.matching.known import Ending, Known
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep
from pagedkv.tables.checkpoints import drop_tail_names, name_tail
from pagedkv.tables.rows import (
    AT,
    FROZEN,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_TOKENS,
    RUNNING,
    SHEDS,
    STATUS,
)

__all__ = ["CheckpointFeature"]


class CheckpointFeature(SpaceFeature):
    """The part of the operations that keeps states for prefixes to hit.

    Attributes:
        checkpoints: the states that are kept inside intervals, and where running prompts need one.
    """

    def __init__(self, state: SpaceState) -> None:
        """Keep none yet. O(rows)."""
        self._state = state
        self.checkpoints = Checkpoints(state.config)

    def checkpoint(self, num_tokens: int, num_hit_tokens: int) -> int:
        """Return the position up to which the last state of a prompt should be kept; 0 if none is needed.

        The position lies behind the hit and before the last token, where hits can end in all groups but states, and
        where no state is kept anyway at the end of an interval.
        """
        alignment = self.checkpoints.alignment
        position = (num_tokens - 1) // alignment * alignment
        is_kept_anyway = all(position % group.block_size == 0 for group in self._state.state_groups)
        return 0 if position <= num_hit_tokens or is_kept_anyway else position

    def prompt_known(self, row: int, num_tokens: int, hit: PrefixHit) -> None:
        """Record up to where the last state of a new row's prompt is to be kept."""
        self.checkpoints.wanted[row] = self.checkpoint(num_tokens, hit.num_tokens)

    def cleared(self, batch: Int32Array) -> None:
        """Forget where the states of the rows were to be kept."""
        self.checkpoints.wanted[batch] = 0

    def lengthened(self, known: Known, ending: Ending) -> Ending:
        """Let a hit end with states that were kept inside intervals."""
        return longest_inside_intervals(known, ending, self.checkpoints) if self.checkpoints else ending

    def giving_way(self, batch: Int32Array) -> None:
        """Let growing rows overwrite their kept states in place."""
        for group in self._state.state_groups:
            drop_tail_names(*group.view, batch)

    def num_named_tokens(self, pool: BlockPool, block: int) -> int | None:
        """Return the length of the tail that a block is named for."""
        note = self.checkpoints.note_of(pool.name, pool.arrays, block)
        return None if note is None else note.length

    # Naming

    def planned(self, step: InFlightStep) -> None:
        """Name the states of rows that the plan computes exactly up to where one is to be kept."""
        state, computing, ends = self._state, step.rows, step.ends
        is_there = (self.checkpoints.wanted[computing] == ends) & (state.rows[computing, NUM_ACCEPTED] == ends)
        for row, position in zip(computing[is_there].tolist(), ends[is_there].tolist(), strict=True):
            if state.rows[row, FROZEN]:
                continue
            for group in state.state_groups:
                index, length = divmod(position, group.block_size)
                is_digested = state.rows[row, int(group.arrays.parameters[AT]) + NUM_DIGESTED] == index
                if length and is_digested:
                    self._keep_state(group, row, index, length)
            for feature in state.features:
                feature.state_kept(row, position)

    def _keep_state(self, group: Group, row: int, index: int, length: int) -> None:
        state, pool, parent = self._state, group.pool, self._state.chains[group.lane][row]
        extra = _extra_of_tail(state, group, row, index, length)
        block = name_tail(*group.view, row, parent, state.extra_keys.arrays, extra)
        if block == NULL_BLOCK:
            return
        if group.arrays.parameters[SHEDS]:
            add_reasons_of(pool.arrays.records, block, AT_END)
        life = int(pool.arrays.records[block, LIFE])
        self.checkpoints.note(pool.name, block, TailNote(group.index, parent.tobytes(), length, life))

    # Auditing

    def check(self) -> None:
        """A state kept inside an interval has the digest of its noted tail, and was not written since."""
        for group in self._state.state_groups:
            self._check_noted(group)
            self._check_unwritten(group)

    def _check_noted(self, group: Group) -> None:
        arrays = group.pool.arrays
        for block in self.checkpoints.noted_blocks(group.pool.name):
            note = self.checkpoints.note_of(group.pool.name, arrays, block)
            if note is None or note.group != group.index:
                continue
            where = f"group {group.index}: block {block}"
            assert 0 < note.length < group.block_size, f"{where} is kept for a whole interval"
            parent = np.frombuffer(note.parent, np.uint32)
            tail, extra = arrays.tokens[block, : note.length], int(arrays.records[block, EXTRA])
            digest = np.empty_like(parent)
            digest_block(parent, tail, self._state.extra_keys.arrays, extra, digest)
            assert (digest == arrays.digests[block]).all(), f"{where} is kept for other tokens"

    def _check_unwritten(self, group: Group) -> None:
        rows, arrays, at = self._state.rows, group.pool.arrays, int(group.arrays.parameters[AT])
        for row in np.flatnonzero(rows[:, STATUS] == RUNNING).tolist():
            index, length = divmod(int(rows[row, NUM_TOKENS]), group.block_size)
            block = int(group.arrays.table[row, index]) if index < rows[row, at + NUM_BLOCKS] else NULL_BLOCK
            if length and arrays.records[block, NAME] == group.index + 1:
                note = self.checkpoints.note_of(group.pool.name, arrays, block)
                is_as_kept = note is not None and note.length == length
                assert is_as_kept, f"group {group.index}, row {row}: block {block} is kept, but was written since"


def _extra_of_tail(state: SpaceState, group: Group, row: int, index: int, length: int) -> int:
    """Return the extra keys' id for a block's first ``length`` tokens: the block's, without media that begin later."""
    start = index * group.block_size
    if row not in state.media_keys:
        return int(group.pool.arrays.records[group.arrays.table[row, index], EXTRA])
    encoding = keys_of_tail(state.media_keys[row], state.identity_epoch, start, start + length)
    return state.extra_keys.intern_all([encoding])[0]
