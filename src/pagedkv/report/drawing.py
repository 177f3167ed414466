"""The elements of a page: tiles, tables, plots and sections. They are values; the template decides their appearance.

Texts are plain and are escaped by the template. Only ``svg`` is markup, and only this module makes it: matplotlib's
SVG, turned into a part of a page that follows the page's theme.

Colours, line styles and SVG are here. matplotlib draws in sentinel colours, which become CSS variables (``--ink``,
``--grid``, ``--surface``, ``--series-1`` ... ``--series-8``); the page defines them, light and dark. Text stays text,
in the page's font. Ids get the drawing's own prefix, since all drawings of a page share one namespace. No global state
is used: no pyplot, and settings apply to the drawing only. Equal calls give equal bytes. No other module imports
matplotlib; the names that they need are exported here.

Names that users chose are not put into a drawing (matplotlib would read ``$`` as mathematics, and long names overlap),
but into the legend, which is HTML.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType
from typing import Final, Literal, TypeAlias
from xml.etree import ElementTree as ET

from pagedkv.contract.extras import needing
from pagedkv.report.figures import Caption, compact
from pagedkv.report.tables import Table


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


with needing("report", "a report"):
    from matplotlib import style as styles
    from matplotlib.axes import Axes as Axes  # noqa: PLC0414 - other modules take it from here
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter
INK: Final = "#010101"
GRID: Final = "#020202"
SURFACE: Final = "#030303"
NUM_SERIES: Final = 8
SERIES_COLOURS: Final = tuple(f"#04000{number}" for number in range(1, NUM_SERIES + 1))
VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {INK: "var(--ink)", GRID: "var(--grid)", SURFACE: "var(--surface)"}
    | {colour: f"var(--series-{number})" for number, colour in enumerate(SERIES_COLOURS, 1)}
)
POINTS_OF_INCH: Final = 72
STYLE: Final[Mapping[str, object]] = MappingProxyType(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "pagedkv",
        "font.size": 11,
        "axes.labelsize": 11,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.facecolor": "none",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "hatch.color": SURFACE,
        "hatch.linewidth": 1.2,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "figure.constrained_layout.use": True,
    }
)
METADATA: Final = ("Creator", "Date", "Format", "Type")
SENTINEL: Final = re.compile("|".join(VARIABLES))
FONT: Final = re.compile(r"font-family: [^;]*; ")
REFERENCE: Final = re.compile(r"(^|url\()#([\w-]+)")
LONG_NUMBER: Final = re.compile(r"-?\d+\.\d{3,}")
PLACED: Final = ("d", "x", "y", "width", "height", "points", "transform")
"""Attributes with lengths, which are rounded to two decimals of a point, finer than any screen."""


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in points."""

    width: float
    height: float


HALF: Final = Size(520, 300)
WIDE: Final = Size(900, 300)
SWATCH: Final = Size(34, 14)
NARROW: Final = Size(350, 260)
NARROW_PANELS: Final = Size(350, 620)
"""On a phone, panels are below one another."""
WITHIN_A_DECADE: Final = 5
FEW_DECADES: Final = 100
"""Ratio of the ends of a logarithmic axis up to which ticks at powers alone would be too few."""
Dashes: TypeAlias = Literal["-", "--", "-.", ":", ""]


@dataclass(frozen=True, slots=True)
class LineStyle:
    """The style of one line: distinct dashes and markers, not colour alone."""

    colour: str
    dashes: Dashes
    marker: str


@dataclass(frozen=True, slots=True)
class Fill:
    """The style of one area or bar: distinct hatching, not colour alone."""

    colour: str
    hatch: str = ""
    alpha: float = 1.0


DASHES: Final[tuple[Dashes, ...]] = ("-", "--", "-.", ":", "-", "--", "-.", ":")
MARKERS: Final = "os^DvP*X"
LINES: Final = tuple(map(LineStyle, SERIES_COLOURS, DASHES, MARKERS))
"""One style a series."""
FILLS: Final = (
    Fill(SERIES_COLOURS[0]),
    Fill(SERIES_COLOURS[1], "//"),
    Fill(SERIES_COLOURS[2], "\\\\"),
    Fill(SERIES_COLOURS[7], alpha=0.25),
)
"""Fills of a stack, from the bottom; the last is the remainder."""
BETWEEN: Final = "|"
"""Separates texts, as ``;`` separates series, in the attributes that the page's script reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Readout:
    """The values that a page shows at the pointer: at each place along x, a heading and a value of each series."""

    axes: Axes
    places: Sequence[float]
    headings: Sequence[str]
    values: Sequence[Sequence[str]]


class Figure(MatplotlibFigure):
    """A matplotlib figure, and the readout of one pair of its axes, if there is one."""

    readout: Readout | None = None


PERCENT_TICKS: Final = FuncFormatter(lambda value, _position: f"{100 * value:.3g}%")
"""Not matplotlib's own formatter, which uses one axis alone: two panels would show the digits of the last."""
COUNT_TICKS: Final = FuncFormatter(lambda value, _position: compact(value))


def draw(key: str, size: Size, label: str, paint: Callable[[Figure], None]) -> str:
    """Make a drawing.

    Args:
        key: prefix of its ids, unique in the page.
        size: size in points; the page scales it.
        label: description for readers who cannot see the drawing.
        paint: draws into an empty figure.

    Returns:
        An ``svg`` element, to be put into a page unchanged.
    """
    text = StringIO()
    with styles.context(dict(STYLE), after_reset=True):
        figure = Figure(figsize=(size.width / POINTS_OF_INCH, size.height / POINTS_OF_INCH))
        paint(figure)
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(text, metadata=dict.fromkeys(METADATA))  # type: ignore[no-untyped-call] # savefig draws twice
        readout = {} if figure.readout is None else _readout_attributes(figure.readout)
    root = ET.fromstring(text.getvalue())  # noqa: S314 - matplotlib's own, made a line above
    return _as_part_of_page(root, f"{key}-", label, readout)


def read_out(axes: Axes, places: Sequence[float], headings: Sequence[str], values: Sequence[Sequence[str]]) -> None:
    """Add the values that the page shows at the pointer; call it after the range of the axes is final.

    Args:
        axes: one pair of axes of a drawing.
        places: places along x, in ascending order.
        headings: heading of each place.
        values: values of each series at each place, in the order of the legend. They must not have a user's text.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.readout = Readout(axes, places, headings, values)


def only_axes(figure: Figure, x_label: str, y_label: str) -> Axes:
    """Add the only pair of axes to a figure, with labels."""
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return axes


def logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Scale an axis by logarithms: plain numbers at the powers, and at more places within few decades.

    Call it after everything is drawn, since it depends on the range.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if high < WITHIN_A_DECADE * low:
        axis.set_major_locator(AutoLocator())
    elif high < FEW_DECADES * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(COUNT_TICKS)
    axis.set_minor_formatter(NullFormatter())


def panels(figure: Figure, count: int) -> list[Axes]:
    """Add axes to a figure side by side, or one below another if the figure is narrow."""
    if figure.get_figwidth() < figure.get_figheight():
        return [figure.add_subplot(count, 1, place) for place in range(1, count + 1)]
    return [figure.add_subplot(1, count, place) for place in range(1, count + 1)]


def line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], style: LineStyle, hollow_size: float | None = None
) -> None:
    """Draw a line with unclipped markers, even at the edge of the axes; hollow markers if a size is given."""
    (drawn,) = axes.plot(xs, ys, color=style.colour, linestyle=style.dashes, marker=style.marker, zorder=3)
    drawn.set_clip_on(False)
    if hollow_size is not None:
        drawn.set_markersize(hollow_size)
        drawn.set_fillstyle("none")


def plot(  # noqa: PLR0913 - a drawing and its words
    caption: Caption,
    size: Size,
    label: str,
    paint: Callable[[Figure], None],
    legend: Iterable[LegendEntry] = (),
    *,
    key: str,
    suffix: str = "",
    narrow: Size = NARROW,
) -> Plot:
    """Draw a plot, wide and narrow, under its title and the sentence that explains it.

    Args:
        caption: title and sentence.
        size: the size on a wide page; ``WIDE`` takes all of its width.
        label: what is drawn, for screen readers.
        paint: draws it.
        legend: entries of the legend.
        key: begins all ids within the drawing.
        suffix: behind the title.
        narrow: the size on a narrow page.
    """
    drawings = draw(key, size, label, paint), draw(f"narrow-{key}", narrow, label, paint)
    return Plot(caption.title + suffix, caption.sentence, *drawings, tuple(legend), wide=size is WIDE)


def line_legends(key: str, lines: Iterable[tuple[str, LineStyle]], *, marked: bool = True) -> list[LegendEntry]:
    """Draw a legend of lines, by their names."""
    return [
        line_legend(f"{key}-legend-{number}", style, name, marked=marked) for number, (name, style) in enumerate(lines)
    ]


def fill_legends(key: str, fills: Iterable[tuple[str, Fill]]) -> list[LegendEntry]:
    """Draw a legend of filled areas, by their names."""
    return [fill_legend(f"{key}-legend-{number}", fill, name) for number, (name, fill) in enumerate(fills)]


def line_legend(key: str, line: LineStyle, label: str, *, marked: bool = True) -> LegendEntry:
    """Show a line, with its marker if the plot has it, beside its name."""

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("none")
        figure.add_artist(
            Line2D(
                (0.04, 0.5, 0.96),
                (0.5, 0.5, 0.5),
                color=line.colour,
                linestyle=line.dashes,
                marker=line.marker if marked else None,
                markevery=[1],
            )
        )

    return LegendEntry(draw(key, SWATCH, "", paint), label)


def fill_legend(key: str, fill: Fill, label: str) -> LegendEntry:
    """Show a filled area beside its name."""

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("none")
        figure.add_artist(Rectangle((0.02, 0.05), 0.96, 0.9, fc=fill.colour, hatch=fill.hatch, alpha=fill.alpha, lw=0))

    return LegendEntry(draw(key, SWATCH, "", paint), label)


def _readout_attributes(readout: Readout) -> dict[str, str]:
    """Return a readout as attributes; places are shares of the axes' width, and axes are shares of the drawing."""
    axes = readout.axes
    box = axes.get_position()
    xs = axes.transAxes.inverted().transform(axes.transData.transform([(place, 0.5) for place in readout.places]))[:, 0]
    return {
        "data-box": " ".join(f"{share:.4f}" for share in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)),
        "data-places": " ".join(f"{x:.4f}" for x in xs),
        "data-headings": BETWEEN.join(readout.headings),
        "data-values": ";".join(BETWEEN.join(texts) for texts in readout.values),
    }


def _as_part_of_page(root: ET.Element, prefix: str, label: str, readout: Mapping[str, str]) -> str:
    """Remove unneeded parts, and turn sentinels into CSS variables and ids into prefixed ids."""
    for parent in root.iter():
        for child in list(parent):
            if _plain(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    referenced = {
        reference
        for element in root.iter()
        for value in element.attrib.values()
        for _, reference in REFERENCE.findall(value)
    }
    for element in root.iter():
        element.tag = _plain(element.tag)
        element.tail = None
        if element.tag != "text":
            element.text = None
        element.attrib = {
            _plain(name): _attribute(_plain(name), value, prefix)
            for name, value in element.attrib.items()
            if name != "id" or value in referenced
        }
    described = {"role": "img", "aria-label": label} if label else {"aria-hidden": "true"}
    root.attrib = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": root.attrib["viewBox"],
        "style": "stroke-linejoin: round; stroke-linecap: butt",  # of the style element left out above
        **described,
        **readout,
    }
    return ET.tostring(root, encoding="unicode")


def _plain(name: str) -> str:
    """Remove the XML namespace from a name; a part of a page needs none."""
    return name.rpartition("}")[2]


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return prefix + value
    if name in PLACED:
        return LONG_NUMBER.sub(lambda match: f"{float(match.group()):.2f}", value)
    value = SENTINEL.sub(lambda match: VARIABLES[match.group()], FONT.sub("", value))
    return REFERENCE.sub(rf"\1#{prefix}\2", value)
