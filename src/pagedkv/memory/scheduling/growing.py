"""The phases of a step for running requests: each sequence decodes a token, then prompts compute their next chunks."""

from pagedkv.memory.scheduling.batch import BatchDraft, Chunk
from pagedkv.memory.scheduling.branching import replace_beams
from pagedkv.memory.scheduling.preempting import preempt_last
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.state import SchedulerState

__all__ = ["decode", "prefill", "schedule_chunk"]


def decode(state: SchedulerState, draft: BatchDraft) -> int:
    """Append a token to every sequence that can decode; return how many."""
    replace_beams(state)
    while decoding := state.gather_decoding():
        shortage = state.space.append(decoding.rows, decoding.next_token_ids)
        if shortage is None:
            decoding.is_scheduled = True
            draft.decoding = decoding
            return len(decoding.rows)
        if state.is_coming(shortage):
            return 0
        preempt_last(state, draft, shortage)
    return 0


def prefill(state: SchedulerState, draft: BatchDraft, budget: int) -> int:
    """Append the next chunks of prompts; return what is left of the budget."""
    for request in list(state.prefilling):
        while budget > 0 and request in state.prefilling:
            stop = request.end_of_chunk(request.num_scheduled, budget)
            chunk = request.known_token_ids[request.num_scheduled : stop]
            shortage = state.space.append(request.rows, chunk, [len(chunk)])
            if shortage is None:
                schedule_chunk(state, draft, request, request.num_scheduled, stop)
                budget -= len(chunk)
                break
            if state.is_coming(shortage):
                return 0
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
        request.awaited = chunk
        if request in state.prefilling:
            state.prefilling.remove(request)
