"""CacheEventReader: turns decoded batches of pagedkv's events into the events and stored blocks of spaces and tiers."""

from collections.abc import Iterator, Sequence
from typing import Final, assert_never, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.events import CLEARED, REMOVED, STORED, CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.spec import GroupSpec
from pagedkv.errors import RecordingError
from pagedkv.wire.decoding import DEVICE, BlockHash, BlocksRemoved, BlocksStored, Cleared, EventBatch
from pagedkv.wire.encoding import DIGEST_NBYTES, UNKNOWN_PARENT

__all__ = ["CacheEventReader"]

REMEDY: Final = "Name the endpoint of an engine that serves the same model, and that names blocks by digests"
NO_GROUP: Final = -1


@final
class _Columns:
    """The columns of one pool's events or blocks."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.groups: list[int] = []
        self.digests: list[bytes] = []
        self.parents: list[bytes] = []

    def add(self, kind: int, group: int, digests: Sequence[bytes], parents: Sequence[bytes]) -> None:
        self.kinds += [kind] * len(digests)
        self.groups += [group] * len(digests)
        self.digests += digests
        self.parents += parents


@final
class _Entries:
    """The columns of one medium's entries."""

    def __init__(self) -> None:
        self.run_tokens = 0
        self.kinds: list[int] = []
        self.keys: list[bytes] = []

    def events(self, medium: str) -> TierEvents:
        return TierEvents(medium, self.run_tokens, np.array(self.kinds, np.int32), _as_array(self.keys))


def _add_entries(tiers: dict[str, _Entries], event: BlocksStored | BlocksRemoved, source: str) -> None:
    """Add the entries of an event of another medium than the device."""
    entries = tiers.setdefault(event.medium, _Entries())
    keys = _digests(event.block_hashes, source)
    is_stored = isinstance(event, BlocksStored)
    if isinstance(event, BlocksStored):
        entries.run_tokens = event.block_size
    entries.kinds += [STORED if is_stored else REMOVED] * len(keys)
    entries.keys += keys


@final
class CacheEventReader:
    """Reads the events of one model.

    Args:
        groups: the model's KV-cache groups.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._pool_of_group = [group.pool for group in groups]
        self._pools = list(dict.fromkeys(self._pool_of_group))

    def events(self, batch: EventBatch, source: str) -> tuple[CacheEvents | TierEvents, ...]:
        """Return the events of a batch, for each pool and each further medium that has any.

        Args:
            batch: the batch.
            source: the endpoint and the message, for errors.

        Raises:
            RecordingError: the model has no such group, or a hash is not a digest.

        Cost: O(blocks).
        """
        columns = {pool: _Columns() for pool in self._pools}
        tiers: dict[str, _Entries] = {}
        for event in batch.events:
            match event:
                case BlocksStored():
                    if event.medium == DEVICE:
                        self._add_stored(columns, event, source)
                    else:
                        _add_entries(tiers, event, source)
                case BlocksRemoved():
                    if event.medium != DEVICE:
                        _add_entries(tiers, event, source)
                    else:
                        digests = _digests(event.block_hashes, source)
                        self._columns(columns, event.group, source).add(
                            REMOVED, event.group, digests, [UNKNOWN_PARENT] * len(digests)
                        )
                case Cleared():
                    for each in columns.values():
                        each.add(CLEARED, NO_GROUP, [bytes(DIGEST_NBYTES)], [UNKNOWN_PARENT])
                case _:
                    assert_never(event)
        changed = (
            CacheEvents(
                pool,
                np.array(each.kinds, np.int32),
                np.array(each.groups, np.int32),
                np.zeros(len(each.kinds), np.int32),
                _as_array(each.digests),
                _as_array(each.parents),
            )
            for pool, each in columns.items()
            if each.kinds
        )
        return (*changed, *(each.events(medium) for medium, each in tiers.items()))

    def blocks(self, parts: Sequence[EventBatch], source: str) -> tuple[StoredBlocks | TierEvents, ...]:
        """Return the blocks of a snapshot for every pool, and the entries of every further medium. O(blocks).

        Arguments and errors are as in :meth:`events`.
        """
        tiers: dict[str, _Entries] = {}
        columns = {pool: _Columns() for pool in self._pools}
        known_parents: dict[str, list[bool]] = {pool: [] for pool in self._pools}
        for part in parts:
            for event in self.stored(part):
                if event.medium != DEVICE:
                    _add_entries(tiers, event, source)
                    continue
                self._add_stored(columns, event, source)
                known = known_parents[self._pool_of_group[event.group]]
                known += [event.parent_hash != UNKNOWN_PARENT, *[True] * (len(event.block_hashes) - 1)]
        listed = (
            StoredBlocks(
                pool,
                np.array(each.groups, np.int32),
                np.zeros(len(each.groups), np.int32),
                _as_array(each.digests),
                _as_array(each.parents),
                np.array(known_parents[pool], np.bool_),
            )
            for pool, each in columns.items()
        )
        return (*listed, *(each.events(medium) for medium, each in tiers.items()))

    @staticmethod
    def stored(batch: EventBatch) -> Iterator[BlocksStored]:
        """Yield the events of stored blocks and entries, with at least one each."""
        for event in batch.events:
            if isinstance(event, BlocksStored) and event.block_hashes:
                yield event

    def _add_stored(self, columns: dict[str, _Columns], event: BlocksStored, source: str) -> None:
        digests = _digests(event.block_hashes, source)
        (parent,) = _digests([UNKNOWN_PARENT if event.parent_hash is None else event.parent_hash], source)
        self._columns(columns, event.group, source).add(STORED, event.group, digests, [parent, *digests[:-1]])

    def _columns(self, columns: dict[str, _Columns], group: int, source: str) -> _Columns:
        if not 0 <= group < len(self._pool_of_group):
            raise RecordingError(source, f"group {group}, but the model has {len(self._pool_of_group)} groups", REMEDY)
        return columns[self._pool_of_group[group]]


def _digests(hashes: Sequence[BlockHash], source: str) -> list[bytes]:
    digests = [each for each in hashes if isinstance(each, bytes) and len(each) == DIGEST_NBYTES]
    if len(digests) != len(hashes):
        odd = next(each for each in hashes if not isinstance(each, bytes) or len(each) != DIGEST_NBYTES)
        raise RecordingError(source, f"{odd!r:.80} is not a digest of {DIGEST_NBYTES} bytes", REMEDY)
    return digests


def _as_array(digests: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), DIGEST_NBYTES)
