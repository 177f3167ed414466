"""Scheduler: what each step decodes, computes, swaps in, admits and preempts, over one block space.

The loop of an engine, or of a simulation of one::

    scheduler.add(request)                                  whenever a request arrives
    batch = scheduler.schedule()                            decides, and plans the step
    token_ids = run(batch)                                  carries the plan out, runs the model, samples
    progress = scheduler.finish(batch, token_ids, ended)    the step is over: requests with first or last tokens

The scheduler has no clock and does not know how long answers are: a request ends when it has its most tokens, or when
:meth:`Scheduler.finish` says so. A preempted request returns under a promise
(:mod:`~pagedkv.memory.scheduling.promises`) that prevents thrashing: some sequence always advances, no request starves,
and under constant load the set of running requests settles.

Several batches may be in flight; the next batch is planned without the tokens that an earlier one still samples. The
sequences that wait for these tokens sit out, or, if steps overlap (``SchedulingConfig.overlap``), they decode them as
unknown tokens, which ``finish`` fills in. A sequence that has ended by then is freed, and what the later batch samples
for it is ignored: only ``max_new_tokens`` is known when a batch is planned.

This class checks arguments; the modules beside it do the work: ``growing``, ``admitting``, ``preempting``,
``drafting``, ``finishing``, ``aborting``.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy.typing as npt

from pagedkv.memory.contract.arguments import as_token_array
from pagedkv.memory.contract.errors import StepError, TokenError
from pagedkv.memory.contract.spec import TokenIds
from pagedkv.memory.scheduling.aborting import AbortedBatches, abort_in_flight
from pagedkv.memory.scheduling.admitting import fits_alone, let_in
from pagedkv.memory.scheduling.batch import Batch, BatchDraft, Progress
from pagedkv.memory.scheduling.branching import branch_off
from pagedkv.memory.scheduling.config import SchedulingConfig
from pagedkv.memory.scheduling.drafting import append_drafts, as_accepted, fill_drafts
from pagedkv.memory.scheduling.finishing import Sampled, finish, supply
from pagedkv.memory.scheduling.growing import decode, prefill
from pagedkv.memory.scheduling.loader import Loader
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.state import SchedulerState
from pagedkv.memory.space import BlockSpace

__all__ = ["Scheduler"]

NO_PARENTS: Final[Mapping[Request, Sequence[int]]] = MappingProxyType({})


class Scheduler:
    """Serves requests through one block space, which nothing else may change.

    Args:
        config: the limits of a step.
        space: the block space, with as many rows as sequences may run, and as many more as may be swapped out.
        loader: begins loads of prefixes for requests that could be admitted; None: prefixes are computed.
    """

    def __init__(self, config: SchedulingConfig, space: BlockSpace, loader: Loader | None = None) -> None:
        self._state = SchedulerState(config, space, loader)

    def add(self, request: Request) -> bool:
        """Queue a request; or return False, and drop it, if it could not be served even alone.

        Raises ConfigurationError if its intent names a tenant that the space does not have; nothing is changed.
        """
        if fits_alone(self._state, request):
            self._state.waiting.push(request)
        else:
            request.drop()
        return not request.is_done

    def fork(self, parent: Request, child: Request, *, sequence: int = 0) -> int | None:
        """Add a request that begins with another one's tokens; it forks that one's blocks if it runs and there is room.

        Else the request waits like any other, and hits what is cached.

        Args:
            parent: a request that was added before, in any state; its rows have no unknown tokens.
            child: begins with all or some tokens of the parent's sequence, and has at least one more to compute, such
                as the parent's next token.
            sequence: which of the parent's sequences.

        Returns:
            How many tokens it shares from now on, 0 if it waits; or None if it could not be served even alone.
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
        """Drop a request that was added, in any state; return whether it was not done yet.

        Tokens that batches in flight sample for it are ignored.
        """
        state = self._state
        if request.is_done:
            return False
        if request in state.loading:
            state.loading.remove(request)
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
        """Load no prefixes from now on; the loads under way were ended."""
        self._state.loader = None

    def loaded(self, request: Request) -> None:
        """Let a request that waited for a load wait for its admission again, in its old place; others are left alone.

        A request that was aborted meanwhile is left alone too.
        """
        if request in self._state.loading:
            self._state.loading.remove(request)
            self._state.waiting.push(request)

    def schedule(self, max_batched_tokens: int | None = None) -> Batch:
        """Go through the phases of a step and close it.

        Decoding sequences are served first; the rest of the budget goes to prompts under way, then to new prompts, then
        to drafts. While blocks are short, no request is admitted or swapped in, and there are no drafts. The batch may
        be empty while others are in flight.

        Args:
            max_batched_tokens: the budget of this step, if it is less than that of the configuration. Sequences that
                decode are not limited by it.

        Cost: O(sequences), but little more than one append while the same sequences decode.
        """
        state, draft = self._state, BatchDraft()
        state.is_draining = state.is_draining and state.is_computing
        if not state.is_draining:
            most = state.config.max_batched_tokens
            self._go_through(draft, most if max_batched_tokens is None else min(most, max_batched_tokens))
        batch = draft.close(state.space.plan_step())
        state.in_flight.append(batch)
        return batch

    def _go_through(self, draft: BatchDraft, most_tokens: int) -> None:
        state = self._state
        budget = most_tokens - decode(state, draft)
        if not state.is_draining:
            budget = prefill(state, draft, budget)
        if not (draft.lacks_blocks or state.is_draining):
            budget = let_in(state, draft, budget)
            append_drafts(state, draft, budget)

    def fill_drafts(self, batch: Batch, token_ids: TokenIds) -> None:
        """Bring the ids of a batch's drafts, where requests proposed unknown ones; before it is finished.

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

    def finish(  # noqa: PLR0913 - the sampled tokens, and all that goes with them, by keywords
        self,
        batch: Batch,
        token_ids: TokenIds,
        *,
        ended: Sequence[int] = (),
        parents: Mapping[Request, Sequence[int]] = NO_PARENTS,
        held: Collection[Request] = (),
        num_accepted: npt.ArrayLike | None = None,
    ) -> Progress:
        """Acknowledge the oldest batch in flight, and take in the tokens that it sampled.

        Args:
            batch: the batch.
            token_ids: int32 ``[batch.num_samples]``, in the order that :mod:`~pagedkv.memory.scheduling.batch` draws.
            ended: places in ``token_ids`` of tokens that are the last of their sequence.
            parents: for requests that decode beams: which old beam each new one continues, one for each sequence;
                ``token_ids`` are the new beams'. Old beams without a child are freed.
            held: requests whose tokens are not known yet; their entries of ``token_ids`` are ignored. They keep their
                blocks, and continue when :meth:`supply` brings the tokens. A held request that is preempted or aborted
                meanwhile is no longer held.
            num_accepted: int32 ``[sequences that decoded]``, how many drafts of each one were right. A sequence has
                generated these drafts, and then its token in ``token_ids``; the other drafts are rolled back. None: no
                draft was right.

        Raises:
            StepError: another batch is the oldest in flight, or a held request was scheduled beyond these tokens: it
                needs ``runs_ahead=False``.
            TokenError: not as many tokens as were to be sampled, or more accepted drafts than there were.
        """
        state = self._state
        if not state.in_flight or state.in_flight[0] is not batch:
            oldest = f"step {state.in_flight[0].plan.step_id}" if state.in_flight else "none"
            raise StepError(
                f"batches finish in order: step {batch.plan.step_id} is given, the oldest in flight is {oldest}"
            )
        tokens = as_token_array(token_ids)
        if len(tokens) != batch.num_samples:
            raise TokenError(f"step {batch.plan.step_id} samples {batch.num_samples} tokens, got {len(tokens)}")
        accepted = as_accepted(batch, num_accepted)
        for request in held:
            if request.num_ahead > 1:
                raise StepError(f"request {request.number} cannot be held: a later step decodes its token already")
        state.space.acknowledge(batch.plan.step_id)
        state.in_flight.popleft()
        return finish(state, batch, Sampled(tokens, ended, parents, held, accepted))

    def abort_in_flight(self) -> AbortedBatches | None:
        """Abort all batches in flight, since a step failed; None if there are none.

        They are aborted in the space too. Their requests go back to the tokens that finished batches computed, and are
        scheduled again (:mod:`~pagedkv.memory.scheduling.aborting`).

        Cost: that of :meth:`BlockSpace.abort`, and O(running sequences).
        """
        return abort_in_flight(self._state)

    def supply(self, request: Request, token_ids: TokenIds, *, ended: Sequence[int] = ()) -> Progress:
        """Bring the tokens of a held request.

        Args:
            request: a request that was held when its batch finished.
            token_ids: int32 ``[request.num_sequences]``; ended: places of those that are the last of their sequence.

        Raises:
            StepError: the request is not held.
            TokenError: not as many tokens as were to be sampled.
        """
        if not request.awaited or self._state.is_in_flight(request.awaited[0]):
            raise StepError(f"request {request.number} is not held: it waits for no tokens that could be supplied")
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
        """Whether there is no request to serve."""
        state = self._state
        return not (state.running or state.waiting or state.swapped or state.loading)

    @property
    def running(self) -> Sequence[Request]:
        """The running requests, in order of their keys; not to be changed."""
        return self._state.running

    @property
    def num_waiting(self) -> int:
        """Requests that wait, including those preempted by recompute and those that wait for a load."""
        return len(self._state.waiting) + len(self._state.loading)

    @property
    def num_loading(self) -> int:
        """Of these, the requests that wait for a load."""
        return len(self._state.loading)

    def has_tenant(self, tenant: str) -> bool:
        """Whether a request of a tenant waits, runs or is swapped out."""
        return self._state.has_tenant(tenant)

    @property
    def num_swapped(self) -> int:
        """Requests that are swapped out."""
        return len(self._state.swapped)

    @property
    def num_changes(self) -> int:
        """A counter that grows with every change of the running rows."""
        return self._state.num_changes


def _may_share_blocks(parent: Request, child: Request) -> bool:
    """Whether a child's tenant, keys and publishing are its parent's; a fork's row has them from its parent."""
    ours, theirs = parent.intent, child.intent
    return parent.keys == child.keys and (ours.tenant, ours.publish) == (theirs.tenant, theirs.publish)
