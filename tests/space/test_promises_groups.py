"""The manager's promises about groups (docs/design.md, Promises: 14 to 16), each by direct examples."""

import numpy as np
import pytest

from pagedkv import BlockSpace, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, Shortage, SlidingWindow
from pagedkv.blocks.life_cycle import drop_name
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    held,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
    unchanged,
)


def decode(space: BlockSpace, row: int, num_tokens: int, *, in_flight: int = 0) -> int:
    """Append tokens one by one, so many steps behind; return the most blocks that the row held at any time."""
    most = 0
    plans = []
    for token in range(num_tokens):
        assert space.append([row], [token]) is None
        most = max(most, len(held(space, row)))
        plans.append(space.plan_step())
        if len(plans) > in_flight:
            acknowledge(space, plans.pop(0))
        space.check()
    acknowledge(space, *plans)
    return most


# 14. Sliding windows


@pytest.mark.interpreted
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("window", "block_size"), [(1, 4), (4, 4), (7, 4), (8, 4), (9, 4), (3, 1), (5, 16)])
def test_promise_14_a_window_stays_within_its_blocks(window: int, block_size: int, in_flight: int) -> None:
    """Over a long decode: at most ``window // block_size + 2`` blocks, also with a step in flight."""
    space = new_space(SlidingWindow(window, block_size))
    row = prefill(space, [0])
    assert decode(space, row, 100, in_flight=in_flight) <= window // block_size + 2


def test_promise_14_blocks_below_the_window_go_back_to_the_pool() -> None:
    """The query at position 20 sees 13 to 20: blocks 3 to 5."""
    space = new_space(SlidingWindow(8, 4))
    row = allocate(space, tokens(20))
    assert space.num_free_blocks() == 95
    run_step(space)
    assert np.flatnonzero(space.block_ids(row)).tolist() == [3, 4]
    assert space.num_free_blocks() == 98


def test_promise_14_a_block_that_a_step_in_flight_reads_stays() -> None:
    space = new_space(SlidingWindow(4, 4))
    row = prefill(space, tokens(6))
    plans = []
    for token in (6, 7, 8):
        space.append([row], [token])
        plans.append(space.plan_step())
    assert len(held(space, row)) == 3  # position 6 reads positions 3 to 6
    acknowledge(space, plans[0])
    assert len(held(space, row)) == 2
    acknowledge(space, *plans[1:])


@pytest.mark.interpreted
def test_promise_14_a_hit_needs_only_the_last_window() -> None:
    """A pool of windows alone, whose prefix's head is gone."""
    space = new_space(SlidingWindow(8, 4), num_blocks=7)
    row = prefill(space, tokens(8))
    for token in range(8, 40):
        space.append([row], [token])
        run_step(space)
    assert np.flatnonzero(space.block_ids(row)).tolist() == [8, 9]
    assert hit(space, tokens(41)) == 40
    assert hit(space, tokens(20)) == 0
    blocks = space.block_ids(row)[8:]
    other = allocate(space, tokens(41))
    assert space.block_ids(other)[8:10] == blocks
    assert space.block_ids(other)[:8] == [0] * 8


def test_promise_14_attention_sinks_keep_their_first_blocks() -> None:
    """Six sink tokens take two blocks."""
    space = new_space(SlidingWindow(8, 4, num_sink_tokens=6))
    row = prefill(space, tokens(8))
    sinks = space.block_ids(row)[:2]
    decode(space, row, 60)
    assert space.block_ids(row)[:2] == sinks
    assert len(held(space, row)) <= 2 + 8 // 4 + 2


def test_promise_14_a_hit_needs_the_sinks_and_not_what_lies_between() -> None:
    space = new_space(SlidingWindow(4, 4, num_sink_tokens=4), num_blocks=6)
    row = prefill(space, tokens(16))
    sink, *_, last = space.block_ids(row)
    space.free(row)
    allocate(space, tokens(12, first=100))  # an empty block, and two below the window
    assert hit(space, tokens(17)) == 16
    drop_name(only_pool(space).arrays, sink)
    assert hit(space, tokens(17)) == 0
    assert only_pool(space).block(last).digest is not None


def test_promise_14_drafts_do_not_move_the_window() -> None:
    """They may be rejected: what the accepted tokens still need stays."""
    space = new_space(SlidingWindow(4, 4))
    row = prefill(space, tokens(8))
    space.append([row], tokens(8, first=8), [8], num_draft=8)
    run_step(space)
    space.truncate([row], [8])
    space.append([row], [8])
    run_step(space)
    space.check()


# 15. Chunks and states


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("groups", "num_named"),
    [
        ((ChunkedLocal(8, 4),), 0),
        ((ChunkedLocal(8, 4), FullAttention(4)), 2),
        ((FullAttention(4), ChunkedLocal(8, 4)), 2),
    ],
    ids=["the chunk alone", "the chunk first", "the chunk last"],
)
def test_promise_16_a_digest_chain_goes_on_where_any_group_has_the_last_block(
    groups: tuple[GroupSpec, ...], num_named: int
) -> None:
    """Rolled back to where a chunk begins, the chunk's group has no block left whose digest the next continues."""
    space = new_space(*groups)
    row = prefill(space, tokens(20))
    space.truncate([row], [16])
    before = space.statistics().pools[0].num_named
    space.append([row], tokens(4, first=50), [4])
    run_step(space)
    assert space.statistics().pools[0].num_named - before == num_named
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize(("chunk_size", "block_size"), [(8, 4), (4, 4), (6, 4), (3, 4)])
def test_promise_15_chunks_are_given_back_when_the_next_begins(chunk_size: int, block_size: int) -> None:
    space = new_space(ChunkedLocal(chunk_size, block_size))
    row = prefill(space, [0])
    for num_tokens in range(2, 60):
        space.append([row], [num_tokens])
        run_step(space)
        first = num_tokens // chunk_size * chunk_size // block_size
        assert np.flatnonzero(space.block_ids(row)).tolist() == list(range(first, -(-num_tokens // block_size)))
        space.check()


def test_promise_15_a_hit_needs_only_the_chunk_it_ends_in() -> None:
    space = new_space(ChunkedLocal(8, 4), num_blocks=6)
    row = prefill(space, tokens(4))
    for token in range(4, 20):
        space.append([row], [token])
        run_step(space)
    assert hit(space, tokens(21)) == 20


@pytest.mark.interpreted
def test_promise_15_a_state_is_one_block_in_decode() -> None:
    """Checkpoints that it passes are cached, not in use."""
    space = new_space(RecurrentState(4, pool="device"))
    row = prefill(space, tokens(6))
    for token in range(6, 40):
        space.append([row], [token])
        run_step(space)
        (pool,) = space.statistics().pools
        assert pool.num_in_use == 1
        space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize(("length", "num_hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (30, 8)])
def test_promise_15_prefixes_hit_at_checkpoints(length: int, num_hit: int) -> None:
    space = new_space(RecurrentState(4, pool="device"))
    cache(space, tokens(10))
    assert hit(space, tokens(length)) == num_hit


def test_promise_15_without_caching_a_state_keeps_no_checkpoints() -> None:
    space = new_space(RecurrentState(4, pool="device"), prefix_caching=False)
    allocate(space, tokens(100))
    assert space.statistics().pools[0].num_in_use == 1


def test_promise_15_a_checkpoint_is_written_while_the_state_moves_on() -> None:
    """The block of a checkpoint is not written again: the next token's state goes to another block."""
    space = new_space(RecurrentState(4, pool="device"))
    row = prefill(space, tokens(4))
    checkpoint = space.block_ids(row)[0]
    space.append([row], [4])
    run_step(space)
    assert checkpoint not in space.block_ids(row)
    assert hit(space, tokens(5)) == 4


# 16. Several groups

HYBRID = FullAttention(4), SlidingWindow(8, 2), RecurrentState(8)
POOLS = {"device": 101, "state": 11}


@pytest.mark.interpreted
def test_promise_16_each_group_has_blocks_of_its_own_size() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row = allocate(space, tokens(17))
    assert [len(space.block_ids(row, group)) for group in range(3)] == [5, 9, 3]
    used = {pool.name: pool.num_in_use for pool in space.statistics().pools}
    assert used == {"device": 14, "state": 3}


@pytest.mark.interpreted
def test_promise_16_a_hit_is_the_longest_prefix_that_every_group_can_serve() -> None:
    """30 tokens: the full group could serve 28, the window 28 or 30, the states only 24."""
    space = new_space(*HYBRID, num_blocks=POOLS)
    cache(space, tokens(30))
    assert hit(space, tokens(31)) == 24
    row = allocate(space, tokens(31))
    assert [np.flatnonzero(space.block_ids(row, group)).min() for group in range(3)] == [0, 8, 2]
    assert run_step(space).compute.starts.tolist() == [24]
    space.check()


@pytest.mark.parametrize(("length", "num_hit"), [(12, 0), (13, 12), (24, 12), (25, 24)])
def test_promise_16_a_hit_ends_where_blocks_of_all_sizes_end(length: int, num_hit: int) -> None:
    space = new_space(FullAttention(4), FullAttention(6))
    cache(space, tokens(24))
    found = space.match(tokens(length))
    assert found.num_tokens == num_hit
    assert [len(blocks) for blocks in found.block_ids] == [num_hit // 4, num_hit // 6]


def test_promise_16_what_one_group_has_evicted_no_group_serves() -> None:
    """The states' small pool evicts the checkpoint; the other groups still hold everything."""
    space = new_space(*HYBRID, num_blocks={"device": 101, "state": 4})
    cache(space, tokens(17))
    assert hit(space, tokens(17)) == 16
    cache(space, tokens(17, first=100))
    assert hit(space, tokens(17)) == 0
    space.check()


@pytest.mark.interpreted
def test_promise_16_a_shortage_in_the_second_pool_leaks_nothing_of_the_first() -> None:
    space = new_space(*HYBRID, num_blocks={"device": 101, "state": 3})
    prefill(space, tokens(9, first=100))
    with unchanged(space):
        assert space.allocate(tokens(12)) == Shortage("state", num_needed=2, num_free=1)


def test_promise_16_groups_of_one_pool_are_counted_together() -> None:
    space = new_space(FullAttention(4), SlidingWindow(8, 4), num_blocks=8)
    with unchanged(space):
        assert space.allocate(tokens(16)) == Shortage("device", num_needed=8, num_free=7)
    allocate(space, tokens(12))
    assert space.num_free_blocks() == 1


def test_promise_16_a_fork_copies_the_partial_block_of_every_group() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row = prefill(space, tokens(9))
    (child,) = space.fork(row)
    assert [space.block_ids(child, group) for group in range(3)] == [space.block_ids(row, group) for group in range(3)]
    space.append([child], [9])
    copies = {moves.pool: len(moves.src_ids) for moves in run_step(space).copies}
    assert copies == {"device": 2, "state": 1}
    space.check()


def test_promise_16_everything_is_given_back() -> None:
    space = new_space(*HYBRID, num_blocks=POOLS)
    row = prefill(space, tokens(30))
    space.fork(row, 2)
    space.free([0, 1, 2])
    assert {pool.name: pool.num_free for pool in space.statistics().pools} == {"device": 100, "state": 10}
    space.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "group", [FullAttention(1), SlidingWindow(1, 1), ChunkedLocal(1, 1), RecurrentState(1, pool="device")], ids=repr
)
def test_promise_16_the_smallest_space_serves_one_token(group: GroupSpec, caching: bool) -> None:  # noqa: FBT001
    space = new_space(group, num_blocks=2, num_host_blocks=2, max_sequences=1, max_tokens=1, prefix_caching=caching)
    for token in range(3):
        row = prefill(space, [token])
        space.check()
        space.swap_out([row])
        run_step(space)
        space.swap_in([row])
        run_step(space)
        space.free([row])
        space.check()
