"""First starts, here and at another commit in turn: each from an empty cache of machine code, in a process of its own.

    python -m benchmarks.first_start                        # medians of three, beside the commit of the bars
    python -m benchmarks.first_start --rounds 1 --only fifteen

*fifteen* is README's first example, *again* the same from the cache that it left, *demo* the demonstration. Seconds of
processor time count a process with its children. Both packages run with this environment's libraries.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.machine import describe
from benchmarks.repository import ROOT, commit_id, extracted, state

BAR_COMMIT: Final = "b920c9f"
EXAMPLE: Final = re.compile(r"```python\n(import numpy as np\nfrom pagedkv import .*?)```", re.DOTALL)
DEMO: Final = "import sys; from pagedkv.cli import main; sys.argv = ['pagedkv', 'demo']; main()"
JOBS: Final = ("fifteen", "again", "demo")


@dataclass(frozen=True, slots=True)
class Start:
    """How long one process took: seconds of wall time, and of processor time with its children."""

    job: str
    package: str
    wall_s: float
    processor_s: float


def main() -> None:
    """Measure, print a table, write JSON if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default=BAR_COMMIT, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--only", choices=JOBS, nargs="*", default=JOBS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with extracted(commit_id(arguments.against)) as older:
        packages = {arguments.against: older / "src", "here": ROOT / "src"}
        starts = list(_measured(packages, arguments.rounds, set(arguments.only)))
    print(f"{describe()}, {state()}")
    for line in table(starts, (arguments.against, "here")):
        print(line)
    if arguments.json:
        figures = {"machine": describe(), "commit": state(), "starts": [asdict(start) for start in starts]}
        arguments.json.write_text(json.dumps(figures, indent=2, default=str))


def table(starts: Sequence[Start], packages: tuple[str, str]) -> Iterator[str]:
    """Write medians by job, and the second package's as ratios to the first's."""
    yield f"{'job':10}" + "".join(f"{name + ' ' + what:>22}" for what in ("wall, s", "cpu, s") for name in packages)
    for job in JOBS:
        of_job = [start for start in starts if start.job == job]
        if not of_job:
            continue
        line = f"{job:10}"
        for seconds in ("wall_s", "processor_s"):
            first, second = (
                statistics.median(getattr(start, seconds) for start in of_job if start.package == name)
                for name in packages
            )
            line += f"{first:22.1f}{second:14.1f} ({second / first:.2f})"
        yield line


def _measured(packages: Mapping[str, Path], num_rounds: int, jobs: set[str]) -> Iterator[Start]:
    for index in range(num_rounds):
        for name, source in packages.items():
            with TemporaryDirectory(prefix="pagedkv-first-start-") as folder:
                for start in _starts(name, source, Path(folder), jobs):
                    print(f"round {index + 1}: {start}", file=sys.stderr)
                    yield start


def _starts(name: str, source: Path, folder: Path, jobs: set[str]) -> Iterator[Start]:
    if jobs & {"fifteen", "again"}:
        fifteen = _example()
        yield _start("fifteen", name, fifteen, source, folder / "fifteen")
        if "again" in jobs:
            yield _start("again", name, fifteen, source, folder / "fifteen")
    if "demo" in jobs:
        yield _start("demo", name, DEMO, source, folder / "demo")


def _example() -> str:
    found = EXAMPLE.search((ROOT / "README.md").read_text())
    if found is None:
        raise SystemExit("README.md has no example that begins with numpy and pagedkv: name its new beginning here")
    return found[1]


def _start(job: str, package: str, program: str, source: Path, cache: Path) -> Start:
    environment = {**os.environ, "PYTHONPATH": str(source), "NUMBA_CACHE_DIR": str(cache)}
    began_s, used_s = time.monotonic(), _of_children_s()
    subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return Start(job, package, time.monotonic() - began_s, _of_children_s() - used_s)


def _of_children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
