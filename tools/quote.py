"""Writes the quotes of docs/life-of-a-request.md from the sources: ``python -m tools.quote``.

On the page, a comment names what is quoted, and everything up to the next ``<!-- end of quote -->`` is written here::

    <!-- quote: Scheduler.schedule -->                                    all of it, without its docstring
    <!-- quote: space.acknowledge, from "with state" to "settle(" -->     the lines from the first with one text
                                                                          to the next with the other

A name is that of a function or a method, behind its room if it is not the only one in the package. No file is named, so
that code may move between files; a name that is gone, or stands twice, is an error.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple

__all__ = ["PAGE", "Quote", "quoted", "quotes_of", "with_quotes"]

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "src" / "pagedkv"
PAGE: Final = ROOT / "docs" / "life-of-a-request.md"
PLACE: Final = re.compile(
    r'(<!-- quote: (?P<name>[\w.]+)(?:, from "(?P<first>[^"]+)" to "(?P<last>[^"]+)")? -->\n)'
    r"(?P<text>.*?)(<!-- end of quote -->)",
    re.DOTALL,
)


class Quote(NamedTuple):
    """What the page quotes, and what stands there."""

    name: str
    first: str | None
    last: str | None
    text: str


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_quotes(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def quotes_of(page: str) -> list[Quote]:
    """List the quotes of a page, in their order."""
    return [Quote(each["name"], each["first"], each["last"], each["text"]) for each in PLACE.finditer(page)]


def with_quotes(page: str) -> str:
    """Put the sources of today into a page. Raises ValueError: a name is not that of one function."""
    return PLACE.sub(lambda place: place[1] + quoted(place["name"], place["first"], place["last"]) + place[6], page)


def quoted(name: str, first: str | None = None, last: str | None = None) -> str:
    """Write a quote: the name, the file, and the lines.

    Raises:
        ValueError: no function has this name, or several have it, or a text is not in it.
    """
    found = functions().get(name, [])
    if len(found) != 1:
        raise ValueError(f"{len(found)} functions are named {name}: {', '.join(place for place, _ in found)}")
    place, lines = found[0]
    if first is not None and last is not None:
        begin = _line_with(first, lines, 0, name)
        lines = lines[begin : _line_with(last, lines, begin, name) + 1]
    code = dedent("\n".join(lines))
    return f"`{name.rpartition('.')[2] if name[0].islower() else name}` in `{place}`:\n\n```py\n{code}\n```\n\n"


def _line_with(text: str, lines: list[str], begin: int, name: str) -> int:
    for number, line in enumerate(lines[begin:], begin):
        if text in line:
            return number
    raise ValueError(f"{name} has no line with {text!r} behind its line {begin}")


@cache
def functions() -> dict[str, list[tuple[str, list[str]]]]:
    """Find all functions: file and lines by ``name``, ``Class.name``, and both behind the room."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        place = path.relative_to(PACKAGE)
        for name, node in _functions_in(ast.parse(source)):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            entry = (place.as_posix(), _without_docstring(lines, node))
            for known_as in (name, f"{place.parts[0]}.{name}"):
                found.setdefault(known_as, []).append(entry)
    return found


def _functions_in(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _without_docstring(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    if ast.get_docstring(node) is None:
        return lines
    docstring = node.body[0]
    assert docstring.end_lineno is not None
    return lines[: docstring.lineno - node.lineno] + lines[docstring.end_lineno - node.lineno + 1 :]


if __name__ == "__main__":
    main()
