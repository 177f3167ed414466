"""Hits that end inside blocks: finding the block that begins with the prompt's next tokens, in any group.

:mod:`pagedkv.tables.partial_hits` draws such a hit. Of the blocks that continue a chain at most 16 are compared,
the latest first. A prompt that leaves a chain at a token where others left it equals all of their blocks up to there,
so any of these serves. In a group that drops blocks, each candidate costs a digest, in each of a few rounds until all
groups agree (:mod:`pagedkv.space.matching`). So the cost of a prompt does not grow with the cache.
"""

from collections.abc import Iterator

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK, PoolArrays
from pagedkv.blocks.digests import ROOT_WORDS
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.prefix_index import find
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.space.checkpoints import keys_of_tail
from pagedkv.space.hits import Prompt
from pagedkv.space.loops import Loops
from pagedkv.space.matching.chains import NOTHING, Beginning
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.tails import Tail
from pagedkv.tables.partial_hits import begins_as_child, begins_behind
from pagedkv.tables.rows import GroupArrays

__all__ = ["PartialLoops", "beginning_behind", "beginning_in_chain", "block_of", "tail_behind", "tail_in_chain"]


class PartialLoops(Loops):
    """The loops that find the block behind a chain."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, extra_keys: ExtraKeyArrays) -> None:
        """Set the types of their arguments. O(1)."""
        ids, root = np.zeros(0, np.int32), np.zeros(0, np.uint32)
        self.begins_as_child = self._ready(begins_as_child, pool, group, 0, ids, 0, 0, 0)
        self.begins_behind = self._ready(begins_behind, pool, group, 0, 0, root, ids, 0, 0, extra_keys, 0)


def beginning_in_chain(  # noqa: PLR0913, PLR0917 - a place in a prompt
    state: SpaceState, loops: PartialLoops, group: Group, prompt: Prompt, chain: Int32Array, limit: int
) -> Beginning:
    """Find the block that continues a prompt's chain in a group that keeps whole prefixes, up to position ``limit``."""
    start = len(chain) * group.block_size
    parent = int(chain[-1]) if len(chain) else NULL_BLOCK
    found = [
        Beginning(*loops.begins_as_child(group.pool.arrays, group.arrays, parent, prompt.tokens, start, stop, extra))
        for extra, stop in _keys_behind(state, prompt, group, start, limit)
    ]
    return max(found, key=lambda beginning: beginning.num_tokens, default=NOTHING)


def tail_behind(state: SpaceState, loops: PartialLoops, group: Group, prompt: Prompt, chain: Int32Array) -> Tail | None:
    """Find the tail of a hit behind the only chain of a space; None if too few of its tokens hit."""
    behind = beginning_in_chain(state, loops, group, prompt, chain, prompt.num_hittable)
    if behind.num_tokens < state.config.min_partial_hit:
        return None
    return tail_in_chain(group, chain, behind, len(chain) * group.block_size + behind.num_tokens)


def block_of(chain: Int32Array, behind: Beginning, index: int) -> int:
    """Return the block that is, or begins as, logical block ``index`` of a prompt in a group of whole prefixes."""
    if index < len(chain):
        return int(chain[index])
    return behind.block if index == len(chain) else NULL_BLOCK


def beginning_behind(  # noqa: PLR0913, PLR0917 - a place in a prompt, and its digests
    state: SpaceState,
    loops: PartialLoops,
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
    keys, begins = state.extra_keys.arrays, loops.begins_behind
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
    if not prompt.has_extra_keys(state.identity_epoch):
        if start < most:
            yield 0, most
        return
    begun = min((span.start for span in prompt.keys.media if start < span.start < end), default=end)
    for until, stop in {(end, most), (begun, min(most, begun))}:
        encoding = keys_of_tail(prompt.keys, state.identity_epoch, start, until)
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
