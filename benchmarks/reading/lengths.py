"""How long functions and files are, signatures and docstrings included. Kernels of devices are left out."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

__all__ = ["LONGEST_FUNCTION", "Length", "Lengths", "lengths_of"]

LONGEST_FUNCTION: Final = 60
LONGEST_FILE: Final = 450
KERNELS: Final = "device/kernels/"


@dataclass(frozen=True, slots=True)
class Length:
    """One function or file.

    Args:
        name: ``file`` or ``file: function``, from the package on; num_lines: all of it.
        num_behind: of a function, the lines behind its signature and docstring; of a file, all.
    """

    name: str
    num_lines: int
    num_behind: int

    def __str__(self) -> str:
        behind = f" ({self.num_behind} behind the docstring)" if self.num_behind < self.num_lines else ""
        return f"{self.name}: {self.num_lines}{behind}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is long, and how long functions are in the mean."""

    long_functions: tuple[Length, ...]
    mean_function: float
    long_files: tuple[Length, ...]


def lengths_of(package: Path) -> Lengths:
    """Measure the package in a folder."""
    files: list[Length] = []
    functions: list[Length] = []
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        if KERNELS in name:
            continue
        source = file.read_text()
        num_lines = len(source.splitlines())
        files.append(Length(name, num_lines, num_lines))
        functions += _functions_of(name, ast.parse(source))
    return Lengths(
        tuple(each for each in functions if each.num_lines > LONGEST_FUNCTION),
        mean(each.num_lines for each in functions),
        tuple(each for each in files if each.num_lines > LONGEST_FILE),
    )


def _functions_of(file: str, tree: ast.Module) -> Iterator[Length]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            first = node.body[1:2] if ast.get_docstring(node) else node.body[:1]
            num_behind = end - first[0].lineno + 1 if first else 0
            yield Length(f"{file}: {node.name}", end - node.lineno + 1, num_behind)
