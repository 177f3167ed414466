"""Lost batches, restarts and late joiners: an index equals the pool, or says that it does not and since when."""

from random import Random
from typing import Final

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, GroupSpec, SlidingWindow, SpaceConfig
from pagedkv.routing import IndexState
from pagedkv.routing.residency import BITS, HIGH, LOW
from pagedkv.wire import FollowingRules
from tests.wire.memory_transport import MemoryFollower, MemoryPublisher, Network

GROUPS: Final[tuple[GroupSpec, ...]] = (FullAttention(4), SlidingWindow(8, 4))
STEP_S: Final = 0.01
DELAY_S: Final = 0.013
BUFFERS: Final = (2, 40)
"""The shorter one has dropped a lost batch by the time at which it is asked for."""
RULES: Final = FollowingRules(patience_s=0.2, snapshot_patience_s=0.2, retry_s=0.1, most_held=200, most_replayed=20)


def content_of_space(space: BlockSpace) -> tuple[int, ...]:
    """Sum up what is cached: the number of blocks, and their names over one another."""
    stored = space.stored_blocks()
    words = np.ascontiguousarray(stored.digests[:, :16]).view(">u8").astype(np.uint64)
    words[:, 0] ^= stored.groups.astype(np.uint64)
    return len(words), *map(int, np.bitwise_xor.reduce(words, axis=0))


def content_of_index(follower: MemoryFollower) -> tuple[int, ...]:
    """Sum up what an index has in the same way."""
    blocks = follower.index._pools["device"]
    rows, _ = blocks.arrays
    words = rows[rows[:, BITS] != 0][:, [HIGH, LOW]]
    return len(words), *map(int, np.bitwise_xor.reduce(words, axis=0))


class Fault:
    """One replica, whose process is started again now and then, and followers of it."""

    def __init__(self, seed: int, loss: float) -> None:
        self.random = Random(seed)
        self.network = Network(loss, DELAY_S, seed)
        self.followers: list[MemoryFollower] = []
        self.contents: dict[tuple[str, int], tuple[int, ...]] = {}
        self.num_events = self.num_restarts = self.num_exact = self.num_degraded = 0
        self.start()

    def start(self) -> None:
        """Start a process, with nothing cached."""
        config = SpaceConfig(GROUPS, 160, max_sequences=8, max_tokens=80, watermark=0.0, events=True)
        buffer = self.random.choice(BUFFERS)
        self.publisher = MemoryPublisher(BlockSpace(config), f"process {self.num_restarts}", self.network, buffer)
        for each in self.followers:
            each.subscribe(self.publisher)
        self.rows: list[int] = []
        self.note()

    def note(self) -> None:
        """Remember what is cached before the next batch."""
        publisher = self.publisher
        self.contents[publisher.lifetime, publisher.next_batch] = content_of_space(publisher.space)

    def join(self) -> None:
        """Let another follower begin."""
        follower = MemoryFollower(GROUPS, RULES)
        follower.subscribe(self.publisher)
        self.followers.append(follower)

    def step(self) -> None:
        """Serve a prompt of one of several families, and let the messages go their way."""
        space = self.publisher.space
        while len(self.rows) >= 4:
            space.free(self.rows.pop(0))
        first = 1000 * self.random.randrange(12)
        prompt = np.arange(first, first + self.random.randrange(5, 60), dtype=np.int32)
        prompt[self.random.randrange(len(prompt)) :] += self.random.randrange(3) * 100_000
        answer = space.allocate(prompt)
        self.rows += [answer.row] if isinstance(answer, Allocation) else []
        space.acknowledge(space.plan_step().step_id)
        self.num_events += self.publisher.publish(is_beat=self.random.random() < 0.1)
        self.pass_time()

    def run_steps(self, num_steps: int) -> None:
        """Run steps."""
        for _ in range(num_steps):
            self.step()

    def pass_time(self) -> None:
        """Let one step's time pass."""
        self.note()
        self.network.advance(self.network.now_s + STEP_S)
        for each in self.followers:
            each.advance()
            self.compare(each)

    def compare(self, follower: MemoryFollower) -> None:
        """An index that says so has what the pool had before the batch that it awaits."""
        index = follower.index
        if index.state("a") is IndexState.EXACT:
            self.num_exact += 1
            view = index.view("a")
            assert content_of_index(follower) == self.contents.get((view.lifetime, view.next_batch))
        elif index.state("a") is IndexState.DEGRADED:
            self.num_degraded += 1
            assert 0 < index.view("a").since_s <= self.network.now_s

    def settle(self) -> None:
        """Lose nothing any more, until every follower had the time to ask for a snapshot."""
        self.network.loss = 0.0
        for _ in range(100):
            self.num_events += self.publisher.publish(is_beat=True)
            self.pass_time()
        self.network.advance(self.network.now_s + DELAY_S)
        for each in self.followers:
            view = each.index.view("a")
            assert view.state is IndexState.EXACT
            assert (view.lifetime, view.next_batch) == (self.publisher.lifetime, self.publisher.next_batch)
            assert content_of_index(each) == content_of_space(self.publisher.space)


def run(num_events: int, seed: int, steps_of_life: int) -> Fault:
    """Run until there were so many events; a process lives for so many steps, and a follower joins twice in a life."""
    fault = Fault(seed, loss=0.01)
    fault.join()
    step = 0
    while fault.num_events < num_events:
        step += 1
        fault.step()
        if step % steps_of_life == 0:
            fault.num_restarts += 1
            fault.start()
        if step % (steps_of_life // 2) == 0:
            fault.join()
            fault.followers = fault.followers[-4:]
        if step % 1000 == 0:  # what no index can be at any more
            fault.contents = dict(list(fault.contents.items())[-1000:])
    fault.settle()
    return fault


def test_an_index_is_exact_or_says_that_it_is_not() -> None:
    fault = run(10_000, seed=3, steps_of_life=60)
    assert fault.network.num_lost > 10
    assert fault.num_restarts >= 5
    asked = [each.num_requests for each in fault.followers]
    assert sum(each["batches"] for each in asked) > 0
    assert sum(each["snapshot"] for each in asked) >= len(asked)
    assert fault.num_exact > 10 * fault.num_degraded > 0


@pytest.mark.long
def test_a_million_events() -> None:
    fault = run(1_000_000, seed=4, steps_of_life=3000)
    assert fault.network.num_lost > 1500
    assert fault.num_restarts > 10
    assert fault.num_exact > 10 * fault.num_degraded > 0


def test_an_index_that_hides_gaps_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control."""
    fault = Fault(5, loss=0.2)
    fault.join()
    follower = fault.followers[0]
    monkeypatch.setattr(follower.following, "_can_request", False)
    monkeypatch.setattr(follower.index, "_set_state", lambda *_: None)
    follower.index._replicas["a"].state = IndexState.EXACT
    with pytest.raises(AssertionError):
        fault.run_steps(100)


def test_a_follower_that_knows_no_lifetimes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: numbers begin at 0 again, and look like old ones."""
    fault = Fault(6, loss=0.0)
    fault.join()
    following = fault.followers[0].following
    decoded = following._decoded
    monkeypatch.setattr(following, "_decoded", lambda message: (decoded(message)[0], "process 0"))
    fault.run_steps(150)
    fault.num_restarts += 1
    fault.start()
    with pytest.raises(AssertionError):
        fault.settle()
