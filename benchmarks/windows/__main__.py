"""Hit ratios of windows: serve both workloads from many seeds, print a table, write JSON."""

import argparse
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.windows.comparison import Outcome, Point, measure, points
from benchmarks.windows.telling import CAPACITIES, TOLD, Case, measure_case
from benchmarks.windows.workloads import WORKLOADS
from pagedkv.blocks.eviction.registry import POLICIES

INTERRUPTED: Final = 130
MOST_LOST: Final = 0.5
"""Points that a policy may lose to LRU on any seed."""


def main() -> int:
    """Measure, print and write; fail if a bar is missed."""
    arguments = _arguments()
    if arguments.eviction is not None:
        return _compare_with_lru(arguments)
    try:
        outcomes = _measure_all(arguments.seeds, arguments.processes)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    gathered = points(outcomes)
    Console(width=150).print(_table(gathered, arguments.seeds))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return int(not all(point.is_met for point in gathered))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="seeds of each workload, from 0 on (20)")
    parser.add_argument("--processes", type=int, metavar="N", help="that work at a time (as many as there are cores)")
    parser.add_argument(
        "--eviction", choices=list(POLICIES), metavar="NAME", help="show this policy beside LRU, by what it is given"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each seed here as well")
    return parser.parse_args()


def _measure_all(num_seeds: int, num_processes: int | None) -> list[Outcome]:
    """Serve everything, in processes of their own; in the order of workloads, seeds and capacities."""
    cases = [(workload, seed) for workload in WORKLOADS for seed in range(num_seeds)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(num_processes, get_context("spawn")) as executor,
    ):
        task = progress.add_task("the first ones compile", total=len(cases))
        futures = {executor.submit(measure, *case): case for case in cases}
        for future in as_completed(futures):
            workload, seed = futures[future]
            progress.update(task, advance=1, description=f"{workload}, seed {seed}")
        return [outcome for future in futures for outcome in future.result()]


def _compare_with_lru(arguments: argparse.Namespace) -> int:
    """Serve everything with a policy and with LRU, and print how they compare; fail if half a point is lost anywhere.

    In the mean of all seeds, and on each seed.
    """
    seeds = range(arguments.seeds)
    points = [
        (workload, model, num_blocks)
        for workload in WORKLOADS
        for model, capacities in CAPACITIES.items()
        for num_blocks in capacities
    ]
    cases = [Case(*point, seed) for point in points for seed in seeds]
    table = Table("workload", "model", "blocks", "LRU", *TOLD, title="points against LRU: mean, and worst seed")
    least = 0.0
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as executor:
        ratios = executor.map(measure_case, cases, len(cases) * [arguments.eviction])
        for workload, model, num_blocks in points:
            served = [next(ratios) for _ in seeds]
            cells = []
            for told in TOLD:
                points_lost = [100 * (by_told[told] - lru) for lru, by_told in served]
                least = min(least, *points_lost)
                cells.append(f"{mean(points_lost):+.2f} {min(points_lost):+.2f}")
            table.add_row(workload, model, f"{num_blocks:,}", f"{mean(lru for lru, _ in served):.3f}", *cells)
    Console(width=150).print(table)
    return int(least < -MOST_LOST)


def _table(gathered: Iterable[Point], num_seeds: int) -> Table:
    title = (
        f"hit ratio by token, means of {num_seeds} seeds; ahead: on how many of them above the peer's rule. "
        "Bar: ahead in the mean and on 4 of 5, or within 0.01 of endless"
    )
    table = Table("workload", title=title)
    for heading in ("pools", "blocks", "ours", "peer", "peer, no answers", "endless", "ahead", "bar met"):
        table.add_column(heading, justify="right")
    for point in gathered:
        ratios = [f"{point.mean(name):.3f}" for name in ("ours", "peer", "peer_prompts", "endless")]
        verdict = f"{point.num_ahead} of {num_seeds}", "yes" if point.is_met else "NO"
        table.add_row(point.workload, str(point.num_pools), f"{point.num_blocks:,}", *ratios, *verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
