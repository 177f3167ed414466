"""This project's own format: a header, then one request in each line; docs/trace-format.md describes it.

A row is checked here. An unknown key is refused, since a mistyped key would silently leave its default in force; keys
that begin with ``x_`` are free for other uses.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from pagedkv.planner.traces.block_runs import count_ids, wrong_number_of_ids
from pagedkv.planner.traces.formats.parsing import (
    FIX_THE_ROW,
    MAX_ARRIVAL_S,
    MAX_LENGTH,
    check_range,
    decoded,
    decoded_strictly,
)
from pagedkv.planner.traces.formats.row_format import RowFormat
from pagedkv.planner.traces.formats.trace_row import FORMAT_NAME, FORMAT_VERSION, TraceHeader, TraceRow, request_of
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["FORMAT_NAME", "MAX_NUM_SAMPLES", "MAX_PRIORITY", "PagedkvRows"]

MAX_NUM_SAMPLES: Final = 2**16
"""Most sequences of one request; more than any engine runs at once."""
MAX_PRIORITY: Final = 2**31 - 1
PROMPT_KEYS: Final = ("block_runs", "block_ids", "token_ids")


class _Version(msgspec.Struct):
    """The keys that a header of any version has."""

    format: str
    version: int


class PagedkvRows(RowFormat):
    """Reads ``arrival_s`` (s), lengths, and at most one of ``block_runs``, ``block_ids`` and ``token_ids``.

    Args:
        header: the first line.
        block_size: tokens per id; None: the header's.

    Raises:
        TraceError: the header is of another format or version, or has an impossible block size.
    """

    starts_with_header = True
    session_per_row = False

    def __init__(self, header: Line, block_size: int | None) -> None:
        _check_version(header)
        named = decoded_strictly(header, TraceHeader).block_size
        if named is not None:
            check_range(header, "block_size", named, 1, MAX_LENGTH)
        self._header_line = header.number
        self._block_size = block_size or named or 0

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"{FORMAT_NAME}, times in s"

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded_strictly(line, TraceRow)
        input_length = _length(line, "input_length", row.input_length, "token_ids", row.token_ids)
        output_length = _length(line, "output_length", row.output_length, "output_token_ids", row.output_token_ids)
        check_range(line, "input_length", input_length, 1, MAX_LENGTH)
        check_range(line, "output_length", output_length, 0, MAX_LENGTH)
        check_range(line, "arrival_s", row.arrival_s, 0, MAX_ARRIVAL_S)
        check_range(line, "num_samples", row.num_samples, 1, MAX_NUM_SAMPLES)
        check_range(line, "priority", row.priority, -MAX_PRIORITY - 1, MAX_PRIORITY)
        self._check_prompt(line, row, input_length)
        yield request_of(row, input_length, output_length, self._block_size)

    def _check_prompt(self, line: Line, row: TraceRow, input_length: int) -> None:
        given = [key for key in PROMPT_KEYS if getattr(row, key) is not None]
        if len(given) > 1:
            raise line.fault(f"has both {given[0]} and {given[1]}", "Describe a prompt in one way")
        if row.block_runs is not None:
            self._check_num_ids(line, input_length, count_ids(line, row.block_runs, key="block_runs"))
        elif row.block_ids is not None:
            self._check_num_ids(line, input_length, len(row.block_ids))

    def _check_num_ids(self, line: Line, input_length: int, num_ids: int) -> None:
        """Check that there are ids of all full blocks, with or without one of a partly filled last block."""
        if self._block_size == 0:
            if num_ids:
                reason = f"has block ids, but the header on line {self._header_line} names no block_size"
                raise line.fault(reason, 'Add "block_size" to the header, or give `TraceReader.block_size`')
            return
        num_full_blocks = input_length // self._block_size
        if num_ids != num_full_blocks and num_ids != -(-input_length // self._block_size):
            raise wrong_number_of_ids(line, input_length, num_ids, self._block_size)


def _check_version(header: Line) -> None:
    start = decoded(header, _Version)
    if start.format != FORMAT_NAME:
        raise header.fault(f"the format is {start.format!r}", f'This version reads "{FORMAT_NAME}"')
    if start.version != FORMAT_VERSION:
        raise header.fault(
            f"version {start.version} of {FORMAT_NAME} is not known, only version {FORMAT_VERSION}",
            "Update pagedkv, or write the trace in a version that it reads",
        )


def _length(line: Line, key: str, given: int | None, tokens_key: str, token_ids: list[int] | None) -> int:
    """Return a length, and check it against the tokens if there are any."""
    if token_ids is None:
        if given is None:
            raise line.fault(f"has neither {key} nor {tokens_key}", FIX_THE_ROW)
        return given
    if given is not None and given != len(token_ids):
        raise line.fault(f"{key} is {given}, but {tokens_key} holds {len(token_ids)}", FIX_THE_ROW)
    return len(token_ids)
