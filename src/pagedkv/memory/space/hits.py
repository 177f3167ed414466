"""What a match answers, kept so that admitting the same prompt need not ask again.

An answer holds as long as the space does not change, which the space's version tells, and only for the question that
was asked. That it is the same question is verified and never presumed: an answer refers to the caller's own tokens,
which may have been overwritten since, and a hit is granted for content alone.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.memory.contract.answers import Load
from pagedkv.memory.contract.arguments import LARGEST_SIZE
from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.contract.errors import ConfigurationError, TokenError
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.pool.blocks import NULL_BLOCK
from pagedkv.memory.space.checkpoints import Tail
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.space.states import checkpoint_of, free_tails

__all__ = ["PrefixHit", "Prompt"]

NONE_FREE: Final[dict[str, int]] = {}
NO_BLOCKS: Final = np.zeros(0, np.int32)


class Prompt(NamedTuple):
    """A prompt ready for matching.

    Args:
        tokens: int32 ``[n]``.
        keys: its extra keys.
        digests: words of its digests if the caller brought them, uint32 ``[n // block_size, 8]``, else empty.
        max_hit_tokens: most tokens that may hit, if not all but the last one.
        max_replay_tokens: most tokens of windows that may be computed again for a longer hit.
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
        """Tell whether any block carries an extra key."""
        keys = self.keys
        if keys is NO_KEYS:
            return bool(weights_epoch)
        return bool(weights_epoch or keys.lora_name is not None or keys.salt or keys.media)


class PrefixHit:
    """How much of a prompt is cached: a question's answer, which holds until the space changes.

    Hand it to ``can_allocate`` and ``allocate`` of the same space as ``match=``, with the same prompt, and they do not
    look again. Made by :meth:`BlockSpace.match() <pagedkv.BlockSpace.match>` alone.

    Attributes:
        num_tokens: leading tokens whose blocks every group with prefix caching can serve; at most ``len(prompt) - 1``,
            or what the question allowed.
        block_ids: for each group read-only int32 ``[num_tokens // block_size]``: the blocks that hit, 0 where the
            group needs none (before its window). Empty for a group that stays out of prefix caching. Of a window that
            is computed again, only those before that begins.
        num_whole_tokens: of these, the tokens that hit without the leading tokens of a block
            (:attr:`SpaceConfig.min_partial_hit <pagedkv.SpaceConfig>`): all, unless that is on.
        tails: what the hit ends inside of, with the tokens that count of it: states kept inside an interval, and blocks
            whose leading tokens hit. The sequence goes on from copies of them, which the plan makes. Empty if the hit
            ends where blocks end in all groups.
        num_replayed: of these, the last tokens, which the step computes once more in window groups alone, since these
            have lost them (:class:`~pagedkv.Replay`); 0 unless the question allowed it.
        is_exact: whether what is computed so is what it was; else the sequence publishes nothing.
        num_free: for each group, how many of these blocks nobody uses now: taking them leaves fewer free blocks, too.
        junction: where the prompt leaves a cached chain that goes on otherwise, at a boundary where hits can end; 0 if
            nowhere, and in spaces that do not shed windows.
        loading: the load that brings what the prompt asks for next behind the hit, if one is under way.
        ends_chain_of: the only group that keeps whole prefixes, where its chain of cached blocks ends with the hit.
    """

    # Not a frozen dataclass, whose construction takes 0.7 us instead of 0.2, of the 4 us of a match of 1,024 tokens.
    num_tokens: int
    num_whole_tokens: int
    block_ids: tuple[Int32Array, ...]
    num_free: tuple[int, ...]

    # What most hits are; those that are otherwise have these of their own.
    num_replayed: int = 0
    is_exact: bool = True
    junction: int = 0
    loading: Load | None = None
    ends_chain_of: Group | None = None
    tails: tuple[Tail, ...] = ()
    _num_free_tails: dict[str, int] = NONE_FREE

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
        """Make the hit longer: it goes on inside of intervals and blocks. For who makes the answer."""
        self.num_tokens = num_tokens
        self.tails = tails
        self._num_free_tails = free_tails(self._state, tails)

    def __repr__(self) -> str:
        return f"PrefixHit(num_tokens={self.num_tokens}, num_blocks_needed={self.num_blocks_needed})"

    @property
    def num_blocks_needed(self) -> dict[str, int]:
        """By pool, what allocating this prompt takes out of the free blocks: new blocks, and hits that are free now.

        Without lookahead slots, as the space was when it was asked. O(groups).
        """
        needed = dict.fromkeys(self._state.pools, 0)
        num_tokens = len(self._prompt.tokens)
        for group, blocks, num_free in zip(self._state.groups, self.block_ids, self.num_free, strict=True):
            needed[group.pool.name] += group.num_slots_blocks(num_tokens, 0) - len(blocks) + num_free
        for pool, num_tails in self._num_free_tails.items():
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
        """The prompt that was asked about. O(1)."""
        return self._prompt

    @property
    def checkpoint(self) -> int:
        """Where a chunk of this prompt is to end, so that its last state is kept for later prompts; 0 if nowhere. O(1).

        Where no group is a recurrent state, and where that state is hit, or kept at an interval's end, it is 0.
        """
        return checkpoint_of(self._state, self.prompt_length, self.num_tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that was asked about. O(1)."""
        return len(self._prompt.tokens)

    @property
    def max_hit_tokens(self) -> int:
        """Most tokens that were to hit, as :meth:`BlockSpace.match <pagedkv.BlockSpace.match>` was asked. O(1)."""
        return self._prompt.max_hit_tokens

    @property
    def max_replay_tokens(self) -> int:
        """Most tokens that were to be computed again in windows, as the question allowed. O(1)."""
        return self._prompt.max_replay_tokens

    def still_holds(self, state: SpaceState, prompt: Prompt) -> bool:
        """Tell whether a space that is asked about a prompt, or a beginning of it, would answer the same.

        A beginning hits as much, if it reaches beyond the hit: that is how the first chunk of a prompt is allocated.
        Changes nothing.

        Raises:
            ConfigurationError: the answer is that of another space, or for other keys.
            TokenError: it is for another prompt, or the prompt was overwritten in between.

        Cost: a comparison of the tokens; where they are in the same array as before, of those that hit alone.
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
        """Raise TokenError unless the tokens begin the prompt that was asked about."""
        asked = self._prompt.tokens
        if tokens is asked:
            return
        if len(tokens) > len(asked):
            raise TokenError(f"match is the answer for a prompt of {len(asked)} tokens, not for one of {len(tokens)}")
        differs = asked[: len(tokens)] != tokens
        if differs.any():
            place = int(differs.argmax())
            raise TokenError(
                f"match is the answer for another prompt: token {place} was {asked[place]}, it is {tokens[place]} now"
            )

    def _require_same_content(self, tokens: Int32Array) -> None:
        """Compare the blocks with the tokens: the array that was asked about may hold others by now."""
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
        """Compare what the hit takes of a block's beginning."""
        for tail in self.tails:
            if tail.group == group.index:
                start = tail.logical_index * group.block_size
                kept = group.pool.arrays.tokens[tail.block, : tail.num_tokens]
                if (kept != tokens[start : start + tail.num_tokens]).any():
                    raise TokenError(
                        f"match is the answer for another prompt: tokens {start} to {start + tail.num_tokens - 1} have "
                        "been overwritten since"
                    )
