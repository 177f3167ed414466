"""Who imports what: every name that a file takes from the package, with the file that defines it.

A name that a file has itself only imported counts for the file where it comes from, however many lie between.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

__all__ = ["Sources", "Taken"]

PACKAGE: Final = "pagedkv"


@dataclass(frozen=True, slots=True)
class Taken:
    """A name that a file imports.

    Args:
        file: the file that imports it, from the package's folder on; door: the file that it names there.
        origin: the file that defines it; name: the name there, empty for the file as a whole.
    """

    file: str
    door: str
    origin: str
    name: str


@dataclass(frozen=True)
class Sources:
    """The files of a package, which lies in a folder."""

    package: Path

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Every file, parsed, by its path from the package's folder on."""
        files = sorted(self.package.rglob("*.py"))
        return {file.relative_to(self.package).as_posix(): ast.parse(file.read_text()) for file in files}

    @cached_property
    def taken(self) -> tuple[Taken, ...]:
        """Every name that a file takes from another one of the package, once."""
        found = (self._taken(file, *asked) for file, tree in self.trees.items() for asked in _asked(tree))
        return tuple(dict.fromkeys(each for each in found if each.origin != each.file))

    @cached_property
    def _imported(self) -> dict[str, dict[str, tuple[str, str]]]:
        """By file, the names that it has by importing them: as what, from which module and under which name."""
        return {file: _by_alias(tree) for file, tree in self.trees.items()}

    def _taken(self, file: str, module: str, name: str) -> Taken:
        origin, name_there = self._origin(module, name)
        return Taken(file, self._file_of(module) or origin, origin, name_there)

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Find the file that defines a name which a module offers, and how it is called there."""
        if (whole := self._file_of(f"{module}.{name}")) is not None:
            return whole, ""
        file = self._file_of(module)
        assert file is not None, f"no file of {module}"
        further = self._imported[file].get(name)
        return (file, name) if further is None else self._origin(*further)

    def _file_of(self, module: str) -> str | None:
        path = module.removeprefix(PACKAGE).removeprefix(".").replace(".", "/")
        candidates = (f"{path}.py", f"{path}/__init__.py".removeprefix("/"))
        return next((file for file in candidates if file in self.trees), None)


def _asked(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """List what a file imports from the package: (module, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (_split(alias.name) for alias in node.names if alias.name.startswith(f"{PACKAGE}."))


def _split(module: str) -> tuple[str, str]:
    parent, _, name = module.rpartition(".")
    return parent, name


def _by_alias(tree: ast.Module) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE
        for alias in node.names
    }
