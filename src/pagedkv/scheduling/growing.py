"""The phases of a step for running requests: decoding sequences, the next chunks of prompts, and, last, drafts.

When blocks run short, the last running request is preempted: swapped out, or freed to be computed again. If a tenant is
short of blocks, it is the last running request whose blocks the tenant may take: one of its own if the tenant is at its
cap, else one of its own or of a tenant above its floor.

Drafts are guesses at a sequence's next tokens, computed in the same step as the token before them. They use only the
rest of the token budget and of the free blocks, so they take nothing from other requests: no request is preempted, or
waits, for a draft. A sequence without room for its drafts has none. Rejected drafts are rolled back when the batch is
finished; until then the space does not publish drafts. Only requests of one sequence have drafts, since samples and
beams of one prompt advance together.

A request may propose :data:`UNKNOWN_TOKEN` for each draft: a model computes the drafts while the step runs, and
:func:`fill_drafts` sets their ids before the batch is finished.
"""

from bisect import insort
from collections import Counter

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import Shortage, TenantShare
from pagedkv.contract.arguments import as_counts
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import AllocStatus
from pagedkv.errors import TokenError
from pagedkv.scheduling.request import (
    MOST_AHEAD,
    UNKNOWN_TOKEN,
    Batch,
    BatchDraft,
    Chunk,
    Decoding,
    Drafts,
    Preempted,
    Request,
    may_decode,
)
from pagedkv.scheduling.state import BY_KEY, SchedulerState
from pagedkv.space import BlockSpace


def decode(state: SchedulerState, draft: BatchDraft) -> int:
    """Append a token to every sequence that can decode; return the number of sequences."""
    branching = [request for request in state.running if request.parents is not None]
    if branching:
        state.close_decoding()
        state.num_changes += 1
    for request in branching:
        _continue_beams(state.space, request)
    while decoding := _gather_ahead(state) if state.config.overlap else _gather(state):
        if state.config.overlap:
            shortage = _append_ahead(state.space, decoding)
        else:
            shortage = state.space.append(decoding.rows, decoding.next_token_ids)
        if shortage is None:
            decoding.num_ahead += 1
            draft.decoding = decoding
            return len(decoding.rows)
        if _drains(state):
            state.close_decoding()  # its unknown tokens may be known when it is gathered again
            return 0
        if state.will_be_free(shortage):
            return 0
        _preempt_last(state, draft, shortage)
    return 0


def _gather(state: SchedulerState) -> Decoding | None:
    """Return the requests that can decode now; None if there are none."""
    if state.decoding is not None and not state.decoding.num_ahead:
        if not state.has_newcomers:
            return state.decoding
        state.close_decoding()
    ready = [request for request in state.running if request.is_ready and request.decoding is None]
    if ready:
        state.close_decoding()
        state.decoding = Decoding(ready)
    state.has_newcomers = False
    return state.decoding if ready else None


def _gather_ahead(state: SchedulerState) -> Decoding | None:
    """Return the requests that can decode now, including those that append an unknown token; None if none."""
    current = state.decoding
    is_simple = not state.has_newcomers and len(state.in_flight) < MOST_AHEAD
    if current is not None and is_simple and current.may_continue:
        return current
    state.has_newcomers = False
    sampling = {each for batch in state.in_flight for each in (batch.decoding, *batch.prefilling)}
    ready = [request for request in state.running if may_decode(request) and sampling.issuperset(request.awaited[:1])]
    if not ready:
        return None
    if current is None or tuple(ready) != current.requests:
        state.close_decoding()
        state.decoding = Decoding(ready)
    return state.decoding


def prefill(state: SchedulerState, draft: BatchDraft, budget: int) -> int:
    """Append the next chunks of prompts; return the rest of the budget."""
    for request in list(state.prefilling):
        while budget > 0 and request in state.prefilling:
            stop = request.end_of_chunk(request.num_scheduled, budget)
            chunk = request.known_token_ids[request.num_scheduled : stop]
            shortage = state.space.append(request.rows, chunk, [len(chunk)])
            if shortage is None:
                schedule_chunk(state, draft, request, request.num_scheduled, stop)
                budget -= len(chunk)
                break
            if state.will_be_free(shortage) or _drains(state):
                return 0
            if not _halve_chunk(state, request, len(chunk)):
                _preempt_last(state, draft, shortage)
    return budget


def _continue_beams(space: BlockSpace, request: Request) -> None:
    """Replace old beams by new ones: free those without children, fork the others; a first child keeps the row."""
    parents = request.parents or ()
    num_children = Counter(parents)
    childless = [row for beam, row in enumerate(request.rows) if beam not in num_children]
    if childless:
        request.note_receipts(space.free(childless))
    rows_of = {
        beam: [row, *(space.fork(row, num_children[beam] - 1).tolist() if num_children[beam] > 1 else [])]
        for beam, row in enumerate(request.rows)
        if beam in num_children
    }
    request.rows = [rows_of[parent].pop(0) for parent in parents]
    request.parents = None


def schedule_chunk(state: SchedulerState, draft: BatchDraft, request: Request, start: int, stop: int) -> None:
    """Record that the open step computes some of a request's known tokens."""
    request.num_scheduled = stop
    is_last = not request.num_unscheduled
    num_samples = request.num_sequences if is_last and request.max_new_tokens else 0
    chunk = Chunk(request, request.rows[0], start, stop, request.known_token_ids[start:stop], num_samples)
    draft.prefilling.append(chunk)
    if is_last:
        request.awaited = (chunk,)
        state.prefilled(request)
        if state.config.overlap:
            state.has_newcomers = True  # it may decode while this batch is in flight


def _append_ahead(space: BlockSpace, decoding: Decoding) -> Shortage | None:
    """Append a token to each decoding sequence; an unknown one if a batch in flight samples it."""
    is_known = decoding.next_token_ids != UNKNOWN_TOKEN
    if decoding.num_ahead or not is_known.any():
        return space.append(decoding.rows, None)
    if is_known.all():
        return space.append(decoding.rows, decoding.next_token_ids)
    if not space.can_append(decoding.rows):
        return space.append(decoding.rows, None)  # appends nothing, and returns the shortage
    for rows, token_ids in (
        (decoding.rows[is_known], decoding.next_token_ids[is_known]),
        (decoding.rows[~is_known], None),
    ):
        shortage = space.append(rows, token_ids)
        assert shortage is None, f"can_append answered True, but blocks are missing: {shortage}"
    return None


def _halve_chunk(state: SchedulerState, request: Request, num_tokens: int) -> bool:
    """Halve the chunks of a request that lacks blocks though it runs alone; return False if it cannot be done.

    Smaller chunks hold fewer blocks of windows at a time.
    """
    if len(state.running) > 1 or num_tokens == 1:
        return False
    if state.loader is None or not state.loader.give_way():
        request.most_chunk = num_tokens // 2
    return True


def _drains(state: SchedulerState) -> bool:
    """Schedule nothing until the batches in flight are finished; return whether there are any.

    If steps overlap, then the same requests are preempted as without overlap, and all their tokens are known, so that
    they can be swapped out. A request that runs alone is not rejected before its windows have slid.
    """
    state.is_draining = state.is_computing and (state.config.overlap or len(state.running) == 1)
    return state.is_draining


def _preempt_last(state: SchedulerState, draft: BatchDraft, shortage: Shortage) -> None:
    """Preempt the last running request, by swap or recompute. If it runs alone, reject it, unless blocks may come back.

    If there are loads under way, they are ended instead, and no request is preempted.
    """
    if state.loader is not None and state.loader.give_way():
        return
    request = state.running[-1] if shortage.share is None else _last_with_usable_blocks(state, shortage, shortage.share)
    request.num_preemptions += 1
    if len(state.running) == 1 and not state.space.num_absent_blocks(shortage.pool):
        request.rejection = f"it ran out of blocks alone: {shortage}"
        _free(state, draft, request)
        request.drop()
        draft.rejected.append(request)
    elif _may_swap(state, draft, request):
        _swap_out(state, draft, request)
    else:
        _recompute(state, draft, request)


def _last_with_usable_blocks(state: SchedulerState, shortage: Shortage, short: TenantShare) -> Request:
    """Return the last running request whose blocks a tenant short of blocks may take. O(tenants + requests)."""
    usable = {short.tenant}
    if shortage.num_needed <= short.cap - short.num_taken:
        shares = state.space.statistics().tenants
        usable |= {each.tenant for each in shares if each.pool == shortage.pool and each.num_taken > each.floor}
    return next(request for request in reversed(state.running) if request.intent.tenant in usable)


def _may_swap(state: SchedulerState, draft: BatchDraft, request: Request) -> bool:
    """Whether a request can be swapped out: none of its tokens are being computed, and host blocks and rows suffice."""
    return (
        state.config.preemption == "swap"
        and _has_spare_rows(state, request)
        and not request.num_unscheduled
        and not request.is_awaiting
        and not _has_decoded(draft, request)
        and state.space.can_swap_out(request.rows) is AllocStatus.OK
    )


def _has_spare_rows(state: SchedulerState, request: Request) -> bool:
    """Whether ``max_sequences`` rows remain for running sequences, since swapped-out ones keep their rows."""
    num_swapped = request.num_sequences + sum(other.num_sequences for other in state.swapped)
    return num_swapped <= state.space.config.max_sequences - state.config.max_sequences


def _has_decoded(draft: BatchDraft, request: Request) -> bool:
    return draft.decoding is not None and request.decoding is draft.decoding


def _swap_out(state: SchedulerState, draft: BatchDraft, request: Request) -> None:
    num_computed = int(state.space.lengths(request.rows).max())
    state.leave(request)
    moves = state.space.swap_out(request.rows)
    assert not isinstance(moves, Shortage), f"can_swap_out answered OK, but host blocks are missing: {moves}"
    insort(state.swapped, request, key=BY_KEY)
    draft.preempted.append(Preempted(request, "swap", num_computed))


def _recompute(state: SchedulerState, draft: BatchDraft, request: Request) -> None:
    num_computed = int(state.space.lengths(request.rows).max()) - _has_decoded(draft, request)
    _free(state, draft, request)
    request.start_over()
    state.waiting.push(request)
    draft.preempted.append(Preempted(request, "recompute", num_computed))


def _free(state: SchedulerState, draft: BatchDraft, request: Request) -> None:
    decoded = draft.decoding if _has_decoded(draft, request) else None
    state.free(request, is_over=False)
    if decoded is not None:
        draft.decoding = state.without_request(decoded, request)


def append_drafts(state: SchedulerState, draft: BatchDraft, decoding: Decoding, budget: int) -> None:
    """Append drafts to the decoding sequences, as far as there is room. O(requests), and the time of ``propose``."""
    proposed = _proposed(decoding, state.config.most_drafts, budget)
    if proposed:
        appended = _append_proposed(state, decoding, proposed)
        counts = np.zeros(len(decoding.rows), np.int32)
        for place in appended:
            counts[place] = len(proposed[place])
        if appended:
            draft.drafts = Drafts(counts, np.concatenate([proposed[place] for place in appended]))


def as_accepted(batch: Batch, num_accepted: npt.ArrayLike | None) -> Int32Array | None:
    """Check the numbers of accepted drafts; return int32 ``[sequences]``; None for a batch without drafts.

    Raises TokenError.
    """
    num_decoded = len(batch.decoded_token_ids)
    if num_accepted is None:
        return None if batch.drafts is None else np.zeros(num_decoded, np.int32)
    accepted = as_counts(num_accepted, num_decoded, "num_accepted")
    had = 0 if batch.drafts is None else batch.drafts.counts
    if (accepted < 0).any() or (accepted > had).any():
        place = int(((accepted < 0) | (accepted > had)).argmax())
        num_drafts = 0 if batch.drafts is None else batch.drafts.counts[place]
        raise TokenError(
            f"step {batch.plan.step_id} computes {num_drafts} drafts of sequence {place}, but num_accepted is "
            f"{accepted[place]}"
        )
    if accepted.any() and batch.drafts is not None and (batch.drafts.token_ids == UNKNOWN_TOKEN).any():
        raise TokenError(
            f"step {batch.plan.step_id} has drafts whose ids are not known: bring them by fill_drafts first"
        )
    return None if batch.drafts is None else accepted.astype(np.int32)


def fill_drafts(state: SchedulerState, batch: Batch, token_ids: Int32Array) -> None:
    """Set the ids of all drafts of a batch, for requests that still have their rows. O(sequences + drafts)."""
    decoding, drafts = batch.decoding, batch.drafts
    assert decoding is not None
    assert drafts is not None
    drafts.token_ids[:] = token_ids
    counts = _counts_of_awaiting(decoding, drafts)
    places = np.flatnonzero(counts)
    mine = np.repeat(counts > 0, drafts.counts)
    state.space.replace_drafts(decoding.rows[places], token_ids[mine], counts[places])


def roll_back_drafts(state: SchedulerState, batch: Batch, num_accepted: Int32Array) -> None:
    """Roll back the rejected drafts of requests that still have their rows."""
    decoding, drafts = batch.decoding, batch.drafts
    assert decoding is not None
    assert drafts is not None
    places = np.flatnonzero(_counts_of_awaiting(decoding, drafts))
    rows = decoding.rows[places]
    state.space.truncate(rows, state.space.lengths(rows) - drafts.counts[places] + num_accepted[places])


def _counts_of_awaiting(decoding: Decoding, drafts: Drafts) -> Int32Array:
    """Count the drafts of each sequence, 0 where its request waits for nothing of these common steps any more."""
    counts = [
        part if _awaits(request, decoding) else np.zeros_like(part)
        for request, part in zip(decoding.requests, decoding.parts(drafts.counts), strict=True)
    ]
    return np.concatenate(counts)


def _awaits(request: Request, decoding: Decoding) -> bool:
    """Whether a request still waits for the tokens of these common steps."""
    return request.decoding is decoding or decoding in request.awaited[:1]


def _proposed(decoding: Decoding, most_drafts: int, budget: int) -> dict[int, Int32Array]:
    """Collect proposals, by place among the sequences, within the budget and each request's own limit."""
    proposed: dict[int, Int32Array] = {}
    place = 0
    for request in decoding.requests:
        # If all drafts are accepted, the request also gets the token after the last one.
        most = min(most_drafts, budget, request.max_new_tokens - request.num_generated - 1)
        if most > 0 and request.propose is not None and request.num_sequences == len(request.rows) == 1:
            token_ids = request.propose(most)
            assert len(token_ids) <= most, (
                f"request {request.number} proposed {len(token_ids)} drafts, not up to {most}"
            )
            if len(token_ids):
                proposed[place] = token_ids
                budget -= len(token_ids)
        place += len(request.rows)
    return proposed


def _append_proposed(state: SchedulerState, decoding: Decoding, proposed: dict[int, Int32Array]) -> list[int]:
    """Append the drafts together, or one by one if blocks are short; return the places with appended drafts."""
    places = list(proposed)
    appended: list[int] = []
    for some in (places, *([place] for place in places if len(places) > 1)):
        token_ids = np.concatenate([proposed[place] for place in some])
        counts = [len(proposed[place]) for place in some]
        if state.drops_blocks and not _can_go_on(state, decoding.rows[some], counts):
            continue
        shortage = state.space.append(decoding.rows[some], token_ids, counts, num_draft=counts)
        if shortage is None:
            appended += some
        if shortage is None and some is places:
            break
    return appended


def _can_go_on(state: SchedulerState, rows: Int32Array, counts: list[int]) -> bool:
    """Whether the token after the drafts would find blocks too: windows slide behind accepted drafts one step later."""
    with_next = np.minimum(np.array(counts) + 1, state.space.config.max_tokens - state.space.lengths(rows))
    return state.space.can_append(rows, with_next, num_draft=counts)
