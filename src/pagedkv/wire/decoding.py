"""Decodes KV events: one MessagePack payload to values.

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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.extras import needing
from pagedkv.errors import RecordingError

with needing("record", "a stream of KV events"):
    import msgspec

__all__ = ["DEVICE", "BlockHash", "BlocksRemoved", "BlocksStored", "Cleared", "Event", "EventBatch", "decode_batch"]

BlockHash: TypeAlias = int | bytes

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
    """

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    token_ids: Int32Array | None
    block_size: int
    medium: str = DEVICE
    group: int = 0
    has_keys: bool = False
    has_lookahead: bool = False


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


class _Removed(msgspec.Struct):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


_T = TypeVar("_T")


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
    )


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
