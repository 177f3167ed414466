"""Matching a prompt: the passes in their order, and the answer made from their results.

If only one group has prefix caching, and it keeps whole prefixes, one walk of the first pass gives the whole answer.
"""

from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import ConfigurationError
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.matching.boundaries import longest_boundary
from pagedkv.space.matching.chains import follow_all, junction_of
from pagedkv.space.matching.known import Ending, Known, find_known
from pagedkv.space.prompts import NO_IDS, extra_ids_of
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import read_only

__all__ = ["match_prompt"]

NO_BLOCKS: Final = read_only(np.zeros(0, np.int32))
"""The hit blocks of a group without any; read-only as all hit blocks are, which spares loops a second set of types."""


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
    is_plain = prompt.keys is NO_KEYS and not state.weights_epoch  # the common case: this check takes 0.06 us, not 0.2
    extra_ids = NO_IDS if is_plain else extra_ids_of(state, prompt, group.block_size, most)
    found, pool, keys = np.empty(most, np.int32), group.pool.arrays, state.extra_keys.arrays
    num_hits, num_settled, num_free = state.loops.match_chain(
        pool, group.arrays, prompt.tokens, extra_ids, keys, prompt.digests, found
    )
    found.flags.writeable = False
    hits, num_tokens = found[:num_hits], num_hits * group.block_size
    if state.outsiders:
        hit = PrefixHit(state, prompt, num_tokens, *_beside_outsiders(state, group, hits, num_free))
    else:
        hit = PrefixHit(state, prompt, num_tokens, (hits,), (num_free,))
    hit.ends_chain_of = group
    for feature in state.features if num_settled == num_hits else ():
        feature.matched(hit, group)
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
    sizes = [lane[0].block_size for lane in state.lanes]
    extra_ids = [extra_ids_of(state, prompt, size, len(prompt.tokens) // size) for size in sizes]
    chains = follow_all(state, prompt, extra_ids)
    known = find_known(state, prompt, extra_ids, chains)
    ending = longest_boundary(known)
    for feature in state.features:
        ending = feature.lengthened(known, ending)
    return _answer(known, ending)


def _answer(known: Known, ending: Ending) -> PrefixHit:
    """Make the answer of a hit."""
    state = known.state
    block_ids = tuple(read_only(blocks) for blocks in ending.block_ids)
    count_free, by_group = state.loops.count_free, zip(state.groups, block_ids, strict=True)
    num_free = tuple(count_free(group.pool.arrays.records, blocks) for group, blocks in by_group)
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
    if whole.num_tokens < len(prompt.tokens):
        return whole
    hit = match_prompt(state, answer.prompt._replace(max_hit_tokens=prompt.num_hittable))
    hit.junction = whole.junction
    return hit
