"""Inputs of attention kernels, for a plan or for rows: arguments are checked, then compiled loops read the tables."""

import numpy as np

from pagedkv.contract.arguments import require_instance
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.plan import PageLists, StepPlan
from pagedkv.contract.spec import keeps_state
from pagedkv.errors import ConfigurationError, SequenceError, StepError
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.kernel_inputs import count_pages, write_pages, write_slots

__all__ = ["page_lists", "slot_mapping"]


def slot_mapping(state: SpaceState, ledger: StepLedger, plan: StepPlan, group: Group) -> Int64Array:
    """Return the slot of every position that the last plan computes.

    Raises:
        ConfigurationError: the group is a recurrent state.
        StepError: the plan is not the last one made, or another space's.
        SequenceError: a row of the plan has changed since.
    """
    _require_slots(group)
    require_instance(plan, StepPlan, "plan", StepError)
    step = ledger.in_flight[-1] if ledger.in_flight else None
    if step is None or step.plan.step_id != plan.step_id:
        last = "none is in flight" if step is None else f"the last in flight is {step.plan.step_id}"
        raise StepError(f"slots of step {plan.step_id} cannot be computed: {last}; call this right after plan_step")
    if step.plan is not plan and step.plan != plan:
        raise StepError(f"slots of step {plan.step_id} cannot be computed: the plan is another space's")
    compute = step.plan.compute_in(group.index)
    slots = np.empty(compute.num_tokens, np.int64)
    place = write_slots(
        group.arrays,
        state.rows,
        compute.rows,
        compute.starts,
        compute.ends,
        step.serials,
        state.serials[compute.rows],
        slots,
    )
    if place >= 0:
        raise SequenceError(
            f"row {compute.rows[place]} does not hold positions {compute.starts[place]} to {compute.ends[place]} of "
            f"step {plan.step_id} any more as planned: call this right after plan_step, before rows change"
        )
    return slots


def page_lists(state: SpaceState, batch: Int32Array, group: Group) -> PageLists:
    """List the pages of running rows. Raises ConfigurationError for a recurrent state."""
    _require_slots(group)
    indptr = np.empty(len(batch) + 1, np.int32)
    last_page_len, starts = np.empty((2, len(batch)), np.int32)
    count_pages(group.arrays, state.rows, batch, indptr, last_page_len, starts)
    indices = np.empty(int(indptr[-1]), np.int32)
    write_pages(group.arrays, batch, starts, indptr, indices)
    return PageLists(indptr, indices, last_page_len, starts)


def _require_slots(group: Group) -> None:
    if keeps_state(group.spec):
        raise ConfigurationError(
            f"group {group.index} is a recurrent state: a block holds one state, not tokens in slots; "
            "see block_ids for the blocks of its states"
        )
