"""Compare this tree with another commit's package, call by call; exit with 1 at the first difference."""

import argparse
import json
import sys
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.repository import ROOT, UnknownCommitError, commit_id, extracted
from benchmarks.side_by_side.comparing import Comparison
from benchmarks.side_by_side.processes import play_both
from benchmarks.side_by_side.tally import table_of
from benchmarks.trial import Package
from tests.space.mixes import MIXES

LAST_ALIKE: Final = "8881664"
"""The last commit before features of a space acted at moments; statistics of older ones have fewer fields."""
QUICK: Final = 20_000
FULL: Final = 1_000_000
CACHES: Final = ROOT / "out" / "side_by_side"
MISUSED: Final = 2
EXAMPLES: Final = f"""examples:
  python -m benchmarks.side_by_side                            {FULL:,} calls beside {LAST_ALIKE}
  NUMBA_DISABLE_JIT=1 python -m benchmarks.side_by_side --quick
                                                               {QUICK:,}, and nothing is compiled
  python -m benchmarks.side_by_side --seed 3 --life 17         one life of another run, again
"""


def main() -> int:
    """Play both packages, compare, and report which operations ran."""
    arguments = _arguments()
    try:
        commit = commit_id(arguments.against)
    except UnknownCommitError as error:
        print(error, file=sys.stderr)
        return MISUSED
    life = [] if arguments.life is None else [str(arguments.life)]
    options = [str(arguments.seed), str(arguments.operations), *life]
    with extracted(commit) as tree:
        now = Package("now", ROOT / "src", CACHES / "now")
        then = Package(commit[:7], tree / "src", CACHES / commit[:12])
        with _progress() as progress:
            task = progress.add_task("", total=arguments.operations)
            comparison = play_both(now, then, options, lambda count: progress.update(task, completed=count))
    return _tell(comparison, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", default=LAST_ALIKE, metavar="COMMIT", help="%(default)s if none is named")
    parser.add_argument("--operations", type=int, default=FULL, metavar="N", help="calls in all, at least")
    parser.add_argument("--quick", action="store_const", dest="operations", const=QUICK, help=f"{QUICK:,} calls")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn")
    parser.add_argument("--life", type=int, metavar="N", help="this life of the run alone")
    return parser.parse_args()


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _tell(comparison: Comparison, arguments: argparse.Namespace) -> int:
    print(*table_of(comparison.tallies), sep="\n")
    for (now, then), count in comparison.reworded.most_common():
        print(f"\nsaid in other words, {count:,} times:\n  now:  {now}\n  then: {then}")
    difference = comparison.difference
    broken = comparison.broken
    if difference is not None:
        life = difference.life
        print(f"\nDIFFERENT after {comparison.num_calls:,} calls that are alike: {difference}")
        if life is not None:
            _tell_life(life, arguments)
    elif broken:
        print(f"\n{len(broken):,} calls broke off with no error of ours, in both packages alike")
        for line in broken:
            life, call, asked, answer, _ = json.loads(line)
            print(f"call {call}: {asked}\n  {json.dumps(answer)}")
            _tell_life(life, arguments)
    else:
        print(f"\n{comparison.num_calls:,} calls, and no difference")
    return int(difference is not None or len(broken) > 0)


def _tell_life(life: int, arguments: argparse.Namespace) -> None:
    again = f"--seed {arguments.seed} --operations {arguments.operations} --life {life}"
    print(f"  seed {arguments.seed}, life {life}, mix {MIXES[life % len(MIXES)]!s}; it alone, again: {again}")


if __name__ == "__main__":
    sys.exit(main())
