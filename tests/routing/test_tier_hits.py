"""Hits in tiers: an index has what stores and spaces would load, and a router weighs it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import FullAttention, GroupSpec, RequestKeys, SlidingWindow
from pagedkv.contract.answers import CacheEvents, TierEvents
from pagedkv.contract.arguments import as_token_array
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError
from pagedkv.routing import RecordWriter, ReplicaIndex, Router, RoutingReason, RoutingRules, replay
from pagedkv.routing.tier_entries import END_WORDS, TierEntries
from pagedkv.tiers import RunChain, StoreConfig, StoreCore, Write, array_of
from pagedkv.tiers.entry_blocks import EntryLayout
from pagedkv.tiers.identity import END_MASK
from pagedkv.tiers.tier_events import TierEventLog
from pagedkv.tiers.words import StoreEvents
from pagedkv.wire import BatchEncoder, changes_of, decode_batch
from pagedkv.wire.decoding import CacheEventReader
from tests.space.spaces import cache, new_space, tokens

pytestmark = pytest.mark.interpreted

MIXES: Final[dict[str, tuple[GroupSpec, ...]]] = {
    "full": (FullAttention(4),),
    "window": (FullAttention(4), SlidingWindow(6, 4, pool="small")),
    "window alone": (SlidingWindow(8, 4),),
}
PROMPTS: Final = [np.concatenate((tokens(32 * cut), tokens(150 - 32 * cut, first=1000 * cut))) for cut in range(5)]
BLOCK_NBYTES: Final = 2**23
SALTED: Final = RequestKeys(salt=b"a")


class Store:
    """The core of a store: what is offered is written at once."""

    def __init__(self, num_entries: int) -> None:
        self.core = StoreCore(StoreConfig(num_entries, num_entries, admission="always", max_events=100), 0.0)

    def offer(self, keys: Sequence[bytes]) -> None:
        """Store entries."""
        self.core.offer(array_of(keys), [1] * len(keys), 0.0)
        while actions := self.core.take_actions():
            for action in actions:
                self.core.completed(action.action, 0.0, 1 if isinstance(action, Write) else None)

    def drain_events(self) -> StoreEvents:
        """As the core's."""
        return self.core.drain_events()

    def contains(self, key: bytes) -> bool:
        """Whether it has an entry."""
        return bool(self.core.contains(array_of([key]))[0])


@dataclass
class Replica:
    """A space with two tiers, and what it publishes."""

    groups: tuple[GroupSpec, ...]
    name: str
    stores: dict[str, Store] = field(default_factory=dict)
    batch: int = 0

    def __post_init__(self) -> None:
        self.space = new_space(
            *self.groups,
            num_blocks=dict.fromkeys((group.pool for group in self.groups), 60),
            max_tokens=200,
            events=True,
        )
        self.stores = {"host": Store(4), "redis": Store(9)}
        self.layout = EntryLayout(self.groups, [BLOCK_NBYTES] * len(self.groups))
        self.log = TierEventLog(self.layout.run_tokens if self.layout.has_runs else 0)

    def keys_of(self, prompt: TokenIds, keys: RequestKeys) -> list[bytes]:
        """Return the keys of a prompt's runs, and of some of its ends."""
        chain = self.layout.new_chain(keys)
        chain.extend(as_token_array(prompt))
        ends = range(2, chain.num_blocks + 1, 3) if self.layout.has_ends else ()
        runs = chain.runs if self.layout.has_runs else []
        placed = [((number + 1) * self.layout.blocks_per_run, run.key) for number, run in enumerate(runs)]
        return [key for _, key in sorted([*placed, *((place, chain.end_key(place)) for place in ends)])]

    def events(self) -> tuple[CacheEvents | TierEvents, ...]:
        """Return the events since the last call, as they arrive over the wire."""
        changes = changes_of(self.space, self.space.drain_events(), self.log.drain(list(self.stores.items())))
        payload = BatchEncoder(self.groups, "1").batch(0.0, changes)
        return CacheEventReader(self.groups).events(decode_batch(payload, "here", has_tokens=False), "here")

    def publish(self, index: ReplicaIndex | Router) -> None:
        """Let an index apply the events since the last call."""
        index.apply(self.name, "1", self.batch, self.events(), 0.0)
        self.batch += 1

    def loadable(self, prompt: TokenIds, keys: RequestKeys) -> dict[str, int]:
        """What this replica has: its device's hit, and behind it token by token what its stores have."""
        hit = self.space.match(prompt, keys=keys).num_whole_tokens
        chain = self.layout.new_chain(keys)
        chain.extend(as_token_array(prompt))
        size, per_run = self.layout.block_size, self.layout.blocks_per_run
        media = {"CPU": self.stores["host"], "REDIS": self.stores["redis"]}
        owner: dict[int, str] = {}
        if self.layout.has_runs:
            at = hit // self.layout.run_tokens
            while at < len(chain.runs):
                found = next((name for name, store in media.items() if store.contains(chain.runs[at].key)), None)
                if found is None:
                    break
                while at < len(chain.runs) and media[found].contains(chain.runs[at].key):
                    owner.update(dict.fromkeys(range(at * per_run, (at + 1) * per_run), found))
                    at += 1
        if self.layout.has_ends:
            owner = self.cut_at_end(owner, chain, hit // size, media)
        counts: dict[str, int] = {}
        for block in sorted(owner):
            for position in range(max(hit, block * size), min((block + 1) * size, len(prompt) - 1)):
                counts[owner[block]] = counts.get(owner[block], 0) + (position >= hit)
        return {"GPU": hit, **counts}

    def cut_at_end(
        self, owner: dict[int, str], chain: RunChain, num_hit: int, media: dict[str, Store]
    ) -> dict[int, str]:
        """Keep what lies before the last end of which every block in whole runs is there."""
        per_run = self.layout.blocks_per_run
        for end in range(chain.num_blocks, num_hit, -1):
            found = next((name for name, store in media.items() if store.contains(chain.end_key(end))), None)
            whole = end // per_run * per_run if self.layout.has_runs else num_hit
            begin = num_hit // per_run * per_run if self.layout.has_runs else whole
            if found is not None and all(block in owner for block in range(begin, whole)):
                kept = {block: name for block, name in owner.items() if block < whole}
                return kept | dict.fromkeys(range(whole, end), found)
        return {}


def compare(index: ReplicaIndex, replicas: Sequence[Replica]) -> int:
    """Compare all prompts at all replicas; return how many tokens the tiers have."""
    total = 0
    for prompt in PROMPTS:
        for keys in (RequestKeys(), SALTED):
            hits = index.hits_by_medium(index.hash(prompt, keys), ("CPU", "REDIS"))
            for replica in replicas:
                expected = replica.loadable(prompt, keys)
                assert hits[replica.name] == expected, (replica.name, expected)
                total += sum(count for name, count in expected.items() if name != "GPU")
    for replica in replicas:
        entries = {name: count for name, count in index.view(replica.name).num_tier_entries.items() if count}
        assert entries == {each.medium: len(each) for each in replica.log.entries()}
    return total


OPERATIONS: Final = st.lists(
    st.tuples(
        st.sampled_from(["cache", "host", "redis", "withdraw", "reset", "snapshot"]),
        st.integers(0, 2),
        st.integers(0, len(PROMPTS) - 1),
        st.booleans(),
    ),
    max_size=14,
)


@pytest.mark.parametrize("mix", MIXES)
@given(operations=OPERATIONS)
@settings(max_examples=25)
def test_hits_by_medium_are_those_of_the_spaces_and_stores(
    mix: str, operations: list[tuple[str, int, int, bool]]
) -> None:
    groups = MIXES[mix]
    index = ReplicaIndex(groups)
    replicas = [Replica(groups, name) for name in "abc"]
    for replica in replicas:
        index.add_replica(replica.name)
    for operation, number, which, is_salted in operations:
        replica, prompt, keys = replicas[number], PROMPTS[which], SALTED if is_salted else RequestKeys()
        if operation == "cache":
            cache(replica.space, prompt, keys=keys)
        elif operation in replica.stores:
            offered = replica.keys_of(prompt, keys)
            replica.stores[operation].offer(offered[: 2 + which])
        elif operation == "withdraw":
            replica.stores["redis"].core.withdraw(array_of(replica.keys_of(prompt, keys)[1:3]), 0.0)
        elif operation == "reset":
            replica.stores["host"].core.reset(0.0)
        replica.publish(index)
        if operation == "snapshot":
            listed = [replica.space.stored_blocks(pool) for pool in replica.space.config.pool_names]
            index.forget(replica.name)
            index.restore(replica.name, "1", replica.batch, [*listed, *replica.log.entries()])
    compare(index, replicas)


def stored(groups: tuple[GroupSpec, ...], medium: str = "host") -> tuple[Router, Replica]:
    """Two replicas, of which b has a prompt in a tier."""
    router = Router(ReplicaIndex(groups))
    replica = Replica(groups, "b")
    for name in ("a", "b"):
        router.add_replica(name)
        router.index.note_alive(name, "1", 0)
    replica.stores[medium].offer(replica.keys_of(PROMPTS[0], RequestKeys())[:4])
    replica.publish(router)
    return router, replica


@pytest.mark.parametrize("mix", ["full", "window"])
def test_the_comparison_notices_an_index_without_tiers(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router, replica = stored(MIXES[mix])
    assert compare(router.index, [replica]) > 0
    monkeypatch.setattr(TierEntries, "hits", lambda *_: {})
    with pytest.raises(AssertionError):
        compare(router.index, [replica])


def test_the_key_of_an_end_is_that_of_tiers() -> None:
    assert END_WORDS.astype(">u4").tobytes() == END_MASK.to_bytes(32, "big")


def test_tokens_of_tiers_are_credited_by_medium_and_told() -> None:
    router, _ = stored(MIXES["full"])
    choice = router.choose(1, PROMPTS[0], 0.0)
    assert (choice.replica, choice.reason) == ("b", RoutingReason.MOST_CACHED)
    assert choice.chosen.tier_tokens == (("CPU", 64),)
    assert (choice.chosen.credit, choice.chosen.cost) == (48.0, 2 * (150 - 48))
    assert "b: 0 tokens cached, 64 in CPU; 0 tokens queued of 0 waiting" in choice.explain()
    router, _ = stored(MIXES["full"], "redis")
    assert router.choose(1, PROMPTS[0], 0.0).chosen.credit == 0.5 * 64


def test_the_device_is_worth_more_than_a_tier_and_a_slow_tier_nothing() -> None:
    router, _ = stored(MIXES["full"])
    other = Replica(MIXES["full"], "a")
    cache(other.space, PROMPTS[0][:64])
    other.publish(router)
    assert router.choose(1, PROMPTS[0], 0.0).replica == "a"
    router, _ = stored(MIXES["full"], "redis")
    router.weigh("REDIS", 0.0, 0.0)
    assert router.choose(1, PROMPTS[0], 0.0).reason is RoutingReason.NOT_CACHED
    router.weigh("REDIS", 0.9, 0.0)
    assert router.choose(2, PROMPTS[0], 9.0, among=["b"]).chosen.credit == pytest.approx(0.9 * 64)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        router.weigh("REDIS", 1.5, 0.0)
    with pytest.raises(ConfigurationError, match="host_weight must be between 0 and 1, got 2"):
        RoutingRules(host_weight=2)


def test_another_lifetime_and_a_replica_that_is_gone_have_no_entries() -> None:
    router, replica = stored(MIXES["full"])
    prompt = router.index.hash(PROMPTS[0])
    assert router.index.hits_by_medium(prompt)["b"] == {"GPU": 0, "CPU": 64}
    router.index.note_alive("b", "2", 0)
    assert router.index.hits_by_medium(prompt)["b"] == {"GPU": 0}
    router, replica = stored(MIXES["full"])
    router.remove_replica("b")
    router.add_replica("b")
    assert router.index.hits_by_medium(prompt)["b"] == {"GPU": 0}
    del replica


def test_a_record_with_tiers_and_weights_chooses_the_same_again() -> None:
    lines: list[str] = []
    router = Router(ReplicaIndex(MIXES["window"]), note=RecordWriter(lines.append))
    replicas = [Replica(MIXES["window"], name) for name in "ab"]
    told = []
    for replica in replicas:
        router.add_replica(replica.name)
    for number, prompt in enumerate(PROMPTS * 3):
        replica = replicas[number % 2]
        replica.stores["redis" if number % 3 else "host"].offer(replica.keys_of(prompt, RequestKeys()))
        replica.publish(router)
        if number == 7:
            router.weigh("REDIS", 0.125, 0.1 * number)
            blocks = [replica.space.stored_blocks(pool) for pool in replica.space.config.pool_names]
            router.restore("b", "1", replica.batch, [*blocks, *replica.log.entries()], 0.1 * number)
        told.append(router.choose(number, prompt, 10.0 * number).explain())
        router.ended(number)
    assert any("in REDIS" in each for each in told)
    assert {"weight", "events", "snapshot"} <= {json.loads(line)["kind"] for line in lines}
    again = list(replay(lines, MIXES["window"]))
    assert [each.choice.explain() for each in again] == told


def test_two_tiers_of_one_medium_are_one_and_a_lost_log_drops_what_was_announced() -> None:
    log, first, second = TierEventLog(16), Store(8), Store(8)
    names = [bytes([number]) * 32 for number in range(1, 4)]
    first.offer(names[:2])
    second.offer(names[1:])
    both = [("host", first), ("host", second)]
    (events,) = log.drain(both)
    assert (events.medium, sorted(row.tobytes() for row in events.keys)) == ("CPU", names)
    first.core.withdraw(array_of([names[1]]), 0.0)
    assert log.drain(both) == (), "the other one has it"
    (gone,) = log.drain([("host", first)])
    assert sorted(row.tobytes() for row in gone.keys) == names[1:]
    assert [row.tobytes() for row in log.entries()[0].keys] == names[:1]
