"""Capacity: the hits of a cache of each size, and the causes of misses."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pagedkv.planner.capacity.curve import OPTIMAL
from pagedkv.report.documents import Curve, ReportRun
from pagedkv.report.drawing import (
    FILLS,
    HALF,
    INK,
    LINES,
    PERCENT_TICKS,
    Axes,
    Figure,
    LineStyle,
    Plot,
    Section,
    fill_legends,
    line,
    line_legend,
    line_legends,
    logarithmic,
    only_axes,
    plot,
    read_out,
)
from pagedkv.report.figures import COUNT, PLOTS, RATIO, SECTIONS, TABLES
from pagedkv.report.tables import Columns, Table, table

IDEAL_LINE: Final = LineStyle(INK, ":", "")
REPLAY_LINE: Final = LineStyle(INK, "", "X")
TIERS_LINE: Final = LineStyle(INK, "-.", "")
REPLAY_SIZE: Final = 9
ROOM_ABOVE_IDEAL: Final = 1.12


def capacity_section(run: ReportRun) -> Section:
    """Draw the capacity curve and its gaps, or explain why there is no curve."""
    curve = run.curve
    if curve is None or not curve["num_block_refs"]:
        return Section("capacity", SECTIONS["capacity"], (run.without_curve,))
    plots = [_curve_plot(run, curve)]
    if len(_capacities(curve)) > 1:
        plots.append(_gap_plot(curve, shown_policy(run, curve)))
    return Section("capacity", SECTIONS["capacity"], _sentences(run, curve), tuple(plots), (_table(curve),))


def shown_policy(run: ReportRun, curve: Curve) -> str:
    """Choose the policy whose gaps are shown: the run's own, if it was measured, else the first."""
    own = str(run.replay["config"].get("policy"))
    return own if own in curve["gaps"]["policy_gap"] else next(iter(curve["gaps"]["policy_gap"]))


def shown_name(policy: str) -> str:
    """Return the shown name of a policy; the optimum is marked as one that cannot run."""
    return "optimal, offline" if policy == OPTIMAL else policy


def hit_ratios(curve: Curve, policy: str) -> dict[int, float]:
    """Hits as a share of all references by capacity in blocks, in ascending order."""
    hits = {int(capacity): num_hits for capacity, num_hits in curve["policies"][policy].items()}
    return {capacity: hits[capacity] / curve["num_block_refs"] for capacity in sorted(hits)}


def ratios_with_tiers(curve: Curve, policy: str) -> tuple[str, dict[int, float]] | None:
    """Name the tiers below the device, with the hits of all media by capacity; None if none were measured."""
    if not curve.get("tiers"):
        return None
    below = curve["tiers"][0]
    hits = {int(capacity): sum(by_medium.values()) for capacity, by_medium in below["hits"][policy].items()}
    ratios = {capacity: hits[capacity] / curve["num_block_refs"] for capacity in sorted(hits)}
    return f"{policy} with {' and '.join(below['tiers'])}", ratios


def replay_point(run: ReportRun) -> tuple[int, float] | None:
    """Capacity in tokens and hit ratio by block of the replay; None with several pools, or without a hit ratio."""
    pools, block_size = run.replay["pools"], run.replay["config"].get("block_size")
    ratio = run.replay["hits"]["block_hit_ratio"]
    if len(pools) != 1 or not isinstance(block_size, int) or ratio is None:
        return None
    (pool,) = pools.values()
    return pool["num_blocks"] * block_size, ratio


def _capacities(curve: Curve) -> list[int]:
    return sorted(int(capacity) for capacity in curve["gaps"]["capacity_gap"])


def _drawn(run: ReportRun, curve: Curve) -> list[str]:
    """Choose the policies to draw: the run's own policy, the best other one at its size, and the optimum.

    More lines would be hard to follow; the table has all policies.
    """
    own = shown_policy(run, curve)
    best = _best_other(run, curve)
    return [own, *([] if best is None else [best]), *([OPTIMAL] if OPTIMAL in curve["policies"] else [])]


def _best_other(run: ReportRun, curve: Curve) -> str | None:
    """Return the policy that hits the most at the size of the text, except the shown one; None without another."""
    capacity, _ = _chosen_capacity(curve, replay_point(run))
    others = [name for name in curve["gaps"]["policy_gap"] if name != shown_policy(run, curve)]
    return max(others, key=lambda name: hit_ratios(curve, name)[capacity], default=None)


def _curve_plot(run: ReportRun, curve: Curve) -> Plot:
    replay = replay_point(run)
    lines = dict(zip(_drawn(run, curve), LINES, strict=False))
    legend = line_legends("curve", [(shown_name(policy), style) for policy, style in lines.items()])
    below = ratios_with_tiers(curve, shown_policy(run, curve))
    if below is not None:
        legend.append(line_legend("curve-legend-tiers", TIERS_LINE, below[0]))
    legend.append(line_legend("curve-legend-ideal", IDEAL_LINE, f"ideal, {RATIO.text(curve['ideal_block_ratio'])}"))
    if replay is not None:
        legend.append(line_legend("curve-legend-replay", REPLAY_LINE, "this replay"))

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, f"blocks of {COUNT.text(curve['block_size'])} tokens", "hit ratio by block")
        for policy, style in lines.items():
            ratios = hit_ratios(curve, policy)
            line(axes, list(ratios), list(ratios.values()), style)
        series = [hit_ratios(curve, policy) for policy in lines]
        if below is not None:
            line(axes, list(below[1]), list(below[1].values()), TIERS_LINE)
            series.append(below[1])
        axes.axhline(curve["ideal_block_ratio"], color=IDEAL_LINE.colour, linestyle=IDEAL_LINE.dashes)
        if replay is not None:
            num_tokens, ratio = replay
            line(axes, [num_tokens / curve["block_size"]], [ratio], REPLAY_LINE, REPLAY_SIZE)
        logarithmic(axes, "x")
        axes.yaxis.set_major_formatter(PERCENT_TICKS)
        axes.set_ylim(0, ROOM_ABOVE_IDEAL * max(curve["ideal_block_ratio"], 0 if replay is None else replay[1]) or 1)
        _read_out(axes, curve, series)

    label = f"Lines of the hit ratio over the capacity in blocks: {', '.join(lines)}, and the ideal"
    return plot(PLOTS["curve"], HALF, label, paint, legend, key="curve")


def _gap_plot(curve: Curve, policy: str) -> Plot:
    capacities = _capacities(curve)
    gaps = curve["gaps"]
    names = (f"hits of {policy}", "policy gap", "capacity gap", "content ceiling")
    heights = (
        list(hit_ratios(curve, policy).values()),
        [gaps["policy_gap"][policy][str(capacity)] for capacity in capacities],
        [gaps["capacity_gap"][str(capacity)] for capacity in capacities],
        [gaps["content_ceiling"]] * len(capacities),
    )

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, f"blocks of {COUNT.text(curve['block_size'])} tokens", "share of references")
        below = [0.0] * len(capacities)
        for height, fill in zip(heights, FILLS, strict=True):
            above = [low + gap for low, gap in zip(below, height, strict=True)]
            axes.fill_between(
                capacities, below, above, facecolor=fill.colour, hatch=fill.hatch, alpha=fill.alpha, linewidth=0
            )
            below = above
        logarithmic(axes, "x")
        axes.set_xlim(capacities[0], capacities[-1])
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PERCENT_TICKS)
        _read_out(axes, curve, [dict(zip(capacities, height, strict=True)) for height in heights])

    label = f"Stacked areas over the capacity in blocks: {', '.join(names)}"
    return plot(PLOTS["gaps"], HALF, label, paint, fill_legends("gaps", zip(names, FILLS, strict=True)), key="gaps")


def _read_out(axes: Axes, curve: Curve, series: Sequence[Mapping[int, float]]) -> None:
    """Add the shares that the page shows at the pointer: by capacity in blocks, in the order of the legend."""
    capacities = _capacities(curve)
    headings = [f"{COUNT.text(capacity)} blocks" for capacity in capacities]
    read_out(
        axes, capacities, headings, [[RATIO.text(each.get(capacity)) for capacity in capacities] for each in series]
    )


def _sentences(run: ReportRun, curve: Curve) -> tuple[str, ...]:
    """Describe the gain of more memory, then that of another policy, then the hits of a cache without bounds."""
    policy = shown_policy(run, curve)
    capacity, why = _chosen_capacity(curve, replay_point(run))
    gaps = curve["gaps"]
    ratio, size = hit_ratios(curve, policy)[capacity], curve["block_size"]
    reached = ", ".join(
        f"{float(share):.0%} with {COUNT.text(blocks)}" for share, blocks in curve["capacity_for"].items()
    )
    ideal, ceiling = RATIO.text(curve["ideal_block_ratio"]), RATIO.text(gaps["content_ceiling"])
    policy_gap = RATIO.text(gaps["policy_gap"][policy][str(capacity)])
    capacity_gap = RATIO.text(gaps["capacity_gap"][str(capacity)])
    blocks = f"{COUNT.text(capacity)} blocks of {COUNT.text(size)} tokens"
    here = (
        f"With {blocks} ({why}) {policy} hits {RATIO.text(ratio)} of the block references; no cache hits more than "
        f"{ideal}, since {ceiling} are to content never seen before (the content ceiling)."
    )
    others = (
        f"An optimum that knows the requests to come would hit {policy_gap} more at this size (the policy gap), and a "
        f"cache without bounds another {capacity_gap} (the capacity gap)."
    )
    ideal_hits = (
        f"A cache without bounds would hit {RATIO.text(curve['ideal_token_ratio'])} of the prompt tokens. Shares of "
        f"these hits that LRU reaches, by number of blocks of {COUNT.text(size)} tokens: {reached}."
    )
    answers = _with_answers(curve)
    if not curve["ideal_hits"]:
        nothing = "No prompt begins with a block of an earlier one: no memory and no policy would hit."
        return (f"{nothing} {here}", *answers)
    return (
        f"{_more_memory(curve, capacity, policy)}{here}",
        f"{_other_policy(run, curve, capacity)}{others}",
        ideal_hits,
        *answers,
    )


def _with_answers(curve: Curve) -> tuple[str, ...]:
    """Describe whether blocks of answers are cached, as in an engine and a replay."""
    num_blocks = curve.get("num_answer_blocks", 0)
    if not num_blocks:
        return ()
    return (f"Blocks of answers are cached as well, as in an engine: {COUNT.text(num_blocks)} of all blocks.",)


def _more_memory(curve: Curve, capacity: int, policy: str) -> str:
    """Describe the gain of a policy from two and four times a capacity, in points, if known."""
    gains = [
        (gain["factor"], gain["by_policy"][policy]) for gain in curve.get("gains", ()) if gain["capacity"] == capacity
    ]
    if not gains:
        return ""
    texts = [
        f"{factor}x the memory brings {RATIO.difference(share) if share else '0 points'}" for factor, share in gains
    ]
    return f"{', '.join(texts)} of the hit ratio by block. "


def _other_policy(run: ReportRun, curve: Curve, capacity: int) -> str:
    """Describe the gain of the best other policy at the same size, if there is one."""
    best = _best_other(run, curve)
    if best is None:
        return ""
    difference = hit_ratios(curve, best)[capacity] - hit_ratios(curve, shown_policy(run, curve))[capacity]
    return f"Of the other policies {best} hits the most at this size, {_by(difference)}. "


def _by(difference: float) -> str:
    if not difference:
        return "the same share"
    return f"{RATIO.difference(abs(difference)).removeprefix('+')} {'more' if difference > 0 else 'less'}"


def _chosen_capacity(curve: Curve, replay: tuple[int, float] | None) -> tuple[int, str]:
    """Choose the capacity of the text; return it with the reason."""
    capacities = _capacities(curve)
    if replay is None:
        return capacities[len(capacities) // 2], "the middle one of the measured sizes"
    num_blocks = max(replay[0] / curve["block_size"], 1)
    nearest = min(capacities, key=lambda capacity: abs(math.log(capacity / num_blocks)))
    return nearest, f"the measured size nearest to the {COUNT.text(num_blocks)} blocks of the replay's pool"


def _table(curve: Curve) -> Table:
    gaps = curve["gaps"]

    def gap(policy: str) -> Callable[[int], str]:
        return lambda capacity: RATIO.text(gaps["policy_gap"][policy][str(capacity)])

    def ratio(policy: str) -> Callable[[int], str]:
        ratios = hit_ratios(curve, policy)
        return lambda capacity: RATIO.text(ratios[capacity])

    columns: Columns[int] = {
        "blocks": COUNT.text,
        "tokens": lambda capacity: COUNT.text(capacity * curve["block_size"]),
        **{shown_name(policy): ratio(policy) for policy in curve["policies"]},
        **{f"policy gap, {policy}": gap(policy) for policy in gaps["policy_gap"]},
        "capacity gap": lambda capacity: RATIO.text(gaps["capacity_gap"][str(capacity)]),
    }
    return table(TABLES["curve"], columns, _capacities(curve))
