"""How much executes in a few jobs, and how much code there is: now, in another commit, and the bars."""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.markdown import table, with_table
from benchmarks.repository import ROOT, commit_id, extracted, state

BEFORE: Final = "3263f7a7"
"""The last commit in which a file had a bound of lines, and every column one writer."""
PAGE: Final = ROOT / "docs" / "benchmarks.md"
BARS: Final = {
    "allocate 100 tokens": "",
    "the same, with a hit": "13 files, 50 functions",
    "append that completes a block": "10 files, 33 functions",
    "free": "8 files, 20 functions",
    "admit 4 requests": "",
    "a decode step of the engine": "30 files, 200 functions",
    "a chat completion": "20 files, 170 functions",
}
NUM_FILES: Final = 450
NUM_CODE_LINES: Final = 62_000
NOT_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def main() -> None:
    """Measure both, print the table, and write it where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("--against", default=BEFORE, metavar="COMMIT", help="%(default)s if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    now = figures_of(ROOT / "src")
    with extracted(commit_id(arguments.against)) as tree:
        then = figures_of(tree / "src")
    shown = table_of(now, then, arguments.against)
    print(shown)
    if arguments.write:
        counted_at = f"Counted at commit {state()}, {datetime.now(UTC).date().isoformat()}.\n\n"
        PAGE.write_text(with_table(PAGE.read_text(), "reading", counted_at + shown))
    if arguments.json:
        arguments.json.write_text(json.dumps({"commit": state(), "now": now, "then": then, "bars": BARS}, indent=1))


def figures_of(source: Path) -> dict[str, Any]:
    """Measure the package in a source folder: what jobs execute, its files, and its lines of code."""
    environment = {**os.environ, "PYTHONPATH": str(source), "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-m", "benchmarks.reading.jobs"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    files = sorted((source / "pagedkv").rglob("*.py"))
    return {
        "jobs": json.loads(printed),
        "num_files": len(files),
        "num_code_lines": sum(num_code_lines(file.read_text()) for file in files),
    }


def num_code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, no comment alone, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def table_of(now: dict[str, Any], then: dict[str, Any], commit: str) -> str:
    """Set the figures of both in Markdown, beside the bars."""
    jobs = (
        (f"{job}: lines / functions / files", *(_three(each["jobs"].get(job)) for each in (then, now)), bar)
        for job, bar in BARS.items()
    )
    sizes = (
        ("files", f"{then['num_files']:,}", f"{now['num_files']:,}", f"{NUM_FILES:,}"),
        ("lines of code", f"{then['num_code_lines']:,}", f"{now['num_code_lines']:,}", f"{NUM_CODE_LINES:,}"),
    )
    return table(("what", commit, "now", "bar"), *jobs, *sizes)


def _three(counts: tuple[int, int, int]) -> str:
    return " / ".join(f"{count:,}" for count in counts)


if __name__ == "__main__":
    main()
