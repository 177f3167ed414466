"""Loads and tickets: blocks whose content comes from elsewhere, and blocks that an external reader holds.

A *load* is for a prefix with KV that comes from elsewhere, such as another tier or another machine. It is no step and
takes no row. It holds the blocks of its prefix, including the hit before them. It may be finished, in whole or in part,
or fail, in any order and independent of the steps::

    load ------------------------------> finish_load(load)           published: the next prompt hits it
      |   blocks reserved, to be filled      |                       not loaded: freed without content
      |   a match shows where a load begins  finish_load(load, 0)    it failed

Its blocks are named when it is finished. Before that nothing of a load is hit, since its blocks are not in the prefix
index. If one step both brings content and computes on top of it, one call suffices:
``allocate(prompt, num_external_tokens=n)``.

A *ticket* is for an external reader of blocks, such as a tier that stores them or a sender. It is one more reference to
each of its blocks, beside those of the tables, and the rules for shared blocks do the rest: a referenced block is not
handed out, evicted or counted as free; a row that writes into a partly filled block with another reference copies it
first; rolling back into it is refused. So content that was computed when the ticket was given stays as it is until the
ticket is released, whatever happens to the rows::

    hold ------------------------------------------------> release
     |   rows are freed, swapped out, merged, grow by copies   |
     v                                                         v
    one reference more, name and content stay          back to the free queue if it was the last: cached, or deferred

Only blocks of device pools can be held. A ticket belongs to no step: it is released when its reader is done, in any
order, and acknowledging or aborting steps does not end it.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import ROOT_WORDS, keys_of_blocks, set_digest, set_parent
from pagedkv.blocks.life_cycle import acquire, claim_all, drop_name, release_all
from pagedkv.blocks.record import (
    ABSENT,
    AT_END,
    CALLED_OFF,
    CHARGED,
    FREE,
    IN_USE,
    KEPT,
    LIFE,
    NAME,
    NEW,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    PoolArrays,
)
from pagedkv.blocks.tenant_charges import FLOOR, NUM_TAKEN, accounts_of
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import Allocation, Load, Shortage, Ticket
from pagedkv.contract.arguments import as_array
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array, Uint32Array
from pagedkv.contract.spec import refuse_ahead
from pagedkv.errors import BlockError, ConfigurationError, TokenError
from pagedkv.space.admission import Admission, allocate, allocate_prompt, free_blocks_needed
from pagedkv.space.declaring import declare
from pagedkv.space.epochs import date_load
from pagedkv.space.growing import as_growth, extend, require_growth
from pagedkv.space.hits import NO_IDS, PrefixHit, Prompt, digests_of_prefix
from pagedkv.space.matching import match_prompt
from pagedkv.space.publishing import publish_block, tag
from pagedkv.space.rows import (
    BLOCK_SIZE,
    FULL,
    HIT_ALIGNMENT,
    KIND,
    NUM_SINK_BLOCKS,
    SHEDS,
    SPAN,
    GroupArrays,
    first_needed_token,
    serves,
)
from pagedkv.space.state import Loading, SpaceState
from pagedkv.space.steps import StepLedger, read_only
from pagedkv.space.tenants import charge_hits, charge_to, keep_caps
from pagedkv.space.windows import shed_dropped


def load(
    state: SpaceState, ledger: StepLedger, prompt: Prompt, num_tokens: int, epochs: tuple[int, int] | None, tenant: int
) -> Load | Shortage | None:
    """Reserve blocks for the first ``num_tokens`` tokens of a prompt; None if there is no block to load.

    ``epochs`` are the oldest and the newest epoch that contributed to the content, None for the current one.

    Raises:
        ConfigurationError: the space has no prefix caching.
        TokenError: the prompt has fewer tokens.
    """
    if not state.config.prefix_caching:
        raise ConfigurationError("a prefix is loaded into the prefix cache: this space has prefix_caching=False")
    refuse_ahead(state.config.groups, "a prefix cannot be loaded, and is to be computed")
    if num_tokens > len(prompt.tokens):
        raise TokenError(f"{num_tokens} tokens cannot be loaded of a prompt that has {len(prompt.tokens)}")
    alignment = int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT])
    num_whole = num_tokens // alignment * alignment
    hit = match_settled(state, prompt, num_whole)
    if hit.num_tokens >= num_whole:
        return None
    shortage = state.room.find_shortage({tenant: _num_needed(state, hit, num_whole)})
    if shortage is not None:
        return shortage
    with state.changing:
        if state.has_tenants:
            charge_to(state, tenant)
            charge_hits(state, hit.block_ids)
        for group, blocks in zip(state.groups, hit.block_ids, strict=True):
            claim_all(group.pool.arrays, blocks[blocks != NULL_BLOCK])
        answer = _take(state, ledger, prompt._replace(tokens=prompt.tokens[:num_whole].copy()), hit)
        if state.has_tenants:
            keep_caps(state, tenant)
        if state.counts_epochs:
            date_load(state, answer, hit, epochs)
        for tell in state.observers.load_begun:
            tell(answer, hit)
    return answer


def match_settled(state: SpaceState, prompt: Prompt, most: int) -> PrefixHit:
    """Match a prompt without blocks that a step still computes: no other row could take over that computation.

    States kept inside an interval are left out as well, since a row can only continue from a copy of them.
    """
    while True:
        hit = match_prompt(state, prompt._replace(max_hit_tokens=min(most, prompt.max_hit_tokens)))
        unsettled = [
            int(np.argmax(pending)) * group.block_size
            for group, blocks in zip(state.groups, hit.block_ids, strict=True)
            if (pending := group.pool.arrays.records[blocks, PENDING_STEP] > state.settled_step).any()
        ]
        if not unsettled and not hit.tails:
            return hit
        alignment = int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT])
        most = min([*unsettled, hit.num_tokens // alignment * alignment])


def _num_needed(state: SpaceState, hit: PrefixHit, num_tokens: int) -> dict[str, int]:
    """Count, by pool, the free blocks that a load takes, including those of its hit."""
    needed = dict.fromkeys(state.pools, 0)
    for group, num_free in zip(state.groups, hit.num_free, strict=True):
        if not group.stays_out:
            needed[group.pool.name] += num_free + count_to_load(group.arrays, hit.num_tokens, num_tokens)
    return needed


def _take(state: SpaceState, ledger: StepLedger, prompt: Prompt, hit: PrefixHit) -> Load:
    """Take the blocks behind a hit, and a ticket in each pool for all blocks."""
    encodings = [
        keys_of_blocks(
            prompt.keys, state.weights.identity, lane[0].block_size, 0, len(prompt.tokens) // lane[0].block_size
        )
        for lane in state.lanes
    ]
    state.extra_keys.intern_all([encoding for by_block in encodings for encoding in by_block.values()])
    digests = [
        digests_of_prefix(state, prompt, lane[0], len(prompt.tokens) // lane[0].block_size) for lane in state.lanes
    ]
    taken, parents = [], []
    for group, hits in zip(state.groups, hit.block_ids, strict=True):
        num_blocks = 0 if group.stays_out else len(prompt.tokens) // group.block_size
        blocks = np.zeros(num_blocks - len(hits), np.int32)
        if num_blocks:
            group_digests = digests[group.lane]
            take_to_load(group.pool.arrays, group.arrays, prompt.tokens, group_digests, hit.num_tokens, blocks)
            tag(state, group, blocks, len(hits), encodings[group.lane])
        taken.append(blocks)
        parents.append(int(hits[-1]) if len(hits) else NULL_BLOCK)
    state.num_loads += 1
    in_flight = ledger.in_flight
    after_step = in_flight[-1].plan.step_id if in_flight and state.config.in_order else None
    answer = Load(state.num_loads, hit.num_tokens, len(prompt.tokens), tuple(map(read_only, taken)), after_step)
    tickets = [take_ticket(state, name, _blocks_in(state, name, hit.block_ids, taken)) for name in state.pools]
    state.loads[answer] = Loading(parents, digests, tickets)
    return answer


def _blocks_in(state: SpaceState, pool: str, hits: tuple[Int32Array, ...], taken: list[Int32Array]) -> Int32Array:
    """Return all blocks of one pool that a load holds."""
    parts = [
        blocks[blocks != NULL_BLOCK]
        for group, found, new in zip(state.groups, hits, taken, strict=True)
        if group.pool.name == pool
        for blocks in (found, new)
    ]
    return np.concatenate([NO_BLOCKS, *parts])


def finish_load(state: SpaceState, answer: Load, num_tokens: int | None) -> None:
    """Publish what was loaded, and release the blocks.

    Raises:
        BlockError: it is no load that is under way here; nothing was changed.
        TokenError: more tokens than the load was for.
    """
    if not isinstance(answer, Load):
        raise BlockError(f"finish_load takes what load returned, got {answer!r}")
    if answer not in state.loads:
        raise BlockError(f"{answer!r} is not under way in this space: it was finished before, or is another space's")
    loaded = answer.num_tokens if num_tokens is None else num_tokens
    if loaded > answer.num_tokens:
        raise TokenError(f"{loaded} tokens were loaded, but {answer!r} was to bring {answer.num_tokens}")
    with state.changing:
        loading = state.loads.pop(answer)
        if not loading.is_frozen:
            for group, blocks, parent in zip(state.groups, answer.block_ids, loading.parents, strict=True):
                first = answer.num_hit_tokens // group.block_size
                filled = blocks[: max(0, loaded // group.block_size - first)]
                if not group.stays_out:
                    publish_loaded(group.pool.arrays, group.arrays, parent, filled)
        for ticket in loading.tickets:
            give_back(state, ticket)
        for tell in state.observers.load_ended:
            tell(answer)


def freeze_loads(state: SpaceState) -> tuple[Load, ...]:
    """Mark all loads so that their content is not published; return them."""
    for loading in state.loads.values():
        loading.is_frozen = True
    return tuple(state.loads)


def load_that_continues(state: SpaceState, prompt: Prompt, hit: PrefixHit) -> Load | None:
    """Find the load that brings a prompt's next block behind its hit. O(loads + prompt) while anything is loaded."""
    lane = state.lanes[0][0]
    index = hit.num_tokens // lane.block_size
    if (index + 1) * lane.block_size > len(prompt.tokens):
        return None
    digest = digests_of_prefix(state, prompt, lane, index + 1)[index:]
    for answer, loading in state.loads.items():
        known = loading.digests[0][index : index + 1]
        if not loading.is_frozen and len(known) == len(digest) == 1 and (known == digest).all():
            return answer
    return None


def allocate_loaded(
    state: SpaceState, ledger: StepLedger, admission: Admission, answer: PrefixHit | None, num_external: int
) -> Allocation | Shortage:
    """Admit a prompt; the engine brings its first ``num_external`` tokens in the open step.

    Tokens that hit need not be brought, except in groups outside prefix caching, which have no hits. If the hit is at
    least as long, nothing is brought.

    Raises:
        TokenError: no token would be left to be computed.
    """
    prompt = admission.prompt
    num_tokens = len(prompt.tokens)
    if num_external >= num_tokens:
        raise TokenError(f"{num_external} of {num_tokens} tokens come from elsewhere: one at least must be computed")
    hit = match_prompt(state, prompt, answer)
    if hit.num_tokens >= num_external:
        return allocate(state, ledger, admission, hit)
    hit = match_settled(state, prompt, min(num_external, hit.max_hit_tokens))
    shortage = state.room.find_shortage({admission.tenant: free_blocks_needed(state, admission, hit)})
    if shortage is not None:
        return shortage
    state.require_vacant_rows(admission.num_sequences)
    brought, rest = prompt.tokens[:num_external], prompt.tokens[num_external:]
    num_digests = num_external // state.cached_groups[0].block_size
    beginning = prompt._replace(tokens=brought, digests=prompt.digests[:num_digests])
    reserve = len(rest) + admission.num_lookahead
    with state.changing:
        started = admission._replace(prompt=beginning, num_lookahead=reserve)
        row = allocate_prompt(state, ledger, started, hit)
        batch = np.array([row], np.int32)
        for group in state.cached_groups:
            unname_unfilled(group.pool.arrays, group.arrays, row, hit.num_tokens, num_external)
        declare(state, ledger, batch)
        growth = as_growth(state, batch, [len(rest)], admission.num_lookahead, 0)
        require_growth(state, growth)
        copies = extend(state, ledger, growth, rest)
        assert copies == [], f"row {row} copies what it has just been given"
        return Allocation(row, hit.num_tokens, state.checkpoint_of(admission.prompt_length, hit.num_tokens))


@compiled
def count_to_load(group: GroupArrays, num_hit_tokens: int, num_tokens: int) -> int:
    """Count the blocks after a hit that a hit of ``num_tokens`` needs."""
    block_size = group.parameters[BLOCK_SIZE]
    num_blocks = 0
    for index in range(num_hit_tokens // block_size, num_tokens // block_size):
        num_blocks += serves(group, index, num_tokens)
    return num_blocks


@compiled
def take_to_load(
    pool: PoolArrays, group: GroupArrays, tokens: Int32Array, digests: Uint32Array, num_hit_tokens: int, out: Int32Array
) -> None:
    """Allocate the blocks after a hit that a hit of all tokens needs; the caller has checked that there are enough.

    Args:
        tokens: int32 ``[n]``, whole blocks.
        digests: uint32 ``[n // block_size, 8]``.
        out: int32 ``[blocks after the hit]``; receives their ids, null where the group needs none.
    """
    block_size = group.parameters[BLOCK_SIZE]
    first = num_hit_tokens // block_size
    for index in range(first, len(tokens) // block_size):
        out[index - first] = NULL_BLOCK
        if not serves(group, index, len(tokens)):
            continue
        block = acquire(pool)
        pool.records[block, QUEUE] = IN_USE
        for place in range(block_size):
            pool.tokens[block, place] = tokens[index * block_size + place]
        set_digest(pool, block, digests[index])
        if len(pool.parent_digests):
            set_parent(pool, block, digests[index - 1] if index else ROOT_WORDS)
        out[index - first] = block


@compiled
def unname_unfilled(pool: PoolArrays, group: GroupArrays, row: int, num_hit_tokens: int, num_tokens: int) -> None:
    """Remove the names of a row's blocks after its hit that computing position ``num_tokens`` does not read."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_needed_token(group.parameters[KIND], group.parameters[SPAN], num_tokens) // block_size
    for index in range(max(group.parameters[NUM_SINK_BLOCKS], num_hit_tokens // block_size), first):
        block = group.table[row, index]
        if block != NULL_BLOCK and pool.records[block, NAME]:
            drop_name(pool, block, CALLED_OFF)


@compiled
def publish_loaded(pool: PoolArrays, group: GroupArrays, parent: int, blocks: Int32Array) -> None:
    """Name blocks that were filled, up to the first gap in their chain.

    Args:
        parent: the block of the hit before them, or the null block.
        blocks: int32 ``[n]``, in order.
    """
    by_links = group.parameters[KIND] == FULL
    if by_links and parent != NULL_BLOCK and not pool.records[parent, NAME]:
        return
    for place in range(len(blocks)):
        block = blocks[place]
        if block == NULL_BLOCK:
            parent = NULL_BLOCK
            continue
        carrier = publish_block(pool, group, block, parent, pool.records[parent, LIFE])
        if not pool.records[carrier, NAME]:
            return
        if group.parameters[SHEDS] and carrier == block:
            pool.records[block, KEPT] = AT_END
        parent = carrier


def hold(state: SpaceState, ledger: StepLedger, pool: BlockPool, block_ids: npt.ArrayLike) -> Ticket:
    """Take one more reference to each block.

    Raises:
        BlockError: an id that is no block with content, or free blocks that floors keep; nothing was changed.
    """
    held = as_block_ids(pool, block_ids)
    _require_content(pool, held)
    _require_not_moved_into(ledger, pool, held)
    _require_floors(pool, held)
    with state.changing:
        claim_all(pool.arrays, held)
        return take_ticket(state, pool.name, held)


def release(state: SpaceState, ticket: Ticket) -> None:
    """Drop a ticket's references.

    Raises:
        BlockError: it is no ticket, or was released before; nothing was changed.
    """
    if not isinstance(ticket, Ticket):
        raise BlockError(f"release takes the ticket that hold returned, got {ticket!r}")
    if ticket not in state.held:
        raise BlockError(f"{ticket!r} holds no blocks of this space: it was released before, or is another space's")
    with state.changing:
        give_back(state, ticket)


def take_ticket(state: SpaceState, pool: str, held: Int32Array) -> Ticket:
    """Make a ticket for blocks of a pool; the references for it are taken already."""
    state.num_tickets += 1
    ticket = Ticket(state.num_tickets, pool)
    state.held[ticket] = held
    return ticket


def give_back(state: SpaceState, ticket: Ticket) -> None:
    """Drop the references of a ticket that was not released before."""
    held = state.held.pop(ticket)
    pool = state.pools[ticket.pool]
    release_all(pool.arrays, held)
    if state.shedding_groups:
        shed_dropped(state, pool, held)


def tickets_out(state: SpaceState) -> tuple[Ticket, ...]:
    """Return the tickets that callers have: all but those of loads, and of states inside chunks."""
    others = {ticket for loading in state.loads.values() for ticket in loading.tickets}
    if state.checkpoints is not None:
        others |= state.checkpoints.tickets
    return tuple(ticket for ticket in state.held if ticket not in others)


def num_held(state: SpaceState, pool: str) -> int:
    """Count the different blocks of a pool that tickets hold. O(blocks held)."""
    return len(set().union(*(held.tolist() for ticket, held in state.held.items() if ticket.pool == pool)))


def undefined_tickets(state: SpaceState, first_step: int, moved: dict[str, set[int]]) -> tuple[Ticket, ...]:
    """Return the tickets with a block that steps from ``first_step`` on were to compute, or with a moved block."""
    return tuple(
        ticket
        for ticket in tickets_out(state)
        if (state.pools[ticket.pool].arrays.records[state.held[ticket], PENDING_STEP] >= first_step).any()
        or not moved[ticket.pool].isdisjoint(state.held[ticket].tolist())
    )


def _require_not_moved_into(ledger: StepLedger, pool: BlockPool, held: Int32Array) -> None:
    """Refuse blocks that the open plan copies or swaps something into."""
    for block in held.tolist():
        if ledger.is_written(pool.name, [block]):
            raise BlockError(
                f"block {block} of pool {pool.name!r} gets its content by a copy or a swap of the open step: hold it "
                "once that step is planned"
            )


def as_block_ids(pool: BlockPool, block_ids: npt.ArrayLike) -> Int32Array:
    """Convert block ids to an array without repeats, in their order."""
    given = np.atleast_1d(as_array(block_ids, "block ids", BlockError))
    if given.size == 0:
        return NO_IDS
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise BlockError(f"block ids must be a flat array of integers, got {given.dtype} {list(given.shape)}")
    different = list(dict.fromkeys(given.tolist()))
    for block in different:
        if block == NULL_BLOCK:
            raise BlockError("block 0 is the null block, which has no content to be held: leave it out")
        if not 0 < block < pool.num_blocks:
            raise BlockError(f"block {block} is not one of the blocks 1..{pool.num_blocks - 1} of pool {pool.name!r}")
    return np.array(different, np.int32)


def _require_content(pool: BlockPool, held: Int32Array) -> None:
    """Refuse blocks without content, and blocks that no plan computes yet."""
    records, counts = pool.arrays.records, pool.arrays.counts
    is_empty = ((records[held, QUEUE] == FREE) & (records[held, NAME] == 0)) | (records[held, QUEUE] == ABSENT)
    if is_empty.any():
        block = int(held[is_empty.argmax()])
        what = "absent" if records[block, QUEUE] == ABSENT else "free"
        raise BlockError(f"block {block} of pool {pool.name!r} is {what} and has no content, so it cannot be held")
    is_planned = (records[held, QUEUE] != NEW) & (records[held, PENDING_STEP] != counts[OPEN_STEP])
    if not is_planned.all():
        block = int(held[is_planned.argmin()])
        raise BlockError(
            f"block {block} of pool {pool.name!r} gets its content in the open step: hold it once that step is planned"
        )


def _require_floors(pool: BlockPool, held: Int32Array) -> None:
    """Refuse free blocks without which less is free than floors keep; a block counts for the tenant charged for it."""
    tenants = pool.arrays.tenants
    free = held[pool.arrays.records[held, QUEUE] == FREE]
    if not len(tenants) or not len(free):
        return
    accounts = accounts_of(tenants, pool.num_blocks)
    taken = accounts[:, NUM_TAKEN] + np.bincount(tenants[free, CHARGED], minlength=len(accounts))
    num_kept = int(np.maximum(0, accounts[:, FLOOR] - taken).sum())
    if pool.num_free - len(free) < num_kept:
        raise BlockError(
            f"{len(free)} of these blocks are free, and of the {pool.num_free} free blocks of pool {pool.name!r} "
            f"floors of tenants keep {num_kept}: hold fewer, or blocks of rows that run"
        )
