"""Preemption when blocks run short: the last running request is swapped out, or freed to be recomputed.

If a tenant is short of blocks, it is the last running request whose blocks the tenant may take: one of its own if the
tenant is at its cap, else one of its own or of a tenant above its floor.
"""

from bisect import insort

from pagedkv.contract.answers import Shortage, TenantShare
from pagedkv.contract.spec import AllocStatus
from pagedkv.scheduling.batch import BatchDraft, Preempted
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import BY_KEY, SchedulerState

__all__ = ["preempt_last"]


def preempt_last(state: SchedulerState, draft: BatchDraft, shortage: Shortage) -> None:
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
