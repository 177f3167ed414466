"""The phases of a step for running requests: each sequence decodes a token, then prompts compute their next chunks."""

from pagedkv.contract.answers import Shortage
from pagedkv.scheduling.batch import BatchDraft, Chunk
from pagedkv.scheduling.branching import replace_beams
from pagedkv.scheduling.decoding import UNKNOWN_TOKEN, Decoding
from pagedkv.scheduling.preempting import preempt_last
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import SchedulerState

__all__ = ["decode", "prefill", "schedule_chunk"]


def decode(state: SchedulerState, draft: BatchDraft) -> int:
    """Append a token to every sequence that can decode; return the number of sequences."""
    replace_beams(state)
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
        preempt_last(state, draft, shortage)
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
                preempt_last(state, draft, shortage)
    return budget


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
            state.note_newcomer()  # it may decode while this batch is in flight


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
