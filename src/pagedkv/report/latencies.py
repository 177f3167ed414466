"""Latency and preemption: the durations of requests, and the cost of running out of blocks."""

from typing import Final

from pagedkv.report.captions import PLOTS, SECTIONS, TABLES
from pagedkv.report.documents import Latency, Percentiles, Preemptions, ReportRun, seconds_source
from pagedkv.report.drawing import COUNT_TICKS, FILLS, NARROW_PANELS, WIDE, Figure, draw_both, panels
from pagedkv.report.elements import Cell, Plot, Section, Table
from pagedkv.report.number_text import COUNT, SECONDS

__all__ = ["PERCENTILES", "latency_kinds", "latency_section", "percentile_values"]

PERCENTILES: Final = ("mean", "p50", "p90", "p99", "max")
ROOM_FOR_LABELS: Final = 0.3
UNNAMED: Final = "that the configuration lists"


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
        (_bars(drawn),) if whole else (),
        (_latency_table(latency), _preemption_table(run.replay["preemptions"])),
    )


def _bars(drawn: dict[str, list[float]]) -> Plot:
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

    caption = PLOTS["latency"]
    label = "Bars of mean, median, 90th and 99th percentile and maximum of three latencies"
    return Plot(caption.title, caption.sentence, *draw_both("latency", WIDE, label, paint, NARROW_PANELS), wide=True)


def _latency_table(latency: Latency) -> Table:
    return Table(
        TABLES["latency"],
        ("from arrival to", *PERCENTILES),
        tuple(
            (Cell(event), *(Cell(SECONDS.text(value)) for value in percentile_values(percentiles)))
            for event, percentiles in (
                ("first admission (queueing)", latency["queueing_s"]),
                ("first token", latency["first_token_s"]),
                ("end of the request", latency["request_s"]),
            )
        ),
    )


def _preemption_table(preemptions: Preemptions) -> Table:
    rows = (
        ("preemptions by recompute", preemptions["num_recompute"]),
        ("preemptions by swap", preemptions["num_swap"]),
        ("tokens computed again", preemptions["num_recomputed_tokens"]),
        ("blocks swapped out", preemptions["num_swapped_out_blocks"]),
        ("blocks swapped in", preemptions["num_swapped_in_blocks"]),
    )
    return Table(
        TABLES["preemptions"], ("what", "number"), tuple((Cell(what), Cell(COUNT.text(n))) for what, n in rows)
    )
