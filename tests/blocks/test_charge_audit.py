"""The audit of charges names each contradiction that tampering makes (promise 17); and what accounts cost."""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import BlockPool
from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.life_cycle import acquire, release
from pagedkv.blocks.prefix_index import name_block
from pagedkv.blocks.record import CHARGED, KEPT, NULL_BLOCK, SPARE, PoolFeatures
from pagedkv.blocks.tenant_charges import (
    AFTER,
    CAP,
    CLOCK,
    CLOCK_MASK,
    FLOOR,
    IN_CACHED,
    NUM_RESERVED,
    NUM_RESTING,
    NUM_TAKEN,
    STAMP,
    account_of,
    join,
    leave,
    list_of,
)

pytestmark = pytest.mark.interpreted

LIMITS = ((11, 0), (5, 2), (11, 6))


def audited_pool() -> BlockPool:
    """Tenant 1 has 1 in use and 2 and 3 cached; tenant 2 has 4 in use; none has 5 in use, 6 cached; 7 is empty."""
    pool = BlockPool("device", 12, 4, features=PoolFeatures(limits=LIMITS))
    for tenant, blocks in ((1, (1, 2, 3)), (2, (4,)), (0, (5, 6))):
        pool.charge_to(tenant)
        for block in blocks:
            assert acquire(pool.arrays) == block
            pool.arrays.digests[block] = block
            name_block(pool.arrays, 1, block, NULL_BLOCK, 0)
    for block in (2, 3, 6):
        release(pool.arrays, block, 0)
    check_pool(pool)
    return pool


def set_number(place: int | str, column: int, value: int) -> Callable[[BlockPool], None]:
    """Set a number of a block's row, or of a tenant's account."""

    def tamper(pool: BlockPool) -> None:
        row = account_of(pool.arrays, int(place)) if isinstance(place, str) else place
        assert pool.arrays.tenants[row, column] != value
        pool.arrays.tenants[row, column] = value

    return tamper


def other_kind(pool: BlockPool) -> None:
    leave(pool.arrays, 2)
    pool.arrays.records[2, KEPT] = SPARE
    join(pool.arrays, 2)
    pool.arrays.records[2, KEPT] = 0


def one_way(pool: BlockPool) -> None:
    pool.arrays.tenants[list_of(pool.arrays, 1, IN_CACHED), AFTER] = 3


def turned_round(pool: BlockPool) -> None:
    leave(pool.arrays, 2)
    join(pool.arrays, 2)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (set_number(1, CHARGED, 3), "charged to no tenant"),
        (set_number(1, CHARGED, -1), "charged to no tenant"),
        (set_number(7, CHARGED, 1), "an empty block is charged"),
        (set_number(1, CHARGED, 2), "taken are miscounted"),
        (set_number("2", NUM_TAKEN, 2), "taken are miscounted"),
        (set_number(NULL_BLOCK, NUM_RESERVED, 5), "floors promise 6 more"),
        (set_number("2", FLOOR, 5), "floors promise 5 more"),
        (set_number("1", CAP, 2), "tenant 1 is above its cap"),
        (set_number("0", NUM_RESTING, 2), "cached blocks are miscounted"),
        (set_number(2, CHARGED, 0), "another tenant's list"),
        (other_kind, "another kind's list"),
        (one_way, "does not stand behind"),
        (set_number(2, STAMP, 2), "out of the order of their release"),
        (turned_round, "in another order than all"),
    ],
)
def test_an_account_that_does_not_add_up_is_named(tamper: Callable[[BlockPool], None], message: str) -> None:
    pool = audited_pool()
    tamper(pool)
    with pytest.raises(AssertionError, match=message):
        check_pool(pool)


def test_the_order_of_release_outlives_its_numbers() -> None:
    pool = audited_pool()
    tenants = pool.arrays.tenants
    for block in (2, 3, 6):
        tenants[block, STAMP] += CLOCK_MASK - 5
    tenants[NULL_BLOCK, CLOCK] = CLOCK_MASK - 1
    for block in (4, 1):
        release(pool.arrays, block, 0)
        check_pool(pool)
    assert tenants[NULL_BLOCK, CLOCK] == 0
    cached = np.array([1, 2, 3, 4, 6])
    ages = (int(tenants[NULL_BLOCK, CLOCK]) - tenants[cached, STAMP].astype(int)) & CLOCK_MASK
    assert cached[np.argsort(-ages)].tolist() == [2, 3, 6, 4, 1]


def test_a_pool_lets_nobody_take_what_floors_promise() -> None:
    pool = audited_pool()
    assert pool.num_free == 8
    assert [pool.num_permitted(tenant) for tenant in range(3)] == [2, 3, 7]
    assert pool.acquire(3) is None
    assert pool.acquire(2) == [7, 8]
    check_pool(pool)
    assert pool.nbytes - BlockPool("device", 12, 4).nbytes == 16 * 12 + 64 * 3
