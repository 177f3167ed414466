"""Caps and floors in one pool: any order of operations, beside lists that say whose block goes next."""

import os
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagedkv import BlockPool
from pagedkv.blocks import leasing, victims
from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.blocks.free_queue import free_leased
from pagedkv.blocks.leasing import LAST_RELEASE
from pagedkv.blocks.life_cycle import acquire, drop_name, make_spare, release, reuse_all
from pagedkv.blocks.prefix_index import name_block
from pagedkv.blocks.record import HIGH_PRIORITY, LIFE, NAME, NULL_BLOCK, NUM_RELEASED, PoolArrays, PoolFeatures
from pagedkv.blocks.tenant_charges import BEFORE, CLOCK, CLOCK_MASK, IN_CACHED, charge_hits, list_of
from tests.blocks.lease_model import Leased, end_largest
from tests.choosing import long_but
from tests.compiling import TESTED_POLICIES

NUMBA_IS_OFF: Final = os.environ.get("NUMBA_DISABLE_JIT") == "1"
SPARE, CACHED, LEASED = "spare", "cached", "leased"
BLOCKS: Final = st.lists(st.integers(0, 30), min_size=1, max_size=6)
TENANT: Final = st.integers(0, 2)
LATEST: Final = 31  # a place: of what was named last


@dataclass(eq=False)
class Known(Leased):
    """A block that somebody uses, or that has a name.

    Args:
        owner: whom it is charged to.
        num_users: how many use it.
        is_spare: whether no hit of it is expected.
    """

    owner: int = 0
    num_users: int = 0
    is_spare: bool = False

    @property
    def kind(self) -> str:
        """The list in which it stands while unreferenced."""
        return LEASED if self.until else SPARE if self.is_spare else CACHED


class TenantsMachine(RuleBasedStateMachine):
    """Draws what three tenants do in a pool; the first has neither cap nor floor."""

    policy = "lru"
    has_tenants = True

    def __init__(self) -> None:
        """Start without a pool."""
        super().__init__()
        self.blocks: dict[int, Known] = {}
        self.resting: list[int] = []  # unreferenced cached blocks, in the order of their release
        self.num_names = 0
        self.now = 0.0

    @initialize(
        num_blocks=st.integers(2, 20),
        cap=st.integers(1, 14),
        floors=st.tuples(st.integers(0, 7), st.integers(0, 7)),
        clock=st.sampled_from((0, CLOCK_MASK - 5)),
        num_released=st.sampled_from((0, LAST_RELEASE - 5)),
    )
    def build(self, num_blocks: int, cap: int, floors: tuple[int, int], clock: int, num_released: int) -> None:
        """Build the pool."""
        cap = min(cap, num_blocks)
        first = min(floors[0], cap)
        self.limits = ((num_blocks, 0), (cap, first), (num_blocks, min(floors[1], num_blocks - first)))
        if not self.has_tenants:
            self.limits = ((num_blocks, 0), (0, 0), (0, 0))
        features = PoolFeatures(limits=self.limits if self.has_tenants else (), leases=True)
        self.pool = BlockPool("device", num_blocks + 1, 4, policy=POLICIES[self.policy], features=features)
        self.arrays.tenants[:1, CLOCK] = clock
        self.arrays.counts[NUM_RELEASED] = num_released

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
        """Unreferenced blocks."""
        return self.pool.num_usable - sum(known.num_users > 0 for known in self.blocks.values())

    def permitted(self, tenant: int) -> int:
        """Blocks that a tenant may take."""
        promised = [max(0, floor - self.num_taken(other)) for other, (_, floor) in enumerate(self.limits)]
        others = sum(promised) - promised[tenant]
        return max(0, min(self.limits[tenant][0] - self.num_taken(tenant), self.num_free - others))

    def is_evictable(self, block: int, tenant: int) -> bool:
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
        leased = [self.blocks[block] for block in self.resting if self.blocks[block].until]
        ended = end_largest(leased, [self.blocks[block] for block in among])
        numbers = {known: block for block, known in self.blocks.items()}
        for known in ended:
            self._rest(numbers[known])
        return numbers[ended[0]]

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
        permitted = [block for block in self.resting if self.is_evictable(block, tenant)]
        kinds = {self.blocks[block].kind for block in permitted}
        first = self._next_of(permitted)
        if self.policy == "lru" or SPARE in kinds or CACHED not in kinds:
            return [first]
        return [block for block in permitted if self.blocks[block].kind == CACHED]

    def _forget(self, block: int) -> None:
        self.blocks.pop(block).is_named = False
        self.resting.remove(block)

    # What happens

    @rule(tenant=TENANT, count=st.integers(1, 4), is_named=st.booleans(), places=BLOCKS)
    def take(self, tenant: int, count: int, places: list[int], *, is_named: bool) -> None:
        """Take blocks, as many as are permitted; what they hold may continue what others hold."""
        tenant = tenant if self.has_tenants else 0
        self.pool.charge_to(tenant)
        for _ in range(min(count, self.permitted(tenant))):
            candidates = self._victims(tenant)
            block = int(acquire(self.arrays))
            gone = [victim for victim in candidates if not self.arrays.records[victim, NAME]]
            assert len(gone) == min(1, len(candidates)), f"{gone} went instead of one of {candidates}"
            for victim in gone:
                self._forget(victim)
            assert block not in self.blocks
            self.blocks[block] = Known(owner=tenant, num_users=1)
            if is_named:
                self._name(block, places[0])
                places = [*places[1:], LATEST]

    def _name(self, block: int, place: int) -> None:
        self.num_names += 1
        self.arrays.digests[block] = self.num_names
        parents = [NULL_BLOCK, *(other for other, known in self.blocks.items() if known.is_named)]
        parent = parents[-1 if place == LATEST else place % len(parents)]
        name_block(self.arrays, 1, block, parent, int(self.arrays.records[parent, LIFE]))
        self.blocks[block].is_named = True
        self.blocks[block].parent = self.blocks.get(parent)

    @rule(places=BLOCKS)
    def give_back(self, places: list[int]) -> None:
        """Give references back."""
        for place in places:
            used = [block for block, known in self.blocks.items() if known.num_users]
            if not used:
                return
            block = used[place % len(used)]
            release(self.arrays, block, 0)
            self._given_back(block)

    def _given_back(self, block: int) -> None:
        known = self.blocks[block]
        known.num_users -= 1
        if known.num_users:
            return
        if not known.is_named:
            del self.blocks[block]
            return
        if HIGH_PRIORITY < known.until <= self.now:
            known.until = 0.0
        self._rest(block)

    @rule(tenant=TENANT, places=BLOCKS)
    def hit(self, tenant: int, places: list[int]) -> None:
        """Hit named blocks, as many as are permitted."""
        tenant = tenant if self.has_tenants else 0
        named = [block for block, known in self.blocks.items() if known.is_named]
        hits = list(dict.fromkeys(named[place % len(named)] for place in places)) if named else []
        free = [block for block in hits if block in self.resting][self.permitted(tenant) :]
        hits = [block for block in hits if block not in free]
        blocks = np.array(hits, np.int32)
        self.pool.charge_to(tenant)
        if self.has_tenants:
            charge_hits(self.arrays, blocks)
        reuse_all(self.arrays, blocks)
        for block in hits:
            known = self.blocks[block]
            known.num_users += 1
            known.is_spare = False
            if block in self.resting:
                self.resting.remove(block)
                known.owner = tenant
        if self.has_tenants:
            victims.keep_cap(self.arrays, tenant, 0)
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

    @rule(places=BLOCKS, until=st.sampled_from((HIGH_PRIORITY, 3.0, 5.0, 6.0, 9.0, 30.0)), with_parents=st.booleans())
    def lease(self, places: list[int], until: float, *, with_parents: bool) -> None:
        """Keep named blocks for a while from now on, or for their priority; as a rule with all that they continue."""
        for place in places[:3]:
            named = [block for block, known in self.blocks.items() if known.is_named and not known.is_spare]
            if named:
                self._lease(self.blocks[named[place % len(named)]], until, with_parents=with_parents)

    def _lease(self, known: Known, until: float, *, with_parents: bool) -> None:
        end = until if until == HIGH_PRIORITY else self.now + until
        numbers = {each: block for block, each in self.blocks.items()}
        while not known.is_spare:
            block = numbers[known]
            leasing.lease(self.arrays, block, end)
            if block in self.resting and not known.until:
                self._rest(block)
            known.until = max(known.until, end)
            if not with_parents or not isinstance(known.parent, Known) or not known.parent.is_named:
                break
            known = known.parent

    @rule(
        tenant=TENANT,
        count=st.integers(1, 5),
        place=st.integers(0, 30),
        until=st.sampled_from((HIGH_PRIORITY, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 11.0, 30.0)),
        with_parents=st.booleans(),
        is_in_order=st.booleans(),
    )
    def serve(  # noqa: PLR0913 - one draw for each argument
        self, tenant: int, count: int, place: int, until: float, *, with_parents: bool, is_in_order: bool
    ) -> None:
        """Compute what continues a block, lease it, and give it back, as a rule from its end on."""
        before = list(self.blocks)
        self.take(tenant, count, [place, *count * [LATEST]], is_named=True)
        new = [block for block in self.blocks if block not in before and self.blocks[block].num_users]
        for block in new if not with_parents else new[-1:]:
            self._lease(self.blocks[block], until, with_parents=with_parents)
        for block in new if is_in_order else new[::-1]:
            release(self.arrays, block, 0)
            self._given_back(block)

    @rule(tenant=TENANT, num_left=st.integers(0, 5), until=st.sampled_from((HIGH_PRIORITY, 3.0, 5.0, 9.0)))
    def press(self, tenant: int, num_left: int, until: float) -> None:
        """Give all back, lease what is cached, and take what is permitted but for a few."""
        self.give_back([0] * sum(known.num_users for known in self.blocks.values()))
        for block in list(self.resting):
            if not self.blocks[block].until:
                self._lease(self.blocks[block], until + block, with_parents=True)
        tenant = tenant if self.has_tenants else 0
        self.take(tenant, self.permitted(tenant) - num_left, [0], is_named=False)

    @rule(seconds=st.integers(1, 4))
    def advance(self, seconds: int) -> None:
        """Let time pass."""
        self.now += seconds
        victims.end_overdue(self.arrays, self.now)
        for block in list(self.resting):
            if HIGH_PRIORITY < self.blocks[block].until <= self.now:
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
        leased = [block for block in self.resting if self.blocks[block].until]
        assert np.flatnonzero(free_leased(self.arrays)).tolist() == sorted(leased)
        for block, known in self.blocks.items():
            assert self.arrays.leases[block] == known.until
        if leased:
            assert self.pool.free_queue.get_all_free_blocks()[-len(leased) :] == leased
        for tenant, (cap, _) in enumerate(self.limits if self.has_tenants else ()):
            assert self.pool.num_permitted(tenant) == self.permitted(tenant)
            assert self.num_charged(tenant) <= cap


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", long_but(["lru", "priority"], TESTED_POLICIES))
def test_what_may_go_goes_in_its_order_and_nothing_else(policy: str) -> None:
    machine = type("Machine", (TenantsMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))


class LeasesMachine(TenantsMachine):
    """The same without tenants: only leases are shared."""

    has_tenants = False


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "policy",
    long_but(["lru"], [name for name in TESTED_POLICIES if name != "hazard"]),  # that empties blocks ahead
)
def test_leases_are_given_up_in_their_order(policy: str) -> None:
    machine = type("Machine", (LeasesMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=60))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("keep_cap", lambda *_: None),
        ("is_evictable", lambda *_: True),
        ("_oldest_permitted", lambda *_: NULL_BLOCK),
        ("_own_victim", lambda pool, tenant: int(pool.tenants[list_of(pool, tenant, IN_CACHED), BEFORE])),
    ],
)
@pytest.mark.interpreted
@pytest.mark.skipif(not NUMBA_IS_OFF, reason="compiled loops cannot be replaced in part")
def test_a_rule_that_is_broken_is_noticed(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401 - any loop
    monkeypatch.setattr(victims, name, broken)
    bounded = settings(max_examples=300, stateful_step_count=40, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        run_state_machine_as_test(TenantsMachine, settings=bounded)
