"""The fourth pass: longer hits, which end inside blocks.

The block inside which a hit ends is a *tail*: the row continues from a copy of it. No tail may be pending, since copies
run before the open step's computation.
"""

from typing import Final

from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.contract.arrays import Uint32Array
from pagedkv.space.checkpoints import Checkpoints
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.matching.chains import Beginning, Chain
from pagedkv.space.matching.endings import ending_at
from pagedkv.space.matching.intervals import ends_of_states, state_at
from pagedkv.space.matching.known import Ending, Known, Lookup
from pagedkv.space.partial_hits import (
    PartialLoops,
    beginning_behind,
    beginning_in_chain,
    block_of,
    tail_behind,
    tail_in_chain,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.tails import Tail

__all__ = ["PartialHitFeature"]

MOST_ROUNDS: Final = 8  # most rounds for groups to agree on a hit inside blocks; bounds the cost of a match


class PartialHitFeature(SpaceFeature):
    """The part of matching that lets hits end inside blocks, where that saves enough tokens."""

    def __init__(self, state: SpaceState, checkpoints: Checkpoints | None) -> None:
        """Use the state of a space, and the states that it keeps inside intervals, if any. O(1)."""
        self._state = state
        self._checkpoints = checkpoints
        first = state.groups[0]
        self._loops = PartialLoops(first.pool.arrays, first.arrays, state.extra_keys.arrays)

    def followed(self, prompt: Prompt, chain: Chain, most: int) -> Chain:
        """Find the block that begins with the prompt's next tokens."""
        behind = beginning_in_chain(self._state, self._loops, chain.group, prompt, chain.blocks, most)
        return chain._replace(behind=behind)

    def matched(self, hit: PrefixHit, group: Group) -> None:
        """Let the hit end inside the block behind its chain."""
        tail = tail_behind(self._state, self._loops, group, hit.prompt, hit.block_ids[group.index])
        if tail is not None:
            hit.end_inside(hit.num_tokens + tail.num_tokens, (tail,))

    def lengthened(self, known: Known, ending: Ending) -> Ending:
        """Let the hit end inside blocks of all groups."""
        longer = self._longest(known, ending)
        return longer._replace(num_partial=longer.num_tokens - ending.num_tokens)

    def _longest(self, known: Known, whole: Ending) -> Ending:
        """Find the longest hit that ends inside blocks; the given one if none saves ``min_partial_hit`` tokens."""
        least = whole.num_tokens + known.state.config.min_partial_hit
        most = min(known.limit, whole.num_tokens + known.alignment - 1)
        if most < least:
            return whole
        for _ in range(MOST_ROUNDS):
            end = most
            for lookup in known.lookups.values():
                end = self._reach(known, lookup, whole.num_tokens, end)
            if end < least:
                return whole
            if end == most:
                tails = [self._tail(known, group, end) for group in known.state.cached_groups if end % group.block_size]
                return ending_at(known, end, tails) or whole
            most = end
        return whole

    def _reach(self, known: Known, lookup: Lookup, whole: int, most: int) -> int:
        """Lower a length, longer than ``whole``, to what a group that drops blocks can serve at most."""
        group, arguments = lookup
        block_size = group.block_size
        if group in known.state.state_groups:
            most_known = min(most, lookup.num_known * block_size)
            at_boundary = known.state.loops.longest_servable(*arguments, most_known, lookup.nothing_seen())
            tails = ends_of_states(lookup, whole, most, self._checkpoints) if self._checkpoints else ()
            return max([at_boundary, *(end for end in tails if state_at(known, lookup, end))])
        most = min(most, (lookup.num_known + 1) * block_size - 1)
        missing = known.state.loops.missing_block(*arguments, most, most)
        if missing >= 0:
            return missing * block_size
        boundary = most // block_size * block_size
        return boundary + self._beginning(known, lookup, most).num_tokens if most > boundary else most

    def _tail(self, known: Known, group: Group, end: int) -> Tail | None:
        """Find the tail of a hit of ``end`` tokens in a group, inside an interval or a block."""
        chain = known.chains.get(group.index)
        if chain is not None:
            return tail_in_chain(group, chain.blocks, chain.behind, end)
        lookup = known.lookups[group.index]
        if group in known.state.state_groups:
            return state_at(known, lookup, end)
        index, num_tokens = divmod(end, group.block_size)
        behind = self._beginning(known, lookup, end)
        if behind.num_tokens < num_tokens:
            return None
        return Tail(group.index, behind.block, index, lookup.parent_of(index).copy(), num_tokens)

    def _beginning(self, known: Known, lookup: Lookup, end: int) -> Beginning:
        """Find the block that begins with a prompt's next tokens up to ``end``, in a group that drops blocks."""
        group, index = lookup.group, end // lookup.group.block_size
        chains = [chain for chain in known.chains.values() if chain.group.lane == group.lane]
        same = next((digest for chain in chains if (digest := _digest_in(chain, index)) is not None), None)
        parent = lookup.parent_of(index)
        return beginning_behind(known.state, self._loops, group, known.prompt, parent, same, end)


def _digest_in(chain: Chain, index: int) -> Uint32Array | None:
    """Digest of the block that is, or begins as, logical block ``index`` of a chain; None without such a block."""
    block = block_of(chain.blocks, chain.behind, index)
    if block == NULL_BLOCK:
        return None
    digest: Uint32Array = chain.group.pool.arrays.digests[block]
    return digest
