"""The content of each stored block, together with everything before it, as far as events show it.

An event names the block before its first one. If the content of that block is known, so is that of the blocks that
follow. If it was stored before the recording began, or within a gap, their content stays unknown. Each distinct block
takes a digest of 32 bytes, whatever its size.
"""

from collections import Counter

from pagedkv.planner.traces.token_blocks import chain_digests
from pagedkv.wire import DEVICE, BlockHash, BlocksStored

__all__ = ["Contents"]


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
