"""Which tests call a function: a plugin for pytest that notes it, and the choice of the quickest of them.

Loaded with ``-p mutants.callers``, in a copy without a fault. Each Python call below ``src`` within a test counts,
found by ``sys.settrace`` without tracing lines. Written as JSON into the folder ``MUTANTS_CALLERS``, a file a process:
by source file and function the ids of tests with their seconds.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import Final, final

import pytest

from mutants.mutation import Mutation

__all__ = ["Callers"]

MOST_TESTS: Final = 40
"""Tests of one function that are run first."""
MOST_SECONDS: Final = 30.0
"""What these may take together, in seconds, as measured while they were traced."""
SOURCES: Final = f"{os.sep}src{os.sep}"


@final
class Callers:
    """The tests that call each function.

    Args:
        tests: by ``PATH::FUNCTION``, ids of tests and their seconds.
    """

    def __init__(self, tests: dict[str, dict[str, float]]) -> None:
        self._tests = tests

    @classmethod
    def read(cls, files: Iterable[Path]) -> "Callers":
        """Join what processes have written."""
        tests: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for file in files:
            for function, seconds in json.loads(file.read_text(encoding="utf-8")).items():
                tests[function] |= seconds
        return cls(dict(tests))

    def write(self, file: Path) -> None:
        """Write all of it, to be read again."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self._tests), encoding="utf-8")

    def quickest(self, mutation: Mutation) -> tuple[str, ...]:
        """Return tests that call the function of a mutation, the quickest first; empty if none is known."""
        seconds = self._tests.get(f"{mutation.path}::{mutation.function}", {})
        chosen, left_s = [], MOST_SECONDS
        for test in sorted(seconds, key=lambda test: (seconds[test], test))[:MOST_TESTS]:
            left_s -= seconds[test]
            if left_s < 0:
                break
            chosen.append(test)
        return tuple(chosen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test calls, with its fixtures."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG001 - as sys.settrace calls it
        called.add(frame.f_code)

    threading.settrace(note)
    sys.settrace(note)
    begun = perf_counter()
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
    seconds = round(perf_counter() - begun, 4)
    for code in called:
        _, found, inside = code.co_filename.rpartition(SOURCES)
        if found:
            _SECONDS[f"src/{inside}::{code.co_qualname.replace('<locals>.', '')}"][item.nodeid] = seconds


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    folder = Path(os.environ["MUTANTS_CALLERS"])
    (folder / f"{os.getpid()}.json").write_text(json.dumps(_SECONDS), encoding="utf-8")


_SECONDS: Final[defaultdict[str, dict[str, float]]] = defaultdict(dict)
