"""Do policies lose to LRU anywhere? ``python -m benchmarks.eviction_capacities [--traces FILE...] [--only WORDS]``.

Policies may be given the time and the outputs, or less: ``--told nothing time outputs "time and outputs"`` plays each
trace once for each.
Each trace is played at 40 capacities, in geometric progression from where LRU has 15 % of the ideal hits to 1.3 times
where it has 99 %. Printed are points (hundredths of all references) against LRU: the least and at which capacity, and
the mean. Beside recorded traces there are generated ones that change in the middle, so that what a policy has learnt is
wrong from there on. No capacity may hit more than the optimum does.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.markdown import table
from benchmarks.repository import ROOT
from pagedkv.blocks.eviction.policy import LRU
from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.planner.capacity.pool_hits import lru_hits_by_capacity, optimal_hits, pool_hits
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request

__all__ = ["TOLD", "against_lru", "as_told", "capacities_of", "main", "points_against_lru", "sources_of", "turning"]

TRACES: Final = ROOT.parent / "shared" / "traces"
SHOWN: Final = ("hazard",)
EVERYTHING: Final = "time and outputs"
TOLD: Final = ("nothing", "time", "outputs", EVERYTHING)
UNKNOWN: Final = -1
NUM_CAPACITIES: Final = 40
LOWEST_SHARE: Final = 0.15
HIGHEST_SHARE: Final = 0.99
BEYOND: Final = 1.3
RECORDED: Final = (
    "mooncake_synthetic",
    "agent_text_blk16",
    "mooncake_conversation",
    "agentic_coding_interleaved",
)
SUFFIX: Final = ".jsonl.gz"
NUM_TURNING_REQUESTS: Final = 12_000
LONG_OUTPUT: Final = 400
SHORT_OUTPUT: Final = 20
LONGEST_PROMPT: Final = 60  # blocks


def read_trace(file: Path) -> BlockReferences:
    """Read a trace."""
    collector = ReferenceCollector(file.name)
    with TraceReader(file) as trace:
        for request in trace:
            collector.add(request)
    return collector.references()


@dataclass(frozen=True, slots=True)
class Habits:
    """How conversations behave that have a long answer behind them, or a short one.

    Args:
        share_going_on: the share of them that is continued.
        pause_s: how long that takes, in the mean.
    """

    share_going_on: float
    pause_s: float


STAYING: Final = Habits(share_going_on=0.9, pause_s=40)
LEAVING: Final = Habits(share_going_on=0.05, pause_s=400)


def turning(*, num_requests: int = NUM_TURNING_REQUESTS, seed: int = 0) -> BlockReferences:
    """Make conversations of which those with long answers go on, and from the middle on those with short ones."""
    random = np.random.default_rng(seed)
    collector = ReferenceCollector("turning")
    waiting: list[tuple[float, list[int]]] = []
    now_s, num_ids = 0.0, 0
    for number in range(num_requests):
        now_s += random.exponential(1.0)
        due = min(waiting, default=(np.inf, []))
        known: list[int] = []
        if due[0] <= now_s:
            waiting.remove(due)
            known = due[1]
        num_new = int(random.integers(2, 12))
        prompt = [*known, *range(num_ids, num_ids + num_new)]
        num_ids += num_new
        is_long = bool(random.random() < 0.5)
        habits = STAYING if is_long == (number < num_requests // 2) else LEAVING
        if random.random() < habits.share_going_on and len(prompt) < LONGEST_PROMPT:
            waiting.append((now_s + random.exponential(habits.pause_s), prompt))
        num_outputs = LONG_OUTPUT if is_long else SHORT_OUTPUT
        collector.add(Request(now_s, len(prompt), num_outputs, np.array(prompt, np.int64), 1))
    return collector.references()


def sources_of(paths: Sequence[Path]) -> dict[str, Callable[[], BlockReferences]]:
    """Return how to read each trace, by name: those of the files, or the recorded ones of one folder and the made ones.

    Files that a folder lacks are named on the standard error, and left out.
    """
    if len(paths) > 1 or not paths[0].is_dir():
        return {path.name: partial(read_trace, path) for path in paths}
    files = {name: paths[0] / f"{name}{SUFFIX}" for name in RECORDED}
    for missing in (file for file in files.values() if not file.exists()):
        print(f"{missing} is not there, and left out", file=sys.stderr)
    found = {name: partial(read_trace, file) for name, file in files.items() if file.exists()}
    return {**found, **{f"turning, seed {seed}": partial(turning, seed=seed) for seed in range(2)}}


def as_told(references: BlockReferences, told: str) -> BlockReferences:
    """Keep only what ``told`` names, one of :data:`TOLD`, of what a policy is given; prompts and their order stay."""
    return replace(
        references,
        arrivals_s=references.arrivals_s if "time" in told else np.zeros_like(references.arrivals_s),
        output_lengths=(
            references.output_lengths if "outputs" in told else np.full_like(references.output_lengths, UNKNOWN)
        ),
    )


def capacities_of(references: BlockReferences, num_capacities: int = NUM_CAPACITIES) -> list[int]:
    """Choose the capacities at which a trace is played."""
    lru = lru_hits_by_capacity(references)
    lowest, highest = np.searchsorted(lru, [LOWEST_SHARE * lru[-1], HIGHEST_SHARE * lru[-1]])
    spread = np.geomspace(max(1, lowest), BEYOND * highest, num_capacities).round().astype(int)
    return sorted(set(spread.tolist()))


def points_against_lru(references: BlockReferences, policy: str, capacity: int) -> float:
    """Play a trace; return how many more hits a policy has than LRU, in points of all references."""
    hits = pool_hits(references, capacity, POLICIES[policy])
    most = optimal_hits(references, capacity)
    assert hits <= most, f"{policy} hits {hits} at {capacity}, where {most} can be hit"
    return 100 * (hits - pool_hits(references, capacity, LRU)) / references.num_block_refs


def against_lru(
    sources: Mapping[str, Callable[[], BlockReferences]],
    *,
    policies: Sequence[str] = SHOWN,
    told: Sequence[str] = (EVERYTHING,),
    num_capacities: int = NUM_CAPACITIES,
    show: Callable[[str], object] = lambda _: None,
) -> str:
    """Play traces with policies at many capacities, and make the table.

    Args:
        sources: how to read each trace, by name.
        policies: names of policies.
        told: what the policies are given, each one of :data:`TOLD`; the table names it unless it is everything.
        num_capacities: how many of each trace.
        show: called with a trace's name after each of its capacities, for each policy and each of ``told``.
    """
    rows: list[list[object]] = [["points against LRU", "", "capacities", "worst", "at", "mean", "best"]]
    for name, read in sources.items():
        references = read()
        capacities = capacities_of(references, num_capacities)
        for policy, what in product(policies, told):
            played, points = as_told(references, what), []
            for capacity in capacities:
                points.append(points_against_lru(played, policy, capacity))
                show(name)
            worst = int(np.argmin(points))
            shown = (f"{point:+.2f}" for point in (np.mean(points), max(points)))
            how = policy if what == EVERYTHING else f"{policy}, told {what}"
            rows.append([name, how, len(points), f"{points[worst]:+.2f}", f"{capacities[worst]:,}", *shown])
    return table(*rows)


def main() -> int:
    """Play all, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction_capacities", description=__doc__)
    parser.add_argument(
        "--traces",
        type=Path,
        nargs="+",
        default=[TRACES],
        metavar="PATH",
        help=f"trace files, or a folder that has {', '.join(RECORDED)} as {SUFFIX} (default: %(default)s)",
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="traces with these words in their names")
    parser.add_argument("--policies", nargs="+", default=list(SHOWN), choices=list(POLICIES), metavar="NAME")
    parser.add_argument("--told", nargs="+", default=[EVERYTHING], choices=TOLD, metavar="WHAT", help=f"of {TOLD}")
    parser.add_argument("--capacities", type=int, default=NUM_CAPACITIES, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    found = sources_of(arguments.traces)
    sources = {name: read for name, read in found.items() if arguments.only in name}
    if not sources:
        parser.error(f"no trace is named {arguments.only!r}; there are {', '.join(found)}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        num_ways = len(arguments.policies) * len(arguments.told)
        task = progress.add_task("", total=len(sources) * num_ways * arguments.capacities)
        text = against_lru(
            sources,
            policies=arguments.policies,
            told=arguments.told,
            num_capacities=arguments.capacities,
            show=lambda name: progress.update(task, description=name, advance=1),
        )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
