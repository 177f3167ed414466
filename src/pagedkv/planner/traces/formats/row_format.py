"""The interface of all formats: lines in, requests out; and the user's statements about the file."""

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
    """How to read a file where its content does not determine it.

    Args:
        block_size: tokens per id; None: determined by the file.
        any_order: whether unsorted requests are accepted; those of a session's line are sorted by arrival.
        time_unit: unit of the arrivals; None: determined by the file.
        columns: columns of a CSV file, or fields of JSON lines, by role; None: determined by the first line.
        texts: how texts become tokens.
        keep_failed: whether failed requests are read too.
        has_generated_arrivals: whether the times of the file are ignored and replaced.
        tenant_by: the column or field with the tenant; None: determined by the file.
        is_spread: whether requests of one stamp are spread later, so that no note about bursts is needed.
    """

    block_size: int | None = None
    any_order: bool = False
    time_unit: str | None = None
    columns: Mapping[str, str] | None = None
    texts: TextTokens = field(default_factory=CharacterTokens)
    keep_failed: bool = False
    has_generated_arrivals: bool = False
    tenant_by: str | None = None
    is_spread: bool = False

    def notes_of(self, clock: ArrivalClock) -> list[str]:
        """List warnings about a file's times, unless they are replaced or spread."""
        return [] if self.is_spread or self.has_generated_arrivals else clock.notes


class RowFormat(Protocol):
    """Turns the lines of one trace, in order, into requests."""

    starts_with_header: bool
    """Whether the first line has no request."""

    session_per_row: bool
    """Whether a line is a whole session, with sorted arrivals on the session's own clock."""

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users, with the unit of its times and the way texts become tokens."""
        ...

    @property
    def notes(self) -> list[str]:
        """List warnings about figures, one sentence each; complete after the last line."""
        return []

    def requests(self, line: Line) -> Iterator[Request]:
        """Read one line at once, and make its requests lazily.

        It may remember values with which later lines must agree, and hold requests that later lines complete.

        Raises:
            TraceError: the line is wrong.
        """
        ...

    def finish(self) -> Iterator[Request]:
        """Yield the held requests after the last line.

        Raises:
            TraceError: a request is not complete.
        """
        return iter(())
