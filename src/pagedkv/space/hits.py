"""Hits: a prompt, how much of it is cached, and the values from which the passes of a match find that.

There are two kinds of groups. A group that keeps whole prefixes gives a *chain*. In a group that drops blocks
(windows, chunks, states), only the blocks that a hit of some length needs are looked up by digest: its *lookup* has
the digests of the prompt's blocks. :mod:`pagedkv.space.matching` has the passes in their order.

The answer of a match is kept so that admitting the same prompt need not match again. It is valid only while the space
does not change (its version shows that) and only for the prompt that was matched. That it is the same prompt is
verified each time: an answer refers to the caller's token array, which may have been overwritten since, and a hit is
granted only for equal content.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.digests import digest_covered, keys_of_blocks, words_of_digests
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import (
    EXTRA,
    FREE,
    LOOKAHEAD,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    PoolArrays,
)
from pagedkv.compilation.compiled import PIECE, compiled, inlined, prefetch, same_piece
from pagedkv.contract.answers import Load
from pagedkv.contract.arguments import LARGEST_SIZE, as_array, as_token_array
from pagedkv.contract.arrays import DIGEST_NBYTES, NO_BLOCKS, Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds, refuse_ahead
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.rows import (
    BLOCK_SIZE,
    COVERED,
    ENDS_HITS,
    KIND,
    NAME_IN_POOL,
    NUM_SINK_BLOCKS,
    SHARES_IN_STEP,
    SPAN,
    GroupArrays,
    first_block_of_hit,
    first_needed_token,
    root_of,
)
from pagedkv.space.state import Group, SpaceState


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
        if self._version != state.version or len(prompt.tokens) <= self.num_tokens + state.beyond_hits:
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
    refuse_ahead(state.config.groups, "digests cannot be brought, since a hit may rest on them")
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


def extra_ids_of(state: SpaceState, prompt: Prompt, group: Group, num_blocks: int) -> Int32Array:
    """Ids of the extra keys of the first blocks of a lane, which has ``group``; -1 for a key that no block has.

    Trailing zeros are left out.
    """
    epoch = state.weights.identity
    if not prompt.has_extra_keys(epoch):
        return NO_IDS
    encodings = keys_of_blocks(prompt.keys, epoch, group.block_size, 0, num_blocks, group.num_ahead)
    ids = np.zeros(max(encodings, default=-1) + 1, np.int32)
    known = [state.extra_keys.id_of(encoding) for encoding in encodings.values()]
    ids[list(encodings)] = [UNKNOWN_KEY if key_id is None else key_id for key_id in known]
    return ids


def digests_of_prefix(
    state: SpaceState, prompt: Prompt, group: Group, num_blocks: int, extra_ids: Int32Array | None = None
) -> Uint32Array:
    """Digest the first blocks of a prompt, as those of ``group`` are named, in words: uint32 ``[n, 8]``.

    Only up to the first unknown extra key, and only blocks whose names the prompt determines.

    Args:
        state: the space; prompt: the prompt; group: the group; num_blocks: how many blocks at most.
        extra_ids: the ids of the blocks' extra keys, if they are known.
    """
    num_blocks = min(num_blocks, group.num_sealed(len(prompt.tokens)))
    if extra_ids is None:
        extra_ids = extra_ids_of(state, prompt, group, num_blocks)
    num_known = min([num_blocks, *np.flatnonzero(extra_ids == UNKNOWN_KEY)[:1].tolist()])
    digests = np.empty((num_known, 8), np.uint32)
    size, covered, keys = group.block_size, group.block_size + group.num_ahead, state.extra_keys.arrays
    digest_covered(prompt.tokens, size, covered, root_of(group.arrays), num_known, extra_ids, keys, digests)
    return digests


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
        parent: Uint32Array = self.arguments[-1][index - 1] if index else root_of(self.group.arrays)
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


NOTHING: Final = Beginning(NULL_BLOCK, 0)


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


@inlined
def holds_tokens(pool: PoolArrays, block: int, tokens: Int32Array, start: int, covered: int) -> bool:
    """Whether the tokens that a block's name covers are those of a prompt from ``start`` on."""
    num_in_pieces = covered // PIECE * PIECE
    for place in range(0, num_in_pieces, PIECE):
        if not same_piece(pool.tokens, block, place, tokens, start + place):
            return False
    difference = 0
    for place in range(num_in_pieces, covered):
        difference |= pool.tokens[block, place] ^ tokens[start + place]
    return difference == 0


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS)
@compiled
def first_other_block(pool: PoolArrays, group: GroupArrays, blocks: Int32Array, tokens: Int32Array) -> int:
    """Find the first logical block with other tokens than a prompt, or -1; no block may be null."""
    block_size = group.parameters[BLOCK_SIZE]
    for index in range(len(blocks)):
        if index + LOOKAHEAD < len(blocks):
            prefetch(pool.tokens, blocks[index + LOOKAHEAD], 0)
        if not holds_tokens(pool, blocks[index], tokens, index * block_size, group.parameters[COVERED]):
            return index
    return -1


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
    if not holds_tokens(pool, block, tokens, index * block_size, group.parameters[COVERED]):
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
