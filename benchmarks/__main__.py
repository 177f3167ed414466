"""Run the benchmarks, print a table, write JSON and the page: of this tree alone, or in turn with another commit."""

import argparse
import itertools
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import page
from benchmarks.catalogue import Operation, function_of, operations
from benchmarks.comparison import Comparison, compare
from benchmarks.machine import describe
from benchmarks.measure import BAR_COMMIT, Row
from benchmarks.repository import ROOT, UnknownCommitError, commit_id
from benchmarks.tables import comparison_table, plain_table
from pagedkv import BlockPool

EXAMPLES: Final = f"""examples:
  python -m benchmarks                               this tree alone, with bars in microseconds
  python -m benchmarks --against                     in turn with {BAR_COMMIT}, with bars as ratios to it
  python -m benchmarks --against HEAD~1 --only match one commit back, operations named or described by "match"
  python -m benchmarks --only evict --json out.json  the figures of one operation as JSON as well
  python -m benchmarks --against --write             the table of docs/benchmarks.md
"""
INTERRUPTED: Final = 130
MISUSED: Final = 2
LEAST_ROUNDS: Final = 3


def main() -> int:
    """Measure, print and write."""
    arguments = _arguments()
    if arguments.write and arguments.only:
        print("--write takes all operations: leave --only out", file=sys.stderr)
        return MISUSED
    chosen = operations(arguments.only)
    if not chosen:
        print(f"no operation is named or described by {arguments.only!r}; there are:", file=sys.stderr)
        print(*(f"  {operation}: {operation.summary}" for operation in operations()), sep="\n", file=sys.stderr)
        return MISUSED
    # SIGTERM ends a run as Ctrl-C does: the other commit's files are removed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        figures, failed = _against(chosen, arguments) if arguments.against else _alone(chosen)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except UnknownCommitError as error:
        print(error, file=sys.stderr)
        return MISUSED
    figures = {"machine": describe(), **_size(), **figures}
    _write(figures, arguments.json)
    if arguments.write:
        page.write(figures)
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--against",
        nargs="?",
        const=BAR_COMMIT,
        metavar="COMMIT",
        help=f"measure this commit's package as well, in turn ({BAR_COMMIT} if none is named)",
    )
    parser.add_argument(
        "--rounds", type=_num_rounds, default=LEAST_ROUNDS, metavar="N", help="with --against, at least 3"
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="operations named or described by these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--write", action="store_true", help=f"write all operations into {page.PAGE.relative_to(ROOT)} (without --only)"
    )
    return parser.parse_args()


def _num_rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_ROUNDS:
        raise argparse.ArgumentTypeError(f"a number of rounds from {LEAST_ROUNDS} on, not {text!r}")
    return int(text)


def _alone(chosen: list[Operation]) -> tuple[dict[str, Any], bool]:
    """Measure this tree in this process; a wrong result ends the run with its traceback."""
    rows: list[Row] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(chosen))
        for operation in chosen:
            progress.update(task, description=str(operation))
            rows += function_of(operation.module, operation.name)()
            progress.advance(task)
    _console().print(plain_table(rows))
    return {"rows": [asdict(row) for row in rows]}, False


def _against(chosen: list[Operation], arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Measure both packages; report what failed, and whether any of it was of this tree."""
    commit = commit_id(arguments.against)
    num_begun = itertools.count()
    with _progress() as progress:
        task = progress.add_task("", total=2 * arguments.rounds * len(chosen))

        def advance(trial: str) -> None:
            progress.update(task, description=trial, completed=next(num_begun))

        comparison = compare(chosen, commit, arguments.rounds, advance)
        advance("done")
    console = _console()
    console.print(comparison_table(comparison))
    _tell(console, comparison)
    derived = ("ratio", "best_ratio", "is_met")
    rows = [asdict(each) | {name: getattr(each, name) for name in derived} for each in comparison.rows]
    figures = {
        "against": comparison.commit,
        "rows": rows,
        "failed_now": comparison.failed_now,
        "failed_then": comparison.failed_then,
    }
    return figures, bool(comparison.failed_now)


def _tell(console: Console, comparison: Comparison) -> None:
    met = [each.is_met for each in comparison.rows if each.is_met is not None]
    if met:
        console.print(f"{sum(met)} of {len(met)} bars are met")
    for failure in comparison.failed_then:
        console.print(f"{comparison.commit[:7]} could not run {failure}", markup=False)
    for failure in comparison.failed_now:
        console.print(f"THIS TREE failed {failure}", markup=False)


def _size() -> dict[str, float]:
    pool = BlockPool("pool", 1_000_000, 16)
    return {"bytes_a_block": pool.nbytes / pool.num_blocks}


def _write(figures: dict[str, Any], file: Path | None) -> None:
    console = _console()
    nbytes = figures["bytes_a_block"]
    console.print(f"bookkeeping: {nbytes:.1f} bytes a block (bar 160), block size 16, prefix caching on")
    console.print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures, indent=1) + "\n")


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True))


def _console() -> Console:
    return Console(width=150)


if __name__ == "__main__":
    sys.exit(main())
