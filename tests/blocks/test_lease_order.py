"""The order of leased blocks: what it promises, where it is wrong, and what it costs."""

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv import BlockPool
from pagedkv.blocks import treap
from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.leasing import LAST_RELEASE, in_order_of_release, lease
from pagedkv.blocks.life_cycle import acquire, release
from pagedkv.blocks.prefix_index import name_block
from pagedkv.blocks.record import LIFE, NEXT, NULL_BLOCK, NUM_RELEASED, RELEASED, PoolFeatures

NUMBA_IS_OFF: Final = os.environ.get("NUMBA_DISABLE_JIT") == "1"


def leasing_pool(chains: list[list[float]], num_shared: int = 1) -> BlockPool:
    """A pool of which all is leased: chains that continue the same first blocks, by the ends of their own ones."""
    num_blocks = num_shared + sum(map(len, chains))
    pool = BlockPool("device", num_blocks + 1, 1, features=PoolFeatures(leases=True))
    arrays, parent = pool.arrays, NULL_BLOCK
    shared = [int(acquire(arrays)) for _ in range(num_shared)]
    for block in shared:
        name(pool, block, parent)
        parent = block
    for ends in chains:
        above, blocks = parent, []
        for end in ends:
            block = int(acquire(arrays))
            name(pool, block, above)
            lease(arrays, block, end)
            blocks.append(block)
            above = block
        for block in blocks[::-1]:
            release(arrays, block, 0)
    for block in shared[::-1]:
        lease(arrays, block, max(ends[0] for ends in chains))
        release(arrays, block, 0)
    check_pool(pool)
    return pool


def name(pool: BlockPool, block: int, parent: int) -> None:
    """Make a block findable as what continues another one."""
    pool.arrays.digests[block] = block
    name_block(pool.arrays, 1, block, parent, int(pool.arrays.records[parent, LIFE]))


def swap_links(pool: BlockPool) -> None:
    links = pool.arrays.lease_links
    root = int(links[NULL_BLOCK, 0])
    links[root] = links[root, ::-1].copy()


def cut_off(pool: BlockPool) -> None:
    pool.arrays.lease_links[NULL_BLOCK, 0] = NULL_BLOCK


def other_release(pool: BlockPool) -> None:
    pool.arrays.records[2, RELEASED] = 1000


def other_end(pool: BlockPool) -> None:
    pool.arrays.leases[2] = 1.0


def no_lease(pool: BlockPool) -> None:
    pool.arrays.leases[3] = 0.0


@pytest.mark.interpreted
@pytest.mark.parametrize("tamper", [swap_links, cut_off, other_release, other_end, no_lease])
def test_promise_17_an_order_that_is_wrong_is_noticed(tamper: Callable[[BlockPool], None]) -> None:
    pool = leasing_pool([[9.0, 9.0, 9.0], [9.0, 8.0, 7.0], [20.0, 5.0, 5.0]])
    tamper(pool)
    with pytest.raises(AssertionError):
        check_pool(pool)


@pytest.mark.interpreted
@given(st.permutations(range(1, 13)), st.integers(0, 12))
def test_a_chain_is_sorted_by_release(releases: list[int], num_blocks: int) -> None:
    arrays = BlockPool("device", 14, 1, features=PoolFeatures(leases=True)).arrays
    blocks = list(range(1, num_blocks + 1))
    arrays.records[1:13, RELEASED] = releases
    arrays.records[blocks, NEXT] = [*blocks[1:], NULL_BLOCK][: len(blocks)]
    block = in_order_of_release(arrays, blocks[0] if blocks else NULL_BLOCK)
    found = []
    while block != NULL_BLOCK:
        found.append(block)
        block = int(arrays.records[block, NEXT])
    assert found == sorted(blocks, key=lambda block: releases[block - 1])


@pytest.mark.interpreted
def test_the_order_of_release_outlives_its_numbers() -> None:
    pool = leasing_pool([[9.0]] * 4)
    before = pool.free_queue.get_all_free_blocks()
    pool.arrays.counts[NUM_RELEASED] = LAST_RELEASE
    block = before[0]
    pool.arrays.leases[block] = 9.0
    lease(pool.arrays, block, 10.0)
    assert pool.free_queue.get_all_free_blocks() == before, "another end is no release"
    (taken,) = pool.acquire(1) or [0]
    pool.release([taken])
    other = int(acquire(pool.arrays))
    name(pool, other, NULL_BLOCK)
    lease(pool.arrays, other, 30.0)
    release(pool.arrays, other, 0)
    check_pool(pool)
    assert pool.arrays.counts[NUM_RELEASED] < len(pool.arrays.records)


@pytest.mark.skipif(not NUMBA_IS_OFF, reason="compiled loops cannot be counted")
@pytest.mark.interpreted
@pytest.mark.parametrize("num_shared", [0, 3])
def test_promise_27_giving_a_lease_up_looks_at_few_of_the_others(
    num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight times as many leases: three steps more in each tree, not eight times as many."""
    seen = [0]
    original: Any = treap.precedes

    def counted(*arguments: Any) -> bool:  # noqa: ANN401 - as what it replaces
        seen[0] += 1
        return bool(original(*arguments))

    monkeypatch.setattr(treap, "precedes", counted)
    taken = []
    for num_leases in (64, 512):
        ends = np.random.default_rng(0).permutation(num_leases).tolist()
        pool = leasing_pool([4 * [10.0 + end] for end in ends], num_shared)
        seen[0] = 0
        for _ in range(4 * 32):  # 32 leases
            acquire(pool.arrays)
        taken.append(seen[0])
        check_pool(pool)
    assert taken[1] < 2.5 * taken[0]
