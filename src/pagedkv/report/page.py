"""The page: its sections, their order, and the template that lays them out.

A report has one of two shapes: one run in full, or several side by side, with the differences of key figures to the
first run, and overlaid plots. Equal runs give equal bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.report.capacity import capacity_section, hit_ratios, replay_point, shown_policy
from pagedkv.report.documents import ReportRun, without_folders
from pagedkv.report.drawing import (
    COUNT_TICKS,
    HALF,
    LINES,
    NARROW,
    NARROW_PANELS,
    PERCENT_TICKS,
    WIDE,
    Axes,
    Figure,
    LineStyle,
    Plot,
    Section,
    Size,
    Tile,
    line,
    line_legends,
    logarithmic,
    only_axes,
    panels,
    plot,
    read_out,
)
from pagedkv.report.figures import (
    COUNT,
    KEY_FIGURES,
    METHOD,
    PLOTS,
    RATIO,
    SECTIONS,
    TABLES,
    Caption,
    KeyFigure,
    headline_of,
    headline_of_several,
    need_of,
    relative,
)
from pagedkv.report.sections import (
    TimeAxis,
    age_section,
    divided_section,
    latency_kinds,
    latency_section,
    levels,
    memory_section,
    percentile_values,
    settings_section,
    time_section,
)
from pagedkv.report.tables import PERCENTILES, Cell, Table

__all__ = ["page_template", "render_report", "require_num_runs"]


with needing("report", "a report"):
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template
TEMPLATE: Final = "report.html.j2"
LONGEST_NAME: Final = 48


def require_num_runs(num_runs: int) -> None:
    """Refuse zero runs, and more runs than can be distinguished in one plot. Raises ConfigurationError."""
    if not 1 <= num_runs <= MAX_RUNS:
        raise ConfigurationError(f"a report shows 1 to {MAX_RUNS} runs, got {num_runs}")


def render_report(runs: Sequence[ReportRun], *, version: str, command: str) -> str:
    """Write the page of one run, or of several side by side.

    Args:
        runs: the runs; all are compared with the first.
        version: version of the program that made the runs.
        command: the command line that made the report.

    Returns:
        One self-contained HTML document.

    Raises:
        ConfigurationError: see :func:`require_num_runs`.
    """
    require_num_runs(len(runs))
    runs = [replace(run, name=without_folders(run.name)) for run in runs]
    names = tuple(f"{number}. {_in_short(run.name)}" for number, run in enumerate(runs, 1))
    single = len(runs) == 1
    return page_template().render(
        need=need_of(runs[0].replay, runs[0].curve).sentence if single else "",
        title=headline_of(runs[0]) if single else headline_of_several(runs, names),
        subtitle=f"report of a replay of {runs[0].name}" if single else "report of replays",
        runs=() if single else tuple(run.name for run in runs),
        tiles=_tiles(runs[0]) if single else (),
        warnings=_warnings(runs, names),
        sections=_sections_of_one(runs[0]) if single else _sections_of_several(runs, names),
        glossary=tuple(figure.caption for figure in KEY_FIGURES),
        method=METHOD,
        version=version,
        command=without_folders(command),
    )


def page_template() -> Template:
    """Return the template of every page."""
    environment = Environment(
        loader=PackageLoader("pagedkv.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE)


def _warnings(runs: Sequence[ReportRun], names: Sequence[str]) -> tuple[str, ...]:
    """List warnings about the figures, with the run's name if there are several."""
    return tuple(
        without_folders(f"{name}: {warning}" if len(runs) > 1 else f"{warning[:1].upper()}{warning[1:]}")
        for run, name in zip(runs, names, strict=True)
        for warning in run.replay.get("warnings", ())
    )


def _in_short(name: str) -> str:
    """Cut the middle out of a long name, for legends and columns; the list at the top has the whole name."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]} ... {name[-LONGEST_NAME // 4 :]}"


def _tiles(run: ReportRun) -> tuple[Tile, ...]:
    optional = {"peak_live_nbytes", "mean_saving"}
    tiles = []
    for figure in KEY_FIGURES:
        value = figure.value(run)
        if figure.in_tiles and not (value is None and figure.key in optional):
            caption = figure.caption
            is_unknown = value is None and figure.key.endswith("hit_ratio")
            text = "unknown" if is_unknown else figure.unit.text(value)
            tiles.append(Tile(caption.title, text, caption.sentence))
    return tuple(tiles)


def _sections_of_one(run: ReportRun) -> tuple[Section, ...]:
    divided = divided_section(run.replay)
    return (
        time_section(run),
        *(() if divided is None else (divided,)),
        capacity_section(run),
        memory_section(run),
        latency_section(run),
        age_section(run),
        settings_section([run], [run.name]),
    )


def _sections_of_several(runs: Sequence[ReportRun], names: Sequence[str]) -> tuple[Section, ...]:
    return (figures_section(runs, names), overlaid_section(runs, names), settings_section(runs, names))


MAX_RUNS: Final = len(LINES)
"""Most runs that can be distinguished in a plot."""
OWN_MARK_SIZE: Final = 11
MOST_SHOWN: Final = 512
"""Approximate number of times at which the page shows values, since runs have different intervals."""
FIRST_OF_LINE: Final = PERCENTILES.index("p50")
"""The mean is not a percentile, so it has no place in their order."""


def figures_section(runs: Sequence[ReportRun], names: Sequence[str]) -> Section:
    """List the key figures of all runs that have them."""
    rows = []
    for figure in KEY_FIGURES:
        values = [figure.value(run) for run in runs]
        if any(value is not None for value in values):
            rows.append((Cell(figure.caption.title), *_cells(figure, values)))
    same_trace = len({run.replay["trace"] for run in runs}) == 1
    return Section(
        "figures",
        SECTIONS["figures"],
        () if same_trace else ("The runs are of different traces; better and worse do not take this into account.",),
        tables=(Table(TABLES["figures"], ("figure", *names), tuple(rows)),),
    )


def _cells(figure: KeyFigure, values: Sequence[float | None]) -> list[Cell]:
    first = values[0]
    return [Cell(figure.unit.text(first)), *(_compared(figure, first, value) for value in values[1:])]


def _compared(figure: KeyFigure, first: float | None, value: float | None) -> Cell:
    """Return a value with its difference to the first; a difference below the shown digits is not rated."""
    text = figure.unit.text(value)
    if value is None or first is None:
        return Cell(text)
    if text == figure.unit.text(first):
        return Cell(text, "the same" if value == first else "nearly the same")
    difference = value - first
    tone = figure.verdict(difference)
    parts = (figure.unit.difference(difference), relative(difference, first), tone)
    return Cell(text, ", ".join(part for part in parts if part), tone)


def overlaid_section(runs: Sequence[ReportRun], names: Sequence[str]) -> Section:
    """Draw the runs over each other; plots without data of any run are left out."""
    sentences = [
        f"{name} is not in the capacity plot. {run.without_curve}"
        for name, run in zip(names, runs, strict=True)
        if not _has_capacity(run)
    ]
    if len({str(run.replay["config"].get("block_size")) for run in runs}) > 1:
        sentences.append("The runs differ in block size, so equal numbers of blocks are not equal numbers of tokens.")
    plots = [_plot(overlay, runs, names) for overlay in OVERLAYS if any(map(overlay.has_data, runs))]
    return Section("overlaid", SECTIONS["overlaid"], tuple(sentences), tuple(plots))


@dataclass(frozen=True, slots=True)
class _StyledRun:
    run: ReportRun
    name: str
    line: LineStyle


@dataclass(frozen=True, slots=True)
class _Overlay:
    """One plot of several runs: ``paint`` draws those for which ``has_data`` is true, each in its own style.

    ``marked``: whether lines have markers; ``has_panels``: whether it has several axes.
    """

    key: str
    size: Size
    label: str
    has_data: Callable[[ReportRun], bool]
    paint: Callable[[Figure, Sequence[_StyledRun]], None]
    marked: bool = True
    has_panels: bool = False


def _plot(overlay: _Overlay, runs: Sequence[ReportRun], names: Sequence[str]) -> Plot:
    styled = [
        _StyledRun(run, name, line)
        for run, name, line in zip(runs, names, LINES, strict=False)
        if overlay.has_data(run)
    ]
    legend = line_legends(overlay.key, [(each.name, each.line) for each in styled], marked=overlay.marked)
    return plot(
        Caption(PLOTS[overlay.key].title, _sentence(overlay.key, styled)),
        overlay.size,
        overlay.label,
        lambda figure: overlay.paint(figure, styled),
        legend,
        key=overlay.key,
        narrow=NARROW_PANELS if overlay.has_panels else NARROW,
    )


def _sentence(key: str, styled: Sequence[_StyledRun]) -> str:
    """Describe a plot; capacities have lines only for runs with a curve."""
    if key == "compared_capacity" and not any(each.run.curve for each in styled):
        return PLOTS["compared_marks"].sentence
    return PLOTS[key].sentence


def _has_capacity(run: ReportRun) -> bool:
    return run.curve is not None or replay_point(run) is not None


def _paint_capacity(figure: Figure, styled: Sequence[_StyledRun]) -> None:
    axes = only_axes(figure, "capacity in tokens", "hit ratio by block")
    for each in styled:
        curve, point = each.run.curve, replay_point(each.run)
        if curve is not None:
            ratios = hit_ratios(curve, shown_policy(each.run, curve))
            tokens = [capacity * curve["block_size"] for capacity in ratios]
            line(axes, tokens, list(ratios.values()), each.line)
        if point is not None:
            line(axes, [point[0]], [point[1]], each.line, OWN_MARK_SIZE)
    logarithmic(axes, "x")
    axes.yaxis.set_major_formatter(PERCENT_TICKS)
    axes.set_ylim(bottom=0)
    _read_out(axes, [_ratios_by_tokens(each.run) for each in styled], "tokens")


def _ratios_by_tokens(run: ReportRun) -> dict[int, float]:
    """Hit ratio of the shown policy by capacity in tokens, and that of the replay at its own."""
    point = replay_point(run)
    own = {} if point is None else {point[0]: point[1]}
    if run.curve is None:
        return own
    ratios = hit_ratios(run.curve, shown_policy(run, run.curve))
    return own | {capacity * run.curve["block_size"]: ratio for capacity, ratio in ratios.items()}


def _read_out(axes: Axes, series: Sequence[Mapping[int, float]], unit: str) -> None:
    """Add the shares that the page shows at the pointer: of each run at all places of any run."""
    places = sorted({place for each in series for place in each})
    headings = [f"{place:,} {unit}" for place in places]
    read_out(axes, places, headings, [[RATIO.text(each.get(place)) for place in places] for each in series])


def _has_waste(run: ReportRun) -> bool:
    return any(share is not None for share in run.replay["waste"]["by_block_size"].values())


def _paint_waste(figure: Figure, styled: Sequence[_StyledRun]) -> None:
    axes = only_axes(figure, "tokens a block", "slots without a token")
    series: list[Mapping[int, float]] = []
    for each in styled:
        by_size = each.run.replay["waste"]["by_block_size"]
        known = {int(size): share for size, share in by_size.items() if share is not None}
        series.append(known)
        line(axes, sorted(known), [known[size] for size in sorted(known)], each.line)
    sizes = {size for known in series for size in known}
    logarithmic(axes, "x")
    axes.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(PERCENT_TICKS)
    axes.set_ylim(bottom=0)
    _read_out(axes, series, "tokens a block")


def _has_timeline(run: ReportRun) -> bool:
    return bool(run.replay["timeline"]["time_s"] and run.replay["timeline"]["pools"])


def _paint_live(figure: Figure, styled: Sequence[_StyledRun]) -> None:
    time = TimeAxis(max(each.run.replay["timeline"]["time_s"][-1] for each in styled))
    axes = only_axes(figure, time.label, "live blocks")
    for each in styled:
        timeline = each.run.replay["timeline"]
        live = np.sum([levels(pool["num_live"]) for pool in timeline["pools"].values()], axis=0)
        axes.plot(time.edges(timeline), live, color=each.line.colour, linestyle=each.line.dashes)
    axes.yaxis.set_major_formatter(COUNT_TICKS)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    places = np.unique(np.concatenate([time.centres(each.run.replay["timeline"]) for each in styled]))
    places = places[:: max(1, len(places) // MOST_SHOWN)]
    headings = [f"{place:,.3g} {time.unit}" for place in places]
    read_out(axes, places.tolist(), headings, [_live_at(each.run, time, places) for each in styled])


def _live_at(run: ReportRun, time: TimeAxis, places: NDArray[np.float64]) -> list[str]:
    """Live blocks of all pools at given times; none outside the run's own times."""
    timeline = run.replay["timeline"]
    live = np.sum([pool["num_live"] for pool in timeline["pools"].values()], axis=0)
    edges = time.edges(timeline)
    where = np.searchsorted(edges[1::2], places)
    return [
        COUNT.text(float(live[interval]) if interval < len(live) and edges[2 * interval] <= place else None)
        for interval, place in zip(where.tolist(), places.tolist(), strict=True)
    ]


def _has_latency(run: ReportRun) -> bool:
    return run.replay["latency"]["queueing_s"]["mean"] is not None


def _paint_latency(figure: Figure, styled: Sequence[_StyledRun]) -> None:
    runs_kinds = [latency_kinds(each.run.replay["latency"]) for each in styled]
    names = list(runs_kinds[0])
    for axes, name in zip(panels(figure, len(names)), names, strict=True):
        axes.set_title(name)
        axes.set_ylabel("seconds")
        seen_s: list[float] = []
        for each, kinds in zip(styled, runs_kinds, strict=True):
            values_s = percentile_values(kinds[name])[FIRST_OF_LINE:]
            known = [(x, s) for x, s in enumerate(values_s) if s is not None]
            seen_s += [s for _, s in known]
            line(axes, [x for x, _ in known], [s for _, s in known], each.line)
        axes.set_xticks(range(len(PERCENTILES[FIRST_OF_LINE:])), PERCENTILES[FIRST_OF_LINE:])
        axes.yaxis.set_major_formatter(COUNT_TICKS)
        if seen_s and min(seen_s) > 0:
            logarithmic(axes, "y")


OVERLAYS: Final = (
    _Overlay(
        "compared_capacity", HALF, "Lines of the hit ratio over capacity, one a run", _has_capacity, _paint_capacity
    ),
    _Overlay("compared_waste", HALF, "Lines of the waste over the block size, one a run", _has_waste, _paint_waste),
    _Overlay(
        "compared_live", WIDE, "Lines of the live blocks over time, one a run", _has_timeline, _paint_live, marked=False
    ),
    _Overlay(
        "compared_latency",
        WIDE,
        "Lines of the percentiles of three latencies, one a run",
        _has_latency,
        _paint_latency,
        has_panels=True,
    ),
)
"""In the order in which they are shown."""
