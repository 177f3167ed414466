"""An engine that names no lifetime: gaps, restarts and silence, as far as they can be known."""

from random import Random
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from pagedkv import FullAttention
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.wire import FollowingRules, Message, UnnamedFollowing, follow
from tests.wire.test_learning import removed, stored

pytestmark = pytest.mark.interpreted

RULES: Final = FollowingRules(patience_s=1.0, retry_s=3.0, most_held=50)
KEPT: Final = 30
ROOM: Final = 2


class Process:
    """A cache of ``capacity`` chains of two blocks, the oldest of which gives way; and what it has published."""

    def __init__(self, began_s: float, capacity: int = 8) -> None:
        self.began_s = began_s
        self.capacity = capacity
        self.chains: list[int] = []
        self.messages: list[Message] = []

    def publish(self, *events: dict[str, Any]) -> Message:
        """Publish a batch."""
        number = len(self.messages)
        payload = msgspec.msgpack.encode([self.began_s + number, events, 0])
        self.messages.append(Message(number, payload))
        return self.messages[-1]

    def serve(self, chain: int) -> Message:
        """Store a chain, and remove what gives way."""
        events = []
        if chain not in self.chains:
            events.append(stored([2 * chain, 2 * chain + 1], None, tokens_of(chain)[:4]))
            self.chains.append(chain)
            if len(self.chains) > self.capacity:
                gone = self.chains.pop(0)
                events.append(removed([2 * gone + 1, 2 * gone]))
        return self.publish(*events)

    def answer(self, following: UnnamedFollowing, now_s: float) -> bool:
        """Answer an open request from what is kept."""
        wanted = following.take_request()
        if wanted is None:
            return False
        assert wanted.first is not None
        for message in [each for each in self.messages[-KEPT:] if each.number >= wanted.first]:
            following.answered(wanted.number, message, now_s)
        following.answered(wanted.number, None, now_s)
        return True


def tokens_of(chain: int) -> list[int]:
    return [chain, 1, 2, 3, 4]


class Followed:
    """A following, and the index that it feeds."""

    def __init__(self, *, can_request: bool = True) -> None:
        self.following = UnnamedFollowing(can_request=can_request, rules=RULES)
        self.index = ReplicaIndex((FullAttention(ROOM),))
        self.index.add_replica("a")

    def take(self) -> None:
        """Apply what was followed so far."""
        for message in self.following.take_messages():
            follow(self.index, "a", message, 0.0)

    def chains(self, num: int) -> list[int]:
        """Give the chains that are there, by the index."""
        self.take()
        hits = [self.index.hits(self.index.hash(np.array(tokens_of(each), np.int32)))["a"] for each in range(num)]
        return [each for each in range(num) if hits[each] == 4]


def begun(process: Process) -> Followed:
    followed = Followed()
    followed.following.advance(0.0)
    assert process.answer(followed.following, 0.0)
    return followed


def test_a_follower_that_comes_late_hears_of_what_was_and_is_never_exact() -> None:
    process = Process(100.0)
    for chain in range(3):
        process.serve(chain)
    followed = begun(process)
    assert followed.chains(5) == [0, 1, 2]
    assert followed.index.state("a") is IndexState.DEGRADED
    assert followed.index.view("a").num_lost_batches == 0


def test_a_gap_is_filled_behind_the_proof_that_it_is_the_same_process() -> None:
    process = Process(100.0)
    process.serve(0)
    followed = begun(process)
    process.serve(1)
    followed.following.published(process.serve(2), 1.0)
    assert followed.chains(5) == [0], "held"
    assert process.answer(followed.following, 1.0)
    assert followed.chains(5) == [0, 1, 2]
    assert followed.index.view("a").num_lost_batches == 0


def test_without_an_answer_the_gap_is_counted_and_what_follows_is_placed() -> None:
    process = Process(100.0)
    process.serve(0)
    followed = begun(process)
    process.serve(1)
    followed.following.published(process.serve(2), 1.0)
    followed.following.advance(2.1)
    assert followed.chains(5) == [0, 2]
    assert followed.index.view("a").num_lost_batches == 1


@pytest.mark.parametrize("can_request", [False, True])
def test_numbers_that_go_back_are_another_process(*, can_request: bool) -> None:
    first, second = Process(100.0), Process(200.0)
    followed = Followed(can_request=can_request)
    for message in (first.serve(0), first.serve(1)):
        followed.following.published(message, 0.0)
        first.answer(followed.following, 0.0)
    assert followed.chains(5) == [0, 1]
    followed.following.published(second.serve(3), 1.0)
    second.answer(followed.following, 1.0)
    assert followed.chains(5) == [3]
    assert followed.following.num_restarts == 1


@pytest.mark.parametrize("num_served", [0, 1, 2, 7])
def test_another_process_is_noticed_by_its_silence_or_by_what_it_sends_again(num_served: int) -> None:
    """However many batches it has sent meanwhile, and although none of them was received."""
    first, second = Process(100.0), Process(200.0)
    first.serve(0)
    first.serve(1)
    followed = begun(first)
    assert followed.chains(9) == [0, 1]
    for chain in range(num_served):
        second.serve(chain + 2)
    followed.following.advance(2.5)
    while second.answer(followed.following, 2.5):
        pass
    assert followed.chains(12) == list(range(2, num_served + 2))
    assert followed.following.num_restarts == 1


def test_the_last_batch_is_heard_of_though_it_was_lost() -> None:
    process = Process(100.0)
    process.serve(0)
    followed = begun(process)
    process.serve(1)
    assert followed.chains(5) == [0]
    followed.following.advance(2.5)
    assert process.answer(followed.following, 2.5)
    assert followed.chains(5) == [0, 1]


def test_a_clear_empties_whatever_was_lost_before() -> None:
    process = Process(100.0)
    followed = Followed(can_request=False)
    followed.following.published(process.serve(0), 0.0)
    process.serve(1)
    followed.following.published(process.publish({"type": "AllBlocksCleared"}), 0.0)
    assert followed.chains(5) == []


def test_a_process_that_is_known_to_be_gone_is_forgotten_before_the_next_one_speaks() -> None:
    process = Process(100.0)
    process.serve(0)
    followed = begun(process)
    followed.following.begin_anew()
    assert followed.chains(5) == []
    assert followed.index.state("a") is IndexState.EMPTY
    followed.following.advance(0.1)
    assert process.answer(followed.following, 0.1), "it was not gone"
    assert followed.chains(5) == [0]


def test_events_of_a_kind_that_is_not_understood_are_named() -> None:
    process = Process(100.0)
    followed = Followed(can_request=False)
    followed.following.published(process.publish({"type": "BlockMoved", "block_hashes": [1]}), 0.0)
    assert followed.following.unknown_kinds == {"BlockMoved": 1}


@pytest.mark.parametrize("seed", range(6))
def test_losses_and_restarts_end_in_what_the_engine_has(seed: int) -> None:
    """A third of all messages is lost; now and then another process begins. What is kept is asked for."""
    draw, now_s = Random(seed), 0.0
    process, followed = Process(100.0), Followed()
    for step in range(400):
        now_s += 0.1
        if draw.random() < 0.01:
            process = Process(100.0 + 1000 * step)
        message = process.serve(draw.randrange(12))
        if draw.random() < 2 / 3:
            followed.following.published(message, now_s)
        followed.following.advance(now_s)
        if draw.random() < 0.8:
            process.answer(followed.following, now_s)
    for _ in range(4):
        now_s += 5
        followed.following.advance(now_s)
        while process.answer(followed.following, now_s):
            pass
    assert followed.chains(12) == sorted(process.chains)
