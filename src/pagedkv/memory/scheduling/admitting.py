"""The phase of a step that lets requests run: waiting ones are admitted and swapped-out ones return, in one order."""

from typing import Literal

from pagedkv.memory.contract.answers import Shortage
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.spec import AllocStatus, keeps_whole_prefix
from pagedkv.memory.scheduling.batch import Admission, BatchDraft
from pagedkv.memory.scheduling.growing import schedule_chunk
from pagedkv.memory.scheduling.promises import num_promised_slots, promise
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.state import SchedulerState
from pagedkv.memory.space import PrefixHit

__all__ = ["fits_alone", "let_in"]


def fits_alone(state: SchedulerState, request: Request) -> bool:
    """Return whether a request could be served alone, by its number of sequences and its full-attention blocks."""
    config = state.space.config
    needed = dict.fromkeys(config.pool_names, 0)
    for group in config.groups:
        if keeps_whole_prefix(group):
            num_shared = request.num_prompt_tokens // group.block_size
            num_blocks = -(-request.most_tokens // group.block_size)
            needed[group.pool] += num_shared + request.num_sequences * (num_blocks - num_shared)
    num_blocks_of = config.blocks_by_pool()
    return (
        request.num_sequences <= state.config.max_sequences
        and request.most_tokens <= config.max_tokens
        and all(count < num_blocks_of[pool] for pool, count in needed.items())  # one is the null block
    )


def let_in(state: SchedulerState, draft: BatchDraft, budget: int) -> int:
    """Admit waiting requests, and swap swapped-out ones in, in order of their keys, as long as they fit.

    Returns what is left of the budget.
    """
    while (request := state.next_in_line()) is not None:
        if state.num_sequences_with(request) > state.config.max_sequences:
            break
        if request.rows:
            if not _swap_in(state, draft, request):
                break
        elif budget <= 0 or (num_taken := _admit(state, draft, request, budget)) is None:
            break
        else:
            budget -= num_taken
    return budget


def _swap_in(state: SchedulerState, draft: BatchDraft, request: Request) -> bool:
    """Swap the first swapped-out request in, if there is room for its next tokens and for the promises."""
    num_slots = -(-num_promised_slots(state, request) // len(request.rows))
    if request.num_known + num_slots > state.space.config.max_tokens:
        return False
    if state.space.can_swap_in(request.rows, num_lookahead=num_slots) is not AllocStatus.OK:
        return False
    moves = state.space.swap_in(request.rows)
    assert not isinstance(moves, Shortage), f"a sequence that was to fit finds too few blocks: {moves}"
    state.swapped.remove(request)
    promise(state, request)
    state.join(request)
    draft.resumed.append(request)
    return True


def _admit(state: SchedulerState, draft: BatchDraft, request: Request, budget: int) -> int | None:
    """Admit the first waiting request; return how many tokens of the budget that took, None if it has to wait."""
    request.load_tokens()
    match = state.space.match(
        _hittable(state, request),
        keys=request.keys,
        max_hit_tokens=request.max_hit_tokens,
        max_replay_tokens=budget - 1 if state.replays else 0,  # a token behind the hit is computed as well
    )
    status = _admission_status(state, request, match)
    if status is AllocStatus.LATER:
        return None
    state.waiting.pop()
    if status is AllocStatus.NEVER:
        request.drop()
        draft.rejected.append(request)
        return 0
    return _allocate(state, draft, request, budget, match)


def _hittable(state: SchedulerState, request: Request) -> Int32Array:
    """Return the tokens that may hit and be published: all known ones, or those of the prompt."""
    return request.known_token_ids[: None if state.config.publishes_answers else request.num_prompt_tokens]


def _admission_status(state: SchedulerState, request: Request, match: PrefixHit) -> AllocStatus:
    """Return whether a prompt fits beside the promises."""
    tokens, keys = _hittable(state, request), request.keys
    num_more = len(request.known_token_ids) - len(tokens)
    status = state.space.can_allocate(
        tokens, keys=keys, num_lookahead=num_more, num_sequences=request.num_sequences, match=match
    )
    num_slots = num_promised_slots(state, request) if status is AllocStatus.OK else 0
    if not num_slots:
        return status
    if len(tokens) + num_more + num_slots > state.space.config.max_tokens:
        return AllocStatus.LATER
    beside = state.space.can_allocate(
        tokens, keys=keys, num_lookahead=num_more + num_slots, match=match
    )  # num_slots already counts all its sequences
    return AllocStatus.OK if beside is AllocStatus.OK else AllocStatus.LATER


def _allocate(state: SchedulerState, draft: BatchDraft, request: Request, budget: int, match: PrefixHit) -> int:
    """Allocate the first blocks of a request; return how many tokens of the budget that took."""
    num_hit_tokens = match.num_tokens
    request.checkpoint = match.checkpoint
    budget -= match.num_replayed
    first_chunk = _hittable(state, request)[: request.end_of_chunk(num_hit_tokens, budget)]
    continues = request.receipt if request.num_preemptions and state.space.config.receipts else None
    publish: Literal["prompt"] | bool = True if state.config.publishes_answers else "prompt"
    allocation = state.space.allocate(first_chunk, keys=request.keys, match=match, continues=continues, publish=publish)
    assert not isinstance(allocation, Shortage), f"a prompt that was to fit finds too few blocks: {allocation}"
    request.rows = [allocation.row]
    promise(state, request)
    schedule_chunk(state, draft, request, num_hit_tokens, len(first_chunk))
    state.join(request)
    draft.admitted.append(Admission(request, num_hit_tokens))
    return len(first_chunk) - num_hit_tokens + match.num_replayed
