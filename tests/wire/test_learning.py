"""Names of other engines' blocks: learnt from tokens and parents, whatever a hash looks like."""

from typing import Any, Final

import msgspec
import numpy as np
import pytest

from pagedkv import FullAttention, RequestKeys, SlidingWindow, hash_request_tokens
from pagedkv.contract.answers import CLEARED, REMOVED, STORED, CacheEvents, TierEvents
from pagedkv.contract.keys import NO_KEYS
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.wire import LearntNames, decode_batch
from tests.wire.golden_frames import SGLANG, VLLM

pytestmark = pytest.mark.interpreted

ROOM: Final = 2
SHA: Final = bytes(range(32))


def stored(hashes: list[Any], parent: object, tokens: list[int], **more: object) -> dict[str, object]:
    """Make an event as a map, as both engines send it."""
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": ROOM}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", **more}


def removed(hashes: list[Any], medium: str = "GPU", **more: object) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


def learn(names: LearntNames, *events: dict[str, object]) -> tuple[CacheEvents | TierEvents, ...]:
    return names.events(decode_batch(msgspec.msgpack.encode([1.0, events, 0]), "here"))


def digests(tokens: list[int], keys: RequestKeys = NO_KEYS) -> list[bytes]:
    return hash_request_tokens(np.array(tokens, np.int32), ROOM, keys)


def told(events: CacheEvents | TierEvents) -> list[tuple[int, bytes]]:
    """Give kind and digest of each event."""
    found = events.digests if isinstance(events, CacheEvents) else events.keys
    return [(int(kind), bytes(each)) for kind, each in zip(events.kinds, found, strict=True)]


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [(7, -9, 2**64 - 1), (b"\0\1", b"\2\3", b"\4"), (SHA, SHA[::-1], bytes(32))],
    ids=["numbers", "bytes", "digests"],
)
def test_a_chain_is_its_tokens_whatever_its_hashes(first: object, second: object, third: object) -> None:
    names, chain = LearntNames(), digests([1, 2, 3, 4, 5, 6])
    (both,) = learn(names, stored([first, second], None, [1, 2, 3, 4]))
    assert told(both) == [(STORED, chain[0]), (STORED, chain[1])]
    (last,) = learn(names, stored([third], second, [5, 6]), removed([second]))
    assert told(last) == [(STORED, chain[2]), (REMOVED, chain[1])]
    assert names.groups == (FullAttention(ROOM),)


def test_what_vllm_and_sglang_really_sent() -> None:
    """Bytes of their own publishers; what is expected is written by hand."""
    names, chain = LearntNames(), digests([1, 256, 3, 4], RequestKeys("a"))
    (of_vllm,) = names.events(decode_batch(VLLM[0], "vLLM"))
    assert told(of_vllm) == [(STORED, each) for each in chain]
    (cleared,) = names.events(decode_batch(VLLM[1], "vLLM"))
    assert [kind for kind, _ in told(cleared)] == [REMOVED, CLEARED]
    assert names.num_unplaced == 1, "a block of group 1 in host memory, of which there are neither tokens nor size"
    names, keys = LearntNames(), RequestKeys("a", salt=b"s")
    (of_sglang,) = names.events(decode_batch(SGLANG[0], "SGLang"))
    assert told(of_sglang)[1:] == [(STORED, each) for each in digests([1, 256, 3, 4], keys)]
    device, host = names.events(decode_batch(SGLANG[1], "SGLang"))
    tier = next(each for each in (device, host) if isinstance(each, TierEvents))
    assert (tier.medium, tier.run_tokens) == ("CPU", ROOM), "CPU_PINNED is host memory"


def test_copies_are_one_block_until_the_last_is_gone() -> None:
    names = LearntNames()
    learn(names, stored([7], None, [1, 2]))
    assert learn(names, stored([7], None, [1, 2])) == ()
    assert learn(names, removed([7])) == ()
    (gone,) = learn(names, removed([7]))
    assert told(gone) == [(REMOVED, digests([1, 2])[0])]
    assert learn(names, removed([7])) == (), "one too many, as an engine that lies sends it"


def test_a_block_whose_beginning_is_not_known_is_not_placed() -> None:
    names = LearntNames()
    assert learn(names, stored([8], 7, [3, 4]), stored([9], 8, [5, 6]), stored([3], None, [1])) == ()
    assert names.num_unplaced == 3


def test_salts_and_adapters_are_keys_of_prompts_and_media_of_none() -> None:
    names = LearntNames()
    (salted,) = learn(names, stored([1, 2], None, [1, 2, 3, 4], lora_name="a", extra_keys=[["a", "a"], ["a"]]))
    assert told(salted) == [(STORED, each) for each in digests([1, 2, 3, 4], RequestKeys("a", salt=b"a"))]
    (plain,) = learn(names, stored([3], None, [1, 2], extra_keys=[["secret"]]))
    assert told(plain)[0][1] == digests([1, 2], RequestKeys(salt=b"secret"))[0]
    (image,) = learn(names, stored([4], None, [1, 2], extra_keys=[[["an image", 0]]]))
    (other,) = learn(names, stored([5], None, [1, 2], extra_keys=[[["another", 0]]]))
    assert len({told(image)[0][1], told(other)[0][1], digests([1, 2])[0]}) == 3


def test_entries_of_other_media_have_the_names_of_blocks() -> None:
    """VLLM's offloaded blocks come as bare names; SGLang's disk with tokens."""
    names = LearntNames()
    learn(names, stored([1, 2], None, [1, 2, 3, 4]))
    (bare,) = learn(names, stored([1, 2], None, [], medium="CPU", block_size=0))
    (disk,) = learn(names, stored([1], None, [1, 2], medium="DISK"))
    assert isinstance(bare, TierEvents)
    assert isinstance(disk, TierEvents)
    assert (bare.medium, disk.medium, told(bare)) == ("CPU", "DISK", [(STORED, d) for d in digests([1, 2, 3, 4])])
    learn(names, removed([1, 2]))
    (gone,) = learn(names, removed([2], "CPU"))
    assert told(gone) == [(REMOVED, digests([1, 2, 3, 4])[1])], "its name outlives the device's block"


def test_groups_are_what_events_say_of_them_and_an_index_of_them_hits() -> None:
    names = LearntNames()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    events = learn(names, stored([1, 2], None, [1, 2, 3, 4]), stored([1, 2], None, [1, 2, 3, 4], **window))
    assert names.groups == (FullAttention(ROOM), SlidingWindow(4, ROOM))
    index = ReplicaIndex(names.groups)
    index.add_replica("a")
    index.apply("a", "1", 0, events, is_proven=False)
    prompt = index.hash([1, 2, 3, 4, 5])
    assert index.hits(prompt) == {"a": 4}
    assert index.state("a") is IndexState.DEGRADED, "never exact without a lifetime"
    index.apply("a", "1", 1, learn(names, removed([1], group_idx=1), removed([2], group_idx=1)), is_proven=False)
    assert index.hits(prompt) == {"a": 0}


def test_an_engine_that_announces_without_end_is_learnt_anew() -> None:
    names = LearntNames(most_blocks=3)
    learn(names, stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6]), stored([1], None, [1, 2], medium="CPU"))
    changed = learn(names, stored([9], None, [9, 9]))
    assert [told(each)[-1][0] for each in changed] == [CLEARED, REMOVED]
    assert names.num_overflows == 1
    assert learn(names, removed([1, 2, 3, 9])) == ()
