"""What is stored, on request: the block of a digest, and all digests, for a follower that missed events."""

import numpy as np
import pytest

from pagedkv import (
    ROOT_DIGEST,
    BlockSpace,
    CacheEventKind,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    MediaSpan,
    RecurrentState,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    hash_block_tokens,
    hash_request_tokens,
)
from pagedkv.errors import BlockError, ConfigurationError, PagedKVError
from tests.space.spaces import allocate, cache, new_space, prefill, run_step, tokens, unchanged

KEYS = RequestKeys("sql", "v2", b"tenant-a", (MediaSpan(2, 4, b"image"),))


@pytest.mark.interpreted
@pytest.mark.parametrize("keys", [RequestKeys(), KEYS], ids=["plain", "keys"])
def test_a_stored_block_tells_all_that_its_digest_is_made_of(keys: RequestKeys) -> None:
    space = new_space()
    row = prefill(space, tokens(13), keys)
    parent = ROOT_DIGEST
    for index, digest in enumerate(hash_request_tokens(range(13), 4, keys)):
        with unchanged(space):
            block = space.stored_block(digest)
        assert block is not None
        assert (block.pool, block.group, block.block_id) == ("device", 0, space.block_ids(row)[index])
        assert block.token_ids.tolist() == list(range(4 * index, 4 * index + 4))
        assert (block.digest, block.parent_digest) == (digest, parent)
        assert hash_block_tokens(parent, block.token_ids, block.extra_keys) == digest
        parent = digest


def test_what_is_not_stored_is_none() -> None:
    space = new_space()
    cache(space, tokens(8))
    first, second = hash_request_tokens(range(8), 4)
    assert space.stored_block(bytes(32)) is None
    assert space.stored_block(second) is not None
    space.reset_prefix_cache()
    assert space.stored_block(first) is space.stored_block(second) is None
    assert len(space.stored_blocks()) == 0


def test_content_on_its_way_is_told_from_what_is_there() -> None:
    space = new_space()
    allocate(space, tokens(4))
    (digest,) = hash_request_tokens(range(4), 4)
    before = space.stored_block(digest)
    run_step(space)
    after = space.stored_block(digest)
    assert before is not None
    assert after is not None
    assert (before.is_computed, after.is_computed) == (False, True)


def test_the_tokens_are_a_copy() -> None:
    space = new_space()
    cache(space, tokens(4))
    block = space.stored_block(hash_request_tokens(range(4), 4)[0])
    assert block is not None
    assert not block.token_ids.flags.writeable
    space.reset_prefix_cache()
    prefill(space, tokens(400, first=1000))
    assert block.token_ids.tolist() == [0, 1, 2, 3]


def test_a_parent_that_nobody_knows_any_more_is_not_made_up() -> None:
    """The window has left the first block, and others have taken it."""
    space = new_space(SlidingWindow(1, 4), num_blocks=4)
    row = prefill(space, tokens(4))
    cache(space, tokens(12, first=100))
    space.append(row, tokens(4, first=4))
    block = space.stored_block(hash_request_tokens(range(8), 4)[1])
    assert block is not None
    assert block.parent_digest is None
    listed = space.stored_blocks()
    place = listed.block_ids.tolist().index(block.block_id)
    assert not listed.is_parent_known[place]
    assert not listed.parent_digests[place].any()


def test_every_group_and_pool_lists_its_own() -> None:
    space = new_space(FullAttention(4), RecurrentState(8), num_blocks={"device": 9, "state": 5})
    prefill(space, tokens(17))
    fours, eights = hash_request_tokens(range(17), 4), hash_request_tokens(range(17), 8)
    assert sorted(digest.tobytes() for digest in space.stored_blocks().digests) == sorted(fours)
    states = space.stored_blocks("state")
    assert sorted(digest.tobytes() for digest in states.digests) == sorted(eights)
    assert states.groups.tolist() == [1, 1]
    assert space.stored_block(eights[1], 1) is not None
    assert space.stored_block(eights[1]) is None


MIXES: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FullAttention(4),),
    "window": (SlidingWindow(6, 4),),
    "chunks": (ChunkedLocal(8, 4),),
    "full and window": (FullAttention(4), SlidingWindow(6, 4)),
}


def names_of_events(space: BlockSpace, names: dict[tuple[int, bytes], int]) -> bool:
    """Apply the events to a follower's names; return whether one of them is a gap."""
    (events,) = space.drain_events()
    has_gap = False
    for kind, group, block, digest in zip(
        events.kinds, events.groups.tolist(), events.block_ids.tolist(), events.digests, strict=True
    ):
        has_gap |= kind == CacheEventKind.GAP
        if kind == CacheEventKind.STORED:
            names[group, digest.tobytes()] = block
        elif kind == CacheEventKind.REMOVED:
            names.pop((group, digest.tobytes()), None)
    return has_gap


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
def test_a_follower_who_missed_events_catches_up(groups: tuple[GroupSpec, ...]) -> None:
    config = SpaceConfig(groups, 30, max_sequences=4, max_tokens=60, watermark=0.0, events=True, max_events=12)
    space, rng = BlockSpace(config), np.random.default_rng(7)
    names: dict[tuple[int, bytes], int] = {}
    num_gaps = 0
    for _ in range(60):
        for _ in range(int(rng.integers(1, 4))):
            cache(space, tokens(int(rng.integers(1, 30)), first=100 * int(rng.integers(6))))
        if names_of_events(space, names):
            num_gaps += 1
            listed = space.stored_blocks()
            keys = zip(listed.groups.tolist(), map(bytes, listed.digests), strict=True)
            names = dict(zip(keys, listed.block_ids.tolist(), strict=True))
        pool = next(iter(space._state.pools.values()))
        views = [pool.block(block) for block in pool.prefix_index.named_blocks().tolist()]
        assert names == {(view.group, view.digest): view.block_id for view in views}
    assert 0 < num_gaps < 60


@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
def test_listed_parents_are_those_of_each_block(groups: tuple[GroupSpec, ...]) -> None:
    space = new_space(*groups, num_blocks=40)
    for first in (0, 100, 200):
        cache(space, tokens(25, first))
    listed = space.stored_blocks()
    assert len(listed) > 10
    for group, block_id, digest, parent, is_known in zip(
        listed.groups.tolist(),
        listed.block_ids.tolist(),
        listed.digests,
        listed.parent_digests,
        listed.is_parent_known,
        strict=True,
    ):
        block = space.stored_block(digest, group)
        assert block is not None
        assert block.block_id == block_id
        expected = {None: bytes(32), ROOT_DIGEST: bytes(32)}.get(block.parent_digest, block.parent_digest)
        assert parent.tobytes() == expected
        assert is_known == (block.parent_digest is not None)
        if block.parent_digest is not None:
            assert hash_block_tokens(block.parent_digest, block.token_ids) == block.digest


REFUSED: dict[str, tuple[object, int, type[PagedKVError], str]] = {
    "short": (b"short", 0, BlockError, "a digest is 32 bytes, got b'short'"),
    "text": ("00" * 32, 0, BlockError, "a digest is 32 bytes"),
    "nothing": (None, 0, BlockError, "a digest is 32 bytes, got None"),
    "of another type": (np.zeros(32, np.int32), 0, BlockError, "a digest is 32 bytes"),
    "of no group": (bytes(32), 1, ConfigurationError, "there is no group 1"),
}


@pytest.mark.parametrize(("digest", "group", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_digest_is_refused(digest: bytes, group: int, error: type[PagedKVError], message: str) -> None:
    space = new_space()
    with unchanged(space), pytest.raises(error, match=message):
        space.stored_block(digest, group)


def test_without_prefix_caching_nothing_is_stored() -> None:
    space = new_space(prefix_caching=False)
    prefill(space, tokens(9))
    assert len(space.stored_blocks()) == 0
    assert space.stored_block(hash_request_tokens(range(4), 4)[0]) is None


@pytest.mark.parametrize("is_planned", [False, True])
def test_content_that_is_swapped_in_is_there_once_its_step_is_over(*, is_planned: bool) -> None:
    space = new_space(FullAttention(4), num_blocks=6, num_host_blocks=6)
    row = prefill(space, tokens(5))
    (digest,) = hash_request_tokens(range(5), 4)
    space.swap_out([row])
    run_step(space)
    cache(space, tokens(19, first=100))
    space.swap_in([row])
    step = space.plan_step() if is_planned else None
    block = space.stored_block(digest)
    assert block is not None
    assert block.block_id == space.block_ids(row)[0]
    assert not block.is_computed
    space.acknowledge((step or space.plan_step()).step_id)
    block = space.stored_block(digest)
    assert block is not None
    assert block.is_computed
