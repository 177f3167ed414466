"""LearntNames: what another engine's blocks are called here, learnt from the tokens and parents in its own events.

vLLM names blocks by 64-bit numbers or SHA-256 digests, SGLang by signed numbers, each by a scheme, a seed and a version
of its own. So hashes are not recomputed: a block that begins a prompt is what its tokens and keys say, another one is
its parent and its tokens; both have a digest of pagedkv's chain, by which an index finds the tokens of any prompt. A
hash is compared for equality alone, within its group, and forgotten when no medium has the block any more::

    BlockStored   hashes [7, -9], parent None, tokens [1 2 3 4]     7 -> digest(root, 1 2), -9 -> digest(7, 3 4)
    BlockStored   hashes [4], parent -9, tokens [5 6]               4 -> digest(-9, 5 6)
    BlockStored   hashes [5], parent 99                             unplaced: its beginning is not known
    BlockRemoved  hashes [-9]                                       -9 is gone; 4 keeps its digest

Equal blocks are stored more than once and removed as often: copies are counted, and an index learns of the first and
the last. What an engine says that is not so costs hits: a block that is not there is not hit, and is computed there.

An adapter and a salt are keys of a prompt's first block, and so of all that continue it. Media and embeddings are keys
that no prompt has here, so what continues them is never predicted.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

import numpy as np

from pagedkv.blocks.digests import ROOT_DIGEST, hash_block_tokens
from pagedkv.contract.answers import CLEARED, REMOVED, STORED, CacheEvents, TierEvents
from pagedkv.contract.arrays import DIGEST_NBYTES
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import DEFAULT_POOL, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.wire.decoding import DEVICE, NO_GROUP, BlockHash, BlocksRemoved, BlocksStored, EventBatch

CLEARED_TOO: Final = "CPU_PINNED"
"""SGLang's host memory, which it empties with the device and reports by one event."""
MEDIA: Final[Mapping[str, str]] = {CLEARED_TOO: "CPU"}
"""Media under the name that the index weighs them by."""
MOST_BLOCKS: Final = 4_000_000
"""Most blocks of an engine; one that announces more is forgotten and learnt anew. A block takes some 250 bytes."""

Name = tuple[int, BlockHash]
Change = tuple[int, int, bytes]


@final
class LearntNames:
    """The blocks of one engine.

    Args:
        most_blocks: most blocks that are remembered.

    Attributes:
        groups_seen: rule of each group whose blocks were stored, by number.
        num_unplaced: stored blocks whose beginning or tokens were not known.
        num_overflows: how often there were more blocks than are remembered.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._digests: dict[Name, bytes] = {}
        self._copies: dict[str, dict[Name, int]] = {}
        self.groups_seen: dict[int, GroupSpec] = {}
        self.num_unplaced = 0
        self.num_overflows = 0

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups in their order; one between them that was not seen yet has no prefix caching."""
        absent = FullAttention(prefix_caching=False)
        return tuple(self.groups_seen.get(number, absent) for number in range(max(self.groups_seen, default=-1) + 1))

    def begin_empty(self) -> None:
        """Forget all blocks: another process has begun. Its groups may differ too."""
        self._digests.clear()
        self._copies.clear()
        self.groups_seen.clear()

    def events(self, batch: EventBatch) -> tuple[CacheEvents | TierEvents, ...]:
        """Learn the blocks of a batch; return its events by digests, for each medium that has any. O(tokens)."""
        changes: dict[str, list[Change]] = {}
        for event in batch.events:
            match event:
                case BlocksStored():
                    changes.setdefault(event.medium, []).extend(self._store(event))
                case BlocksRemoved():
                    changes.setdefault(event.medium, []).extend(self._remove(event))
                case _:
                    self._clear(changes)
        if len(self._digests) > self._most:
            self.num_overflows += 1
            self._clear(changes)
            for medium in [*self._copies]:
                changes.setdefault(medium, []).extend(self._empty(medium))
        return tuple(self._as_events(medium, each) for medium, each in changes.items() if each)

    # Inside

    def _store(self, event: BlocksStored) -> Iterator[Change]:
        self._see(event)
        named = [(event.group, each) for each in event.block_hashes]
        if event.token_ids is None:  # only names: an entry of blocks that are known from elsewhere
            known = [name for name in named if name in self._digests]
        else:
            known = named if self._name(event, named) else []
        self.num_unplaced += len(named) - len(known)
        copies = self._copies.setdefault(event.medium, {})
        for name in known:
            copies[name] = copies.get(name, 0) + 1
            if copies[name] == 1:
                yield STORED, name[0], self._digests[name]

    def _name(self, event: BlocksStored, named: list[Name]) -> bool:
        """Give each block its digest; return False if what comes before the first is not known."""
        assert event.token_ids is not None
        parent: bytes | None = ROOT_DIGEST
        if event.parent_hash is not None:
            parent = self._digests.get((event.group, event.parent_hash))
        if parent is None:
            return False
        size = event.block_size
        for place, name in enumerate(named):
            is_first = event.parent_hash is None and not place
            tokens = event.token_ids[place * size : (place + 1) * size]
            parent = hash_block_tokens(parent, tokens, _keys(event, place, is_first=is_first))
            self._digests[name] = parent
        return True

    def _remove(self, event: BlocksRemoved) -> Iterator[Change]:
        copies = self._copies.get(event.medium, {})
        for each in event.block_hashes:
            name = (event.group, each)
            left = copies.get(name, 0) - 1
            if left > 0:
                copies[name] = left
            elif not left:
                del copies[name]
                yield REMOVED, name[0], self._digests[name]
                self._forget(name)

    def _forget(self, name: Name) -> None:
        if not any(name in copies for copies in self._copies.values()):
            self._digests.pop(name, None)

    def _clear(self, changes: dict[str, list[Change]]) -> None:
        for name in self._copies.pop(DEVICE, {}):
            self._forget(name)
        changes.setdefault(DEVICE, []).append((CLEARED, NO_GROUP, bytes(DIGEST_NBYTES)))
        if CLEARED_TOO in self._copies:
            changes.setdefault(CLEARED_TOO, []).extend(self._empty(CLEARED_TOO))

    def _empty(self, medium: str) -> list[Change]:
        copies = self._copies.pop(medium)
        gone = [(REMOVED, name[0], self._digests[name]) for name in copies]
        for name in copies:
            self._forget(name)
        return gone

    def _see(self, event: BlocksStored) -> None:
        if event.medium == DEVICE and event.block_size and event.group not in self.groups_seen:
            self.groups_seen[event.group] = _group(event)

    def _as_events(self, medium: str, changes: list[Change]) -> CacheEvents | TierEvents:
        kinds = np.array([kind for kind, _, _ in changes], np.int32)
        digests = np.frombuffer(b"".join(digest for *_, digest in changes), np.uint8).reshape(-1, DIGEST_NBYTES)
        if medium != DEVICE:
            sizes = [getattr(spec, "block_size", 0) for spec in self.groups_seen.values()]
            return TierEvents(MEDIA.get(medium, medium), max(sizes, default=0), kinds, digests)
        groups = np.array([group for _, group, _ in changes], np.int32)
        return CacheEvents(DEFAULT_POOL, kinds, groups, np.zeros_like(kinds), digests, np.zeros_like(digests))


def _group(event: BlocksStored) -> GroupSpec:
    """Return the rule of a group's blocks. Kinds that are not known are held to the strictest rule: whole prefixes."""
    size, window = event.block_size, event.window
    match event.spec_kind:
        case "sliding_window" | "sliding_window_mla" if window:
            return SlidingWindow(window, size)
        case "chunked_local_attention" if window:
            return ChunkedLocal(window, size)
        case "mamba":
            return RecurrentState(size, pool=DEFAULT_POOL)
        case _:
            return FullAttention(size)


def _keys(event: BlocksStored, place: int, *, is_first: bool) -> bytes:
    """Encode what a block's content depends on besides tokens, as a prompt's first block has it."""
    of_block: Iterable[Any] = ()
    if event.extra_keys is not None and place < len(event.extra_keys) and event.extra_keys[place]:
        given = event.extra_keys[place]
        of_block = list(given) if isinstance(given, list | tuple) else [given]
    rest = list(of_block)
    if event.lora_name is not None and event.lora_name in rest:
        rest.remove(event.lora_name)
    salt = event.salt
    if is_first and salt is None:
        salt = next((each for each in rest if isinstance(each, str)), None)
    if salt in rest:
        rest.remove(salt)
    encoded = b""
    if is_first:
        given_salt = (salt or "").encode("utf-8", "surrogatepass")
        encoded = RequestKeys(event.lora_name, salt=given_salt).first_block_key("")
    return encoded + (repr(rest).encode() if rest else b"")
