"""What is concluded from points: paired differences, their intervals, and the setting to take."""

import math

import pytest

from pagedkv.simulation.planning import Bounds, PointResult, decide, effects_of
from tests.simulation.planning.results import figures, result

BOUNDS = Bounds(ttft_s=2.0)
HIGHEST = "holds 1, the highest that was tried"
CAPPED = "up to the highest load tried, or that the trace suffices for: one of them may hold more"
FEW = (2, 3, 2, 3, 2, 3, 2, 3)
MANY = (4, 6, 4, 6, 4, 6, 4, 6)


def test_a_ratio_that_is_the_same_in_each_part_is_certain() -> None:
    (effect,) = effects_of([result(figures(FEW), gpu="4xh100"), result(figures(MANY), gpu="8xh100")])
    assert (effect.axis, effect.value, effect.reference, effect.num_pairs) == ("gpu", "8xh100", "4xh100", 1)
    assert effect.traffic is not None
    assert (effect.traffic.value, effect.traffic.low, effect.traffic.high) == pytest.approx((2, 2, 2))
    assert effect.traffic.halves == pytest.approx((2, 2))
    assert effect.changes_traffic


def test_a_ratio_of_one_part_alone_is_not() -> None:
    lucky = (10, 1, 1, 1, 1, 1, 1, 1)
    (effect,) = effects_of([result(figures((1,) * 8), policy="lru"), result(figures(lucky), policy="hazard")])
    assert effect.traffic is not None
    assert effect.traffic.value == pytest.approx(17 / 8)
    assert effect.traffic.low < 1 < effect.traffic.high
    assert effect.is_open
    assert not effect.changes_traffic


def test_the_interval_is_that_of_the_jackknife() -> None:
    ours, theirs = (3, 4, 5, 6, 7, 8, 9, 10), (5,) * 8
    (effect,) = effects_of([result(figures(theirs), policy="lru"), result(figures(ours), policy="hazard")])
    without = [math.log((sum(ours) - each) / 35) for each in ours]
    mean = sum(without) / 8
    error = math.sqrt(7 / 8 * sum((each - mean) ** 2 for each in without))
    assert effect.traffic is not None
    assert effect.traffic.high == pytest.approx(52 / 40 * math.exp(2.365 * error))
    assert effect.traffic.halves == pytest.approx((18 / 20, 34 / 20))


def test_pairs_differ_in_nothing_else() -> None:
    points = [
        result(figures(hits=(100,) * 8), block_size="block 16", policy="lru"),
        result(figures(hits=(130,) * 8), block_size="block 16", policy="hazard"),
        result(figures(hits=(200,) * 8), block_size="block 64", policy="lru"),
        result(figures(hits=(250,) * 8), block_size="block 64", policy="hazard"),
    ]
    blocks, policy = effects_of(points)
    assert (blocks.axis, blocks.num_pairs, policy.num_pairs) == ("block size", 2, 2)
    assert policy.hit_ratio is not None
    assert policy.hit_ratio.value == pytest.approx((0.03 + 0.05) / 2)
    assert policy.changes_hits


def test_of_several_loads_the_one_counts_under_which_a_setting_serves_most() -> None:
    points = [
        result(figures((5,) * 8), 1, gpu="h100"),
        result(figures((2,) * 8), 2, gpu="h100"),
        result(figures((5,) * 8), 1, gpu="2xh100"),
        result(figures((5,) * 8, span_s=5), 2, gpu="2xh100"),
    ]
    (effect,) = effects_of(points)
    assert effect.traffic is not None
    assert effect.traffic.value == pytest.approx(2)
    assert decide(points, BOUNDS).best.load == 2


def test_the_decision_is_told_in_words_with_figures() -> None:
    points = [
        result(
            figures(tuple(n * factor for n in FEW), hits=(100 + 30 * bonus,) * 8, verdict="holds", offered_s=80.0),
            gpu=gpu,
            block=block,
            policy=policy,
        )
        for gpu, factor in (("4xh100", 1), ("8xh100", 2))
        for block in ("block 16", "block 64")
        for policy, bonus in (("lru", 0), ("hazard", 1))
    ]
    decision = decide(points, BOUNDS)
    assert decision.headline == (
        "Take 8xh100, block 16, hazard: sustains 0.5 answers a second within the bounds, the recorded traffic (the "
        "highest that was tried), 2x what 4xh100, block 16, lru serves"
    )
    assert [reason for reason in decision.reasons if "limits" not in reason] == [
        f"times the recorded traffic: 4xh100 {HIGHEST}; 8xh100 {HIGHEST}",
        f"8xh100 instead of 4xh100: 2.00x the traffic (2.00 to 2.00), {CAPPED}",
        f"block 64 instead of block 16: {CAPPED}",
        f"hazard instead of lru: {CAPPED}, +3.0 points of the hit ratio (+3.0 to +3.0)",
        "answers a second for each GPU, sustained, at best: 4xh100 0.062, 8xh100 0.062",
        "within the bounds at 1 times the recorded traffic: 25.0% with 4xh100, 50.0% with 8xh100",
    ]


def test_a_large_ratio_is_told_without_an_exponent() -> None:
    points = [result(figures((each,) * 8), gpu=gpu) for gpu, each in (("8xh100", 1), ("16xh100", 400))]
    assert "400x what 8xh100 serves" in decide(points, BOUNDS).headline


def test_what_makes_no_difference_stays_as_it_was_typed_first() -> None:
    points = [result(figures(hits=(h,) * 8), policy=policy) for policy, h in (("lru", 100), ("hazard", 101))]
    decision = decide(points, Bounds())
    assert decision.chosen == {"policy": "lru"}
    assert decision.headline.startswith(
        "Stay with lru: 1 answers a second at the recorded traffic, which it does not hold (the queue grows, "
        "first tokens are late);"
    )
    assert decision.headline.endswith("; no other setting that was tried serves significantly more")


def test_limits_that_were_not_found_are_said() -> None:
    holds = decide([result(figures(verdict="holds"), gpu="h100")], Bounds())
    assert "every setting holds all loads tried, up to 1 times" in holds.reasons[1]
    fails = decide([result(figures(), gpu="h100")], Bounds())
    assert fails.reasons == ("times the recorded traffic: h100 does not hold 1",)


def searched(**verdicts: str) -> list[PointResult]:
    """Make results of GPUs whose loads hold, or not, ascending."""
    return [
        result(figures(span_s=8.0 / load, offered_s=64.0 / load, verdict=verdict), load, gpu=gpu)
        for gpu, told in verdicts.items()
        for load, verdict in zip((1.0, 1.41, 2.0, 4.0), told.split(), strict=False)
    ]


def test_how_much_is_taken_is_told_between_two_loads() -> None:
    decision = decide(searched(h100="holds fails", h200="holds holds holds fails"), BOUNDS, is_searched=True)
    assert decision.headline == (
        "Take h200: sustains 2.5 answers a second within the bounds, 2 times the recorded traffic (4 times does not "
        "hold), 2x what h100 serves"
    )
    assert decision.reasons[0] == "times the recorded traffic: h100 holds 1 and not 1.41; h200 holds 2 and not 4"
    (effect,) = decision.effects
    assert effect.traffic is not None
    assert effect.traffic.value == pytest.approx(2)
    assert (effect.traffic.low, effect.traffic.high) == pytest.approx((2 / 1.41, 4)), "what the search left open"


def test_a_step_of_the_search_is_no_difference() -> None:
    decision = decide(searched(h100="holds fails", h200="holds holds fails"), BOUNDS, is_searched=True)
    assert decision.chosen == {"gpu": "h100"}
    assert "1.41x the traffic, which may be chance (1.00 to 2.00)" in decision.reasons[1]


def test_a_load_that_does_not_hold_is_no_capacity() -> None:
    """More answers a second under a load that fails are no reason to take a setting."""
    points = [
        result(figures((9,) * 8, verdict="holds"), 1, policy="lru"),
        result(figures((9,) * 8, verdict="fails"), 1, policy="hazard"),
        result(figures((6,) * 8, span_s=2.0, verdict="fails"), 4, policy="hazard"),
    ]
    assert decide(points, BOUNDS).chosen == {"policy": "lru"}


def test_a_trace_too_short_to_tell_is_no_capacity() -> None:
    """A queue of half a second that is drained in five says nothing of what is sustained."""
    points = [
        result(figures(span_s=span_s, offered_s=0.56, verdict="too short"), 80, gpu=gpu)
        for gpu, span_s in (("h100", 1.275), ("2xh100", 0.6375))
    ]
    decision = decide(points, Bounds())
    assert decision.headline == (
        "Take 2xh100: 80 requests that arrive within 0.56 s are answered in 5.1 s, 2x as fast as h100; the trace is "
        "too short to determine the sustained traffic"
    )
    assert decision.reasons[0].startswith("the sustained traffic is unknown")
    assert "2.00x the speed at which these requests are answered" in decision.reasons[1]
    assert not any("keeps up" in reason or "holds" in reason for reason in decision.reasons)


def test_nothing_within_the_bounds_is_said() -> None:
    none = (0,) * 8
    decision = decide([result(figures(none), gpu="h100"), result(figures(none), gpu="2xh100")], BOUNDS)
    assert decision.headline.startswith("None of the settings gives answers a second within the bounds")
    assert decision.reasons[1] == "2xh100 instead of h100: both serve almost nothing within the bounds"
    assert decision.chosen == {"gpu": "h100"}


def test_pairs_of_which_neither_serves_do_not_hide_what_the_others_tell() -> None:
    lone = (1, 0, 0, 0, 0, 0, 0, 0)  # of 10 in each part: 1.25 %
    points = [
        result(figures((0,) * 8), gpu="h100", policy="lru"),
        result(figures((0,) * 8), gpu="h100", policy="hazard"),
        result(figures((5,) * 8), gpu="2xh100", policy="lru"),
        result(figures((6,) * 8), gpu="2xh100", policy="hazard"),
    ]
    _, policy = effects_of(points)
    assert (policy.num_pairs, policy.num_serving) == (2, 1)
    assert policy.traffic is not None
    assert policy.traffic.value == pytest.approx(1.2)
    points[1] = result(figures(lone), gpu="h100", policy="hazard")  # now one of that pair serves
    _, policy = effects_of(points)
    assert (policy.num_pairs, policy.num_serving, policy.traffic) == (2, 2, None)
    assert policy.changes_traffic


def test_a_first_setting_that_serves_next_to_nobody_is_no_measure() -> None:
    points = [result(figures((0,) * 8), gpu="h100"), result(figures((5,) * 8), gpu="2xh100")]
    decision = decide(points, BOUNDS)
    assert decision.headline == (
        "Take 2xh100: 0.5 answers a second within the bounds at the recorded traffic, which it does not hold "
        "(the queue grows, first tokens are late), where h100 serves almost none"
    )
    assert decision.reasons[1] == (
        "2xh100 instead of h100: one of them serves almost nothing within the bounds, so their ratio is meaningless"
    )


def test_a_ratio_of_many_times_is_told_without_an_exponent() -> None:
    points = [result(figures((1,) * 8), gpu="h100"), result(figures((10,) * 8, span_s=0.08), gpu="2xh100")]
    assert "1,250x what h100 serves" in decide(points, BOUNDS).headline


def test_lengths_alone_claim_no_hits() -> None:
    points = [result(figures(has_content=False), policy=policy) for policy in ("lru", "hazard")]
    assert effects_of(points)[0].hit_ratio is None
