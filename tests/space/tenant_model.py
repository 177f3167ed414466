"""Which tenant each block is charged to, and what each tenant may take: written from the rule alone.

A free block that is taken, new or hit, is charged to the tenant that takes it, until another tenant does. Taken blocks
of a pool are in use, or wait for a step. A tenant may take what its cap and the floors of others leave to it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from pagedkv import SpaceConfig, SpaceStatistics, TenantLimits
from tests.space.memory_model import Place

__all__ = ["Needs", "Tenant", "TenantModel", "added"]

Tenant: TypeAlias = str | None
Needs: TypeAlias = Mapping[Tenant, Mapping[str, int]]
"""Blocks to be taken, by tenant and pool."""


def added(*all_needs: Needs) -> Needs:
    """Add what is needed for several things."""
    total: dict[Tenant, dict[str, int]] = {}
    for needs in all_needs:
        for tenant, by_pool in needs.items():
            mine = total.setdefault(tenant, dict.fromkeys(by_pool, 0))
            for pool, count in by_pool.items():
                mine[pool] += count
    return total


class TenantModel:
    """The charges of one space.

    Attributes:
        numbers: the tenants in the order of statistics; "" where one was removed, until another is added.
        charged_to: the last to take each block of a device pool.
        taken: blocks that are in use or wait, by pool and tenant; charged: those that the last operation took.
    """

    def __init__(self, config: SpaceConfig, seen: Counter[str]) -> None:
        """Expect an empty space."""
        self.seen = seen
        self.are_distinguished = config.tenants is not None
        self.num_usable = {pool: count - 1 for pool, count in config.blocks_by_pool().items()}
        self.numbers: list[Tenant] = [None, *(config.tenants or {})]
        self.cap: dict[tuple[str, Tenant], int] = {}
        self.floor: dict[tuple[str, Tenant], int] = {}
        for pool, count in self.num_usable.items():
            self.cap[pool, None], self.floor[pool, None] = count, 0
            for name, limits in (config.tenants or {}).items():
                assert isinstance(limits.cap, dict)
                assert isinstance(limits.floor, dict)
                self.cap[pool, name], self.floor[pool, name] = limits.cap[pool], limits.floor[pool]
        self.charged_to: dict[Place, Tenant] = {}
        self.taken: Counter[tuple[str, Tenant]] = Counter()
        self.charged: Counter[tuple[str, Tenant]] = Counter()

    @property
    def names(self) -> list[Tenant]:
        """The tenants that there are, in the order of statistics."""
        return [name for name in self.numbers if name != ""]

    def may_have(self, name: str, limits: TenantLimits) -> bool:
        """Whether a tenant may get these limits: what it uses is within its cap, and all floors fit."""
        assert isinstance(limits.cap, dict)
        assert isinstance(limits.floor, dict)
        others = [other for other in self.names if other != name]
        return all(
            self.taken[pool, name] <= limits.cap[pool]
            and limits.floor[pool] + sum(self.floor[pool, other] for other in others) <= count
            and limits.floor[pool] <= limits.cap[pool]
            for pool, count in self.num_usable.items()
        )

    def enter(self, name: str, limits: TenantLimits) -> None:
        """A tenant comes, or gets other limits."""
        assert isinstance(limits.cap, dict)
        assert isinstance(limits.floor, dict)
        self.seen["new limits" if name in self.numbers else "new tenant"] += 1
        if name not in self.numbers:
            if "" in self.numbers:
                self.numbers[self.numbers.index("")] = name
            else:
                self.numbers.append(name)
        for pool in self.num_usable:
            self.cap[pool, name], self.floor[pool, name] = limits.cap[pool], limits.floor[pool]

    def leave(self, name: str) -> None:
        """A tenant is removed; its blocks are charged to no tenant from now on."""
        self.seen["tenant removed"] += 1
        self.numbers[self.numbers.index(name)] = ""
        self.charged_to = {place: None if owner == name else owner for place, owner in self.charged_to.items()}

    def charge(self, place: Place, tenant: Tenant) -> None:
        """A tenant takes a block that was free."""
        self.seen["recharged"] += self.charged_to.get(place, tenant) != tenant
        self.charged_to[place] = tenant
        self.charged[place[0], tenant] += 1

    def follow(self, taken: Mapping[str, set[int]]) -> None:
        """See which blocks of each device pool are taken after an operation."""
        self.taken = Counter((pool, self.charged_to[pool, block]) for pool, blocks in taken.items() for block in blocks)
        self.charged.clear()

    def last_taken(self) -> dict[Tenant, dict[str, int]]:
        """Blocks that the current operation has taken, by tenant and pool."""
        return {tenant: {pool: self.charged[pool, tenant] for pool in self.num_usable} for tenant in self.names}

    def check(self, statistics: SpaceStatistics) -> None:
        """Compare the shares of all tenants; no tenant is above its cap, and each cached block is in one share."""
        if not self.are_distinguished:
            assert statistics.tenants == ()
            return
        assert [(share.pool, share.tenant) for share in statistics.tenants] == [
            (pool.name, name) for pool in statistics.pools for name in self.names
        ]
        for share in statistics.tenants:
            key = share.pool, share.tenant
            assert (share.cap, share.floor) == (self.cap[key], self.floor[key])
            assert share.num_taken == self.taken[key], f"{key} has taken {self.taken[key]} blocks, not {share}"
            assert share.num_taken + share.num_cached <= share.cap, f"{key} is above its cap: {share}"
            self.seen["at its cap"] += share.num_taken + share.num_cached == share.cap < self.num_usable[share.pool]
        for pool in statistics.pools:
            shares = [share for share in statistics.tenants if share.pool == pool.name]
            assert sum(share.num_cached for share in shares) == pool.num_cached
            for share in shares:
                assert share.num_permitted == self.permitted(pool.name, share.tenant, pool.num_free)

    def permitted(
        self, pool: str, tenant: Tenant, num_free: int, taken: Counter[tuple[str, Tenant]] | None = None
    ) -> int:
        """Blocks that a tenant may take of ``num_free`` free ones, while ``taken`` are taken; None: those taken now."""
        has = self.taken if taken is None else taken
        promised = sum(max(0, self.floor[pool, other] - has[pool, other]) for other in self.names if other != tenant)
        return max(0, min(self.cap[pool, tenant] - has[pool, tenant], num_free - promised))

    def lacks(self, needs: Needs, num_free: Mapping[str, int]) -> tuple[str, Tenant, int] | None:
        """Name the first pool and tenant with too little, tenants taking theirs in turn, and what it may take."""
        return self._lacks(needs, num_free, Counter(self.taken))

    def fit_empty(self, needs: Needs) -> bool:
        """Whether pools without blocks in use would have enough."""
        return self._lacks(needs, self.num_usable, Counter()) is None

    def _lacks(
        self, needs: Needs, num_free: Mapping[str, int], taken: Counter[tuple[str, Tenant]]
    ) -> tuple[str, Tenant, int] | None:
        for pool, free in num_free.items():
            left = free
            for tenant in self.names:
                count = needs.get(tenant, {}).get(pool, 0)
                permitted = self.permitted(pool, tenant, left, taken)
                if count > permitted:
                    return pool, tenant, permitted
                taken[pool, tenant] += count
                left -= count
        return None
