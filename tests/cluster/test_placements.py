"""Where a request goes next that a replica did not take, and which replicas are silent: a front's placements alone."""

import itertools
from collections.abc import Mapping
from typing import Final

import numpy as np
import pytest

from pagedkv.cluster.messages import ReplicaFacts, RoutedRequest
from pagedkv.cluster.placements import Placements
from pagedkv.engine import Intent, SamplingParams
from pagedkv.routing import Choice, RoutingReason
from pagedkv.wire import Alive
from tests.cluster.test_routes_page import facts_of

NAMES: Final = ("a", "b", "c")
FACTS: Final[Mapping[str, ReplicaFacts]] = {name: facts_of(8081 + place) for place, name in enumerate(NAMES)}


class Front:
    """Placements of three replicas, each of which was heard at the beginning, with a clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.placements = Placements(clock=lambda: self.now_s)
        self.placements.set_replicas(FACTS)
        self.hear(*NAMES)
        for name in NAMES:
            self.placements.take(name, Alive("first life", 0))

    def hear(self, *names: str) -> None:
        """Note that messages of these replicas arrive now."""
        for name in names:
            self.placements.note_heard(name, 0.0)

    def place(self, request: RoutedRequest, names: tuple[str, ...] = NAMES) -> Choice:
        """Place a request, as Serve does each time that it could not send it."""
        choice = self.placements.place(request, names)
        assert choice is not None
        self.placements.check()
        return choice


def new_request(number: int = 1, first: int = 0) -> RoutedRequest:
    prompt = np.arange(first, first + 400, dtype=np.int32)
    return RoutedRequest(number, prompt, SamplingParams(max_tokens=50), Intent())


@pytest.fixture
def front() -> Front:
    return Front()


def test_a_request_that_was_not_taken_is_placed_on_each_other_replica_before_one_is_tried_again(front: Front) -> None:
    request = new_request()
    choices = [front.place(request) for _ in range(7)]
    tried = [choice.replica for choice in choices]
    assert sorted(tried[:3]) == sorted(NAMES)
    assert all(one != other for one, other in itertools.pairwise(tried)), "the latest one is passed over"
    assert [len(choice.candidates) for choice in choices[:3]] == [3, 2, 1]
    assert front.placements.num_outstanding == 1


def test_reasons_of_a_request_that_is_placed_again_are_true(front: Front) -> None:
    request = new_request()
    first, second, third = (front.place(request) for _ in range(3))
    assert first.reason is second.reason is RoutingReason.NOT_CACHED, "its own promise is no cached prompt"
    assert not any(each.num_hit_tokens for choice in (first, second, third) for each in choice.candidates)
    assert third.reason is RoutingReason.ONLY_LEFT
    assert third.passed_over == tuple((name, "it did not take the request") for name in NAMES if name != third.replica)
    assert f"{first.replica}: passed over, it did not take the request" in third.explain()
    assert front.placements.latest()[0].choice is third


def test_one_replica_alone_is_tried_again(front: Front) -> None:
    request = new_request()
    assert [front.place(request, ("b",)).replica for _ in range(3)] == ["b"] * 3


def test_a_further_attempt_passes_over_the_replica_that_was_lost(front: Front) -> None:
    request = new_request()
    lost = front.place(request).replica
    front.placements.ended(request.number)
    request.attempt = 2
    assert front.place(request).replica != lost


def test_a_replica_is_not_chosen_after_three_missed_heartbeats_and_is_again_when_it_is_heard(front: Front) -> None:
    warm = front.place(new_request()).replica
    others = tuple(name for name in NAMES if name != warm)
    front.now_s = 3.0
    assert not front.placements.should_leave(warm)
    front.hear(*others)
    front.now_s = 3.1
    assert front.placements.should_leave(warm)
    choice = front.place(new_request(2))
    assert choice.replica in others
    assert choice.passed_over == ((warm, "no message for 3.1 s"),)
    assert [each.name for each in front.placements.replicas() if each.is_silent] == [warm]
    front.hear(warm)
    assert not front.placements.should_leave(warm)
    assert len(front.place(new_request(3)).candidates) == 3


def test_where_all_are_silent_none_is_passed_over(front: Front) -> None:
    front.now_s = 60.0
    request = new_request()
    assert {front.place(request).replica for _ in range(3)} == set(NAMES)
    assert not any(front.placements.should_leave(name) for name in NAMES)


def test_a_replica_whose_events_never_came_is_chosen(front: Front) -> None:
    """Its events may be cut off from this front while its requests are not."""
    front.placements.set_replicas({**FACTS, "d": facts_of(8090)})
    front.now_s = 60.0
    front.hear(*NAMES)
    assert len(front.place(new_request(), (*NAMES, "d")).candidates) == 4


def test_a_silent_replica_is_not_tried_before_all_others_twice(front: Front) -> None:
    front.now_s = 10.0
    front.hear("b", "c")
    request = new_request()
    assert {front.place(request).replica for _ in range(5)} == {"b", "c"}
