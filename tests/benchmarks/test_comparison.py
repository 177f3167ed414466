"""Ratios of paired rounds, their bars, and the table that shows them."""

import io
import json

from rich.console import Console

from benchmarks.comparison import Compared, Comparison, failures, paired
from benchmarks.measure import Row, Timing
from benchmarks.tables import comparison_table
from benchmarks.trial import Outcome


def outcome(failure: str | None = None, **medians_us: float) -> Outcome:
    """An outcome with a row a name, its best half its median, a bar of 0.9 on each."""
    rows = (Row(name, Timing(value, value / 2, 5), bar_ratio=0.9) for name, value in medians_us.items())
    return Outcome(tuple(rows), failure)


def printed(*rows: Compared) -> str:
    console = Console(width=150, file=io.StringIO())
    with console.capture() as capture:
        console.print(comparison_table(Comparison("b7c260a" + 33 * "0", rows, (), ())))
    return capture.get()


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() -> None:
    rounds = [
        (outcome(step=10.0), outcome(step=10.0)),
        (outcome(step=20.0), outcome(step=25.0)),
        (outcome(step=90.0), outcome(step=100.0)),
    ]
    (row,) = paired(rounds)
    assert row.ratios == (1.0, 0.8, 0.9)
    assert row.ratio == 0.9
    assert row.is_met is True
    assert row.row.timing == Timing(20.0, 5.0, 15)
    assert row.then == Timing(25.0, 5.0, 15)
    assert row.best_ratio == 1.0


def test_a_bar_is_missed_just_above_it() -> None:
    (row,) = paired([(outcome(step=0.901), outcome(step=1.0))])
    assert row.is_met is False
    assert "NO" in printed(row)


def test_a_row_that_the_other_commit_cannot_run_shows_dashes_and_meets_nothing() -> None:
    rounds = 3 * [(outcome(old=1.0, new=2.0), outcome("ImportError: no such name", old=4.0))]
    old, new = paired(rounds)
    assert (old.ratio, old.is_met) == (0.25, True)
    assert (new.then, new.ratio, new.is_met) == (None, None, None)
    (line,) = (line for line in printed(old, new).splitlines() if "new" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["new", "call", "2", "-", "-", "-", "0.90", ""]


def test_a_reason_is_told_once_however_many_rounds_met_it() -> None:
    assert failures([outcome("a"), outcome(), outcome("b"), outcome("a")]) == ["a", "b"]


def test_an_outcome_is_read_back_from_the_lines_of_a_trial() -> None:
    row = {"operation": "step", "timing": {"median_us": 2.0, "best_us": 1.0, "num_runs": 3}, "bar_ratio": 0.5}
    lines = [json.dumps(row), json.dumps({"failure": "TypeError: no"})]
    assert Outcome.from_lines(lines) == Outcome((Row("step", Timing(2.0, 1.0, 3), bar_ratio=0.5),), "TypeError: no")
    assert Outcome.from_lines([], "exit code 1: gone").failure == "exit code 1: gone"
