"""Links between the blocks that continue one block, against plain lists."""

from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from pagedkv import BlockSpace, SpaceConfig
from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.prefix_index import name_block, unname
from pagedkv.blocks.record import LIFE, NULL_BLOCK, SUCCESSOR, PoolFeatures
from pagedkv.blocks.siblings import OLDER, YOUNGER, first_unlinked
from pagedkv.contract.spec import FullAttention

NUM_BLOCKS = 12
ORPHANS = -1  # stand for a parent whose life is over
BLOCK = st.integers(1, NUM_BLOCKS - 1)


def children(pool: BlockPool, parent: int) -> Iterator[int]:
    """The children of a block, the one that was named last first."""
    child = int(pool.arrays.records[parent, SUCCESSOR])
    while child != NULL_BLOCK:
        yield child
        child = int(pool.arrays.siblings[child, OLDER])


@pytest.mark.interpreted
@given(st.lists(st.tuples(BLOCK, st.sampled_from((NULL_BLOCK, 1, 2)), st.booleans()), max_size=40))
def test_promise_24_children_are_listed_as_they_were_named(operations: list[tuple[int, int, bool]]) -> None:
    pool = BlockPool("device", NUM_BLOCKS, 1, features=PoolFeatures(siblings=True))
    arrays = pool.arrays
    expected: dict[int, list[int]] = {ORPHANS: []}
    parents: dict[int, int] = {}
    for block, parent, is_named in operations:
        if block in parents:
            expected[parents.pop(block)].remove(block)
            expected[ORPHANS] += (orphans := expected.pop(block, []))
            parents.update(dict.fromkeys(orphans, ORPHANS))
            unname(arrays, block)
        if is_named and block != parent and (parent == NULL_BLOCK or parent in parents):
            arrays.digests[block, 0] = block
            name_block(arrays, 1, block, parent, int(arrays.records[parent, LIFE]))
            expected.setdefault(parent, []).insert(0, block)
            parents[block] = parent
        assert first_unlinked(arrays) == NULL_BLOCK
        for above in (NULL_BLOCK, *parents):
            assert list(children(pool, above)) == expected.get(above, [])


def test_promise_24_without_partial_hits_nothing_is_kept_for_them() -> None:
    sizes = {}
    for least in (0, 1):
        space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=1000, num_host_blocks=10, min_partial_hit=least))
        sizes[least] = space.statistics().pools[0].nbytes
        assert len(space._state.host_pools["device"].arrays.siblings) == 0
    assert sizes[1] - sizes[0] == 8 * 1000


@pytest.mark.interpreted
def test_promise_17_a_child_that_is_not_linked_with_its_siblings_is_noticed() -> None:
    for link in (OLDER, YOUNGER):
        pool = BlockPool("device", NUM_BLOCKS, 1, features=PoolFeatures(siblings=True))
        for block in pool.acquire(3) or []:
            pool.arrays.digests[block, 0] = block
            name_block(pool.arrays, 1, block, NULL_BLOCK, 0)
        check_pool(pool)
        pool.arrays.siblings[2, link] = NULL_BLOCK
        with pytest.raises(AssertionError, match="is not linked with its siblings"):
            check_pool(pool)
