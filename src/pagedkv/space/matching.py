"""Matching: how far a prompt is cached, in all groups at once. It changes nothing.

A hit is the longest prefix that every group with prefix caching can serve, without the prompt's last token. The passes
below run in this order, each on the result of the one before. Each is skipped if its feature is off::

    prompt -> chains -------> Known ----> boundaries ------> inside ----------> replays ----------> PrefixHit
              groups that     limit,      the longest        a longer one,      a longer one,
              keep whole      digests     that ends where    inside a state's   with windows that
              prefixes, by                blocks of all      interval, inside   are computed again
              their links                 groups end         blocks

An example with blocks of 4 tokens, a window of 8, and states that are kept every 8 tokens. All of the prompt was
cached once, and ``x`` marks what is gone since::

    position    0   4   8   12  16  20  24  28  32
    full        [##][##][##][##][##][##][##] x             chains       28 tokens: no hit is longer
    window        x   x [##][##][##]  x   x   x            boundaries   24 is the last end of blocks in all groups, and
    state       [######][######][######][######]                        would need the window's two blocks before it; so
    hit         |--------------|                                        16, which has them, and a state that ends there

The length of a hit is determined by a group that lacks a block for the next boundary:
:meth:`BlockSpace.explain <pagedkv.BlockSpace.explain>` names both. If only one group has prefix caching, and it keeps
whole prefixes, only the first pass is needed.

The first pass follows the blocks that a prompt hits in each group that keeps whole prefixes, from the start. A hit is
no longer than the shortest chain, so each chain is followed only as far as the one before it reaches.

The second pass finds the longest hit that ends where blocks of all groups end.

A bound is lowered for the first of these reasons that applies, until none does:

1. A group lacks a block that a hit of this length needs.
2. The open step computes some of the blocks that hit: these are *pending*. A row that hits them must compute them if
   the row that was to compute them leaves, so it must hold what that computation reads, and a group lacks that.
3. Some of the blocks that this computation reads are pending, too: computing begins earlier.
4. A block behind a pending one is *settled*. The computation would write it again, and if its step failed, the block
   would be undefined for all rows that hold it.

For reasons 2 and 4 the hit ends before all pending blocks. An example for reason 4, with blocks of 4 tokens and a
window of 4; ``~~`` is pending::

    position   0   4   8   12  16
    full       [##][##][~~][~~][~~]
    window       . [##][~~][~~][##]     computing 8 takes block 1, which is there; but block 4 is settled
    hit        |------|                 8 tokens

Hits are verified token by token. In a group that keeps its whole prefix, each block stores its latest successor, so a
long hit costs one comparison of tokens a block and no hashing; a digest is computed and looked up only where chains
branch. In a group that may have lost parts of a prefix (windows, chunks, recurrent states), the blocks that a hit
needs are looked up by digest, from the right end.
"""

from typing import NamedTuple

import numpy as np

from pagedkv.blocks.digests import ExtraKeyArrays, digest_block
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.blocks.record import (
    AHEAD,
    EXTRA,
    FIRST_WALK_FIELD,
    FREE,
    LAST_WALK_FIELD,
    LOOKAHEAD,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined, prefetch, unsigned
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import ConfigurationError
from pagedkv.space.hits import (
    NO_IDS,
    NOTHING,
    UNKNOWN_KEY,
    Chain,
    Chains,
    Ending,
    Known,
    Lookup,
    PrefixHit,
    Prompt,
    collect_servable,
    digests_of_prefix,
    extra_ids_of,
    holds_tokens,
    longest_servable,
)
from pagedkv.space.partial_hits import beginning_in_chain, longest_inside_blocks, tail_behind
from pagedkv.space.replaying import longest_with_replay
from pagedkv.space.rows import (
    BLOCK_SIZE,
    COVERED,
    HIT_ALIGNMENT,
    NAME_IN_POOL,
    ROOT,
    SHARES_IN_STEP,
    GroupArrays,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.states import ends_of_states, longest_inside_intervals, state_at
from pagedkv.space.steps import read_only


def match_prompt(state: SpaceState, prompt: Prompt, answer: PrefixHit | None = None) -> PrefixHit:
    """Find the longest prefix that every group can serve, at most ``n - 1`` tokens.

    Cost: one comparison of tokens a block in groups that keep whole prefixes.

    Args:
        state: of the space.
        prompt: what is to be allocated.
        answer: an earlier answer for this prompt, or for a longer one that it begins. It is returned if still valid.

    Raises:
        ConfigurationError, TokenError: the answer is for another prompt, other keys or another space.
    """
    if answer is not None:
        return _match_again(state, prompt, answer)
    if state.only_chain is not None:
        return _match_only_chain(state, state.only_chain, prompt)
    if not state.config.prefix_caching:
        none = len(state.groups)
        return PrefixHit(state, prompt, 0, (NO_BLOCKS,) * none, (0,) * none)
    return _match_groups(state, prompt)


def _match_only_chain(state: SpaceState, group: Group, prompt: Prompt) -> PrefixHit:
    """Match a prompt in the only group with prefix caching, which keeps whole prefixes."""
    most = prompt.num_hittable // group.block_size
    is_plain = prompt.keys is NO_KEYS and not state.weights.epoch  # the common case: this check takes 0.06 us, not 0.2
    extra_ids = NO_IDS if is_plain else extra_ids_of(state, prompt, group, most)
    found, pool, keys = np.empty(most, np.int32), group.pool.arrays, state.extra_keys.arrays
    num_hits, num_settled, num_free = state.loops[match_chain](
        pool, group.arrays, prompt.tokens, extra_ids, keys, prompt.digests, found
    )
    found.flags.writeable = False
    hits, num_tokens = found[:num_hits], num_hits * group.block_size
    if state.outsiders:
        hit = PrefixHit(state, prompt, num_tokens, *_beside_outsiders(state, group, hits, num_free))
    else:
        hit = PrefixHit(state, prompt, num_tokens, (hits,), (num_free,))
    hit.ends_chain_of = group
    if state.hits_inside and num_settled == num_hits:
        tail = tail_behind(state, group, prompt, hits)
        if tail is not None:
            hit.end_inside(num_tokens + tail.num_tokens, (tail,))
    return hit


def _beside_outsiders(
    state: SpaceState, group: Group, hits: Int32Array, num_free: int
) -> tuple[tuple[Int32Array, ...], tuple[int, ...]]:
    """Return the hit blocks of one group and how many are free, with empty entries for the other groups."""
    return (
        tuple(hits if other is group else NO_BLOCKS for other in state.groups),
        tuple(num_free if other is group else 0 for other in state.groups),
    )


def _match_groups(state: SpaceState, prompt: Prompt) -> PrefixHit:
    """Match a prompt where several groups must agree, or a group drops blocks."""
    if not any(group.keeps_whole_prefix for group in state.cached_groups):
        # Blocks before a window are gone, so a later check of the prompt has only this copy to compare with.
        prompt = prompt._replace(tokens=prompt.tokens.copy())
    extra_ids = _extra_ids_by_lane(state, prompt)
    chains = follow_all(state, prompt, extra_ids)
    known = find_known(state, prompt, extra_ids, chains)
    ending = longest_boundary(known)
    if state.checkpoints:
        ending = longest_inside_intervals(known, ending, state.checkpoints)
    if state.hits_inside:
        ending = longest_inside_blocks(known, ending)
    if state.replaying_groups and prompt.max_replay_tokens:
        ending = longest_with_replay(known, ending.num_tokens) or ending
    return _answer(known, ending)


def _extra_ids_by_lane(state: SpaceState, prompt: Prompt) -> list[Int32Array]:
    """Return for each lane the ids of the extra keys of the prompt's full blocks."""
    firsts = [lane[0] for lane in state.lanes]
    return [extra_ids_of(state, prompt, group, len(prompt.tokens) // group.block_size) for group in firsts]


def match_each(state: SpaceState, prompt: Prompt) -> tuple[int, ...]:
    """Return how many leading tokens each group could serve if no other had to; 0 outside prefix caching."""
    if not state.config.prefix_caching:
        return (0,) * len(state.groups)
    extra_ids = _extra_ids_by_lane(state, prompt)
    most = prompt.num_hittable
    longest = dict.fromkeys((group.index for group in state.groups), 0)
    for group in state.cached_groups:
        if group.keeps_whole_prefix:
            longest[group.index] = follow(state, group, prompt, extra_ids[group.lane], most).num_tokens
    known = find_known(state, prompt, extra_ids, {})
    for index, lookup in known.lookups.items():
        end = min(most, lookup.num_known * lookup.group.block_size)
        longest[index] = state.loops[longest_servable](*lookup.arguments, end, lookup.nothing_seen())
        if state.checkpoints and lookup.group in state.state_groups:
            ends = ends_of_states(lookup, longest[index], most, state.checkpoints)
            longest[index] = max([longest[index], *(end for end in ends if state_at(known, lookup, end))])
    return tuple(longest.values())


def _answer(known: Known, ending: Ending) -> PrefixHit:
    """Make the answer of a hit."""
    state = known.state
    block_ids = tuple(read_only(blocks) for blocks in ending.block_ids)
    count, by_group = state.loops[count_free], zip(state.groups, block_ids, strict=True)
    num_free = tuple(count(group.pool.arrays.records, blocks) for group, blocks in by_group)
    hit = PrefixHit(state, known.prompt, ending.num_tokens - ending.num_partial, block_ids, num_free)
    if ending.tails:
        hit.end_inside(ending.num_tokens, ending.tails)
    if ending.num_replayed:
        hit.num_replayed, hit.is_exact = ending.num_replayed, ending.is_exact
    elif len(known.chains) == 1:
        (chain,) = known.chains.values()
        hit.ends_chain_of = chain.group if chain.num_tokens == hit.num_tokens else None
    if state.shedding_groups:
        hit.junction = junction_of(known.chains)
    return hit


def _match_again(state: SpaceState, prompt: Prompt, answer: PrefixHit) -> PrefixHit:
    """Return an earlier answer if it is still valid, else match its prompt again, which may be longer than this one.

    If it is longer, this prompt is its first chunk, and the hit ends before the chunk's last token.
    """
    if not isinstance(answer, PrefixHit):
        raise ConfigurationError(f"match must be what BlockSpace.match returned, got {answer!r}")
    if answer.still_holds(state, prompt):
        return answer
    whole = match_prompt(state, answer.prompt)
    if whole.num_tokens + state.beyond_hits < len(prompt.tokens):
        return whole
    most = max(0, prompt.num_hittable - state.beyond_hits)
    hit = match_prompt(state, answer.prompt._replace(max_hit_tokens=most))
    hit.junction = whole.junction
    return hit


class Bound(NamedTuple):
    """An upper bound of the hit.

    Args:
        length: its tokens.
        compute_from: first position of it that the open step computes; ``length`` if it computes none.
    """

    length: int
    compute_from: int


def longest_boundary(known: Known) -> Ending:
    """Find the longest hit that ends at a boundary, and its blocks.

    The loop ends: each round but the last lowers the length.
    """
    length = known.aligned(known.limit)
    settled = [chain.num_settled * chain.group.block_size for chain in known.chains.values()]
    bound = Bound(length, min([length, *settled]))
    seen = {index: lookup.nothing_seen() for index, lookup in known.lookups.items()}
    while True:
        lower, block_ids = _lower(known, bound, seen)
        if lower == bound:
            return Ending(bound.length, block_ids)
        bound = lower


def _lower(known: Known, bound: Bound, seen: dict[int, Int32Array]) -> tuple[Bound, list[Int32Array]]:
    """Lower a bound for the first reason that applies; if none does, return it with the blocks of such a hit."""
    length, compute_from = bound
    served = _served_by_all(known, length, seen)
    if served < length:
        return Bound(served, min(served, compute_from)), []
    compute_from, block_ids = _collected(known, bound)
    settled = known.aligned(compute_from)
    if block_ids is None or (compute_from < length and _has_settled_behind(known, block_ids, compute_from)):
        return Bound(settled, settled), []
    return bound, block_ids


def _served_by_all(known: Known, length: int, seen: dict[int, Int32Array]) -> int:
    """Lower a length to what all groups that drop blocks can serve."""
    longest = known.state.loops[longest_servable]
    for index, lookup in known.lookups.items():
        num_known = lookup.num_known * lookup.group.block_size
        length = longest(*lookup.arguments, min(length, num_known), seen[index])
    return known.aligned(length)


def _collected(known: Known, bound: Bound) -> tuple[int, list[Int32Array] | None]:
    """Collect the blocks of a hit that all groups can serve, and return where computing it begins.

    Computing pending blocks reads others, which may be pending as well; so each pass over the groups may find that it
    begins earlier. Every block is looked up once. The blocks are None if a group lacks one that computing reads.
    """
    length, compute_from = bound
    block_ids, collect = known.chain_blocks(length), known.state.loops[collect_servable]
    collected = {}
    for index, (group, _) in known.lookups.items():
        num_blocks = length // group.block_size
        block_ids[index], collected[index] = np.zeros(num_blocks, np.int32), np.full(2, num_blocks, np.int32)
    while True:
        first_pending = compute_from
        for index, (group, arguments) in known.lookups.items():
            num_settled = collect(*arguments, length, compute_from, block_ids[index], collected[index])
            if num_settled < 0:
                return compute_from, None
            first_pending = min(first_pending, num_settled * group.block_size)
        if first_pending == compute_from:
            return compute_from, block_ids
        compute_from = first_pending


def _has_settled_behind(known: Known, block_ids: list[Int32Array], compute_from: int) -> bool:
    """Return whether a settled block of a hit lies behind the first position that is still to be computed."""
    open_step = known.state.open_step
    for group, held in zip(known.state.groups, block_ids, strict=True):
        behind = held[compute_from // group.block_size :]
        if (group.pool.arrays.records[behind[behind != NULL_BLOCK], PENDING_STEP] != open_step).any():
            return True
    return False


def follow_all(state: SpaceState, prompt: Prompt, extra_ids: list[Int32Array]) -> Chains:
    """Follow a prompt through all groups that keep whole prefixes.

    Args:
        state: the space; prompt: the prompt.
        extra_ids: for each lane, the ids of the extra keys of the prompt's blocks.
    """
    most = prompt.num_hittable
    chains: Chains = {}
    for group in state.cached_groups:
        if group.keeps_whole_prefix:
            chain = follow(state, group, prompt, extra_ids[group.lane], most)
            if state.hits_inside:
                behind = beginning_in_chain(state, group, prompt, chain.blocks, most)
                chain = chain._replace(behind=behind)
            chains[group.index] = chain
            most = chain.reach
    return chains


def follow(state: SpaceState, group: Group, prompt: Prompt, extra_ids: Int32Array, most: int) -> Chain:
    """Follow a prompt through one group for at most ``most`` tokens, as far as it determines names."""
    num_blocks = most // group.block_size
    if group.num_ahead:
        num_blocks = min(num_blocks, group.num_sealed(len(prompt.tokens)))
    found = np.empty(num_blocks, np.int32)
    pool, keys = group.pool.arrays, state.extra_keys.arrays
    num_hits, num_settled, _ = state.loops[match_chain](
        pool, group.arrays, prompt.tokens, extra_ids, keys, prompt.digests, found
    )
    return Chain(group, found[:num_hits], num_settled, num_hits < len(found), NOTHING)


def junction_of(chains: Chains) -> int:
    """Return the last end of hits in a chain that a prompt leaves and that has other continuations; 0 if none."""
    left = [chain for chain in chains.values() if chain.is_left]
    return _junction_behind(left[-1].group, left[-1].blocks) if left else 0


def _junction_behind(group: Group, blocks: Int32Array) -> int:
    """Return the last end of hits in a chain that a prompt leaves; 0 if the chain has no continuation."""
    if not len(blocks):
        return 0
    alignment = int(group.arrays.parameters[HIT_ALIGNMENT])
    pool, name, last = group.pool.arrays, int(group.arrays.parameters[NAME_IN_POOL]), int(blocks[-1])
    goes_on = is_child_of(pool, name, int(pool.records[last, SUCCESSOR]), last)
    return len(blocks) * group.block_size // alignment * alignment if goes_on else 0


def find_known(state: SpaceState, prompt: Prompt, extra_ids: list[Int32Array], chains: Chains) -> Known:
    """Return what is known after the chains have been followed.

    Args:
        state: the space; prompt: the prompt; chains: its chains in groups that keep whole prefixes.
        extra_ids: for each lane, the ids of the extra keys of the prompt's blocks.
    """
    alignment = int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT])
    limit = min([prompt.num_hittable, *(chain.reach for chain in chains.values())])
    digests: dict[int, Uint32Array] = {}
    lookups: dict[int, Lookup] = {}
    for group in state.cached_groups:
        if not group.keeps_whole_prefix:
            lane = group.lane
            if lane not in digests:
                digests[lane] = _digests_of_lane(state, prompt, lane, extra_ids[lane], chains, limit)
            arguments = group.pool.arrays, group.arrays, prompt.tokens, extra_ids[lane], digests[lane]
            lookups[group.index] = Lookup(group, arguments)
    return Known(state, prompt, alignment, limit, chains, lookups)


def _digests_of_lane(
    state: SpaceState, prompt: Prompt, lane: int, extra_ids: Int32Array, chains: Chains, limit: int
) -> Uint32Array:
    """Digests of a prompt's blocks below ``limit``, up to the first unknown extra key; read from a chain if any."""
    groups = state.lanes[lane]
    num_blocks = limit // groups[0].block_size
    for group in groups:
        if group.index in chains:
            num_blocks = min([num_blocks, *np.flatnonzero(extra_ids == UNKNOWN_KEY)[:1].tolist()])
            read_off: Uint32Array = group.pool.arrays.digests[chains[group.index].blocks[:num_blocks]]
            return read_off
    return digests_of_prefix(state, prompt, groups[0], num_blocks, extra_ids)


@inlined
def is_continuation(
    pool: PoolArrays, name: int, block: int, parent: int, tokens: Int32Array, start: int, covered: int, extra: int
) -> bool:
    """Whether a block is a child of ``parent`` and has the tokens of a prompt from ``start`` on, and its extra keys."""
    return (
        is_child_of(pool, name, block, parent)
        and pool.records[unsigned(block), EXTRA] == extra
        and holds_tokens(pool, block, tokens, start, covered)
    )


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS, Like.EXTRA_KEYS, Like.WORDS, Like.IDS)
@compiled
def match_chain(  # noqa: C901 - a walk is one loop
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    out: Int32Array,
) -> tuple[int, int, int]:
    """Follow a prompt through a group that keeps whole prefixes.

    Returns how many blocks hit, how many of these come before the first that the open step still computes, and how
    many of them are free.

    Args:
        digests: the prompt's digests if the caller supplied them, else empty.
        out: int32 ``[most blocks that may hit]``; receives the blocks that hit.
    """
    records, open_step = pool.records, pool.counts[OPEN_STEP]
    name, block_size = group.parameters[NAME_IN_POOL], group.parameters[BLOCK_SIZE]
    covered = group.parameters[COVERED]
    num_hits, num_settled, num_free, parent = 0, -1, 0, NULL_BLOCK
    for index in range(len(out)):
        start = index * block_size
        extra = extra_ids[index] if index < len(extra_ids) else 0
        if extra < 0:
            break
        block = int(records[unsigned(parent), SUCCESSOR])
        # Prefetch a block further down the chain, unless the chain is contiguous in memory.
        ahead = int(records[unsigned(block), AHEAD])
        if ahead != block + LOOKAHEAD and ahead > NULL_BLOCK:  # a spare block has no hint
            prefetch(records, ahead, FIRST_WALK_FIELD)  # 36 bytes, in one cache line or two
            prefetch(records, ahead, LAST_WALK_FIELD)
            prefetch(pool.tokens, ahead, 0)
        if not is_continuation(pool, name, block, parent, tokens, start, covered, extra):
            block = _find_child(pool, group, tokens, extra, extra_keys, digests, index, parent)
            if block == NULL_BLOCK:
                break
        if records[unsigned(block), PENDING_STEP] == open_step:
            if not group.parameters[SHARES_IN_STEP]:
                break
            if num_settled < 0:
                num_settled = index
        elif num_settled >= 0:
            break  # the row that takes over the pending blocks would compute this one again
        if records[unsigned(block), QUEUE] == FREE:
            num_free += 1
        out[index] = block
        num_hits = index + 1
        parent = block
    return num_hits, num_settled if num_settled >= 0 else num_hits, num_free


@compiled
def _find_child(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra: int,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    index: int,
    parent: int,
) -> int:
    """Look up the child of ``parent`` with the content of logical block ``index``; the null block if there is none."""
    name = group.parameters[NAME_IN_POOL]
    covered = group.parameters[COVERED]
    start = index * group.parameters[BLOCK_SIZE]
    if len(digests):
        block = find(pool, name, digests[index])
    else:
        above = group.parameters[ROOT:].view(np.uint32) if index == 0 else pool.digests[parent]
        digest_block(above, tokens[start : start + covered], extra_keys, extra, extra_keys.digest)
        block = find(pool, name, extra_keys.digest)
    if is_continuation(pool, name, block, parent, tokens, start, covered, extra):
        return block
    return NULL_BLOCK


@takes(Like.RECORDS, Like.IDS)
@compiled
def count_free(records: Int32Array, blocks: Int32Array) -> int:
    """Count the free ones among some blocks; null blocks do not count."""
    num_free = 0
    for block in blocks:
        if block != NULL_BLOCK and records[block, QUEUE] == FREE:
            num_free += 1
    return num_free
