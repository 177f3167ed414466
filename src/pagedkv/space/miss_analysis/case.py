"""The input of an explanation, a prompt and its hit, and the values that its passes make."""

from typing import NamedTuple

from pagedkv.contract.arrays import Uint32Array
from pagedkv.contract.miss_causes import MissCause
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.state import Group, SpaceState
from pagedkv.tables.rows import HIT_ALIGNMENT, NAME_IN_POOL

__all__ = ["Case", "Finding", "Lack", "Verdict", "name_of", "open_case"]


class Case(NamedTuple):
    """A prompt whose hit is to be explained.

    Args:
        state: the space; prompt: the prompt; hit: its hit.
        is_thorough: whether all blocks that continue the hit are compared, or only the latest.
        alignment: hits of whole blocks end at multiples of this number of tokens.
        most: where the longest hit that any cache could serve ends; bounded: the same within the caller's bound.
    """

    state: SpaceState
    prompt: Prompt
    hit: PrefixHit
    is_thorough: bool
    alignment: int
    most: int
    bounded: int

    def aligned(self, length: int) -> int:
        """Round a length down to one where hits can end."""
        return length // self.alignment * self.alignment


class Lack(NamedTuple):
    """The block that ends a hit.

    Args:
        group: the group that lacks it; place: its logical index there.
        parent: the block before it, if that is cached and reachable by links; else None.
        digests: digests of the prompt's blocks up to this one at least, uint32 ``[more than place, 8]``.
    """

    group: Group
    place: int
    parent: int | None
    digests: Uint32Array

    @property
    def start(self) -> int:
        """The block's first position."""
        return self.place * self.group.block_size


class Verdict(NamedTuple):
    """What happened to a block.

    Args:
        cause: why it does not hit.
        position: the token that the cause concerns.
        token_id, age: as in :class:`~pagedkv.Explanation`.
    """

    cause: MissCause
    position: int
    token_id: int | None = None
    age: int | None = None


class Finding(NamedTuple):
    """Why a hit ends.

    Args:
        verdict: the cause; lack: the missing block, or None if no missing block ends the hit.
    """

    verdict: Verdict
    lack: Lack | None


def open_case(state: SpaceState, prompt: Prompt, hit: PrefixHit, *, is_thorough: bool) -> Case:
    """Make the case of a prompt: where hits of it could end."""
    alignment = max(1, int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT]))
    most, bounded = ((tokens // alignment * alignment) for tokens in (len(prompt.tokens) - 1, prompt.num_hittable))
    return Case(state, prompt, hit, is_thorough, alignment, most, bounded)


def name_of(group: Group) -> int:
    """Return the number under which a group's blocks are named in their pool."""
    return int(group.arrays.parameters[NAME_IN_POOL])
