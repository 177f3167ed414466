"""Runs side by side: differences to the first run, and which way is better, in words."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from pagedkv.report import ReportRun
from pagedkv.report.page import figures_section, overlaid_section
from pagedkv.report.tables import Cell
from tests.report.page_reader import Page
from tests.report.rendering import words_of
from tests.report.sample_runs import empty_run, sample_run

pytestmark = pytest.mark.plain_only

WARNING = "The runs differ in block size, so equal numbers of blocks are not equal numbers of tokens."
LONG_NAME = "beginning-" + "x" * 100 + "-end"


@cache
def page() -> Page:
    """Two runs with figures that are easy to compare."""
    first = sample_run(LONG_NAME, num_blocks=1000, num_intervals=3)
    second = sample_run("second", num_blocks=2000, num_intervals=3, with_curve=False)
    first.replay["waste"]["mean"], second.replay["waste"]["mean"] = 0.02, 0.03
    first.replay["hits"]["token_hit_ratio"], second.replay["hits"]["token_hit_ratio"] = 0.2, 0.25
    first.replay["latency"]["first_token_s"]["p99"], second.replay["latency"]["first_token_s"]["p99"] = 4.0, 3.0
    first.replay["preemptions"]["num_recompute"], second.replay["preemptions"]["num_recompute"] = 0, 7
    first.replay["pools"]["full"]["num_live"]["peak"] = 1000
    second.replay["pools"]["full"]["num_live"]["peak"] = 900
    return words_of(first, second)


def figure(title: str, runs: Sequence[ReportRun]) -> list[str]:
    """A figure's values in the table of key figures; none if it has no row."""
    (table,) = figures_section(runs, [run.name for run in runs]).tables
    return [cell.text for row in table.rows if row[0].text == title for cell in row[1:]]


def test_differences_are_to_the_first_run_and_judged() -> None:
    assert page().row("Waste") == ["2.00%", "3.00% +1.00 points, +50.0%, worse"]
    assert page().row("Hit ratio by token") == ["20.00%", "25.00% +5.00 points, +25.0%, better"]
    assert page().row("First token, p99") == ["4.00 s", "3.00 s -1.00 s, -25.0%, better"]
    assert page().row("Preemptions") == ["0", "7 +7, worse"]  # of none there is no share
    assert page().row("Peak live blocks") == ["1,000", "900 -100, -10.0%"]  # neither better nor worse
    assert page().row("Requests") == ["12,031", "12,031 the same"]


def test_a_difference_that_the_digits_do_not_show_is_not_judged() -> None:
    runs = [sample_run(num_intervals=1), sample_run(num_intervals=1)]
    runs[0].replay["waste"]["mean"], runs[1].replay["waste"]["mean"] = 0.02, 0.020001
    (table,) = figures_section(runs, ["1.", "2."]).tables
    (waste,) = (row for row in table.rows if row[0].text == "Waste")
    assert waste[2] == Cell("2.00%", "nearly the same")


def test_every_colour_of_a_verdict_stands_beside_its_word() -> None:
    for tone in ("better", "worse"):
        assert page().all("td", class_=tone)
        assert all(text.endswith(tone) for text in page().texts("td", class_=tone))


def test_a_figure_that_one_run_lacks_is_not_compared() -> None:
    run = sample_run(num_intervals=3)
    assert figure("Waste", [run, empty_run()]) == ["0.03%", "none"]
    assert figure("Waste", [empty_run(), run]) == ["none", "0.03%"]


def test_figures_that_no_run_has_are_left_out() -> None:
    runs = [sample_run(seed=seed, num_intervals=3) for seed in range(2)]
    assert figure("Sharing saving", runs) == []
    runs[1].replay["sharing"]["mean_saving"] = 0.5
    assert figure("Sharing saving", runs) == ["none", "50.00%"]


def test_settings_that_differ_are_marked() -> None:
    assert page().row("num_blocks differs") == ["1,000", "2,000"]
    assert page().row("block_size") == ["16", "16"]


def test_overlaid_plots_have_every_run_in_their_legends() -> None:
    assert page().texts("h3")[:4] == [
        "Hit ratio over capacity",
        "Waste by block size",
        "Live blocks over time",
        "Latency percentiles",
    ]
    legends = page().texts("ul", class_="legend")
    assert len(legends) == 4
    for legend in legends:
        assert "1. beginning-" in legend
        assert "2. second" in legend


def test_a_run_that_a_plot_lacks_is_named() -> None:
    without = replace(empty_run(), without_curve="It has no block ids.")
    section = overlaid_section([sample_run(num_intervals=1), without], ["1. a", "2. lengths.csv"])
    assert section.sentences == ("2. lengths.csv is not in the capacity plot. It has no block ids.",)
    assert all([entry.label for entry in plot.legend] == ["1. a"] for plot in section.plots)


def test_runs_of_different_block_sizes_come_with_a_warning() -> None:
    assert WARNING not in page().texts("p")
    runs = [empty_run(), empty_run()]
    runs[1].replay["config"]["block_size"] = 32
    assert WARNING in overlaid_section(runs, ["1.", "2."]).sentences


def test_runs_of_different_traces_come_with_a_warning() -> None:
    same, other = ([empty_run("a"), empty_run(name)] for name in ("a", "b"))
    assert figures_section(same, ["1.", "2."]).sentences == ()
    (sentence,) = figures_section(other, ["1.", "2."]).sentences
    assert sentence.startswith("The runs are of different traces")


def test_long_names_are_cut_in_the_middle_except_at_the_top() -> None:
    assert page().texts("li")[0] == LONG_NAME
    heading = page().texts("th", scope="col")[1]
    assert heading.startswith("1. beginning-")
    assert heading.endswith("-end")
    assert len(heading) < 50
