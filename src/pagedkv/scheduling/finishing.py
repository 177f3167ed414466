"""The end of a step: its sampled tokens are applied, or, if it failed, it is undone.

Prompts are forked, sequences end, and finished requests free their blocks. The tokens of some requests may be supplied
after the batch is finished, for example if their sampler waits. Such a *held* request keeps its blocks, and does not
decode with the others until its tokens are supplied. If steps overlap, a later batch may have appended a sequence's
token before it was sampled. Such a token is filled in.

The requests of batches whose step failed continue after the tokens that finished batches computed::

    in an aborted batch a request          afterwards
    decodes, or computes a chunk           its rows are rolled back to the computed tokens; it continues from there
    is admitted                            it waits, as if it had not been admitted
    has a row whose memory is undefined    it waits, and computes its known tokens again, as after a preemption

The aborted batches have sampled no tokens. So the tokens that are sampled later at these positions are the same as
without the failure. Requests that an aborted batch preempted, rejected or freed remain so.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SharedPrefixError, TruncationError
from pagedkv.scheduling.batch import Batch, Chunk, Progress
from pagedkv.scheduling.drafting import roll_back_drafts
from pagedkv.scheduling.request import Decoding, Request
from pagedkv.scheduling.state import BY_KEY, SchedulerState

__all__ = ["AbortedBatches", "Sampled", "abort_in_flight", "finish", "supply"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results of a batch; see :meth:`Scheduler.finish <pagedkv.scheduling.Scheduler.finish>`."""

    token_ids: Int32Array
    ended: Sequence[int]
    parents: Mapping[Request, Sequence[int]]
    held: Collection[Request]
    num_accepted: Int32Array | None


class _Fills:
    """Collects sampled tokens that a later batch has appended as unknown ones, to fill them in by one call."""

    def __init__(self) -> None:
        self._rows: list[Int32Array] = []
        self._token_ids: list[Int32Array] = []

    def note(
        self, request: Request, rows: Sequence[int] | Int32Array, token_ids: Int32Array, continues: BoolArray | None
    ) -> None:
        """Add a request's tokens if a later batch decodes them. Must be called before :meth:`Request.take`."""
        if request.num_ahead > 1:
            self.add(np.asarray(rows, np.int32), token_ids, continues)

    def add(self, rows: Int32Array, token_ids: Int32Array, continues: BoolArray | None) -> None:
        """Add a token for each row that continues; the other rows are freed with an unknown token."""
        if continues is None or continues.any():
            self._rows.append(rows if continues is None else rows[continues])
            self._token_ids.append(token_ids if continues is None else token_ids[continues])

    def apply(self, state: SchedulerState) -> None:
        """Fill the tokens in."""
        if self._rows:
            state.space.fill(np.concatenate(self._rows), np.concatenate(self._token_ids))


def finish(state: SchedulerState, batch: Batch, sampled: Sampled) -> Progress:
    """Apply the tokens that the oldest batch sampled; its step is already acknowledged."""
    token_ids, ended, held = sampled.token_ids, sampled.ended, sampled.held
    if sampled.num_accepted is not None:
        roll_back_drafts(state, batch, sampled.num_accepted)
    if held and batch.decoding is not None and state.is_current(batch.decoding):
        state.close_decoding()  # held requests do not advance with the others
    continues = None
    if len(ended):
        continues = np.ones(len(token_ids), np.bool_)
        continues[ended] = False
    fills = _Fills()
    decoded = [] if batch.decoding is None else _take_decoded(state, batch.decoding, sampled, continues, fills)
    for request, beams in sampled.parents.items():
        if not request.is_done:
            request.parents = beams
    first_tokens = []
    start = len(batch.decoded_token_ids)
    for chunk in batch.prefilling:
        state.note_computed(chunk.request, chunk.stop)
        if chunk in chunk.request.awaited[:1] and chunk.request not in held:
            stop = start + chunk.num_samples
            stays = None if continues is None else continues[start:stop]
            fills.note(chunk.request, chunk.request.rows, token_ids[start:stop], stays)
            _take_first(state, chunk.request, token_ids[start:stop], stays)
            first_tokens.append(chunk.request)
        start += chunk.num_samples
    fills.apply(state)
    return Progress(tuple(first_tokens), _drop_finished(state, decoded + first_tokens))


def supply(state: SchedulerState, request: Request, token_ids: Int32Array, ended: Sequence[int]) -> Progress:
    """Apply the tokens of a held request."""
    continues = np.ones(len(token_ids), np.bool_)
    continues[np.array(ended, np.int64)] = False
    is_first = isinstance(request.awaited[0], Chunk)
    if is_first:
        _take_first(state, request, token_ids, continues)
    else:
        request.take(token_ids)
        state.has_newcomers = True
        if not continues.all():
            _end_sequences(state, request, continues)
    return Progress((request,) if is_first else (), _drop_finished(state, [request]))


def _drop_finished(state: SchedulerState, requests: list[Request]) -> tuple[Request, ...]:
    """Free the requests that have all their tokens; return these in order of their keys."""
    finished = sorted((request for request in requests if request.has_all_tokens), key=BY_KEY)
    for request in finished:
        state.free(request, is_over=True)
        request.drop()
    return tuple(finished)


def _take_decoded(
    state: SchedulerState,
    decoding: Decoding,
    sampled: Sampled,
    continues: BoolArray | None,
    fills: _Fills,
) -> list[Request]:
    """Record a token of each sequence that decoded; return the requests that may have all their tokens now."""
    if state.is_current(decoding):
        num_rows = len(decoding.rows)
        decoding.take(sampled.token_ids[:num_rows])
        if decoding.num_ahead:
            fills.add(decoding.rows, decoding.next_token_ids, None if continues is None else continues[:num_rows])
        if sampled.num_accepted is not None:
            decoding.accept(sampled.num_accepted)
        if continues is None and decoding.num_steps_left > 0:
            return []
        requests = list(decoding.requests)
    else:
        requests = _take_separately(state, decoding, sampled, continues, fills)
    if continues is not None:
        took = set(requests)
        parts = zip(decoding.requests, decoding.parts(decoding.rows), decoding.parts(continues), strict=True)
        for request, rows, part in parts:
            if request in took and not (stays := _of_remaining(request, rows, part)).all():
                _end_sequences(state, request, stays)
    return requests


def _take_separately(
    state: SchedulerState, decoding: Decoding, sampled: Sampled, continues: BoolArray | None, fills: _Fills
) -> list[Request]:
    """Record tokens of sequences that no longer decode together, for requests that still await them."""
    requests = []
    accepted = np.zeros(len(decoding.rows), np.int32) if sampled.num_accepted is None else sampled.num_accepted
    stays = np.ones(len(decoding.rows), np.bool_) if continues is None else continues
    columns = (decoding.rows, sampled.token_ids, accepted, stays)
    for request, *parts in zip(decoding.requests, *map(decoding.parts, columns), strict=True):
        if decoding in request.awaited[:1] and request not in sampled.held:
            rows, token_ids, num_accepted, lasting = (_of_remaining(request, parts[0], part) for part in parts)
            fills.note(request, rows, token_ids, lasting)
            request.accept(int(num_accepted[0]))
            request.take(token_ids)
            state.has_newcomers = True
            requests.append(request)
    return requests


def _of_remaining(request: Request, rows: Int32Array, values: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return the values without those of sequences that ended since the batch was planned; ``rows`` is the batch's."""
    if len(rows) == len(request.rows):
        return values
    return values[np.isin(rows, request.rows)]


def _take_first(state: SchedulerState, request: Request, token_ids: Int32Array, continues: BoolArray | None) -> None:
    """Record the first token of each sequence after a prompt, and fork the prompt."""
    if len(token_ids):
        request.take(token_ids)
    else:
        request.awaited = ()
    if continues is not None and not continues.all():
        _end_sequences(state, request, continues)
    if request.num_sequences > 1 and not request.has_all_tokens:
        num_forks = request.num_sequences - len(request.rows)
        request.rows += state.space.fork(request.rows[0], num_forks).tolist()
        state.num_changes += 1
    state.has_newcomers = True


def _end_sequences(state: SchedulerState, request: Request, continues: BoolArray) -> None:
    """End the sequences that do not continue; rows of a finished request remain until it is freed."""
    if request.decoding is not None:
        state.close_decoding()
    request.num_sequences = int(continues.sum())
    if not request.num_sequences or request.has_all_tokens:
        return
    request.next_token_ids = request.next_token_ids[continues]
    if len(request.rows) == len(continues) > 1:
        ended = [row for row, stays in zip(request.rows, continues, strict=True) if not stays]
        state.free_rows(request, ended)
        request.rows = [row for row, stays in zip(request.rows, continues, strict=True) if stays]
        state.num_changes += 1


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
    state.has_newcomers = True
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
