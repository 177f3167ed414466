"""The answer of a match, kept so that admitting the same prompt need not match again.

An answer is valid only while the space does not change (its version shows that) and only for the prompt that was
matched. That it is the same prompt is verified each time: an answer refers to the caller's token array, which may have
been overwritten since, and a hit is granted only for equal content.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.blocks import FREE, NULL_BLOCK, QUEUE
from pagedkv.contract.answers import Load
from pagedkv.contract.arguments import LARGEST_SIZE
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.tails import Tail

__all__ = ["PrefixHit", "Prompt"]

NONE_FREE: Final[dict[str, int]] = {}
NO_BLOCKS: Final = np.zeros(0, np.int32)


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
                index = self._state.loops.first_other_block(group.pool.arrays, group.arrays, blocks, tokens)
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
