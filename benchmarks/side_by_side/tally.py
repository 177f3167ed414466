"""What a run has exercised: by mix, how often each operation ran and was carried out, and what it met."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["BROKEN", "DONE", "MET", "has_broken", "table_of"]

DONE: Final = "done"
BROKEN: Final = "BROKEN"
"""The outcome of a call that raised what is no error of ours."""
MET: Final = "met"
"""In place of an operation: the outcomes are what was met, such as hits."""
WIDTH: Final = 11


def has_broken(tally: Mapping[str, int]) -> bool:
    """Whether a call broke off."""
    return any(key.endswith(f": {BROKEN}") for key in tally)


def table_of(tallies: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Write a table: a column a mix, of each operation how often it ran and how many in a hundred were carried out."""
    yield from (f"{number:>3} {mix}" for number, mix in enumerate(tallies, 1))
    yield _line("", [str(number) for number in range(1, len(tallies) + 1)])
    operations = sorted({_operation_of(key) for tally in tallies.values() for key in tally} - {MET})
    for operation in operations:
        yield _line(operation, [_share(tally, operation) for tally in tallies.values()])
    yield ""
    for what in sorted({key for tally in tallies.values() for key in tally if _operation_of(key) == MET}):
        yield _line(what, [f"{tally[what]:,}" for tally in tallies.values()])


def _operation_of(key: str) -> str:
    return key.partition(": ")[0]


def _share(tally: Counter[str], operation: str) -> str:
    num_ran = sum(count for key, count in tally.items() if _operation_of(key) == operation)
    return f"{num_ran:,} {tally[f'{operation}: {DONE}'] / num_ran:4.0%}" if num_ran else "-"


def _line(name: str, cells: list[str]) -> str:
    return f"{name:24}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)
