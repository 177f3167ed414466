"""Put each fault of the list into a copy of the tree and run its tests; tell which faults no test noticed."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from mutants.callers import Callers
from mutants.mutation import Mutation, MutationError, problems, read_list
from mutants.results import killers_of_last_time, unjudged, write_result
from mutants.runner import STAGES, TestsFailError, Verdict, find_callers, judge_all
from mutants.sandbox import ROOT

EXAMPLES: Final = """examples:
  python -m mutants                            the whole list, two processes
  python -m mutants --only growth --jobs 1     mutations whose name, file or function contains "growth"
  python -m mutants --stages 1                 only the quickest tests, to see what they alone notice
  python -m mutants --check                    only whether the list fits the code
  python -m mutants --json out/mutants.json    as JSON as well; the tests that killed last time are read from there
                                               and run first
  python -m mutants --json out/mutants.json --unjudged
                                               goes on where a run was interrupted
"""
INTERRUPTED: Final = 130
MOST_SECONDS: Final = 3600.0
"""For the tests, once, without a fault."""


def main() -> int:
    """Judge, print and write; 0 if every mutation was killed or is argued to be equivalent."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (MutationError, TestsFailError) as error:
        print(error, file=sys.stderr)
        return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mutants",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="mutations whose name or place contains this")
    parser.add_argument("--check", action="store_true", help="run no test: only see that the list fits the code")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time (default 2)")
    parser.add_argument("--minutes", type=float, default=20, metavar="N", help="at most, for a mutation (default 20)")
    parser.add_argument(
        "--stages", type=int, default=len(STAGES), metavar="N", help="only the first N stages of tests: a quick look"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each result here as well, once it is known")
    parser.add_argument("--unjudged", action="store_true", help="only mutations without a result in the file of --json")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> int:
    mutations = read_list()
    unfit = problems(mutations, ROOT)
    if unfit:
        print(*unfit, sep="\n", file=sys.stderr)
        return 1
    chosen = [each for each in mutations if arguments.only in f"{each.name} {each.path} {each.function}"]
    if arguments.unjudged:
        chosen = unjudged(chosen, arguments.json)
        if not chosen:
            raise MutationError(f"every mutation has a result in {arguments.json}")
    if not chosen:
        raise MutationError(f"no mutation's name or place contains {arguments.only!r}: {_names(mutations)}")
    if arguments.check:
        print(f"{len(mutations)} mutations fit the code")
        return 0
    verdicts = _judged(chosen, arguments)
    Console(width=150).print(_table(verdicts))
    bad = [verdict.mutation for verdict in verdicts if not verdict.is_as_it_should]
    num_killed = sum(verdict.killer is not None for verdict in verdicts)
    num_equivalent = sum(bool(verdict.mutation.equivalent) for verdict in verdicts)
    print(f"{num_killed} of {len(verdicts)} killed, {num_equivalent} argued to be equivalent")
    if bad:
        print(f"see to {_names(bad)}")
    return int(bool(bad))


def _names(mutations: list[Mutation]) -> str:
    return ", ".join(mutation.name for mutation in mutations)


def _judged(chosen: list[Mutation], arguments: argparse.Namespace) -> list[Verdict]:
    callers = _callers(arguments)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen))
        writing = threading.Lock()  # processes are waited for by threads

        def tell(verdict: Verdict) -> None:
            progress.console.print(f"{verdict.mutation.name}: {verdict.result}", markup=False)
            if arguments.json is not None:
                with writing:
                    write_result(verdict, arguments.json)
            progress.advance(task)

        killers = killers_of_last_time(arguments.json)
        return judge_all(
            chosen,
            num_processes=arguments.jobs,
            seconds=60 * arguments.minutes,
            killers=killers,
            callers=callers,
            tell=tell,
            stages=STAGES[: arguments.stages],
        )


def _callers(arguments: argparse.Namespace) -> Callers:
    """Find which tests call which function; a run that goes on reads what the run before has found."""
    file: Path | None = None if arguments.json is None else arguments.json.with_suffix(".callers.json")
    if arguments.unjudged and file is not None and file.exists():
        return Callers.read([file])
    with Console(stderr=True).status("running the tests once, to see which functions they call"):
        callers = find_callers(arguments.jobs, MOST_SECONDS)
    if file is not None:
        callers.write(file)
    return callers


def _table(verdicts: list[Verdict]) -> Table:
    table = Table("mutation", "place", "result", "test that failed")
    table.add_column("s", justify="right")
    for verdict in verdicts:
        place = f"{verdict.mutation.path.removeprefix('src/pagedkv/')}: {verdict.mutation.function}"
        killer = (verdict.killer or "").removeprefix("tests/").replace("[", "\\[")
        table.add_row(verdict.mutation.name, place, verdict.result, killer, f"{verdict.seconds:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
