"""What intent brings: without any it is what ``pagedkv curve`` counts; known returns help, and edits make room."""

import numpy as np
import pytest

from benchmarks.intent.serving import INTENTS, Intent, Session, serve as serve_whole
from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.planner.capacity.pool_hits import pool_hits
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.request import Request

pytestmark = pytest.mark.plain_only

LRU, ADAPTIVE, *_ = INTENTS
UNTIL_NEXT = Intent("leases until next", lease_s=-1.0)


def serve(references: BlockReferences, sessions: list[Session], capacity: int, intent: Intent) -> int:
    return serve_whole(references, sessions, capacity, intent).num_hits


def references_of(prompts: list[list[int]], num_outputs: int = 1) -> BlockReferences:
    """Collect prompts, given as ids of blocks of one token."""
    collector = ReferenceCollector("trace")
    for number, ids in enumerate(prompts):
        collector.add(Request(float(number), len(ids), num_outputs, np.array(ids, np.int64), 1))
    return collector.references()


def sessions_of(owners: list[int]) -> list[Session]:
    """Place requests, one a second, in the sessions that own them."""
    sessions = []
    for number, owner in enumerate(owners):
        before = [other for other in range(number) if owners[other] == owner]
        later = [other for other in range(number + 1, len(owners)) if owners[other] == owner]
        last, following = (before or [-1])[-1], float((later or [-1])[0])
        sessions.append(Session(float(number), last, following, 1 + owner))
    return sessions


def in_turn(num_sessions: int, num_turns: int, length: int) -> tuple[BlockReferences, list[Session]]:
    """Sessions that ask for the same prompt again, in turn."""
    prompts = [list(range(100 * owner, 100 * owner + length)) for owner in range(num_sessions)] * num_turns
    return references_of(prompts), sessions_of(list(range(num_sessions)) * num_turns)


@pytest.mark.parametrize("intent", [LRU, ADAPTIVE])
@pytest.mark.parametrize("capacity", [5, 12, 30])
def test_without_intent_hits_are_those_of_the_curve(intent: Intent, capacity: int) -> None:
    references, sessions = in_turn(num_sessions=4, num_turns=3, length=6)
    assert serve(references, sessions, capacity, intent) == pool_hits(
        references, capacity, policy_named(intent.eviction)
    )


def test_known_returns_serve_some_sessions_where_lru_serves_none() -> None:
    references, sessions = in_turn(num_sessions=4, num_turns=5, length=6)
    assert serve(references, sessions, 18, LRU) == 0
    assert serve(references, sessions, 18, UNTIL_NEXT) > 0


def test_what_an_edit_has_left_goes_first() -> None:
    """The edited prompt's old end was used after the other session's prompt, and LRU evicts that first."""
    first, edited = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 15, 16]
    other, new = [20, 21, 22, 23], [30, 31]
    references = references_of([other, first, edited, new, other])
    sessions = sessions_of([0, 1, 1, 2, 0])
    without = serve(references, sessions, 12, LRU)
    assert serve(references, sessions, 12, Intent("supersession", supersedes=True)) > without


def test_another_agent_of_a_session_replaces_nothing() -> None:
    references = references_of([[1, 2, 3, 4], [11, 12, 13], [1, 2, 3, 4], [11, 12, 13]])
    sessions = sessions_of([0, 0, 0, 0])
    intent = Intent("supersession", supersedes=True)
    assert serve(references, sessions, 7, intent) == serve(references, sessions, 7, LRU) == 7


def test_answers_that_never_come_back_take_room_unless_they_go_first() -> None:
    prompts = [[1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]] * 4
    references, sessions = references_of(prompts, num_outputs=4), sessions_of([0, 1, 2] * 4)
    hits = {answers: serve(references, sessions, 16, Intent("", answers=answers)) for answers in ("", "kept", "first")}
    assert hits == {"": 36, "kept": 0, "first": 36}


def test_tails_go_first_and_what_each_request_missed_is_told() -> None:
    references, sessions = in_turn(num_sessions=3, num_turns=3, length=6)
    served = serve_whole(references, sessions, 14, Intent("t-lru", "tlru", tail_tokens=2))
    assert served.missed.tolist()[:2] == [6, 6]
    assert served.num_hits == references.num_block_refs - served.missed.sum()
    assert served.missed[3:].tolist() == [2] * 6
    assert serve_whole(references, sessions, 14, LRU).missed[3:].tolist() == [4] * 6


def test_a_cap_keeps_a_session_that_never_hits_from_evicting_the_others() -> None:
    """Without the cap each new prompt of session 0 takes the whole pool, and nobody hits."""
    new = [[100 * turn + place for place in range(10)] for turn in range(1, 5)]
    small = [[owner + 10_000 + place for place in range(2)] for owner in (0, 10)]
    references = references_of([prompt for turn in new for prompt in (turn, *small)])
    sessions = sessions_of([0, 1, 2] * 4)
    assert serve(references, sessions, 10, LRU) == 0
    assert serve(references, sessions, 10, Intent("", cap=0.6)) == 3 * 4


def test_a_cap_that_a_prompt_does_not_fit_costs_what_is_above_it() -> None:
    references, sessions = in_turn(num_sessions=1, num_turns=3, length=6)
    assert serve(references, sessions, 8, LRU) == 12
    assert serve(references, sessions, 8, Intent("", cap=0.5)) == 8


def test_a_cap_counts_what_a_session_hits_of_another() -> None:
    """Session 1 hits what session 0 has computed: that is charged to it, so its own first prompt gives way."""
    references = references_of([[1, 2, 3], [11, 12, 13], [1, 2, 3], [11, 12, 13]])
    sessions = sessions_of([0, 1, 1, 1])
    assert serve(references, sessions, 12, LRU) == 6
    served = serve_whole(references, sessions, 12, Intent("", cap=0.25))
    assert served.missed.tolist() == [3, 3, 0, 3]
