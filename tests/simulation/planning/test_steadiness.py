"""Whether a load holds: counted again, one request after the other, and by hand on servers whose capacity is known."""

import math
from collections.abc import Sequence

import pytest

from pagedkv.planner.traces.request import Request
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import RequestLog
from pagedkv.simulation.planning import Bounds, PlanPoint, PointFigures, Steadiness, run_point
from pagedkv.simulation.planning.decision import change_of, reason_of
from pagedkv.simulation.planning.figures import FAILS, HOLDS, TOO_SHORT, steadiness_of

ONE_AT_A_TIME = CostModel(fixed_s=0.5)
"""With one sequence at a time and answers of two tokens a request takes a second."""


def config(**changes: object) -> ServingConfig:
    values: dict[str, object] = {
        "num_blocks": 60,
        "block_size": 4,
        "max_sequences": 1,
        "max_batched_tokens": 16,
        **changes,
    }
    return ServingConfig(**values)  # type: ignore[arg-type] # the fields of it


def steadily(num_requests: int, every_s: float, output_length: int = 2) -> list[Request]:
    return [Request(number * every_s, 8, output_length) for number in range(num_requests)]


def served(requests: Sequence[Request], bounds: Bounds | None = None, **changes: object) -> PointFigures:
    return run_point(PlanPoint(config(**changes), ONE_AT_A_TIME, bounds or Bounds()), requests)


def test_two_hundred_requests_in_half_a_second_say_nothing_of_what_is_sustained() -> None:
    """They were sold as a capacity of 80 times the traffic, because the queue was drained soon enough."""
    burst = steadily(200, 0.56 / 199)
    figures = run_point(PlanPoint(config(max_sequences=8, max_batched_tokens=64), CostModel(fixed_s=0.1)), burst)
    assert figures.span_s == pytest.approx(5.1, rel=0.05)
    assert figures.num_finished == 200
    steady = figures.steadiness
    assert (steady.verdict, steady.binds) == (TOO_SHORT, ())
    assert steady.measured_s == pytest.approx(0.42)
    assert reason_of(figures, Bounds()) == (
        "too short to decide: after the warm-up requests arrive for 0.42 s, and 30 s are needed"
    )


def test_a_server_that_takes_a_request_a_second_holds_one_in_1_1_s_and_not_one_in_0_9_s() -> None:
    holds, fails = served(steadily(200, 1.1)), served(steadily(200, 0.9))
    assert (holds.steadiness.verdict, fails.steadiness.verdict) == (HOLDS, FAILS)
    assert fails.steadiness.binds == ("queue",)
    assert holds.steadiness.good_per_s == pytest.approx(1 / 1.1, rel=0.02)
    assert holds.steadiness.num_waiting == pytest.approx((0.5 / 1.1, 0.5 / 1.1), rel=0.02)
    assert reason_of(fails, Bounds()).startswith("does not hold; the queue grows, from ")
    assert "1 sequences run, which is the limit" in change_of(fails, PlanPoint(config(), ONE_AT_A_TIME))


def test_what_happens_in_the_warm_up_counts_for_nothing() -> None:
    burst = [Request(0.0, 8, 2) for _ in range(12)]
    later = [Request(20.0 + 2 * number, 8, 2) for number in range(100)]
    figures = served([*burst, *later], Bounds(ttft_s=0.7))
    assert figures.num_good < 0.95 * figures.num_requests
    assert figures.steadiness.verdict == HOLDS
    assert figures.steadiness.num_good == figures.steadiness.num_measured == sum(r.arrival_s >= 54.5 for r in later)


def test_the_bound_that_binds_is_named_with_what_nine_of_ten_keep() -> None:
    slow = served(steadily(100, 2.0), Bounds(ttft_s=0.4, tpot_s=0.6))
    assert (slow.steadiness.verdict, slow.steadiness.binds) == (FAILS, ("ttft",))
    assert reason_of(slow, Bounds(ttft_s=0.4, tpot_s=0.6)) == (
        "does not hold; 100.0% begin later than `ttft_s=0.4` allows: nine of ten are within 0.5 s"
    )
    bounds = Bounds(ttft_s=1.0, tpot_s=0.6)
    assert reason_of(served(steadily(100, 2.0), bounds), bounds) == (
        "holds: 100.0% of the requests keep the bounds, and the queue does not grow; the nearest bound is `tpot_s`: "
        "nine of ten are within 0.5 s, and 0.6 s are allowed"
    )
    tight = served(steadily(100, 2.0), Bounds(tpot_s=0.499))
    assert tight.steadiness.binds == ("tpot",)
    assert change_of(tight, PlanPoint(config(), ONE_AT_A_TIME)).startswith("steps take too long, and few requests wait")


def test_long_answers_want_a_longer_measurement() -> None:
    figures = served(steadily(60, 1.0, output_length=41), max_sequences=60, max_batched_tokens=80, num_blocks=2000)
    assert figures.steadiness.least_s == pytest.approx(60.0), "three answers of 20 s"
    assert figures.steadiness.verdict == TOO_SHORT


def test_few_requests_say_nothing_however_long() -> None:
    figures = served(steadily(60, 10.0))
    assert figures.steadiness.verdict == TOO_SHORT
    reason = reason_of(figures, Bounds())
    assert reason == "too short to decide: after the warm-up 45 requests arrive, and 50 are needed"


def test_what_requests_wait_for_is_what_is_full() -> None:
    tokens = [Request(number * 0.2, 32, 1) for number in range(250)]
    by_tokens = served(tokens, max_sequences=16)
    assert max(by_tokens.waited_s, key=lambda name: by_tokens.waited_s[name]) == "tokens"
    assert "steps compute 16 tokens" in change_of(by_tokens, PlanPoint(config(), ONE_AT_A_TIME))
    by_memory = served(steadily(200, 0.4, output_length=20), num_blocks=12, max_sequences=16)
    assert max(by_memory.waited_s, key=lambda name: by_memory.waited_s[name]) == "memory"
    assert "blocks run out" in change_of(by_memory, PlanPoint(config(), ONE_AT_A_TIME))
    assert sum(served(steadily(100, 2.0)).waited_s.values()) == 0


def counted(log: RequestLog, bounds: Bounds) -> dict[str, object]:
    """Count the same with loops."""
    arrivals, firsts, ends = log.arrival_s.tolist(), log.first_token_s.tolist(), log.end_s.tolist()
    outputs, prompts = log.counts("num_output_tokens").tolist(), log.counts("num_prompt_tokens").tolist()
    offered_s = arrivals[-1] - arrivals[0]
    counts = dict.fromkeys(("measured", "good", "late", "slow", "rejected", "prompt", "output"), 0)
    for arrival_s, first_s, end_s, output, prompt in zip(arrivals, firsts, ends, outputs, prompts, strict=True):
        if arrival_s < arrivals[0] + offered_s / 4:
            continue
        counts["measured"] += 1
        if math.isnan(first_s):
            counts["rejected"] += 1
            continue
        is_late = first_s - arrival_s > (bounds.ttft_s or math.inf)
        is_slow = output > 1 and (end_s - first_s) / (output - 1) > (bounds.tpot_s or math.inf)
        counts["late"] += is_late
        counts["slow"] += is_slow
        if not is_late and not is_slow:
            counts["good"] += 1
            counts["prompt"] += prompt
            counts["output"] += output
    quarters = []
    for quarter in (2, 3):
        from_s, to_s = (arrivals[0] + offered_s * each / 4 for each in (quarter, quarter + 1))
        seconds = 0.0
        for arrival_s, first_s in zip(arrivals, firsts, strict=True):
            if not math.isnan(first_s):
                seconds += max(0.0, min(first_s, to_s) - max(arrival_s, from_s))
        quarters.append(seconds / (to_s - from_s))
    return {**counts, "waiting": quarters}


@pytest.mark.parametrize("every_s", [0.45, 0.6, 1.0])
def test_counts_are_those_of_a_loop_over_the_requests(every_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Bounds(ttft_s=6.0, tpot_s=0.55)
    requests = [
        Request(number * every_s + (number % 7) * 0.05, 10_000 if number % 29 == 3 else 4 + number % 9, number % 4)
        for number in range(150)
    ]
    logs: list[RequestLog] = []

    def keep(log: RequestLog, asked: Bounds) -> Steadiness:
        logs.append(log)
        return steadiness_of(log, asked)

    monkeypatch.setattr("pagedkv.simulation.planning.figures.steadiness_of", keep)
    steady = served(requests, bounds, max_sequences=2).steadiness
    expected = counted(logs[0], bounds)
    assert {
        "measured": steady.num_measured,
        "good": steady.num_good,
        "late": steady.num_late,
        "slow": steady.num_slow,
        "rejected": steady.num_rejected,
        "prompt": steady.num_good_prompt_tokens,
        "output": steady.num_good_output_tokens,
        "waiting": list(steady.num_waiting),
    } == expected | {"waiting": pytest.approx(expected["waiting"])}
    assert steady.num_rejected > 0
    assert steady.num_good > 0
