"""A drawing by itself: ids of its own, text as text, and nothing global touched."""

from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from pagedkv.report.drawing import HALF, LINES, Figure, draw, line, logarithmic, only_axes
from tests.report.page_reader import read_page

pytestmark = pytest.mark.plain_only


def paint(figure: Figure) -> None:
    """Draw a line with markers, which matplotlib defines once and refers to by id."""
    only_axes(figure, "seconds", "blocks").plot([1, 2, 3], [3, 1, 2], marker="o", color=LINES[0].colour)


def test_ids_carry_the_prefix_of_the_drawing() -> None:
    first, second = (read_page(draw(key, HALF, "label", paint)) for key in ("first", "second"))
    assert first.ids
    assert all(name.startswith("first-") for name in first.ids)
    assert [name.removeprefix("first") for name in first.ids] == [name.removeprefix("second") for name in second.ids]


def test_text_stays_text() -> None:
    texts = read_page(draw("key", HALF, "label", paint)).texts("text")
    assert {"seconds", "blocks", "1.00", "3.00"} <= set(texts)


def test_series_are_drawn_in_variables_of_the_page() -> None:
    svg = draw("key", HALF, "label", paint)
    assert "stroke: var(--series-1)" in svg
    assert "fill: var(--ink)" in svg


def test_labels_are_escaped() -> None:
    (drawing,) = read_page(draw("key", HALF, "\"<a> & 'b'\"", paint)).drawings
    assert drawing.get("aria-label") == "\"<a> & 'b'\""


def test_settings_of_the_user_neither_matter_nor_change() -> None:
    plain = draw("key", HALF, "label", paint)
    with mpl.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "svg.hashsalt": "other", "font.size": 30}):
        before = dict(mpl.rcParams)
        assert draw("key", HALF, "label", paint) == plain
        assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(("low", "high"), [(300, 900), (300, 1200), (90, 4000), (10, 10**6)])
def test_a_logarithmic_axis_has_numbers_whatever_its_range(low: float, high: float) -> None:
    def paint(figure: Figure) -> None:
        axes = only_axes(figure, "x", "y")
        line(axes, [low, high], [1.0, 2.0], LINES[0])
        logarithmic(axes, "x")
        axes.set_yticks([])

    svg = ET.fromstring(draw("key", HALF, "label", paint))  # noqa: S314 - our own
    texts = [element.text or "" for element in svg.iter() if element.tag.endswith("text")]
    assert len([text for text in texts if text.strip("0123456789,.M") == ""]) >= 3


def test_markers_at_the_edge_are_whole() -> None:
    def paint(figure: Figure) -> None:
        axes = only_axes(figure, "x", "y")
        line(axes, [0.0, 1.0], [0.0, 1.0], LINES[0])
        axes.set_ylim(bottom=0)
        assert all(not drawn.get_clip_on() for drawn in axes.lines)

    draw("key", HALF, "label", paint)
