"""Blocks and requests over time. An interval is drawn as a level, from its beginning to its end."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedkv.report.captions import PLOTS, SECTIONS
from pagedkv.report.documents import ReportRun, Timeline, has_known_content
from pagedkv.report.drawing import (
    COUNT_TICKS,
    FILLS,
    HALF,
    LINES,
    PERCENT_TICKS,
    WIDE,
    Axes,
    Figure,
    draw_both,
    fill_legend,
    line_legend,
    only_axes,
    read_out,
)
from pagedkv.report.elements import Plot, Section
from pagedkv.report.number_text import COUNT, MEAN, RATIO, Unit

__all__ = ["TimeAxis", "levels", "time_section"]

LEVELS: Final = ("num_live", "num_cached", "num_free")
LEVEL_NAMES: Final = ("live", "cached", "free")
FREE_FILL: Final = FILLS[-1]
LEVEL_FILLS: Final = (FILLS[0], FILLS[1], FREE_FILL)
UNITS_OF_TIME: Final = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
ENOUGH: Final = 5
"""Least number of units that an axis of time spans."""

Floats = NDArray[np.float64]


class TimeAxis:
    """The unit that suits the duration of some runs.

    Args:
        end_s: the last second.
    """

    def __init__(self, end_s: float) -> None:
        self.unit, self._seconds = next(
            ((unit, seconds) for unit, seconds in UNITS_OF_TIME if end_s >= ENOUGH * seconds), UNITS_OF_TIME[-1]
        )

    @property
    def label(self) -> str:
        """Label of the axis."""
        return f"virtual time, {self.unit}"

    def centres(self, timeline: Timeline) -> Floats:
        """Middle of each interval; float64."""
        edges = self.edges(timeline)
        return (edges[::2] + edges[1::2]) / 2

    def read_out(self, axes: Axes, timeline: Timeline, series: Sequence[Sequence[str]]) -> None:
        """Add the values that the page shows at the pointer: texts by interval, in the order of the legend."""
        centres = self.centres(timeline).tolist()
        read_out(axes, centres, [f"{centre:,.3g} {self.unit}" for centre in centres], series)

    def edges(self, timeline: Timeline) -> Floats:
        """Beginning and end of each interval, in turn; float64 of twice as many."""
        ends_s = np.asarray(timeline["time_s"], np.float64)
        begins_s = ends_s - np.asarray(timeline["duration_s"], np.float64)
        return np.column_stack((begins_s, ends_s)).ravel() / self._seconds


def levels(values: Sequence[float | None]) -> Floats:
    """Return each value twice, for the beginning and end of its interval; NaN where there is none."""
    return np.repeat(np.array([np.nan if value is None else value for value in values], np.float64), 2)


def time_section(run: ReportRun) -> Section:
    """Draw the timeline, or state that it is empty."""
    timeline = run.replay["timeline"]
    if not timeline["time_s"]:
        return Section("time", SECTIONS["time"], ("No time passed: no request was served.",))
    axis = TimeAxis(timeline["time_s"][-1])
    pools = [_blocks(timeline, pool, f"blocks-{number}", axis) for number, pool in enumerate(timeline["pools"])]
    hits = (_hits(timeline, axis),) if has_known_content(run.replay) else ()
    return Section("time", SECTIONS["time"], plots=(*pools, _requests(timeline, axis), *hits))


def _blocks(timeline: Timeline, pool: str, key: str, axis: TimeAxis) -> Plot:
    heights = np.array([levels(timeline["pools"][pool][level]) for level in LEVELS])

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, axis.label, "blocks")
        below = np.zeros(heights.shape[1])
        for height, fill in zip(heights, LEVEL_FILLS, strict=True):
            axes.fill_between(
                axis.edges(timeline),
                below,
                below + height,
                facecolor=fill.colour,
                alpha=fill.alpha,
                hatch=fill.hatch,
                linewidth=0,
            )
            below = below + height
        axes.yaxis.set_major_formatter(COUNT_TICKS)
        _from_zero(axes)
        axis.read_out(axes, timeline, [_texts(timeline["pools"][pool][level], COUNT) for level in LEVELS])

    caption = PLOTS["blocks"]
    several = len(timeline["pools"]) > 1
    return Plot(
        f"{caption.title}, pool {pool}" if several else caption.title,
        caption.sentence,
        *draw_both(key, WIDE, f"Stacked areas over time of live, cached and free blocks of pool {pool}", paint),
        tuple(
            fill_legend(f"{key}-legend-{name}", fill, name) for name, fill in zip(LEVEL_NAMES, LEVEL_FILLS, strict=True)
        ),
        wide=True,
    )


def _requests(timeline: Timeline, axis: TimeAxis) -> Plot:
    series = {"running": timeline["num_running"], "waiting": timeline["num_waiting"]}
    if any(timeline["num_swapped"]):
        series["swapped out"] = timeline["num_swapped"]
    styles = dict(zip(series, LINES, strict=False))

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, axis.label, "requests")
        for name, values in series.items():
            axes.plot(axis.edges(timeline), levels(values), color=styles[name].colour, linestyle=styles[name].dashes)
        axes.yaxis.set_major_formatter(COUNT_TICKS)
        _from_zero(axes)
        axis.read_out(axes, timeline, [_texts(values, MEAN) for values in series.values()])

    caption = PLOTS["requests"]
    return Plot(
        caption.title,
        caption.sentence,
        *draw_both("requests", HALF, f"Lines over time of requests {', '.join(series)}", paint),
        tuple(
            line_legend(f"requests-legend-{number}", styles[name], name, marked=False)
            for number, name in enumerate(series)
        ),
    )


def _hits(timeline: Timeline, axis: TimeAxis) -> Plot:
    def paint(figure: Figure) -> None:
        axes = only_axes(figure, axis.label, "hit ratio by token")
        centres = axis.centres(timeline).tolist()
        known = [(x, y) for x, y in zip(centres, timeline["token_hit_ratio"], strict=True) if y is not None]
        colour = LINES[0].colour
        axes.plot([x for x, _ in known], [y for _, y in known], color=colour, marker=".", markersize=3, linewidth=0.8)
        axes.yaxis.set_major_formatter(PERCENT_TICKS)
        _from_zero(axes)
        axis.read_out(axes, timeline, [_texts(timeline["token_hit_ratio"], RATIO)])

    caption = PLOTS["hits"]
    label = "Line over time of the hit ratio by token"
    return Plot(caption.title, caption.sentence, *draw_both("hits", HALF, label, paint))


def _texts(values: Sequence[float | None], unit: Unit) -> list[str]:
    return [unit.text(value) for value in values]


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
