"""Results are in the file as soon as they are known, and a later run asks which are missing."""

import json
from pathlib import Path

import pytest

from mutants.mutation import Mutation, MutationError
from mutants.results import killers_of_last_time, unjudged, write_result
from mutants.runner import Verdict

pytestmark = pytest.mark.plain_only

MUTATIONS = [Mutation(name, "src/code.py", "count", "a", "b", "an example") for name in ("one", "two", "three")]


def test_results_stay_until_they_are_replaced_and_tell_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "out" / "mutants.json"
    one, two, three = MUTATIONS
    assert unjudged(MUTATIONS, file) == MUTATIONS
    assert killers_of_last_time(file) == {}
    write_result(Verdict(two, "tests/a.py::test_a", is_over=True, seconds=1.0), file)
    write_result(Verdict(one, None, is_over=True, seconds=2.0), file)
    assert unjudged(MUTATIONS, file) == [three]
    assert killers_of_last_time(file) == {"two": "tests/a.py::test_a"}
    write_result(Verdict(one, "tests/b.py::test_b", is_over=True, seconds=2.0), file)
    assert killers_of_last_time(file) == {"one": "tests/b.py::test_b", "two": "tests/a.py::test_a"}
    assert [each["result"] for each in json.loads(file.read_text())] == ["killed", "killed"]
    assert [each.name for each in file.parent.iterdir()] == ["mutants.json"]


def test_going_on_needs_a_file() -> None:
    with pytest.raises(MutationError, match="--json FILE"):
        unjudged(MUTATIONS, None)
