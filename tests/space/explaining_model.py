"""Why prompts miss, from the promise alone: everything that was ever stored, and what was done when it went.

Follows what can be found by its digests, from one operation to the next. What an operation may do to names is written
here as a set of causes; what is there instead is looked for among all stored blocks, one by one.
"""

import math
from collections import Counter
from itertools import pairwise
from typing import Final

from pagedkv import (
    ROOT_DIGEST,
    BlockSpace,
    Explanation,
    FullAttention,
    MissCause,
    RequestKeys,
    SpaceConfig,
    StoredBlock,
    hash_request_tokens,
)

__all__ = ["ExplainingModel"]

GONE_BY_PRESSURE: Final = frozenset({MissCause.EVICTED, MissCause.WINDOW_GONE, MissCause.STATE_GONE})
REPLACED: Final = frozenset({MissCause.OVERWRITTEN, MissCause.STATE_GONE, MissCause.WINDOW_GONE})
NEVER_THERE: Final = frozenset({MissCause.CALLED_OFF})
CAUSES_OF: Final = {  # by how the note of the operation begins
    "reset": frozenset({MissCause.RESET}),
    "start a new weights epoch": frozenset({MissCause.OTHER_EPOCH}),
    "weights of epoch": frozenset({MissCause.OTHER_EPOCH}),
    "forget": frozenset({MissCause.FORGOTTEN}),
    "give the device's memory back": frozenset({MissCause.INVALIDATED}),
    "abort": NEVER_THERE,
    "free": NEVER_THERE,
    "truncate": REPLACED | NEVER_THERE,
    "allocate": GONE_BY_PRESSURE | REPLACED,
    "append": GONE_BY_PRESSURE | REPLACED,
    "fork": GONE_BY_PRESSURE,
    "swap in": GONE_BY_PRESSURE,
    "load": GONE_BY_PRESSURE,
    "evict": GONE_BY_PRESSURE,
    "keep states": GONE_BY_PRESSURE,
    "touch": frozenset(),
}
ANYTHING: Final = GONE_BY_PRESSURE | REPLACED | NEVER_THERE
OF_OTHERS: Final = frozenset(
    {
        MissCause.CHANGED_TOKENS,
        MissCause.OTHER_SALT,
        MissCause.OTHER_ADAPTER,
        MissCause.OTHER_MEDIA,
        MissCause.OTHER_EPOCH,
        MissCause.OTHER_DIGEST,
    }
)
NOTHING_KNOWN: Final = frozenset({MissCause.NEVER_STORED, MissCause.UNKNOWN})
GHOSTS_A_SET: Final = 5  # so many are remembered in any case

Name = tuple[int, bytes]


class ExplainingModel:
    """What was stored, and why it is no more.

    Attributes:
        stored: what can be found after the last operation: group and digest.
        departed: what cannot, and what may have been the cause.
        epochs: weights epochs so far, the present one last.
    """

    def __init__(self, config: SpaceConfig, space: BlockSpace, seen: Counter[str]) -> None:
        """Begin with nothing stored."""
        self.config = config
        self.space = space
        self.seen = seen
        self.stored: set[Name] = set()
        self.departed: dict[Name, frozenset[MissCause]] = {}
        self.epochs = [config.weights_epoch if isinstance(config.weights_epoch, str) else ""]
        self.inside = [index for index, group in enumerate(config.groups) if group.prefix_caching]

    def follow(self, operation: str) -> None:
        """Note what came and went with an operation."""
        if not self.config.prefix_caching:
            return
        now = {name for pool in self.config.pool_names for name in self._names(pool)}
        causes = next((causes for begin, causes in CAUSES_OF.items() if operation.startswith(begin)), ANYTHING)
        self.departed |= dict.fromkeys(self.stored - now, causes)
        for name in now:
            self.departed.pop(name, None)
        self.stored = now

    def _names(self, pool: str) -> list[Name]:
        blocks = self.space.stored_blocks(pool)
        return [(group, bytes(digest)) for group, digest in zip(blocks.groups.tolist(), blocks.digests, strict=True)]

    # What an explanation must contain

    def check(self, answer: Explanation, tokens: list[int], keys: RequestKeys, *, is_forged: bool) -> None:
        """Assert that an explanation is that of the promise."""
        self._check_sum(answer, tokens)
        self.seen[answer.cause.value] += 1
        if not self.config.prefix_caching:
            assert answer.cause is MissCause.NOT_CACHING
            return
        alignment = math.lcm(*(self.config.groups[index].block_size for index in self.inside))
        most = (len(tokens) - 1) // alignment * alignment
        assert (answer.cause is MissCause.NOT_FULL) == (answer.num_hit_tokens >= most)
        if answer.cause is MissCause.NOT_FULL or is_forged:
            return
        if answer.cause is MissCause.LOADING:
            assert self.space.match(tokens, keys=keys).loading is not None
        elif len(self.inside) == 1 and isinstance(self.config.groups[self.inside[0]], FullAttention):
            self._check_chain(answer, tokens, keys)
        elif answer.cause in GONE_BY_PRESSURE | REPLACED | NEVER_THERE:
            is_unseen = self._may_be_called_off(answer)
            assert answer.age is None or self.departed or is_unseen, "something went, though nothing did"

    def check_recorded(self, answer: Explanation, recorded: Explanation) -> None:
        """Assert that the recorded explanation is that of ``explain``, but for causes that only ``explain`` finds."""
        assert (recorded.num_tokens, recorded.num_hit_tokens) == (answer.num_tokens, answer.num_hit_tokens)
        if answer.cause in OF_OTHERS:
            assert recorded.cause in OF_OTHERS | NOTHING_KNOWN | {MissCause.WINDOW_GONE, MissCause.STATE_GONE}
            self.seen["recorded less"] += recorded.cause is not answer.cause
        else:
            same = "cause", "position", "group", "token_id", "age"
            assert [getattr(recorded, name) for name in same] == [getattr(answer, name) for name in same]

    @staticmethod
    def _check_sum(answer: Explanation, tokens: list[int]) -> None:
        """The misses cover all tokens that do not hit, without gaps and overlaps."""
        assert answer.num_tokens == len(tokens)
        assert (answer.misses[0].start, answer.misses[-1].end) == (answer.num_hit_tokens, len(tokens))
        assert all(left.end == right.start and left.cause is not right.cause for left, right in pairwise(answer.misses))
        assert answer.misses[0].cause is answer.cause

    def _check_chain(self, answer: Explanation, tokens: list[int], keys: RequestKeys) -> None:
        """One full group alone decides: what became of the first block that does not hit?"""
        group = self.inside[0]
        size = self.config.groups[group].block_size
        place = answer.num_hit_tokens // size
        start = place * size
        digests = hash_request_tokens(tokens, size, keys, self.epochs[-1])
        assert answer.group == group
        assert start <= answer.position < start + size
        name = group, digests[place]
        if name in self.stored:
            assert answer.cause in {MissCause.ORPHANED, MissCause.BEING_COMPUTED}
            return
        gone = self.departed.get(name, NEVER_THERE if self._may_be_called_off(answer) else None)
        if gone is not None and answer.cause in gone:
            assert answer.age is not None
            return
        may_forget = not self.config.explain or len(self.departed) > GHOSTS_A_SET
        assert gone is None or gone is NEVER_THERE or may_forget, f"it went by {gone}, which the answer does not have"
        if place == 0 and answer.cause is MissCause.OTHER_EPOCH:
            before = [hash_request_tokens(tokens, size, keys, epoch)[0] for epoch in self.epochs[:-1]]
            assert any((group, digest) in self.departed for digest in before)
            return
        expected = self._of_others(group, digests[place - 1] if place else ROOT_DIGEST, tokens[start : start + size])
        self._check_others(answer, start, expected, self._own_keys(keys, start, size), tokens)
        if answer.cause is MissCause.UNKNOWN:
            assert may_forget, "nothing can be forgotten, but the answer is that it may be"

    @staticmethod
    def _may_be_called_off(answer: Explanation) -> bool:
        """Whether content may have come and gone within one operation, unseen by the model."""
        return answer.cause is MissCause.CALLED_OFF

    def _own_keys(self, keys: RequestKeys, start: int, size: int) -> bytes:
        first = keys.first_block_key(self.epochs[-1]) if start == 0 else b""
        return first + keys.media_key(start, start + size)

    def _of_others(self, group: int, parent: bytes, wanted: list[int]) -> list[tuple[int, StoredBlock]]:
        """All that continues the same beginning, with how many tokens it has in common with what is wanted."""
        found = []
        for of_group, digest in self.stored:
            block = self.space.stored_block(digest, group) if of_group == group else None
            if block is not None and block.parent_digest == parent:
                there = block.token_ids.tolist()
                common = next((i for i in range(len(wanted)) if there[i] != wanted[i]), len(wanted))
                found.append((common, block))
        return found

    @staticmethod
    def _check_others(
        answer: Explanation, start: int, others: list[tuple[int, StoredBlock]], own: bytes, tokens: list[int]
    ) -> None:
        """The answer names what is cached in place of the block: the same under other keys, or what differs least."""
        size = max((len(block.token_ids) for _, block in others), default=0)
        if any(common == size for common, _ in others):
            assert answer.cause in OF_OTHERS - {MissCause.CHANGED_TOKENS}
            return
        closest = max((common for common, block in others if block.extra_keys == own), default=None)
        if closest is None or start + closest == 0:
            assert answer.cause in NOTHING_KNOWN
            return
        assert (answer.cause, answer.position) == (MissCause.CHANGED_TOKENS, start + closest)
        assert answer.token_id != tokens[answer.position]
        same = [block for common, block in others if common == closest and block.extra_keys == own]
        assert answer.token_id in {int(block.token_ids[closest]) for block in same}
