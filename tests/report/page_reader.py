"""Reads a report as a browser would, for tests: elements, tables, ids, drawings and references."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Final
from xml.etree import ElementTree as ET

__all__ = ["Page", "read_page"]

VOID: Final = frozenset({"br", "hr", "img", "input", "link", "meta"})
DRAWING: Final = re.compile(r"<svg.*?</svg>", re.DOTALL)


@dataclass
class Element:
    """A tag with its attributes, and the text inside it, that of inner elements included."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page:
    """What a page is made of."""

    source: str
    elements: list[Element] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        """Ids, in the order of the page."""
        return [element.attributes["id"] for element in self.elements if "id" in element.attributes]

    @property
    def drawings(self) -> list[ET.Element]:
        """The drawings, each of them well-formed XML by itself."""
        return [ET.fromstring(match.group()) for match in DRAWING.finditer(self.source)]  # noqa: S314 - our own

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements with a tag and attributes; ``class_`` stands for class."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            element for element in self.elements if element.tag == tag and wanted.items() <= element.attributes.items()
        ]

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """Their texts."""
        return [element.text for element in self.all(tag, **attributes)]

    def row(self, heading: str) -> list[str]:
        """Texts of the cells behind a row's heading, of the first row so named."""
        cells = [element for element in self.elements if element.tag in {"tr", "th", "td"}]
        start = next(
            number
            for number, cell in enumerate(cells)
            if cell.attributes.get("scope") == "row" and cell.text == heading
        )
        values = []
        for cell in cells[start + 1 :]:
            if cell.tag != "td":
                break
            values.append(cell.text)
        return values


class _Reader(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page
        self.open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"attribute twice in {tag}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.page.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def read_page(source: str) -> Page:
    """Read a page; fails where tags do not nest."""
    page = Page(source)
    reader = _Reader(page)
    reader.feed(source)
    reader.close()
    assert not reader.open, f"never closed: {[element.tag for element in reader.open]}"
    return page
