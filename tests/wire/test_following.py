"""The rules of following, one by one; tests/wire/test_faults.py has them all at once."""

from dataclasses import dataclass, field
from typing import Final

import pytest

from pagedkv import FullAttention
from pagedkv.errors import RecordingError
from pagedkv.routing import ReplicaIndex, Router
from pagedkv.wire import (
    Alive,
    Applied,
    BatchEncoder,
    FollowedMessage,
    Following,
    FollowingRules,
    Message,
    OutgoingRequest,
    Snapshot,
    changes_of,
    follow,
    listed_pools,
)
from tests.space.spaces import cache, new_space, tokens

pytestmark = pytest.mark.interpreted

GROUPS: Final = (FullAttention(4),)
RULES: Final = FollowingRules(patience_s=1.0, snapshot_patience_s=2.0, retry_s=3.0, most_held=5, most_replayed=10)


@dataclass
class Process:
    """What a process publishes."""

    lifetime: str
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.space = new_space(*GROUPS, events=True)
        self.encoder = BatchEncoder(GROUPS, self.lifetime)

    def publish(self, *, is_beat: bool = False) -> Message:
        """Publish the next batch."""
        if not is_beat:
            cache(self.space, tokens(8, first=1000 * len(self.messages)))
        payload = self.encoder.batch(0.0, changes_of(self.space, self.space.drain_events()))
        self.messages.append(Message(len(self.messages), payload))
        return self.messages[-1]

    def snapshot(self) -> list[Message]:
        """Take a snapshot."""
        payloads = self.encoder.snapshot(0.0, listed_pools(self.space))
        return [Message(len(self.messages), payload) for payload in payloads]


def new_following(*, can_request: bool = True) -> Following:
    return Following(GROUPS, rules=RULES, can_request=can_request)


def begun(process: Process) -> Following:
    """Follow a process from its first batch on."""
    following = new_following()
    following.published(process.publish(), 0.0)
    assert numbers(following.take_messages()) == [(Applied, 0)]
    assert following.is_whole
    return following


def answer(following: Following, messages: list[Message], now_s: float) -> OutgoingRequest:
    """Answer the open request."""
    wanted = following.take_request()
    assert wanted is not None
    for message in (*messages, None):
        following.answered(wanted.number, message, now_s)
    return wanted


def numbers(messages: list[FollowedMessage]) -> list[tuple[type, int]]:
    return [(type(each), each.batch if isinstance(each, Applied) else each.next_batch) for each in messages]


def test_what_was_missed_is_requested_and_comes_in_order() -> None:
    process = Process("a")
    following = begun(process)
    sent = [process.publish() for _ in range(4)]
    following.published(sent[0], 1.0)
    following.published(sent[2], 1.0)
    following.published(sent[3], 1.0)
    assert numbers(following.take_messages()) == [(Applied, 1)]
    assert answer(following, sent[1:], 1.1).first == 2
    assert numbers(following.take_messages()) == [(Applied, 2), (Applied, 3), (Applied, 4)]
    assert following.take_request() is None
    assert following.is_whole


def test_what_is_kept_no_longer_degrades_and_a_snapshot_repairs() -> None:
    process = Process("a")
    following = begun(process)
    sent = [process.publish() for _ in range(3)]
    following.published(sent[1], 1.0)
    assert answer(following, sent[1:], 1.1).first == 1
    assert numbers(following.take_messages()) == [(Alive, 2)]
    assert not following.is_whole
    assert answer(following, process.snapshot(), 1.2).first is None
    assert numbers(following.take_messages()) == [(Snapshot, 4)]
    following.published(sent[2], 1.3)
    assert following.take_messages() == [], "the snapshot has it"
    assert following.is_whole


def test_without_answers_batches_are_applied_behind_the_gap() -> None:
    process = Process("a")
    following = begun(process)
    sent = [process.publish() for _ in range(3)]
    following.published(sent[1], 1.0)
    following.advance(1.9)
    assert following.take_messages() == []
    following.advance(2.1)  # the request for batches has failed, and one for a snapshot was made
    assert numbers(following.take_messages()) == [(Alive, 2)]
    following.published(sent[2], 2.2)
    following.advance(4.2)
    assert numbers(following.take_messages()) == [(Applied, 2), (Applied, 3)]
    following.take_request()
    following.advance(5.0)
    assert following.take_request() is None, "it is not time yet"
    following.advance(7.3)
    assert following.take_request() is not None


def test_more_than_may_be_held_is_applied() -> None:
    process = Process("a")
    following = begun(process)
    process.publish()
    for _ in range(RULES.most_held + 1):
        following.published(process.publish(), 1.0)
    assert numbers(following.take_messages()) == [(Alive, 2)]
    for _ in range(RULES.most_held):
        following.published(process.publish(), 1.0)
    assert (Applied, 2) in numbers(following.take_messages())
    assert not following.is_whole


def test_an_incomplete_snapshot_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.wire.encoding.BLOCKS_OF_PART", 2)
    process, following = Process("a"), new_following()
    for _ in range(3):
        process.publish()
    following.advance(0.0)
    answer(following, process.snapshot()[1:], 0.1)
    answer_of_the_next = process.snapshot()
    assert following.take_messages() == []
    following.advance(5.0)
    answer(following, answer_of_the_next, 5.1)
    assert numbers(following.take_messages()) == [(Snapshot, 3)]


def test_an_answer_to_an_earlier_request_is_ignored() -> None:
    process, following = Process("a"), new_following()
    process.publish()
    following.advance(0.0)
    first = following.take_request()
    following.advance(2.1)
    following.advance(5.2)
    second = following.take_request()
    assert first is not None
    assert second is not None
    for message in (*process.snapshot(), None):
        following.answered(first.number, message, 5.3)
    assert following.take_messages() == []


def test_batches_of_an_earlier_lifetime_are_ignored() -> None:
    old, new = Process("old"), Process("new")
    following = begun(old)
    following.published(new.publish(), 1.0)
    following.published(old.publish(), 1.1)
    messages = following.take_messages()
    assert [each.lifetime for each in messages] == ["new"]
    assert following.lifetime == "new"


def test_a_restart_that_was_missed_begins_with_its_first_batches() -> None:
    old, new = Process("old"), Process("new")
    following = begun(old)
    sent = [new.publish() for _ in range(3)]
    following.published(sent[2], 1.0)
    assert answer(following, sent, 1.1).first == 0
    assert numbers(following.take_messages()) == [(Applied, 0), (Applied, 1), (Applied, 2)]


def test_a_long_life_that_was_missed_begins_with_a_snapshot() -> None:
    old, new = Process("old"), Process("new")
    following = begun(old)
    sent = [new.publish(is_beat=True) for _ in range(RULES.most_replayed + 2)]
    following.published(sent[-1], 1.0)
    wanted = following.take_request()
    assert wanted is not None
    assert wanted.first is None


def test_a_router_follows_as_an_index_does() -> None:
    process, router = Process("a"), Router(ReplicaIndex(GROUPS))
    router.add_replica("r")
    following = new_following(can_request=False)
    following.published(process.publish(), 1.0)
    following.published(process.publish(is_beat=True), 1.0)
    following_late = new_following()
    following_late.advance(2.0)
    answer(following_late, process.snapshot(), 2.0)
    for message in (*following.take_messages(), *following_late.take_messages()):
        follow(router, "r", message, 2.0)
        assert router.index.view("r").num_blocks == 2
    assert router.index.view("r").next_batch == 2


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(RecordingError, match="message 3: not a batch"):
        new_following().published(Message(3, b"\xc1"), 0.0)
