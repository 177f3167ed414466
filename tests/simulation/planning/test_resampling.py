"""Resampled arrivals: whole spans of the trace, each with all turns of its sessions, and copies that hit none."""

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.closed_loop import MOST_HELD_NBYTES
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.planning import PlanPoint, run_point
from pagedkv.simulation.planning.resampling import NUM_SPANS, resampled

BLOCK = 4
ROOT = 10_000
POINT = PlanPoint(ServingConfig(num_blocks=4000, block_size=BLOCK), CostModel(fixed_s=0.01))


def sessions(num: int, turns: int = 3, gap_s: float = 5.0) -> list[Request]:
    """Make sessions that begin ten seconds apart, share a first block, and grow by a block a turn."""
    requests = []
    for number in range(num):
        own = np.arange(turns) + 100 * number
        for turn in range(turns):
            ids = np.concatenate([[ROOT], own[: turn + 1]]).astype(np.int64)
            arrival_s = 10.0 * number + gap_s * turn
            requests.append(Request(arrival_s, BLOCK * len(ids) + 1, 2, ids, BLOCK, session=str(number)))
    return sorted(requests, key=lambda each: each.arrival_s)


@given(num=st.integers(1, 60), turns=st.integers(1, 4), seed=st.integers(0, 1000))
def test_each_session_keeps_its_turns_and_what_comes_too_late_is_left_out(num: int, turns: int, seed: int) -> None:
    requests = sessions(num, turns)
    end_s = max(each.arrival_s for each in requests)
    drawn = resampled(requests, seed)
    assert [each.arrival_s for each in drawn] == sorted(each.arrival_s for each in drawn)
    assert all(0 <= each.arrival_s <= end_s for each in drawn)
    again = resampled(requests, seed)
    assert [(each.arrival_s, each.session) for each in again] == [(each.arrival_s, each.session) for each in drawn]
    by_session: defaultdict[str | None, list[Request]] = defaultdict(list)
    for each in drawn:
        by_session[each.session].append(each)
    for own in by_session.values():
        assert [len(each.block_ids) for each in own if each.block_ids is not None] == list(range(2, 2 + len(own)))
        assert all(b.arrival_s - a.arrival_s == pytest.approx(5) for a, b in pairwise(own))
        assert len(own) == turns or own[-1].arrival_s + 5 > end_s


def test_spans_are_drawn_with_replacement_and_stay_whole() -> None:
    """Where a span is drawn, as many sessions begin as in the trace, at the same times after its begin."""
    requests = sessions(120, turns=1)
    span_s = requests[-1].arrival_s / NUM_SPANS
    begun = Counter(min(NUM_SPANS - 1, int(each.arrival_s / span_s)) for each in requests)
    num_of_seed = set()
    for seed in range(20):
        spans = np.random.default_rng(seed).integers(0, NUM_SPANS, NUM_SPANS).tolist()
        drawn = resampled(requests, seed)
        assert Counter(str(each.session).split(" ")[0] for each in drawn) == Counter(
            each.session
            for place, span in enumerate(spans)
            for each in requests
            if min(NUM_SPANS - 1, int(each.arrival_s / span_s)) == span
            and each.arrival_s + (place - span) * span_s <= requests[-1].arrival_s
        )
        assert len(drawn) <= sum(begun[span] for span in spans)
        num_of_seed.add(tuple(each.session for each in drawn))
    assert len(num_of_seed) == 20


def test_a_copy_hits_nothing_of_the_first_and_its_sessions_share_as_before() -> None:
    """Each drawn copy of a span computes the shared block once, and each session's blocks once."""
    requests = sessions(24, turns=2)
    for seed in range(5):
        drawn = resampled(requests, seed)
        worlds = {each.salt for each in drawn}
        distinct = {(each.salt, block) for each in drawn if each.block_ids is not None for block in each.block_ids}
        assert len(worlds) > 1
        figures = run_point(POINT, drawn)
        num_blocks = sum(len(each.block_ids) for each in drawn if each.block_ids is not None)
        assert figures.num_hit_tokens == BLOCK * (num_blocks - len(distinct))
        assert run_point(PlanPoint(POINT.config, POINT.costs, resample=seed), requests) == figures


def test_nothing_and_too_much() -> None:
    assert resampled([], 0) == []
    assert len(resampled([Request(0.0, 8, 1)] * 3, 0)) >= 0
    ids = np.zeros(MOST_HELD_NBYTES // 16, np.int64)
    with pytest.raises(ConfigurationError, match="`resamples` keeps all requests in memory, and the first 1 take 512"):
        resampled([Request(float(number), 8, 1, ids) for number in range(2)], 0)
