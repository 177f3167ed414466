"""Events of stored blocks name their parents, from the chain of the row that stored them."""

import numpy as np
import pytest

from pagedkv import (
    ROOT_DIGEST,
    Allocation,
    BlockSpace,
    CacheEventKind,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    hash_block_tokens,
    hash_request_tokens,
)
from tests.space.spaces import allocate, cache, new_space, only_pool, prefill, run_step, tokens


def stored(space: BlockSpace) -> list[tuple[bytes, bytes]]:
    """Digests and parents of what was stored since the last call."""
    (events,) = space.drain_events()
    return [
        (digest.tobytes(), parent.tobytes())
        for kind, digest, parent in zip(events.kinds, events.digests, events.parent_digests, strict=True)
        if kind == CacheEventKind.STORED
    ]


def test_a_parent_that_was_evicted_is_still_named() -> None:
    """The window has left the first block, and other rows have taken it: the row's chain still has its digest."""
    space = new_space(SlidingWindow(1, 4), num_blocks=4, events=True)
    row = prefill(space, tokens(4))
    cache(space, tokens(12, first=100))
    stored(space)
    space.append(row, tokens(4, first=4))
    first, second = hash_request_tokens(range(8), 4)
    assert stored(space) == [(second, first)]


@pytest.mark.interpreted
def test_a_duplicate_that_is_published_late_names_its_parent() -> None:
    """Its carrier is evicted before the two are merged, and the window has left its parent by then."""
    space = new_space(SlidingWindow(5, 4), num_blocks=6, events=True)
    cache(space, tokens(9))
    row = allocate(space, tokens(8))
    space.append(row, [8])
    first, second = hash_request_tokens(range(8), 4)
    carrier = space.stored_block(second)
    assert carrier is not None
    assert carrier.block_id not in space.block_ids(row), "the row has a duplicate of it"
    allocate(space, tokens(8, first=100))
    assert space.stored_block(second) is None, "the carrier is evicted"
    stored(space)
    run_step(space)
    space.plan_step()
    assert space.block_ids(row)[0] == 0, "the window has left the parent"
    assert (second, first) in stored(space)


def test_a_first_block_has_no_parent() -> None:
    space = new_space(events=True)
    allocate(space, tokens(8))
    first, second = hash_request_tokens(range(8), 4)
    assert stored(space) == [(first, bytes(32)), (second, first)]


def test_check_notices_the_digest_of_another_parent() -> None:
    space = new_space(events=True)
    block = space.block_ids(allocate(space, tokens(8)))[1]
    only_pool(space).arrays.parent_digests[block, 3] += 1
    with pytest.raises(AssertionError, match=f"block {block} has the digest of another parent"):
        space.check()


MIXES: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FullAttention(4),),
    "window": (SlidingWindow(1, 4),),
    "chunks": (ChunkedLocal(8, 4),),
    "wider window": (SlidingWindow(6, 4),),
    "window and chunks": (SlidingWindow(6, 4), ChunkedLocal(8, 4)),
    "full and window": (FullAttention(4), SlidingWindow(6, 4)),
    "larger blocks and window": (FullAttention(8), SlidingWindow(6, 4)),
    "full and state": (FullAttention(4), RecurrentState(4, pool="device")),
}


@pytest.mark.plain_only
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("seed", range(8))
def test_every_stored_block_is_the_child_of_the_parent_that_is_told(groups: tuple[GroupSpec, ...], seed: int) -> None:
    """Recomputed from the parent's digest and the block's tokens, right after it was stored."""
    rng = np.random.default_rng(seed)
    space = new_space(*groups, num_blocks=30, max_sequences=5, max_tokens=60, events=True)
    rows, num_stored = list[int](), 0
    for _ in range(120):
        if len(rows) < 4:
            answer = space.allocate(tokens(int(rng.integers(1, 30)), first=int(rng.choice([0, 100]))))
            rows += [answer.row] if isinstance(answer, Allocation) else []
        for row in rows:
            if space.num_tokens(row) < 50:
                space.append(row, rng.integers(2, size=int(rng.integers(0, 6))))
        if rows and rng.random() < 0.3:
            space.free(rows.pop(int(rng.integers(len(rows)))))
        for digest, parent in stored(space):
            found = [block for group in range(len(groups)) if (block := space.stored_block(digest, group)) is not None]
            if found:  # else it was evicted since
                parents = ROOT_DIGEST if parent == bytes(32) else parent
                assert hash_block_tokens(parents, found[0].token_ids) == digest
                num_stored += 1
        run_step(space)
    space.check()
    assert num_stored > 20


@pytest.mark.plain_only
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
def test_a_block_that_is_published_again_after_an_aborted_step_names_its_parent(
    groups: tuple[GroupSpec, ...], *, is_own: bool
) -> None:
    """Its name is withdrawn with the step, and by then the window has left its parent."""
    space = new_space(*groups, num_blocks=20, max_sequences=2, max_tokens=60, events=True)
    row = prefill(space, tokens(8))
    stored(space)
    step = None if is_own else space.plan_step()
    space.append(row, tokens(8, first=8))
    space.abort((step or space.plan_step()).step_id)
    run_step(space)
    all_stored = stored(space)
    size = groups[-1].block_size
    chain = [bytes(32), *hash_request_tokens(range(16), size)]
    assert sum(digest == chain[12 // size] for digest, _ in all_stored) >= 2, "named, withdrawn, and named again"
    assert all(parent == chain[chain.index(digest) - 1] for digest, parent in all_stored if digest in chain)


@pytest.mark.plain_only
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
def test_a_snapshot_has_the_parents_that_events_had(groups: tuple[GroupSpec, ...]) -> None:
    """Also of blocks whose parents the window has left and other rows have overwritten."""
    space = new_space(*groups, num_blocks=30, max_sequences=4, max_tokens=60, events=True)
    told = dict[bytes, bytes]()
    for first in (0, 100, 0):
        row = prefill(space, tokens(14, first=first))
        for token in range(12):
            space.append(row, [first + 50 + token])
            run_step(space)
            told |= stored(space)
        space.free(row)
    (listed,) = (space.stored_blocks(pool.name) for pool in space.statistics().pools)
    assert listed.is_parent_known.all()
    assert len(listed) > 5
    for digest, parent in zip(listed.digests, listed.parent_digests, strict=True):
        assert told[digest.tobytes()] == parent.tobytes()
        found = [one for group in range(len(groups)) if (one := space.stored_block(digest.tobytes(), group))]
        assert {one.parent_digest for one in found} == {parent.tobytes().replace(bytes(32), ROOT_DIGEST)}


@pytest.mark.plain_only
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
def test_a_block_that_is_swapped_in_names_its_parent(groups: tuple[GroupSpec, ...]) -> None:
    """Its device copy was evicted meanwhile, and the window has left its parent."""
    space = new_space(*groups, num_blocks=20, num_host_blocks=20, max_sequences=4, max_tokens=80, events=True)
    row = prefill(space, tokens(16))
    told = dict(stored(space))
    space.swap_out([row])
    run_step(space)
    while space.stored_block(hash_request_tokens(range(16), groups[0].block_size)[-1]) is not None:
        cache(space, np.random.default_rng(len(told)).integers(1000, size=32).tolist())
        told |= stored(space)
    space.swap_in([row])
    run_step(space)
    again = stored(space)
    assert again or groups in (MIXES["window"], MIXES["chunks"]), "whose windows begin anew at 16 tokens"
    assert all(told[digest] == parent for digest, parent in again)


@pytest.mark.interpreted
@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("num_sink_tokens", [0, 4])
def test_what_lies_behind_a_gap_is_no_child_of_the_sinks(num_sink_tokens: int, *, events: bool) -> None:
    """A row is swapped out and in, without the blocks that its window has left."""
    group = SlidingWindow(4, 4, num_sink_tokens=num_sink_tokens)
    space = new_space(group, num_blocks=20, num_host_blocks=20, max_tokens=80, events=events)
    row = prefill(space, tokens(21))
    space.swap_out([row])
    space.check()
    run_step(space)
    chain, others = hash_request_tokens(range(20), 4), iter(range(100, 900, 100))
    while space.stored_block(chain[4]) is not None:
        cache(space, tokens(32, first=next(others)))
    space.swap_in([row])
    space.check()
    run_step(space)
    found = space.stored_block(chain[4])
    assert found is not None
    assert found.parent_digest == (chain[3] if events else None)
    listed = space.stored_blocks("device")
    place = [digest.tobytes() for digest in listed.digests].index(chain[4])
    assert listed.is_parent_known[place] == events


@pytest.mark.interpreted
def test_digests_of_another_hash_are_not_told_to_who_reads_events() -> None:
    """What hit has digests of pagedkv, so that a block behind it would be the child of a digest that nobody stores."""
    space = new_space(events=True)
    cache(space, tokens(8))
    other = np.arange(96, dtype=np.uint8).reshape(3, 32)
    assert isinstance(space.allocate(tokens(13), digests=other), Allocation)
    space.check()
    first, second, third = hash_request_tokens(range(12), 4)
    assert stored(space) == [(first, bytes(32)), (second, first), (third, second)]
    assert space.match(tokens(13), digests=other).num_tokens == 12
    assert space.stored_block(other[2].tobytes()) is None
