"""The third and fourth pass: longer hits, which end inside a state's interval, or inside blocks.

The block inside which such a hit ends is a *tail*: the row continues from a copy of it. No tail may be pending, since
copies run before the open step's computation.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.pool.blocks import NULL_BLOCK, PENDING_STEP
from pagedkv.memory.space.checkpoints import keys_of_tail
from pagedkv.memory.space.matching.chains import Chain
from pagedkv.memory.space.matching.known import Ending, Known, Lookup
from pagedkv.memory.space.partial_hits import Beginning, beginning_behind, block_of, tail_in_chain
from pagedkv.memory.space.state import Group
from pagedkv.memory.space.tails import Tail
from pagedkv.memory.tables.checkpoints import find_tail

__all__ = ["longest_inside_blocks", "longest_inside_intervals"]

MOST_ROUNDS: Final = 8  # most rounds for groups to agree on a hit inside blocks; bounds the cost of a match


def longest_inside_intervals(known: Known, whole: Ending) -> Ending:
    """Find the longest hit that ends with states kept inside intervals; the given one if none is longer."""
    ends = {
        end
        for group in known.state.state_groups
        for end in _ends_of_states(known, known.lookups[group.index], whole.num_tokens, known.limit)
    }
    for end in sorted(ends, reverse=True):
        longer = _ending_at(known, end)
        if longer is not None:
            return longer
    return whole


def longest_inside_blocks(known: Known, whole: Ending) -> Ending:
    """Find the longest hit that ends inside blocks; the given one if none saves ``min_partial_hit`` tokens."""
    least = whole.num_tokens + known.state.config.min_partial_hit
    most = min(known.limit, whole.num_tokens + known.alignment - 1)
    if most < least:
        return whole
    for _ in range(MOST_ROUNDS):
        end = _lower(known, whole.num_tokens, most)
        if end < least:
            return whole
        if end == most:
            return _ending_at(known, end) or whole
        most = end
    return whole


def _lower(known: Known, whole: int, most: int) -> int:
    """Lower a length, longer than ``whole``, to what each group that drops blocks can serve."""
    for lookup in known.lookups.values():
        most = _reach(known, lookup, whole, most)
    return most


def _reach(known: Known, lookup: Lookup, whole: int, most: int) -> int:
    """Return an upper bound of the hit for a group that drops blocks; a shorter hit needs other blocks."""
    group, arguments = lookup
    block_size = group.block_size
    if group in known.state.state_groups:
        at_boundary = known.state.loops.longest_servable(*arguments, min(most, lookup.num_known * block_size))
        tails = _ends_of_states(known, lookup, whole, most)
        return max([at_boundary, *(end for end in tails if _state_at(known, lookup, end))])
    most = min(most, (lookup.num_known + 1) * block_size - 1)
    missing = known.state.loops.missing_block(*arguments, most, most)
    if missing >= 0:
        return missing * block_size
    boundary = most // block_size * block_size
    return boundary + _beginning(known, lookup, most).num_tokens if most > boundary else most


# A hit of a given length


def _ending_at(known: Known, end: int) -> Ending | None:
    """Collect the blocks and tails of a hit of ``end`` tokens; None if a group lacks any, or any is pending."""
    tails = [_tail(known, group, end) for group in known.state.cached_groups if end % group.block_size]
    block_ids = _blocks_up_to(known, end)
    found = [tail for tail in tails if tail is not None]
    if len(found) < len(tails) or block_ids is None or _is_any_pending(known, block_ids, found):
        return None
    return Ending(end, block_ids, tuple(found))


def _blocks_up_to(known: Known, end: int) -> list[Int32Array] | None:
    """Collect the whole blocks of a hit of ``end`` tokens; None if a group lacks any."""
    block_ids, loops = known.chain_blocks(end), known.state.loops
    for index, lookup in known.lookups.items():
        group, arguments = lookup
        block_ids[index] = np.zeros(end // group.block_size, np.int32)
        if end % group.block_size and group in known.state.state_groups:
            continue  # a state inside an interval stands for all before it
        if lookup.num_known < end // group.block_size or loops.missing_block(*arguments, end, end) >= 0:
            return None
        loops.collect_servable(*arguments, end, end, block_ids[index])
    return block_ids


def _is_any_pending(known: Known, block_ids: list[Int32Array], tails: list[Tail]) -> bool:
    """Return whether the open step computes any of these blocks."""
    for group, held in zip(known.state.groups, block_ids, strict=True):
        mine = [*held[held != NULL_BLOCK].tolist(), *(tail.block for tail in tails if tail.group == group.index)]
        if (group.pool.arrays.records[mine, PENDING_STEP] == known.state.open_step).any():
            return True
    return False


def _tail(known: Known, group: Group, end: int) -> Tail | None:
    """Find the tail of a hit of ``end`` tokens in a group, inside an interval or a block."""
    chain = known.chains.get(group.index)
    if chain is not None:
        return tail_in_chain(group, chain.blocks, chain.behind, end)
    lookup = known.lookups[group.index]
    if group in known.state.state_groups:
        return _state_at(known, lookup, end)
    index, num_tokens = divmod(end, group.block_size)
    behind = _beginning(known, lookup, end)
    if behind.num_tokens < num_tokens:
        return None
    return Tail(group.index, behind.block, index, lookup.parent_of(index).copy(), num_tokens)


# Content inside intervals and blocks


def _ends_of_states(known: Known, lookup: Lookup, length: int, most: int) -> Iterator[int]:
    """Yield the ends, above ``length`` and up to ``most``, of states of a group that were kept inside intervals."""
    checkpoints, (group, _) = known.state.checkpoints, lookup
    assert checkpoints is not None
    num_known = min(lookup.num_known, most // group.block_size)
    for index in range(length // group.block_size, num_known + 1):
        for num_tokens in checkpoints.lengths(group.index, lookup.parent_of(index)):
            end = index * group.block_size + num_tokens
            if length < end <= most and end % checkpoints.alignment == 0:
                yield end


def _state_at(known: Known, lookup: Lookup, end: int) -> Tail | None:
    """Find a group's state behind the prompt's first ``end`` tokens, which end inside an interval."""
    state, prompt, (group, _) = known.state, known.prompt, lookup
    index = end // group.block_size
    start = index * group.block_size
    extra = _extra_of_tail(known, start, end)
    if lookup.num_known < index or extra is None:
        return None
    parent, keys = lookup.parent_of(index), state.extra_keys.arrays
    block = find_tail(group.pool.arrays, group.arrays, parent, prompt.tokens[start:end], keys, extra)
    return Tail(group.index, int(block), index, parent.copy(), end - start) if block != NULL_BLOCK else None


def _extra_of_tail(known: Known, start: int, end: int) -> int | None:
    """Id of the extra keys of the prompt's positions ``[start, end)``; None if no block carries them."""
    prompt, epoch = known.prompt, known.state.identity_epoch
    if not prompt.has_extra_keys(epoch):
        return 0
    return known.state.extra_keys.id_of(keys_of_tail(prompt.keys, epoch, start, end))


def _beginning(known: Known, lookup: Lookup, end: int) -> Beginning:
    """Find the block that begins with a prompt's next tokens up to ``end``, in a group that drops blocks."""
    group, index = lookup.group, end // lookup.group.block_size
    chains = [chain for chain in known.chains.values() if chain.group.lane == group.lane]
    same = next((digest for chain in chains if (digest := _digest_in(chain, index)) is not None), None)
    return beginning_behind(known.state, group, known.prompt, lookup.parent_of(index), same, end)


def _digest_in(chain: Chain, index: int) -> Uint32Array | None:
    """Digest of the block that is, or begins as, logical block ``index`` of a chain; None without such a block."""
    block = block_of(chain.blocks, chain.behind, index)
    if block == NULL_BLOCK:
        return None
    digest: Uint32Array = chain.group.pool.arrays.digests[block]
    return digest
