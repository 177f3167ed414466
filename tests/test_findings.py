"""What docs/findings.md shows is what the commands find: the tables that take seconds, and the places of the others."""

import re
from typing import Final

import pytest

from benchmarks import findings, sharing

PAGE: Final = findings.PAGE.read_text(encoding="utf-8")
TRACES: Final = findings.TRACES

with_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")


@with_traces
@pytest.mark.parametrize("name", ["agent benchmarks", pytest.param("mooncake synthetic", marks=pytest.mark.long)])
def test_a_curve_on_the_page_is_what_the_command_finds(name: str) -> None:
    assert findings.TABLES[name](TRACES) == findings.table_of(PAGE, name)


@pytest.mark.long
def test_a_row_of_the_sharing_table_is_what_the_benchmark_finds() -> None:
    assert f"| 2 samples | 6.1 % | {sharing.saving('num_samples', 2):.1f} % |" in findings.table_of(PAGE, "sharing")


def test_the_bytes_a_block_on_the_page_are_what_pools_take() -> None:
    assert findings.bookkeeping_table() == findings.table_of(PAGE, "bookkeeping")


def test_a_million_blocks_take_at_most_160_bytes_each_and_200_with_the_adaptive_policy() -> None:
    """Promise 19, for both policies."""
    assert findings.bytes_a_block("lru", 1_000_000) <= 160
    assert findings.bytes_a_block("adaptive", 1_000_000) <= 200


def test_every_table_of_the_page_is_written_by_the_command_or_named_as_anothers() -> None:
    prose = PAGE
    for name in (*findings.TABLES, *findings.BY_OTHERS):
        assert findings.table_of(PAGE, name).startswith("|")
        prose = findings.with_table(prose, name, "")
    assert not re.search(r"^\|", prose, re.MULTILINE)


def place(name: str, text: str) -> str:
    return f"<!-- table: {name} -->\n\n{text}\n\n<!-- end of table -->\n"


def test_a_table_takes_the_place_of_the_old_one_alone() -> None:
    page = f"before\n{place('a', 'old')}between\n{place('b', 'b')}"
    assert findings.with_table(page, "a", "new\nrows") == page.replace("old", "new\nrows")
    assert findings.table_of(page, "b") == "b"


@pytest.mark.parametrize("page", ["", "<!-- table: a -->\n\nno end", 2 * place("a", "old")])
def test_a_page_without_one_place_for_a_table_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="place"):
        findings.with_table(page, "a", "new")


def test_a_curve_shows_the_capacities_where_lru_is_not_yet_ideal() -> None:
    curve = {
        "block_size": 4,
        "num_block_refs": 1000,
        "ideal_block_ratio": 0.5,
        "policies": {"lru": {"10": 123, "2000": 498, "3000": 500}, "optimal": {"10": 250, "2000": 500, "3000": 500}},
    }
    assert findings.curve_table("tiny", curve).splitlines() == [
        "| tiny (ideal 50.00) | | |",
        "|---|---:|---:|",
        "| blocks of 4 | 10 | 2,000 |",
        "| lru | 12.30 | 49.80 |",
        "| optimal | 25.00 | 50.00 |",
    ]
