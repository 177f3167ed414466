"""Writes the operations' table of docs/benchmarks.md, machine, commit and date: ``python -m benchmarks.page FILE``.

FILE is what ``python -m benchmarks --json FILE`` wrote, of this tree alone or beside another commit: what was measured
on one machine can be written on another. ``python -m benchmarks --write`` measures and writes.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.markdown import table, with_table
from benchmarks.repository import ROOT
from benchmarks.tables import figure_of

__all__ = ["PAGE", "operations_text", "write"]

PAGE: Final = ROOT / "docs" / "benchmarks.md"
NAME: Final = "operations"
DASH: Final = "-"

Figures: TypeAlias = Mapping[str, Any]
"""As ``--json`` has them."""


def main() -> None:
    """Read the file, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="written by python -m benchmarks --json FILE")
    write(json.loads(parser.parse_args().file.read_text(encoding="utf-8")))


def write(figures: Figures) -> None:
    """Put the figures in their place on the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), NAME, operations_text(figures)), encoding="utf-8")


def operations_text(figures: Figures) -> str:
    """Write what was measured on which machine, and the rows, as Markdown.

    Beside another commit the last two columns have the ratios to it, a dash where it could not run the operation.
    """
    machine = figures["machine"]
    against = figures.get("against")
    measured_on = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}, "
        f"NumPy {machine['numpy']}, Numba {machine['numba']}; commit {machine['commit']}"
        + (f", {machine['date']}" if "date" in machine else "")
    )
    beside = f"; ratios to {against[:7]}" if against else ""
    head = ("operation", "unit", "median", "best", "bar", "naive")
    ratios = ("of bests", "ratio", "bar of it") if against else ()
    nbytes = figures["bytes_a_block"]
    return f"Measured on {measured_on}{beside}. Bookkeeping: {nbytes:.1f} bytes a block (bar 160).\n\n" + table(
        (*head, *ratios), *_rows(figures["rows"])
    )


def _rows(rows: list[Figures]) -> Iterator[tuple[str, ...]]:
    for each in rows:
        row = each.get("row", each)
        timing = row["timing"]
        times = (timing["median_us"], timing["best_us"], row["bar_us"], row["naive_us"])
        cells = (row["operation"], row["unit"], *(figure_of(time) or " " for time in times))
        if "row" not in each:
            yield cells
            continue
        ratios = (each["best_ratio"], each["ratio"])
        bar = row["bar_ratio"]
        yield (*cells, *(DASH if ratio is None else f"{ratio:.2f}" for ratio in ratios), f"{bar:.2f}" if bar else " ")


if __name__ == "__main__":
    main()
