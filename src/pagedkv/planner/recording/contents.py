"""What blocks that events stored contain, and numbers for them.

Numbers of messages: a message's number and time determine its place.

A publisher numbers its messages from 0, and again from 0 after a restart. Where messages have the name of their
process (a lifetime), it distinguishes two processes. Else only times do: a message that is sent again has its old time;
a message of a new process has a later one.

The content of each stored block, together with everything before it, as far as events show it.

An event names the block before its first one. If the content of that block is known, so is that of the blocks that
follow. If it was stored before the recording began, or within a gap, their content stays unknown. Each distinct block
takes a digest of 32 bytes, whatever its size.
"""

from collections import Counter
from enum import Enum, auto

from pagedkv.planner.traces.token_blocks import chain_digests
from pagedkv.wire import DEVICE, BlockHash, BlocksStored

__all__ = ["Contents", "MessageNumbers", "Place"]


class Place(Enum):
    """The place of a message relative to earlier ones."""

    NEXT = auto()
    SEEN = auto()
    """Received before, and requested again."""
    BEHIND_GAP = auto()
    RESTARTED = auto()
    """A lower number with a later time: a new process, whose cache was empty at first."""


class MessageNumbers:
    """Follows the numbers of one publisher."""

    def __init__(self) -> None:
        self.expected = 0
        """Number of the next message."""
        self._latest_s = float("-inf")
        self.lifetime: str | None = None
        """Name of the followed process; None before the first message, and where messages have none."""

    @property
    def has_begun(self) -> bool:
        """Whether any message was taken."""
        return self._latest_s > float("-inf")

    def place(self, number: int, sent_s: float, lifetime: str | None = None) -> Place:
        """Return the place of a message. Changes nothing."""
        is_another = lifetime is not None and self.lifetime not in {None, lifetime}
        if is_another and sent_s >= self._latest_s:
            return Place.RESTARTED
        if number >= self.expected and not is_another:
            return Place.NEXT if number == self.expected else Place.BEHIND_GAP
        return Place.SEEN if lifetime is not None or sent_s <= self._latest_s else Place.RESTARTED

    def is_past(self, sent_s: float) -> bool:
        """Return whether a time is before that of the last message taken. Changes nothing."""
        return sent_s < self._latest_s

    def take(self, number: int, sent_s: float, lifetime: str | None = None) -> None:
        """Continue after a message."""
        self.expected = number + 1
        self._latest_s = sent_s
        self.lifetime = lifetime

    def begin_anew(self) -> None:
        """Follow a new process."""
        self.lifetime = None
        self.expected = 0


class Contents:
    """The contents of all blocks that were ever stored while this process of the engine was followed."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, BlockHash], bytes] = {}
        self._seen: dict[int, set[bytes]] = {}
        self.num_unknown = 0
        """Blocks whose content is not in the events."""
        self.num_with_keys = 0
        """Blocks whose content depends on more than tokens."""
        self.num_with_lookahead = 0
        """Blocks whose content depends on the tokens after them as well."""
        self.num_by_block_size: Counter[int] = Counter()
        """Number of blocks by block size."""

    def store(self, stored: BlocksStored) -> None:
        """Record stored blocks. O(tokens)."""
        num_blocks, size = len(stored.block_hashes), stored.block_size
        is_entry = stored.medium != DEVICE and stored.token_ids is None  # of a tier; its size is no block's
        if size and num_blocks and not is_entry:
            self.num_by_block_size[size] += num_blocks
        self.num_with_keys += num_blocks if stored.has_keys else 0
        self.num_with_lookahead += num_blocks if stored.has_lookahead else 0
        parent = b"" if stored.parent_hash is None else self._digests.get((size, stored.parent_hash))
        if parent is None or stored.token_ids is None:
            self.num_unknown += num_blocks
            return
        seen = self._seen.setdefault(size, set())
        for block_hash, digest in zip(stored.block_hashes, chain_digests(stored.token_ids, size, parent), strict=True):
            self._digests[size, block_hash] = digest
            seen.add(digest)

    def has_content(self, stored: BlocksStored) -> bool:
        """Return whether the content of all these blocks is known already."""
        return all((stored.block_size, each) in self._digests for each in stored.block_hashes)

    def forget_hashes(self) -> None:
        """Forget the hashes of an ended process; its contents still count as stored."""
        self._digests.clear()

    def was_stored(self, digest: bytes, block_size: int) -> bool:
        """Return whether an event stored a block of this content and prefix."""
        return digest in self._seen.get(block_size, ())

    @property
    def block_size(self) -> int | None:
        """The most frequent block size; None before the first block."""
        return max(self.num_by_block_size, key=lambda size: (self.num_by_block_size[size], -size), default=None)
