"""The workloads are those that the figures of others were measured on."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.windows.endless import endless_hits
from benchmarks.windows.setting import steps
from benchmarks.windows.workloads import WORKLOADS, Request, conversations, questions


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_draws_the_same_requests_again_and_another_seed_others(name: str) -> None:
    first, again, other = (list(WORKLOADS[name](seed)) for seed in (3, 3, 4))
    assert len(first) == 160
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].prompt, other[0].prompt)
    assert {len(request.answer) for request in first} == {60}


def test_a_turn_goes_on_where_the_last_one_of_its_session_ended_or_begins_anew() -> None:
    said: list[bytes] = []
    num_first = 0
    for request in conversations(0):
        before = request.prompt[:-250].tobytes()
        if before in said:
            said.remove(before)
        else:
            num_first += 1
            assert len(request.prompt) == 650
        assert len(request.prompt) <= 5_000 + 250
        said.append(np.concatenate([request.prompt, request.answer]).tobytes())
    assert 20 <= num_first <= 30  # 24 sessions, of which the liveliest begin anew


def test_questions_share_one_of_eight_prompts_and_nothing_else() -> None:
    requests = list(questions(0))
    assert {len(request.prompt) for request in requests} == {2_290}
    assert len({request.prompt[:1_990].tobytes() for request in requests}) == 8
    assert len({request.prompt[1_990:].tobytes() for request in requests}) == 160


def test_an_endless_pool_hits_all_whole_blocks_but_the_last_token() -> None:
    prompt, answer = np.arange(64, dtype=np.int32), np.arange(17, dtype=np.int32)
    longer = np.concatenate([prompt, answer, prompt])
    requests = [Request(prompt, answer), Request(prompt, answer), Request(longer, answer)]
    assert endless_hits(requests) == [0, 48, 80]


@pytest.mark.parametrize("max_decoded", [1, 16])
def test_steps_cover_a_request_in_chunks_and_end_answers_at_boundaries(max_decoded: int) -> None:
    request = Request(np.zeros(1_100, np.int32), np.zeros(60, np.int32))
    stops = list(steps(request, 32, max_decoded=max_decoded))
    assert stops[:3] == [544, 1_056, 1_100]
    assert stops[-1] == 1_159
    assert all(0 < stop - start <= max_decoded for start, stop in pairwise(stops[2:]))
    assert all(stop % max_decoded == 0 for stop in stops[3:-1])
