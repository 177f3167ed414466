"""How far a prompt is cached, in all groups at once. A question: matching changes nothing."""

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np

from pagedkv.arrays import Int32Array, Uint32Array
from pagedkv.errors import ConfigurationError
from pagedkv.keys import NO_KEYS
from pagedkv.pool.blocks import NULL_BLOCK, PENDING_STEP, SUCCESSOR, PoolArrays
from pagedkv.pool.digests import ROOT_WORDS, digest_prompt
from pagedkv.pool.prefix_index import is_child_of
from pagedkv.space.checkpoints import Tail, keys_of_tail
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.partial_hits import (
    Beginning,
    beginning_behind,
    beginning_in_chain,
    block_of,
    end_inside,
    tail_in_chain,
)
from pagedkv.space.prompts import NO_DIGESTS, NO_IDS, UNKNOWN_KEY, extra_ids_of
from pagedkv.space.replaying import with_replay
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import read_only
from pagedkv.tables.checkpoints import find_tail
from pagedkv.tables.matching import find_block
from pagedkv.tables.rows import HIT_ALIGNMENT, NAME_IN_POOL, GroupArrays

__all__ = ["match_again", "match_prompt"]

_Lookup: TypeAlias = tuple[PoolArrays, GroupArrays, Int32Array, Int32Array, Uint32Array]

MOST_ROUNDS: Final = 8  # in which groups agree on a hit inside blocks: so that a prompt costs at most so much


def match_prompt(state: SpaceState, prompt: Prompt) -> PrefixHit:
    """Find the longest prefix that every group can serve, at most ``n - 1`` tokens.

    Cost: one comparison of tokens a block in groups that keep their prefix.
    """
    if state.only_chain is not None:
        return _follow_only_chain(state, state.only_chain, prompt)
    if not state.config.prefix_caching:
        none = len(state.groups)
        return PrefixHit(state, prompt, 0, (NO_IDS,) * none, (0,) * none)
    if not any(group.keeps_whole_prefix for group in state.cached_groups):
        # Blocks before a window are gone, and later nothing is left to compare the prompt with but itself.
        prompt = prompt._replace(tokens=prompt.tokens.copy())
    search = _PrefixMatch(state, prompt)
    block_ids = tuple(read_only(blocks) for blocks in search.run())
    num_free = tuple(
        state.loops.count_free(group.pool.arrays.records, blocks)
        for group, blocks in zip(state.groups, block_ids, strict=True)
    )
    first = state.cached_groups[0]
    hit = PrefixHit(state, prompt, len(block_ids[first.index]) * first.block_size, block_ids, num_free)
    if search.tails:
        hit.num_whole_tokens = search.num_whole_tokens
        hit.end_inside(search.end_of_tails, search.tails)
    hit.junction = search.junction
    hit.ends_chain_of = search.chain_that_ends_at(hit.num_tokens)
    return search.with_replay(hit) if prompt.max_replay_tokens else hit


def _follow_only_chain(state: SpaceState, group: Group, prompt: Prompt) -> PrefixHit:
    """Match where one group is all that has prefix caching, and keeps whole prefixes: one walk tells everything."""
    block_size = group.block_size
    most = prompt.num_hittable // block_size
    found = np.empty(most, np.int32)
    is_plain = prompt.keys is NO_KEYS and not state.weights_epoch  # as most are: asked here, in 0.06 us and not 0.2
    num_hits, num_settled, num_free = state.loops.match_chain(
        group.pool.arrays,
        group.arrays,
        prompt.tokens,
        NO_IDS if is_plain else extra_ids_of(state, prompt, block_size, most),
        state.extra_keys.arrays,
        prompt.digests,
        found,
    )
    found.flags.writeable = False
    blocks: tuple[Int32Array, ...] = (found[:num_hits],)
    counts: tuple[int, ...] = (num_free,)
    if state.outsiders:
        blocks = tuple(blocks[0] if other is group else NO_IDS for other in state.groups)
        counts = tuple(num_free if other is group else 0 for other in state.groups)
    hit = PrefixHit(state, prompt, num_hits * block_size, blocks, counts)
    hit.ends_chain_of = group
    if state.config.min_partial_hit and num_settled == num_hits:
        end_inside(state, group, prompt, hit)
    return hit


def match_again(state: SpaceState, prompt: Prompt, answer: PrefixHit | None) -> PrefixHit:
    """Take an earlier answer if there is one and it still holds, else match: what that was about, which may be longer.

    Then the prompt is the first chunk of it, and hits no more than all but its last token.

    Raises:
        ConfigurationError, TokenError: the answer is that to another question.
    """
    if answer is None:
        return match_prompt(state, prompt)
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


def _junction_behind(group: Group, chain: Int32Array) -> int:
    """Tell where hits can end in a chain that a prompt leaves and that goes on otherwise; 0 if it does not go on."""
    if not len(chain):
        return 0
    alignment = int(group.arrays.parameters[HIT_ALIGNMENT])
    pool, name, last = group.pool.arrays, int(group.arrays.parameters[NAME_IN_POOL]), int(chain[-1])
    goes_on = is_child_of(pool, name, int(pool.records[last, SUCCESSOR]), last)
    return len(chain) * group.block_size // alignment * alignment if goes_on else 0


class _PrefixMatch:
    """One prompt against all groups; keeps chains and digests while it looks.

    Attributes:
        _chains: blocks that hit, for each group that keeps whole prefixes.
        _compute_from: first position that a pending hit would have to compute if its computer left.
        _behind: what continues each of these chains as the prompt goes on, where hits may end inside blocks.
        tails: what the hit ends inside of; end_of_tails: where; num_whole_tokens: where it would end if no block were
            hit in part.
        junction: where the prompt leaves a chain that goes on otherwise, at a boundary where hits can end, or 0.
    """

    def __init__(self, state: SpaceState, prompt: Prompt) -> None:
        self._state = state
        self._prompt = prompt
        self._extra_ids = [
            extra_ids_of(state, prompt, lane[0].block_size, len(prompt.tokens) // lane[0].block_size)
            for lane in state.lanes
        ]
        self._chains: dict[int, Int32Array] = {}
        self._behind: dict[int, Beginning] = {}
        self._compute_from = len(prompt.tokens)
        self.tails: tuple[Tail, ...] = ()
        self.end_of_tails = self.num_whole_tokens = 0
        self.junction = 0

    def run(self) -> list[Int32Array]:
        limit = self._follow_chains(self._prompt.num_hittable)
        if len(self._chains) == len(self._state.cached_groups):
            chains = self._chains_up_to(self._align(limit))
            if self._has_settled_behind_pending(chains):
                chains = self._chains_up_to(self._align(self._compute_from))
            return self._inside_blocks([NO_DIGESTS] * len(self._state.lanes), limit, chains)
        digests = self._lane_digests(limit)
        blocks = self._at_boundaries(digests, limit)
        if self._state.checkpoints:
            blocks = self._inside_intervals(digests, limit, blocks)
        return self._inside_blocks(digests, limit, blocks)

    def chain_that_ends_at(self, length: int) -> Group | None:
        """Find the group whose chain ends after so many tokens, if it is the only one that keeps whole prefixes."""
        ends = {index: len(chain) * self._state.groups[index].block_size for index, chain in self._chains.items()}
        return self._state.groups[next(iter(ends))] if [*ends.values()] == [length] else None

    def _at_boundaries(self, digests: list[Uint32Array], limit: int) -> list[Int32Array]:
        """Find the blocks of the longest hit that ends where blocks of all groups end."""
        while True:
            length = self._agree(digests, limit)
            blocks = self._hold(digests, length)
            if blocks is not None and not self._has_settled_behind_pending(blocks):
                return blocks
            limit = self._compute_from  # the pending part cannot be held whole: do without it

    def _chains_up_to(self, limit: int) -> list[Int32Array]:
        return [self._chains.get(group.index, NO_IDS)[: limit // group.block_size] for group in self._state.groups]

    def _has_settled_behind_pending(self, blocks: list[Int32Array]) -> bool:
        """Tell whether a settled block reaches beyond the first position that is still to be computed.

        Whoever takes the computation over would write it again, and a failing step would leave it undefined for all who
        hold it.
        """
        start, open_step = self._compute_from, self._state.open_step
        for group, held in zip(self._state.groups, blocks, strict=True):
            behind = held[start // group.block_size :]
            if (group.pool.arrays.records[behind[behind != NULL_BLOCK], PENDING_STEP] != open_step).any():
                return True
        return False

    def _follow_chains(self, limit: int) -> int:
        """Follow the prompt where whole prefixes are kept; return the length that these groups can serve.

        It is a boundary of all of them, unless hits may end inside blocks.
        """
        ends_inside = self._state.config.min_partial_hit > 0
        groups = [group for group in self._state.cached_groups if group.keeps_whole_prefix]
        for group in groups:
            most = limit
            found = np.empty(most // group.block_size, np.int32)
            num_hits, num_settled, _ = self._state.loops.match_chain(
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
            if num_hits < len(found) and self._state.shedding_groups:
                self.junction = _junction_behind(group, found[:num_hits])
            if ends_inside:
                behind = beginning_in_chain(self._state, group, self._prompt, found[:num_hits], most)
                self._behind[group.index] = behind
                limit += behind.num_tokens
        return limit if ends_inside else self._align(limit)

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
                length = self._state.loops.longest_servable(*self._lookup(group, digests), known)
            length = self._align(length)
            if length == before:
                return length

    def _hold(self, digests: list[Uint32Array], length: int) -> list[Int32Array] | None:
        """Collect every group's blocks, with those that computing the pending part takes; None if one is gone."""
        loops = self._state.loops
        compute_from = length
        while True:
            wanted = min(compute_from, self._compute_from)
            blocks = [
                self._chains.get(group.index, NO_IDS)[: length // group.block_size] for group in self._state.groups
            ]
            for group in self._looked_up_groups():
                out = np.empty(length // group.block_size, np.int32)
                lookup = self._lookup(group, digests)
                if loops.missing_block(*lookup, length, wanted) >= 0:
                    self._compute_from = wanted
                    return None
                num_settled = loops.collect_servable(*lookup, length, wanted, out)
                compute_from = min(compute_from, num_settled * group.block_size)
                blocks[group.index] = out
            if min(compute_from, wanted) == wanted:
                self._compute_from = wanted
                return blocks

    def _inside_intervals(self, digests: list[Uint32Array], limit: int, blocks: list[Int32Array]) -> list[Int32Array]:
        """Find the blocks of a longer hit that ends with states kept inside intervals; those given if there is none."""
        first = self._state.cached_groups[0]
        length = len(blocks[first.index]) * first.block_size
        ends = {end for group in self._state.state_groups for end in self._ends_of_tails(group, digests, length, limit)}
        for end in sorted(ends, reverse=True):
            longer = self._blocks_up_to(digests, end)
            if longer is not None:
                return longer
        return blocks

    def _ends_of_tails(self, group: Group, digests: list[Uint32Array], length: int, limit: int) -> Iterator[int]:
        """Tell where states of a group end that were kept inside intervals, longer than ``length``."""
        checkpoints = self._state.checkpoints
        assert checkpoints is not None
        num_known = min(len(digests[group.lane]), limit // group.block_size)
        for index in range(length // group.block_size, num_known + 1):
            for num_tokens in checkpoints.lengths(group.index, self._parent(group, digests, index)):
                end = index * group.block_size + num_tokens
                if length < end <= limit and end % checkpoints.alignment == 0:
                    yield end

    @staticmethod
    def _parent(group: Group, digests: list[Uint32Array], index: int) -> Uint32Array:
        """Digest of what comes before a logical block."""
        parent: Uint32Array = digests[group.lane][index - 1] if index else ROOT_WORDS
        return parent

    def _blocks_up_to(self, digests: list[Uint32Array], end: int) -> list[Int32Array] | None:
        """Collect the blocks of a hit that ends inside intervals or blocks; None if a group lacks any."""
        tails = []
        blocks = self._chains_up_to(end)
        for group in self._state.cached_groups:
            if end % group.block_size:
                tail = self._tail(group, digests, end)
                if tail is None:
                    return None
                tails.append(tail)
            if group.index in self._chains:
                continue
            blocks[group.index] = np.zeros(end // group.block_size, np.int32)
            if group in self._state.state_groups and end % group.block_size:
                continue
            if len(digests[group.lane]) < end // group.block_size:
                return None
            lookup = self._lookup(group, digests)
            if self._state.loops.missing_block(*lookup, end, end) >= 0:
                return None
            self._state.loops.collect_servable(*lookup, end, end, blocks[group.index])
        if self._is_any_pending(blocks, tails):
            return None
        self.tails, self.end_of_tails = tuple(tails), end
        return blocks

    def _is_any_pending(self, blocks: list[Int32Array], tails: list[Tail]) -> bool:
        """Tell whether the open step computes any of these blocks: behind those, no block is hit in part."""
        for group, held in zip(self._state.groups, blocks, strict=True):
            mine = [*held[held != NULL_BLOCK].tolist(), *(tail.block for tail in tails if tail.group == group.index)]
            if (group.pool.arrays.records[mine, PENDING_STEP] == self._state.open_step).any():
                return True
        return False

    def _tail(self, group: Group, digests: list[Uint32Array], end: int) -> Tail | None:
        """Find what a hit of ``end`` tokens goes on from in a group, inside an interval or a block."""
        if group in self._state.state_groups:
            return self._state_at(group, digests, end)
        index = end // group.block_size
        if group.index in self._chains:
            chain = self._chains[group.index]
            return tail_in_chain(group, chain, self._behind[group.index], end)
        behind = self._beginning(group, digests, end)
        parent = self._parent(group, digests, index).copy()
        is_enough = behind.num_tokens >= end % group.block_size
        return Tail(group.index, behind.block, index, parent, end % group.block_size) if is_enough else None

    # Hits that end inside blocks

    def _inside_blocks(self, digests: list[Uint32Array], limit: int, blocks: list[Int32Array]) -> list[Int32Array]:
        """Find the blocks of a longer hit that ends inside blocks; those given if there is none that saves enough."""
        first = self._state.cached_groups[0]
        length = self.end_of_tails if self.tails else len(blocks[first.index]) * first.block_size
        self.num_whole_tokens = length
        if not self._state.config.min_partial_hit:
            return blocks
        most = length + int(first.arrays.parameters[HIT_ALIGNMENT]) - 1
        end = self._longest_inside(digests, min(limit, most), length + self._state.config.min_partial_hit)
        longer = self._blocks_up_to(digests, end) if end else None
        return blocks if longer is None else longer

    def _longest_inside(self, digests: list[Uint32Array], most: int, least: int) -> int:
        """Lower a length, ``most``, until every group can serve it; 0 if that is below ``least``, or takes too long."""
        for _ in range(MOST_ROUNDS):
            end = most
            for group in self._looked_up_groups():
                end = self._reach(group, digests, end)
            if end < least:
                return 0
            if end == most:
                return end
            most = end
        return 0

    def _reach(self, group: Group, digests: list[Uint32Array], most: int) -> int:
        """Tell the longest hit that a group may serve whose prefix may be gone: a shorter one needs other blocks."""
        num_known, block_size = len(digests[group.lane]), group.block_size
        lookup = self._lookup(group, digests)
        if group in self._state.state_groups:
            whole = self._state.loops.longest_servable(*lookup, min(most, num_known * block_size))
            tails = self._ends_of_tails(group, digests, self.num_whole_tokens, most)
            return max([whole, *(end for end in tails if self._state_at(group, digests, end))])
        most = min(most, (num_known + 1) * block_size - 1)
        missing = self._state.loops.missing_block(*lookup, most, most)
        if missing >= 0:
            return missing * block_size
        whole = most // block_size * block_size
        return whole + self._beginning(group, digests, most).num_tokens if most > whole else most

    def _beginning(self, group: Group, digests: list[Uint32Array], end: int) -> Beginning:
        """Find the block that begins as a prompt goes on to ``end``, in a group whose prefix may be gone."""
        index = end // group.block_size
        parent = self._parent(group, digests, index)
        same = next(
            (
                other.pool.arrays.digests[block]
                for other in self._state.lanes[group.lane]
                if other.index in self._chains
                and (block := block_of(self._chains[other.index], self._behind[other.index], index))
            ),
            None,
        )
        return beginning_behind(self._state, group, self._prompt, parent, same, end)

    def _state_at(self, group: Group, digests: list[Uint32Array], end: int) -> Tail | None:
        """Find a group's state behind the prompt's first ``end`` tokens, which end inside an interval."""
        state, prompt = self._state, self._prompt
        index = end // group.block_size
        start = index * group.block_size
        if len(digests[group.lane]) < index:
            return None
        extra: int | None = 0
        if prompt.has_extra_keys(state.identity_epoch):
            extra = state.extra_keys.id_of(keys_of_tail(prompt.keys, state.identity_epoch, start, end))
        if extra is None:
            return None
        parent = self._parent(group, digests, index)
        pool, keys = group.pool.arrays, state.extra_keys.arrays
        block = find_tail(pool, group.arrays, parent, prompt.tokens[start:end], keys, extra)
        return Tail(group.index, int(block), index, parent.copy(), end - start) if block != NULL_BLOCK else None

    # Windows that are gone

    def with_replay(self, hit: PrefixHit) -> PrefixHit:
        """Make a longer hit, whose windows are to be computed again, of one that was found."""
        return with_replay(self._state, self._prompt, hit, self._chains, self._block_at)

    def _block_at(self, group: Group, index: int) -> int:
        digests = self._lane_digests((index + 1) * group.block_size)
        is_known = index < len(digests[group.lane])
        return int(find_block(*self._lookup(group, digests), index)) if is_known else NULL_BLOCK

    def _looked_up_groups(self) -> list[Group]:
        return [group for group in self._state.cached_groups if group.index not in self._chains]

    def _lookup(self, group: Group, digests: list[Uint32Array]) -> _Lookup:
        return (
            group.pool.arrays,
            group.arrays,
            self._prompt.tokens,
            self._extra_ids[group.lane],
            digests[group.lane],
        )
