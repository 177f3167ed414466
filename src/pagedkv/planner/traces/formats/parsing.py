"""What all formats share: checked values of rows, and the interface of a format, lines in and requests out.

JSON types are exact: a boolean, a text or a fraction is not a whole number, and NaN is not JSON. Values that types
allow (negative, absurd, infinite) are checked here, before anything is sized by them.

The header and the row of the pagedkv trace format are here, since reading, writing and sorting share this description
of keys and defaults. Their values are checked where a trace is read (:mod:`pagedkv.planner.traces.formats.id_traces`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.clocks import ArrivalClock
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import MAX_BLOCK_ID, Request, expand_runs, run_lengths
from pagedkv.planner.traces.token_blocks import CharacterTokens, TextTokens

MAX_LENGTH: Final = 2**24
"""Longest accepted prompt or output: beyond any context window, and still cheap to hold."""
MAX_ARRIVAL_S: Final = 10**11
"""Some 3,000 years: above times since 1970, below garbage."""
MAX_SESSION_CHARACTERS: Final = 1000
"""Longest name of a session. Names are remembered, so a damaged one must not fill the memory."""
MAX_TOKEN_ID: Final = 2**31 - 1
FIX_THE_ROW: Final = "Repair or remove the row"
MOST_DIGITS: Final = 40  # digits of an absurd number that a message shows
EXTENSION_PREFIX: Final = "x_"
THOUSANDS: Final = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+", re.ASCII)
SessionName = Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARACTERS)]


class Lengths(msgspec.Struct):
    """The lengths in rows of all foreign formats."""

    input_length: int
    output_length: int


_T = TypeVar("_T")


def decoded(line: Line, kind: type[_T]) -> _T:
    """Parse a JSON line into ``kind``; keys that ``kind`` does not have are ignored, unless it forbids them.

    Raises:
        TraceError: the line is not JSON, or not of that kind.
    """
    try:
        return msgspec.json.decode(line.text, type=kind)
    except msgspec.ValidationError as error:
        raise line.fault(str(error), FIX_THE_ROW) from error
    except msgspec.DecodeError as error:
        raise line.fault(f"not a whole JSON object: {error}", FIX_THE_ROW) from error
    except RecursionError as error:
        raise line.fault("values are nested too deeply", FIX_THE_ROW) from error


def decoded_strictly(line: Line, kind: type[_T]) -> _T:
    """Parse a JSON line into ``kind``, which forbids unknown keys, except those that begin with ``x_``.

    Raises:
        TraceError: the line is not JSON, not of that kind, or has an unknown key.
    """
    try:
        return msgspec.json.decode(line.text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        values = decoded(line, dict[str, msgspec.Raw])
    known = {key: value for key, value in values.items() if not key.startswith(EXTENSION_PREFIX)}
    return decoded(Line(line.path, line.number, msgspec.json.encode(known).decode()), kind)


def converted(line: Line, cells: dict[str, str], kind: type[_T]) -> _T:
    """Read the named cells of a CSV line as the numbers that ``kind`` declares.

    Raises:
        TraceError: a cell is not such a number.
    """
    try:
        return msgspec.convert(cells, kind, strict=False)
    except msgspec.ValidationError as error:
        raise line.fault(str(error), FIX_THE_ROW) from error


def without_thousands(number: str) -> str:
    """Remove the commas between thousands; anything else is unchanged.

    >>> [without_thousands(number) for number in ("1,234,567", "1,2", "12")]
    ['1234567', '1,2', '12']
    """
    return number.replace(",", "") if "," in number and THOUSANDS.fullmatch(number) else number


def check_row(line: Line, row: Lengths, arrival_s: float, where: str = "") -> None:
    """Refuse lengths and a time that are negative, absurd or not finite. Raises TraceError."""
    check_range(line, f"{where}input_length", row.input_length, 1, MAX_LENGTH)
    check_range(line, f"{where}output_length", row.output_length, 0, MAX_LENGTH)
    check_range(line, f"{where}the arrival in seconds", arrival_s, 0, MAX_ARRIVAL_S)


def checked_tokens(line: Line, token_ids: Sequence[object]) -> Int32Array:
    """Make an array of tokens, each a whole number from 0 to 2^31 - 1. Raises TraceError."""
    for token in token_ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise line.fault(f"a token is {token!r:.40}, but must be from 0 to {MAX_TOKEN_ID}", FIX_THE_ROW)
    return np.array(token_ids, np.int32)


def check_range(line: Line, name: str, value: float, least: int, most: int) -> None:
    """Refuse a number outside ``[least, most]``. Raises TraceError."""
    if not least <= value <= most:
        raise line.fault(f"{name} is {str(value)[:MOST_DIGITS]}, but must be from {least} to {most}", FIX_THE_ROW)


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

    starts_with_header: bool = False
    """Whether the first line has no request."""

    session_per_row: bool = False
    """Whether a line is a whole session, with sorted arrivals on the session's own clock."""

    is_of_agents: bool = False
    """Whether the turns of a session are known to wait for the answers before them."""

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


FORMAT_NAME: Final = "pagedkv-trace"
FORMAT_VERSION: Final = 1
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class TraceHeader(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The first line."""

    format: str
    version: int
    block_size: int | None = None


class TraceRow(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Every other line. Keys are written in this order; a key with its default value is left out."""

    arrival_s: float
    session: SessionName | None = None
    tenant: SessionName | None = None
    input_length: int | None = None
    output_length: int | None = None
    num_samples: int = 1
    priority: int = 0
    waits_for: list[SessionName] = []
    pause_s: float | None = None
    block_runs: list[tuple[int, int]] | None = None
    block_ids: list[_BlockId] | None = None
    token_ids: list[_TokenId] | None = None
    output_token_ids: list[_TokenId] | None = None


def row_of(request: Request) -> TraceRow:
    """Return a request as a row in canonical form: ids in the longest runs, both lengths always present.

    A request with tokens and block ids keeps only its tokens, which determine the ids.
    """
    block_ids = request.block_ids if request.prompt_token_ids is None else None
    return TraceRow(
        arrival_s=float(request.arrival_s),
        session=request.session,
        tenant=request.tenant,
        input_length=request.input_length,
        output_length=request.output_length,
        num_samples=request.num_samples,
        priority=request.priority,
        waits_for=list(request.waits_for),
        pause_s=request.pause_s,
        block_runs=None if block_ids is None else run_lengths(block_ids),
        token_ids=_listed(request.prompt_token_ids),
        output_token_ids=_listed(request.output_token_ids),
    )


def request_of(row: TraceRow, input_length: int, output_length: int, block_size: int) -> Request:
    """Return the request of a checked row."""
    return Request(
        arrival_s=row.arrival_s,
        input_length=input_length,
        output_length=output_length,
        block_ids=_block_ids(row),
        block_size=block_size,
        session=row.session,
        num_samples=row.num_samples,
        priority=row.priority,
        prompt_token_ids=_as_array(row.token_ids),
        output_token_ids=_as_array(row.output_token_ids),
        tenant=row.tenant,
        waits_for=tuple(row.waits_for),
        pause_s=row.pause_s,
    )


def _block_ids(row: TraceRow) -> npt.NDArray[np.int64] | None:
    if row.block_runs is not None:
        return expand_runs(row.block_runs)
    return None if row.block_ids is None else np.array(row.block_ids, np.int64)


def _listed(token_ids: npt.NDArray[np.int32] | None) -> list[int] | None:
    return None if token_ids is None else token_ids.tolist()


def _as_array(token_ids: list[int] | None) -> npt.NDArray[np.int32] | None:
    return None if token_ids is None else np.array(token_ids, np.int32)
