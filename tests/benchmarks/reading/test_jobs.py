"""What counts as executed, and what the jobs execute."""

import re

import pytest

from benchmarks.markdown import table_of as table_on
from benchmarks.reading.__main__ import BARS, PAGE, num_code_lines, table_of
from benchmarks.reading.jobs import JOBS, executed
from pagedkv.contract.arguments import as_count

pytestmark = pytest.mark.interpreted


def test_lines_functions_and_files_are_counted_once_each_and_those_of_others_not() -> None:
    with executed() as told:
        as_count(3, "num_tokens")
        as_count(4, "num_tokens")
    assert {code.co_name for code in told.functions} == {"as_count"}
    assert [file.rsplit("/", 1)[1] for file in told.files] == ["arguments.py"]
    first = as_count.__code__.co_firstlineno
    assert 0 < len(told.lines) < 30
    assert all(first < line < first + 60 for _, line in told.lines)


def test_nothing_is_counted_outside_the_block() -> None:
    with executed() as told:
        pass
    as_count(3, "num_tokens")
    assert not told.lines


@pytest.mark.parametrize("job", ["allocate 100 tokens", "free", "admit 4 requests"])
def test_a_job_executes_the_same_every_time(job: str) -> None:
    one, other = JOBS[job](), JOBS[job]()
    assert one.lines == other.lines
    assert len(one.lines) > len(one.functions) > len(one.files) > 1


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = '"""A module.\n\nMore."""\n\nVALUE = (  # one\n    1,\n)\n# two\n\n\n'
    source += 'def f() -> int:\n    """Give."""\n    return """a\nb"""\n'
    assert num_code_lines(source) == 6


def test_the_page_has_the_table_that_the_command_writes() -> None:
    figures = {"jobs": {job: [1234, 2, 1] for job in BARS}, "num_files": 3, "num_code_lines": 1000}
    written = table_of(figures, figures, "2592e74").splitlines()
    assert "| free: lines / functions / files | 1,234 / 2 / 1 | 1,234 / 2 / 1 | 8 files, 20 functions |" in written
    counted_at, _, *on_page = table_on(PAGE.read_text(), "reading").splitlines()
    assert re.fullmatch(r"Counted at commit \w+( modified)?, 20\d\d-\d\d-\d\d\.", counted_at)
    assert [line.split("|")[1] for line in on_page] == [line.split("|")[1] for line in written]
    assert JOBS.keys() == BARS.keys()
