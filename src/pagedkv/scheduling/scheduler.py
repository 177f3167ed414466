"""Scheduler: decides what each step decodes, computes, swaps in, admits and preempts, over one block space.

The loop of an engine, or of a simulation of one::

    scheduler.add(request)                                  whenever a request arrives
    batch = scheduler.schedule()                            decides, and plans the step
    token_ids = run(batch)                                  carries the plan out, runs the model, samples
    progress = scheduler.finish(batch, token_ids, ended)    the step is over: requests with first or last tokens

The scheduler has no clock, and the length of an answer is not known in advance: a sequence ends when it has
``max_new_tokens``, or when ``ended`` of :meth:`Scheduler.finish` lists it. A preempted request returns under a promise
(:mod:`~pagedkv.scheduling.promises`) that prevents thrashing: some sequence always advances, no request starves,
and under constant load the set of running requests settles.

Several batches may be in flight; the next batch is planned without the tokens that an earlier one still samples.
Sequences that await these tokens are not scheduled, or, if steps overlap (``SchedulingConfig.overlap``), decode them as
unknown tokens, which ``finish`` fills in. If such a sequence turns out to have ended, it is freed, and the tokens that
the later batch samples for it are ignored.

This class checks arguments; the other modules of the package do the work: ``growing``, ``admitting``, ``drafting``,
``finishing``.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy.typing as npt

from pagedkv.contract.arguments import as_token_array
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import StepError, TokenError
from pagedkv.scheduling.admitting import admit_waiting, branch_off, fits_alone
from pagedkv.scheduling.batch import Batch, BatchDraft, Progress
from pagedkv.scheduling.config import SchedulingConfig
from pagedkv.scheduling.drafting import append_drafts, as_accepted, fill_drafts
from pagedkv.scheduling.finishing import AbortedBatches, Sampled, abort_in_flight, finish, supply
from pagedkv.scheduling.growing import decode, prefill
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import Loader, SchedulerState
from pagedkv.space import BlockSpace

__all__ = ["Scheduler"]

NO_PARENTS: Final[Mapping[Request, Sequence[int]]] = MappingProxyType({})


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
            self._run_phases(draft, most if max_batched_tokens is None else min(most, max_batched_tokens))
        batch = draft.close(state.space.plan_step())
        state.in_flight.append(batch)
        return batch

    def _run_phases(self, draft: BatchDraft, most_tokens: int) -> None:
        state = self._state
        budget = most_tokens - decode(state, draft)
        if not state.is_draining:
            budget = prefill(state, draft, budget)
        if not (draft.lacks_blocks or state.is_draining):
            budget = admit_waiting(state, draft, budget)
            append_drafts(state, draft, budget)

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
            token_ids: int32 ``[batch.num_samples]``, in the order drawn in :mod:`~pagedkv.scheduling.batch`.
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
        if not state.in_flight or state.in_flight[0] is not batch:
            oldest = f"step {state.in_flight[0].plan.step_id}" if state.in_flight else "none"
            raise StepError(f"batches finish in order: got step {batch.plan.step_id}, the oldest in flight is {oldest}")
        tokens = as_token_array(token_ids)
        if len(tokens) != batch.num_samples:
            raise TokenError(f"step {batch.plan.step_id} samples {batch.num_samples} tokens, got {len(tokens)}")
        accepted = as_accepted(batch, num_accepted)
        for request in held:
            if request.num_ahead > 1:
                raise StepError(f"request {request.number} cannot be held: a later step already decodes its token")
        state.space.acknowledge(batch.plan.step_id)
        state.in_flight.popleft()
        return finish(state, batch, Sampled(tokens, ended, parents, held, accepted))

    def abort_in_flight(self) -> AbortedBatches | None:
        """Abort all batches in flight, since a step failed; None if there are none.

        They are aborted in the space too. Their requests are rolled back to the tokens that finished batches computed,
        and scheduled again (:mod:`~pagedkv.scheduling.finishing`).

        Cost: that of :meth:`BlockSpace.abort`, and O(running sequences).
        """
        return abort_in_flight(self._state)

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
        return supply(self._state, request, tokens, ended)

    # Queries

    def fits_alone(self, request: Request, *, within_limits: bool = True) -> bool:
        """Return whether a request could be served alone: within its tenant's limits, or apart from them.

        O(groups + tenants). Raises ConfigurationError if the space has no such tenant.
        """
        return fits_alone(self._state, request, within_limits=within_limits)

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, waits, loads or is swapped out."""
        state = self._state
        return not (state.running or state.waiting or state.swapped or state.loading)

    @property
    def running(self) -> Sequence[Request]:
        """The running requests, in order of their keys; not to be changed."""
        return self._state.running

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, with those preempted by recompute and those that wait for a load."""
        return len(self._state.waiting) + len(self._state.loading)

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
