"""The index against the block spaces whose events it reads: equal hits, or it says that it is not exact."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import (
    Allocation,
    BlockSpace,
    CacheEvents,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    SlidingWindow,
    SpaceConfig,
)
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import RecurrentState, TokenIds
from pagedkv.errors import ConfigurationError
from pagedkv.routing import IndexState, ReplicaIndex, residency
from tests.space.spaces import new_space, run_step, tokens

pytestmark = pytest.mark.interpreted

MIXES: Final[dict[str, tuple[GroupSpec, ...]]] = {
    "full": (FullAttention(4),),
    "full and window": (FullAttention(4), SlidingWindow(6, 4)),
    "window with sinks": (SlidingWindow(6, 4, num_sink_tokens=5),),
    "chunks": (ChunkedLocal(8, 4),),
    "full and chunks": (FullAttention(4), ChunkedLocal(8, 4)),
    "two sizes": (FullAttention(4), SlidingWindow(6, 2, pool="small")),
    "full and state": (FullAttention(4), RecurrentState(8, pool="state")),
    "not cached": (FullAttention(4), FullAttention(4, prefix_caching=False)),
}
PROMPTS: Final = [tokens(num, first=first) for first in (0, 100, 200) for num in (9, 17, 30)]
PROMPTS.append(np.concatenate([tokens(12), tokens(10, first=300)]))


@dataclass
class Served:
    """A replica: its space, its lifetime, and batches on their way."""

    name: str
    groups: tuple[GroupSpec, ...]
    number: int = 0
    next_batch: int = 0
    rows: list[int] = field(default_factory=list)
    under_way: deque[tuple[str, int, tuple[CacheEvents, ...]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.restart()

    @property
    def lifetime(self) -> str:
        """Of its process."""
        return f"{self.name}-{self.number}"

    def restart(self) -> None:
        """Begin another lifetime, with nothing cached."""
        pools = dict.fromkeys((group.pool for group in self.groups), 24)
        self.space: BlockSpace = new_space(
            *self.groups, num_blocks=pools if len(pools) > 1 else 24, max_sequences=4, max_tokens=60, events=True
        )
        self.rows, self.next_batch, self.number = [], 0, self.number + 1

    def serve(self, prompt: TokenIds) -> None:
        """Allocate, compute, and free what was there before."""
        while len(self.rows) >= 2:
            self.space.free(self.rows.pop(0))
        answer = self.space.allocate(prompt)
        if isinstance(answer, Allocation):
            self.rows.append(answer.row)
        run_step(self.space)
        self.send()

    def send(self) -> None:
        """Send the events since the last batch, if there are any."""
        events = self.space.drain_events()
        if any(map(len, events)):
            self.under_way.append((self.lifetime, self.next_batch, events))
            self.next_batch += 1

    def snapshot(self, index: ReplicaIndex) -> None:
        """Restore the index from what is stored."""
        self.send()
        blocks = [self.space.stored_blocks(pool) for pool in self.space.config.pool_names]
        index.restore(self.name, self.lifetime, self.next_batch, blocks)

    def expected(self, prompt: TokenIds) -> int:
        """What the space itself would hit."""
        return self.space.match(prompt).num_whole_tokens


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["serve", "serve", "serve", "deliver", "deliver", "lose", "restart", "snapshot", "reset", "beat"]
        ),
        st.integers(0, 1),
        st.integers(0, len(PROMPTS) - 1),
    ),
    max_size=50,
)


def compare(index: ReplicaIndex, replicas: Sequence[Served], *, is_state: bool) -> None:
    """Where the index is exact and has all batches, it hits what the space hits."""
    for prompt in PROMPTS:
        hits = index.hits(index.hash(prompt))
        for replica in replicas:
            view = index.view(replica.name)
            is_current = (view.lifetime, view.next_batch) == (replica.lifetime, replica.next_batch)
            if view.state is IndexState.EXACT and is_current:
                expected = replica.expected(prompt)
                if is_state:  # a state that is kept inside an interval continues a prompt that the index does not count
                    assert hits[replica.name] <= expected
                else:
                    assert hits[replica.name] == expected


def act(index: ReplicaIndex, replica: Served, operation: str, prompt: TokenIds) -> None:
    """Let something happen to a replica, or on the way from it."""
    if operation == "serve":
        replica.serve(prompt)
    elif operation == "restart":
        replica.restart()
    elif operation == "snapshot":
        replica.snapshot(index)
    elif operation == "beat":
        index.note_alive(replica.name, replica.lifetime, replica.next_batch)
        replica.under_way.clear()  # they come too late
    elif operation == "reset":
        replica.space.reset_prefix_cache()
        replica.send()
    elif replica.under_way:
        batch = replica.under_way.popleft()
        if operation == "deliver":
            index.apply(replica.name, *batch)


def run(mix: str, operations: Sequence[tuple[str, int, int]]) -> None:
    """Compare an index with two replicas after each operation."""
    index = ReplicaIndex(MIXES[mix])
    replicas = [Served("a", MIXES[mix]), Served("b", MIXES[mix])]
    for replica in replicas:
        index.add_replica(replica.name)
    for operation, number, prompt in operations:
        act(index, replicas[number], operation, PROMPTS[prompt])
        compare(index, replicas, is_state="state" in mix)
    for replica in replicas:
        replica.snapshot(index)
        assert index.state(replica.name) is IndexState.EXACT
    compare(index, replicas, is_state="state" in mix)


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=12)
@given(operations=OPERATIONS)
def test_hits_are_those_of_the_spaces_or_the_index_is_not_exact(
    mix: str, operations: list[tuple[str, int, int]]
) -> None:
    run(mix, operations)


@pytest.mark.parametrize("mix", ["full and window", "window with sinks", "full and chunks"])
def test_an_index_that_takes_windows_for_whole_prefixes_is_noticed(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    rng = np.random.default_rng(4)
    kinds = ["serve", "serve", "deliver", "deliver"]
    operations = [(kinds[rng.integers(4)], int(rng.integers(2)), int(rng.integers(len(PROMPTS)))) for _ in range(150)]
    run(mix, operations)
    monkeypatch.setattr(residency, "keeps_whole_prefix", lambda _: True)
    with pytest.raises(AssertionError):
        run(mix, operations)


def test_a_gap_degrades_until_a_snapshot_and_says_since_when() -> None:
    index, replica = ReplicaIndex(MIXES["full"]), Served("a", MIXES["full"])
    index.add_replica("a", 1.0)
    assert index.view("a").state is IndexState.EMPTY
    for prompt in PROMPTS[:3]:
        replica.serve(prompt)
    first, _, third = replica.under_way
    assert index.apply("a", *first, 2.0)
    assert not index.apply("a", *third, 3.0)
    view = index.view("a")
    assert (view.state, view.since_s, view.num_lost_batches, view.next_batch) == (IndexState.DEGRADED, 3.0, 1, 3)
    replica.snapshot(index)
    assert index.view("a").state is IndexState.EXACT
    assert index.hits(index.hash(PROMPTS[1])) == {"a": replica.expected(PROMPTS[1])}


def test_a_log_of_events_that_was_too_short_degrades() -> None:
    space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=40, max_tokens=100, events=True, max_events=4))
    index = ReplicaIndex((FullAttention(4),))
    index.add_replica("a")
    space.allocate(tokens(40))
    assert not index.apply("a", "1", 0, space.drain_events())


def test_another_lifetime_has_nothing() -> None:
    index, replica = ReplicaIndex(MIXES["full"]), Served("a", MIXES["full"])
    index.add_replica("a")
    replica.serve(PROMPTS[2])
    index.apply("a", *replica.under_way.popleft())
    assert index.hits(index.hash(PROMPTS[2]))["a"] > 0
    index.note_alive("a", "another", 0)
    assert index.hits(index.hash(PROMPTS[2])) == {"a": 0}
    assert index.view("a").num_blocks == 0
    assert index.state("a") is IndexState.EXACT, "nothing was sent in this lifetime, so nothing is there"


def test_another_salt_is_another_prompt() -> None:
    index, space = ReplicaIndex((FullAttention(4),)), new_space(FullAttention(4), events=True)
    index.add_replica("a")
    space.allocate(tokens(20), keys=RequestKeys(salt=b"ours"))
    index.apply("a", "1", 0, space.drain_events())
    assert index.hits(index.hash(tokens(20), RequestKeys(salt=b"ours"))) == {"a": 16}
    assert index.hits(index.hash(tokens(20), RequestKeys(salt=b"theirs"))) == {"a": 0}
    assert index.hits(index.hash(tokens(20))) == {"a": 0}


def test_replicas_come_and_go() -> None:
    index, replica = ReplicaIndex(MIXES["full"]), Served("a", MIXES["full"])
    index.add_replica("a")
    replica.serve(PROMPTS[2])
    index.apply("a", *replica.under_way.popleft())
    index.remove_replica("a")
    assert index.names == ()
    index.add_replica("b")  # takes the number that is vacant, and none of its blocks
    assert index.hits(index.hash(PROMPTS[2])) == {"b": 0}
    with pytest.raises(ConfigurationError, match="in the index already"):
        index.add_replica("b")
    with pytest.raises(ConfigurationError, match=r"no replica 'a'.*\['b'\]"):
        index.forget("a")
    for number in range(63):
        index.add_replica(f"more{number}")
    with pytest.raises(ConfigurationError, match="at most 64"):
        index.add_replica("one too many")
    with pytest.raises(ConfigurationError, match="no pool"):
        index.apply("b", "1", 0, [_of_pool("other")])


def _of_pool(name: str) -> CacheEvents:
    none, digests = np.zeros(0, np.int32), np.zeros((0, 32), np.uint8)
    return CacheEvents(name, none, none, none, digests, digests)
