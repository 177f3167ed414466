"""The third pass: longer hits, which end inside a state's interval, where a state was kept.

They end at boundaries of all other groups.
"""

from collections.abc import Iterator

from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.space.checkpoints import Checkpoints, keys_of_tail
from pagedkv.space.matching.endings import ending_at
from pagedkv.space.matching.known import Ending, Known, Lookup
from pagedkv.space.tails import Tail
from pagedkv.tables.checkpoints import find_tail

__all__ = ["ends_of_states", "longest_inside_intervals", "state_at"]


def longest_inside_intervals(known: Known, whole: Ending, checkpoints: Checkpoints) -> Ending:
    """Find the longest hit that ends with states kept inside intervals; the given one if none is longer."""
    ends = {
        end
        for group in known.state.state_groups
        for end in ends_of_states(known.lookups[group.index], whole.num_tokens, known.limit, checkpoints)
    }
    for end in sorted(ends, reverse=True):
        tails = [
            state_at(known, known.lookups[group.index], end)
            for group in known.state.state_groups
            if end % group.block_size
        ]
        longer = ending_at(known, end, tails)
        if longer is not None:
            return longer
    return whole


def ends_of_states(lookup: Lookup, length: int, most: int, checkpoints: Checkpoints) -> Iterator[int]:
    """Yield the ends, above ``length`` and up to ``most``, of states of a group that were kept inside intervals."""
    group = lookup.group
    num_known = min(lookup.num_known, most // group.block_size)
    for index in range(length // group.block_size, num_known + 1):
        for num_tokens in checkpoints.lengths(group.index, lookup.parent_of(index)):
            end = index * group.block_size + num_tokens
            if length < end <= most and end % checkpoints.alignment == 0:
                yield end


def state_at(known: Known, lookup: Lookup, end: int) -> Tail | None:
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
