"""Scheduler: what each step decodes, computes, swaps in, admits and preempts, over one block space.

The loop of an engine, or of a simulation of one::

    scheduler.add(request)                                  whenever one arrives
    batch = scheduler.schedule()                            decides, and plans the step
    token_ids = run(batch)                                  carries the plan out, runs the model, samples
    progress = scheduler.finish(batch, token_ids, ended)    the step is over: who has got first or last tokens

Knows no clock and no future: a request ends when it has its most tokens, or when :meth:`Scheduler.finish` is told so.
Who had to give its blocks up returns under a promise (:mod:`~pagedkv.memory.scheduling.promises`), so that nobody
thrashes: some sequence always advances, no request starves, and who runs does not go on changing while the load stays
    the same.

Several batches may be in flight; what one of them is to sample, the next one does without. This class checks; the
modules beside it carry out: ``growing``, ``admitting``, ``preempting``, ``drafting``, ``finishing``.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy.typing as npt

from pagedkv.memory.contract.arguments import as_token_array
from pagedkv.memory.contract.errors import StepError, TokenError
from pagedkv.memory.contract.spec import TokenIds
from pagedkv.memory.scheduling.admitting import fits_alone, let_in
from pagedkv.memory.scheduling.batch import Batch, BatchDraft, Progress
from pagedkv.memory.scheduling.branching import branch_off
from pagedkv.memory.scheduling.config import SchedulingConfig
from pagedkv.memory.scheduling.drafting import append_drafts, as_accepted
from pagedkv.memory.scheduling.finishing import Sampled, finish, supply
from pagedkv.memory.scheduling.growing import decode, prefill
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.state import SchedulerState
from pagedkv.memory.space import BlockSpace

__all__ = ["Scheduler"]

NO_PARENTS: Final[Mapping[Request, Sequence[int]]] = MappingProxyType({})


class Scheduler:
    """Serves requests through one block space, which nobody else may change.

    Args:
        config: the limits of a step.
        space: the block space, with as many rows as sequences may run, and as many more as may be swapped out.
    """

    def __init__(self, config: SchedulingConfig, space: BlockSpace) -> None:
        self._state = SchedulerState(config, space)

    def add(self, request: Request) -> bool:
        """Let a request wait; or return False, and drop it, if it could not be served alone."""
        if fits_alone(self._state, request):
            self._state.waiting.push(request)
        else:
            request.drop()
        return not request.is_done

    def fork(self, parent: Request, child: Request, *, sequence: int = 0) -> int | None:
        """Add a request that begins with tokens of another one: on that one's blocks, where it runs and there is room.

        Else the request waits as any other does, and hits what is cached.

        Args:
            parent: a request that was added, whatever has become of it; its rows have no unknown tokens.
            child: begins with tokens of the parent's sequence, all of these or fewer, and at least one more that is to
                be computed: the parent's next token, say.
            sequence: which of the parent's sequences.

        Returns:
            How many tokens it shares from now on, 0 if it waits; or None if it could not be served alone.
        """
        if not fits_alone(self._state, child):
            child.drop()
            return None
        num_shared = 0
        if parent in self._state.running and not self._state.in_flight:
            row = parent.rows[sequence if sequence < len(parent.rows) else 0]
            num_shared = branch_off(self._state, row, child)
        if not num_shared:
            self._state.waiting.push(child)
        return num_shared

    def abort(self, request: Request) -> bool:
        """Drop a request that was added, wherever it is; return whether it was not done yet.

        Tokens that batches in flight sample for it are taken no notice of.
        """
        state = self._state
        if request.is_done:
            return False
        if not request.rows:
            state.waiting.remove(request)
        elif request in state.swapped:
            state.swapped.remove(request)
            state.free_rows(request, request.rows)
        else:
            state.free(request)
        request.drop()
        return True

    def schedule(self) -> Batch:
        """Go through the phases of a step and close it. O(sequences), and little more than one append while they stay.

        Who decodes is served first; the rest of the budget goes to prompts that are under way, then to new ones, then
        to drafts. While blocks are short, nobody is let in, and nothing is guessed. The batch may be empty while others
        are in flight.
        """
        state, draft = self._state, BatchDraft()
        budget = state.config.max_batched_tokens - decode(state, draft)
        budget = prefill(state, draft, budget)
        if not draft.lacks_blocks:
            budget = let_in(state, draft, budget)
            append_drafts(state, draft, budget)
        batch = draft.close(state.space.plan_step())
        state.in_flight.append(batch)
        return batch

    def finish(  # noqa: PLR0913 - what was sampled, and all that may be said of it, by keywords
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
                ``token_ids`` are the new beams'. Old beams that are no parent are given up.
            held: requests whose tokens are not known yet, whatever ``token_ids`` says: they keep their blocks, and go
                on when :meth:`supply` brings them. Whoever is preempted or aborted meanwhile waits for nothing.
            num_accepted: int32 ``[sequences that decoded]``, how many of each one's drafts were right; they, and then
                its token in ``token_ids``, are what it has generated. None: none. The others are rolled back.

        Raises:
            StepError: another batch is the oldest in flight.
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
        state.space.acknowledge(batch.plan.step_id)
        state.in_flight.popleft()
        return finish(state, batch, Sampled(tokens, ended, parents, held, accepted))

    def supply(self, request: Request, token_ids: TokenIds, *, ended: Sequence[int] = ()) -> Progress:
        """Bring the tokens that a request was held for.

        Args:
            request: a request that was held when its batch finished.
            token_ids: int32 ``[request.num_sequences]``; ended: places of those that are the last of their sequence.

        Raises:
            StepError: the request is not held.
            TokenError: not as many tokens as were to be sampled.
        """
        if request.awaited is None or self._state.is_in_flight(request.awaited):
            raise StepError(f"request {request.number} is not held: it waits for no tokens that could be supplied")
        tokens = as_token_array(token_ids)
        if len(tokens) != request.num_sequences:
            raise TokenError(f"request {request.number} samples {request.num_sequences} tokens, got {len(tokens)}")
        return supply(self._state, request, tokens, ended)

    # Seeing

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to serve."""
        return not (self._state.running or self._state.waiting or self._state.swapped)

    @property
    def running(self) -> Sequence[Request]:
        """The requests that run, in order of their keys; not to be changed."""
        return self._state.running

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those preempted by recompute included."""
        return len(self._state.waiting)

    @property
    def num_swapped(self) -> int:
        """Requests that are swapped out."""
        return len(self._state.swapped)

    @property
    def num_changes(self) -> int:
        """Changes so far of the rows that run: as long as it is the same, they are."""
        return self._state.num_changes
