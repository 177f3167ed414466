"""The phase of a step that admits waiting requests and swaps swapped-out ones in, in the order of their keys.

If the pools have too few blocks for a request, all requests after it wait too; otherwise smaller requests could
overtake it without end. If only its tenant's cap leaves too few blocks, only the further requests of that tenant wait,
since requests of other tenants do not use blocks under this cap.

A prompt is admitted if all its blocks fit at once. One that can never fit so, since it is longer than a pool of
windows, or since its hit takes blocks of windows that an idle pool lacks, is computed alone: in smaller chunks, which
hold fewer blocks at a time, or after a shorter hit. It is rejected if it does not even fit token by token.

Promises prevent thrashing in a small pool: a preempted request returns only with reserved room, doubled each time. A
request that was preempted for the k-th time returns only when the free blocks above the watermark suffice for each
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

A request with drafts (:mod:`~pagedkv.scheduling.growing`) grows by up to ``1 + most_drafts`` tokens a step,
while a newcomer with rejected drafts grows by one. So running requests with drafts, but not the newcomer, are promised
``1 + most_drafts`` times as much. Drafts themselves use only blocks that no promise reserves, and are rolled back or
accepted before the next step is built.

A promised length is counted in whole blocks, and one more for each sequence, for a copy on write. If no request runs,
no blocks are reserved: a request that runs out of blocks while it runs alone is rejected, with or without a promise.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

from pagedkv.contract.answers import PrefixGone, Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import AllocStatus, keeps_whole_prefix
from pagedkv.scheduling.growing import schedule_chunk
from pagedkv.scheduling.keeping import replaced_content, supersede
from pagedkv.scheduling.request import Admission, BatchDraft, Request
from pagedkv.scheduling.state import SchedulerState
from pagedkv.space import BlockSpace, PrefixHit

BEYOND_CAP: Final = -1
"""Result of an admission in place of a number of tokens: the request waits because of its tenant's cap."""


def fits_alone(state: SchedulerState, request: Request, *, within_limits: bool = True) -> bool:
    """Return whether a request could be served alone, by its number of sequences and its full-attention blocks.

    Its tenant's cap and the floors of other tenants limit it too, unless ``within_limits`` is False.

    Raises ConfigurationError if there is no such tenant.
    """
    config = state.space.config
    needed = _whole_blocks(config, request.num_prompt_tokens, request.most_tokens, request.num_sequences)
    most_blocks = state.space.most_blocks(request.intent.tenant)
    if not within_limits:  # all but the null blocks
        most_blocks = {pool: num_blocks - 1 for pool, num_blocks in config.blocks_by_pool().items()}
    return (
        request.num_sequences <= state.config.max_sequences
        and request.most_tokens <= config.max_tokens
        and all(count <= most_blocks[pool] for pool, count in needed.items())
    )


def longest_alone(
    space: BlockSpace, num_prompt_tokens: int = 0, num_sequences: int = 1, tenant: str | None = None
) -> int:
    """Return the most tokens that each of some sequences of one prompt could have, if they were served alone.

    O(log tokens x groups). Raises ConfigurationError if there is no such tenant.
    """
    config, most_blocks = space.config, space.most_blocks(tenant)

    def exceeds(num_tokens: int) -> bool:
        needed = _whole_blocks(config, num_prompt_tokens, num_tokens, num_sequences)
        return any(count > most_blocks[pool] for pool, count in needed.items())

    return bisect_left(range(1, config.max_tokens + 1), True, key=exceeds)  # noqa: FBT003 - a value


def _whole_blocks(config: SpaceConfig, num_prompt_tokens: int, num_tokens: int, num_sequences: int) -> dict[str, int]:
    """Count the blocks, by pool, of the groups that keep all tokens of sequences that share a prompt."""
    needed = dict.fromkeys(config.pool_names, 0)
    for group in config.groups:
        if keeps_whole_prefix(group):
            num_shared = min(num_prompt_tokens, num_tokens) // group.block_size
            needed[group.pool] += num_shared + num_sequences * (-(-num_tokens // group.block_size) - num_shared)
    return needed


def most_blocks(config: SpaceConfig, request: Request) -> dict[str, int]:
    """Count, by pool, the blocks that a request may come to have, as if no group ever gave one back. O(groups)."""
    most = dict.fromkeys(config.pool_names, 0)
    for group in config.groups:
        num_tokens = min(request.most_tokens, config.max_tokens)
        most[group.pool] += request.num_sequences * -(-num_tokens // group.block_size)
    return {pool: min(count, config.blocks_by_pool()[pool] - 1) for pool, count in most.items()}


def admit_waiting(state: SchedulerState, draft: BatchDraft, budget: int) -> int:
    """Admit waiting requests, and swap swapped-out ones in, in order of their keys, as long as they fit.

    Returns the rest of the budget.
    """
    skipped: set[str | None] = set()  # tenants whose first request waits because of the tenant's cap
    promises = Promises(state)
    while (request := state.next_to_run(skipped)) is not None:
        if promises.num_sequences + request.num_sequences > state.config.max_sequences:
            break
        if request.rows:
            if _swap_in(state, promises, draft, request):
                continue
            is_beyond_cap = _is_swapped_beyond_cap(state, request)
            if _is_stuck(state, request, is_beyond_cap=is_beyond_cap):
                state.requeue(request)  # as a prompt it needs fewer blocks at a time
            elif is_beyond_cap:
                skipped.add(request.intent.tenant)
            else:
                break
        elif budget <= 0 or (num_taken := _admit(state, promises, draft, request, budget)) is None:
            break
        elif num_taken == BEYOND_CAP:
            skipped.add(request.intent.tenant)
        else:
            budget -= num_taken
    return budget


def branch_off(state: SchedulerState, row: int, child: Request) -> int:
    """Run a request that begins with the tokens of a row, by a fork; return the number of shared tokens.

    Returns 0, and changes nothing, if there is no room. The request's last known token is never shared, since its
    logits are needed. If a window or a state at that position has been evicted, the longest prefix that every group
    still has is shared.
    """
    num_sequences = state.num_running_sequences() + child.num_sequences
    if num_sequences > state.config.max_sequences or child.max_hit_tokens is not None:
        return 0
    child.load_tokens()
    replaced = replaced_content(state.space, child)
    num_shared = min(len(child.known_token_ids) - 1, state.space.num_tokens(row))
    forked = state.space.fork(row, at=num_shared) if num_shared else None
    if isinstance(forked, PrefixGone):
        num_shared = forked.longest
        forked = state.space.fork(row, at=num_shared) if num_shared else None
    if forked is None or isinstance(forked, PrefixGone | Shortage):
        return 0
    child.rows = forked.tolist()
    child.num_scheduled = num_shared
    if state.splits_leases:
        child.stops = tuple(place.num_tokens for place in child.intent.breakpoints)
    state.join(child)
    supersede(state.space, child, replaced)
    return num_shared


def _is_swapped_beyond_cap(state: SchedulerState, request: Request) -> bool:
    """Whether a swapped-out request needs more blocks than its tenant's cap leaves."""
    shares = {share.pool: share for share in state.space.tenant_shares(request.intent.tenant)}
    needed = dict.fromkeys(shares, 0)
    for index, group in enumerate(state.space.config.groups if shares else ()):
        needed[group.pool] += int(state.space.num_blocks(request.rows, index).sum())
    return any(count > shares[pool].cap - shares[pool].num_taken for pool, count in needed.items())


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


def _swap_in(state: SchedulerState, promises: Promises, draft: BatchDraft, request: Request) -> bool:
    """Swap a request in if there is room for its next tokens and for the promises; return whether it was."""
    if state.space.can_swap_in(request.rows, num_reserved=promises.num_slots(request)) is not AllocStatus.OK:
        return False
    moves = state.space.swap_in(request.rows)
    assert not isinstance(moves, Shortage), f"can_swap_in answered OK, but blocks are missing: {moves}"
    state.swapped.remove(request)
    promises.promise(request)
    state.join(request)
    promises.joined(request)
    draft.resumed.append(request)
    return True


def _admit(state: SchedulerState, promises: Promises, draft: BatchDraft, request: Request, budget: int) -> int | None:
    """Admit a waiting request, the first of its tenant; return the number of tokens that it uses of the budget.

    Returns None if the pools have too few blocks, BEYOND_CAP if its tenant's cap leaves too few. A request that begins
    to wait for a load uses 0 tokens, and the requests after it are considered.
    """
    if request.intent.tenant is not None and not fits_alone(state, request):  # limits may have changed since add()
        return _reject(state, draft, request)
    request.load_tokens()
    request.most_chunk = 0
    match = longest = _match(state, request, budget)
    status = _admission_status(state, promises, request, match)
    if status is AllocStatus.LATER:
        is_beyond_cap = _is_beyond_cap(state, promises, request, match)
        if not _is_stuck(state, request, is_beyond_cap=is_beyond_cap):
            return BEYOND_CAP if is_beyond_cap else None
    if status is not AllocStatus.OK:
        alone = _way_alone(state, request, budget, match)
        if isinstance(alone, AllocStatus):
            return None if alone is AllocStatus.LATER else _reject(state, draft, request)
        match, request.most_chunk = alone
    replaced = replaced_content(state.space, request)  # asked of its caller, before anything is changed
    state.waiting.remove(request)
    is_first = match.num_tokens == longest.num_tokens  # what a shorter hit leaves out is not to be loaded
    if is_first and state.loader is not None and state.loader.begins_load(request, _hittable(state, request), match):
        state.loading[request] = None
        return 0
    num_tokens = _allocate(state, promises, draft, request, budget, match)
    supersede(state.space, request, replaced)
    return num_tokens


def _is_stuck(state: SchedulerState, request: Request, *, is_beyond_cap: bool) -> bool:
    """Whether a request that lacks blocks would lack them for ever: nothing that could free any is under way.

    ``is_beyond_cap``: whether it lacks them because of its tenant's cap.
    """
    if is_beyond_cap and not any(share.num_taken for share in state.space.tenant_shares(request.intent.tenant)):
        return True
    return not state.running and not state.awaits_blocks


def _reject(state: SchedulerState, draft: BatchDraft, request: Request) -> int:
    """Reject the first waiting request of a tenant; return 0, the tokens that it uses of the budget."""
    most = state.space.most_blocks(request.intent.tenant)
    pools = ", ".join(f"{count} of pool {pool!r}" for pool, count in most.items())
    request.rejection = f"its {request.num_known} tokens take more blocks than it may have, even one by one: {pools}"
    state.waiting.remove(request)
    request.drop()
    draft.rejected.append(request)
    return 0


def _match(state: SchedulerState, request: Request, budget: int, most_tokens: int | None = None) -> PrefixHit:
    """Match the tokens of a request that may hit, up to its own limit or to ``most_tokens``."""
    return state.space.match(
        _hittable(state, request),
        keys=request.keys,
        max_hit_tokens=request.max_hit_tokens if most_tokens is None else most_tokens,
        max_replay_tokens=budget - 1 if state.replays else 0,  # the token after the hit is computed as well
    )


def _hittable(state: SchedulerState, request: Request) -> Int32Array:
    """Return the tokens that may hit and be published: all known ones, or those of the prompt."""
    return request.known_token_ids[: request.num_prompt_tokens if _publish(state, request) == "prompt" else None]


def _publish(state: SchedulerState, request: Request) -> bool | Literal["prompt"]:
    """Return which tokens of a request others may hit, as the argument ``publish`` of the space."""
    if request.intent.publish == "none":
        return False
    return True if state.config.publishes_answers and request.intent.publish == "all" else "prompt"


def _admission_status(state: SchedulerState, promises: Promises, request: Request, match: PrefixHit) -> AllocStatus:
    """Return whether a prompt fits, with the promised slots left free."""
    tokens, keys, tenant = _hittable(state, request), request.keys, request.intent.tenant
    num_more = len(request.known_token_ids) - len(tokens)
    status = state.space.can_allocate(
        tokens, keys=keys, num_lookahead=num_more, num_sequences=request.num_sequences, match=match, tenant=tenant
    )
    num_slots = promises.num_slots(request) if status is AllocStatus.OK else 0
    if not num_slots:
        return status
    with_promises = state.space.can_allocate(
        tokens, keys=keys, num_lookahead=num_more, num_reserved=num_slots, match=match
    )  # num_slots counts all sequences, also of other tenants, so no tenant's cap applies here
    if with_promises is AllocStatus.OK and tenant is not None:
        num_own = promises.num_slots(request, of_tenant=True)
        with_promises = state.space.can_allocate(
            tokens, keys=keys, num_lookahead=num_more, num_reserved=num_own, match=match, tenant=tenant
        )
    return AllocStatus.OK if with_promises is AllocStatus.OK else AllocStatus.LATER


def _way_alone(
    state: SchedulerState, request: Request, budget: int, longest: PrefixHit
) -> tuple[PrefixHit, int] | AllocStatus:
    """Return the hit, and the most tokens of a chunk, with which a prompt that runs alone takes the fewest steps.

    Returns LATER while it is not alone, NEVER if it fits an idle pool not even token by token, which takes the fewest
    blocks. O(log hit x log budget x blocks), for prompts that do not fit as a whole.
    """
    by_token = (_status_in_chunks(state, request, match, 1) for match in (longest, _match(state, request, 1, 0)))
    if all(status is AllocStatus.NEVER for status in by_token):
        return AllocStatus.NEVER
    if state.running:
        return AllocStatus.LATER
    way, fewest = None, len(request.known_token_ids) + 1
    for match in _shorter_and_shorter(state, request, budget, longest):
        num_left = len(request.known_token_ids) - match.num_tokens
        for most_chunk in _smaller_and_smaller(min(state.config.max_batched_tokens, num_left)):
            num_steps = -(-num_left // most_chunk)
            if num_steps >= fewest:
                break
            if _status_in_chunks(state, request, match, most_chunk) is AllocStatus.OK:
                way, fewest = (match, most_chunk), num_steps
    if way is None:
        return AllocStatus.LATER if state.awaits_blocks else AllocStatus.NEVER
    return way


def _smaller_and_smaller(most_chunk: int) -> list[int]:
    """Return a size of chunks, its halves, and the powers of two below it, which lie well on blocks; largest first."""
    sizes = {most_chunk >> num_bits for num_bits in range(most_chunk.bit_length())}
    return sorted(sizes | {1 << num_bits for num_bits in range(most_chunk.bit_length())}, reverse=True)


def _shorter_and_shorter(state: SchedulerState, request: Request, budget: int, match: PrefixHit) -> Iterator[PrefixHit]:
    """Yield a hit, and hits of at most half the tokens of the one before, down to none."""
    yield match
    while match.num_tokens:
        match = _match(state, request, budget, match.num_tokens // 2)
        yield match


def _status_in_chunks(state: SchedulerState, request: Request, match: PrefixHit, most_chunk: int) -> AllocStatus:
    """Return whether a prompt fits that is computed in chunks after a hit."""
    tokens, keys, tenant = request.known_token_ids, request.keys, request.intent.tenant
    if len(_hittable(state, request)) < len(tokens):  # a match answers for its own tokens
        most_replayed = match.num_replayed
        match = state.space.match(tokens, keys=keys, max_hit_tokens=match.num_tokens, max_replay_tokens=most_replayed)
    return state.space.can_allocate(
        tokens, keys=keys, num_sequences=request.num_sequences, max_chunk=most_chunk, match=match, tenant=tenant
    )


def _is_beyond_cap(state: SchedulerState, promises: Promises, request: Request, match: PrefixHit) -> bool:
    """Whether a waiting request needs more blocks than its tenant's cap leaves, promises included."""
    if request.intent.tenant is None:
        return False
    tokens = _hittable(state, request)
    num_own = promises.num_slots(request, of_tenant=True)
    return state.space.exceeds_cap(
        tokens,
        tenant=request.intent.tenant,
        keys=request.keys,
        num_lookahead=len(request.known_token_ids) - len(tokens),
        num_reserved=num_own,
        match=match,
    )


def _allocate(  # noqa: PLR0913, PLR0917 - the state of a step, a request, and how it is admitted
    state: SchedulerState, promises: Promises, draft: BatchDraft, request: Request, budget: int, match: PrefixHit
) -> int:
    """Allocate the first blocks of a request; return the number of tokens that it uses of the budget."""
    num_hit_tokens = match.num_tokens
    request.checkpoint = match.checkpoint
    if state.splits_leases:
        request.stops = tuple(place.num_tokens for place in request.intent.breakpoints)
    budget -= match.num_replayed
    first_chunk = _hittable(state, request)[: request.end_of_chunk(num_hit_tokens, budget)]
    continues = request.receipt if request.num_preemptions and state.space.config.receipts else None
    allocation = state.space.allocate(
        first_chunk,
        keys=request.keys,
        match=match,
        continues=continues,
        publish=_publish(state, request),
        tenant=request.intent.tenant,
    )
    assert not isinstance(allocation, Shortage), f"can_allocate answered OK, but blocks are missing: {allocation}"
    request.rows = [allocation.row]
    promises.promise(request)
    schedule_chunk(state, draft, request, num_hit_tokens, len(first_chunk))
    state.join(request)
    promises.joined(request)
    draft.admitted.append(Admission(request, num_hit_tokens))
    if state.leases is not None:
        state.leases.renew(state.space, request, num_hit_tokens)
    return len(first_chunk) - num_hit_tokens + match.num_replayed


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
