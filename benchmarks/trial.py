"""One operation, measured in a process of its own, with the ``pagedkv`` package of a chosen source folder.

The process finds its package through ``PYTHONPATH`` and keeps its machine code in a cache folder of its own, since a
cache that both versions wrote could give one version the loops of the other. It prints each row as a line of JSON as
soon as it is measured, and at the end the failure, if there was one: an older package may lack what an operation needs.

    python -m benchmarks.trial MODULE OPERATION SOURCE
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pagedkv
from benchmarks.catalogue import Operation, function_of
from benchmarks.measure import Row, Timing
from benchmarks.repository import ROOT

__all__ = ["Outcome", "Package", "run_trial"]


@dataclass(frozen=True, slots=True)
class Package:
    """One version of the package.

    Args:
        name: for the table; source: the folder that holds ``pagedkv``; cache: the folder for its machine code.
    """

    name: str
    source: Path
    cache: Path

    def environment(self) -> dict[str, str]:
        """Give a process the environment in which it imports this version."""
        return {**os.environ, "PYTHONPATH": str(self.source), "NUMBA_CACHE_DIR": str(self.cache)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial measured, and why it ended early, if it did."""

    rows: tuple[Row, ...]
    failure: str | None = None

    @classmethod
    def from_lines(cls, lines: Iterable[str], failure: str | None = None) -> "Outcome":
        """Read what a trial printed."""
        rows = []
        for document in map(json.loads, lines):
            if "failure" in document:
                failure = document["failure"]
            else:
                rows.append(Row(**{**document, "timing": Timing(**document["timing"])}))
        return cls(tuple(rows), failure)


def run_trial(operation: Operation, package: Package) -> Outcome:
    """Measure an operation once, in a new process."""
    command = [sys.executable, "-m", "benchmarks.trial", operation.module, operation.name, str(package.source)]
    done = subprocess.run(command, cwd=ROOT, env=package.environment(), capture_output=True, text=True, check=False)
    crash = None
    if done.returncode:
        crash = f"exit code {done.returncode}: {''.join(done.stderr.splitlines()[-1:])}"
    return Outcome.from_lines(done.stdout.splitlines(), crash)


def measure(module: str, name: str) -> None:
    """Print the rows of an operation; an exception ends it and is printed as its failure."""
    try:
        for row in function_of(module, name)():
            print(json.dumps(asdict(row)))
    except Exception as error:  # noqa: BLE001 - the table shows any error beside the row
        print(json.dumps({"failure": _told(error)}))


def _told(error: Exception) -> str:
    """Name an exception, and the last line of the benchmarks on its way."""
    words = "".join(traceback.format_exception_only(error)).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
    return f"{words} ({Path(ours[-1].filename).name}:{ours[-1].lineno})"


def main() -> None:
    """Measure one operation with the package of one source folder."""
    module, name, source = sys.argv[1:]
    imported = Path(pagedkv.__file__)
    if not imported.is_relative_to(source):
        sys.exit(f"pagedkv was imported from {imported}, not from {source}")
    measure(module, name)


if __name__ == "__main__":
    main()
