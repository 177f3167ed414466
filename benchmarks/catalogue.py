"""What there is to measure: the operations of each module of benchmarks, in the order of the tables.

Modules are imported by name, one at a time: an older package may lack what one of them imports, and the others still
measure it. They import by the paths that users import, which stay, and no inner ones, which may move.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from benchmarks.measure import Row

__all__ = ["MODULES", "Operation", "function_of", "operations"]

MODULES: Final = (
    "benchmarks.operations",
    "benchmarks.matching",
    "benchmarks.loops",
    "benchmarks.plans",
    "benchmarks.receipts",
    "benchmarks.partial_hits",
    "benchmarks.replay",
    "benchmarks.explaining",
    "benchmarks.draft_states",
    "benchmarks.tenants",
    "benchmarks.growing_costs",
    "benchmarks.leases",
    "benchmarks.between_passes",
)
"""Each has a tuple ``OPERATIONS`` of functions that check what they measure and yield rows. Add new ones here."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The name of one function that yields rows.

    Args:
        module: the name of its module; name: its own; summary: the first line of its docstring.
    """

    module: str
    name: str
    summary: str

    def __str__(self) -> str:
        """Give the name as ``--only`` may name it."""
        return f"{self.module.removeprefix('benchmarks.')}.{self.name}"

    def is_meant_by(self, words: str) -> bool:
        """Return whether these words occur in the name or the summary, in either case."""
        return words.lower() in f"{self} {self.summary}".lower()


def operations(only: str = "") -> list[Operation]:
    """List the operations whose name or summary contains ``only``."""
    found = [
        Operation(module, function.__name__, (function.__doc__ or "").strip().partition("\n")[0])
        for module in MODULES
        for function in import_module(module).OPERATIONS
    ]
    return [operation for operation in found if operation.is_meant_by(only)]


def function_of(module: str, name: str) -> Callable[[], Iterator[Row]]:
    """Import the function itself. Raises whatever its module raises on import."""
    by_name: dict[str, Callable[[], Iterator[Row]]] = {each.__name__: each for each in import_module(module).OPERATIONS}
    return by_name[name]
