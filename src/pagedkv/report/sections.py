"""The sections of a run: over time, reuse and eviction, latency and preemption, memory, settings, tenants and windows.

An interval of time is drawn as a level, from its beginning to its end. Settings in which runs differ are marked.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pagedkv.report.documents import (
    AgeHistogram,
    Latency,
    Misses,
    Percentiles,
    Pool,
    ReportRun,
    Timeline,
    Waste,
    has_known_content,
    seconds_source,
    without_folders,
)
from pagedkv.report.drawing import (
    COUNT_TICKS,
    FILLS,
    HALF,
    LINES,
    NARROW_PANELS,
    PERCENT_TICKS,
    WIDE,
    Axes,
    Figure,
    Fill,
    Plot,
    Section,
    fill_legends,
    line_legends,
    only_axes,
    panels,
    plot,
    read_out,
)
from pagedkv.report.figures import COUNT, MEAN, MISSES, NONE, PLOTS, RATIO, SECONDS, SECTIONS, TABLES, Unit, edge, rate
from pagedkv.report.tables import (
    KINDS,
    PERCENTILES,
    UNNAMED,
    Cell,
    Table,
    latency_table,
    miss_table,
    part_tables,
    pool_tables,
    preemption_table,
    tier_tables,
    waste_table,
)

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

    suffix = f", pool {pool}" if len(timeline["pools"]) > 1 else ""
    label = f"Stacked areas over time of live, cached and free blocks of pool {pool}"
    legend = fill_legends(key, zip(LEVEL_NAMES, LEVEL_FILLS, strict=True))
    return plot(PLOTS["blocks"], WIDE, label, paint, legend, key=key, suffix=suffix)


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

    label = f"Lines over time of requests {', '.join(series)}"
    legend = line_legends("requests", styles.items(), marked=False)
    return plot(PLOTS["requests"], HALF, label, paint, legend, key="requests")


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

    label = "Line over time of the hit ratio by token"
    return plot(PLOTS["hits"], HALF, label, paint, key="hits")


def _texts(values: Sequence[float | None], unit: Unit) -> list[str]:
    return [unit.text(value) for value in values]


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.margins(x=0)


UNKNOWN: Final = "The trace has lengths but no content: hits are unknown."


def age_section(run: ReportRun) -> Section:
    """Draw and list the ages in every pool; without ages, or without known content, explain why there are none."""
    if not has_known_content(run.replay):
        return Section("ages", SECTIONS["ages"], (UNKNOWN,))
    pools = run.replay["pools"]
    several = len(pools) > 1
    sentences: list[str] = []
    plots: list[Plot] = []
    tables: list[Table] = []
    for number, (name, pool) in enumerate(pools.items()):
        suffix = f", pool {name}" if several else ""
        sentences.append(_sentence(pool, suffix))
        for key, fill in (("hits_by_age", FILLS[0]), ("evictions_by_age", FILLS[1])):
            histogram = pool["hits_by_age"] if key == "hits_by_age" else pool["evictions_by_age"]
            if any(histogram["num_blocks"]):
                plots.append(_bars(f"{key}-{number}", key, histogram, fill, suffix))
        if any(pool["hits_by_age"]["num_blocks"]) or any(pool["evictions_by_age"]["num_blocks"]):
            tables.append(_table(pool, suffix))
    if "misses" in run.replay:
        sentences.append(_missed(run.replay["misses"]))
        tables.append(miss_table(run.replay, explains=True))
    tables += tier_tables(run.replay)
    return Section("ages", SECTIONS["ages"], tuple(sentences), tuple(plots), tuple(tables))


def _missed(misses: Misses) -> str:
    """Return the cause of most of the missed tokens."""
    if not misses["num_tokens"]:
        return "No prompt token was missed."
    counts = {cause: misses["by_cause"].get(cause, 0) for cause in MISSES}
    most = max(counts, key=lambda cause: counts[cause])
    ratio = counts[most] / misses["num_tokens"]
    caption = MISSES[most]
    return (
        f"{COUNT.text(misses['num_tokens'])} prompt tokens did not hit, most of them ({RATIO.text(ratio)}) for one "
        f"cause. {caption.title}: {caption.sentence[0].lower()}{caption.sentence[1:]}"
    )


def _sentence(pool: Pool, suffix: str) -> str:
    num_hits = sum(pool["hits_by_age"]["num_blocks"])
    num_evictions = pool["num_evictions"]
    hits = f"{COUNT.text(num_hits)} blocks were hit{suffix}" if num_hits else f"No block was hit{suffix}"
    if not num_evictions:
        return f"{hits}; none was evicted."
    never = pool["num_never_reused"]
    return (
        f"{hits}; {COUNT.text(num_evictions)} were evicted, {COUNT.text(never)} of them "
        f"({RATIO.text(never / num_evictions)}) without having been hit once."
    )


def _bars(key: str, kind: str, histogram: AgeHistogram, fill: Fill, suffix: str) -> Plot:
    numbers = [float(number) for number in histogram["num_blocks"]]
    edges_s = histogram["upper_edges_s"]
    labels = [f"> {edges_s[-2]:,g}" if edge_s is None and len(edges_s) > 1 else _short(edge_s) for edge_s in edges_s]

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, "age in seconds, at most", "blocks")
        axes.bar(range(len(numbers)), numbers, color=fill.colour, hatch=fill.hatch, width=0.8)
        axes.set_xticks(range(len(numbers)), labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.yaxis.set_major_formatter(COUNT_TICKS)
        axes.grid(visible=False, axis="x")
        headings = [f"{label} s" for label in labels]
        read_out(axes, range(len(numbers)), headings, [[COUNT.text(number) for number in histogram["num_blocks"]]])

    caption = PLOTS[kind]
    label = f"Bars: {caption.title.lower()}, blocks in each range of ages"
    return plot(caption, HALF, label, paint, key=key, suffix=suffix)


def _short(edge_s: float | None) -> str:
    return "any" if edge_s is None else f"{edge_s:,g}"


def _table(pool: Pool, suffix: str) -> Table:
    hits, evictions = pool["hits_by_age"], pool["evictions_by_age"]
    lower_edges_s = (None, *hits["upper_edges_s"][:-1])
    return Table(
        TABLES["ages"] + suffix,
        ("age, seconds", "hits", "evictions"),
        tuple(
            (Cell(edge(upper_s, lower_s)), Cell(COUNT.text(num_hits)), Cell(COUNT.text(num_evictions)))
            for upper_s, lower_s, num_hits, num_evictions in zip(
                hits["upper_edges_s"], lower_edges_s, hits["num_blocks"], evictions["num_blocks"], strict=True
            )
        ),
    )


ROOM_FOR_LABELS: Final = 0.3


def percentile_values(percentiles: Percentiles) -> list[float | None]:
    """Values in the order of PERCENTILES."""
    return [percentiles["mean"], percentiles["p50"], percentiles["p90"], percentiles["p99"], percentiles["max"]]


def latency_kinds(latency: Latency) -> dict[str, Percentiles]:
    """The three latencies by name."""
    return {
        "queueing": latency["queueing_s"],
        "first token": latency["first_token_s"],
        "whole request": latency["request_s"],
    }


def latency_section(run: ReportRun) -> Section:
    """Draw and list the percentiles, and list the preemptions."""
    latency = run.replay["latency"]
    drawn = {
        name: [value for value in percentile_values(percentiles) if value is not None]
        for name, percentiles in latency_kinds(latency).items()
    }
    whole = all(len(values) == len(PERCENTILES) for values in drawn.values())
    return Section(
        "latency",
        SECTIONS["latency"],
        (
            f"The seconds are those of the cost model {seconds_source(run.replay) or UNNAMED}.",
            *(() if whole else ("Some latencies have no value: no request reached that event.",)),
        ),
        (_latency_bars(drawn),) if whole else (),
        (latency_table(run.replay), preemption_table(run.replay)),
    )


def _latency_bars(drawn: dict[str, list[float]]) -> Plot:
    def paint(figure: Figure) -> None:
        for axes, (name, values) in zip(panels(figure, len(drawn)), drawn.items(), strict=True):
            axes.set_title(name)
            bars = axes.barh(range(len(values)), values, color=FILLS[0].colour, height=0.65)
            axes.bar_label(bars, [SECONDS.text(value) for value in values], padding=3)
            axes.set_yticks(range(len(values)), PERCENTILES)
            axes.invert_yaxis()
            axes.set_xlabel("seconds")
            axes.xaxis.set_major_formatter(COUNT_TICKS)
            axes.locator_params(axis="x", nbins=4)
            axes.grid(visible=False, axis="y")
            axes.margins(x=ROOM_FOR_LABELS)
            axes.set_xlim(left=0)

    label = "Bars of mean, median, 90th and 99th percentile and maximum of three latencies"
    return plot(PLOTS["latency"], WIDE, label, paint, key="latency", narrow=NARROW_PANELS)


BLOCKS_FILL: Final = FILLS[0]
RESERVED_FILL: Final = FILLS[1]
ROOM_ABOVE_BARS: Final = 0.12
LABEL_SIZE: Final = 11
"""Size in points, small enough for seven bars with two decimals each."""


def memory_section(run: ReportRun) -> Section:
    """Draw waste, and list waste and pools."""
    waste = run.replay["waste"]
    shares = {label: share for label, share in _shares(waste).items() if share is not None}
    return Section(
        "memory",
        SECTIONS["memory"],
        (_sharing_sentence(run), *(() if shares else ("No token was decoded, so there is no waste to show.",))),
        (_waste_plot(shares, len(waste["by_block_size"])),) if shares else (),
        (waste_table(run.replay), *pool_tables(run.replay)),
    )


def _sharing_sentence(run: ReportRun) -> str:
    sharing = run.replay["sharing"]
    if sharing["mean_saving"] is None:
        return "No request had more than one sequence, so none shared blocks with a sibling."
    return (
        f"Sequences of one request shared blocks: this saved {RATIO.text(sharing['mean_saving'])} of the blocks they "
        f"would have had without sharing, over {COUNT.text(sharing['num_decode_steps'])} decode steps."
    )


def _shares(waste: Waste) -> dict[str, float | None]:
    """Waste of each scheme, blocks first, then the contiguous reservations."""
    contiguous = waste["contiguous"]
    maximum = "maximum" if waste["max_length"] is None else f"maximum\n{COUNT.text(waste['max_length'])}"
    return {
        **{f"{int(size):,}": share for size, share in waste["by_block_size"].items()},
        "exact\nlength": contiguous["exact"],
        "power\nof two": contiguous["power_of_two"],
        maximum: contiguous["maximum"],
    }


def _waste_plot(shares: dict[str, float], num_block_sizes: int) -> Plot:
    """Draw blocks and reservations on separate scales; on that of reservations all block sizes would look alike."""
    named = list(shares.items())
    parts = [
        (dict(named[:num_block_sizes]), BLOCKS_FILL, "tokens a block"),
        (dict(named[num_block_sizes:]), RESERVED_FILL, "length reserved in one piece"),
    ]
    drawn = [part for part in parts if part[0]]

    def paint(figure: Figure) -> None:
        for axes, (bars, fill, label) in zip(panels(figure, len(drawn)), drawn, strict=True):
            _draw_bars(axes, bars, fill, label)

    label = "Bars of the waste of each block size and of each reservation in one piece"
    legend = fill_legends("waste", [("blocks", BLOCKS_FILL), ("reserved in one piece", RESERVED_FILL)])
    return plot(PLOTS["waste"], WIDE, label, paint, legend, key="waste", narrow=NARROW_PANELS)


def _draw_bars(axes: Axes, shares: dict[str, float], fill: Fill, label: str) -> None:
    places = range(len(shares))
    bars = axes.bar(places, list(shares.values()), color=fill.colour, hatch=fill.hatch, width=0.7)
    axes.bar_label(bars, [RATIO.text(share) for share in shares.values()], padding=2, fontsize=LABEL_SIZE)
    axes.set_xticks(places, list(shares))
    axes.set_xlabel(label)
    axes.set_ylabel("slots without a token")
    axes.yaxis.set_major_formatter(PERCENT_TICKS)
    axes.grid(visible=False, axis="x")
    axes.margins(y=ROOM_ABOVE_BARS)


DIFFERS: Final = "differs"


def settings_section(runs: Sequence[ReportRun], names: Sequence[str]) -> Section:
    """List every setting of every run, marking those that differ, and the command lines."""
    settings = [
        _flattened(
            {
                "trace": run.replay["trace"],
                "read as": run.replay.get("read_as") or None,
                **run.replay["config"],
                "source of the seconds": seconds_source(run.replay),
            }
        )
        for run in runs
    ]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    return Section(
        "settings",
        SECTIONS["settings"],
        tables=(
            Table(
                TABLES["settings"],
                ("setting", *(names if len(runs) > 1 else ("value",))),
                tuple(_setting_row(key, [of_run.get(key, NONE) for of_run in settings]) for key in keys),
            ),
        ),
        lines=tuple(
            (f"Command line of {name}" if len(runs) > 1 else "Command line", without_folders(run.replay["command"]))
            for name, run in zip(names, runs, strict=True)
        ),
    )


def _setting_row(key: str, values: Sequence[str]) -> tuple[Cell, ...]:
    note = DIFFERS if len(set(values)) > 1 else ""
    return (Cell(key, note), *(Cell(value) for value in values))


def _flattened(settings: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten settings; nested names are joined by dots."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = _text(value)
    return flat


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.12g}"
    return NONE if value is None else without_folders(str(value))


MOST_ROWS: Final = 100


def divided_section(parts: Mapping[str, Any], *, has_bounds: bool = False) -> Section | None:
    """Lay out a run by its parts; None if it was not divided.

    Args:
        parts: by_tenant, by_window, busiest_window and quietest_window, as far as they exist.
        has_bounds: whether there are bounds, so that not every answer is good.
    """
    tables = tuple(part_tables(parts, MOST_ROWS, f", the {MOST_ROWS} largest of {{}}", has_bounds=has_bounds))
    if not tables:
        return None
    title = " and ".join(title for kind, (_, title) in KINDS.items() if parts.get(kind)).replace("and By", "and by")
    return Section("divided", title, tuple(_sentences(parts)), tables=tables)


def _sentences(parts: Mapping[str, Any]) -> Iterator[str]:
    yield "All requests were served together; a request counts for the window that it arrived in."
    names = {each["name"]: each for each in parts.get("by_window", ())}
    busiest, quietest = (names.get(parts.get(f"{which}_window")) for which in ("busiest", "quietest"))
    if busiest is not None and quietest is not None:
        yield f"The busiest window is {_described(busiest)}, the quietest {_described(quietest)}."


def _described(window: Mapping[str, Any]) -> str:
    seconds = window["ttft_s"]["p99"]
    hits = "" if window["hit_ratio"] is None else f", {window['hit_ratio']:.1%} of the prompt tokens hit"
    began = "" if seconds is None else f", 99% of its answers began within {SECONDS.text(seconds)}"
    return f"{window['name']} ({rate(window['offered_tokens_per_s'])} tokens a second requested{hits}{began})"
