"""Tables in Markdown, and their places on pages: between two comments, the first of which names the table."""

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Cells", "table", "table_of", "with_table"]

Cells: TypeAlias = Iterable[object]


def table(*rows: Cells) -> str:
    """Set rows in Markdown: the first is the head, numbers stand to the right."""
    head, *body = ("|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (head.count("|") - 2), *body])


def table_of(page: str, name: str) -> str:
    """Give the table that stands on the page. Raises ValueError if it has no place there, or two."""
    _before, text, _after = _parts(page, name)
    return text


def with_table(page: str, name: str, text: str) -> str:
    """Put a table in its place on the page. Raises ValueError if it has none there, or two."""
    before, _old, after = _parts(page, name)
    return before + text + after


def _parts(page: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- table: {name} -->\n\n", "\n\n<!-- end of table -->"
    if page.count(begin) != 1:
        raise ValueError(f"the page has {page.count(begin)} places for the table {name!r}, not 1")
    before, _, rest = page.partition(begin)
    text, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the place of the table {name!r} has no end")
    return before + begin, text, end + after
