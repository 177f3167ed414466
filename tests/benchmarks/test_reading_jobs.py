"""What counts as executed, and what the jobs execute."""

import pytest

from benchmarks.reading.jobs import JOBS, executed
from pagedkv.arguments import as_count

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
