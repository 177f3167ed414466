"""Twenty lines of the source, drawn at random: can somebody who sees ``ls -R src`` tell where each of them lives?

The commit is the seed, so that the lines are not chosen: the same commit draws the same lines. Left out are lines that
name their file, such as imports and ``__all__``, docstrings and comments, and lines without a name, such as a closing
bracket or ``else:``.

    python -m benchmarks.reading.drawn          the lines
    python -m benchmarks.reading.drawn --key    where they are
"""

import argparse
import ast
import io
import keyword
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.reading.pairs import Plan
from benchmarks.repository import commit_id, extracted

__all__ = ["Line", "all_lines", "draw", "lines_of"]

NUM_DRAWN: Final = 20


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """One line: its file, from the package on; its number there; its text."""

    file: str
    number: int
    text: str


def draw(package: Path, seed: str) -> list[Line]:
    """Draw lines from the package in a folder, in the order in which they were drawn."""
    return Random(seed).sample(all_lines(package), NUM_DRAWN)


def all_lines(package: Path) -> list[Line]:
    """List the lines of the package in a folder that may be drawn."""
    return [
        line
        for file in sorted(package.rglob("*.py"))
        for line in lines_of(file.relative_to(package).as_posix(), file.read_text())
    ]


def lines_of(file: str, source: str) -> Iterator[Line]:
    """List the lines of a file that may be drawn."""
    hidden = {number for node in ast.walk(ast.parse(source)) if _is_hidden(node) for number in _lines_of_node(node)}
    named = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
    }
    texts = source.splitlines()
    yield from (Line(file, number, texts[number - 1].strip()) for number in sorted(named - hidden))


def _is_hidden(node: ast.AST) -> bool:
    """Return whether a statement is an import, a text that stands alone, or the list of a module's public names."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())):
            return True
        case ast.Assign([ast.Name("__all__")]) | ast.AnnAssign(ast.Name("__all__")):
            return True
    return False


def _lines_of_node(node: ast.AST) -> range:
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def main() -> None:
    """Print the lines of a commit, or where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reading.drawn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--commit", default="HEAD", metavar="COMMIT", help="which (default: the one checked out)")
    parser.add_argument("--key", action="store_true", help="where they are, in place of their texts")
    arguments = parser.parse_args()
    commit, plan = commit_id(arguments.commit), Plan.read()
    with extracted(commit) as tree:
        drawn = draw(tree / "src" / "pagedkv", commit)
    print(f"lines of {commit}")
    for number, line in enumerate(drawn, 1):
        shown = f"{plan.room_of(line.file):24} {line.file}:{line.number}" if arguments.key else line.text
        print(f"{number:3}  {shown}")


if __name__ == "__main__":
    main()
