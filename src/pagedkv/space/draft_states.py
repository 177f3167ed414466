"""Draft states across groups: how many tokens may be open, the blocks of their states, and which become current.

:mod:`pagedkv.tables.drafting` draws them. A token is *open* while it is not accepted: a draft, an unknown token,
or a filled one whose step is not acknowledged. A space has this feature if a group is a recurrent state, even one
without draft states, which cannot be rolled back.
"""

import numpy as np

from pagedkv.blocks.blocks import NAME, NULL_BLOCK, PoolArrays
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SequenceError, StepError, TokenError
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.growing import Growth
from pagedkv.space.loops import Loops
from pagedkv.space.state import DraftTable, SpaceState
from pagedkv.tables.drafting import count_slots, give_slots_back, make_current, most_open, take_slots
from pagedkv.tables.rows import (
    AT,
    LOST,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DRAFT_STATES,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    VACANT,
    GroupArrays,
)

__all__ = ["DraftFeature"]


class DraftLoops(Loops):
    """The loops over draft states."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, rows: Int32Array) -> None:
        """Set the types of their arguments. O(1)."""
        ids = np.zeros(0, np.int32)
        is_so = False
        self.count_slots = self._ready(count_slots, pool, group, group, rows, ids, ids, 0, is_so)
        self.take_slots = self._ready(take_slots, pool, group, rows, ids, ids, 0, is_so)
        self.make_current = self._ready(make_current, pool, group, group, rows, ids, ids, ids)
        self.give_slots_back = self._ready(give_slots_back, pool, group, rows, ids, is_so)


class DraftFeature(SpaceFeature):
    """The part of the operations that rolls recurrent states back, and refuses where that is impossible."""

    def __init__(self, state: SpaceState) -> None:
        """Use the state of a space. O(tables)."""
        self._state = state
        first = state.draft_tables[0].group if state.draft_tables else state.groups[0]
        self._loops = DraftLoops(*first.view)
        self._num_states = state.num_draft_states
        self.most_blocks_a_row = sum(int(drafts.arrays.parameters[NUM_DRAFT_STATES]) for drafts in state.draft_tables)

    # What is refused

    def require_drafts(self, num_draft: int) -> None:
        """Raise TokenError for more drafts than a recurrent state can roll back."""
        if num_draft > self._num_states:
            raise TokenError(
                f"num_draft = {num_draft}, but a recurrent state cannot be rolled back by more than "
                f"{self._num_states} tokens: give every such group more num_draft_states"
            )

    def require_unknown(self, growth: Growth) -> None:
        """Raise TokenError for more unknown tokens than a recurrent state can roll back."""
        if self._num_states:
            self._require_slots(growth.batch, growth.counts)
        else:
            self._require_no_rollback(growth.batch, growth.counts)

    def _require_slots(self, batch: Int32Array, counts: Int32Array) -> None:
        """Raise TokenError if unknown tokens would give rows more open tokens than a group has draft states."""
        rows = self._state.rows
        place = most_open(rows, batch, counts)
        row = int(batch[place]) if len(batch) else 0
        num_open = int(rows[row, NUM_TOKENS] - rows[row, NUM_ACCEPTED])
        if len(batch) and counts[place] and num_open + counts[place] > self._num_states:
            raise TokenError(
                f"row {row} cannot take {counts[place]} unknown tokens: {num_open} are not accepted yet, and there is "
                f"a state for {self._num_states} at one time; fill some in, acknowledge their step, or give recurrent "
                "groups more num_draft_states"
            )

    def _require_no_rollback(self, batch: Int32Array, counts: Int32Array) -> None:
        """Raise TokenError unless each row takes one unknown token, with all before it planned."""
        planned, num_tokens = (self._state.rows[batch, column] for column in (NUM_PLANNED, NUM_TOKENS))
        unfit = (counts > 1) | ((counts > 0) & (planned < num_tokens))
        if unfit.any():
            place = int(unfit.argmax())
            raise TokenError(
                f"row {batch[place]} cannot take {counts[place]} unknown tokens behind {num_tokens[place]}, of which "
                f"{planned[place]} are planned: a group is a recurrent state, which cannot be rolled back; append "
                "one a step, once what is before it is planned, or give it num_draft_states"
            )

    def require_forkable(self, parent: int) -> None:
        """Raise SequenceError if a row to be forked has open tokens: their draft states cannot be shared."""
        accepted, num_tokens = (int(self._state.rows[parent, column]) for column in (NUM_ACCEPTED, NUM_TOKENS))
        if self._state.draft_tables and accepted < num_tokens:
            raise SequenceError(
                f"row {parent} cannot be forked: {num_tokens - accepted} of its {num_tokens} tokens are not accepted "
                f"yet, and their states are its own; fork it at {accepted}, or accept them first"
            )

    def require_declarable(self, batch: Int32Array) -> None:
        """Raise StepError if rows to be declared computed have drafts, or planned tokens that may still be refused."""
        state = self._state
        if not state.draft_tables:
            return
        columns = NUM_ACCEPTED, NUM_TOKENS, NUM_PLANNED
        accepted, num_tokens, planned = (state.rows[batch, column] for column in columns)
        unfit = (planned > accepted) | ((accepted < num_tokens) & (state.num_known[batch] == 0))
        if unfit.any():
            place = int(unfit.argmax())
            raise StepError(
                f"row {batch[place]} cannot be declared computed: {num_tokens[place] - accepted[place]} of its "
                f"{num_tokens[place]} tokens are not accepted yet; accept them, or roll it back, first"
            )

    def what_keeps(self, batch: Int32Array) -> str | None:
        """Refuse rows with open tokens: their draft states cannot leave the device."""
        rows = self._state.rows
        if not self._state.draft_tables or not (rows[batch, NUM_ACCEPTED] < rows[batch, NUM_TOKENS]).any():
            return None
        return (
            f"rows {batch.tolist()} have tokens that are not accepted, and a state for each: accept them, or roll the "
            "rows back, and acknowledge their steps first"
        )

    # What is taken and given back

    def count_growth(self, growth: Growth, needed: dict[str, int]) -> None:
        """Count the blocks that the draft states of growing rows still need."""
        for drafts in self._state.draft_tables:
            view = drafts.group.view
            needed[drafts.pool.name] += self._loops.count_slots(
                view.pool,
                view.group,
                drafts.arrays,
                view.rows,
                growth.batch,
                growth.counts,
                growth.num_draft,
                growth.is_unknown,
            )

    def growing(self, growth: Growth) -> None:
        """Make the draft states that this growth accepts current; give each unaccepted token a block."""
        rows, (batch, counts) = self._state.rows, (growth.batch, growth.counts)
        grown = batch[counts > 0]
        if not growth.is_unknown:
            self._make_current(grown, rows[grown, NUM_ACCEPTED], rows[grown, NUM_TOKENS])
        for drafts in self._state.draft_tables:
            self._loops.take_slots(
                drafts.pool.arrays, drafts.arrays, rows, batch, counts, growth.num_draft, growth.is_unknown
            )

    def accepted(self, batch: Int32Array, before: Int32Array, accepted: Int32Array) -> None:
        """Make the draft states of newly accepted tokens current."""
        self._make_current(batch, before, accepted)

    def _make_current(self, batch: Int32Array, before: Int32Array, accepted: Int32Array) -> None:
        for drafts in self._state.draft_tables:
            view = drafts.group.view
            self._loops.make_current(view.pool, view.group, drafts.arrays, view.rows, batch, before, accepted)

    def truncated(self, batch: Int32Array) -> None:
        """Free the blocks of draft states without an open token."""
        self._give_back(batch, is_leaving=False)

    def leaving(self, batch: Int32Array) -> None:
        """Free the blocks of all draft states."""
        self._give_back(batch, is_leaving=True)

    def _give_back(self, batch: Int32Array, *, is_leaving: bool) -> None:
        for drafts in self._state.draft_tables:
            self._loops.give_slots_back(drafts.pool.arrays, drafts.arrays, self._state.rows, batch, is_leaving)

    # Auditing

    def check(self) -> None:
        """Every open token of a running row has a slot with a block of its own; rows off the device have no slots."""
        for drafts in self._state.draft_tables:
            self._check_table(drafts)

    def _check_table(self, drafts: DraftTable) -> None:
        rows = self._state.rows
        at, num_slots = (int(drafts.arrays.parameters[column]) for column in (AT, NUM_DRAFT_STATES))
        records, table = drafts.pool.arrays.records, drafts.arrays.table
        assert not table[:, num_slots:].any(), f"table {drafts.index}: a slot that no position has"
        assert (rows[:, at + NUM_BLOCKS] == (table != NULL_BLOCK).sum(axis=1)).all(), (
            f"table {drafts.index}: slots with a block are miscounted"
        )
        blocks = table[table != NULL_BLOCK]
        assert not records[blocks, NAME].any(), f"table {drafts.index}: a draft state can be found"
        assert len(set(blocks.tolist())) == len(blocks), f"table {drafts.index}: a draft state has two slots"
        for row in np.flatnonzero(rows[:, STATUS] != VACANT).tolist():
            where = f"table {drafts.index}, row {row}"
            status, accepted, num_tokens = rows[row, [STATUS, NUM_ACCEPTED, NUM_TOKENS]].tolist()
            assert 0 <= num_tokens - accepted <= num_slots or status == LOST, f"{where}: more open tokens than slots"
            assert status in {RUNNING, LOST} or not table[row].any(), f"{where}: draft states, and not on the device"
            is_missing = any(table[row, position % num_slots] == NULL_BLOCK for position in range(accepted, num_tokens))
            assert not is_missing or status != RUNNING, f"{where}: an open token has no slot"
