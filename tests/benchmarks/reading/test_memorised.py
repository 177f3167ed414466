"""A reader with a perfect memory places what its memory determines, and is not asked about what it has just seen."""

import pytest

from benchmarks.reading.drawn import Line
from benchmarks.reading.memorised import names_of, shares

pytestmark = pytest.mark.plain_only


def room_of(file: str) -> str:
    return file.partition("/")[0]


def test_names_of_whole_and_of_broken_lines() -> None:
    assert names_of("for row in rows[1:]:  # of the space") == {"row", "rows"}
    assert names_of("block_size=size,") == {"block_size", "size"}
    assert names_of("") == frozenset()


def test_names_of_one_room_place_a_line_unless_they_stand_nowhere_else() -> None:
    lines = [
        Line("pool/a.py", 1, "queue.take(block)"),
        Line("pool/b.py", 1, "queue.release(block)"),
        Line("server/a.py", 1, "stream.send(text)"),
        Line("server/a.py", 2, "stream.close(text)"),
    ]
    assert shares(lines, lines[:2], room_of) == {"all other lines": 1.0, "all other files": 1.0}
    only_by_lines = shares(lines, lines[2:], room_of)
    assert only_by_lines == {"all other lines": 1.0, "all other files": 0.0}


def test_the_line_itself_is_not_remembered() -> None:
    lines = [Line("pool/a.py", 1, "alone"), *(Line("server/a.py", number, "other") for number in range(3))]
    assert shares(lines, lines[:1], room_of)["all other lines"] == 0.0
