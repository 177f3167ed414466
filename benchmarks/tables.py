"""The figures as tables: this tree alone, and beside another commit."""

from collections.abc import Iterable

from rich.table import Table

from benchmarks.comparison import Comparison
from benchmarks.measure import BAR_COMMIT, Row

__all__ = ["comparison_table", "figure_of", "plain_table"]

DASH = "-"


def plain_table(rows: Iterable[Row]) -> Table:
    """Lay out rows of this tree."""
    table = Table("operation", "unit", title="microseconds; naive = one Python object a block, in the same run")
    for column in ("median", "best", "bar", "naive", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = "" if row.naive_us is None else f"{row.naive_us / row.timing.median_us:.0f}x"
        figures = (row.timing.median_us, row.timing.best_us, row.bar_us, row.naive_us)
        table.add_row(row.operation, row.unit, *(figure_of(figure) for figure in figures), ratio)
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Lay out rows now and then; a dash stands where the other commit could not run the operation."""
    then = comparison.commit[:7]
    title = f"microseconds, medians, in turn with {then}; bars are ratios to {BAR_COMMIT}"
    table = Table("operation", "unit", title=title)
    for column in ("now", then, "of bests", "ratio", "bar"):
        table.add_column(column, justify="right")
    table.add_column("met")
    for each in comparison.rows:
        row = each.row
        now_us, then_us = row.timing.median_us, each.then.median_us if each.then else None
        table.add_row(
            row.operation,
            row.unit,
            figure_of(now_us),
            figure_of(then_us) or DASH,
            _ratio(each.best_ratio) or DASH,
            _ratio(each.ratio) or DASH,
            _ratio(row.bar_ratio),
            {True: "yes", False: "NO", None: ""}[each.is_met],
        )
    return table


def _ratio(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def figure_of(figure: float | None) -> str:
    """Show three digits, or whole numbers from 100 on; nothing where there is no figure."""
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
