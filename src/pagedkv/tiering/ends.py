"""Ends of cached prefixes: multiples of the layout's alignment up to which a match has whole blocks."""

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.space import BlockSpace, PrefixHit

__all__ = ["longest_end"]


def longest_end(
    space: BlockSpace, token_ids: Int32Array, keys: RequestKeys, most: int, alignment: int
) -> PrefixHit | None:
    """Return the longest hit, of at most ``most`` tokens, that can be an end; None if there is none.

    Args:
        space: the block space.
        token_ids: int32 ``[n]``; the last one never hits.
        keys: extra keys of the tokens.
        most: tokens; alignment: ends are at multiples of it.
    """
    most = most // alignment * alignment
    while most > 0:
        hit = space.match(token_ids, keys=keys, max_hit_tokens=most)
        if hit.num_tokens == most and not hit.tails:
            return hit
        most = min(hit.num_whole_tokens, most - 1) // alignment * alignment
    return None
