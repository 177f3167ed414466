"""Each file belongs to one part, all that executes is counted once, and the page has the table."""

import os
from typing import Final

import pytest

from benchmarks.markdown import table_of as table_on
from benchmarks.reading.jobs import JOBS
from benchmarks.reading.parts import ONE_LINE, PAGE, Parts, table_of

pytestmark = pytest.mark.interpreted

NUMBA_IS_OFF: Final = os.environ.get("NUMBA_DISABLE_JIT") == "1"


def test_a_file_belongs_to_the_first_part_that_names_it_or_to_its_room() -> None:
    parts = Parts()
    assert parts.of("memory/pool/links.py") == "one writer for each column: blocks, rows, lists"
    assert parts.of("memory/pool/life_cycle.py") == "life of blocks"
    assert parts.of("serving/engine/loop.py") == "serving/engine"
    assert parts.of("engine.py") == "engine.py"


def test_all_that_executes_is_counted_once() -> None:
    executed = JOBS["free"]()
    lines, functions = Parts().counts(executed)
    assert lines.total() == len(executed.lines)
    assert functions.total() - functions[ONE_LINE] == len(executed.functions)
    assert functions[ONE_LINE] < len(executed.functions)
    assert functions[ONE_LINE] > 0 or not NUMBA_IS_OFF, "compiled loops cannot be seen into"


def test_the_page_has_the_table_that_the_command_writes() -> None:
    written = table_of({name: JOBS[name]() for name in ("free", "allocate 100 tokens")}, Parts()).splitlines()
    on_page = table_on(PAGE.read_text(), "reading parts").splitlines()
    names = {line.split("|")[1] for line in on_page[2:]}
    assert {line.split("|")[1] for line in written[2:]} <= names
