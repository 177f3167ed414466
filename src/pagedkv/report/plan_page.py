"""The page of a plan: the decision as its headline, the reasons, figures over GiB of memory, and every point.

It is made from the document of ``pagedkv plan --json`` alone, so a page can be made again from the file. Equal
documents give equal bytes. It shows results and draws no conclusions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.report.documents import Plan, PlanPointDocument, traffic_of, without_folders
from pagedkv.report.drawing import (
    COUNT_TICKS,
    HALF,
    LINES,
    PERCENT_TICKS,
    Axes,
    Figure,
    Plot,
    Section,
    Tile,
    line,
    line_legends,
    logarithmic,
    only_axes,
    plot,
    read_out,
)
from pagedkv.report.figures import COUNT, NONE, RATIO, SECONDS, Caption, memory_text
from pagedkv.report.page import page_template
from pagedkv.report.sections import divided_section
from pagedkv.report.tables import CAUSES, LATENCIES, OUTCOMES, Cell, Table, cluster_table, point_table, points_at_best

LINES_A_PLOT: Final = 4
MOST_DRAWN: Final = 2 * LINES_A_PLOT
"""More than four lines a plot would be hard to follow."""
ROOM_ABOVE: Final = 1.08
OF_MEMORY: Final = ("gpu", "memory")
METHOD: Final = (
    "Every setting was served by the production block space and scheduler on a virtual clock, with seconds by a cost "
    "model. A load holds if nine of ten requests that arrive after a warm-up, a quarter of the arrivals' time, keep "
    "the bounds, and the queue does not grow from the third quarter to the fourth. Traffic is answers a second within "
    "the bounds (all answers, where there are none) under the highest load that holds. Two choices are compared on the "
    "same requests, with all other choices equal (by traffic only where one of the two keeps the bounds for at least "
    "1 % of the requests); intervals are those of the jackknife over eighths of the trace, 95 %. docs/planning.md has "
    "more."
)
CLUSTERS: Final = (
    "Each cluster under the highest load that it holds, else the lowest that was run. For comparison: the same "
    "requests routed in turn, and one pool with the memory of all replicas, whose hits alone are comparable. Imbalance "
    "is the largest number of tokens that a replica computes in a minute, over the mean of all replicas."
)
GLOSSARY: Final = (
    Caption("Load", "Multiple of the recorded traffic."),
    Caption("Holds", "Whether a load can be sustained: nine of ten requests are good, and the queue does not grow."),
    Caption("Answers", "Good answers a second: of the requests that arrive later, where the load holds; else in all."),
    Caption("Good", "Requests whose answer kept the bounds, of all requests."),
    Caption("TTFT", "Seconds from arrival to the first token."),
    Caption("TPOT", "Seconds for each further token, in the mean of an answer, waits after preemptions included."),
    Caption("ITL", "Seconds between two tokens, over all tokens, waits after preemptions left out."),
)


@dataclass(frozen=True, slots=True)
class _Measure:
    """A figure drawn over memory: its label on the axis, the function that reads it, and its format."""

    key: str
    title: str
    sentence: str
    label: str
    value: Callable[[Mapping[str, Any]], float | None]
    text: Callable[[float | None], str]
    is_share: bool = False


MEASURES: Final = (
    _Measure(
        "traffic",
        "Traffic",
        "Answers a second that keep the bounds, sustained where the load holds, over the memory for keys and values.",
        "answers a second",
        traffic_of,
        lambda value: NONE if value is None else f"{value:.3g}",
    ),
    _Measure(
        "hits",
        "Hit ratio",
        "Share of the prompt tokens found in the cache, over memory.",
        "hit ratio by token",
        lambda figures: figures["hit_ratio"],
        RATIO.text,
        is_share=True,
    ),
    _Measure(
        "ttft",
        "First token, p99",
        "99 % of the answers began within this number of seconds, over memory.",
        "seconds",
        lambda figures: figures["ttft_s"]["p99"],
        SECONDS.text,
    ),
    _Measure(
        "tpot",
        "Further tokens, p99",
        "99 % of the answers took at most this number of seconds for each further token, over memory.",
        "seconds a token",
        lambda figures: figures["tpot_s"]["p99"],
        SECONDS.text,
    ),
)


def render_plan(plan: Plan, *, version: str) -> str:
    """Write the page of a plan.

    Args:
        plan: the document of the plan.
        version: version of the program that made it.

    Returns:
        One HTML document that refers to nothing outside itself.
    """
    return page_template().render(
        need=plan["need"]["sentence"] if "need" in plan else "",
        title=plan["headline"],
        subtitle=f"a plan for {plan['model']} on {without_folders(plan['trace'])}; {_seconds(plan)}",
        runs=(),
        tiles=_tiles(plan),
        warnings=tuple(without_folders(f"{warning[:1].upper()}{warning[1:]}") for warning in plan["warnings"]),
        sections=tuple(filter(None, (_reasons(plan), _divided(plan), _clusters(plan), _figures(plan), _points(plan)))),
        glossary=GLOSSARY,
        method=METHOD,
        version=version,
        command=without_folders(plan["command"]),
    )


def _seconds(plan: Plan) -> str:
    return f"seconds by {plan['seconds']['cost_model_name']}, {plan['seconds']['in_short']}"


def _chosen(plan: Plan) -> PlanPointDocument:
    return next(point for point in points_at_best(plan) if point["is_chosen"])


def _key(choices: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(choices.values())


def _tiles(plan: Plan) -> tuple[Tile, ...]:
    point = _chosen(plan)
    figures = point["figures"]
    ratio = figures["hit_ratio"]
    sustained = _sustained(plan, point)
    load = f"With the setting of the headline, at {point['load']:g} times the recorded traffic."
    tiles = [
        Tile(
            "Answers a second, sustained",
            NONE if sustained is None else f"{sustained:.3g}",
            f"Good ones{_interval(plan)}. {load}",
        ),
        Tile("Hit ratio by token", "unknown" if ratio is None else RATIO.text(ratio), "Prompt tokens in the cache."),
        Tile("First token, p99", SECONDS.text(figures["ttft_s"]["p99"]), "From arrival."),
        Tile("Further tokens, p99", SECONDS.text(figures["tpot_s"]["p99"]), "Each, in the mean of an answer."),
        Tile("Memory", memory_text(point["kv_gib"]), "For keys, values and states."),
    ]
    return tuple(tiles)


def _interval(plan: Plan) -> str:
    interval = plan["interval"]
    return "" if interval is None else f", {interval['low_per_s']:.3g} to {interval['high_per_s']:.3g}"


def _sustained(plan: Plan, point: PlanPointDocument) -> float | None:
    key = _key(point["choices"])
    return next((each["sustained_per_s"] for each in plan["settings"] if _key(each["choices"]) == key), None)


def _reasons(plan: Plan) -> Section:
    reasons = tuple(f"{reason[:1].upper()}{reason[1:]}." for reason in plan["reasons"])
    return Section("why", "Why", (*reasons, f"Arrivals: {plan['arrivals']}.", _bounds(plan)), tables=_effects(plan))


def _divided(plan: Plan) -> Section | None:
    return divided_section(plan["divided"], has_bounds=any(bound is not None for bound in plan["bounds"].values()))


def _bounds(plan: Plan) -> str:
    ttft_s, tpot_s = plan["bounds"]["ttft_s"], plan["bounds"]["tpot_s"]
    parts = [
        *([] if ttft_s is None else [f"the first token within {SECONDS.text(ttft_s)}"]),
        *([] if tpot_s is None else [f"each further token within {SECONDS.text(tpot_s)} in the mean"]),
    ]
    return f"Good answers have {' and '.join(parts)}." if parts else "No bounds were given: every answer counts."


def _effects(plan: Plan) -> tuple[Table, ...]:
    rows = tuple(
        (
            Cell(f"{effect['value']} instead of {effect['reference']}"),
            Cell(_estimate(effect["traffic"], lambda value: f"{value:.2f}x")),
            Cell(_halves(effect["traffic"], lambda value: f"{value:.2f}x")),
            Cell(_estimate(effect["hit_ratio"], lambda value: f"{100 * value:+.2f}")),
            Cell(_halves(effect["hit_ratio"], lambda value: f"{100 * value:+.2f}")),
            Cell(_pairs(effect["num_serving"], effect["num_pairs"])),
        )
        for effect in plan["effects"]
    )
    columns = ("choice", "traffic (95 %)", "halves of the trace", "hit ratio, points (95 %)", "halves", "pairs")
    return (Table("Effect of each choice, in pairs", columns, rows),) if rows else ()


def _pairs(num_serving: int, num_pairs: int) -> str:
    """Describe how many pairs were compared, and how many by traffic if those are fewer."""
    of_traffic = "" if num_serving == num_pairs else f"{COUNT.text(num_serving)} of "
    return f"{of_traffic}{COUNT.text(num_pairs)}"


def _estimate(estimate: Any, written: Callable[[float], str]) -> str:  # noqa: ANN401 - of a JSON document
    if estimate is None:
        return "unknown"
    return f"{written(estimate['value'])} ({written(estimate['low'])} to {written(estimate['high'])})"


def _halves(estimate: Any, written: Callable[[float], str]) -> str:  # noqa: ANN401 - as above
    return "unknown" if estimate is None else ", ".join(map(written, estimate["halves"]))


def _figures(plan: Plan) -> Section:
    compared = points_at_best(plan)
    series = _series(compared)
    shown = dict(list(series.items())[:MOST_DRAWN])
    sentences = [
        "Each setting under the highest load that it holds; one that holds none, under the lowest load that was run."
    ]
    if len(series) > len(shown):
        sentences.append(f"Of {len(series)} combinations the first {len(shown)} are drawn; the table has all.")
    plots = tuple(
        plot for measure in MEASURES if _is_known(measure, compared) for plot in _plots(measure, list(shown.items()))
    )
    return Section("figures", "Over memory", tuple(sentences), plots)


def _plots(measure: _Measure, series: Sequence[tuple[str, list[PlanPointDocument]]]) -> Iterator[Plot]:
    """Draw a few lines in each plot, all plots to one scale."""
    values = [measure.value(point["figures"]) for _, points in series for point in points]
    highest = max((value for value in values if value is not None), default=0.0)
    num_plots = -(-len(series) // LINES_A_PLOT)
    for number in range(num_plots):
        part = dict(series[number * LINES_A_PLOT : (number + 1) * LINES_A_PLOT])
        suffix = f", {number + 1} of {num_plots}" if num_plots > 1 else ""
        yield _plot(measure, part, f"{measure.key}-{number}" if number else measure.key, suffix, highest)


def _series(points: Sequence[PlanPointDocument]) -> dict[str, list[PlanPointDocument]]:
    """Group points that differ in memory alone, by the names of all other choices."""
    series: dict[str, list[PlanPointDocument]] = {}
    for point in points:
        name = ", ".join(value for axis, value in point["choices"].items() if axis not in OF_MEMORY)
        series.setdefault(name or "all settings", []).append(point)
    return series


def _is_known(measure: _Measure, points: Sequence[PlanPointDocument]) -> bool:
    return any(measure.value(point["figures"]) is not None for point in points)


def _plot(
    measure: _Measure, series: Mapping[str, Sequence[PlanPointDocument]], key: str, suffix: str, highest: float
) -> Plot:
    def paint(figure: Figure) -> None:
        axes = only_axes(figure, "GiB for keys and values", measure.label)
        for style, points in zip(LINES, series.values(), strict=False):
            known = sorted(
                (point["kv_gib"], value) for point in points if (value := measure.value(point["figures"])) is not None
            )
            line(axes, [gib for gib, _ in known], [value for _, value in known], style)
        logarithmic(axes, "x")
        axes.yaxis.set_major_formatter(PERCENT_TICKS if measure.is_share else COUNT_TICKS)
        axes.set_ylim(0, ROOM_ABOVE * highest or 1)
        _read_out(axes, measure, list(series.values()))

    legend = line_legends(f"plan-{key}", zip(series, LINES, strict=False))
    label = f"Lines of {measure.title} over memory, one a combination of choices"
    caption = Caption(measure.title, measure.sentence)
    return plot(caption, HALF, label, paint, legend, key=f"plan-{key}", suffix=suffix)


def _read_out(axes: Axes, measure: _Measure, series: Sequence[Sequence[PlanPointDocument]]) -> None:
    """Add the values that the page shows at the pointer, by choice of memory; one choice may differ by a few blocks."""
    memory = {_memory(point): point["kv_gib"] for points in reversed(series) for point in reversed(points)}
    ascending = sorted(memory, key=lambda choice: memory[choice])
    by_choice = [{_memory(point): measure.value(point["figures"]) for point in points} for points in series]
    read_out(
        axes,
        [memory[choice] for choice in ascending],
        [memory_text(memory[choice]) for choice in ascending],
        [[measure.text(values.get(choice)) for choice in ascending] for values in by_choice],
    )


def _memory(point: PlanPointDocument) -> tuple[str, ...]:
    return tuple(value for axis, value in point["choices"].items() if axis in OF_MEMORY)


def _clusters(plan: Plan) -> Section | None:
    """Compare each setting with replicas with routing in turn and one pool; None without replicas."""
    compared = cluster_table("Compared with one pool", plan)
    return None if compared is None else Section("clusters", "Replicas", (CLUSTERS,), tables=(compared,))


def _points(plan: Plan) -> Section:
    """List all points: their figures, why each holds or does not, latencies."""
    tables = (
        point_table("Every setting under every load", OUTCOMES, plan["points"]),
        point_table("Why each holds or does not", CAUSES, plan["points"]),
        point_table("Latencies", LATENCIES, plan["points"]),
    )
    return Section("points", "All settings", tables=tables)
