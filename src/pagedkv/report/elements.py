"""The elements of a page: tiles, tables, plots and sections. They are values; the template decides their appearance.

Texts are plain and are escaped by the template. Only ``svg`` is markup, and only
:mod:`pagedkv.report.drawing` makes it.
"""

from dataclasses import dataclass

__all__ = ["Cell", "LegendEntry", "Plot", "Section", "Table", "Tile"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: a text, a smaller note below it, and a tone: "better", "worse" or none.

    The note states in words what the tone shows by colour.
    """

    text: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: a heading for each column, and rows that begin with a heading of their own."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """The style of one series of a plot, and its name."""

    svg: str
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing with its title, the sentence that explains it, and its legend.

    Args:
        title: a heading.
        sentence: explains the drawing.
        svg: markup.
        narrow: the same for a screen as narrow as a phone's.
        legend: entries of the legend, possibly none.
        wide: whether it takes the whole width of the page.
    """

    title: str
    sentence: str
    svg: str
    narrow: str
    legend: tuple[LegendEntry, ...] = ()
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the top of the page."""

    title: str
    text: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Args:
        key: its anchor, unique in the page.
        title: its heading.
        sentences: paragraphs before everything else.
        plots: drawings.
        tables: tables below them.
        lines: verbatim texts, such as command lines, each with its heading.
    """

    key: str
    title: str
    sentences: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
