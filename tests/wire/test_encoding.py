"""Changes of caches as messages: what is read from them is what the space has."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import (
    ROOT_DIGEST,
    Allocation,
    BlockSpace,
    CacheEventKind,
    CacheEvents,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    MediaSpan,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    StoredBlocks,
    hash_block_tokens,
    hash_request_tokens,
)
from pagedkv.contract.answers import REMOVED, STORED, TierEvents
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.spec import RecurrentState
from pagedkv.errors import RecordingError
from pagedkv.wire import (
    UNKNOWN_PARENT,
    BatchEncoder,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    EventBatch,
    changes_of,
    decode_batch,
    listed_pools,
)
from pagedkv.wire.decoding import CacheEventReader
from pagedkv.wire.encoding import in_parent_order
from tests.space.spaces import allocate, cache, new_space, prefill, run_step, tokens

pytestmark = pytest.mark.interpreted

MIXES: Final[dict[str, tuple[GroupSpec, ...]]] = {
    "full": (FullAttention(4),),
    "full and window": (FullAttention(4), SlidingWindow(6, 4)),
    "window with sinks": (SlidingWindow(6, 4, num_sink_tokens=5),),
    "two pools": (FullAttention(4), ChunkedLocal(8, 2, pool="small")),
    "full and state": (FullAttention(4), RecurrentState(8, pool="state")),
}
Names = set[tuple[int, bytes]]


def encoded(space: BlockSpace, encoder: BatchEncoder) -> bytes:
    """Encode the events of a space since the last call."""
    return encoder.batch(1.5, changes_of(space, space.drain_events()))


def raw_events(payload: bytes) -> list[dict[str, Any]]:
    """Give the maps as they are."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events


def pairs_of(blocks: CacheEvents | StoredBlocks) -> list[tuple[int, bytes]]:
    """Give group and digest of each block."""
    return list(zip(blocks.groups.tolist(), map(bytes, blocks.digests), strict=True))


def of_device(events: tuple[CacheEvents | TierEvents, ...]) -> tuple[CacheEvents, ...]:
    """Return the events of blocks; a space has no others."""
    assert not any(isinstance(each, TierEvents) for each in events)
    return tuple(each for each in events if isinstance(each, CacheEvents))


def apply(events: tuple[CacheEvents, ...], names: Names, groups: Sequence[GroupSpec]) -> None:
    """Apply events to a set of names; what is stored was not there, what is removed was."""
    for each in events:
        for kind, (group, digest) in zip(each.kinds.tolist(), pairs_of(each), strict=True):
            if kind == CacheEventKind.STORED:
                assert (group, digest) not in names
                names.add((group, digest))
            elif kind == CacheEventKind.REMOVED:
                names.remove((group, digest))
            else:
                assert kind == CacheEventKind.CLEARED
                names -= {name for name in names if groups[name[0]].pool == each.pool}


def names_of(space: BlockSpace) -> Names:
    """Give what a space has cached."""
    return {pair for pool in space.config.pool_names for pair in pairs_of(space.stored_blocks(pool))}


def require_true(batch: EventBatch) -> None:
    """Compute every digest again, from the parent, the tokens and no extra keys."""
    for event in batch.events:
        if isinstance(event, BlocksStored) and event.parent_hash != UNKNOWN_PARENT:
            parent = ROOT_DIGEST if event.parent_hash is None else event.parent_hash
            assert event.token_ids is not None
            assert isinstance(parent, bytes)
            for digest, block in zip(event.block_hashes, event.token_ids.reshape(-1, event.block_size), strict=True):
                assert hash_block_tokens(parent, block) == digest
                parent = digest


def act(space: BlockSpace, rows: list[int], operation: tuple[str, int, int]) -> None:
    """Let something happen to a space."""
    kind, first, length = operation
    if kind == "allocate" and len(rows) < 4:
        answer = space.allocate(tokens(length, first=100 * first))
        rows += [answer.row] if isinstance(answer, Allocation) else []
    elif kind == "append" and rows and space.num_tokens(rows[0]) < 50:
        space.append(rows[0], tokens(length % 7, first=1000 * first))
    elif kind == "free" and rows:
        space.free(rows.pop(first % len(rows)))
    elif kind == "step":
        run_step(space)
    elif kind == "reset":
        space.reset_prefix_cache()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "append", "free", "step", "step", "reset", "send", "send"]),
        st.integers(0, 4),
        st.integers(1, 30),
    ),
    max_size=40,
)


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=12)
@given(operations=OPERATIONS)
def test_what_is_read_is_what_the_space_has(mix: str, operations: list[tuple[str, int, int]]) -> None:
    groups = MIXES[mix]
    pools = dict.fromkeys((group.pool for group in groups), 24)
    space = new_space(*groups, num_blocks=pools, max_sequences=5, max_tokens=90, events=True)
    encoder, reader = BatchEncoder(groups, "life", rank=2), CacheEventReader(groups)
    names: Names = set()
    rows = list[int]()
    for operation in [*operations, ("send", 0, 1)]:
        act(space, rows, operation)
        if operation[0] == "send":
            batch = decode_batch(encoded(space, encoder), "")
            assert (batch.sent_s, batch.rank, batch.lifetime, batch.num_blocks) == (1.5, 2, "life", None)
            require_true(batch)
            apply(of_device(reader.events(batch, "")), names, groups)
            assert names == names_of(space)
    parts = [decode_batch(part, "") for part in encoder.snapshot(2.5, listed_pools(space))]
    for part in parts:
        require_true(part)
    listed = tuple(each for each in reader.blocks(parts, "") if isinstance(each, StoredBlocks))
    assert {pair for each in listed for pair in pairs_of(each)} == names
    assert {part.num_blocks for part in parts} == {len(names)}
    require_same_parents(space, listed)


def require_same_parents(space: BlockSpace, listed: tuple[StoredBlocks, ...]) -> None:
    """Compare the parents of a snapshot that was read with the space's own."""
    for each in listed:
        mine = space.stored_blocks(each.pool)
        for blocks in (mine, each):
            assert len(blocks.is_parent_known) == len(blocks.parent_digests) == len(blocks.block_ids) == len(blocks)
        told, expected = (
            {
                (group, bytes(digest)): (bytes(parent), bool(is_known))
                for group, digest, parent, is_known in zip(
                    blocks.groups.tolist(), blocks.digests, blocks.parent_digests, blocks.is_parent_known, strict=True
                )
            }
            for blocks in (each, mine)
        )
        assert told == expected


def test_events_are_maps_in_the_order_of_vllm() -> None:
    groups = MIXES["full and window"]
    space = new_space(*groups, events=True)
    cache(space, tokens(8))
    first, second = hash_request_tokens(range(8), 4)
    payload = encoded(space, BatchEncoder(groups, "life", rank=3))
    assert msgspec.msgpack.decode(payload)[::2] == [1.5, 3]
    (full, window) = raw_events(payload)[:2]
    assert list(full.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [first, second]),
        ("parent_block_hash", None),
        ("token_ids", list(range(8))),
        ("block_size", 4),
        ("lora_id", None),
        ("medium", "GPU"),
        ("lora_name", None),
        ("extra_keys", [None, None]),
        ("group_idx", 0),
        ("kv_cache_spec_kind", "full_attention"),
    ]
    assert list(window.items())[-3:] == [
        ("group_idx", 1),
        ("kv_cache_spec_kind", "sliding_window"),
        ("kv_cache_spec_sliding_window", 6),
    ]


def test_a_heartbeat_has_no_events() -> None:
    assert msgspec.msgpack.decode(BatchEncoder((FullAttention(4),), "life").batch(1.5, ())) == [1.5, [], 0, "life"]


def test_extra_keys_are_those_of_each_block_and_adapters_those_of_the_sequence() -> None:
    """The adapter is in the keys of a sequence's first block alone; vLLM tells it of every block."""
    space = new_space(events=True)
    encoder = BatchEncoder(space.config.groups, "life")
    keys = RequestKeys("sql", "v2", b"tenant-a", (MediaSpan(3, 3, b"image"),))
    row = prefill(space, tokens(13), keys)
    (stored,) = raw_events(encoded(space, encoder))
    assert stored["lora_name"] == "sql"
    image = b"image".hex()
    assert stored["extra_keys"] == [["sql", [image, 3], "tenant-a"], ["sql", [image, -1]], ["sql"]]
    space.append(row, tokens(3, first=13))
    run_step(space)
    (later,) = raw_events(encoded(space, encoder))
    assert (later["lora_name"], later["extra_keys"]) == ("sql", [["sql"]])
    (part,) = encoder.snapshot(1.0, listed_pools(space))
    (whole,) = raw_events(part)
    assert whole["extra_keys"] == [*stored["extra_keys"], *later["extra_keys"]]
    space.reset_prefix_cache()
    assert raw_events(encoded(space, encoder)) == [{"type": "AllBlocksCleared"}]
    assert not encoder._adapters
    prefill(space, tokens(5), RequestKeys(salt=b"\xff\x00"))
    assert raw_events(encoded(space, encoder))[0]["extra_keys"] == [["ff00"]]


def test_what_came_and_went_between_two_steps_is_not_told() -> None:
    space = new_space(num_blocks=5, events=True, max_tokens=40)
    encoder = BatchEncoder(space.config.groups, "life")
    cache(space, tokens(8))
    encoded(space, encoder)
    cache(space, tokens(12, first=100))
    cache(space, tokens(16, first=200))
    (events,) = space.drain_events()
    gone = set(hash_request_tokens(range(100, 112), 4))
    assert gone & {bytes(digest) for digest in events.digests[events.kinds == CacheEventKind.REMOVED]}
    batch = decode_batch(encoder.batch(1.5, changes_of(space, [events])), "")
    told = {each for event in batch.events if not isinstance(event, Cleared) for each in event.block_hashes}
    assert not gone & told
    removed = [event for event in batch.events if isinstance(event, BlocksRemoved)]
    assert {each for event in removed for each in event.block_hashes} == set(hash_request_tokens(range(8), 4))


def test_after_a_log_that_was_too_short_all_blocks_are_told() -> None:
    config = SpaceConfig((FullAttention(4),), 40, max_tokens=100, events=True, max_events=4)
    space = BlockSpace(config)
    names: Names = {(0, bytes(32))}  # anything: it is cleared
    allocate(space, tokens(40))
    payload = encoded(space, BatchEncoder(config.groups, "life"))
    apply(of_device(CacheEventReader(config.groups).events(decode_batch(payload, ""), "")), names, config.groups)
    assert names == names_of(space)
    assert len(names) == 10


def test_a_snapshot_is_sent_in_parts_and_each_block_behind_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.wire.encoding.BLOCKS_OF_PART", 7)
    space = new_space(num_blocks=101, max_tokens=400)
    shared = tokens(60)
    for each in range(5):
        cache(space, np.concatenate([shared[: 12 * each + 12], tokens(20, first=1000 * each + 1000)]))
    parts = list(BatchEncoder(space.config.groups, "life").snapshot(1.0, listed_pools(space)))
    assert len(parts) > 5
    seen: list[bytes] = []
    for part in parts:
        events = raw_events(part)
        assert sum(len(event["block_hashes"]) for event in events) <= 7
        for event in events:
            parent = event["parent_block_hash"]
            assert parent is None or parent in seen
            seen += event["block_hashes"]
    assert len(seen) == len(set(seen)) == len(space.stored_blocks())


def test_an_empty_cache_is_a_snapshot_too() -> None:
    space = new_space()
    (part,) = BatchEncoder(space.config.groups, "life").snapshot(1.0, listed_pools(space))
    assert msgspec.msgpack.decode(part) == [1.0, [], 0, "life", 0]


@given(st.lists(st.integers(-1, 30), max_size=40), st.integers(0, 100))
def test_any_forest_is_ordered_with_its_chains_in_one_piece(links: list[int], seed: int) -> None:
    count, random = len(links), Random(seed)
    parents = [link if link < place else -1 for place, link in enumerate(links)]
    names = [random.randbytes(32) for _ in range(count)]
    shuffled = random.sample(range(count), count)
    digests = np.frombuffer(b"".join(names[each] for each in shuffled), np.uint8).reshape(count, 32)
    told = [UNKNOWN_PARENT if parents[each] < 0 else names[parents[each]] for each in shuffled]
    groups = np.zeros(count, np.int32)
    above = np.frombuffer(b"".join(told), np.uint8).reshape(count, 32)
    order = in_parent_order(StoredBlocks("device", groups, groups, digests, above, np.ones(count, np.bool_)))
    assert sorted(order.tolist()) == list(range(count))
    placed = [shuffled[each] for each in order.tolist()]
    for place, each in enumerate(placed):
        assert parents[each] < 0 or parents[each] in placed[:place]
    num_breaks = sum(parents[each] != before for before, each in pairwise(placed))
    leaves = count - len({parent for parent in parents if parent >= 0})
    assert num_breaks <= max(0, leaves - 1), "a chain for each leaf"


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (BlocksStored((7,), None, None, 4), "7 is not a digest of 32 bytes"),
        (BlocksStored((bytes(8),), None, None, 4), "is not a digest"),
        (BlocksStored((bytes(32),), 9, None, 4), "9 is not a digest"),
        (BlocksRemoved((bytes(32),), group=3), "group 3, but the model has 1 groups"),
    ],
)
def test_other_engines_events_are_refused(event: BlocksStored | BlocksRemoved, told: str) -> None:
    with pytest.raises(RecordingError, match=told):
        CacheEventReader((FullAttention(4),)).events(EventBatch(1.0, (event,)), "there")


def test_other_media_are_entries_of_tiers() -> None:
    reader = CacheEventReader((FullAttention(4),))
    events = (BlocksStored((bytes(32), b"1" * 32), None, None, 16, "CPU"), BlocksRemoved((bytes(32),), "CPU"))
    (entries,) = reader.events(EventBatch(1.0, events), "")
    assert isinstance(entries, TierEvents)
    assert (entries.medium, entries.run_tokens, entries.kinds.tolist()) == ("CPU", 16, [STORED, STORED, REMOVED])
    assert [row.tobytes() for row in entries.keys] == [bytes(32), b"1" * 32, bytes(32)]


def test_entries_of_tiers_are_sent_as_vllm_sends_what_is_offloaded() -> None:
    entries = TierEvents("CPU", 64, np.array([STORED, STORED, REMOVED], np.int32), np.eye(3, 32, dtype=np.uint8))
    first, second, third = (row.tobytes() for row in entries.keys)
    stored, removed = raw_events(BatchEncoder((FullAttention(4),), "1").batch(1.0, (entries,)))
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [first, second],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 64,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": [third], "medium": "CPU"}


def test_a_snapshot_has_the_entries_of_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.wire.encoding.BLOCKS_OF_PART", 4)
    groups = (FullAttention(4),)
    space = new_space(*groups, events=True)
    cache(space, tokens(24))
    listed = TierEvents("REDIS", 64, np.full(10, STORED, np.int32), np.eye(10, 32, dtype=np.uint8))
    payloads = list(BatchEncoder(groups, "1").snapshot(0.0, listed_pools(space), [listed]))
    parts = [decode_batch(payload, "here") for payload in payloads]
    blocks, entries = CacheEventReader(groups).blocks(parts, "here")
    assert len(payloads) > 3
    assert {part.num_blocks for part in parts} == {len(blocks) + 10}
    assert isinstance(entries, TierEvents)
    assert (entries.medium, entries.run_tokens, len(entries)) == ("REDIS", 64, 10)
    assert (entries.keys == listed.keys).all()


def test_contents_of_nothing_and_of_what_is_gone() -> None:
    space = new_space(num_blocks=5, events=True, max_tokens=40)
    assert len(space.contents_of(space.drain_events()[0])) == 0
    cache(space, tokens(8))
    (events,) = space.drain_events()
    contents = space.contents_of(events)
    assert contents.num_tokens.tolist() == [4, 4]
    assert contents.token_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    cache(space, tokens(16, first=100), NO_KEYS)
    assert space.contents_of(events).num_tokens.tolist() == [0, 0]


def test_the_partly_filled_blocks_at_a_sequences_end_are_told_to_nobody() -> None:
    space = new_space(*MIXES["full and state"], num_blocks={"device": 51, "state": 21}, events=True)
    row = prefill(space, tokens(6))
    space.free(row, keeps_end=True)
    encoder = BatchEncoder(space.config.groups, "life")
    told = decode_batch(encoder.batch(1.0, changes_of(space, space.drain_events())), "")
    sizes = {(change.group, change.block_size) for change in told.events if isinstance(change, BlocksStored)}
    assert sizes == {(0, 4), (1, 6)}  # the state is of 6 tokens, of which two lie in a block of keys
    listed = [size for pool in listed_pools(space) for size in pool.contents.num_tokens.tolist()]
    assert listed == [4, 6]
