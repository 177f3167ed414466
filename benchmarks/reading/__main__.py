"""How much executes in a few jobs, and how long functions and files are: now, in another commit, and the bars."""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.markdown import table, with_table
from benchmarks.reading.lengths import LONGEST_FUNCTION, lengths_of
from benchmarks.repository import ROOT, commit_id, extracted, state

BEFORE_THE_HOUSE: Final = "2592e74"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
BARS: Final = {
    "allocate 100 tokens": (250, 45, 15),
    "the same, with a hit": (250, 45, 15),
    "free": (70, 16, 9),
    "admit 4 requests": (450, 85, 28),
    "a decode step of the engine": (650, 130, 45),
}
"""Most lines, functions and files of each job."""


def main() -> None:
    """Measure both, print the table, and write it where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("--against", default=BEFORE_THE_HOUSE, metavar="COMMIT", help="%(default)s if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    now = figures_of(ROOT / "src")
    with extracted(commit_id(arguments.against)) as tree:
        then = figures_of(tree / "src")
    shown = table_of(now, then, arguments.against)
    print(shown)
    for what in ("long_functions", "long_files"):
        print(f"\n{what.replace('_', ' ')}:", *(f"  {each}" for each in now[what]), sep="\n")
    if arguments.write:
        counted_at = f"Counted at commit {state()}, {datetime.now(UTC).date().isoformat()}.\n\n"
        PAGE.write_text(with_table(PAGE.read_text(), "reading", counted_at + shown))
    if arguments.json:
        arguments.json.write_text(json.dumps({"commit": state(), "now": now, "then": then, "bars": BARS}, indent=1))


def figures_of(source: Path) -> dict[str, Any]:
    """Measure the package in a source folder: what jobs execute, and what is long."""
    environment = {**os.environ, "PYTHONPATH": str(source), "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-m", "benchmarks.reading.jobs"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    lengths = lengths_of(source / "pagedkv")
    return {
        "jobs": json.loads(printed),
        "mean_function": round(lengths.mean_function, 2),
        "long_functions": [str(each) for each in lengths.long_functions],
        "num_long_bodies": sum(each.num_behind > LONGEST_FUNCTION for each in lengths.long_functions),
        "long_files": [str(each) for each in lengths.long_files],
    }


def table_of(now: dict[str, Any], then: dict[str, Any], commit: str) -> str:
    """Set the figures of both in Markdown, beside the bars."""
    jobs = (
        (f"{job}: lines / functions / files", *(_three(each) for each in (then["jobs"][job], now["jobs"][job], bar)))
        for job, bar in BARS.items()
    )
    lengths = (
        ("lines of a function, in the mean", then["mean_function"], now["mean_function"], "10"),
        ("functions of more than 60 lines", len(then["long_functions"]), len(now["long_functions"]), ""),
        ("the same, without signature and docstring", then["num_long_bodies"], now["num_long_bodies"], "0"),
        ("files of more than 450 lines", len(then["long_files"]), len(now["long_files"]), "0"),
    )
    return table(("what", commit, "now", "bar"), *jobs, *lengths)


def _three(counts: tuple[int, int, int]) -> str:
    return " / ".join(f"{count:,}" for count in counts)


if __name__ == "__main__":
    main()
