"""What all formats have in common: lines in, requests out, and what the user said of the file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagedkv.planner.traces.clocks import ArrivalClock
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.texts import CharacterTokens, TextTokens

__all__ = ["Reading", "RowFormat"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a file is to be read, as far as it does not tell by itself.

    Args:
        block_size: tokens an id stands for, or None to go by the file.
        any_order: take requests as they come; those of a session's line are put in order of arrival.
        time_unit: of the arrivals, or None to go by the file.
        columns: of a CSV file, or fields of JSON lines, by what they hold; None to go by the first line.
        texts: how texts become tokens.
        keep_failed: take requests that failed, too.
        has_made_up_arrivals: whether the times of the file are not wanted: others are put in their place.
        tenant_by: the column or field that says whose request it is, or None to go by the file.
        is_spread: whether requests of one stamp are spread afterwards, so that no burst need be told.
    """

    block_size: int | None = None
    any_order: bool = False
    time_unit: str | None = None
    columns: Mapping[str, str] | None = None
    texts: TextTokens = field(default_factory=CharacterTokens)
    keep_failed: bool = False
    has_made_up_arrivals: bool = False
    tenant_by: str | None = None
    is_spread: bool = False

    def notes_of(self, clock: ArrivalClock) -> list[str]:
        """Say what must be known of a file's times, unless others are put in their place or made of them."""
        return [] if self.is_spread or self.has_made_up_arrivals else clock.notes


class RowFormat(Protocol):
    """Turns the lines of one trace, in order, into requests."""

    starts_with_header: bool
    """Whether the first line holds no request."""

    session_per_row: bool
    """Whether a line is a whole session, with arrivals on the session's own clock and checked to be in order."""

    @property
    def recognised(self) -> str:
        """Say what the file was taken for, for humans: its format, the unit of its times, what became of texts."""
        ...

    @property
    def notes(self) -> list[str]:
        """Say what must be known before figures are believed, each in a sentence; complete when all is read."""
        return []

    def requests(self, line: Line) -> Iterator[Request]:
        """Read one line now, and make its requests as they are asked for.

        May remember what later lines must agree with, and hold back what later lines complete.

        Raises:
            TraceError: something is wrong with the line.
        """
        ...

    def finish(self) -> Iterator[Request]:
        """Give what was held back, when there are no more lines.

        Raises:
            TraceError: something is not complete.
        """
        return iter(())
