"""Runs side by side: differences to the first run, and which way is better, in words."""

from dataclasses import replace

from tests.report.rendering import rendered
from tests.report.sample_runs import empty_run, sample_run


def test_differences_are_to_the_first_run_and_judged() -> None:
    first, second = sample_run("first", num_intervals=3), sample_run("second", num_intervals=3)
    first.replay["waste"]["mean"], second.replay["waste"]["mean"] = 0.02, 0.03
    first.replay["hits"]["token_hit_ratio"], second.replay["hits"]["token_hit_ratio"] = 0.2, 0.25
    first.replay["latency"]["first_token_s"]["p99"], second.replay["latency"]["first_token_s"]["p99"] = 4.0, 3.0
    first.replay["preemptions"]["num_recompute"], second.replay["preemptions"]["num_recompute"] = 0, 7
    first.replay["pools"]["full"]["num_live"]["peak"] = 1000
    second.replay["pools"]["full"]["num_live"]["peak"] = 900
    page = rendered(first, second)
    assert page.row("Waste") == ["2.00%", "3.00% +1.00 points, +50.0%, worse"]
    assert page.row("Hit ratio by token") == ["20.00%", "25.00% +5.00 points, +25.0%, better"]
    assert page.row("First token, p99") == ["4.00 s", "3.00 s -1.00 s, -25.0%, better"]
    assert page.row("Preemptions") == ["0", "7 +7, worse"]  # of none there is no share
    assert page.row("Peak live blocks") == ["1,000", "900 -100, -10.0%"]  # neither better nor worse
    assert page.row("Requests") == ["12,031", "12,031 the same"]


def test_every_colour_of_a_verdict_stands_beside_its_word() -> None:
    page = rendered(*(sample_run(seed=seed, num_intervals=3) for seed in range(3)))
    for tone in ("better", "worse"):
        assert page.all("td", class_=tone)
        assert all(text.endswith(tone) for text in page.texts("td", class_=tone))


def test_a_figure_that_one_run_lacks_is_not_compared() -> None:
    page = rendered(sample_run("first", num_intervals=3), empty_run())
    assert page.row("Waste")[1] == "none"
    assert rendered(empty_run(), sample_run("first", num_intervals=3)).row("Waste") == ["none", "0.03%"]


def test_figures_that_no_run_has_are_left_out() -> None:
    page = rendered(*(sample_run(seed=seed, num_intervals=3) for seed in range(2)))
    assert "Sharing saving" not in page.texts("th")


def test_settings_that_differ_are_marked() -> None:
    page = rendered(
        sample_run("a", num_blocks=1000, num_intervals=3), sample_run("a", num_blocks=2000, num_intervals=3)
    )
    assert page.row("num_blocks differs") == ["1,000", "2,000"]
    assert page.row("block_size") == ["16", "16"]


def test_overlaid_plots_have_every_run_in_their_legends() -> None:
    page = rendered(sample_run("first", num_intervals=3), sample_run("second", with_curve=False, num_intervals=3))
    assert page.texts("h3")[:4] == [
        "Hit ratio over capacity",
        "Waste by block size",
        "Live blocks over time",
        "Latency percentiles",
    ]
    for legend in page.texts("ul", class_="legend"):
        assert legend.split() == ["1.", "first", "2.", "second"]


def test_a_run_that_a_plot_lacks_is_named() -> None:
    without = replace(empty_run("lengths.csv"), without_curve="It has no block ids.")
    page = rendered(sample_run("first", num_intervals=3), without)
    assert "2. lengths.csv is not in the capacity plot. It has no block ids." in page.texts("p")


def test_runs_of_different_block_sizes_come_with_a_warning() -> None:
    same = rendered(*(sample_run(block_size=16, num_intervals=3) for _ in range(2)))
    other = rendered(*(sample_run(block_size=size, num_intervals=3) for size in (16, 32)))
    warning = "The runs differ in block size, so equal numbers of blocks are not equal numbers of tokens."
    assert warning not in same.texts("p")
    assert warning in other.texts("p")


def test_long_names_are_cut_in_the_middle_except_at_the_top() -> None:
    long = "beginning-" + "x" * 100 + "-end"
    page = rendered(sample_run(long, num_intervals=3), sample_run("short", num_intervals=3))
    assert page.texts("li")[0] == long
    heading = page.texts("th", scope="col")[1]
    assert heading.startswith("1. beginning-")
    assert heading.endswith("-end")
    assert len(heading) < 50
