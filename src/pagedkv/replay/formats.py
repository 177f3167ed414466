"""What a line of each trace format means.

Owns the five row formats, as one class each with a method ``requests(line)``; knows nothing of files. The
first line's keys tell the format, never the file's name:

=======================  ===================================================  ==============================
first line has           format                                               ids of a prompt of n tokens
=======================  ===================================================  ==============================
``hash_ids``             :class:`HashIdRows` (Mooncake release)               ``ceil(n / 512)``
``hash_runs``            :class:`HashRunRows` (runs of ids, block size free)  ``n // block_size``
``requests``             :class:`SessionRows` (a session a row)               ``n // block_size``
``arrived_s,...``        :class:`LengthRows` (CSV, lengths alone)             none
=======================  ===================================================  ==============================

Every number is checked before it sizes anything, and a bad row raises
:class:`~pagedkv.errors.TraceError` with its line.
"""

from collections.abc import Iterator
from textwrap import shorten
from typing import Annotated, Final, Protocol, TypeVar

import numpy as np

from pagedkv.replay.block_runs import MAX_BLOCK_ID, InferredBlockSize, count_ids, expand_runs, wrong_number_of_ids
from pagedkv.replay.lines import Line
from pagedkv.replay.request import Request

try:
    import msgspec
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("reading traces needs msgspec: pip install 'pagedkv[cli]'", name=error.name) from error

__all__ = ["MAX_LENGTH", "RowFormat", "detect_format"]

MOONCAKE_BLOCK_SIZE: Final = 512
LENGTH_COLUMNS: Final = ("arrived_s", "input_length", "output_length")
MAX_LENGTH: Final = 2**24
"""Longest prompt or output taken for real: beyond any context window, and still cheap to hold."""
MAX_ARRIVAL_S: Final = 10**11
"""Some 3,000 years: times since 1970 pass, garbage does not."""
KNOWN_FORMATS: Final = (
    f"A trace has JSON lines with hash_ids, hash_runs or requests, or CSV with the header {','.join(LENGTH_COLUMNS)}"
)
FIX_THE_ROW: Final = "Repair or remove the row"


class RowFormat(Protocol):
    """Turns the lines of one trace, in order, into requests."""

    starts_with_header: bool
    """Whether the first line names columns and holds no request."""

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests of one line; may remember what later lines must agree with."""
        ...


def detect_format(first: Line, block_size: int | None) -> RowFormat:
    """Choose the format by the first line of a trace.

    Args:
        first: its first line that is not blank.
        block_size: tokens an id stands for, or None to go by the trace. Traces without ids have no use for it.

    Raises:
        TraceError: the line fits no format.
    """
    if not first.text.startswith("{"):
        return LengthRows(first)
    keys = _decoded(first, dict[str, msgspec.Raw])
    if "requests" in keys:
        return SessionRows(block_size)
    if "hash_runs" in keys:
        return HashRunRows(block_size)
    if "hash_ids" not in keys:
        raise first.fault(f"no known trace format has the keys {', '.join(sorted(keys)) or '(none)'}", KNOWN_FORMATS)
    return HashIdRows(block_size)


class _Lengths(msgspec.Struct):
    input_length: int
    output_length: int


class _HashIdRow(_Lengths):
    timestamp: float
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]


class _HashRunRow(_Lengths):
    timestamp: float
    hash_runs: list[tuple[int, int]]
    session: str | None = None


class _SessionRequest(_Lengths):
    t: float
    hash_runs: list[tuple[int, int]]


class _LengthRow(_Lengths):
    arrived_s: float


class _SessionRow(msgspec.Struct):
    session: str
    block_size: int
    requests: list[_SessionRequest]


class HashIdRows:
    """Mooncake's release: ``timestamp`` (ms), lengths, ``hash_ids``; a partly filled last block has an id too."""

    starts_with_header = False

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size or MOONCAKE_BLOCK_SIZE

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = _decoded(line, _HashIdRow)
        _check_row(line, row, row.timestamp / 1000)
        if len(row.hash_ids) != -(-row.input_length // self._block_size):
            raise wrong_number_of_ids(line, row.input_length, len(row.hash_ids), self._block_size)
        yield Request(
            arrival_s=row.timestamp / 1000,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=np.array(row.hash_ids, dtype=np.int64),
            block_size=self._block_size,
        )


class HashRunRows:
    """``timestamp`` (ms), ``session``, lengths, ``hash_runs`` of global ids; full blocks only."""

    starts_with_header = False

    def __init__(self, block_size: int | None) -> None:
        self._block_size = InferredBlockSize(block_size)

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request; the first with ids settles the block size."""
        row = _decoded(line, _HashRunRow)
        _check_row(line, row, row.timestamp / 1000)
        block_size = self._block_size.learn(line, row.input_length, count_ids(line, row.hash_runs))
        yield Request(
            arrival_s=row.timestamp / 1000,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=expand_runs(row.hash_runs),
            block_size=block_size,
            session=row.session,
        )


class SessionRows:
    """A session a row: ``session``, ``block_size``, ``requests`` with ``t`` (s), lengths, ``hash_runs``.

    Requests come in file order: session by session, and as stored within one. Ids are local to a session; each
    session's are moved up past all of the sessions before it, so that no two sessions share. Arrivals stay on
    the session's own clock: the trace does not tell when a session began.
    """

    starts_with_header = False

    def __init__(self, block_size: int | None) -> None:
        self._given_block_size = block_size
        self._id_offset = 0

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests of the line's session; moves the offset for the next one."""
        row = _decoded(line, _SessionRow)
        block_size = self._given_block_size or row.block_size
        if block_size < 1:
            raise line.fault(f"block_size is {block_size}, but must be at least 1", FIX_THE_ROW)
        for position, request in enumerate(row.requests):
            yield self._request(line, f"request {position + 1}: ", request, row.session, block_size)
        self._id_offset += 1 + max(
            (first + count - 1 for request in row.requests for first, count in request.hash_runs), default=-1
        )

    def _request(self, line: Line, where: str, request: _SessionRequest, session: str, block_size: int) -> Request:
        _check_row(line, request, request.t, where)
        num_ids = count_ids(line, request.hash_runs, self._id_offset)
        if num_ids != request.input_length // block_size:
            raise wrong_number_of_ids(line, request.input_length, num_ids, block_size, where)
        return Request(
            arrival_s=request.t,
            input_length=request.input_length,
            output_length=request.output_length,
            block_ids=expand_runs(request.hash_runs) + self._id_offset,
            block_size=block_size,
            session=session,
        )


class LengthRows:
    """CSV of ``arrived_s``, ``input_length``, ``output_length``, in any order, other columns ignored; no ids."""

    starts_with_header = True

    def __init__(self, header: Line) -> None:
        self._columns = [column.strip() for column in header.text.split(",")]
        if not set(LENGTH_COLUMNS) <= set(self._columns):
            raise header.fault(
                f"neither a JSON object nor a known CSV header: {shorten(header.text, 60)!r}", KNOWN_FORMATS
            )

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        cells = line.text.split(",")
        if len(cells) != len(self._columns):
            raise line.fault(f"{len(cells)} columns, where the header has {len(self._columns)}", FIX_THE_ROW)
        row = _converted(line, dict(zip(self._columns, map(str.strip, cells), strict=True)), _LengthRow)
        _check_row(line, row, row.arrived_s)
        yield Request(row.arrived_s, row.input_length, row.output_length)


_T = TypeVar("_T")


def _decoded(line: Line, kind: type[_T]) -> _T:
    """Parse a JSON line into ``kind``; keys that ``kind`` does not have are ignored."""
    try:
        return msgspec.json.decode(line.text, type=kind)
    except msgspec.ValidationError as error:
        raise line.fault(str(error), FIX_THE_ROW) from error
    except msgspec.DecodeError as error:
        raise line.fault(f"not a whole JSON object: {error}", FIX_THE_ROW) from error


def _converted(line: Line, cells: dict[str, str], kind: type[_T]) -> _T:
    """Read the named cells of a CSV line as the numbers that ``kind`` asks for."""
    try:
        return msgspec.convert(cells, kind, strict=False)
    except msgspec.ValidationError as error:
        raise line.fault(str(error), FIX_THE_ROW) from error


def _check_row(line: Line, row: _Lengths, arrival_s: float, where: str = "") -> None:
    """Refuse negative and absurd numbers, before anything is sized by them."""
    _check_range(line, f"{where}input_length", row.input_length, 1, MAX_LENGTH)
    _check_range(line, f"{where}output_length", row.output_length, 0, MAX_LENGTH)
    _check_range(line, f"{where}the arrival in seconds", arrival_s, 0, MAX_ARRIVAL_S)


def _check_range(line: Line, name: str, value: float, least: int, most: int) -> None:
    if not least <= value <= most:
        raise line.fault(f"{name} is {value}, but must be from {least} to {most}", FIX_THE_ROW)
