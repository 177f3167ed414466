"""What the lines do that execute in a job: lines and functions by part, functions of one line, and lines once inlined.

    NUMBA_DISABLE_JIT=1 python -m benchmarks.reading.parts [--write]

``benchmarks/reading/parts.toml`` has the parts of the memory system; other files count under their room.
"""

import argparse
import os
import tomllib
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Final

from benchmarks.markdown import table, with_table
from benchmarks.reading.inlining import num_lines_inlined
from benchmarks.reading.jobs import JOBS, SOURCE, Executed
from benchmarks.repository import ROOT

__all__ = ["Parts", "table_of"]

PAGE: Final = ROOT / "docs" / "benchmarks.md"
FILE: Final = Path(__file__).with_suffix(".toml")
ONE_LINE: Final = "functions of which one line executes"
INLINED: Final = "lines left if all functions were inlined, at least"


class Parts:
    """The part to which each file belongs."""

    def __init__(self, file: Path = FILE) -> None:
        self._parts = tomllib.loads(file.read_text(encoding="utf-8"))["part"]
        self.names = [str(part["what"]) for part in self._parts]

    def of(self, file: str) -> str:
        """Return the part of a file, a path from the package on; its room where none is named."""
        for part in self._parts:
            if file.startswith(tuple(part["files"])):
                return str(part["what"])
        return "/".join(file.split("/")[:2]) if file.count("/") > 1 else file.split("/", maxsplit=1)[0]

    def counts(self, executed: Executed) -> tuple[Counter[str], Counter[str]]:
        """Count lines and functions by part, and functions of one line."""
        lines = Counter(self.of(_inside(file)) for file, _ in executed.lines)
        functions = Counter(self.of(_inside(code.co_filename)) for code in executed.functions)
        functions[ONE_LINE] = sum(_num_lines(code, executed) == 1 for code in executed.functions)
        return lines, functions


def _inside(file: str) -> str:
    return Path(file).relative_to(SOURCE).as_posix()


def _num_lines(code: CodeType, executed: Executed) -> int:
    own = {line for _, _, line in code.co_lines() if line is not None}
    return sum((code.co_filename, line) in executed.lines for line in own)


def table_of(jobs: dict[str, Executed], parts: Parts) -> str:
    """Set lines / functions of each part and job in Markdown, the parts in their order and rooms behind them."""
    counted = {job: parts.counts(executed) for job, executed in jobs.items()}
    found = {part for lines, _ in counted.values() for part in lines}
    names = [name for name in parts.names if name in found] + sorted(found - set(parts.names))
    cells = ({name: f"{lines[name]:,} / {functions[name]}" for name in names} for lines, functions in counted.values())
    columns = list(cells)
    rows = ((name, *(column[name] for column in columns)) for name in names)
    ones = (ONE_LINE, *(str(functions[ONE_LINE]) for _, functions in counted.values()))
    inlined = (INLINED, *(f"{num_lines_inlined(executed):,}" for executed in jobs.values()))
    return table(("lines / functions", *jobs), *rows, ones, inlined)


def main() -> None:
    """Run the jobs, print the table, and write it where it is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reading.parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        parser.error("compiled loops cannot be seen into: set NUMBA_DISABLE_JIT=1")
    shown = table_of({name: job() for name, job in JOBS.items()}, Parts())
    print(shown)
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "reading parts", shown))


if __name__ == "__main__":
    main()
