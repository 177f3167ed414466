"""Capacity: what a cache of each size would hit, and where the misses come from."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

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
    draw_both,
    fill_legend,
    line,
    line_legend,
    logarithmic,
    only_axes,
    read_out,
)
from pagedkv.report.elements import Cell, Plot, Section, Table
from pagedkv.report.explanations import PLOTS, SECTIONS, TABLES
from pagedkv.report.number_text import COUNT, RATIO

__all__ = ["capacity_section", "hit_ratios", "replay_point", "shown_policy"]

OPTIMAL: Final = "optimal"
IDEAL_LINE: Final = LineStyle(INK, ":", "")
RING: Final = LineStyle(INK, "", "o")
REPLAY_LINE: Final = LineStyle(INK, "", "X")
RING_SIZE: Final = 9
BESIDE_RING: Final = (4, -15)
ABOVE_RING: Final = (-12, 8)
"""Of the last ring, all ideal hits: the one before is often so near that their labels would overlap."""
ROOM_ABOVE_IDEAL: Final = 1.12


def capacity_section(run: ReportRun) -> Section:
    """Draw the capacity curve and its gaps, or say why there is none."""
    curve = run.curve
    if curve is None or not curve["num_block_refs"]:
        return Section("capacity", SECTIONS["capacity"], (run.without_curve,))
    plots = [_curve_plot(curve, replay_point(run))]
    if len(_capacities(curve)) > 1:
        plots.append(_gap_plot(curve, shown_policy(run, curve)))
    return Section("capacity", SECTIONS["capacity"], _sentences(run, curve), tuple(plots), (_table(curve),))


def shown_policy(run: ReportRun, curve: Curve) -> str:
    """Choose the policy whose gaps are shown: the run's own, if it was measured, else the first."""
    own = str(run.replay["config"].get("policy"))
    return own if own in curve["gaps"]["policy_gap"] else next(iter(curve["gaps"]["policy_gap"]))


def shown_name(policy: str) -> str:
    """Name a policy; the optimum is none that could run."""
    return "optimal, offline" if policy == OPTIMAL else policy


def hit_ratios(curve: Curve, policy: str) -> dict[int, float]:
    """Hits of all references by capacity in blocks, in ascending order."""
    hits = {int(capacity): num_hits for capacity, num_hits in curve["policies"][policy].items()}
    return {capacity: hits[capacity] / curve["num_block_refs"] for capacity in sorted(hits)}


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


def _curve_plot(curve: Curve, replay: tuple[int, float] | None) -> Plot:
    lines = dict(zip(curve["policies"], LINES, strict=False))
    legend = [
        line_legend(f"curve-legend-{number}", style, shown_name(policy))
        for number, (policy, style) in enumerate(lines.items())
    ]
    legend.append(line_legend("curve-legend-ideal", IDEAL_LINE, f"ideal, {RATIO.text(curve['ideal_block_ratio'])}"))
    if replay is not None:
        legend.append(line_legend("curve-legend-replay", REPLAY_LINE, "this replay"))

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, f"blocks of {COUNT.text(curve['block_size'])} tokens", "hit ratio by block")
        for policy, style in lines.items():
            ratios = hit_ratios(curve, policy)
            line(axes, list(ratios), list(ratios.values()), style)
        axes.axhline(curve["ideal_block_ratio"], color=IDEAL_LINE.colour, linestyle=IDEAL_LINE.dashes)
        for share, capacity in curve["capacity_for"].items():
            height = float(share) * curve["ideal_block_ratio"]
            place = ABOVE_RING if float(share) == 1 else BESIDE_RING
            line(axes, [capacity], [height], RING, RING_SIZE)
            axes.annotate(f"{float(share):.0%}", (capacity, height), place, textcoords="offset points")
        if replay is not None:
            num_tokens, ratio = replay
            line(axes, [num_tokens / curve["block_size"]], [ratio], REPLAY_LINE, RING_SIZE)
        logarithmic(axes, "x")
        axes.yaxis.set_major_formatter(PERCENT_TICKS)
        axes.set_ylim(0, ROOM_ABOVE_IDEAL * max(curve["ideal_block_ratio"], 0 if replay is None else replay[1]) or 1)
        _read_out(axes, curve, [hit_ratios(curve, policy) for policy in lines])

    explanation = PLOTS["curve"]
    label = f"Lines of the hit ratio over the capacity in blocks: {', '.join(lines)}, and the ideal"
    return Plot(explanation.title, explanation.sentence, *draw_both("curve", HALF, label, paint), tuple(legend))


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

    explanation = PLOTS["gaps"]
    label = f"Stacked areas over the capacity in blocks: {', '.join(names)}"
    return Plot(
        explanation.title,
        explanation.sentence,
        *draw_both("gaps", HALF, label, paint),
        tuple(
            fill_legend(f"gaps-legend-{number}", fill, name)
            for number, (fill, name) in enumerate(zip(FILLS, names, strict=True))
        ),
    )


def _read_out(axes: Axes, curve: Curve, series: Sequence[Mapping[int, float]]) -> None:
    """Let the page tell shares by capacity in blocks, in the order of the legend."""
    capacities = _capacities(curve)
    headings = [f"{COUNT.text(capacity)} blocks" for capacity in capacities]
    read_out(
        axes, capacities, headings, [[RATIO.text(each.get(capacity)) for capacity in capacities] for each in series]
    )


def _sentences(run: ReportRun, curve: Curve) -> tuple[str, ...]:
    policy = shown_policy(run, curve)
    capacity, why = _chosen_capacity(curve, replay_point(run))
    gaps = curve["gaps"]
    ratio = hit_ratios(curve, policy)[capacity]
    reached = ", ".join(
        f"{float(share):.0%} with {COUNT.text(blocks)}" for share, blocks in curve["capacity_for"].items()
    )
    gap_sentence = (
        f"With {COUNT.text(capacity)} blocks ({why}), {policy} hits {RATIO.text(ratio)} of the block references. "
        f"{_more_memory(curve, capacity)}"
        f"Policy gap: the offline optimum, which knows the requests to come, hits "
        f"{RATIO.text(gaps['policy_gap'][policy][str(capacity)])} more at this size. Capacity gap: beyond it, a cache "
        f"without bounds hits another {RATIO.text(gaps['capacity_gap'][str(capacity)])}. "
        f"Content ceiling: {RATIO.text(gaps['content_ceiling'])} no cache can hit."
    )
    reached_sentence = (
        f"A cache without bounds would hit {RATIO.text(curve['ideal_block_ratio'])} of the block references and "
        f"{RATIO.text(curve['ideal_token_ratio'])} of the prompt tokens. Of these hits LRU has, in blocks of "
        f"{COUNT.text(curve['block_size'])} tokens: {reached}."
    )
    return gap_sentence, reached_sentence


def _more_memory(curve: Curve, capacity: int) -> str:
    """Say what two and four times a capacity bring with each policy that can run, in points; where that is known."""
    parts = [
        f"{gain['factor']}x the memory brings "
        + ", ".join(
            f"{policy} {RATIO.difference(share) if share else '0 points'}"
            for policy, share in gain["by_policy"].items()
            if policy != OPTIMAL
        )
        for gain in curve.get("gains", ())
        if gain["capacity"] == capacity
    ]
    return f"{'; '.join(parts)}. " if parts else ""


def _chosen_capacity(curve: Curve, replay: tuple[int, float] | None) -> tuple[int, str]:
    """Choose the capacity that the text speaks of, and say why."""
    capacities = _capacities(curve)
    if replay is None:
        return capacities[len(capacities) // 2], "in the middle of those measured"
    num_blocks = max(replay[0] / curve["block_size"], 1)
    nearest = min(capacities, key=lambda capacity: abs(math.log(capacity / num_blocks)))
    return nearest, f"measured nearest to the {COUNT.text(num_blocks)} that the replay's pool amounts to"


def _table(curve: Curve) -> Table:
    policies, online = list(curve["policies"]), list(curve["gaps"]["policy_gap"])
    ratios = {policy: hit_ratios(curve, policy) for policy in policies}
    return Table(
        TABLES["curve"],
        (
            "blocks",
            "tokens",
            *map(shown_name, policies),
            *(f"policy gap, {policy}" for policy in online),
            "capacity gap",
        ),
        tuple(
            (
                Cell(COUNT.text(capacity)),
                Cell(COUNT.text(capacity * curve["block_size"])),
                *(Cell(RATIO.text(ratios[policy][capacity])) for policy in policies),
                *(Cell(RATIO.text(curve["gaps"]["policy_gap"][policy][str(capacity)])) for policy in online),
                Cell(RATIO.text(curve["gaps"]["capacity_gap"][str(capacity)])),
            )
            for capacity in _capacities(curve)
        ),
    )
