"""Tables in Markdown."""

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Cells", "table"]

Cells: TypeAlias = Iterable[object]


def table(*rows: Cells) -> str:
    """Set rows in Markdown: the first is the head, numbers stand to the right."""
    head, *body = ("|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (head.count("|") - 2), *body])
