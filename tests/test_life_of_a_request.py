"""The life of a request: the page quotes the code as it is."""

import re

import pytest

from tools.quote import PAGE, functions, quoted, quotes_of, with_quotes

pytestmark = pytest.mark.interpreted
TEXT = PAGE.read_text(encoding="utf-8")
FENCE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_quotes_the_code_as_it_is() -> None:
    assert with_quotes(TEXT) == TEXT, "write it again: python -m tools.quote"


def test_all_code_on_the_page_is_quoted() -> None:
    assert len(quotes_of(TEXT)) > 20
    assert len(FENCE.findall(TEXT)) == TEXT.count("```") // 2 == len(quotes_of(TEXT))


def test_at_most_300_lines_are_quoted() -> None:
    assert 100 < sum(len(code.splitlines()) for code in FENCE.findall(TEXT)) <= 300


def test_a_line_that_has_changed_is_noticed() -> None:
    changed = TEXT.replace("self.tables.fence(stream)", "self.tables.fence()")
    assert changed != TEXT
    assert with_quotes(changed) == TEXT


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("Scheduler.gone", None, None), ("grow", None, None), ("Scheduler.finish", "no such", "line")],
)
def test_a_quote_of_nothing_is_an_error(name: str, first: str | None, last: str | None) -> None:
    with pytest.raises(ValueError, match=f"{name}"):
        quoted(name, first, last)


def test_a_docstring_is_left_out_and_a_comment_is_not() -> None:
    ((_, lines),) = functions()["blocks._make_vacant_by_call"]
    assert [line.strip() for line in lines] == [
        "def _make_vacant_by_call(pool: PoolArrays) -> int:",
        "return int(_make_vacant(pool))",
    ]
