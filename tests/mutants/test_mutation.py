"""A mutation changes one place of one function, or says why it cannot."""

from dataclasses import replace
from pathlib import Path

import pytest

from mutants.mutation import Mutation, MutationError, problems, read_list
from mutants.sandbox import ROOT

SOURCE = """\
def first(a):
    return a + 1


class Second:
    @property
    def first(self):
        # größer: more bytes than characters
        return self.a + 1
"""
FAULT = Mutation("fault", "code.py", "Second.first", "+ 1", "- 1", "an example")


def test_only_the_named_function_is_changed() -> None:
    assert FAULT.apply(SOURCE) == SOURCE.replace("self.a + 1", "self.a - 1")
    assert replace(FAULT, function="first").apply(SOURCE) == SOURCE.replace("return a + 1", "return a - 1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"original": "+ 2"}, r"contains this text 0 times: '\+ 2'"),
        ({"original": "a"}, r"contains this text \d+ times"),
        ({"function": "Second.third"}, r"code\.py has 0 of Second\.third"),
        ({"function": "third"}, r"code\.py has 0 of third"),
        ({"replacement": "+"}, r"mutated, is not Python"),
        ({"replacement": "+ (1)"}, r"says the same"),
    ],
)
def test_a_mutation_that_does_not_fit_says_why(changes: dict[str, str], message: str) -> None:
    with pytest.raises(MutationError, match=message):
        replace(FAULT, **changes).apply(SOURCE)


def test_a_list_that_has_gone_stale_is_told_place_by_place(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(SOURCE)
    gone = replace(FAULT, path="gone.py")
    changed = replace(FAULT, name="changed", original="+ 2")
    first, second = problems([FAULT, gone, changed], tmp_path)
    assert "gone.py" in first
    assert second.startswith("changed: code.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "a"', "entry 1: .*missing"),
        ('name = "a"\npath = ""\nfunction = ""\noriginal = ""\nreplacement = ""\nwhy = " "', "no reason given for a"),
        ('name = "a"\npath = ""\nfunction = ""\noriginal = ""\nreplacement = ""\nwhy = ""\nline = "1"', "unexpected"),
    ],
)
def test_a_list_that_says_too_little_or_too_much_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.toml").write_text(f"[[mutation]]\n{text}\n")
    with pytest.raises(MutationError, match=message):
        read_list(tmp_path)


def test_names_are_unique_in_all_files(tmp_path: Path) -> None:
    entry = '[[mutation]]\nname = "a"\npath = ""\nfunction = ""\noriginal = ""\nreplacement = ""\nwhy = "b"\n'
    for name in ("first.toml", "second.toml"):
        (tmp_path / name).write_text(entry)
    with pytest.raises(MutationError, match="occur twice: a"):
        read_list(tmp_path)


def test_the_list_of_the_project_can_be_read() -> None:
    assert all(mutation.path.startswith("src/pagedkv/") for mutation in read_list())


def test_each_fault_of_the_list_fits_the_code() -> None:
    assert problems(read_list(), ROOT) == []
