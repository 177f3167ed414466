"""Decodes KV events: one MessagePack payload to values, and pagedkv's own to the events of a block space.

vLLM and SGLang send the same three events in two forms, which may be mixed:

==================  =========================================  ==================================================
value               as an array                                as a map
==================  =========================================  ==================================================
batch               ``[ts, events, data_parallel_rank, ...]``  ``{"ts": ..., "events": ..., ...}``
stored              ``["BlockStored", block_hashes, ...]``     ``{"type": "BlockStored", "block_hashes": ..., ...}``
removed             ``["BlockRemoved", block_hashes, ...]``    ``{"type": "BlockRemoved", ...}``
device cleared      ``["AllBlocksCleared"]``                   ``{"type": "AllBlocksCleared"}``
==================  =========================================  ==================================================

Fields at an array's end, and keys of a map, may be missing. Other fields are ignored, and events of other kinds are
listed by name. A hash is a number or bytes, and is compared for equality only.

pagedkv's own batches have a fourth field, the lifetime of the publisher's process. In a part of a snapshot a fifth one
is the number of blocks of the whole snapshot.

From values CacheEventReader makes the events and stored blocks of spaces and tiers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, assert_never, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import CLEARED, REMOVED, STORED, CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.arrays import DIGEST_NBYTES, Int32Array
from pagedkv.contract.extras import needing
from pagedkv.contract.spec import GroupSpec
from pagedkv.errors import RecordingError

with needing("record", "a stream of KV events"):
    import msgspec

BlockHash: TypeAlias = int | bytes
UNKNOWN_PARENT: Final = bytes(DIGEST_NBYTES)
DEVICE: Final = "GPU"
"""The device's medium, and that of events without one."""
REMOTE: Final = "REMOTE"
MAX_BLOCK_SIZE: Final = 2**24
MAX_TOKEN_ID: Final = 2**31 - 1
BATCH_FIELDS: Final = ("ts", "events", "data_parallel_rank", "lifetime", "num_blocks")
EVENT_FIELDS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "BlockStored": (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
            "locality",
            "ownership",
            "session_id",
            "lookahead_token_ids",
        ),
        "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
        "AllBlocksCleared": (),
    }
)
TAG: Final = "type"
REMEDY: Final = "Name the endpoint of KV events of vLLM or SGLang: --kv-events-config, publisher zmq"

_T = TypeVar("_T")
OTHER_MODEL: Final = "Name the endpoint of an engine that serves the same model, and that names blocks by digests"
NO_GROUP: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """Consecutive blocks of one prefix were stored, so that they can be hit.

    Args:
        block_hashes: hash of each block.
        parent_hash: hash of the block before the first; None: the first begins a prompt.
        token_ids: int32 ``[len(block_hashes) * block_size]``; None: the event has other tokens, or no block size.
        block_size: tokens of a block; 0 without a size, as for blocks that vLLM's connectors have offloaded.
        medium: GPU, CPU, STORAGE, ...; with the owning tier, and whether it is remote, to distinguish media of one
            kind.
        group: number of the group of layers, 0 by default.
        has_keys: whether the blocks' content depends on more than tokens: an adapter, a salt, an image.
        has_lookahead: whether the content of a block also depends on the tokens after it.
        lora_name, salt: the adapter and the salt of the blocks' request, where the event names them by themselves.
        extra_keys: for each block what its content depends on besides tokens, as vLLM sends it: the adapter's name,
            ``[identifier, offset]`` of media, the salt in a first block, digests of embeddings; None: not sent.
        spec_kind, window: the kind of the group's layers, as in vLLM's ``KVCacheSpecKind``, and their window in tokens;
            None: not sent.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    token_ids: Int32Array | None
    block_size: int
    medium: str = DEVICE
    group: int = 0
    has_keys: bool = False
    has_lookahead: bool = False
    lora_name: str | None = None
    salt: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    spec_kind: str | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks were removed from a medium, so that they cannot be hit there."""

    block_hashes: tuple[BlockHash, ...]
    medium: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks of the device were removed at once; from SGLang also those of host memory, but of no other medium."""


Event: TypeAlias = BlocksStored | BlocksRemoved | Cleared


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """The events of one message, in order.

    Args:
        sent_s: time of sending, in seconds since 1970 by the publisher's clock.
        events: the events of known kinds.
        rank: rank of the data-parallel engine, 0 by default.
        unknown_kinds: names of events of other kinds, one for each.
        lifetime: name of the publisher's process; None if it has none, as from vLLM and SGLang.
        num_blocks: in a part of a snapshot, the blocks of the whole snapshot; else None.
    """

    sent_s: float
    events: tuple[Event, ...]
    rank: int = 0
    unknown_kinds: tuple[str, ...] = ()
    lifetime: str | None = None
    num_blocks: int | None = None


class _Batch(msgspec.Struct):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None
    lifetime: Any = None
    num_blocks: Any = None


class _Stored(msgspec.Struct):
    block_hashes: list[int | bytes]
    block_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE)]
    parent_block_hash: int | bytes | None = None
    token_ids: list[Any] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    cache_salt: Any = None
    lookahead_token_ids: list[Any] | None = None
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None


class _Removed(msgspec.Struct):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


def decode_batch(payload: bytes, source: str, *, has_tokens: bool = True) -> EventBatch:
    """Read the payload of one message.

    Args:
        payload: MessagePack.
        source: the endpoint and the message, for errors.
        has_tokens: whether the tokens of stored blocks are decoded; False: they are None.

    Raises:
        RecordingError: the payload is not MessagePack, or not a batch of events.

    Cost: O(tokens).
    """
    try:
        value = msgspec.msgpack.decode(payload)
        batch = _converted(_named(value, BATCH_FIELDS), _Batch)
        if not np.isfinite(batch.ts):
            raise msgspec.ValidationError(f"the time is {batch.ts}")
        tagged = [_tagged(event) for event in batch.events]
        known = tuple(_event(kind, fields, has_tokens) for kind, fields in tagged if kind in EVENT_FIELDS)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(source, f"not a batch of KV events: {error}", REMEDY) from error
    unknown = tuple(kind for kind, _ in tagged if kind not in EVENT_FIELDS)
    return EventBatch(
        batch.ts,
        known,
        batch.data_parallel_rank or 0,
        unknown,
        batch.lifetime if isinstance(batch.lifetime, str) else None,
        batch.num_blocks if isinstance(batch.num_blocks, int) else None,
    )


class _Head(msgspec.Struct, array_like=True):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: Any = None
    lifetime: Any = None


def names_lifetime(payload: bytes) -> bool:
    """Return whether a batch names its process, as pagedkv's do. False, too, for what is no batch. Decodes no event."""
    try:
        return isinstance(msgspec.msgpack.decode(payload, type=_Head).lifetime, str)
    except msgspec.DecodeError:
        return False


def _named(value: object, names: Sequence[str]) -> Mapping[str, Any]:
    """Map names to the values of an array; a map already has names."""
    if isinstance(value, list):
        return dict(zip(names, value, strict=False))
    if isinstance(value, dict):
        return {str(name): each for name, each in value.items()}
    raise msgspec.ValidationError(f"neither an array nor a map but {type(value).__name__}")


def _converted(fields: Mapping[str, Any], kind: type[_T]) -> _T:
    """Check the types of fields; a text is never decoded as base64 bytes."""
    return msgspec.convert(fields, kind, builtin_types=(bytes,))


def _tagged(event: object) -> tuple[str, Mapping[str, Any]]:
    """Split an event into its kind and its fields."""
    if isinstance(event, list) and event:
        kind, values = event[0], event[1:]
        fields = _named(values, EVENT_FIELDS[kind]) if isinstance(kind, str) and kind in EVENT_FIELDS else {}
    else:
        fields = _named(event, ())
        kind = fields.get(TAG)
    if not isinstance(kind, str):
        raise msgspec.ValidationError(f"an event without a kind: {event!r:.60}")
    return kind, fields


def _event(kind: str, fields: Mapping[str, Any], has_tokens: bool) -> Event:  # noqa: FBT001 - one of three
    if kind == "BlockStored":
        return _stored(_converted(fields if has_tokens else {**fields, "token_ids": None}, _Stored))
    if kind == "BlockRemoved":
        removed = _converted(fields, _Removed)
        return BlocksRemoved(tuple(removed.block_hashes), _medium(removed), removed.group_idx or 0)
    return Cleared()


def _stored(stored: _Stored) -> BlocksStored:
    keys = stored.extra_keys is not None and any(stored.extra_keys)
    return BlocksStored(
        tuple(stored.block_hashes),
        stored.parent_block_hash,
        _tokens(stored.token_ids, len(stored.block_hashes) * stored.block_size) if stored.block_size else None,
        stored.block_size,
        _medium(stored),
        stored.group_idx or 0,
        has_keys=keys or any(key is not None for key in (stored.lora_id, stored.lora_name, stored.cache_salt)),
        has_lookahead=any(stored.lookahead_token_ids or ()),
        lora_name=_lora_name(stored),
        salt=stored.cache_salt if isinstance(stored.cache_salt, str) else None,
        extra_keys=None if stored.extra_keys is None else tuple(stored.extra_keys),
        spec_kind=_of_type(stored.kv_cache_spec_kind, str),
        window=_of_type(stored.kv_cache_spec_sliding_window, int),
    )


def _lora_name(stored: _Stored) -> str | None:
    """Return the name of the adapter, or a made-up one that no request has for an adapter that has only a number."""
    return stored.lora_name or (None if stored.lora_id is None else f"\0{stored.lora_id}")


def _of_type(value: object, kind: type[_T]) -> _T | None:
    return value if isinstance(value, kind) else None


def _medium(event: _Stored | _Removed) -> str:
    """Return the name of a medium. A second tier of the same kind, and a remote tier, have names of their own."""
    qualifiers = [event.ownership] if isinstance(event.ownership, str) and event.ownership else []
    if isinstance(event.locality, str) and event.locality.upper() == REMOTE:
        qualifiers.append(REMOTE.lower())
    medium = event.medium or DEVICE
    return f"{medium} ({', '.join(qualifiers)})" if qualifiers else medium


def _tokens(token_ids: Sequence[object] | None, num_tokens: int) -> Int32Array | None:
    """Return the tokens if they are valid and fill the blocks, else None: some publishers send pairs of tokens."""
    if token_ids is None or len(token_ids) != num_tokens:
        return None
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in token_ids):
        return None
    return np.array(token_ids, np.int32)


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
            raise RecordingError(
                source, f"group {group}, but the model has {len(self._pool_of_group)} groups", OTHER_MODEL
            )
        return columns[self._pool_of_group[group]]


def _digests(hashes: Sequence[BlockHash], source: str) -> list[bytes]:
    digests = [each for each in hashes if isinstance(each, bytes) and len(each) == DIGEST_NBYTES]
    if len(digests) != len(hashes):
        odd = next(each for each in hashes if not isinstance(each, bytes) or len(each) != DIGEST_NBYTES)
        raise RecordingError(source, f"{odd!r:.80} is not a digest of {DIGEST_NBYTES} bytes", OTHER_MODEL)
    return digests


def _as_array(digests: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), DIGEST_NBYTES)
