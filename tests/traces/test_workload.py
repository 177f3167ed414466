"""The generated conversations: deterministic, in order of time, each turn containing the one before."""

from itertools import islice, pairwise, zip_longest

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces import ConversationWorkload, TokenizedRequest
from pagedkv.planner.traces.workload import LogNormal


def by_session(requests: list[TokenizedRequest]) -> dict[str | None, list[TokenizedRequest]]:
    sessions: dict[str | None, list[TokenizedRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions


def test_the_same_seed_gives_the_same_requests() -> None:
    workload = ConversationWorkload(seed=3, num_sessions=20)
    for left, right in zip_longest(workload.requests(), workload.requests()):
        assert (left.arrival_s, left.session) == (right.arrival_s, right.session)
        assert np.array_equal(left.prompt_token_ids, right.prompt_token_ids)
        assert np.array_equal(left.output_token_ids, right.output_token_ids)


def test_another_seed_gives_other_requests() -> None:
    left, right = (next(ConversationWorkload(seed=seed).requests()) for seed in (0, 1))
    assert not np.array_equal(left.prompt_token_ids, right.prompt_token_ids)


def test_more_sessions_only_add_requests() -> None:
    few = by_session(list(ConversationWorkload(num_sessions=5).requests()))
    more = by_session(list(ConversationWorkload(num_sessions=50).requests()))
    assert set(few) < set(more)
    for session, requests in few.items():
        assert [request.arrival_s for request in requests] == [request.arrival_s for request in more[session]]
        assert np.array_equal(requests[-1].prompt_token_ids, more[session][-1].prompt_token_ids)


def test_requests_come_in_order_of_time_and_sessions_interleave() -> None:
    requests = list(ConversationWorkload(num_sessions=50).requests())
    assert all(left.arrival_s <= right.arrival_s for left, right in pairwise(requests))
    num_changes = sum(left.session != right.session for left, right in pairwise(requests))
    assert num_changes > len(requests) // 2


def test_a_turn_contains_the_prompt_and_the_answer_before_it() -> None:
    for turns in by_session(list(ConversationWorkload(num_sessions=50).requests())).values():
        for before, after in pairwise(turns):
            context = np.concatenate((before.prompt_token_ids, before.output_token_ids))
            assert np.array_equal(after.prompt_token_ids[: len(context)], context)
            assert len(after.prompt_token_ids) > len(context)


def test_sessions_share_the_system_prompts() -> None:
    workload = ConversationWorkload(num_sessions=200, system_prompt_lengths=(40, 30))
    openings = {turns[0].prompt_token_ids[:30].tobytes() for turns in by_session(list(workload.requests())).values()}
    assert len(openings) == 2


def test_lengths_follow_the_documented_distributions() -> None:
    workload = ConversationWorkload(num_sessions=3000, system_prompt_lengths=(10,))
    sessions = by_session(list(workload.requests()))
    assert np.mean([len(turns) for turns in sessions.values()]) == pytest.approx(3.7, rel=0.1)
    first_user_turns = [len(turns[0].prompt_token_ids) - 10 for turns in sessions.values()]
    assert np.median(first_user_turns) == pytest.approx(70, rel=0.1)
    answers = [len(turn.output_token_ids) for turns in sessions.values() for turn in turns]
    assert np.mean(answers) == pytest.approx(330, rel=0.1)


def test_a_session_ends_before_its_context_overflows() -> None:
    workload = ConversationWorkload(num_sessions=300, system_prompt_lengths=(100,), mean_turns=50.0, max_context=2000)
    requests = list(workload.requests())
    assert 1500 < max(len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests) <= 2000


def test_generation_streams() -> None:
    assert len(list(islice(ConversationWorkload(num_sessions=10**9).requests(), 100))) == 100


def test_a_length_is_at_least_one_token() -> None:
    random = np.random.default_rng(0)
    assert {LogNormal(median=0.001, sigma=1.0).draw(random) for _ in range(100)} == {1}


@pytest.mark.parametrize(("seed", "num_sessions"), [(-1, 1), (0, 0), (0, -5)])
def test_bad_parameters_are_refused(seed: int, num_sessions: int) -> None:
    with pytest.raises(ConfigurationError, match="must"):
        ConversationWorkload(seed=seed, num_sessions=num_sessions)
