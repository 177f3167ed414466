"""The manager's promises about seeing (docs/design.md, Promises: 18 and 19): statistics, events, cost.

The audit, 17, has its tests in test_audit.py.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    CacheEventKind,
    CacheEvents,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    SpaceConfig,
    hash_request_tokens,
)
from tests.space.spaces import acknowledge, allocate, cache, new_space, only_pool, prefill, run_step, tokens

# 18. Statistics and events


def test_promise_18_statistics_are_a_frozen_snapshot() -> None:
    space = new_space()
    row = prefill(space, tokens(10))
    before = space.statistics()
    space.append([row], tokens(10), [10])
    assert before.num_tokens == 10
    assert before != space.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.num_tokens = 0  # type: ignore[misc]


def test_promise_18_statistics_count() -> None:
    """Row 0 has 3 blocks, of which 2 are named; one block is cached; one waits for the step in flight."""
    space = new_space(num_blocks=11)
    prefill(space, tokens(10))
    cache(space, tokens(4, first=100))
    row = allocate(space, tokens(3, first=200))
    space.plan_step()
    space.free([row])
    statistics = space.statistics()
    assert (statistics.num_running, statistics.num_swapped, statistics.num_tokens) == (1, 0, 10)
    assert statistics.num_steps_in_flight == 1
    (pool,) = statistics.pools
    assert (pool.num_blocks, pool.num_in_use, pool.num_deferred, pool.num_free) == (10, 3, 1, 6)
    assert (pool.num_named, pool.num_cached, pool.num_acquired) == (3, 1, 5)
    allocate(space, tokens(10))
    assert space.statistics().pools[0].num_hit_blocks == 2


class Follower:
    """What a router would do: keep the set of stored names by events alone."""

    def __init__(self, space: BlockSpace) -> None:
        self.space = space
        self.names: dict[str, dict[tuple[int, bytes], int]] = {pool: {} for pool in space._state.pools}
        self.parents: dict[bytes, bytes] = {}

    def follow(self) -> None:
        """Drain the events; the names that they leave must be those of the pools."""
        for events in self.space.drain_events():
            self._apply(events, self.names[events.pool])
        for name, pool in self.space._state.pools.items():
            views = [pool.block(block) for block in pool.prefix_index.named_blocks().tolist()]
            assert self.names[name] == {(view.group, view.digest): view.block_id for view in views}

    def _apply(self, events: CacheEvents, names: dict[tuple[int, bytes], int]) -> None:
        rows = zip(
            events.kinds.tolist(), events.groups.tolist(), events.block_ids.tolist(), events.digests, strict=True
        )
        for (kind, group, block, digest), parent in zip(rows, events.parent_digests, strict=True):
            key = group, digest.tobytes()
            if kind == CacheEventKind.STORED:
                assert key not in names
                names[key] = block
                self.parents[key[1]] = parent.tobytes()
            elif kind == CacheEventKind.REMOVED:
                assert names.pop(key) == block
            else:
                assert kind == CacheEventKind.CLEARED
                assert (group, block, key[1]) == (-1, 0, bytes(32))
                names.clear()


def serve_a_step(space: BlockSpace, rng: np.random.Generator, rows: list[int]) -> None:
    """Admit a prompt if it fits, grow a row, run the step or let it fail, and let some rows go."""
    allocation = space.allocate(tokens(int(rng.integers(1, 40)), first=int(rng.choice([0, 100, 200]))))
    if isinstance(allocation, Allocation):
        rows.append(allocation.row)
    space.append(rows[:1], rng.integers(3, size=len(rows[:1])))
    plan = space.plan_step()
    if rng.random() < 0.2:
        lost = space.abort(plan.step_id).lost_rows
        space.free(lost)
        rows[:] = [row for row in rows if row not in lost]
    else:
        acknowledge(space, plan)
    while rows and (len(rows) == 5 or rng.random() < 0.6):
        space.free([rows.pop(int(rng.integers(len(rows))))])


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(4))
def test_promise_18_events_tell_exactly_what_can_be_found(seed: int) -> None:
    """Prompts that share prefixes, in pools that are too small, with failed steps and resets."""
    rng = np.random.default_rng(seed)
    groups = FullAttention(4), SlidingWindow(8, 2), RecurrentState(8)
    space = new_space(*groups, num_blocks={"device": 60, "state": 9}, events=True, max_sequences=5)
    follower = Follower(space)
    rows: list[int] = []
    for _ in range(100):
        serve_a_step(space, rng, rows)
        if rng.random() < 0.05:
            space.reset_prefix_cache()
        if rng.random() < 0.3:
            follower.follow()
    follower.follow()
    assert space.statistics().pools[0].num_evictions > 0


def test_promise_18_a_stored_block_names_its_parent() -> None:
    space = new_space(events=True)
    cache(space, tokens(12))
    follower = Follower(space)
    follower.follow()
    first, second, third = hash_request_tokens(tokens(12), 4)
    assert follower.parents == {first: bytes(32), second: first, third: second}


def test_promise_18_a_parent_whose_place_serves_another_is_not_named() -> None:
    """The window has moved on, and the block before now holds a stranger's content."""
    space = new_space(SlidingWindow(1, 4), num_blocks=4, events=True)
    row = prefill(space, tokens(4))
    space.append([row], [4])
    run_step(space)
    cache(space, tokens(8, first=50))
    space.append([row], [5, 6, 7], [3])
    run_step(space)
    follower = Follower(space)
    follower.follow()
    digests = hash_request_tokens(tokens(8), 4)
    assert follower.parents[digests[1]] in {digests[0], bytes(32)}


OPERATIONS: dict[str, Callable[[BlockSpace, int], object]] = {
    "allocate with lookahead": lambda space, _: space.allocate([1], num_lookahead=9000),
    "append with lookahead": lambda space, row: space.append([row], [], [0], num_lookahead=8000),
    "append": lambda space, row: space.append([row], tokens(8000, first=10**6), [8000]),
    "abort": lambda space, _: space.abort(space._ledger.in_flight[0].plan.step_id),
    "free": lambda space, row: space.free([row]),
    "reset": lambda space, _: space.reset_prefix_cache(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_promise_18_one_operation_may_cause_thousands_of_events(
    operation: Callable[[BlockSpace, int], object],
) -> None:
    """More than the log had room for before: a large step is in flight, and the pool is full of cached blocks."""
    space = new_space(num_blocks=3001, max_tokens=10_000, events=True)
    follower = Follower(space)
    for start in range(0, 10_000, 100):
        cache(space, tokens(92, first=start))
        follower.follow()
    row = allocate(space, tokens(2000, first=50_000))
    space.plan_step()
    follower.follow()
    operation(space, row)
    follower.follow()
    space.check()


def test_promise_18_events_cost_nothing_when_unused() -> None:
    space = new_space()
    cache(space, tokens(40))
    (events,) = space.drain_events()
    assert len(events) == 0
    assert only_pool(space).arrays.event_log.nbytes == 0


def test_promise_18_draining_takes_the_events() -> None:
    space = new_space(events=True)
    cache(space, tokens(8))
    (events,) = space.drain_events()
    assert (len(events), events.pool, events.digests.shape) == (2, "device", (2, 32))
    assert len(space.drain_events()[0]) == 0


# 19. Cost


def test_promise_19_a_million_blocks_take_at_most_160_bytes_each() -> None:
    """With the index, tokens and digests; the tables of the sequences come on top."""
    space = BlockSpace(SpaceConfig((FullAttention(16),), num_blocks=1_000_000, max_sequences=1))
    (pool,) = space.statistics().pools
    assert pool.nbytes <= 160 * 1_000_000
