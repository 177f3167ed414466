"""Undoes batches whose step failed: their requests continue after the tokens that finished batches computed.

::

    in an aborted batch a request          afterwards
    decodes, or computes a chunk           its rows are rolled back to the computed tokens; it continues from there
    is admitted                            it waits, as if it had not been admitted
    has a row whose memory is undefined    it waits, and computes its known tokens again, as after a preemption

The aborted batches have sampled no tokens. So the tokens that are sampled later at these positions are the same as
without the failure. Requests that an aborted batch preempted, rejected or freed remain so.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagedkv.contract.answers import AbortedSteps
from pagedkv.errors import SharedPrefixError, TruncationError
from pagedkv.scheduling.batch import Batch
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import SchedulerState

__all__ = ["AbortedBatches", "abort_in_flight"]


@dataclass(frozen=True, slots=True, eq=False)
class AbortedBatches:
    """The result of aborting batches.

    Args:
        steps: the aborted steps, from the block space.
        requests: requests with computation in these batches that are not done, in order of their keys.
        withdrawn: requests that these batches had admitted, and that wait again.
        preempted: requests that lost their blocks; they wait, and compute their known tokens again.
    """

    steps: AbortedSteps
    requests: tuple[Request, ...]
    withdrawn: tuple[Request, ...]
    preempted: tuple[Request, ...]


def abort_in_flight(state: SchedulerState) -> AbortedBatches | None:
    """Abort all batches in flight, in the space too; None if there are none."""
    if not state.in_flight:
        return None
    batches = tuple(state.in_flight)
    state.in_flight.clear()
    state.is_draining = False
    state.close_decoding()
    state.note_newcomer()
    steps = state.space.abort(batches[0].plan.step_id)
    computed = _computed_before(batches)
    admitted = {admission.request for batch in batches for admission in batch.admitted}
    lost = set(steps.lost_rows)
    withdrawn, preempted = [], []
    sampling = {each for batch in batches for each in (batch.decoding, *batch.prefilling)}
    for request in [*state.running, *state.swapped]:
        request.awaited = tuple(each for each in request.awaited if each not in sampling)
        if request in admitted and request in state.running:
            withdrawn.append(request)
        elif not lost.isdisjoint(request.rows) or not _rewind(state, request, computed):
            request.num_preemptions += 1
            preempted.append(request)
    for request in withdrawn + preempted:
        state.requeue(request)
    requests = sorted((each for each in computed if not each.is_done), key=lambda each: each.key)
    return AbortedBatches(steps, tuple(requests), tuple(withdrawn), tuple(preempted))


def _computed_before(batches: Iterable[Batch]) -> dict[Request, int | None]:
    """Map each request of these batches to where its first chunk in them begins; None if it only decodes."""
    computed: dict[Request, int | None] = {}
    for batch in batches:
        for chunk in batch.prefilling:
            computed.setdefault(chunk.request, chunk.start)
        for request in () if batch.decoding is None else batch.decoding.requests:
            computed.setdefault(request, None)
    return computed


def _rewind(state: SchedulerState, request: Request, computed: dict[Request, int | None]) -> bool:
    """Roll a request back to the tokens computed before these batches; return False if its rows cannot be."""
    if request not in computed or request in state.swapped:
        return True
    start = computed[request]
    if start is not None:
        request.num_scheduled = start
        state.prefill_again(request)
    num_kept = request.num_scheduled if request.num_unscheduled else request.num_known - 1
    lengths = state.space.lengths(request.rows)
    if (lengths < num_kept).any():
        return False
    rows = np.array(request.rows, np.int32)[lengths > num_kept]
    try:
        state.space.truncate(rows, np.full(len(rows), num_kept))
    except (TruncationError, SharedPrefixError):  # the window or state there was evicted, or a fork shares the block
        return False
    return True
