"""What is known of a prompt before lengths are compared: the input of all passes but the first.

There are two kinds of groups. A group that keeps whole prefixes gives a *chain*. In a group that drops blocks (windows,
chunks, states), only the blocks that a hit of some length needs are looked up by digest: its *lookup* has the digests
of the prompt's blocks.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from pagedkv.blocks.blocks import PoolArrays
from pagedkv.blocks.digests import ROOT_WORDS, digest_prompt
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.space.hits import Prompt
from pagedkv.space.matching.chains import Chains
from pagedkv.space.prompts import NO_IDS, UNKNOWN_KEY
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.tails import Tail
from pagedkv.tables.rows import HIT_ALIGNMENT, GroupArrays

__all__ = ["Ending", "Known", "Lookup", "find_known"]

LookupArguments: TypeAlias = tuple[PoolArrays, GroupArrays, Int32Array, Int32Array, Uint32Array]


class Lookup(NamedTuple):
    """A group that drops blocks, with all that looking up its blocks takes.

    Args:
        group: the group.
        arguments: the first arguments of loops that look its blocks up: the group's pool and arrays, the prompt's
            tokens, the ids of its blocks' extra keys, and their digests, uint32 ``[blocks, 8]``.
    """

    group: Group
    arguments: LookupArguments

    @property
    def num_known(self) -> int:
        """How many blocks of the prompt have a digest."""
        return len(self.arguments[-1])

    def nothing_seen(self) -> Int32Array:
        """Return what :func:`~pagedkv.tables.matching.longest_servable` knows before its first call."""
        return np.array((self.num_known, 0), np.int32)

    def parent_of(self, index: int) -> Uint32Array:
        """Digest of the block before a logical block, or the root."""
        parent: Uint32Array = self.arguments[-1][index - 1] if index else ROOT_WORDS
        return parent


class Known(NamedTuple):
    """A prompt, and what is known of it.

    Args:
        state: the space; prompt: the prompt.
        alignment: hits of whole blocks end at multiples of this number of tokens.
        limit: the most tokens that all chains can serve.
        chains, lookups: by a group's index; each group with prefix caching is in one of them.
    """

    state: SpaceState
    prompt: Prompt
    alignment: int
    limit: int
    chains: Chains
    lookups: Mapping[int, Lookup]

    def aligned(self, length: int) -> int:
        """Round a length down to a block boundary of every group."""
        return length // self.alignment * self.alignment

    def chain_blocks(self, length: int) -> list[Int32Array]:
        """Return each group's chain up to a length: int32 ``[length // block_size]``, empty for other groups."""
        block_ids = [NO_IDS[:0]] * len(self.state.groups)  # a view, since answers are made read-only
        for index, chain in self.chains.items():
            block_ids[index] = chain.blocks[: length // chain.group.block_size]
        return block_ids


class Ending(NamedTuple):
    """An end of a hit.

    Args:
        num_tokens: its tokens.
        block_ids: for each group int32 ``[num_tokens // block_size]``, its blocks; empty outside prefix caching.
        tails: the blocks inside which it ends; none at a boundary.
        num_partial: of its tokens, those in blocks that hit in part.
        num_replayed: of its tokens, the last ones, which windows compute again; is_exact: whether every layer has all
            that the blocks of the last window need for that.
    """

    num_tokens: int
    block_ids: list[Int32Array]
    tails: tuple[Tail, ...] = ()
    num_partial: int = 0
    num_replayed: int = 0
    is_exact: bool = True


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


def _digests_of_lane(  # noqa: PLR0913, PLR0917 - a lane of a space, a prompt, its keys and chains
    state: SpaceState, prompt: Prompt, lane: int, extra_ids: Int32Array, chains: Chains, limit: int
) -> Uint32Array:
    """Digests of a prompt's blocks below ``limit``, up to the first unknown extra key; read from a chain if any."""
    groups = state.lanes[lane]
    block_size = groups[0].block_size
    num_blocks = min([limit // block_size, *np.flatnonzero(extra_ids == UNKNOWN_KEY)[:1].tolist()])
    for group in groups:
        if group.index in chains:
            read_off: Uint32Array = group.pool.arrays.digests[chains[group.index].blocks[:num_blocks]]
            return read_off
    digests = np.empty((num_blocks, 8), np.uint32)
    digest_prompt(prompt.tokens, block_size, num_blocks, extra_ids, state.extra_keys.arrays, digests)
    return digests
