"""Scheduler: decides what each step decodes, computes, swaps in, admits and preempts, over one block space.

The loop of an engine, or of a simulation of one::

    scheduler.add(request)                                  whenever a request arrives
    batch = scheduler.schedule()                            decides, and plans the step
    token_ids = run(batch)                                  carries the plan out, runs the model, samples
    progress = scheduler.finish(batch, token_ids, ended)    the step is over: requests with first or last tokens

The scheduler has no clock, and the length of an answer is not known in advance: a sequence ends when it has
``max_new_tokens``, or when ``ended`` of :meth:`Scheduler.finish` lists it. A preempted request returns under a promise
(:mod:`~pagedkv.scheduling.admitting`) that prevents thrashing: some sequence always advances, no request starves,
and under constant load the set of running requests settles.

Several batches may be in flight; the next batch is planned without the tokens that an earlier one still samples.
Sequences that await these tokens are not scheduled, or, if steps overlap (``SchedulingConfig.overlap``), decode them as
unknown tokens, which ``finish`` fills in. If such a sequence turns out to have ended, it is freed, and the tokens that
the later batch samples for it are ignored.

A step's phases are functions of ``growing`` (running requests, drafts) and ``admitting`` (the others). Its end stands
here: prompts are forked, sequences end, and finished requests free their blocks. The tokens of some requests may be
supplied after the batch is finished, for example if their sampler waits. Such a *held* request keeps its blocks, and
does not decode with the others until its tokens are supplied.

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
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.arguments import as_token_array
from pagedkv.contract.arrays import NO_TOKENS, BoolArray, Int32Array
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import SharedPrefixError, StepError, TokenError, TruncationError
from pagedkv.scheduling.admitting import admit_waiting, branch_off, fits_alone, most_blocks
from pagedkv.scheduling.config import SchedulingConfig
from pagedkv.scheduling.growing import append_drafts, as_accepted, decode, fill_drafts, prefill, roll_back_drafts
from pagedkv.scheduling.request import Batch, BatchDraft, Chunk, Decoding, Progress, Request
from pagedkv.scheduling.state import BY_KEY, Loader, SchedulerState
from pagedkv.space import BlockSpace

NO_PARENTS: Final[Mapping[Request, Sequence[int]]] = MappingProxyType({})

Scalar = TypeVar("Scalar", bound=np.generic)
Fills: TypeAlias = list[tuple[Int32Array, Int32Array]]
"""Rows and tokens that a later batch has appended as unknown ones; all are filled in by one call."""


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


class Scheduler:
    """Schedules requests over one block space, which no other code may change.

    Args:
        config: the limits of a step.
        space: the block space, with a row for each sequence that may run or be swapped out.
        loader: begins loads of prefixes for requests that could be admitted; None: prefixes are computed.
    """

    def __init__(self, config: SchedulingConfig, space: BlockSpace, loader: Loader | None = None) -> None:
        self._state = SchedulerState(config, space, loader)

    def add(self, request: Request) -> bool:
        """Queue a request; or drop it and return False, if it could not be served even alone.

        Raises ConfigurationError, and changes nothing, if the space does not have the tenant of its intent.
        """
        if fits_alone(self._state, request):
            self._state.waiting.push(request)
        else:
            request.drop()
        return not request.is_done

    def fork(self, parent: Request, child: Request, *, sequence: int = 0) -> int | None:
        """Add a request that begins with another one's tokens, by a fork if the other runs and there is room.

        Otherwise the request waits like any other, and hits cached blocks.

        Args:
            parent: a request that was added before, in any state; its rows have no unknown tokens.
            child: a request that begins with all or some tokens of a sequence of the parent, and has at least one more
                to compute, such as the parent's next token.
            sequence: number of the parent's sequence.

        Returns:
            The number of shared tokens, 0 if it waits; None if it could not be served even alone.
        """
        if not fits_alone(self._state, child):
            child.drop()
            return None
        num_shared = 0
        if parent in self._state.running and not self._state.in_flight:
            row = parent.rows[sequence if sequence < len(parent.rows) else 0]
            if _may_share_blocks(parent, child):
                num_shared = branch_off(self._state, row, child)
        if not num_shared:
            self._state.waiting.push(child)
        return num_shared

    def abort(self, request: Request) -> bool:
        """Drop a request, in any state; return False if it was already done.

        Tokens that batches in flight sample for it are ignored.
        """
        state = self._state
        if request.is_done:
            return False
        if request in state.loading:
            del state.loading[request]
        elif not request.rows:
            state.waiting.remove(request)
        elif request in state.swapped:
            state.free_rows(request, request.rows)
            state.swapped.remove(request)
        else:
            state.free(request, is_over=True)
        request.drop()
        return True

    def end_loading(self) -> None:
        """Load no prefixes from now on. The caller has ended the loads under way."""
        self._state.loader = None

    def loaded(self, request: Request) -> None:
        """Queue a request again whose load has ended, at its old place. Does nothing for other or aborted requests."""
        if request in self._state.loading:
            del self._state.loading[request]
            self._state.waiting.push(request)

    def schedule(self, max_batched_tokens: int | None = None) -> Batch:
        """Run the phases of a step and close it; return its batch.

        Decoding sequences are scheduled first; the rest of the budget is used for prompts under way, then for new
        prompts, then for drafts. While blocks are short, no request is admitted or swapped in, and there are no drafts.
        The batch may be empty while others are in flight.

        Args:
            max_batched_tokens: the budget of this step, if less than that of the configuration. It does not limit
                decoding sequences.

        Cost: O(sequences); little more than one append while the same sequences decode.
        """
        state, draft = self._state, BatchDraft()
        state.is_draining = state.is_draining and state.is_computing
        if not state.is_draining:
            most = state.config.max_batched_tokens
            budget = most if max_batched_tokens is None else min(most, max_batched_tokens)
            budget -= decode(state, draft)
            if state.prefilling and not state.is_draining:
                budget = prefill(state, draft, budget)
            lacks_blocks = bool(draft.preempted or draft.rejected)
            if not (lacks_blocks or state.is_draining):
                if state.waiting.requests or state.swapped:
                    budget = admit_waiting(state, draft, budget)
                if draft.decoding is not None and state.config.most_drafts:
                    append_drafts(state, draft, draft.decoding, budget)
        batch = Batch(
            state.space.plan_step(),
            draft.decoding,
            NO_TOKENS if draft.decoding is None else draft.decoding.appended_token_ids,
            draft.drafts,
            tuple(draft.prefilling),
            tuple(draft.admitted),
            tuple(draft.resumed),
            tuple(draft.preempted),
            tuple(draft.rejected),
        )
        state.in_flight.append(batch)
        return batch

    def fill_drafts(self, batch: Batch, token_ids: TokenIds) -> None:
        """Set the ids of a batch's drafts that requests proposed as unknown, before the batch is finished.

        Args:
            batch: the newest batch in flight; the ids of its drafts change.
            token_ids: int32 ``[batch.num_drafted]``, sequence by sequence.

        Raises:
            StepError: the batch is not the newest in flight.
            TokenError: not as many ids as drafts, or one that is below 0.
        """
        state = self._state
        if not state.in_flight or state.in_flight[-1] is not batch:
            raise StepError(f"step {batch.plan.step_id} is not the newest in flight: its drafts are settled")
        tokens = as_token_array(token_ids)
        if len(tokens) != batch.num_drafted or tokens.min(initial=0) < 0:
            raise TokenError(
                f"step {batch.plan.step_id} has {batch.num_drafted} drafts, whose ids are 0 or more; got "
                f"{len(tokens)} ids, the least of them {tokens.min(initial=0)}"
            )
        if batch.drafts is not None:
            fill_drafts(state, batch, tokens)

    def finish(  # noqa: PLR0913 - the sampled tokens, and their further properties by keywords
        self,
        batch: Batch,
        token_ids: TokenIds,
        *,
        ended: Sequence[int] = (),
        parents: Mapping[Request, Sequence[int]] = NO_PARENTS,
        held: Collection[Request] = (),
        num_accepted: npt.ArrayLike | None = None,
    ) -> Progress:
        """Acknowledge the oldest batch in flight, and apply the tokens that it sampled.

        Args:
            batch: the batch.
            token_ids: int32 ``[batch.num_samples]``, in the order drawn in :class:`Batch`.
            ended: indices in ``token_ids`` of tokens that are the last of their sequence.
            parents: for requests that decode beams, the old beam that each new one continues, one for each sequence;
                ``token_ids`` has the tokens of the new beams. Old beams without a child are freed.
            held: requests whose tokens are not known yet; their entries of ``token_ids`` are ignored. They keep their
                blocks, and continue after :meth:`supply`. A held request that is preempted or aborted meanwhile is no
                longer held.
            num_accepted: int32 ``[sequences that decoded]``, the number of accepted drafts of each. A sequence has
                generated these drafts, and then its token in ``token_ids``; the other drafts are rolled back. None: no
                draft is accepted.

        Raises:
            StepError: another batch is the oldest in flight, or a later batch has scheduled a held request beyond these
                tokens: such a request needs ``runs_ahead=False``.
            TokenError: the number of tokens is not ``batch.num_samples``, or more drafts are accepted than computed.
        """
        state = self._state
        _require_oldest(state, batch, held)
        tokens = as_token_array(token_ids)
        if len(tokens) != batch.num_samples:
            raise TokenError(f"step {batch.plan.step_id} samples {batch.num_samples} tokens, got {len(tokens)}")
        accepted = None if batch.drafts is None and num_accepted is None else as_accepted(batch, num_accepted)
        state.space.acknowledge(batch.plan.step_id)
        state.in_flight.popleft()
        if accepted is not None:
            roll_back_drafts(state, batch, accepted)
        if held and batch.decoding is not None and batch.decoding is state.decoding:
            state.close_decoding()  # held requests do not advance with the others
        continues = None
        if len(ended):
            continues = np.ones(len(tokens), np.bool_)
            continues[ended] = False
        fills: Fills = []
        over: list[Request] = []  # requests that may have all their tokens now
        if batch.decoding is not None:
            over = _take_decoded(state, batch.decoding, tokens, continues, held, accepted, fills)
        for request, beams in parents.items():
            if not request.is_done:
                request.parents = beams
        first_tokens = _take_prompts(state, batch, tokens, continues, held, fills) if batch.prefilling else []
        if fills:
            rows, filled = zip(*fills, strict=True)
            state.space.fill(np.concatenate(rows), np.concatenate(filled))
        over += first_tokens
        return Progress(tuple(first_tokens), _drop_finished(state, over) if over else ())

    def abort_in_flight(self) -> AbortedBatches | None:
        """Abort all batches in flight, since a step failed; None if there are none.

        They are aborted in the space too. Their requests are rolled back to the tokens that finished batches computed,
        and scheduled again (:mod:`~pagedkv.scheduling.scheduler`).

        Cost: that of :meth:`BlockSpace.abort`, and O(running sequences).
        """
        state = self._state
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

    def supply(self, request: Request, token_ids: TokenIds, *, ended: Sequence[int] = ()) -> Progress:
        """Supply the tokens of a held request.

        Args:
            request: a request that was held when its batch finished.
            token_ids: int32 ``[request.num_sequences]``.
            ended: indices of tokens that are the last of their sequence.

        Raises:
            StepError: the request is not held.
            TokenError: the number of tokens is not that of its sequences.
        """
        if not request.awaited or self._state.is_in_flight(request.awaited[0]):
            raise StepError(f"request {request.number} is not held: it awaits no tokens that could be supplied")
        tokens = as_token_array(token_ids)
        if len(tokens) != request.num_sequences:
            raise TokenError(f"request {request.number} samples {request.num_sequences} tokens, got {len(tokens)}")
        continues = np.ones(len(tokens), np.bool_)
        continues[np.array(ended, np.int64)] = False
        is_first = isinstance(request.awaited[0], Chunk)
        if is_first:
            _take_first(self._state, request, tokens, continues)
        else:
            request.take(tokens)
            self._state.has_newcomers = True
            if not continues.all():
                _end_sequences(self._state, request, continues)
        return Progress((request,) if is_first else (), _drop_finished(self._state, [request]))

    # Queries

    def fits_alone(self, request: Request, *, within_limits: bool = True) -> bool:
        """Return whether a request could be served alone: within its tenant's limits, or apart from them.

        O(groups + tenants). Raises ConfigurationError if the space has no such tenant.
        """
        return fits_alone(self._state, request, within_limits=within_limits)

    def most_blocks(self, request: Request) -> dict[str, int]:
        """Count, by pool, the blocks that a request may come to have, as if no window ever gave one back. O(groups)."""
        return most_blocks(self._state.space.config, request)

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, waits, loads or is swapped out."""
        state = self._state
        return not (state.running or state.waiting.requests or state.swapped or state.loading)

    @property
    def running(self) -> Sequence[Request]:
        """The running requests, in order of their keys; not to be changed."""
        return self._state.running

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, with those preempted by recompute and those that wait for a load."""
        return len(self._state.waiting.requests) + len(self._state.loading)

    @property
    def num_loading(self) -> int:
        """Number of requests that wait for a load."""
        return len(self._state.loading)

    def has_tenant(self, tenant: str) -> bool:
        """Whether a request of a tenant waits, runs or is swapped out."""
        return self._state.has_tenant(tenant)

    @property
    def num_swapped(self) -> int:
        """Number of swapped-out requests."""
        return len(self._state.swapped)

    @property
    def num_changes(self) -> int:
        """A counter that grows with every change of the running rows."""
        return self._state.num_changes


def _may_share_blocks(parent: Request, child: Request) -> bool:
    """Whether a child has its parent's tenant, keys and publishing: a forked row always has those of its parent."""
    ours, theirs = parent.intent, child.intent
    return parent.keys == child.keys and (ours.tenant, ours.publish) == (theirs.tenant, theirs.publish)


def _require_oldest(state: SchedulerState, batch: Batch, held: Collection[Request]) -> None:
    """Refuse to finish another batch than the oldest in flight, and to hold requests that run ahead."""
    if not state.in_flight or state.in_flight[0] is not batch:
        oldest = f"step {state.in_flight[0].plan.step_id}" if state.in_flight else "none"
        raise StepError(f"batches finish in order: got step {batch.plan.step_id}, the oldest in flight is {oldest}")
    for request in held:
        if request.num_ahead > 1:
            raise StepError(f"request {request.number} cannot be held: a later step already decodes its token")


def _fill_later(fills: Fills, rows: Int32Array, token_ids: Int32Array, continues: BoolArray | None) -> None:
    """Add a token for each row that continues; the other rows are freed with an unknown token."""
    if continues is None:
        fills.append((rows, token_ids))
    elif continues.any():
        fills.append((rows[continues], token_ids[continues]))


def _drop_finished(state: SchedulerState, requests: list[Request]) -> tuple[Request, ...]:
    """Free the requests that have all their tokens; return these in order of their keys."""
    finished = sorted((request for request in requests if request.has_all_tokens), key=BY_KEY)
    for request in finished:
        state.free(request, is_over=True)
        request.drop()
    return tuple(finished)


def _take_decoded(  # noqa: PLR0913, PLR0917 - the batch's tokens, and their further properties
    state: SchedulerState,
    decoding: Decoding,
    token_ids: Int32Array,
    continues: BoolArray | None,
    held: Collection[Request],
    num_accepted: Int32Array | None,
    fills: Fills,
) -> list[Request]:
    """Record a token of each sequence that decoded; return the requests that may have all their tokens now."""
    num_rows = len(decoding.rows)
    if decoding is state.decoding:
        decoding.take(token_ids[:num_rows])
        if decoding.num_ahead:
            _fill_later(
                fills, decoding.rows, decoding.next_token_ids, None if continues is None else continues[:num_rows]
            )
        if num_accepted is not None:
            decoding.accept(num_accepted)
        if continues is None and decoding.num_steps_left > 0:
            return []
        requests = list(decoding.requests)
    else:
        accepted = np.zeros(num_rows, np.int32) if num_accepted is None else num_accepted
        lasting = np.ones(num_rows, np.bool_) if continues is None else continues
        requests = _take_separately(state, decoding, (decoding.rows, token_ids, accepted, lasting), held, fills)
    if continues is not None:
        took = set(requests)
        parts = zip(decoding.requests, decoding.parts(decoding.rows), decoding.parts(continues), strict=True)
        for request, rows, part in parts:
            if request in took and not (stays := _of_remaining(request, rows, part)).all():
                _end_sequences(state, request, stays)
    return requests


def _take_separately(
    state: SchedulerState,
    decoding: Decoding,
    columns: tuple[Int32Array, Int32Array, Int32Array, BoolArray],
    held: Collection[Request],
    fills: Fills,
) -> list[Request]:
    """Record tokens of sequences that no longer decode together, for requests that still await them."""
    requests = []
    for request, *parts in zip(decoding.requests, *map(decoding.parts, columns), strict=True):
        if decoding in request.awaited[:1] and request not in held:
            rows, token_ids, num_accepted, stays = (_of_remaining(request, parts[0], part) for part in parts)
            if request.num_ahead > 1:
                _fill_later(fills, rows, token_ids, stays)
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


def _take_prompts(  # noqa: PLR0913, PLR0917 - as above
    state: SchedulerState,
    batch: Batch,
    token_ids: Int32Array,
    continues: BoolArray | None,
    held: Collection[Request],
    fills: Fills,
) -> list[Request]:
    """Record the first tokens after prompts that a batch completed; return their requests."""
    requests = []
    start = len(batch.decoded_token_ids)
    for chunk in batch.prefilling:
        request, stop = chunk.request, start + chunk.num_samples
        state.note_computed(request, chunk.stop)
        if chunk in request.awaited[:1] and request not in held:
            stays = None if continues is None else continues[start:stop]
            if request.num_ahead > 1:
                _fill_later(fills, np.asarray(request.rows, np.int32), token_ids[start:stop], stays)
            _take_first(state, request, token_ids[start:stop], stays)
            requests.append(request)
        start = stop
    return requests


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
