"""What keeps a short pool from thrashing: who returns from a preemption is promised room, twice as much each time.

A request that was preempted for the k-th time returns only when the free blocks, the watermark aside, let each
sequence that runs, its own included, grow by ``first_promise * 2**(k - 1)`` tokens, or to its most tokens if that is
less. From then on that room is kept for all of them: whoever is let in later must leave it. A request that was never
preempted is let in without a promise of its own. Who runs last is preempted first, and all who wait, swapped out or
not, return in order of their keys. Hence, as long as nobody of a smaller key arrives:

- The first who runs is never preempted for another. Some sequence always advances: a step in which nothing is computed
  has swapped somebody out, or in where nobody ran, so there are no more of them in a row than requests run, and one.
- Nobody starves. The first who runs comes to its end, so the first who waits comes to find an empty pool.
- A request that has returned is not preempted before it has used up its promise: all who come before it were promised
  as much, and a token more for each step that it may need to compute what is known; those who come after it go first,
  and give back all that they took.
- So a request is preempted at most ``2 + ceil(log2(max_new_tokens / first_promise))`` times, or twice if that is more.
  The set of those who run cannot go on changing while the load stays the same.

Who may have drafts (:mod:`~pagedkv.memory.scheduling.drafting`) grows by up to ``1 + most_drafts`` tokens a step, while
a newcomer that guesses wrong grows by one: so those who run, not the newcomer, are promised as many times more. Drafts
themselves take what is left when all this is kept, and are gone, or tokens, before the next step is put together.

A promised length is counted in whole blocks and one more a sequence, for a copy on write. Nothing is asked where
nobody runs: a request alone that runs out of blocks is rejected, and no promise could help it.
"""

from collections.abc import Iterator

from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.state import SchedulerState

__all__ = ["num_promised_slots", "promise"]


def num_promised_slots(state: SchedulerState, newcomer: Request) -> int:
    """Count the slots to be left free beside a newcomer's known tokens, in whole blocks. O(requests that run)."""
    growth = _growth(state, newcomer)
    if not state.running or not (growth or state.prefilling or any(other.promised_tokens for other in state.running)):
        return 0
    num_slots = _slots(state, newcomer, newcomer.num_known, min(newcomer.num_known + growth, newcomer.most_tokens))
    for request, length, target in _targets(state, newcomer, growth):
        num_slots += _slots(state, request, length, max(target, len(request.known_token_ids)))
    return num_slots


def promise(state: SchedulerState, newcomer: Request) -> None:
    """Promise a newcomer, which is about to run, and all who run what it was let in for."""
    growth = _growth(state, newcomer)
    if growth:
        newcomer.promised_tokens = min(newcomer.num_known + growth, newcomer.most_tokens)
        for request, _, target in _targets(state, newcomer, growth):
            request.promised_tokens = target


def _growth(state: SchedulerState, newcomer: Request) -> int:
    """Tokens by which a newcomer is promised to grow."""
    return state.config.first_promise << newcomer.num_preemptions - 1 if newcomer.num_preemptions else 0


def _targets(state: SchedulerState, newcomer: Request, growth: int) -> Iterator[tuple[Request, int, int]]:
    """Give the length of each who runs, and that up to which it is to have room; it advances while others prefill."""
    if growth:
        growth += -(-newcomer.num_known // max(1, state.config.max_batched_tokens - state.config.max_sequences))
        growth += state.keeps_states
    lengths = state.space.lengths([request.rows[0] for request in state.running]).tolist()
    for request, length in zip(state.running, lengths, strict=True):
        most = growth * (1 + state.config.most_drafts) if request.propose is not None else growth
        yield request, length, max(request.promised_tokens, min(length + most, request.most_tokens))


def _slots(state: SchedulerState, request: Request, length: int, target: int) -> int:
    """Slots of the blocks that a request may take to grow to a length."""
    if target <= length:
        return 0
    return request.num_sequences * (-(-(target - length) // state.block_size) + 1) * state.block_size
