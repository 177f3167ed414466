"""Hits that end inside a block: a pass of matching, which finds how many leading tokens of a cached block are shared.

A hit of whole blocks ends where a prompt leaves a cached chain, or at the last boundary before its own end. The next
block of that chain may still begin with the prompt's next tokens. Such a block is the *tail* of the hit: the plan
copies it into the block that the sequence writes next, and computing begins after the equal tokens::

    cached   [A0 A1 A2 A3][B0 B1 B2 B3][C0 C1 C2 C3]
    prompt    A0 A1 A2 A3  B0 B1 X  Y                     4 tokens hit in a whole block, 2 inside the next one
    row      [A0 A1 A2 A3][B0 B1 x  y ]                   its own block: a copy, of which 2 tokens count

No tail may be pending, since copies run before the open step's computation. Of the blocks that continue a chain at most
16 are compared, the latest first. A prompt that leaves a chain at a token where others left it equals all of their
blocks up to there, so any of these serves. In a group that drops blocks, each candidate costs a digest, in each of a
few rounds until all groups agree. So the cost of a prompt does not grow with the cache.

Nothing here changes any state: :mod:`pagedkv.space.admission` takes the tail and has it copied.
"""

from collections.abc import Iterator
from typing import Final

from pagedkv.blocks.digests import ROOT_WORDS, ExtraKeyArrays, digest_block
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import find, has_digest, is_child_of
from pagedkv.blocks.record import (
    EXTRA,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.blocks.siblings import OLDER
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.space.hits import (
    NOTHING,
    Beginning,
    Chain,
    Ending,
    Known,
    Lookup,
    Prompt,
    Tail,
    ending_at,
    longest_servable,
    missing_block,
)
from pagedkv.space.rows import BLOCK_SIZE, NAME_IN_POOL, GroupArrays
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.states import ends_of_states, keys_of_tail, state_at

MOST_ROUNDS: Final = 8  # most rounds for groups to agree on a hit inside blocks; bounds the cost of a match


def longest_inside_blocks(known: Known, ending: Ending) -> Ending:
    """Let a hit end inside blocks of all groups, where that saves ``min_partial_hit`` tokens; else return the given."""
    longer = _longest(known, ending)
    if longer is ending:
        return ending  # at a sequence's end it lies inside blocks already
    if (checkpoints := known.state.checkpoints) is not None:
        return longer._replace(num_partial=longer.num_tokens % checkpoints.alignment)
    return longer._replace(num_partial=longer.num_tokens - ending.num_tokens + ending.num_partial)


def _longest(known: Known, whole: Ending) -> Ending:
    """Find the longest hit that ends inside blocks; the given one if none saves ``min_partial_hit`` tokens."""
    least = whole.num_tokens + known.state.config.min_partial_hit
    most = known.limit  # a state may be kept where blocks of no group end, far behind the last common boundary
    if not known.state.state_groups:
        most = min(most, whole.num_tokens + known.alignment - 1)
    if most < least:
        return whole
    for _ in range(MOST_ROUNDS):
        end = most
        for lookup in known.lookups.values():
            end = _reach(known, lookup, whole.num_tokens, end)
        if end < least:
            return whole
        if end == most:
            tails = [_tail(known, group, end) for group in known.state.cached_groups if end % group.block_size]
            return ending_at(known, end, tails) or whole
        most = end
    return whole


def _reach(known: Known, lookup: Lookup, whole: int, most: int) -> int:
    """Lower a length, longer than ``whole``, to what a group that drops blocks can serve at most."""
    state, (group, arguments) = known.state, lookup
    block_size = group.block_size
    if group in state.state_groups:
        most_known = min(most, lookup.num_known * block_size)
        at_boundary = state.loops[longest_servable](*arguments, most_known, lookup.nothing_seen())
        tails = ends_of_states(lookup, whole, most, state.checkpoints) if state.checkpoints else ()
        return max([at_boundary, *(end for end in tails if state_at(known, lookup, end))])
    most = min(most, (lookup.num_known + 1) * block_size - 1)
    missing = state.loops[missing_block](*arguments, most, most)
    if missing >= 0:
        return missing * block_size
    boundary = most // block_size * block_size
    return boundary + _beginning(known, lookup, most).num_tokens if most > boundary else most


def _tail(known: Known, group: Group, end: int) -> Tail | None:
    """Find the tail of a hit of ``end`` tokens in a group, inside an interval or a block."""
    chain = known.chains.get(group.index)
    if chain is not None:
        return tail_in_chain(group, chain.blocks, chain.behind, end)
    lookup = known.lookups[group.index]
    if group in known.state.state_groups:
        return state_at(known, lookup, end)
    index, num_tokens = divmod(end, group.block_size)
    behind = _beginning(known, lookup, end)
    if behind.num_tokens < num_tokens:
        return None
    return Tail(group.index, behind.block, index, lookup.parent_of(index).copy(), num_tokens)


def _beginning(known: Known, lookup: Lookup, end: int) -> Beginning:
    """Find the block that begins with a prompt's next tokens up to ``end``, in a group that drops blocks."""
    group, index = lookup.group, end // lookup.group.block_size
    chains = [chain for chain in known.chains.values() if chain.group.lane == group.lane]
    same = next((digest for chain in chains if (digest := _digest_in(chain, index)) is not None), None)
    parent = lookup.parent_of(index)
    return beginning_behind(known.state, group, known.prompt, parent, same, end)


def _digest_in(chain: Chain, index: int) -> Uint32Array | None:
    """Digest of the block that is, or begins as, logical block ``index`` of a chain; None without such a block."""
    block = block_of(chain.blocks, chain.behind, index)
    if block == NULL_BLOCK:
        return None
    digest: Uint32Array = chain.group.pool.arrays.digests[block]
    return digest


def beginning_in_chain(state: SpaceState, group: Group, prompt: Prompt, chain: Int32Array, limit: int) -> Beginning:
    """Find the block that continues a prompt's chain in a group that keeps whole prefixes, up to position ``limit``."""
    start = len(chain) * group.block_size
    parent = int(chain[-1]) if len(chain) else NULL_BLOCK
    found = [
        Beginning(
            *state.loops[begins_as_child](group.pool.arrays, group.arrays, parent, prompt.tokens, start, stop, extra)
        )
        for extra, stop in _keys_behind(state, prompt, group, start, limit)
    ]
    return max(found, key=lambda beginning: beginning.num_tokens, default=NOTHING)


def tail_behind(state: SpaceState, group: Group, prompt: Prompt, chain: Int32Array) -> Tail | None:
    """Find the tail of a hit behind the only chain of a space; None if too few of its tokens hit."""
    behind = beginning_in_chain(state, group, prompt, chain, prompt.num_hittable)
    if behind.num_tokens < state.config.min_partial_hit:
        return None
    return tail_in_chain(group, chain, behind, len(chain) * group.block_size + behind.num_tokens)


def block_of(chain: Int32Array, behind: Beginning, index: int) -> int:
    """Return the block that is, or begins as, logical block ``index`` of a prompt in a group of whole prefixes."""
    if index < len(chain):
        return int(chain[index])
    return behind.block if index == len(chain) else NULL_BLOCK


def beginning_behind(
    state: SpaceState,
    group: Group,
    prompt: Prompt,
    parent: Uint32Array,
    digest: Uint32Array | None,
    limit: int,
) -> Beginning:
    """Find the block that begins with a prompt's next tokens up to ``limit``, in a group that drops blocks.

    Args:
        parent: uint32 ``[8]``, digest of what comes before that block.
        digest: digest of the block found in another group, if any.
    """
    pool, name = group.pool.arrays, group.index + 1
    start = limit // group.block_size * group.block_size
    above = find(pool, name, parent) if start else NULL_BLOCK
    same = find(pool, name, digest) if digest is not None else NULL_BLOCK
    keys, begins = state.extra_keys.arrays, state.loops[begins_behind]
    found = [
        Beginning(*begins(pool, group.arrays, above, same, parent, prompt.tokens, start, stop, keys, extra))
        for extra, stop in _keys_behind(state, prompt, group, start, limit)
    ]
    return max(found, key=lambda beginning: beginning.num_tokens, default=NOTHING)


def _keys_behind(state: SpaceState, prompt: Prompt, group: Group, start: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the extra keys with which a block at ``start`` may serve a prompt in part, and up to which position.

    With the keys of the prompt's own block it serves up to any position. With the keys of the media that begin before
    another medium begins in the block, it serves up to there.
    """
    end = start + group.block_size
    most = min(limit, end - 1)
    if not prompt.has_extra_keys(state.weights.identity):
        if start < most:
            yield 0, most
        return
    begun = min((span.start for span in prompt.keys.media if start < span.start < end), default=end)
    for until, stop in {(end, most), (begun, min(most, begun))}:
        encoding = keys_of_tail(prompt.keys, state.weights.identity, start, until)
        extra = state.extra_keys.id_of(encoding) if encoding else 0
        if extra is not None and start < stop:
            yield extra, stop


def tail_in_chain(group: Group, chain: Int32Array, behind: Beginning, end: int) -> Tail | None:
    """Return the tail of a hit of ``end`` tokens in a group that keeps whole prefixes; None if there is none."""
    index, num_tokens = divmod(end, group.block_size)
    if not num_tokens:
        return None
    block = block_of(chain, behind, index)
    if block == NULL_BLOCK:
        return None
    parent = group.pool.arrays.digests[chain[index - 1]] if index else ROOT_WORDS
    return Tail(group.index, block, index, parent.copy(), num_tokens)


MOST_CHILDREN: Final = 16  # children of a block that are compared, beginning with the one named last


@inlined
def is_source(pool: PoolArrays, group: GroupArrays, block: int, extra: int) -> bool:
    """Whether a block can be copied: it has a name in this group, these extra keys, and content.

    A block that the open plan computes has no content yet: it is written after the copies of that plan.
    """
    record = pool.records[block]
    return bool(
        record[NAME] == group.parameters[NAME_IN_POOL]
        and record[EXTRA] == extra
        and record[PENDING_STEP] != pool.counts[OPEN_STEP]
    )


@compiled
def count_equal(pool: PoolArrays, block: int, tokens: Int32Array, start: int, stop: int) -> int:
    """Count the leading tokens of a block that equal those of a prompt at ``[start, stop)``."""
    num_equal = 0
    while start + num_equal < stop and pool.tokens[block, num_equal] == tokens[start + num_equal]:
        num_equal += 1
    return num_equal


@takes(Like.POOL, Like.GROUP, Like.NUMBER, Like.IDS, Like.NUMBER, Like.NUMBER, Like.NUMBER)
@compiled
def begins_as_child(
    pool: PoolArrays, group: GroupArrays, parent: int, tokens: Int32Array, start: int, stop: int, extra: int
) -> tuple[int, int]:
    """Find the best source among the children of the verified block ``parent``, in a group that keeps whole prefixes.

    Returns the block, and the number of its leading tokens that equal a prompt's at ``[start, stop)``; 0 if none does.
    """
    best, num_tokens = NULL_BLOCK, 0
    child = int(pool.records[parent, SUCCESSOR])
    for _ in range(MOST_CHILDREN):
        if child == NULL_BLOCK or num_tokens == stop - start:
            break
        if is_child_of(pool, group.parameters[NAME_IN_POOL], child, parent) and is_source(pool, group, child, extra):
            num_equal = count_equal(pool, child, tokens, start, stop)
            if num_equal > num_tokens:
                best, num_tokens = child, num_equal
        child = int(pool.siblings[child, OLDER])
    return best, num_tokens


@takes(
    Like.POOL,
    Like.GROUP,
    Like.NUMBER,
    Like.NUMBER,
    Like.WORD_LIST,
    Like.IDS,
    Like.NUMBER,
    Like.NUMBER,
    Like.EXTRA_KEYS,
    Like.NUMBER,
)
@compiled
def begins_behind(
    pool: PoolArrays,
    group: GroupArrays,
    above: int,
    block: int,
    parent: Uint32Array,
    tokens: Int32Array,
    start: int,
    stop: int,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> tuple[int, int]:
    """Find the best block to copy after the digest ``parent``, in a group that may have lost the prefix.

    The candidates are ``block``, which another group has, and the children of ``above`` in this group; both may be
    null. Their digests are computed anew from ``parent``: with its prefix gone, a candidate may follow anything.
    """
    best, num_tokens = NULL_BLOCK, 0
    child = int(pool.records[above, SUCCESSOR]) if above != NULL_BLOCK or start == 0 else NULL_BLOCK
    candidate = block
    for _ in range(MOST_CHILDREN + 1):
        if candidate != NULL_BLOCK and is_source(pool, group, candidate, extra):
            num_equal = count_equal(pool, candidate, tokens, start, stop)
            if num_equal > num_tokens and follows(pool, group, candidate, parent, extra_keys, extra):
                best, num_tokens = candidate, num_equal
        if child == NULL_BLOCK or num_tokens == stop - start:
            break
        candidate = child
        child = int(pool.siblings[child, OLDER])
    return best, num_tokens


@compiled
def follows(
    pool: PoolArrays, group: GroupArrays, block: int, parent: Uint32Array, extra_keys: ExtraKeyArrays, extra: int
) -> bool:
    """Whether a full block's digest is that of its tokens after a parent's digest."""
    digest_block(parent, pool.tokens[block, : group.parameters[BLOCK_SIZE]], extra_keys, extra, extra_keys.digest)
    return has_digest(pool, block, extra_keys.digest)
