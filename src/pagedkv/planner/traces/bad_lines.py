"""Skips lines that cannot be read, up to a limit that the user sets, and counts them by kind."""

import re
from collections.abc import Iterator
from typing import Final

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.formats import RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["BadLines"]

VALUE: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:[.,]\d+)*")
"""The parts of a message that differ between lines with the same kind of fault."""


class BadLines:
    """Skips and counts bad lines.

    Args:
        most: most lines to skip; the next bad line is an error.

    Raises:
        ConfigurationError: ``most`` is negative.
    """

    def __init__(self, most: int) -> None:
        if most < 0:
            raise ConfigurationError(f"`skip_bad` must be a number of lines from 0, got {most}")
        self._most = most
        self._first_of_kind: dict[str, TraceError] = {}
        self._num_of_kind: dict[str, int] = {}

    @property
    def notes(self) -> list[str]:
        """Return one note: the number of skipped lines, with the first one of each kind; empty if there are none."""
        num = sum(self._num_of_kind.values())
        if not num:
            return []
        kinds = (
            f"{self._num_of_kind[kind]:,} as line {error.line} ({error.reason:.120})"
            for kind, error in self._first_of_kind.items()
        )
        return [f"bad lines skipped: {num:,}, {'; '.join(kinds)}"]

    def requests(self, row_format: RowFormat, line: Line) -> Iterator[Request]:
        """Read a line; a bad line is skipped, if fewer than ``most`` were skipped before.

        Raises:
            TraceError: the line is bad, and ``most`` lines were skipped before.
        """
        if not self._most:
            return row_format.requests(line)
        try:
            return iter(list(row_format.requests(line)))
        except TraceError as error:
            if sum(self._num_of_kind.values()) == self._most:
                raise
            kind = VALUE.sub("#", error.reason)
            self._first_of_kind.setdefault(kind, error)
            self._num_of_kind[kind] = self._num_of_kind.get(kind, 0) + 1
            return iter(())
