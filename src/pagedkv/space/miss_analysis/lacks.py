"""The first pass: which group could not serve a hit of some length, and which block it lacks for it."""

from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.blocks.prefix_index import find
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.space.matching.chains import follow
from pagedkv.space.miss_analysis.case import Case, Lack, name_of
from pagedkv.space.miss_analysis.prompt_digests import digests_up_to
from pagedkv.space.prompts import NO_DIGESTS, extra_ids_of
from pagedkv.space.state import Group

__all__ = ["first_lack", "first_lack_of_chains"]


def first_lack(case: Case, length: int) -> Lack | None:
    """Find the first group that could not serve a hit of this length; None if each could, taken alone."""
    lack = first_lack_of_chains(case, length)
    return _first_lack_of_lookups(case, length) if lack is None else lack


def first_lack_of_chains(case: Case, length: int, before: Lack | None = None) -> Lack | None:
    """Find the group that ends a hit first, among those that keep whole prefixes; None if all reach this length.

    Args:
        case: the case; length: of the hit.
        before: the lack of a shorter hit, if any; its digests are reused.
    """
    chains = [(group, _chain(case, group, length)) for group in case.state.cached_groups if group.keeps_whole_prefix]
    if not chains:
        return None
    group, chain = min(chains, key=lambda each: len(each[1]) * each[0].block_size)
    place = len(chain)
    if place * group.block_size >= length:
        return None
    known = before.digests if before is not None and before.group.lane == group.lane else NO_DIGESTS
    parent = int(chain[-1]) if place else NULL_BLOCK
    return Lack(group, place, parent, digests_up_to(case, group, place + 1, known))


def _chain(case: Case, group: Group, length: int) -> Int32Array:
    """Follow the prompt through a group that keeps whole prefixes, for at most ``length`` tokens."""
    state = case.state
    if group is state.only_chain:
        return case.hit.block_ids[group.index]
    extra_ids = extra_ids_of(state, case.prompt, group.block_size, length // group.block_size)
    return follow(state, group, case.prompt, extra_ids, length).blocks


def _first_lack_of_lookups(case: Case, length: int) -> Lack | None:
    """Find the first group that drops blocks and lacks one for a hit of this length."""
    state, prompt = case.state, case.prompt
    by_lane: dict[int, Uint32Array] = {}
    for group in state.cached_groups:
        if group.keeps_whole_prefix:
            continue
        num_blocks = length // group.block_size
        if group.lane not in by_lane:
            by_lane[group.lane] = digests_up_to(case, group, num_blocks)
        digests, extra_ids = by_lane[group.lane], extra_ids_of(state, prompt, group.block_size, num_blocks)
        index = state.loops.missing_block(
            group.pool.arrays, group.arrays, prompt.tokens, extra_ids, digests, length, length
        )
        if index >= 0:
            return Lack(group, index, _parent(group, index, digests), digests)
    return None


def _parent(group: Group, index: int, digests: Uint32Array) -> int | None:
    """Find the block before a logical block; None if it is not cached, the null block before the first."""
    if index == 0:
        return NULL_BLOCK
    return find(group.pool.arrays, name_of(group), digests[index - 1]) or None
