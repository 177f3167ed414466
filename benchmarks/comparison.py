"""This tree beside another commit: the same operations with both packages, in turn, as ratios.

Operation by operation and round by round, now and then alternate, so that what else the machine does meets both alike.
The ratio of a row is the median of its rounds' ratios; a round compares only what was measured seconds apart.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.catalogue import Operation
from benchmarks.measure import BAR_COMMIT, Row, Timing
from benchmarks.repository import ROOT, extracted
from benchmarks.trial import Outcome, Package, run_trial

__all__ = ["Compared", "Comparison", "compare", "failures", "paired", "two_packages"]

NO_ROW: Final = "it measures no {!r} there"


@dataclass(frozen=True, slots=True)
class Compared:
    """One row, now and then.

    Args:
        row: the row now, with the median of its rounds' medians and the best of all runs.
        then: the same of the other commit; None where that could not run it.
        ratios: now / then of the medians, a round each; empty where ``then`` is None.
    """

    row: Row
    then: Timing | None = None
    ratios: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Median of the rounds' ratios."""
        return median(self.ratios) if self.ratios else None

    @property
    def best_ratio(self) -> float | None:
        """Ratio of the best runs: what it is where nothing else ran; on a busy machine the surer of the two."""
        return self.row.timing.best_us / self.then.best_us if self.then else None

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio meets its bar; None where one of them is missing."""
        if self.ratio is None or self.row.bar_ratio is None:
            return None
        return self.ratio <= self.row.bar_ratio


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, and what could not be measured.

    Args:
        commit: the full id of the other commit; rows: now and then.
        failed_now, failed_then: "operation: why", each of which leaves rows out or without a ratio.
    """

    commit: str
    rows: tuple[Compared, ...]
    failed_now: tuple[str, ...]
    failed_then: tuple[str, ...]


@contextmanager
def two_packages(commit: str) -> Iterator[tuple[Package, Package]]:
    """Provide this tree's package and that of a commit, each with an empty cache; removed on the way out."""
    with extracted(commit) as tree, TemporaryDirectory(prefix="pagedkv-benchmarks-") as name:
        caches = Path(name)
        yield (
            Package("now", ROOT / "src", caches / "now"),
            Package(commit[:7], tree / "src", caches / "then"),
        )


def compare(
    operations: Iterable[Operation], commit: str, num_rounds: int, advance: Callable[[str], None]
) -> Comparison:
    """Measure operations with this tree's package and that of a commit, given by its full id.

    ``advance`` is called before each trial.

    Ratio bars hold against :data:`~benchmarks.measure.BAR_COMMIT`; against another commit they are left out.
    """
    rows: list[Compared] = []
    failed_now: list[str] = []
    failed_then: list[str] = []
    with two_packages(commit) as (now, then):
        for operation in operations:
            rounds = list(_rounds(operation, (now, then), num_rounds, advance))
            compared = paired(rounds)
            rows += compared
            failed_now += [f"{operation}: {why}" for why in failures(outcome for outcome, _ in rounds)]
            missing = [NO_ROW.format(each.row.operation) for each in compared if each.then is None]
            why_then = failures(outcome for _, outcome in rounds) or missing
            failed_then += [f"{operation}: {why}" for why in why_then]
    if not commit.startswith(BAR_COMMIT):
        rows = [replace(each, row=replace(each.row, bar_ratio=None)) for each in rows]
    return Comparison(commit, tuple(rows), tuple(failed_now), tuple(failed_then))


def _rounds(
    operation: Operation, packages: tuple[Package, Package], num_rounds: int, advance: Callable[[str], None]
) -> Iterator[tuple[Outcome, Outcome]]:
    now, then = packages
    for number in range(1, num_rounds + 1):
        advance(f"{operation}, round {number}, {now.name}")
        first = run_trial(operation, now)
        advance(f"{operation}, round {number}, {then.name}")
        yield first, run_trial(operation, then)


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """List the different reasons why trials of one operation ended early."""
    return list(dict.fromkeys(outcome.failure for outcome in outcomes if outcome.failure is not None))


def paired(rounds: list[tuple[Outcome, Outcome]]) -> list[Compared]:
    """Put the rounds of one operation together; rows are known by their names, in the order of now."""
    pairs: dict[str, list[tuple[Row, Row | None]]] = {}
    for now, then in rounds:
        others = {row.operation: row for row in then.rows}
        for row in now.rows:
            pairs.setdefault(row.operation, []).append((row, others.get(row.operation)))
    return [_one_row(of_one_name) for of_one_name in pairs.values()]


def _one_row(pairs: list[tuple[Row, Row | None]]) -> Compared:
    """Put the rounds of one row together; a round that only one side could run gives no ratio."""
    row = replace(pairs[0][0], timing=_of_all([now.timing for now, _ in pairs]))
    both = [(now.timing, then.timing) for now, then in pairs if then is not None]
    if not both:
        return Compared(row)
    ratios = tuple(now.median_us / then.median_us for now, then in both)
    return Compared(row, _of_all([then for _, then in both]), ratios)


def _of_all(timings: list[Timing]) -> Timing:
    """Put the timings of several rounds together."""
    return Timing(
        median(timing.median_us for timing in timings),
        min(timing.best_us for timing in timings),
        sum(timing.num_runs for timing in timings),
    )
