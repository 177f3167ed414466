"""What calls cost is left out, and nothing else."""

from pathlib import Path
from types import CodeType

import pytest

from benchmarks.reading.inlining import num_lines_inlined
from benchmarks.reading.jobs import Executed

pytestmark = pytest.mark.interpreted

SOURCE = """\
def outer(values):
    total = inner(
        values,
        2,
    )
    note(total)
    return len(values) + total


def inner(values, times):
    found = 0
    for value in values:
        found += times * value
    return found


def note(total):
    print(total)
"""


def executed_as_in(file: Path) -> Executed:
    """Act as if all lines of the functions in a file were executed."""
    module = compile(file.read_text(), str(file), "exec")
    codes = {each for each in module.co_consts if isinstance(each, CodeType)}
    lines = {
        (str(file), line) for code in codes for *_, line in code.co_lines() if line and line != code.co_firstlineno
    }
    return Executed(lines, codes)


def test_a_function_has_one_line_less_and_a_call_has_none(tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    executed = executed_as_in(file)
    assert len(executed.lines) == 10, "of outer 5 (a call's last line is none), of inner 4, of note 1"
    assert num_lines_inlined(executed) == 6, "4 of inner, the last of which assigns the total, 1 of note, 1 of outer"


def test_one_function_alone_is_all_left(tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(SOURCE.partition("def inner")[2].join(("def inner", "")).partition("\n\n\n")[0])
    assert num_lines_inlined(executed_as_in(file)) == 4
