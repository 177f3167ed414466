"""Splits a JSON array of objects in any layout, one object at a time, since the whole array may not fit in memory.

It takes pieces of a file, which may end anywhere. One regular expression finds strings and brackets; the caller parses
the objects.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from pagedkv.planner.traces.lines import MAX_LINE_NBYTES, Line

__all__ = ["array_elements"]

MARK: Final = re.compile(r'"(?:[^"\\]|\\.)*(?P<end>"|\\?\Z)|[{}]', re.DOTALL)
REMEDY: Final = "Give a whole JSON array of objects, or one object a line"


def array_elements(pieces: Iterable[Line]) -> Iterator[Line]:
    """Yield the objects of an array, each as a line of its own, with the number of the line where its piece began.

    Args:
        pieces: parts of the file in order, of any length; the first begins with ``[``.

    Raises:
        TraceError: an object does not end, or is over 64 MiB long.
    """
    text, depth, start, place = "", 0, 0, 0
    first: Line | None = None
    for piece in pieces:
        text, place, start = (text[start:] + piece.text, place - start, 0) if depth else (piece.text, 0, 0)
        if len(text) > MAX_LINE_NBYTES + len(piece.text):
            raise (first or piece).fault(f"an object is longer than {MAX_LINE_NBYTES} characters", REMEDY)
        while match := MARK.search(text, place):
            mark = match.group()
            if mark[0] == '"' and match["end"] != '"':  # continues in the next piece
                place = match.start()
                break
            place = match.end()
            if mark == "{":
                depth += 1
                if depth == 1:
                    start, first = match.start(), piece
            elif mark == "}":
                depth -= 1
                if depth == 0 and first is not None:
                    yield Line(first.path, first.number, text[start:place])
        else:
            place = len(text)
    if depth and first is not None:
        raise first.fault("an object does not end", REMEDY)
