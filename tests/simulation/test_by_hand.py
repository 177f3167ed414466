"""What docs/replay.md says, by figures worked out on paper: with the library, and with the naive server."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import pytest

from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation.cost import CostModel
from tests.simulation.naive_server import NaiveConfig, run
from tests.simulation.traffic import request_of, serve

Replay: TypeAlias = Callable[[list[TokenizedRequest], NaiveConfig, CostModel], dict[str, Any]]

ONE_SECOND = CostModel(fixed_s=1.0)
both = pytest.mark.parametrize("replay", [serve, run])


def pool_of(report: dict[str, Any]) -> dict[str, Any]:
    (pool,) = report["pools"].values()
    assert isinstance(pool, dict)
    return pool


def buckets(histogram: dict[str, list[Any]]) -> dict[float | None, int]:
    """Give the filled intervals by their upper ends."""
    pairs = zip(histogram["upper_edges_s"], histogram["num_blocks"], strict=True)
    return {edge: count for edge, count in pairs if count}


@both
@pytest.mark.parametrize(
    ("p", "o", "n", "b"), [(5, 9, 3, 4), (8, 9, 2, 4), (1, 12, 4, 4), (3, 7, 2, 1), (20, 30, 5, 16)]
)
def test_samples_save_what_the_closed_form_says(replay: Replay, p: int, o: int, n: int, b: int) -> None:
    report = replay([request_of(range(p), range(50, 50 + o), num_samples=n)], NaiveConfig(1000, b), ONE_SECOND)
    f = p // b
    savings = []
    for t in range(1, o):
        c = -(-(p + t) // b)
        savings.append(1 - Fraction(f + n * (c - f), n * c))
    assert report["sharing"]["num_decode_steps"] == o - 1
    assert report["sharing"]["mean_saving"] == pytest.approx(float(sum(savings) / len(savings)), rel=1e-12)


@both
def test_waste_of_two_requests_is_as_written_out(replay: Replay) -> None:
    """Blocks of 4; A: 3 + 3 tokens, B: 6 + 2 tokens. Two decode steps: lengths (4, 7), then A's 5 alone."""
    requests = [request_of([1, 2, 3], [11, 12, 13]), request_of([4, 5, 6, 7, 8, 9], [21, 22])]
    waste = replay(requests, NaiveConfig(100, 4, max_length=16), ONE_SECOND)["waste"]
    assert waste["mean"] == pytest.approx((1 / 12 + 3 / 8) / 2)  # 11 of 12 slots, 5 of 8
    assert waste["by_block_size"]["1"] == 0
    assert waste["by_block_size"]["8"] == pytest.approx((5 / 16 + 3 / 8) / 2)
    assert waste["by_block_size"]["256"] == pytest.approx((1 - 11 / 512 + 1 - 5 / 256) / 2)
    assert waste["contiguous"]["exact"] == pytest.approx((1 - 11 / (5 + 7) + 1 - 5 / 5) / 2)
    assert waste["contiguous"]["power_of_two"] == pytest.approx((1 - 11 / (8 + 8) + 1 - 5 / 8) / 2)
    assert waste["contiguous"]["maximum"] == pytest.approx((1 - 11 / 32 + 1 - 5 / 16) / 2)
    assert waste["max_length"] == 16


@both
def test_a_reservation_of_the_maximum_is_the_longest_of_the_trace(replay: Replay) -> None:
    requests = [request_of([1, 2, 3], [11, 12, 13]), request_of([4] * 6, [21, 22])]
    assert replay(requests, NaiveConfig(100, 4), ONE_SECOND)["waste"]["max_length"] == 7


@both
def test_the_first_token_comes_when_the_prompt_is_computed(replay: Replay) -> None:
    """A prompt of 10 in chunks of 4, at 1 s a step, 1/8 s a token, 1/64 s a pair, 1/4 s a range."""
    cost = CostModel(fixed_s=1.0, token_compute_s=1 / 8, pair_compute_s=1 / 64, sequence_s=1 / 4)
    config = NaiveConfig(100, 4, max_sequences=2, max_batched_tokens=4)
    report = replay([request_of(range(10), [90, 91], 0.5)], config, cost)
    pairs = [1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10, 11]
    steps = [1 + tokens / 8 + num / 64 + 1 / 4 for tokens, num in zip([4, 4, 2, 1], pairs, strict=True)]
    latency = report["latency"]
    assert latency["queueing_s"]["max"] == 0
    assert latency["first_token_s"]["max"] == sum(steps[:3])
    assert latency["request_s"]["max"] == sum(steps)
    assert report["steps"]["virtual_s"] == 0.5 + sum(steps)
    assert report["steps"]["busy_s"] == sum(steps)
    assert (report["steps"]["num_steps"], report["steps"]["num_decode_steps"]) == (4, 1)
    assert report["steps"]["num_computed_tokens"] == 11


@both
def test_a_step_that_reads_much_takes_as_long_as_reading(replay: Replay) -> None:
    """Memory-bound: 1/2 s a context token, the sum of e over the ranges."""
    report = replay([request_of(range(4), [90, 91])], NaiveConfig(100, 4), CostModel(context_token_s=0.5))
    assert report["steps"]["virtual_s"] == 0.5 * (4 + 5)


@both
def test_percentiles_are_those_of_numpy(replay: Replay) -> None:
    """One sequence at a time, so request i waits 2 i seconds."""
    requests = [request_of([i + 1], [50, 51]) for i in range(8)]
    latency = replay(requests, NaiveConfig(100, 4, max_sequences=1), ONE_SECOND)["latency"]
    waits = [2.0 * i for i in range(8)]
    for key, offset in (("queueing_s", 0), ("first_token_s", 1), ("request_s", 2)):
        expected = {f"p{percent}": float(np.percentile(waits, percent)) + offset for percent in (50, 90, 99)}
        assert latency[key] == pytest.approx({"mean": 7 + offset, **expected, "max": 14 + offset})


@both
def test_the_clock_jumps_over_idle_time(replay: Replay) -> None:
    """10 s of nothing, a step of 1 s with 1 block, 89 s with it cached, a step that hits it."""
    requests = [request_of([1, 2, 3, 4], [], 10.0), request_of([1, 2, 3, 4, 5], [], 100.0)]
    report = replay(requests, NaiveConfig(6, 4), ONE_SECOND)
    assert report["steps"]["virtual_s"] == 101
    assert report["steps"]["busy_s"] == 2
    assert pool_of(report)["num_live"] == {"mean": pytest.approx((1 + 2) / 101), "peak": 2}
    assert pool_of(report)["num_cached"] == {"mean": pytest.approx(89 / 101), "peak": 1}
    assert pool_of(report)["num_free"] == {"mean": pytest.approx((10 * 5 + 4 + 89 * 4 + 3) / 101), "peak": 5}
    assert buckets(pool_of(report)["hits_by_age"]) == {100: 1}


@both
def test_speed_compresses_the_trace_only(replay: Replay) -> None:
    requests = [request_of([1], [], 10.0), request_of([2], [], 30.0)]
    assert replay(requests, NaiveConfig(6, 4, load=4.0), ONE_SECOND)["steps"]["virtual_s"] == 8.5


@both
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(replay: Replay) -> None:
    requests = [request_of([1, 2, 3, 4], [], 0.0), request_of([1, 2, 3, 4], [], 10.0)]
    report = replay(requests, NaiveConfig(6, 2), ONE_SECOND)
    assert report["hits"] == {
        "num_prompt_blocks": 2,  # (4 - 1) // 2 each
        "num_hit_blocks": 1,
        "block_hit_ratio": 0.5,
        "num_hit_tokens": 2,
        "token_hit_ratio": 0.25,
    }


@both
def test_the_least_recently_used_is_evicted_the_tail_first(replay: Replay) -> None:
    """A pool of 4 blocks of 1 token: A leaves 1 2 3, B takes the empty block and A's tail, A again hits 1 2."""
    requests = [request_of([1, 2, 3]), request_of([8, 9], [], 7.0), request_of([1, 2, 3], [], 20.0)]
    report = replay(requests, NaiveConfig(5, 1, watermark=0.0), ONE_SECOND)
    pool = pool_of(report)
    assert report["hits"]["num_hit_blocks"] == 2
    assert buckets(pool["hits_by_age"]) == {20: 2}  # given up at 1, hit at 20
    # B evicts 3 (aged 6 s). A's third block has no empty one left: B's 9 goes (aged 12 s).
    assert buckets(pool["evictions_by_age"]) == {10: 1, 20: 1}
    assert (pool["num_evictions"], pool["num_never_reused"]) == (2, 2)


@both
@pytest.mark.parametrize(
    ("num_samples", "num_usable", "is_served"), [(1, 3, True), (1, 2, False), (3, 7, True), (3, 6, False)]
)
def test_what_does_not_fit_alone_is_rejected(
    replay: Replay, num_samples: int, num_usable: int, *, is_served: bool
) -> None:
    """With p = 5, o = 6, b = 4, 10 tokens are appended; 1 block is shared, and each sequence has 2 of its own."""
    request = request_of(range(5), range(50, 56), num_samples=num_samples)
    report = replay([request], NaiveConfig(num_usable + 1, 4, max_sequences=3), ONE_SECOND)
    assert report["requests"]["num_rejected"] == (not is_served)
    assert report["requests"]["num_finished"] == is_served


@both
def test_more_sequences_than_may_run_are_rejected(replay: Replay) -> None:
    report = replay([request_of([1], [2], num_samples=3)], NaiveConfig(100, 4, max_sequences=2), ONE_SECOND)
    assert report["requests"]["num_rejected"] == 1


@both
@pytest.mark.parametrize(("num_output", "num_recomputed", "end_s"), [(4, 2, 7), (5, 4, 8)])
def test_the_later_request_recomputes_what_is_not_cached(
    replay: Replay, num_output: int, num_recomputed: int, end_s: int
) -> None:
    """4 blocks of 2, two prompts of 3 tokens: at the fifth token, at 2 s, A needs a third block, so B goes.

    B has computed 4 tokens, and 5 are known. A evicts B's tail; the head too if A comes to need a fourth block, for its
    fifth output's sake. B cannot return before A ends: it needs 3 blocks. Then it computes up to its fifth
    token in one step, of which 2 tokens hit or none, and two more.
    """
    requests = [request_of([1, 2, 3], range(50, 50 + num_output)), request_of([6, 7, 8], range(60, 65))]
    report = replay(requests, NaiveConfig(5, 2, watermark=0.0), ONE_SECOND)
    assert report["preemptions"]["num_recompute"] == 1
    assert report["preemptions"]["num_swap"] == 0
    assert report["preemptions"]["num_recomputed_tokens"] == num_recomputed
    assert report["latency"]["request_s"]["max"] == end_s
    assert report["hits"]["num_hit_tokens"] == 0  # first admissions only


@both
def test_a_swap_moves_blocks_and_computes_nothing_again(replay: Replay) -> None:
    """As above, by swap: B's 2 blocks leave in the step that begins at 2 and are free for A from 3 on.

    B is short no more when A is gone; each moved slot costs 1/4 s.
    """
    requests = [request_of([1, 2, 3], range(50, 55)), request_of([6, 7, 8], range(60, 65))]
    config = NaiveConfig(5, 2, num_host_blocks=9, watermark=0.0, preemption="swap")
    report = replay(requests, config, CostModel(fixed_s=1.0, swap_token_s=0.25))
    assert report["preemptions"] == {
        "num_recompute": 0,
        "num_swap": 1,
        "num_recomputed_tokens": 0,
        "num_swapped_out_blocks": 2,
        "num_swapped_in_blocks": 2,
    }
    assert report["steps"]["num_computed_tokens"] == 2 * (3 + 4)
    assert report["steps"]["busy_s"] - report["steps"]["num_steps"] == 2 * 2 * 2 * 0.25


@both
def test_a_host_pool_that_is_full_makes_a_request_recompute(replay: Replay) -> None:
    requests = [request_of([1, 2, 3], range(50, 55)), request_of([6, 7, 8], range(60, 65))]
    config = NaiveConfig(5, 2, num_host_blocks=2, watermark=0.0, preemption="swap")
    preemptions = replay(requests, config, ONE_SECOND)["preemptions"]
    assert (preemptions["num_swap"], preemptions["num_recompute"]) == (0, 1)


def beam_savings(p: int, o: int, k: int, b: int, parents: Sequence[Sequence[int]]) -> list[float]:
    """Follow the histories of beams, as tuples of (beam, place): what the blocks of equal history would be."""
    histories: list[tuple[object, ...]] = [tuple(range(p))] * k
    savings = []
    for place in range(1, o):
        if place > 1:
            histories = [histories[parent] for parent in parents[place - 2]]
        histories = [(*history, (beam, place)) for beam, history in enumerate(histories)]
        ends = [min(end, p + place) for end in range(b, p + place + b, b)]
        distinct = {history[:end] for history in histories for end in ends}
        savings.append(1 - len(distinct) / (k * len(ends)))
    return savings


@both
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_beams_share_what_their_genealogy_shares(replay: Replay, seed: int) -> None:
    p, o, k, b = 5, 20, 4, 4
    generator = np.random.default_rng((seed, 0))
    parents = [generator.integers(k, size=k).tolist() for _ in range(o - 2)]
    expected = beam_savings(p, o, k, b, parents)
    report = replay([request_of(range(p), range(50, 50 + o))], NaiveConfig(500, b, beam_width=k, seed=seed), ONE_SECOND)
    assert report["sharing"]["num_decode_steps"] == o - 1
    assert report["sharing"]["mean_saving"] == pytest.approx(sum(expected) / len(expected))


@both
def test_nothing_comes_of_nothing(replay: Replay) -> None:
    report = replay([], NaiveConfig(10, 4), ONE_SECOND)
    assert set(report["requests"].values()) == {0}
    assert set(report["latency"]["first_token_s"].values()) == {None}
    assert report["sharing"] == {"mean_saving": None, "num_decode_steps": 0}


@both
def test_priorities_go_first_and_are_preempted_last(replay: Replay) -> None:
    """One sequence at a time; the last request has the highest priority, and the first runs when it arrives."""
    requests = [request_of([i + 1], [50], 0.0, priority=i) for i in range(3)]
    latency = replay(requests, NaiveConfig(10, 4, max_sequences=1), ONE_SECOND)["latency"]
    assert latency["queueing_s"]["max"] == 2
    assert latency["queueing_s"]["mean"] == 1
