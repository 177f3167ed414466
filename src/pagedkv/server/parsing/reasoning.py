"""ReasoningParser: splits off the reasoning at an answer's beginning; another parser reads the rest."""

from enum import Enum, auto
from typing import Final, final

from pagedkv.server.parsing.parts import AnswerParser, Part, ReasoningPart

__all__ = ["MARKERS", "THINK", "ReasoningParser", "end_of_open_reasoning"]

THINK: Final = ("<think>", "</think>")
MARKERS: Final = (THINK, ("[THINK]", "[/THINK]"))
"""Markers that begin and end reasoning: of most models, and of Mistral's with tokenizers of version 13."""


class Place(Enum):
    """Where in the answer the parser is."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


@final
class ReasoningParser:
    """Splits reasoning from the rest of one answer.

    Reasoning begins at the answer's start, after white space, or has begun in the prompt (``starts_inside``); then the
    first marker may be absent. Later markers are text, since a text or an argument may contain them. Reasoning without
    an end marker extends to the answer's end.

    Args:
        inner: parses what follows the reasoning.
        start: marker that begins it. Its first character occurs in it once.
        end: marker that ends it; likewise.
        starts_inside: whether the prompt ends with the first marker.
    """

    def __init__(
        self, inner: AnswerParser, start: str = THINK[0], end: str = THINK[1], *, starts_inside: bool = False
    ) -> None:
        self._inner = inner
        self._start = start
        self._end = end
        self._starts_inside = starts_inside
        self._place = Place.BEFORE
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now. O(text)."""
        if self._place is Place.AFTER:
            return self._inner.feed(text)
        self._held += text
        if self._place is Place.BEFORE:
            begun = self._held.lstrip()
            if len(begun) < len(self._start) and self._start.startswith(begun):
                return []
            self._leave_beginning()
        return self._inside() if self._place is Place.INSIDE else self._inner.feed(self._take(len(self._held)))

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows."""
        if self._place is Place.BEFORE:
            self._leave_beginning()
        text = self._take(len(self._held))
        if self._place is Place.AFTER:
            return [*self._inner.feed(text), *self._inner.finish()]
        return [*([ReasoningPart(text)] if text else []), *self._inner.finish()]

    def _leave_beginning(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._start):
            self._held = begun[len(self._start) :]
            self._place = Place.INSIDE
        else:
            self._place = Place.INSIDE if self._starts_inside else Place.AFTER

    def _inside(self) -> list[Part]:
        place = self._held.find(self._end)
        if place < 0:
            text = self._take(self._num_certain())
            return [ReasoningPart(text)] if text else []
        text = self._take(place)
        self._take(len(self._end))
        self._place = Place.AFTER
        return [*([ReasoningPart(text)] if text else []), *self._inner.feed(self._take(len(self._held)))]

    def _num_certain(self) -> int:
        """Count the characters that cannot begin the last marker."""
        place = self._held.rfind(self._end[0])
        return place if place >= 0 and self._end.startswith(self._held[place:]) else len(self._held)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def end_of_open_reasoning(beginning: str) -> str | None:
    """Return the marker that ends the reasoning begun by a prompt; None where it begins none.

    Args:
        beginning: the end of the prompt's text, special tokens included.
    """
    ends = [end for start, end in MARKERS if beginning.rstrip().endswith(start)]
    return ends[0] if ends else None
