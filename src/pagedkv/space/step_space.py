"""The part of :class:`~pagedkv.BlockSpace` that closes steps into plans, and acknowledges or aborts them."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.arguments import Rows, as_batch
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.spec import StepId
from pagedkv.errors import StepError
from pagedkv.space import (
    aborting,
    declaring,
    planning,
    stepping,
)
from pagedkv.space.batches import (
    as_step_id,
    require_known,
    require_status,
)
from pagedkv.space.swap_space import SwapSpace
from pagedkv.tables.rows import RUNNING

__all__ = ["StepSpace"]


class StepSpace(SwapSpace):
    """Operations on steps."""

    def plan_step(self) -> StepPlan:
        """Close the open step; return all that it needs done in memory. O(changed rows + changed table entries)."""
        self._state.version += 1
        return planning.plan_step(self._state, self._ledger)

    def acknowledge(self, step_id: StepId) -> None:
        """Note that the oldest step in flight has run: its tokens are computed, blocks that waited for it are freed.

        Raises:
            StepError: another step is the oldest in flight.
        """
        self._state.version += 1
        stepping.acknowledge(self._state, self._ledger, as_step_id(step_id))

    def abort(self, step_id: StepId) -> AbortedSteps:
        """Note that a step failed. It and all later steps count as never run; what they published is withdrawn.

        Rows that share tokens which another row computes in these steps, or in the open one, are lost, since for each
        row only the last such step is recorded.

        Raises:
            StepError: the step is not in flight.
        """
        self._state.version += 1
        return aborting.abort(self._state, self._ledger, as_step_id(step_id))

    def mark_computed(self, rows: Rows) -> None:
        """Declare all tokens of these rows computed, outside any plan; windows slide accordingly.

        If the open step or one in flight computes blocks that rows share, name all these rows together. If a step in
        flight computes a row too, the caller must make sure that this step leaves the declared content intact, even if
        it fails.

        Raises:
            StepError: a group is a recurrent state and steps in flight may still advance it; or a row that is not named
                computes shared blocks.
        """
        if self._state.is_recurrent and self._ledger.in_flight:
            raise StepError("a recurrent state cannot be declared computed while steps are in flight: acknowledge them")
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        require_known(self._state, batch, "declared computed")
        self._state.version += 1
        declaring.mark_computed(self._state, self._ledger, batch)
