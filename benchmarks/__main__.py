"""Run every benchmark, print a table, write JSON: ``python -m benchmarks [--json FILE]``."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.operations import OPERATIONS, Row
from pagedkv import BlockPool


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    arguments = parser.parse_args()
    rows = [row for operation in track(OPERATIONS, "measuring", console=Console(stderr=True)) for row in operation()]
    pool = BlockPool("pool", 1_000_000, 16)
    bytes_a_block = pool.nbytes / pool.num_blocks
    machine = describe()
    console = Console(width=150)
    console.print(_table(rows))
    console.print(f"bookkeeping: {bytes_a_block:.1f} bytes a block (bar 160), block size 16, prefix caching on")
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine, "bytes_a_block": bytes_a_block, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _table(rows: list[Row]) -> Table:
    table = Table("operation", "unit", title="microseconds; naive = one Python object a block, in the same run")
    for column in ("median", "best", "bar", "naive", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = "" if row.naive_us is None else f"{row.naive_us / row.timing.median_us:.0f}x"
        figures = (row.timing.median_us, row.timing.best_us, row.bar_us, row.naive_us)
        table.add_row(row.operation, row.unit, *(_number(figure) for figure in figures), ratio)
    return table


def _number(figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


if __name__ == "__main__":
    sys.exit(main())
