"""Which lines may be drawn, and that the commit alone decides which are."""

from pathlib import Path

from benchmarks.reading.drawn import draw, lines_of

SOURCE = '''"""Opens the module,
over two lines."""

import os
from pagedkv import (
    BlockSpace,
)

__all__ = [
    "f",
]

LIMIT = 3  # a comment behind code
"""What it is."""


def f(
    first: int,
) -> None:
    """Say what."""
    # a comment
    for each in range(first):
        if each:
            pass
        else:
            return
    print(
        """a text that is used"""
    )
'''


def test_imports_offers_docstrings_comments_and_lines_without_a_name_are_left_out() -> None:
    assert [line.text for line in lines_of("f.py", SOURCE)] == [
        "LIMIT = 3  # a comment behind code",
        "def f(",
        "first: int,",
        "for each in range(first):",
        "if each:",
        "print(",
    ]
    assert [line.number for line in lines_of("f.py", SOURCE)][:2] == [13, 17]


def test_the_same_commit_draws_the_same_lines_and_another_one_others(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("\n".join(f"name_{number} = {number}" for number in range(300)))
    drawn = draw(tmp_path, "abc")
    assert len(set(drawn)) == 20
    assert drawn == draw(tmp_path, "abc")
    assert drawn != draw(tmp_path, "abd")
