"""One mutation: a piece of one function and what replaces it; and the list of all.

A mutation names its place by the text itself, which must occur once in the named function. So the list does not
shift when lines do, and it cannot rot in silence: a text that is gone is an error, before anything runs. The list is a
folder, with a file for each idea. Keys of an entry are the fields of :class:`Mutation`; a statement that is removed has
an empty replacement, or ``pass`` where a line must stand.
"""

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Final

__all__ = ["LIST", "Mutation", "MutationError", "problems", "read_list"]

LIST: Final = Path(__file__).with_name("list")


class MutationError(ValueError):
    """A mutation that does not fit the code, or is not well described."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Args:
        name: unique; path: of the file, from the root of the tree.
        function: where the text is, as ``function`` or ``Class.method``.
        original: text that occurs once in it; replacement: what it becomes.
        why: what the line is for.
        equivalent: why no test can notice; empty if one should.
    """

    name: str
    path: str
    function: str
    original: str
    replacement: str
    why: str
    equivalent: str = ""

    def apply(self, source: str) -> str:
        """Return the source with the fault in it.

        Raises:
            MutationError: no such function, its text does not occur exactly once, or the outcome is not Python.
        """
        start, stop = self._span(source)
        body = source[start:stop]
        count = body.count(self.original)
        if count != 1:
            raise MutationError(
                f"{self.name}: {self.path}: {self.function} contains this text {count} times: {self.original!r}"
            )
        mutated = body.replace(self.original, self.replacement)
        try:
            changed = ast.dump(ast.parse(dedent(mutated))) != ast.dump(ast.parse(dedent(body)))
        except SyntaxError as error:
            raise MutationError(f"{self.name}: {self.path}, mutated, is not Python: {error}") from error
        if not changed:
            raise MutationError(f"{self.name}: the replacement says the same as the original")
        return source[:start] + mutated + source[stop:]

    def _span(self, source: str) -> tuple[int, int]:
        """Find where the function begins and ends, in characters."""
        scope: ast.AST = _parsed(source)
        for name in self.function.split("."):
            found = [
                node
                for node in ast.iter_child_nodes(scope)
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
            ]
            if len(found) != 1:
                raise MutationError(f"{self.name}: {self.path} has {len(found)} of {self.function}")
            scope = found[0]
        assert isinstance(scope, ast.FunctionDef | ast.ClassDef)
        lines = source.splitlines(keepends=True)
        return sum(map(len, lines[: scope.lineno - 1])), sum(map(len, lines[: scope.end_lineno]))


def read_list(folder: Path = LIST) -> list[Mutation]:
    """Read the list, a file after another.

    Raises:
        MutationError: unknown or missing keys, an empty reason, or a name that occurs twice.
    """
    mutations = [mutation for file in sorted(folder.glob("*.toml")) for mutation in _read_file(file)]
    names = [mutation.name for mutation in mutations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutationError(f"{folder.name}: names that occur twice: {', '.join(twice)}")
    without = [mutation.name for mutation in mutations if not mutation.why.strip()]
    if without:
        raise MutationError(f"{folder.name}: no reason given for {', '.join(without)}")
    return mutations


def _read_file(file: Path) -> list[Mutation]:
    mutations = []
    for number, entry in enumerate(tomllib.loads(file.read_text(encoding="utf-8"))["mutation"], 1):
        try:
            mutations.append(Mutation(**entry))
        except TypeError as error:
            raise MutationError(f"{file.name}, entry {number}: {error}") from error
    return mutations


@cache
def _parsed(source: str) -> ast.Module:
    """Parse a file, once for all of its mutations."""
    return ast.parse(source)


def problems(mutations: list[Mutation], root: Path) -> list[str]:
    """Tell which mutations do not fit the tree."""
    found = []
    for mutation in mutations:
        try:
            mutation.apply((root / mutation.path).read_text(encoding="utf-8"))
        except (MutationError, OSError) as error:
            found.append(str(error))
    return found
