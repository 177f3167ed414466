"""Loads: prefixes with KV that comes from elsewhere, such as another tier or another machine.

A load is no step and takes no row. It holds the blocks of its prefix, including the hit before them. It may be
finished, in whole or in part, or fail, in any order and independent of the steps::

    load ------------------------------> finish_load(load)           published: the next prompt hits it
      |   blocks reserved, to be filled      |                       not loaded: freed without content
      |   a match shows where a load begins  finish_load(load, 0)    it failed

Before that nothing of a load is hit, since its blocks are not in the prefix index. If one step both brings content and
computes on top of it, one call suffices: ``allocate(prompt, num_external_tokens=n)``.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.block_keys import keys_of_blocks
from pagedkv.blocks.blocks import NULL_BLOCK, PENDING_STEP
from pagedkv.blocks.holding import claim_all
from pagedkv.contract.answers import Allocation, Load, Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import BlockError, ConfigurationError, TokenError
from pagedkv.space.admission import Admission, allocate, allocate_prompt, make_fit
from pagedkv.space.declaring import declare
from pagedkv.space.growing import as_growth, extend, require_growth
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.holding import give_back, take_ticket
from pagedkv.space.matching import match_prompt
from pagedkv.space.prompts import digests_of_prefix
from pagedkv.space.publishing import tag
from pagedkv.space.state import Loading, SpaceState
from pagedkv.space.steps import StepLedger, read_only
from pagedkv.tables.loading import count_to_load, publish_loaded, take_to_load, unname_unfilled
from pagedkv.tables.rows import HIT_ALIGNMENT

__all__ = ["allocate_loaded", "finish_load", "freeze_loads", "load", "load_that_continues"]

NO_BLOCKS: Final = np.zeros(0, np.int32)


def load(  # noqa: PLR0913, PLR0917 - a load, its arguments checked
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
    state.is_changing = True
    for feature in state.features:
        feature.taking(tenant)
        for group, blocks in zip(state.groups, hit.block_ids, strict=True):
            feature.reviving(group.pool, blocks)
    for group, blocks in zip(state.groups, hit.block_ids, strict=True):
        claim_all(group.pool.arrays, blocks[blocks != NULL_BLOCK])
    answer = _take(state, ledger, prompt._replace(tokens=prompt.tokens[:num_whole].copy()), hit)
    for feature in state.features:
        feature.taken(tenant)
        feature.load_begun(answer, hit, epochs)
    for observer in state.observers.load_begun:
        observer.load_begun(answer, hit)
    state.is_changing = False
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
            prompt.keys, state.identity_epoch, lane[0].block_size, 0, len(prompt.tokens) // lane[0].block_size
        )
        for lane in state.lanes
    ]
    state.extra_keys.intern_all([encoding for by_block in encodings for encoding in by_block.values()])
    digests = [
        digests_of_prefix(state, prompt, lane[0].block_size, len(prompt.tokens) // lane[0].block_size)
        for lane in state.lanes
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
    state.is_changing = True
    loading = state.loads.pop(answer)
    if not loading.is_frozen:
        for group, blocks, parent in zip(state.groups, answer.block_ids, loading.parents, strict=True):
            first = answer.num_hit_tokens // group.block_size
            filled = blocks[: max(0, loaded // group.block_size - first)]
            if not group.stays_out:
                publish_loaded(group.pool.arrays, group.arrays, parent, filled)
    for ticket in loading.tickets:
        give_back(state, ticket)
    for observer in state.observers.load_ended:
        observer.load_ended(answer)
    state.is_changing = False


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
    digest = digests_of_prefix(state, prompt, lane.block_size, index + 1)[index:]
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
    shortage = make_fit(state, admission, hit)
    if shortage is not None:
        return shortage
    brought, rest = prompt.tokens[:num_external], prompt.tokens[num_external:]
    num_digests = num_external // state.cached_groups[0].block_size
    beginning = prompt._replace(tokens=brought, digests=prompt.digests[:num_digests])
    reserve = len(rest) + admission.num_lookahead
    state.is_changing = True
    state.version += 1
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
    allocation = Allocation(row, hit.num_tokens, state.checkpoint_of(admission.prompt_length, hit.num_tokens))
    state.is_changing = False
    return allocation
