"""The first pass: the blocks that a prompt hits in each group that keeps whole prefixes, followed from the start.

A hit is no longer than the shortest chain, so each chain is followed only as far as the one before it reaches.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK, SUCCESSOR
from pagedkv.blocks.prefix_index import is_child_of
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.hits import Prompt
from pagedkv.space.state import Group, SpaceState
from pagedkv.tables.rows import HIT_ALIGNMENT, NAME_IN_POOL

__all__ = ["NOTHING", "Beginning", "Chain", "Chains", "follow", "follow_all", "junction_of"]


class Beginning(NamedTuple):
    """The block that begins with a prompt's next tokens, behind whole blocks.

    Args:
        block: the block, or the null block.
        num_tokens: its leading tokens that are the prompt's.
    """

    block: int
    num_tokens: int


NOTHING: Final = Beginning(NULL_BLOCK, 0)


class Chain(NamedTuple):
    """The blocks that a prompt hits in a group that keeps whole prefixes.

    Args:
        group: the group.
        blocks: int32 ``[n]``, the blocks that hit, from the first one on.
        num_settled: how many of them come before the first that the open step still computes.
        is_left: whether the prompt leaves the chain there; false if the search ended at its bound.
        behind: the block that begins with the prompt's next tokens, if hits may end inside blocks.
    """

    group: Group
    blocks: Int32Array
    num_settled: int
    is_left: bool
    behind: Beginning

    @property
    def num_tokens(self) -> int:
        """Tokens of the blocks that hit."""
        return len(self.blocks) * self.group.block_size

    @property
    def reach(self) -> int:
        """The most tokens that the group can serve."""
        return self.num_tokens + self.behind.num_tokens


Chains = dict[int, Chain]
"""The chain of each group that keeps whole prefixes, by the group's index."""


def follow_all(state: SpaceState, prompt: Prompt, extra_ids: list[Int32Array]) -> Chains:
    """Follow a prompt through all groups that keep whole prefixes.

    Args:
        state: the space; prompt: the prompt.
        extra_ids: for each lane, the ids of the extra keys of the prompt's blocks.
    """
    most = prompt.num_hittable
    chains: Chains = {}
    for group in state.cached_groups:
        if group.keeps_whole_prefix:
            chain = follow(state, group, prompt, extra_ids[group.lane], most)
            for feature in state.features:
                chain = feature.followed(prompt, chain, most)
            chains[group.index] = chain
            most = chain.reach
    return chains


def follow(state: SpaceState, group: Group, prompt: Prompt, extra_ids: Int32Array, most: int) -> Chain:
    """Follow a prompt through one group for at most ``most`` tokens."""
    found = np.empty(most // group.block_size, np.int32)
    pool, keys = group.pool.arrays, state.extra_keys.arrays
    num_hits, num_settled, _ = state.loops.match_chain(
        pool, group.arrays, prompt.tokens, extra_ids, keys, prompt.digests, found
    )
    return Chain(group, found[:num_hits], num_settled, num_hits < len(found), NOTHING)


def junction_of(chains: Chains) -> int:
    """Return the last end of hits in a chain that a prompt leaves and that has other continuations; 0 if none."""
    left = [chain for chain in chains.values() if chain.is_left]
    return _junction_behind(left[-1].group, left[-1].blocks) if left else 0


def _junction_behind(group: Group, blocks: Int32Array) -> int:
    """Return the last end of hits in a chain that a prompt leaves; 0 if the chain has no continuation."""
    if not len(blocks):
        return 0
    alignment = int(group.arrays.parameters[HIT_ALIGNMENT])
    pool, name, last = group.pool.arrays, int(group.arrays.parameters[NAME_IN_POOL]), int(blocks[-1])
    goes_on = is_child_of(pool, name, int(pool.records[last, SUCCESSOR]), last)
    return len(blocks) * group.block_size // alignment * alignment if goes_on else 0
