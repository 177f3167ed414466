"""Hits that end inside blocks: which block begins as a prompt goes on, in groups that keep whole prefixes or do not.

:mod:`pagedkv.memory.tables.partial_hits` draws what such a hit is. Of the blocks that continue a chain at most 16 are
looked at, the latest first: whoever leaves a chain where others have left it before begins as they do, so that any of
them serves. In a group whose prefix may be gone each that begins so costs a digest, in each of a few rounds until all
groups agree (:mod:`pagedkv.memory.space.matching`). So a prompt costs no more where more is cached.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.pool.blocks import NULL_BLOCK
from pagedkv.memory.pool.digests import ROOT_WORDS
from pagedkv.memory.pool.prefix_index import find
from pagedkv.memory.space.checkpoints import Tail, keys_of_tail
from pagedkv.memory.space.hits import Prompt
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.tables.partial_hits import begins_as_child, begins_behind

__all__ = ["NOTHING", "Beginning", "beginning_behind", "beginning_in_chain", "block_of", "tail_behind", "tail_in_chain"]


class Beginning(NamedTuple):
    """How a prompt goes on behind whole blocks.

    Args:
        block: the block that begins as it does, or the null block.
        num_tokens: its leading tokens that are the prompt's.
    """

    block: int
    num_tokens: int


NOTHING: Final = Beginning(NULL_BLOCK, 0)


def beginning_in_chain(state: SpaceState, group: Group, prompt: Prompt, chain: Int32Array, limit: int) -> Beginning:
    """Find what continues the chain of a prompt in a group that keeps whole prefixes, up to position ``limit``."""
    start = len(chain) * group.block_size
    parent = int(chain[-1]) if len(chain) else NULL_BLOCK
    found = [
        Beginning(*begins_as_child(group.pool.arrays, group.arrays, parent, prompt.tokens, start, stop, extra))
        for extra, stop in _keys_behind(state, prompt, group, start, limit)
    ]
    return max(found, key=lambda beginning: beginning.num_tokens, default=NOTHING)


def tail_behind(state: SpaceState, group: Group, prompt: Prompt, chain: Int32Array) -> Tail | None:
    """Find what a hit goes on from behind the only chain of a space; None if that begins with too few tokens."""
    behind = beginning_in_chain(state, group, prompt, chain, prompt.num_hittable)
    if behind.num_tokens < state.config.min_partial_hit:
        return None
    return tail_in_chain(group, chain, behind, len(chain) * group.block_size + behind.num_tokens)


def block_of(chain: Int32Array, behind: Beginning, index: int) -> int:
    """Tell which block of a group that keeps whole prefixes is, or begins as, logical block ``index`` of a prompt."""
    if index < len(chain):
        return int(chain[index])
    return behind.block if index == len(chain) else NULL_BLOCK


def beginning_behind(  # noqa: PLR0913, PLR0917 - a place in a prompt, and what may be known of it
    state: SpaceState, group: Group, prompt: Prompt, parent: Uint32Array, digest: Uint32Array | None, limit: int
) -> Beginning:
    """Find the block that begins as a prompt goes on to position ``limit``, in a group whose prefix may be gone.

    Args:
        parent: uint32 ``[8]``, digest of what comes before that block.
        digest: that of the block which begins so in another group, if one does.
    """
    pool, name = group.pool.arrays, group.index + 1
    start = limit // group.block_size * group.block_size
    above = find(pool, name, parent) if start else NULL_BLOCK
    same = find(pool, name, digest) if digest is not None else NULL_BLOCK
    keys = state.extra_keys.arrays
    found = [
        Beginning(*begins_behind(pool, group.arrays, above, same, parent, prompt.tokens, start, stop, keys, extra))
        for extra, stop in _keys_behind(state, prompt, group, start, limit)
    ]
    return max(found, key=lambda beginning: beginning.num_tokens, default=NOTHING)


def _keys_behind(state: SpaceState, prompt: Prompt, group: Group, start: int, limit: int) -> Iterator[tuple[int, int]]:
    """Tell with which extra keys a block at ``start`` serves a prompt, and up to where, but not to the block's end.

    With those that the prompt's own block has, up to any position; and with those of the media that have begun before
    another one begins in it, up to there.
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
    """Tell what a hit of ``end`` tokens ends inside of, in a group that keeps whole prefixes; None if nothing."""
    index, num_tokens = divmod(end, group.block_size)
    if not num_tokens:
        return None
    block = block_of(chain, behind, index)
    if block == NULL_BLOCK:
        return None
    parent = group.pool.arrays.digests[chain[index - 1]] if index else ROOT_WORDS
    return Tail(group.index, block, index, parent.copy(), num_tokens)
