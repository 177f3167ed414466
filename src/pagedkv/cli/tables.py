"""Results for humans: tables on the standard output, of any width.

A number is never broken across lines: labels and texts wrap between words, and a table of numbers that is too wide is
shown in parts, each with the first column.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedkv.report import tables as results
from pagedkv.report.figures import rate

_T = TypeVar("_T")

UNKNOWN_CONTENT: Final = "unknown, the trace has only lengths"
NUMBER: Final = re.compile(r"[\d.,]+")
WORD: Final = re.compile(r"[\d.,]+ (?:[mu]?s|GiB|tokens(?:/s)?)(?!\S)|\S+")
"""A number stays with its unit."""
DIGIT: Final = re.compile(r"\d")
MOST_ROWS: Final = 30
"""Most rows of a table by tenant or by window."""
CELL_PADDING: Final = 3  # two blanks and the line between columns
EDGES: Final = 1  # edges of a table, without a line between columns


def share(ratio: float | None, part: int, whole: int) -> str:
    """Format a hit ratio with its numerator and denominator."""
    return UNKNOWN_CONTENT if ratio is None else f"{ratio:.2%} ({part:,} of {whole:,})"


def shown_parts(parts: Sequence[_T], sizes: Sequence[float]) -> tuple[list[_T], str]:
    """Choose the rows that a terminal shows: the largest, in their order; return them with a sentence about the choice.

    Args:
        parts: rows.
        sizes: sizes of the rows, which decide the choice.
    """
    if len(parts) <= MOST_ROWS:
        return list(parts), ""
    largest = sorted(range(len(parts)), key=lambda place: -sizes[place])[:MOST_ROWS]
    return [parts[place] for place in sorted(largest)], f"; the {MOST_ROWS} largest of {len(parts):,}, --json has all"


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings about figures."""
    for warning in warnings:
        Console().print(f"Warning: {escape(warning)}", highlight=False)


def print_first(sentence: str) -> None:
    """Print the first line of a result."""
    Console().print(f"[bold]{escape(sentence)}.[/bold]\n", highlight=False)


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print two columns."""
    table = Table(title=escape(title), title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    values = dict(rows)
    table.add_column(min_width=_longest_word(values))
    table.add_column(min_width=_longest_word(values.values()))
    for name, value in values.items():
        table.add_row(escape(name), escape(value))
    Console().print(table)


def print_numbers(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_keys: int = 1) -> None:
    """Print a table of numbers, its first column a label; in parts if the terminal is too narrow.

    Args:
        title: title above the table.
        headings: headings of its columns.
        rows: rows with as many cells.
        num_keys: leading columns that identify a row, repeated in each part.
    """
    console = Console()
    known = list(rows)
    columns = [[heading, *(row[place] for row in known)] for place, heading in enumerate(headings)]
    for number, part in enumerate(_parts([_longest_word(column) for column in columns], console.width, num_keys)):
        table = Table(title=escape(title) if number == 0 else None, title_justify="left", box=box.SIMPLE_HEAD)
        for place, width in zip(part, _widths([columns[place] for place in part], console.width), strict=True):
            is_label = not any(map(DIGIT.search, columns[place][1:])) if place else not _are_numbers(columns[0][1:])
            table.add_column(escape(headings[place]), justify="left" if is_label else "right", width=width)
        for row in known:
            table.add_row(*(escape(row[place]) for place in part))
        console.print(table)


def show(table: results.Table) -> None:
    """Print a table that a page has, too; notes are in brackets."""
    rows = [[f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row] for row in table.rows]
    print_numbers(table.caption, table.columns, rows, num_keys=table.num_keys)


def show_parts(parts: Mapping[str, Any], *, has_bounds: bool = False) -> None:
    """Print figures by tenant and by window, if there are any, and the busiest and the quietest window."""
    note = f"; the {MOST_ROWS} largest of {{}}, --json has all"
    for table in results.part_tables(parts, MOST_ROWS, note, has_bounds=has_bounds):
        show(table)
    requested = {part["name"]: part["offered_tokens_per_s"] for part in parts.get("by_window", ())}
    extremes = [(which, parts.get(f"{which}_window")) for which in ("busiest", "quietest")]
    told = [f"{which} {name} ({rate(requested[name])} tokens/s requested)" for which, name in extremes if name]
    if told:
        Console().print(f"Windows: {escape(', '.join(told))}.", highlight=False)


def _are_numbers(cells: Iterable[str]) -> bool:
    return all(map(NUMBER.fullmatch, cells))


def _parts(widths: Sequence[int], width: int, num_keys: int) -> list[list[int]]:
    """Divide columns among tables up to a width, each with the key columns and at least one more."""
    keys = list(range(num_keys))
    parts = [keys.copy()]
    for place in range(num_keys, len(widths)):
        columns = [*parts[-1], place]
        if len(parts[-1]) > num_keys and EDGES + sum(widths[each] + CELL_PADDING for each in columns) > width:
            parts.append(keys.copy())
        parts[-1].append(place)
    return parts


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the width of each column: at least its longest word; the rest goes to columns with longer cells, in order.

    Rich's own division would break words of the widest column before it wraps the others.
    """
    widths = [_longest_word(column) for column in columns]
    left = width - EDGES - sum(each + CELL_PADDING for each in widths)
    for place, column in enumerate(columns):
        more = min(max(0, left), max(map(len, column)) - widths[place])
        widths[place] += more
        left -= more
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in WORD.findall(text)), default=0)
