"""Caps and floors in one pool: any order of operations, beside lists that say whose block goes next."""

import os
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagedkv import BlockPool
from pagedkv.pool import capping, leasing
from pagedkv.pool.auditing import check_pool
from pagedkv.pool.block_pool import acquire, drop_name, release, reuse_all
from pagedkv.pool.blocks import NAME, NULL_BLOCK, PoolArrays, PoolFeatures
from pagedkv.pool.charging import BEFORE, CLOCK, CLOCK_MASK, IN_CACHED, charge_hits, list_of
from pagedkv.pool.eviction.registry import POLICIES
from pagedkv.pool.leasing import HIGH
from pagedkv.pool.prefix_index import name_block
from pagedkv.pool.sparing import make_spare

NUMBA_IS_OFF: Final = os.environ.get("NUMBA_DISABLE_JIT") == "1"
SPARE, CACHED, LEASED = "spare", "cached", "leased"
BLOCKS: Final = st.lists(st.integers(0, 30), min_size=1, max_size=6)
TENANT: Final = st.integers(0, 2)


@dataclass(eq=False)
class Known:
    """A block that somebody uses, or that has a name.

    Args:
        owner: whom it is charged to.
        num_users: how many use it.
        is_named: whether it can be found.
        is_spare: whether nobody is expected to find it; until: when its lease ends, 0 if it has none.
    """

    owner: int
    num_users: int
    is_named: bool = False
    is_spare: bool = False
    until: float = 0.0

    @property
    def kind(self) -> str:
        """Which list it stands in when nobody uses it."""
        return LEASED if self.until else SPARE if self.is_spare else CACHED


class TenantsMachine(RuleBasedStateMachine):
    """Draws what three tenants do in a pool; the first has neither cap nor floor."""

    policy = "lru"

    def __init__(self) -> None:
        """Start without a pool."""
        super().__init__()
        self.blocks: dict[int, Known] = {}
        self.resting: list[int] = []  # named blocks that nobody uses, in the order of their release
        self.num_names = 0
        self.now = 0.0

    @initialize(
        num_blocks=st.integers(2, 14),
        cap=st.integers(1, 14),
        floors=st.tuples(st.integers(0, 7), st.integers(0, 7)),
        clock=st.sampled_from((0, CLOCK_MASK - 5)),
    )
    def build(self, num_blocks: int, cap: int, floors: tuple[int, int], clock: int) -> None:
        """Build the pool."""
        cap = min(cap, num_blocks)
        first = min(floors[0], cap)
        self.limits = ((num_blocks, 0), (cap, first), (num_blocks, min(floors[1], num_blocks - first)))
        features = PoolFeatures(limits=self.limits, leases=True)
        self.pool = BlockPool("device", num_blocks + 1, 4, policy=POLICIES[self.policy], features=features)
        self.arrays.tenants[NULL_BLOCK, CLOCK] = clock

    @property
    def arrays(self) -> PoolArrays:
        """The pool's state."""
        return self.pool.arrays

    # What is known

    def num_taken(self, tenant: int) -> int:
        """Blocks of a tenant that are in use."""
        return sum(known.owner == tenant and known.num_users > 0 for known in self.blocks.values())

    def num_charged(self, tenant: int) -> int:
        """Blocks of a tenant, used or cached."""
        return sum(known.owner == tenant for known in self.blocks.values())

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self.pool.num_usable - sum(known.num_users > 0 for known in self.blocks.values())

    def permitted(self, tenant: int) -> int:
        """Blocks that a tenant may take."""
        promised = [max(0, floor - self.num_taken(other)) for other, (_, floor) in enumerate(self.limits)]
        others = sum(promised) - promised[tenant]
        return max(0, min(self.limits[tenant][0] - self.num_taken(tenant), self.num_free - others))

    def may_go(self, block: int, tenant: int) -> bool:
        """Whether a block may be evicted for a tenant below its cap."""
        owner = self.blocks[block].owner
        return owner == tenant or self.num_charged(owner) > self.limits[owner][1]

    # What the rule says

    def _next_of(self, among: list[int]) -> int:
        """Of some cached blocks the next to go: spare, cached, leased, and of each kind the first released."""
        for kind in (SPARE, CACHED):
            for block in among:
                if self.blocks[block].kind == kind:
                    return block
        ends = [self.blocks[block].until for block in among]
        largest = HIGH if HIGH in ends else max(ends)
        ended = [block for block in among if self.blocks[block].until == largest]
        for block in ended:
            self.blocks[block].until = 0.0
            self._rest(block)
        return ended[0]

    def _rest(self, block: int) -> None:
        if block in self.resting:
            self.resting.remove(block)
        self.resting.append(block)

    def _evict_own(self, tenant: int, num_more: int) -> None:
        while self.num_charged(tenant) + num_more > self.limits[tenant][0]:
            self._forget(self._next_of([block for block in self.resting if self.blocks[block].owner == tenant]))

    def _victims(self, tenant: int) -> list[int]:
        """Which blocks may go so that a tenant can take one, none if there is room: of LRU one, else a choice."""
        self._evict_own(tenant, 1)
        if self.num_free > len(self.resting):
            return []
        permitted = [block for block in self.resting if self.may_go(block, tenant)]
        kinds = {self.blocks[block].kind for block in permitted}
        first = self._next_of(permitted)
        if self.policy == "lru" or SPARE in kinds or CACHED not in kinds:
            return [first]
        return [block for block in permitted if self.blocks[block].kind == CACHED]

    def _forget(self, block: int) -> None:
        del self.blocks[block]
        self.resting.remove(block)

    # What happens

    @rule(tenant=TENANT, count=st.integers(1, 4), is_named=st.booleans())
    def take(self, tenant: int, count: int, *, is_named: bool) -> None:
        """Take blocks, as many as are permitted."""
        self.pool.let_pay(tenant)
        for _ in range(min(count, self.permitted(tenant))):
            victims = self._victims(tenant)
            block = int(acquire(self.arrays))
            gone = [victim for victim in victims if not self.arrays.records[victim, NAME]]
            assert len(gone) == min(1, len(victims)), f"{gone} went instead of one of {victims}"
            for victim in gone:
                self._forget(victim)
            assert block not in self.blocks
            self.blocks[block] = Known(tenant, 1)
            if is_named:
                self._name(block)

    def _name(self, block: int) -> None:
        self.num_names += 1
        self.arrays.digests[block] = self.num_names
        name_block(self.arrays, 1, block, NULL_BLOCK, 0)
        self.blocks[block].is_named = True

    @rule(places=BLOCKS)
    def give_back(self, places: list[int]) -> None:
        """Give references back."""
        for place in places:
            used = [block for block, known in self.blocks.items() if known.num_users]
            if not used:
                return
            block = used[place % len(used)]
            release(self.arrays, block, 0)
            known = self.blocks[block]
            known.num_users -= 1
            if known.num_users:
                continue
            if not known.is_named:
                del self.blocks[block]
                continue
            if HIGH < known.until <= self.now:
                known.until = 0.0
            self._rest(block)

    @rule(tenant=TENANT, places=BLOCKS)
    def hit(self, tenant: int, places: list[int]) -> None:
        """Hit named blocks, as many as are permitted."""
        named = [block for block, known in self.blocks.items() if known.is_named]
        hits = list(dict.fromkeys(named[place % len(named)] for place in places)) if named else []
        free = [block for block in hits if block in self.resting][self.permitted(tenant) :]
        hits = [block for block in hits if block not in free]
        blocks = np.array(hits, np.int32)
        self.pool.let_pay(tenant)
        charge_hits(self.arrays, blocks)
        reuse_all(self.arrays, blocks)
        for block in hits:
            known = self.blocks[block]
            known.num_users += 1
            known.is_spare = False
            if block in self.resting:
                self.resting.remove(block)
                known.owner = tenant
        capping.keep_cap(self.arrays, tenant, 0)
        self._evict_own(tenant, 0)

    @rule(place=st.integers(0, 30))
    def drop(self, place: int) -> None:
        """Take a name away."""
        named = [block for block, known in self.blocks.items() if known.is_named]
        if named:
            block = named[place % len(named)]
            drop_name(self.arrays, block)
            known = self.blocks[block]
            known.is_named, known.is_spare, known.until = False, False, 0.0
            if block in self.resting:
                self._forget(block)

    @rule(places=BLOCKS)
    def spare(self, places: list[int]) -> None:
        """Let cached blocks be asked for no more."""
        for place in places[:2]:
            plain = [block for block in self.resting if self.blocks[block].kind == CACHED]
            if plain:
                block = plain[place % len(plain)]
                make_spare(self.arrays, block)
                self.blocks[block].is_spare = True
                self._rest(block)

    @rule(places=BLOCKS, until=st.sampled_from((HIGH, 3.0, 5.0)))
    def lease(self, places: list[int], until: float) -> None:
        """Keep named blocks for a while from now on, or for their priority."""
        for place in places[:3]:
            named = [block for block, known in self.blocks.items() if known.is_named and not known.is_spare]
            if named:
                block = named[place % len(named)]
                known = self.blocks[block]
                end = until if until == HIGH else self.now + until
                leasing.lease(self.arrays, block, end)
                if block in self.resting and not known.until:
                    self._rest(block)
                known.until = max(known.until, end)

    @rule(seconds=st.integers(1, 4))
    def advance(self, seconds: int) -> None:
        """Let time pass."""
        self.now += seconds
        leasing.end_overdue(self.arrays, self.now)
        for block in list(self.resting):
            if HIGH < self.blocks[block].until <= self.now:
                self.blocks[block].until = 0.0
                self._rest(block)

    @invariant()
    def check(self) -> None:
        """The pool is sound, and permits what the rule permits."""
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool)
        cached = {block for block in range(1, self.pool.num_blocks) if self.arrays.records[block, NAME]}
        assert cached == {block for block, known in self.blocks.items() if known.is_named}
        assert self.pool.num_free == self.num_free
        for tenant, (cap, _) in enumerate(self.limits):
            assert self.pool.num_permitted(tenant) == self.permitted(tenant)
            assert self.num_charged(tenant) <= cap


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", POLICIES)
def test_what_may_go_goes_in_its_order_and_nothing_else(policy: str) -> None:
    machine = type("Machine", (TenantsMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("keep_cap", lambda *_: None),
        ("may_go", lambda *_: True),
        ("_oldest_permitted", lambda *_: NULL_BLOCK),
        ("_own_victim", lambda pool, tenant: int(pool.tenants[list_of(pool, tenant, IN_CACHED), BEFORE])),
    ],
)
@pytest.mark.interpreted
@pytest.mark.skipif(not NUMBA_IS_OFF, reason="compiled loops cannot be replaced in part")
def test_a_rule_that_is_broken_is_noticed(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401 - any loop
    monkeypatch.setattr(capping, name, broken)
    bounded = settings(max_examples=300, stateful_step_count=40, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        run_state_machine_as_test(TenantsMachine, settings=bounded)
