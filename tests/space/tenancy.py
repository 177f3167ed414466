"""Spaces that tenants share, for tests: functions that build and drive them, and read what each tenant has."""

from typing import Any

from pagedkv import (
    Allocation,
    BlockSpace,
    FullAttention,
    GroupSpec,
    RecurrentState,
    Shortage,
    SlidingWindow,
    TenantLimits,
    TenantShare,
)
from pagedkv.contract.spec import TokenIds
from tests.space.spaces import new_space, run_step

__all__ = ["MIXES", "allocate_for", "cache_for", "has", "run_for", "share", "shared_by", "short"]

MIXES: list[tuple[GroupSpec, ...]] = [
    (FullAttention(4),),
    (FullAttention(4), SlidingWindow(8, 4)),
    (FullAttention(4), RecurrentState(8, pool="device")),
]
NO_LIMITS = TenantLimits()


def shared_by(
    *groups: GroupSpec,
    a: TenantLimits,
    b: TenantLimits = NO_LIMITS,
    **settings: Any,  # noqa: ANN401 - as in new_space
) -> BlockSpace:
    """Build a space for the tenants a and b."""
    return new_space(*groups, tenants={"a": a, "b": b}, **settings)


def share(space: BlockSpace, tenant: str | None) -> TenantShare:
    """Return what a tenant has of the only pool."""
    (found,) = [it for it in space.statistics().tenants if it.tenant == tenant]
    return found


def has(space: BlockSpace, tenant: str | None) -> tuple[int, int]:
    """Return how many blocks a tenant has taken and cached."""
    its = share(space, tenant)
    return its.num_taken, its.num_cached


def run_for(space: BlockSpace, token_ids: TokenIds, tenant: str | None, num_lookahead: int = 0) -> int:
    """Allocate a sequence that fits, and compute it; return its row."""
    answer = space.allocate(token_ids, tenant=tenant, num_lookahead=num_lookahead)
    assert isinstance(answer, Allocation), answer
    run_step(space)
    space.check()
    return answer.row


def cache_for(space: BlockSpace, token_ids: TokenIds, tenant: str | None) -> None:
    """Serve a sequence from beginning to end."""
    space.free(run_for(space, token_ids, tenant))
    space.check()


def short(space: BlockSpace, answer: object) -> TenantShare:
    """Expect a shortage of a tenant's; return its share."""
    assert isinstance(answer, Shortage), answer
    assert answer.share is not None
    assert answer.num_free == space.num_free_blocks()
    return answer.share


def allocate_for(space: BlockSpace, token_ids: TokenIds, tenant: str | None) -> int:
    answer = space.allocate(token_ids, tenant=tenant)
    assert isinstance(answer, Allocation)
    space.check()
    return answer.row
