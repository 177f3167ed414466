"""What counts as a difference between two streams of calls, and what is told of it."""

import json
from collections import Counter

import pytest

from benchmarks.side_by_side import comparing
from benchmarks.side_by_side.comparing import Comparison

TALLY = json.dumps({"mix": "full", "tally": {"free: done": 2}}) + "\n"


def compare(now: list[str], then: list[str]) -> Comparison:
    return comparing.compare(now, then, lambda _: None)


def call(number: int, answer: object, state: object = None) -> str:
    return json.dumps([7, number, '["free", 1]', answer, state]) + "\n"


def error(text: str, numbers: tuple[str, ...] = ("1",), name: str = "BlockError") -> dict[str, object]:
    return {"error": name, "numbers": numbers, "text": text}


def told_of(now: object, then: object) -> str:
    """The first difference between two answers to one call, after one that is alike."""
    comparison = compare([call(0, 1), call(1, now), call(2, 3)], [call(0, 1), call(1, then), call(2, 4)])
    assert comparison.num_calls == 1
    assert comparison.difference is not None
    assert comparison.difference.life == 7
    return str(comparison.difference)


def test_what_is_alike_is_counted() -> None:
    lines = [call(0, 1), call(1, error("block 1")), TALLY, call(0, {"rows": [1]}), TALLY]
    assert compare(lines, list(lines)) == Comparison(3, None, Counter(), {"full": Counter({"free: done": 4})})


def test_the_first_difference_ends_it_and_names_call_operation_place_and_both_values() -> None:
    told = told_of({"Allocation": {"row": 1, "hits": [1, 2]}}, {"Allocation": {"row": 1, "hits": [1, 3]}})
    lines = ['call 1: ["free", 1]', "answer.Allocation.hits", "now:  [1, 2]", "then: [1, 3]"]
    assert [line.strip() for line in told.splitlines()] == lines


@pytest.mark.parametrize("other", [error("block 1", name="StepError"), error("block 2", ("2",)), None])
def test_another_class_another_number_or_no_error_is_a_difference(other: object) -> None:
    assert "now:" in told_of(error("block 1"), other)


def test_errors_in_other_words_are_kept_apart_and_it_goes_on() -> None:
    texts = ("block 1 is free", "no row has block 1")
    comparison = compare(*([call(0, error(text)), call(1, error(text)), call(2, 0)] for text in texts))
    assert comparison.difference is None
    assert comparison.num_calls == 3
    assert comparison.reworded == {("block N is free", "no row has block N"): 2}


def test_other_words_hide_no_other_state() -> None:
    lines = ([call(0, error(text), state)] for text, state in (("a 1", [1]), ("b 1", [2])))
    assert compare(*lines).difference is not None


def test_a_process_that_ends_early_is_a_difference() -> None:
    assert "one process ended" in str(compare([call(0, 1)], [call(0, 1), call(1, 1)]).difference)
    assert "one life ended" in str(compare([TALLY], [call(0, 1)]).difference)


def test_a_call_that_breaks_off_in_both_is_kept() -> None:
    broken = call(1, error("index and named blocks differ", name="AssertionError"))
    lines = [call(0, 1), broken, json.dumps({"mix": "full", "tally": {"check: BROKEN": 1}}) + "\n", call(0, 1), TALLY]
    comparison = compare(lines, list(lines))
    assert comparison.difference is None
    assert comparison.broken == [broken]
