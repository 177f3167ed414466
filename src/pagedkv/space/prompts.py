"""Prompts as the space takes them: checked tokens, extra keys by block, digests, and how far they are cached.

A question throughout: preparing and matching a prompt changes nothing.
"""

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.core.blocks import Int32Array, PoolArrays, Uint32Array
from pagedkv.core.digests import digest_prompt, words_of_digests
from pagedkv.core.matching import collect_servable, longest_servable, missing_block
from pagedkv.core.rows import GroupArrays
from pagedkv.core.tokens import as_token_array
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.keys import RequestKeys
from pagedkv.space.state import Group, SpaceState
from pagedkv.spec import TokenIds

__all__ = ["Prompt", "match_prompt", "prepare_prompt"]

_Lookup: TypeAlias = tuple[PoolArrays, GroupArrays, Int32Array, Int32Array, Uint32Array]

NO_IDS: Final = np.zeros(0, np.int32)
NO_DIGESTS: Final = np.zeros((0, 8), np.uint32)
UNKNOWN_KEY: Final = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for matching.

    Args:
        tokens: int32 ``[n]``.
        keys: its extra keys.
        digests: words of its digests if the caller brought them, uint32 ``[n // block_size, 8]``, else empty.
    """

    tokens: Int32Array
    keys: RequestKeys
    digests: Uint32Array

    def has_extra_keys(self, weights_epoch: str) -> bool:
        """Tell whether any block carries an extra key."""
        keys = self.keys
        return bool(weights_epoch or keys.lora_name is not None or keys.salt or keys.media)


def prepare_prompt(
    state: SpaceState, token_ids: TokenIds, keys: RequestKeys, digests: npt.ArrayLike | None, num_lookahead: int
) -> Prompt:
    """Check a prompt.

    Raises:
        TokenError: empty, outside int32, or longer than the tables (``max_tokens``).
        ConfigurationError: digests that do not fit the prompt, or that this space must compute itself;
            a negative number of lookahead slots.
    """
    tokens = as_token_array(token_ids)
    if len(tokens) == 0:
        raise TokenError("an empty prompt cannot be allocated: give at least one token")
    if not isinstance(keys, RequestKeys):
        raise ConfigurationError(f"keys must be RequestKeys, got {keys!r}")
    if len(tokens) + num_lookahead > state.config.max_tokens:
        raise TokenError(
            f"{len(tokens)} tokens and {num_lookahead} lookahead slots exceed max_tokens = {state.config.max_tokens}"
        )
    return Prompt(tokens, keys, NO_DIGESTS if digests is None else _checked_digests(state, tokens, digests))


def _checked_digests(state: SpaceState, tokens: Int32Array, digests: npt.ArrayLike) -> Uint32Array:
    if len(state.lanes) > 1 or not all(group.keeps_whole_prefix for group in state.groups):
        raise ConfigurationError(
            "digests can be brought only where all groups are full attention of one block size: elsewhere a hit "
            "may rest on the digest alone, so pagedkv computes it"
        )
    num_blocks = len(tokens) // state.groups[0].block_size
    brought = np.asarray(digests)
    if brought.dtype != np.uint8 or brought.size != num_blocks * 32:
        raise ConfigurationError(
            f"digests must be uint8 [{num_blocks}, 32], one for each full block, got {brought.dtype} {brought.shape}"
        )
    return words_of_digests(brought, num_blocks)


def extra_ids_of(state: SpaceState, prompt: Prompt, block_size: int, num_blocks: int) -> Int32Array:
    """Ids of the extra keys of the first blocks, trailing zeros cut off; -1 where nobody has that key yet."""
    epoch = state.weights_epoch
    if not prompt.has_extra_keys(epoch):
        return NO_IDS
    reach = max(1, prompt.keys.media_reach)
    ids = np.zeros(min(num_blocks, -(-reach // block_size)), np.int32)
    for index in range(len(ids)):
        known = state.extra_keys.id_of(extra_key_of(prompt.keys, epoch, block_size, index))
        ids[index] = UNKNOWN_KEY if known is None else known
    return ids


def extra_key_of(keys: RequestKeys, weights_epoch: str, block_size: int, index: int) -> bytes:
    """Encode the extra keys of logical block ``index``."""
    media = keys.media_key(index * block_size, (index + 1) * block_size)
    return keys.first_block_key(weights_epoch) + media if index == 0 else media


def match_prompt(state: SpaceState, prompt: Prompt) -> list[Int32Array]:
    """Find the longest prefix that every group can serve, at most ``n - 1`` tokens.

    Returns, for each group, its blocks up to the hit's end, null where none is needed; all empty
    when nothing hits. Cost: one comparison of tokens a block in groups that keep their prefix.
    """
    if not state.config.prefix_caching:
        return [NO_IDS] * len(state.groups)
    return _PrefixMatch(state, prompt).run()


class _PrefixMatch:
    """One prompt against all groups; keeps chains and digests while it looks.

    Attributes:
        _chains: blocks that hit, for each group that keeps whole prefixes.
        _compute_from: first position that a pending hit would have to compute if its computer left.
    """

    def __init__(self, state: SpaceState, prompt: Prompt) -> None:
        self._state = state
        self._prompt = prompt
        self._extra_ids = [
            extra_ids_of(state, prompt, lane[0].block_size, len(prompt.tokens) // lane[0].block_size)
            for lane in state.lanes
        ]
        self._chains: dict[int, Int32Array] = {}
        self._compute_from = len(prompt.tokens)

    def run(self) -> list[Int32Array]:
        limit = self._follow_chains(len(self._prompt.tokens) - 1)
        if len(self._chains) == len(self._state.groups):
            return [self._chains[group.index][: limit // group.block_size] for group in self._state.groups]
        digests = self._lane_digests(limit)
        while True:
            length = self._agree(digests, limit)
            blocks = self._hold(digests, length)
            if blocks is not None:
                return blocks
            limit = self._compute_from  # the pending part cannot be held whole: do without it

    def _follow_chains(self, limit: int) -> int:
        """Follow the prompt where whole prefixes are kept; return the length that these groups can serve."""
        groups = [group for group in self._state.groups if group.keeps_whole_prefix]
        for group in groups:
            found = np.empty(limit // group.block_size, np.int32)
            num_hits, num_settled = self._state.loops.match_chain(
                group.pool.arrays,
                group.arrays,
                self._prompt.tokens,
                self._extra_ids[group.lane],
                self._state.extra_keys.arrays,
                self._prompt.digests,
                found,
            )
            self._chains[group.index] = found[:num_hits]
            limit = num_hits * group.block_size
            self._compute_from = min(self._compute_from, num_settled * group.block_size)
        return self._align(limit)

    def _align(self, length: int) -> int:
        """Lower a length to a block boundary of every group that keeps whole prefixes."""
        sizes = [group.block_size for group in self._state.groups if group.index in self._chains]
        return length // math.lcm(*sizes) * math.lcm(*sizes)

    def _lane_digests(self, limit: int) -> list[Uint32Array]:
        """Digests of the blocks below ``limit`` in lanes that look blocks up; read off a chain where one hit."""
        digests = []
        for lane, extra_ids in zip(self._state.lanes, self._extra_ids, strict=True):
            whole = next((group for group in lane if group.index in self._chains), None)
            unknown = np.flatnonzero(extra_ids == UNKNOWN_KEY)
            num_blocks = min([limit // lane[0].block_size, *unknown[:1].tolist()])
            if all(group.keeps_whole_prefix for group in lane):
                digests.append(NO_DIGESTS)
            elif whole is not None:
                digests.append(whole.pool.arrays.digests[self._chains[whole.index][:num_blocks]])
            else:
                out = np.empty((num_blocks, 8), np.uint32)
                keys = self._state.extra_keys.arrays
                digest_prompt(self._prompt.tokens, lane[0].block_size, num_blocks, extra_ids, keys, out)
                digests.append(out)
        return digests

    def _agree(self, digests: list[Uint32Array], limit: int) -> int:
        """Lower the length until every group can serve it."""
        length = self._align(limit)
        while True:
            before = length
            for group in self._looked_up_groups():
                known = min(length, len(digests[group.lane]) * group.block_size)
                length = longest_servable(*self._lookup(group, digests), known)
            length = self._align(length)
            if length == before:
                return length

    def _hold(self, digests: list[Uint32Array], length: int) -> list[Int32Array] | None:
        """Collect every group's blocks, with those that computing the pending part takes; None if one is gone."""
        compute_from = length
        while True:
            wanted = min(compute_from, self._compute_from)
            blocks = [
                self._chains.get(group.index, NO_IDS)[: length // group.block_size] for group in self._state.groups
            ]
            for group in self._looked_up_groups():
                out = np.empty(length // group.block_size, np.int32)
                lookup = self._lookup(group, digests)
                if missing_block(*lookup, length, wanted) >= 0:
                    self._compute_from = wanted
                    return None
                compute_from = min(compute_from, collect_servable(*lookup, length, wanted, out) * group.block_size)
                blocks[group.index] = out
            if min(compute_from, wanted) == wanted:
                return blocks

    def _looked_up_groups(self) -> list[Group]:
        return [group for group in self._state.groups if group.index not in self._chains]

    def _lookup(self, group: Group, digests: list[Uint32Array]) -> _Lookup:
        return (
            group.pool.arrays,
            group.arrays,
            self._prompt.tokens,
            self._extra_ids[group.lane],
            digests[group.lane],
        )
