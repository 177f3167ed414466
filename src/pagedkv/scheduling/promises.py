"""Promises prevent thrashing in a small pool: a preempted request returns only with reserved room, doubled each time.

A request that was preempted for the k-th time returns only when the free blocks above the watermark suffice for each
running sequence, its own included, to grow by ``first_promise * 2**(k - 1)`` tokens, or to its largest length if that
is less. From then on these blocks are reserved for all of them: later admissions must leave them free. A request that
was never preempted is admitted without a promise of its own. The last running request is preempted first, and all
waiting requests, swapped out or not, return in order of their keys. Hence, as long as no request with a smaller key
arrives:

- The first running request is never preempted for another. Some sequence always advances: a step that computes nothing
  has swapped a request out, or has swapped one in while none was running. So the number of consecutive steps of this
  kind is at most the number of running requests plus one.
- No request starves. The first running request finishes, so in the end the first waiting request has an empty pool.
- A request that has returned is not preempted before it has used up its promise. All requests before it were promised
  as much, and one token more for each step that it may need to compute its known tokens; the requests after it are
  preempted first, and free all blocks that they have taken.
- So a request is preempted at most ``2 + ceil(log2(max_new_tokens / first_promise))`` times, or twice if that is more.
  Under constant load the set of running requests settles.

A request with drafts (:mod:`~pagedkv.scheduling.drafting`) grows by up to ``1 + most_drafts`` tokens a step,
while a newcomer with rejected drafts grows by one. So running requests with drafts, but not the newcomer, are promised
``1 + most_drafts`` times as much. Drafts themselves use only blocks that no promise reserves, and are rolled back or
accepted before the next step is built.

A promised length is counted in whole blocks, and one more for each sequence, for a copy on write. If no request runs,
no blocks are reserved: a request that runs out of blocks while it runs alone is rejected, with or without a promise.
"""

from collections import Counter
from collections.abc import Iterator

from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import SchedulerState

__all__ = ["Promises"]


class Promises:
    """The sequences of the running requests, and the slots promised to them, counted once for a step's admissions.

    O(running requests); then O(1) for each newcomer, O(running requests) for each that was preempted before.

    Attributes:
        num_sequences: sequences of all running requests, including those still to be forked.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.num_sequences = state.num_running_sequences()
        self._slots: Counter[str | None] | None = None  # by tenant, for newcomers without a promise of their own

    def num_slots(self, newcomer: Request, *, of_tenant: bool = False) -> int:
        """Count the slots to leave free besides a newcomer's known tokens, in whole blocks.

        With ``of_tenant``, only those of requests of the newcomer's tenant, which count against its cap.
        """
        state, growth = self._state, _growth(self._state, newcomer)
        if not state.running:
            return 0
        if growth:
            slots = _slots_of_running(state, newcomer, growth)
        elif self._slots is None:
            slots = self._slots = _slots_of_running(state, newcomer, 0)
        else:
            slots = self._slots
        target = min(newcomer.num_known + growth, newcomer.most_tokens)
        num_slots = _slots(state, newcomer, newcomer.num_known, target)
        return num_slots + (slots[newcomer.intent.tenant] if of_tenant else slots.total())

    def promise(self, newcomer: Request) -> None:
        """Record the promises of a newcomer, which is about to run, and of all running requests."""
        growth = _growth(self._state, newcomer)
        if growth:
            newcomer.promised_tokens = min(newcomer.num_known + growth, newcomer.most_tokens)
            for request, _, target in _targets(self._state, newcomer, growth):
                request.promised_tokens = target
            self._slots = None

    def joined(self, newcomer: Request) -> None:
        """Count a newcomer, which runs now."""
        self.num_sequences += newcomer.num_sequences
        if self._slots is not None and (newcomer.num_unscheduled or newcomer.promised_tokens):
            (length,) = self._state.space.lengths(newcomer.rows[:1]).tolist()
            target = max(newcomer.promised_tokens, len(newcomer.known_token_ids))
            self._slots[newcomer.intent.tenant] += _slots(self._state, newcomer, length, target)


def _growth(state: SchedulerState, newcomer: Request) -> int:
    """Return the number of tokens of a newcomer's promise."""
    return state.config.first_promise << newcomer.num_preemptions - 1 if newcomer.num_preemptions else 0


def _slots_of_running(state: SchedulerState, newcomer: Request, growth: int) -> Counter[str | None]:
    """Count, by tenant, the slots that running requests may still take under a newcomer's promise."""
    slots: Counter[str | None] = Counter()
    if growth or state.prefilling or any(request.promised_tokens for request in state.running):
        for request, length, target in _targets(state, newcomer, growth):
            slots[request.intent.tenant] += _slots(state, request, length, max(target, len(request.known_token_ids)))
    return slots


def _targets(state: SchedulerState, newcomer: Request, growth: int) -> Iterator[tuple[Request, int, int]]:
    """Yield each running request, its length, and its promised length, which includes decoding while others prefill."""
    if growth:
        growth += -(-newcomer.num_known // max(1, state.config.max_batched_tokens - state.config.max_sequences))
        growth += state.keeps_states + (len(newcomer.intent.breakpoints) if state.splits_leases else 0)
    lengths = state.space.lengths([request.rows[0] for request in state.running]).tolist()
    for request, length in zip(state.running, lengths, strict=True):
        most = growth * (1 + state.config.most_drafts) if request.propose is not None else growth
        yield request, length, max(request.promised_tokens, min(length + most, request.most_tokens))


def _slots(state: SchedulerState, request: Request, length: int, target: int) -> int:
    """Return the number of slots of the blocks that a request may take to grow to a length."""
    if target <= length:
        return 0
    return request.num_sequences * (-(-(target - length) // state.block_size) + 1) * state.block_size
