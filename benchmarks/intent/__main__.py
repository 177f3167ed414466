"""Hit ratios with intent: serve traces with sessions at each capacity, print a table a trace, write JSON."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.intent.serving import INTENTS, Session, serve
from pagedkv.errors import PagedKVError
from pagedkv.planner.capacity.curve import default_capacities
from pagedkv.planner.capacity.pool_hits import optimal_hits
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.reader import TraceReader

INTERRUPTED: Final = 130
SLOW: Final = 0.9
NEAR_IDEAL: Final = 0.001
"""Capacities where LRU comes as near to the ideal hit ratio are left out."""


def main() -> int:
    """Measure, print and write."""
    arguments = _arguments()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    results = {}
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for path in arguments.traces:
                results[path.name] = _measure(path, progress, arguments.intents)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except PagedKVError as error:
        print(error, file=sys.stderr)
        return 1
    for name, tables in results.items():
        for title, figures in tables.items():
            Console(width=150).print(_table(name, title, figures))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intent", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="with sessions, arrivals and block ids")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the hit ratios here as well")
    names = [intent.name for intent in INTENTS]
    parser.add_argument("--intents", nargs="+", choices=names, default=names, metavar="NAME", help="beside lru; all")
    return parser.parse_args()


def _measure(path: Path, progress: Progress, names: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by intent and capacity."""
    intents = [intent for intent in INTENTS if intent.name in {"lru", *names}]
    references, sessions = _read(path)
    ideal = int(references.ideal_hits().sum())
    num_refs = references.num_block_refs
    capacities = default_capacities(references)
    task = progress.add_task(f"{path.name}: the first ones compile", total=len(capacities) * (len(intents) + 1))
    ratios: dict[str, dict[str, float]] = {}
    slowest: dict[str, dict[str, float]] = {}
    for capacity in capacities:
        hits, misses = {}, {}
        for intent in intents:
            hits[intent.name], missed = serve(references, sessions, capacity, intent)
            misses[intent.name] = float(np.quantile(missed, SLOW)) * references.block_size
            progress.update(task, advance=1, description=f"{path.name}, {capacity:,} blocks")
            if hits["lru"] >= ideal - NEAR_IDEAL * num_refs:
                break
        else:
            hits["optimal"] = optimal_hits(references, capacity)
            for name, count in hits.items():
                ratios.setdefault(name, {})[str(capacity)] = 100 * count / num_refs
            for name, num_tokens in misses.items():
                slowest.setdefault(name, {})[str(capacity)] = num_tokens
        progress.update(task, advance=1)
    return {"hit ratio by block, in percent": ratios, "tokens that did not hit, 90th percentile": slowest}


def _read(path: Path) -> tuple[BlockReferences, list[Session]]:
    """Read a trace, and where each request stands in its session."""
    collector = ReferenceCollector(str(path), full_blocks_only=True)
    arrivals: list[float] = []
    before: list[int] = []
    last_of: dict[str | None, int] = {}
    numbers: dict[str, int] = {}
    owners: list[int] = []
    with TraceReader(path) as trace:
        for request in trace:
            collector.add(request)
            before.append(-1 if request.session is None else last_of.get(request.session, -1))
            last_of[request.session] = len(arrivals)
            arrivals.append(request.arrival_s)
            owners.append(0 if request.session is None else numbers.setdefault(request.session, 1 + len(numbers)))
    following = dict(zip(before, arrivals, strict=True))
    sessions = [
        Session(arrival, former, following.get(number, -1.0), owner)
        for number, (arrival, former, owner) in enumerate(zip(arrivals, before, owners, strict=True))
    ]
    return collector.references(), sessions


def _table(name: str, title: str, ratios: dict[str, dict[str, float]]) -> Table:
    table = Table(name, title=title, caption="columns: capacity in blocks")
    for capacity in ratios["lru"]:
        table.add_column(f"{int(capacity):,}", justify="right")
    for intent, by_capacity in ratios.items():
        table.add_row(intent, *(f"{ratio:,.2f}" for ratio in by_capacity.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
