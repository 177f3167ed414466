"""KV events byte by byte, as the formats are documented, in both spellings."""

import msgspec
import pytest

from pagedkv.errors import RecordingError
from pagedkv.wire import BlocksRemoved, BlocksStored, Cleared, Event, decode_batch
from tests.recording.events import as_arrays, as_maps, removed, stored
from tests.wire.golden_frames import SGLANG, VLLM

# MessagePack by hand: 9n array, 8n map, an text, cb float64, c0 nil, c4 bytes, cf uint64, d3 int64, 0n number.
TIME = b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"  # 1.5

ARRAYS = (
    b"\x92" + TIME + b"\x94"
    b"\x97\xabBlockStored\x92\x07\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc0\x94\x01\x02\x03\x04\x02\xc0\xa3GPU"
    b"\x96\xabBlockStored\x91\xd3\xff\xff\xff\xff\xff\xff\xff\xf6\x07\x92\x05\x06\x02\xc0"
    b"\x92\xacBlockRemoved\x91\x07"
    b"\x91\xb0AllBlocksCleared"
)
HASH = bytes(range(32))
MAPS = (
    b"\x93" + TIME + b"\x93"
    b"\x88\xa4type\xabBlockStored"
    b"\xacblock_hashes\x91\xc4\x20" + HASH + b"\xb1parent_block_hash\xc0\xa9token_ids\x92\x01\xcd\x01\x00"
    b"\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa3CPU\xa9group_idx\x01"
    b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\xc4\x20" + HASH + b"\xa6medium\xa3CPU\xa9group_idx\x01"
    b"\x81\xa4type\xb0AllBlocksCleared"
    b"\x03"
)


def summary(event: Event) -> tuple[object, ...]:
    if isinstance(event, BlocksStored):
        tokens = None if event.token_ids is None else event.token_ids.tolist()
        return (event.block_hashes, event.parent_hash, tokens, event.block_size, event.medium, event.group)
    if isinstance(event, BlocksRemoved):
        return (event.block_hashes, event.medium, event.group)
    assert isinstance(event, Cleared)
    return ()


def test_arrays_with_tags_as_sglang_sends_them() -> None:
    batch = decode_batch(ARRAYS, "here")
    assert (batch.sent_s, batch.rank) == (1.5, 0)
    assert [summary(event) for event in batch.events] == [
        ((7, 2**64 - 1), None, [1, 2, 3, 4], 2, "GPU", 0),
        ((-10,), 7, [5, 6], 2, "GPU", 0),
        ((7,), "GPU", 0),
        (),
    ]


def test_maps_with_types_as_vllm_sends_them() -> None:
    batch = decode_batch(MAPS, "here")
    assert (batch.sent_s, batch.rank) == (1.5, 3)
    assert [summary(event) for event in batch.events] == [
        ((HASH,), None, [1, 256], 2, "CPU", 1),
        ((HASH,), "CPU", 1),
        (),
    ]


def test_a_batch_may_be_a_map_as_well() -> None:
    batch = decode_batch(as_maps(2.0, stored([1], [5, 6]), removed([1])), "here")
    assert [summary(event) for event in batch.events] == [((1,), None, [5, 6], 2, "GPU", 0), ((1,), "GPU", 0)]
    assert [summary(event) for event in decode_batch(as_arrays(2.0, stored([1], [5, 6])), "here").events] == [
        ((1,), None, [5, 6], 2, "GPU", 0)
    ]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [], [[1, 2], [2, 3]], [-1, 2], [2**31, 2], [True, 1]])
def test_tokens_that_do_not_fill_the_blocks_are_unknown(tokens: list[int]) -> None:
    (event,) = decode_batch(as_maps(1.0, stored([1], tokens)), "here").events
    assert isinstance(event, BlocksStored)
    assert event.token_ids is None


def test_events_of_other_kinds_are_counted_and_other_fields_ignored() -> None:
    told = stored([1], [5, 6]) | {"ownership": {"x": 1}, "lora_name": "adapter"}
    batch = decode_batch(as_maps(1.0, {"type": "BlockMoved", "to": 3}, told), "here")
    assert batch.unknown_kinds == ("BlockMoved",)
    (event,) = batch.events
    assert isinstance(event, BlocksStored)
    assert event.has_keys
    plain = stored([1], [5, 6]) | {"extra_keys": [None]}
    assert [
        event.has_keys for event in decode_batch(as_maps(1.0, plain), "").events if isinstance(event, BlocksStored)
    ] == [False]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not a batch of KV events"),
        (ARRAYS[:-1], "not a batch of KV events"),
        (b"\xa2hi", "neither an array nor a map but str"),
        (b"\x92\xa2no\x90", "Expected `float`, got `str`"),
        (b"\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x90", "the time is nan"),
        (b"\x92" + TIME + b"\x91\x90", "an event without a kind: []"),
        (b"\x92" + TIME + b"\x91\x91\x07", "an event without a kind"),
        (msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], -1]]]), "Expected `int` >= 0"),
        (msgspec.msgpack.encode([1.0, [["BlockStored", ["x"], None, [1], 1]]]), "Expected `int | bytes`, got `str`"),
        (msgspec.msgpack.encode([1.0, [["BlockRemoved"]]]), "missing required field `block_hashes`"),
        (b"\x91" * 5000, "not a batch of KV events"),
    ],
)
def test_what_is_no_batch_is_refused_with_its_source(payload: bytes, reason: str) -> None:
    with pytest.raises(RecordingError, match="tcp://here:1, message 4: ") as caught:
        decode_batch(payload, "tcp://here:1, message 4")
    assert reason in str(caught.value)


def test_tiers_that_are_owned_or_remote_are_media_of_their_own_and_lookahead_is_told() -> None:
    told = stored([1], [5, 6]) | {"medium": "STORAGE", "ownership": "fs", "locality": "REMOTE"}
    ahead = stored([2], [5, 6]) | {"locality": "LOCAL", "lookahead_token_ids": [[7]], "session_id": "s"}
    gone = removed([1]) | {"medium": "STORAGE", "ownership": "fs", "locality": "REMOTE"}
    first, second, third = decode_batch(as_maps(1.0, told, ahead, gone), "here").events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(third, BlocksRemoved)
    assert [first.medium, second.medium, third.medium] == ["STORAGE (fs, remote)", "GPU", "STORAGE (fs, remote)"]
    assert [first.has_lookahead, second.has_lookahead] == [False, True]


def test_a_salt_tells_blocks_apart() -> None:
    (event,) = decode_batch(as_maps(1.0, stored([1], [5, 6]) | {"cache_salt": "tenant"}), "here").events
    assert isinstance(event, BlocksStored)
    assert event.has_keys


def test_batches_of_the_real_publisher_of_vllm() -> None:
    """Two blocks of an adapter; then a block that a connector offloaded, of which it tells neither tokens nor size."""
    first, second = (decode_batch(payload, "here") for payload in VLLM)
    assert [(batch.sent_s, batch.rank, batch.unknown_kinds) for batch in (first, second)] == [
        (1.5, 0, ()),
        (2.5, 0, ()),
    ]
    hashes = (b"\0\1\2\3", b"\4\5\6\7")
    assert [summary(event) for event in first.events] == [(hashes, None, [1, 256, 3, 4], 2, "GPU", 0)]
    assert [summary(event) for event in second.events] == [
        ((hashes[0],), None, None, 0, "CPU", 1),
        ((hashes[0],), "GPU", 0),
        (),
    ]
    (stored_first,) = first.events
    assert isinstance(stored_first, BlocksStored)
    assert stored_first.has_keys


def test_batches_of_the_real_publisher_of_sglang() -> None:
    """Of rank 1, a store in host memory among them; hashes have a sign."""
    first, second = (decode_batch(payload, "here") for payload in SGLANG)
    assert [(batch.sent_s, batch.rank, batch.unknown_kinds) for batch in (first, second)] == [
        (1.5, 1, ()),
        (2.5, 1, ()),
    ]
    assert [summary(event) for event in first.events] == [(), ((7, -10), None, [1, 256, 3, 4], 2, "GPU", 0)]
    assert [summary(event) for event in second.events] == [
        ((7,), None, [1, 256], 2, "CPU_PINNED", 0),
        ((7,), "GPU", 0),
    ]


def test_without_a_size_tokens_are_unknown() -> None:
    (event,) = decode_batch(as_maps(1.0, stored([1], [], size=0)), "here").events
    assert isinstance(event, BlocksStored)
    assert (event.block_size, event.token_ids) == (0, None)
