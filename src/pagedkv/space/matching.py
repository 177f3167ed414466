"""Matching: how far a prompt is cached, in all groups at once. It changes nothing.

A hit is the longest prefix that every group with prefix caching can serve, without the prompt's last token. The passes
below run in this order, each on the result of the one before. Each is skipped if its feature is off::

    prompt -> chains -------> Known ----> boundaries ------> inside ----------> replays ----------> PrefixHit
              groups that     limit,      the longest        a longer one,      a longer one,
              keep whole      digests     that ends where    inside a state's   with windows that
              prefixes, by                blocks of all      interval, inside   are computed again
              their links                 groups end         blocks

An example with blocks of 4 tokens, a window of 8, and states that are kept every 8 tokens. All of the prompt was
cached once, and ``x`` marks what is gone since::

    position    0   4   8   12  16  20  24  28  32
    full        [##][##][##][##][##][##][##] x             chains       28 tokens: no hit is longer
    window        x   x [##][##][##]  x   x   x            boundaries   24 is the last end of blocks in all groups, and
    state       [######][######][######][######]                        would need the window's two blocks before it; so
    hit         |--------------|                                        16, which has them, and a state that ends there

The length of a hit is determined by a group that lacks a block for the next boundary:
:meth:`BlockSpace.explain <pagedkv.BlockSpace.explain>` names both. If only one group has prefix caching, and it keeps
whole prefixes, only the first pass is needed.

The first pass follows the blocks that a prompt hits in each group that keeps whole prefixes, from the start. A hit is
no longer than the shortest chain, so each chain is followed only as far as the one before it reaches.

The second pass finds the longest hit that ends where blocks of all groups end.

A bound is lowered for the first of these reasons that applies, until none does:

1. A group lacks a block that a hit of this length needs.
2. The open step computes some of the blocks that hit: these are *pending*. A row that hits them must compute them if
   the row that was to compute them leaves, so it must hold what that computation reads, and a group lacks that.
3. Some of the blocks that this computation reads are pending, too: computing begins earlier.
4. A block behind a pending one is *settled*. The computation would write it again, and if its step failed, the block
   would be undefined for all rows that hold it.

For reasons 2 and 4 the hit ends before all pending blocks. An example for reason 4, with blocks of 4 tokens and a
window of 4; ``~~`` is pending::

    position   0   4   8   12  16
    full       [##][##][~~][~~][~~]
    window       . [##][~~][~~][##]     computing 8 takes block 1, which is there; but block 4 is settled
    hit        |------|                 8 tokens

The last pass finds a hit that ends where windows have lost what it needs, if they may be computed again
(:mod:`pagedkv.space.replaying` draws the use of such a hit). It ends where full attention ends; window groups have
their sinks, which are never computed again.

There are two kinds of groups. A group that keeps whole prefixes gives a *chain*. In a group that drops blocks
(windows, chunks, states), only the blocks that a hit of some length needs are looked up by digest: its *lookup* has
the digests of the prompt's blocks.

The answer of a match is kept so that admitting the same prompt need not match again. It is valid only while the space
does not change (its version shows that) and only for the prompt that was matched. That it is the same prompt is
verified each time: an answer refers to the caller's token array, which may have been overwritten since, and a hit is
granted only for equal content.

Hits are verified token by token. In a group that keeps its whole prefix, each block stores its latest successor, so a
long hit costs one comparison of tokens a block and no hashing; a digest is computed and looked up only where chains
branch. In a group that may have lost parts of a prefix (windows, chunks, recurrent states), the blocks that a hit
needs are looked up by digest, from the right end.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.digests import (
    DIGEST_NBYTES,
    ROOT_WORDS,
    ExtraKeyArrays,
    digest_block,
    digest_prompt,
    keys_of_blocks,
    words_of_digests,
)
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.blocks.record import (
    AHEAD,
    EXTRA,
    FIRST_WALK_FIELD,
    FREE,
    LAST_WALK_FIELD,
    LOOKAHEAD,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.compilation.instructions import PIECE, prefetch, same_piece
from pagedkv.contract.answers import Load
from pagedkv.contract.arguments import LARGEST_SIZE, as_array, as_token_array
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds, replay_of
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.rows import (
    BLOCK_SIZE,
    ENDS_HITS,
    HIT_ALIGNMENT,
    KIND,
    NAME_IN_POOL,
    NUM_SINK_BLOCKS,
    SHARES_IN_STEP,
    SPAN,
    GroupArrays,
    first_block_of_hit,
    first_needed_token,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import read_only

__all__ = [
    "NOTHING",
    "NO_DIGESTS",
    "NO_IDS",
    "UNKNOWN_KEY",
    "Beginning",
    "Chain",
    "Chains",
    "Ending",
    "Known",
    "Lookup",
    "PrefixHit",
    "Prompt",
    "Tail",
    "collect_servable",
    "count_free",
    "digests_of_prefix",
    "ending_at",
    "extra_ids_of",
    "find_known",
    "first_other_block",
    "first_sure",
    "follow",
    "follow_all",
    "junction_of",
    "longest_boundary",
    "longest_servable",
    "longest_with_replay",
    "match_chain",
    "match_prompt",
    "missing_block",
    "prepare_prompt",
    "require_beginning",
]
"""The hit blocks of a group without any; read-only as all hit blocks are, which spares loops a second set of types."""


class Prompt(NamedTuple):
    """A prompt ready for matching.

    Args:
        tokens: int32 ``[n]``.
        keys: its extra keys.
        digests: words of its digests if the caller gave them, uint32 ``[n // block_size, 8]``, else empty.
        max_hit_tokens: most tokens that may hit, beside the rule that the last token never hits.
        max_replay_tokens: most tokens that window groups may compute again for a longer hit.
    """

    tokens: Int32Array
    keys: RequestKeys
    digests: Uint32Array
    max_hit_tokens: int = LARGEST_SIZE
    max_replay_tokens: int = 0

    @property
    def num_hittable(self) -> int:
        """Tokens that may hit: at most all but the last one."""
        most = len(self.tokens) - 1
        return most if most < self.max_hit_tokens else self.max_hit_tokens  # noqa: FURB136 - min() takes 0.1 us more

    def has_extra_keys(self, weights_epoch: str) -> bool:
        """Return whether any block has an extra key."""
        keys = self.keys
        if keys is NO_KEYS:
            return bool(weights_epoch)
        return bool(weights_epoch or keys.lora_name is not None or keys.salt or keys.media)


class Tail(NamedTuple):
    """A block inside which a hit ends: a checkpoint inside an interval, or a block that hits in part.

    Args:
        group: index of the group; block: the block; logical_index: its index in the row's table.
        parent: uint32 ``[8]``, digest of the whole blocks before it.
        num_tokens: its leading tokens that hit.
    """

    group: int
    block: int
    logical_index: int
    parent: Uint32Array
    num_tokens: int


NONE_FREE: Final[dict[str, int]] = {}


class PrefixHit:
    """How much of a prompt is cached: the answer of a match, valid until the space changes.

    Pass it as ``match=``, with the same prompt, to ``can_allocate`` and ``allocate`` of the same space, and they do not
    match again. Only :meth:`BlockSpace.match() <pagedkv.BlockSpace.match>` makes it.

    Attributes:
        num_tokens: leading tokens that every group with prefix caching can serve from its blocks; at most
            ``len(prompt) - 1``, and at most ``max_hit_tokens``.
        block_ids: for each group read-only int32 ``[num_tokens // block_size]``: the blocks that hit, 0 where the
            group needs none (before its window). Empty for a group outside prefix caching. For a replayed window only
            the blocks before the replay.
        num_whole_tokens: of these, the tokens that are not in a block that hits in part
            (:attr:`SpaceConfig.min_partial_hit <pagedkv.SpaceConfig>`): all, unless that is on.
        tails: the blocks inside which the hit ends, with their leading tokens that hit: states kept inside an interval,
            and blocks that hit in part. The sequence continues from copies of them, which the plan makes. Empty if the
            hit ends at a block boundary in all groups.
        num_replayed: of these, the last tokens, which the step computes once more in window groups alone, since these
            have lost them (:class:`~pagedkv.Replay`); 0 unless ``max_replay_tokens`` allowed it.
        is_exact: whether the replay computes exactly what was lost; else the sequence publishes nothing.
        num_free: for each group, how many of these blocks are free now: an allocation takes them from the free blocks.
        num_free_tails: by pool, how many of the tails are free now; empty without tails.
        junction: where the prompt leaves a cached chain that continues with other tokens, at a boundary where hits can
            end; 0 if nowhere, and in spaces whose windows shed nothing.
        loading: the load under way, if any, that brings the prompt's next tokens behind the hit.
        ends_chain_of: the only group that keeps whole prefixes, if its chain of cached blocks ends with the hit.
    """

    # Not a frozen dataclass, whose construction takes 0.7 us instead of 0.2, of the 4 us of a match of 1,024 tokens.
    num_tokens: int
    num_whole_tokens: int
    block_ids: tuple[Int32Array, ...]
    num_free: tuple[int, ...]

    # The values of most hits; other hits set attributes of their own.
    num_replayed: int = 0
    is_exact: bool = True
    junction: int = 0
    loading: Load | None = None
    ends_chain_of: Group | None = None
    tails: tuple[Tail, ...] = ()
    num_free_tails: dict[str, int] = NONE_FREE

    def __init__(
        self,
        state: SpaceState,
        prompt: Prompt,
        num_tokens: int,
        block_ids: tuple[Int32Array, ...],
        num_free: tuple[int, ...],
    ) -> None:
        self.num_tokens = self.num_whole_tokens = num_tokens
        self.block_ids = block_ids
        self.num_free = num_free
        self._prompt, self._state, self._version = prompt, state, state.version

    def end_inside(self, num_tokens: int, tails: tuple[Tail, ...]) -> None:
        """Extend the hit into intervals and blocks. Called only while the answer is made."""
        self.num_tokens = num_tokens
        self.tails = tails
        self.num_free_tails = dict.fromkeys(self._state.pools, 0)
        for tail in tails:
            pool = self._state.groups[tail.group].pool
            self.num_free_tails[pool.name] += int(pool.arrays.records[tail.block, QUEUE] == FREE)

    def __repr__(self) -> str:
        return f"PrefixHit(num_tokens={self.num_tokens}, num_blocks_needed={self.num_blocks_needed})"

    @property
    def num_blocks_needed(self) -> dict[str, int]:
        """By pool, the free blocks that allocating this prompt takes: new blocks, and hits that are free now.

        Without lookahead slots, for the space as it was at the match. O(groups).
        """
        needed = dict.fromkeys(self._state.pools, 0)
        num_tokens = len(self._prompt.tokens)
        for group, blocks, num_free in zip(self._state.groups, self.block_ids, self.num_free, strict=True):
            needed[group.pool.name] += group.num_slots_blocks(num_tokens, 0) - len(blocks) + num_free
        for pool, num_tails in self.num_free_tails.items():
            needed[pool] += num_tails
        return needed

    def blocks_by_pool(self) -> dict[str, Int32Array]:
        """Blocks that hit, by pool: int32 ``[any]``, without the null block. O(blocks)."""
        parts: dict[str, list[Int32Array]] = {name: [NO_BLOCKS] for name in self._state.pools}
        for group, blocks in zip(self._state.groups, self.block_ids, strict=True):
            parts[group.pool.name].append(blocks[blocks != NULL_BLOCK])
        return {name: np.concatenate(of_groups) for name, of_groups in parts.items()}

    @property
    def prompt(self) -> Prompt:
        """The prompt that was matched. O(1)."""
        return self._prompt

    @property
    def checkpoint(self) -> int:
        """Where a chunk of this prompt should end so that its last state is kept for later prompts; 0 if nowhere. O(1).

        0 if no group is a recurrent state, and if that state is hit, or is kept anyway at the end of an interval.
        """
        return self._state.checkpoint_of(self.prompt_length, self.num_tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that was matched. O(1)."""
        return len(self._prompt.tokens)

    @property
    def max_hit_tokens(self) -> int:
        """The bound of the hit that :meth:`BlockSpace.match <pagedkv.BlockSpace.match>` was given. O(1)."""
        return self._prompt.max_hit_tokens

    @property
    def max_replay_tokens(self) -> int:
        """The bound of the replay that the match was given. O(1)."""
        return self._prompt.max_replay_tokens

    def still_holds(self, state: SpaceState, prompt: Prompt) -> bool:
        """Return whether a space would give the same answer for a prompt, or for a beginning of it. Changes nothing.

        A beginning has the same hit if it is longer than the hit; so the first chunk of a prompt can be allocated.

        Raises:
            ConfigurationError: the answer is that of another space, or for other keys.
            TokenError: it is for another prompt, or the prompt was overwritten since.

        Cost: a comparison of the tokens; if they are in the same array as before, only of those that hit.
        """
        if self._state is not state:
            raise ConfigurationError("match is the answer of another block space: ask the one that is to allocate")
        if self._prompt.keys is not prompt.keys and self._prompt.keys != prompt.keys:
            raise ConfigurationError("match is the answer for other keys: ask with the keys that are to be allocated")
        self._require_beginning(prompt.tokens)
        if self._version != state.version or len(prompt.tokens) <= self.num_tokens:
            return False
        self._require_same_content(prompt.tokens)
        return True

    def _require_beginning(self, tokens: Int32Array) -> None:
        """Raise TokenError unless the tokens are a beginning of the prompt that was matched."""
        matched = self._prompt.tokens
        if tokens is matched:
            return
        if len(tokens) > len(matched):
            raise TokenError(f"match is the answer for a prompt of {len(matched)} tokens, not for one of {len(tokens)}")
        differs = matched[: len(tokens)] != tokens
        if differs.any():
            place = int(differs.argmax())
            raise TokenError(
                f"match is the answer for another prompt: token {place} was {matched[place]}, it is {tokens[place]} now"
            )

    def _require_same_content(self, tokens: Int32Array) -> None:
        """Compare the blocks with the tokens, since the matched array may have been overwritten."""
        for group, blocks in zip(self._state.groups, self.block_ids, strict=True):
            if group.keeps_whole_prefix and not group.stays_out:
                index = self._state.loops[first_other_block](group.pool.arrays, group.arrays, blocks, tokens)
                if index >= 0:
                    start = index * group.block_size
                    raise TokenError(
                        f"match is the answer for another prompt: tokens {start} to {start + group.block_size - 1} "
                        "have been overwritten since"
                    )
                self._require_same_tail(group, tokens)
                return  # the prefix is the same for all groups

    def _require_same_tail(self, group: Group, tokens: Int32Array) -> None:
        """Compare the tail of the hit with the tokens."""
        for tail in self.tails:
            if tail.group == group.index:
                start = tail.logical_index * group.block_size
                kept = group.pool.arrays.tokens[tail.block, : tail.num_tokens]
                if (kept != tokens[start : start + tail.num_tokens]).any():
                    raise TokenError(
                        f"match is the answer for another prompt: tokens {start} to {start + tail.num_tokens - 1} have "
                        "been overwritten since"
                    )


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
    num_hits, num_settled, num_free = state.loops[match_chain](
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


class Beginning(NamedTuple):
    """The block that begins with a prompt's next tokens, behind whole blocks.

    Args:
        block: the block, or the null block.
        num_tokens: its leading tokens that are the prompt's.
    """

    block: int
    num_tokens: int


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
        """Return what :func:`~pagedkv.space.matching.longest_servable` knows before its first call."""
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


def _answer(known: Known, ending: Ending) -> PrefixHit:
    """Make the answer of a hit."""
    state = known.state
    block_ids = tuple(read_only(blocks) for blocks in ending.block_ids)
    count, by_group = state.loops[count_free], zip(state.groups, block_ids, strict=True)
    num_free = tuple(count(group.pool.arrays.records, blocks) for group, blocks in by_group)
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


def ending_at(known: Known, end: int, tails: list[Tail | None]) -> Ending | None:
    """Collect the blocks of a hit of ``end`` tokens; None if a group lacks any, or any is pending.

    Args:
        known: what is known of the prompt.
        end: the end of the hit.
        tails: the tail of each group that has no boundary there, None if it lacks one.
    """
    block_ids = _blocks_up_to(known, end)
    found = [tail for tail in tails if tail is not None]
    if len(found) < len(tails) or block_ids is None or _is_any_pending(known, block_ids, found):
        return None
    return Ending(end, block_ids, tuple(found))


def _blocks_up_to(known: Known, end: int) -> list[Int32Array] | None:
    """Collect the whole blocks of a hit of ``end`` tokens; None if a group lacks any."""
    block_ids, loops = known.chain_blocks(end), known.state.loops
    for index, lookup in known.lookups.items():
        group, arguments = lookup
        block_ids[index] = np.zeros(end // group.block_size, np.int32)
        if end % group.block_size and group in known.state.state_groups:
            continue  # a state inside an interval stands for all before it
        if lookup.num_known < end // group.block_size or loops[missing_block](*arguments, end, end) >= 0:
            return None
        num_blocks = len(block_ids[index])
        loops[collect_servable](*arguments, end, end, block_ids[index], np.full(2, num_blocks, np.int32))
    return block_ids


def _is_any_pending(known: Known, block_ids: list[Int32Array], tails: list[Tail]) -> bool:
    """Return whether the open step computes any of these blocks."""
    for group, held in zip(known.state.groups, block_ids, strict=True):
        mine = [*held[held != NULL_BLOCK].tolist(), *(tail.block for tail in tails if tail.group == group.index)]
        if (group.pool.arrays.records[mine, PENDING_STEP] == known.state.open_step).any():
            return True
    return False


class Bound(NamedTuple):
    """An upper bound of the hit.

    Args:
        length: its tokens.
        compute_from: first position of it that the open step computes; ``length`` if it computes none.
    """

    length: int
    compute_from: int


def longest_boundary(known: Known) -> Ending:
    """Find the longest hit that ends at a boundary, and its blocks.

    The loop ends: each round but the last lowers the length.
    """
    length = known.aligned(known.limit)
    settled = [chain.num_settled * chain.group.block_size for chain in known.chains.values()]
    bound = Bound(length, min([length, *settled]))
    seen = {index: lookup.nothing_seen() for index, lookup in known.lookups.items()}
    while True:
        lower, block_ids = _lower(known, bound, seen)
        if lower == bound:
            return Ending(bound.length, block_ids)
        bound = lower


def _lower(known: Known, bound: Bound, seen: dict[int, Int32Array]) -> tuple[Bound, list[Int32Array]]:
    """Lower a bound for the first reason that applies; if none does, return it with the blocks of such a hit."""
    length, compute_from = bound
    served = _served_by_all(known, length, seen)
    if served < length:
        return Bound(served, min(served, compute_from)), []
    compute_from, block_ids = _collected(known, bound)
    settled = known.aligned(compute_from)
    if block_ids is None or (compute_from < length and _has_settled_behind(known, block_ids, compute_from)):
        return Bound(settled, settled), []
    return bound, block_ids


def _served_by_all(known: Known, length: int, seen: dict[int, Int32Array]) -> int:
    """Lower a length to what all groups that drop blocks can serve."""
    longest = known.state.loops[longest_servable]
    for index, lookup in known.lookups.items():
        num_known = lookup.num_known * lookup.group.block_size
        length = longest(*lookup.arguments, min(length, num_known), seen[index])
    return known.aligned(length)


def _collected(known: Known, bound: Bound) -> tuple[int, list[Int32Array] | None]:
    """Collect the blocks of a hit that all groups can serve, and return where computing it begins.

    Computing pending blocks reads others, which may be pending as well; so each pass over the groups may find that it
    begins earlier. Every block is looked up once. The blocks are None if a group lacks one that computing reads.
    """
    length, compute_from = bound
    block_ids, collect = known.chain_blocks(length), known.state.loops[collect_servable]
    collected = {}
    for index, (group, _) in known.lookups.items():
        num_blocks = length // group.block_size
        block_ids[index], collected[index] = np.zeros(num_blocks, np.int32), np.full(2, num_blocks, np.int32)
    while True:
        first_pending = compute_from
        for index, (group, arguments) in known.lookups.items():
            num_settled = collect(*arguments, length, compute_from, block_ids[index], collected[index])
            if num_settled < 0:
                return compute_from, None
            first_pending = min(first_pending, num_settled * group.block_size)
        if first_pending == compute_from:
            return compute_from, block_ids
        compute_from = first_pending


def _has_settled_behind(known: Known, block_ids: list[Int32Array], compute_from: int) -> bool:
    """Return whether a settled block of a hit lies behind the first position that is still to be computed."""
    open_step = known.state.open_step
    for group, held in zip(known.state.groups, block_ids, strict=True):
        behind = held[compute_from // group.block_size :]
        if (group.pool.arrays.records[behind[behind != NULL_BLOCK], PENDING_STEP] != open_step).any():
            return True
    return False


class _Extent(NamedTuple):
    """The extent of a replay for a hit of some length.

    Args:
        start: first position that it computes, at a block boundary of all window groups.
        is_exact: whether every layer has all that the blocks of the last window need.
    """

    start: int
    is_exact: bool


def longest_with_replay(known: Known, num_hits: int) -> Ending | None:
    """Find the longest hit that ends with a replay.

    None if that is not allowed, or is no longer than the ``num_hits`` tokens that hit without replay.
    """
    state = known.state
    end = known.aligned(min(_num_settled(chain) for chain in known.chains.values()))
    if end <= num_hits:
        return None
    start, is_exact = _extent(state, end)
    if start <= num_hits or end - start > known.prompt.max_replay_tokens:
        return None
    block_ids = known.chain_blocks(end)
    for group in state.replaying_groups:
        before = _blocks_before(known.lookups[group.index], start)
        if before is None:
            return None
        block_ids[group.index] = before
    return Ending(end, block_ids, num_replayed=end - start, is_exact=is_exact)


def first_sure(group: Group, end: int) -> int:
    """Return the first logical block that a hit of ``end`` tokens needs."""
    kind, span, ends_hits = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, ENDS_HITS))
    return int(first_block_of_hit(kind, span, end, group.block_size, ends_hits))


def _num_settled(chain: Chain) -> int:
    """Count the tokens of a chain before those that the open step computes, which a new row could not take over."""
    arrays = chain.group.pool.arrays
    is_open = arrays.records[chain.blocks, PENDING_STEP] == arrays.counts[OPEN_STEP]
    return (int(is_open.argmax()) if is_open.any() else len(chain.blocks)) * chain.group.block_size


def _extent(state: SpaceState, end: int) -> _Extent:
    """Return where the replay of a hit begins: as far back as configured, or where it is exact, if that suffices."""
    groups = state.replaying_groups
    replays = [replay for group in groups if (replay := replay_of(group.spec))]
    sure = min(first_sure(group, end) * group.block_size for group in groups)
    reach = max(int(group.arrays.parameters[SPAN]) for group in groups) - 1
    num_replay_tokens, num_layers = max(it.num_tokens for it in replays), max(it.num_layers for it in replays)
    start = min(
        sure - 1, end - num_replay_tokens
    )  # one block more than is kept: while it is there, the replay's step is not over
    if num_replay_tokens >= num_layers * reach:
        start = min(start, sure - (num_layers - 1) * reach)
    alignment = math.lcm(*(group.block_size for group in groups))
    start = start // alignment * alignment
    return _Extent(start, sure - start >= (num_layers - 1) * reach)


def _blocks_before(lookup: Lookup, start: int) -> Int32Array | None:
    """Return a window group's sinks before a replay; None if it lacks any, or the replay begins inside them."""
    group, arguments = lookup
    num_blocks, num_sinks = start // group.block_size, int(group.arrays.parameters[NUM_SINK_BLOCKS])
    if num_blocks < num_sinks:
        return None
    sinks = [int(find_block(*arguments, index)) for index in range(num_sinks)]
    arrays = group.pool.arrays
    is_open = (arrays.records[sinks, PENDING_STEP] == arrays.counts[OPEN_STEP]).any() if sinks else False
    if NULL_BLOCK in sinks or is_open:
        return None
    return np.array(sinks + [NULL_BLOCK] * (num_blocks - num_sinks), np.int32)


NOTHING: Final = Beginning(NULL_BLOCK, 0)


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
    num_hits, num_settled, _ = state.loops[match_chain](
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


def _digests_of_lane(
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


NO_IDS: Final = np.zeros(0, np.int32)
NO_DIGESTS: Final = np.zeros((0, 8), np.uint32)
UNKNOWN_KEY: Final = -1


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
    num_tokens = len(tokens)
    if num_tokens == 0:
        raise TokenError("an empty prompt cannot be allocated: give at least one token")
    if not isinstance(keys, RequestKeys):
        raise ConfigurationError(f"keys must be RequestKeys, got {keys!r}")
    if num_tokens + num_lookahead > state.config.max_tokens:
        raise TokenError(
            f"{num_tokens} tokens and {num_lookahead} lookahead slots exceed max_tokens = {state.config.max_tokens}"
        )
    return Prompt(tokens, keys, NO_DIGESTS if digests is None else _checked_digests(state, tokens, digests))


def _checked_digests(state: SpaceState, tokens: Int32Array, digests: npt.ArrayLike) -> Uint32Array:
    if len(state.lanes) > 1 or not all(group.keeps_whole_prefix for group in state.cached_groups):
        raise ConfigurationError(
            "digests can be brought only where all groups are full attention of one block size: elsewhere a hit "
            "may rest on the digest alone, so pagedkv computes it"
        )
    num_blocks = len(tokens) // state.cached_groups[0].block_size
    brought = as_array(digests, "digests")
    if brought.dtype != np.uint8 or brought.shape != (num_blocks, DIGEST_NBYTES):
        raise ConfigurationError(
            f"digests must be uint8 [{num_blocks}, 32], one for each full block, got {brought.dtype} "
            f"{list(brought.shape)}: np.frombuffer(b''.join(digests), np.uint8).reshape(-1, 32) makes it of bytes"
        )
    if state.config.events:  # who reads them relies on digests and parents, so all are of one chain: the space's own
        return NO_DIGESTS
    return words_of_digests(brought, num_blocks)


def require_beginning(whole: Int32Array, tokens: Int32Array) -> None:
    """Raise TokenError unless the whole prompt begins with these tokens. O(tokens)."""
    if len(tokens) > len(whole):
        raise TokenError(f"prompt has {len(whole)} tokens, fewer than the {len(tokens)} that are to begin it")
    differs = whole[: len(tokens)] != tokens
    if differs.any():
        place = int(differs.argmax())
        raise TokenError(f"prompt does not begin so: its token {place} is {whole[place]}, not {tokens[place]}")


def extra_ids_of(state: SpaceState, prompt: Prompt, block_size: int, num_blocks: int) -> Int32Array:
    """Ids of the extra keys of the first blocks, without trailing zeros; -1 for a key that no block has."""
    epoch = state.identity_epoch
    if not prompt.has_extra_keys(epoch):
        return NO_IDS
    encodings = keys_of_blocks(prompt.keys, epoch, block_size, 0, num_blocks)
    ids = np.zeros(max(encodings, default=-1) + 1, np.int32)
    known = [state.extra_keys.id_of(encoding) for encoding in encodings.values()]
    ids[list(encodings)] = [UNKNOWN_KEY if key_id is None else key_id for key_id in known]
    return ids


def digests_of_prefix(state: SpaceState, prompt: Prompt, block_size: int, num_blocks: int) -> Uint32Array:
    """Digest the first blocks of a prompt, in words: uint32 ``[n, 8]``; only up to the first unknown extra key."""
    extra_ids = extra_ids_of(state, prompt, block_size, num_blocks)
    num_known = min([num_blocks, *np.flatnonzero(extra_ids == UNKNOWN_KEY)[:1].tolist()])
    digests = np.empty((num_known, 8), np.uint32)
    digest_prompt(prompt.tokens, block_size, num_known, extra_ids, state.extra_keys.arrays, digests)
    return digests


@inlined
def holds_tokens(pool: PoolArrays, block: int, tokens: Int32Array, start: int, block_size: int) -> bool:
    """Whether a block's tokens are those of a prompt from ``start`` on."""
    num_in_pieces = block_size // PIECE * PIECE
    for place in range(0, num_in_pieces, PIECE):
        if not same_piece(pool.tokens, block, place, tokens, start + place):
            return False
    difference = 0
    for place in range(num_in_pieces, block_size):
        difference |= pool.tokens[block, place] ^ tokens[start + place]
    return difference == 0


@inlined
def is_continuation(
    pool: PoolArrays, name: int, block: int, parent: int, tokens: Int32Array, start: int, block_size: int, extra: int
) -> bool:
    """Whether a block is a child of ``parent`` and has the tokens of a prompt from ``start`` on, and its extra keys."""
    return (
        is_child_of(pool, name, block, parent)
        and pool.records[unsigned(block), EXTRA] == extra
        and holds_tokens(pool, block, tokens, start, block_size)
    )


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS, Like.EXTRA_KEYS, Like.WORDS, Like.IDS)
@compiled
def match_chain(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    out: Int32Array,
) -> tuple[int, int, int]:
    """Follow a prompt through a group that keeps whole prefixes.

    Returns how many blocks hit, how many of these come before the first that the open step still computes, and how
    many of them are free.

    Args:
        digests: the prompt's digests if the caller supplied them, else empty.
        out: int32 ``[most blocks that may hit]``; receives the blocks that hit.
    """
    records, open_step = pool.records, pool.counts[OPEN_STEP]
    name, block_size = group.parameters[NAME_IN_POOL], group.parameters[BLOCK_SIZE]
    num_hits, num_settled, num_free, parent = 0, -1, 0, NULL_BLOCK
    for index in range(len(out)):
        start = index * block_size
        extra = extra_ids[index] if index < len(extra_ids) else 0
        if extra < 0:
            break
        block = int(records[unsigned(parent), SUCCESSOR])
        _fetch_ahead(pool, block)
        if not is_continuation(pool, name, block, parent, tokens, start, block_size, extra):
            block = _find_child(pool, group, tokens, extra, extra_keys, digests, index, parent)
            if block == NULL_BLOCK:
                break
        if records[unsigned(block), PENDING_STEP] == open_step:
            if not group.parameters[SHARES_IN_STEP]:
                break
            if num_settled < 0:
                num_settled = index
        elif num_settled >= 0:
            break  # the row that takes over the pending blocks would compute this one again
        if records[unsigned(block), QUEUE] == FREE:
            num_free += 1
        out[index] = block
        num_hits = index + 1
        parent = block
    return num_hits, num_settled if num_settled >= 0 else num_hits, num_free


@inlined
def _fetch_ahead(pool: PoolArrays, block: int) -> None:
    """Prefetch a block further down the chain, unless the chain is contiguous in memory."""
    ahead = int(pool.records[unsigned(block), AHEAD])
    if ahead != block + LOOKAHEAD and ahead > NULL_BLOCK:  # a spare block has no hint
        prefetch(pool.records, ahead, FIRST_WALK_FIELD)  # 36 bytes, in one cache line or two
        prefetch(pool.records, ahead, LAST_WALK_FIELD)
        prefetch(pool.tokens, ahead, 0)


@compiled
def _find_child(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra: int,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    index: int,
    parent: int,
) -> int:
    """Look up the child of ``parent`` with the content of logical block ``index``; the null block if there is none."""
    name = group.parameters[NAME_IN_POOL]
    block_size = group.parameters[BLOCK_SIZE]
    start = index * block_size
    if len(digests):
        block = find(pool, name, digests[index])
    else:
        above = ROOT_WORDS if index == 0 else pool.digests[parent]
        digest_block(above, tokens[start : start + block_size], extra_keys, extra, extra_keys.digest)
        block = find(pool, name, extra_keys.digest)
    if is_continuation(pool, name, block, parent, tokens, start, block_size, extra):
        return block
    return NULL_BLOCK


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS)
@compiled
def first_other_block(pool: PoolArrays, group: GroupArrays, blocks: Int32Array, tokens: Int32Array) -> int:
    """Find the first logical block with other tokens than a prompt, or -1; no block may be null."""
    block_size = group.parameters[BLOCK_SIZE]
    for index in range(len(blocks)):
        if index + LOOKAHEAD < len(blocks):
            prefetch(pool.tokens, blocks[index + LOOKAHEAD], 0)
        if not holds_tokens(pool, blocks[index], tokens, index * block_size, block_size):
            return index
    return -1


@takes(Like.RECORDS, Like.IDS)
@compiled
def count_free(records: Int32Array, blocks: Int32Array) -> int:
    """Count the free ones among some blocks; null blocks do not count."""
    num_free = 0
    for block in blocks:
        if block != NULL_BLOCK and records[block, QUEUE] == FREE:
            num_free += 1
    return num_free


@compiled
def find_block(
    pool: PoolArrays, group: GroupArrays, tokens: Int32Array, extra_ids: Int32Array, digests: Uint32Array, index: int
) -> int:
    """Look up logical block ``index`` of a prompt by its digest; the null block if it cannot be hit."""
    block_size = group.parameters[BLOCK_SIZE]
    block = find(pool, group.parameters[NAME_IN_POOL], digests[index])
    extra = extra_ids[index] if index < len(extra_ids) else 0
    if block == NULL_BLOCK or pool.records[block, EXTRA] != extra:
        return NULL_BLOCK
    if not holds_tokens(pool, block, tokens, index * block_size, block_size):
        return NULL_BLOCK
    if not group.parameters[SHARES_IN_STEP] and pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        return NULL_BLOCK
    return block


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS, Like.WORDS, Like.NUMBER, Like.IDS)
@compiled
def longest_servable(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    limit: int,
    seen: Int32Array,
) -> int:
    """Return the longest prefix of at most ``limit`` tokens for which a group still has all needed blocks.

    Args:
        seen: int32 ``[2]``: the first of the blocks below an earlier limit that are known to be cached, and how many
            sink blocks are. At first: how many blocks the prompt has, and 0. If limits only fall from call to call,
            every block is looked up once, however many calls there are.
    """
    block_size = group.parameters[BLOCK_SIZE]
    length = limit // block_size * block_size
    while length > 0:
        missing = _first_unseen_missing(pool, group, tokens, extra_ids, digests, length, seen)
        if missing < 0:
            return int(length)
        # Every shorter prefix that reaches into the missing block needs it as well.
        length = missing * block_size
    return 0


@compiled
def _first_unseen_missing(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    length: int,
    seen: Int32Array,
) -> int:
    """Find a missing block as :func:`missing_block` does, past those that are known to be cached."""
    first = first_block_to_hold(group, length, length)
    seen[0] = min(seen[0], length // group.parameters[BLOCK_SIZE])
    for index in range(seen[0] - 1, first - 1, -1):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
        seen[0] = index
    for index in range(seen[1], min(group.parameters[NUM_SINK_BLOCKS], first)):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
        seen[1] = index + 1
    return -1


@compiled
def first_block_to_hold(group: GroupArrays, length: int, compute_from: int) -> int:
    """Return the first logical block (sinks aside) that a hit must refer to.

    If the open step still computes tokens of the hit, from position ``compute_from`` on, the hit also refers to the
    blocks that computing them reads, so that its row can take over the computation.
    """
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_of_hit(
        group.parameters[KIND], group.parameters[SPAN], length, block_size, group.parameters[ENDS_HITS]
    )
    needed = first_needed_token(group.parameters[KIND], group.parameters[SPAN], compute_from)
    return int(min(first, needed // block_size))


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS, Like.WORDS, Like.NUMBER, Like.NUMBER)
@compiled
def missing_block(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    length: int,
    compute_from: int,
) -> int:
    """Find a logical block that a hit of ``length`` tokens must refer to and that is not cached, or -1."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_to_hold(group, length, compute_from)
    for index in range(length // block_size - 1, first - 1, -1):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
    for index in range(min(group.parameters[NUM_SINK_BLOCKS], first)):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
    return -1


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS, Like.WORDS, Like.NUMBER, Like.NUMBER, Like.IDS, Like.IDS)
@compiled
def collect_servable(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    length: int,
    compute_from: int,
    out: Int32Array,
    seen: Int32Array,
) -> int:
    """Write the blocks of a hit of ``length`` tokens, null where none is needed.

    Returns how many logical blocks come before the first that the open step still computes, or -1 if a block is
    missing. ``compute_from`` may fall from call to call; then only what is needed in addition is looked up.

    Args:
        out: int32 ``[length // block_size]``, zeros at first.
        seen: int32 ``[2]``, the first block behind the sinks that was looked up, and the first that the open step
            computes; at first ``len(out)`` both.
    """
    first = min(first_block_to_hold(group, length, compute_from), len(out))
    num_sinks = min(group.parameters[NUM_SINK_BLOCKS], first)
    for index in range(seen[0] - 1, first - 1, -1):
        if not _collect(pool, group, tokens, extra_ids, digests, index, out, seen):
            return -1
        seen[0] = index
    for index in range(num_sinks):
        if out[index] == NULL_BLOCK and not _collect(pool, group, tokens, extra_ids, digests, index, out, seen):
            return -1
    return int(seen[1])


@compiled
def _collect(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    index: int,
    out: Int32Array,
    seen: Int32Array,
) -> bool:
    """Look one block up, write it, and note if it is pending; return whether there is one."""
    block = find_block(pool, group, tokens, extra_ids, digests, index)
    out[index] = block
    if block == NULL_BLOCK:
        return False
    if pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        seen[1] = min(seen[1], index)
    return True
