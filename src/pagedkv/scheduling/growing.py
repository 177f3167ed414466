"""The phases of a step for running requests: each sequence decodes a token, then prompts compute their next chunks.

When blocks run short, the last running request is preempted: swapped out, or freed to be computed again. If a tenant is
short of blocks, it is the last running request whose blocks the tenant may take: one of its own if the tenant is at its
cap, else one of its own or of a tenant above its floor.
"""

from bisect import insort
from collections import Counter

from pagedkv.contract.answers import Shortage, TenantShare
from pagedkv.contract.spec import AllocStatus
from pagedkv.scheduling.batch import BatchDraft, Chunk, Preempted
from pagedkv.scheduling.request import UNKNOWN_TOKEN, Decoding, Request
from pagedkv.scheduling.state import BY_KEY, SchedulerState
from pagedkv.space import BlockSpace

__all__ = ["decode", "prefill", "schedule_chunk"]


def decode(state: SchedulerState, draft: BatchDraft) -> int:
    """Append a token to every sequence that can decode; return the number of sequences."""
    _replace_beams(state)
    while decoding := state.gather_decoding():
        shortage = _append(state, decoding)
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


def _replace_beams(state: SchedulerState) -> None:
    """Replace old beams by new ones, for all requests with parents from the sampler."""
    branching = [request for request in state.running if request.parents is not None]
    if branching:
        state.close_decoding()
        state.num_changes += 1
    for request in branching:
        _continue_beams(state.space, request)


def _continue_beams(space: BlockSpace, request: Request) -> None:
    """Free beams without children, and fork the others. A parent's first child keeps its row."""
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


def _append(state: SchedulerState, decoding: Decoding) -> Shortage | None:
    """Append a token to each decoding sequence; an unknown one if a batch in flight samples it."""
    space = state.space
    if not state.config.overlap:
        return space.append(decoding.rows, decoding.next_token_ids)
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
    """Preempt the last running request, by swap or recompute. If it runs alone, reject it.

    If there are loads under way, they are ended instead, and no request is preempted.
    """
    if state.loader is not None and state.loader.give_way():
        return
    request = state.running[-1] if shortage.share is None else _last_with_usable_blocks(state, shortage, shortage.share)
    request.num_preemptions += 1
    if len(state.running) == 1:
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
