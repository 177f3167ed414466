"""CSV with one request in each record: known headers, or columns that the user names.

Cells may be quoted, and may then contain commas, quotes and ends of lines (RFC 4180). The first line determines whether
commas, semicolons or tabs separate the columns. Content is unknown, unless a column has the prompt itself.
"""

import csv
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.formats.calls import (
    ANSWER_COUNTS,
    OUTSIDE_INPUT,
    PROMPT_COUNTS,
    STATUSES,
    Call,
    Calls,
    failure_of,
)
from pagedkv.planner.traces.formats.parsing import (
    FIX_THE_ROW,
    MAX_SESSION_CHARACTERS,
    Lengths,
    Reading,
    RowFormat,
    check_row,
    converted,
    without_thousands,
)
from pagedkv.planner.traces.formats.parts import text_part
from pagedkv.planner.traces.formats.reconciling import refuse_sum
from pagedkv.planner.traces.formats.service_logs import SESSIONS, TIMES
from pagedkv.planner.traces.lines import MAX_LINE_NBYTES, Line
from pagedkv.planner.traces.request import Request

CSV_ROLES: Final = ("arrival", "input", "output", "session", "user", "prompt", "answer", "status")
LENGTH_COLUMNS: Final = ("arrived_s", "input_length", "output_length")
TENANT: Final = "tenant"
"""Role of the column that ``tenant_by`` names."""
DELIMITERS: Final = ",;\t"
MOST_SHOWN: Final = 12
SUFFIXES: Final = MappingProxyType({"_ns": "ns", "_us": "us", "_ms": "ms", "_s": "s"})
MORE_LINES: Final = "unexpected end of data"  # the csv module's message for a cell whose quotes are still open


class Header(NamedTuple):
    """A known header: its origin, its columns by role, and the unit of its times."""

    origin: str
    columns: Mapping[str, str]
    unit: str
    optional: Mapping[str, str] = MappingProxyType({})


HEADERS: Final = (
    Header("CSV of lengths", dict(zip(("arrival", "input", "output"), LENGTH_COLUMNS, strict=True)), "s"),
    Header(
        "Azure's CSV of lengths",
        {"arrival": "TIMESTAMP", "input": "ContextTokens", "output": "GeneratedTokens"},
        "s",
    ),
    Header(
        "BurstGPT's CSV of lengths",
        {"arrival": "Timestamp", "input": "Request tokens", "output": "Response tokens"},
        "s",
        {"session": "Session ID"},
    ),
    Header(
        "LiteLLM's table of spend",
        {"arrival": "startTime", "input": "prompt_tokens", "output": "completion_tokens"},
        "s",
        {"session": "session_id", "user": "end_user", "status": "status"},
    ),
    Header(
        "Helicone's CSV of requests",
        {"arrival": "request_created_at", "input": "prompt_tokens", "output": "completion_tokens"},
        "s",
        {"user": "request_user_id", "status": "response_status"},
    ),
)


class _Counts(msgspec.Struct):
    num_prompt: int | None = None
    num_answer: int | None = None


class _Columns(NamedTuple):
    """The column of each item in a record; None for an item without a column."""

    names: list[str]
    places: Mapping[str, int]


def parse_columns(text: str, name: str = "columns", *, needs_arrival: bool = True) -> dict[str, str]:
    """Parse a list of columns in the user's notation.

    Args:
        text: what=column, separated by commas.
        name: name of the argument, for messages: "columns" or "fields".
        needs_arrival: whether a column of times is required.

    Raises:
        ConfigurationError: a part is not of the form what=column, or the columns do not suffice.

    >>> parse_columns("arrival=ts, input=n_in, output=n_out")
    {'arrival': 'ts', 'input': 'n_in', 'output': 'n_out'}
    """
    pairs = [tuple(map(str.strip, part.split("=", 1))) for part in text.split(",")]
    known = ", ".join(CSV_ROLES)
    for pair in pairs:
        if len(pair) != len(("what", "column")) or pair[0] not in CSV_ROLES or not pair[1]:
            given = "=".join(pair)
            raise ConfigurationError(f"`{name}` must be what=column, of {known}; got {given!r:.60}")
    columns = {pair[0]: pair[1] for pair in pairs}
    if len(columns) < len(pairs):
        raise ConfigurationError(f"`{name}` names something twice: {text!r:.100}")
    for either in ((("arrival",),) if needs_arrival else ()) + (("input", "prompt"), ("output", "answer")):
        if not columns.keys() & set(either):
            raise ConfigurationError(f"`{name}` must name the column of {' or '.join(either)}; got {text!r:.100}")
    return columns


def csv_rows(first: Line, reading: Reading) -> "CsvRows | None":
    """Make the reader of a CSV file, by named columns or a known header; None without either.

    Raises:
        TraceError: a named column is missing, or occurs twice.
    """
    delimiter = max(DELIMITERS, key=first.text.count)
    names = _names(first, delimiter)
    tenant_column = {} if reading.tenant_by is None else {TENANT: reading.tenant_by}
    if reading.columns is not None:
        wanted = {**reading.columns, **tenant_column}
        if all(column.isdecimal() for column in wanted.values()):
            return _numbered(first, names, delimiter, reading, wanted)
        columns = _Columns(names, _places(first, names, wanted))
        unit = unit_of(reading.columns.get("arrival", ""))
        return CsvRows("CSV by `columns`", columns, unit, delimiter, reading)
    header = known_header(names) or _usual_header(names)
    if header is None:
        return None
    columns = _Columns(names, _places(first, names, {**header.columns, **tenant_column}))
    return CsvRows(header.origin, columns, header.unit, delimiter, reading)


GUESSES: Final = (
    ("arrival", ("time", "date", "arriv", "created", "start", "ts")),
    ("input", ("prompt", "input", "context", "n_in")),
    ("output", ("completion", "output", "generated", "response", "answer", "n_out")),
)


def by_option(option: str, names: Collection[str]) -> str:
    """Spell out the option that names the columns of a table, with those that sound like it."""
    guessed: list[str] = []
    for role, words in GUESSES:
        likely = (name for word in words for name in names if word in name.lower() and f"={name}" not in guessed)
        guessed.append(f"{role}={next(likely, '...')}")
    return f"`{option}={','.join(guessed)}`"


def _usual_header(names: Collection[str]) -> Header | None:
    """Return the header of a table of usage, whose columns have the usual names; None if it is none.

    Tokens that are read from a cache beside those of the input are in a column of their own, which a row of CSV does
    not add.
    """
    usual = (("arrival", TIMES), ("input", PROMPT_COUNTS), ("output", ANSWER_COUNTS))
    columns = {role: next((name for name in known if name in names), "") for role, known in usual}
    if not all(columns.values()) or set(OUTSIDE_INPUT) & set(names):
        return None
    optional = (("session", SESSIONS), ("status", STATUSES))
    found = {role: name for role, known in optional for name in known[::-1] if name in names}
    return Header("CSV of usage", {**columns, **found}, unit_of(columns["arrival"]))


def known_header(names: Collection[str]) -> Header | None:
    """Return the known header that has these columns, with those of its optional ones that exist."""
    for header in HEADERS:
        if set(header.columns.values()) <= set(names):
            optional = {role: name for role, name in header.optional.items() if name in names}
            return header._replace(columns={**header.columns, **optional})
    return None


def unknown_header(first: Line) -> TraceError:
    """Build the error for CSV with an unknown header; it lists the columns and a remedy."""
    names = _names(first, max(DELIMITERS, key=first.text.count))
    shown = ", ".join(f"{name:.40}" for name in names[:MOST_SHOWN])
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return first.fault(
        f"CSV whose columns are not known: {shown}{more}",
        f"Name the column of each: {by_option('columns', names)} (or session, user, prompt, answer); known without "
        f"`columns`: {', '.join(LENGTH_COLUMNS)}",
    )


def _names(first: Line, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([first.text], delimiter=delimiter))]
    except csv.Error as error:
        raise first.fault(f"not a CSV record: {error}", FIX_THE_ROW) from error


def _numbered(first: Line, cells: list[str], delimiter: str, reading: Reading, columns: Mapping[str, str]) -> "CsvRows":
    """Select columns by number, from 1; the first line is a header unless its arrival column holds a time."""
    places = {role: int(column) - 1 for role, column in columns.items()}
    for role, place in places.items():
        if not 0 <= place < len(cells):
            raise first.fault(f"has {len(cells)} columns, `columns` names {role}={place + 1}", "Count from 1")
    has_header = not cells[places.get("arrival", places.get("input", 0))][:1].isdigit()
    names = cells if has_header else [str(place + 1) for place in range(len(cells))]
    return CsvRows("CSV by `columns`", _Columns(names, places), "s", delimiter, reading, has_header=has_header)


def _places(header: Line, names: list[str], columns: Mapping[str, str]) -> dict[str, int]:
    for column in columns.values():
        if names.count(column) > 1:
            raise header.fault(f"two columns are named {column}", "Remove or rename one of them")
        if column not in names:
            near = get_close_matches(column, names, n=1)
            hint = f"nearest is {near[0]!r:.40}; " if near else ""
            shown = ", ".join(f"{name:.40}" for name in names[:MOST_SHOWN])
            raise header.fault(f"has no column {column!r:.60}", f"{hint}it has {shown}")
    return {role: names.index(column) for role, column in columns.items()}


def unit_of(column: str) -> str:
    """Return the unit at the end of a column's name; seconds if it has none."""
    return next((unit for suffix, unit in SUFFIXES.items() if column.lower().endswith(suffix)), "s")


class CsvRows(RowFormat):
    """Reads records of CSV.

    Args:
        origin: the recognised format, for users.
        columns: the column of each item.
        unit: unit of the times, unless the user states another or the numbers determine it.
        delimiter: separates columns.
        reading: the user's statements about the file.
        has_header: whether the first line is a header.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - facts about a file, passed in this module alone
        self,
        origin: str,
        columns: _Columns,
        unit: str,
        delimiter: str,
        reading: Reading,
        has_header: bool = True,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        self.starts_with_header = has_header
        self._origin = origin
        self._columns = columns
        self._delimiter = delimiter
        self._reading = reading
        self._calls = Calls(reading, unit, "columns")
        self._has_more = bool({"prompt", "answer", "status"} & columns.places.keys())
        self._open: Line | None = None
        if self._has_more:
            csv.field_size_limit(MAX_LINE_NBYTES)  # the module's own limit is too small for a long prompt

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        description = self._calls.description if self._has_more else self._calls.times_description
        return f"{self._origin}, {description}".removesuffix(", ")

    @property
    def notes(self) -> list[str]:
        """List warnings about the file."""
        return self._calls.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the request of the record that ends on this line, if one does."""
        whole = line if self._open is None else Line(line.path, self._open.number, f"{self._open.text}\n{line.text}")
        try:
            cells = next(csv.reader([whole.text], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            if str(error) == MORE_LINES and len(whole.text) < MAX_LINE_NBYTES:
                self._open = whole
                return
            raise whole.fault(f"not a CSV record: {error}", FIX_THE_ROW) from error
        self._open = None
        yield from self._request(whole, [cell.strip() for cell in cells])

    def finish(self) -> Iterator[Request]:
        """Refuse a record with an unclosed quote."""
        if self._open is not None:
            raise self._open.fault("quotes open here and never close", FIX_THE_ROW)
        return self._calls.finish()

    def _request(self, line: Line, cells: list[str]) -> Iterator[Request]:
        names, places = self._columns
        if len(cells) != len(names):
            reason = f"{len(cells)} columns, where the header has {len(names)}: {line.text!r:.60}"
            raise line.fault(reason, FIX_THE_ROW)
        refuse_sum(line, dict(zip(names, cells, strict=True)))
        found = {role: cells[place] for role, place in places.items()}
        arrival_s = 0.0 if self._reading.has_generated_arrivals else self._calls.arrival_s(line, found["arrival"])
        session = found.get("session") or found.get("user") or None
        if session is not None and len(session) > MAX_SESSION_CHARACTERS:
            raise line.fault(f"a session's name has {len(session)} characters, over 1000", FIX_THE_ROW)
        if self._has_more:
            yield from self._calls.requests(self._call(line, found, arrival_s, session))
            return
        lengths = converted(
            line,
            {
                "input_length": without_thousands(found["input"]),
                "output_length": without_thousands(found["output"]),
            },
            Lengths,
        )
        check_row(line, lengths, arrival_s)
        tenant = _tenant(found)
        yield Request(arrival_s, lengths.input_length, lengths.output_length, session=session, tenant=tenant)

    def _call(self, line: Line, found: Mapping[str, str], arrival_s: float, session: str | None) -> Call:
        """Make a call from a record that has texts or a status."""
        texts = self._reading.texts
        prompt, answer = ([text_part(found[role], texts)] if role in found else None for role in ("prompt", "answer"))
        counts = converted(
            line,
            {
                name: without_thousands(found[role])
                for name, role in (("num_prompt", "input"), ("num_answer", "output"))
                if found.get(role)
            },
            _Counts,
        )
        return Call(
            line,
            arrival_s,
            prompt,
            answer,
            counts.num_prompt,
            counts.num_answer,
            session=session,
            tenant=_tenant(found),
            failure=failure_of({"status": found["status"]}) if "status" in found else None,
            is_answered=bool(found.get("answer")) or counts.num_answer is not None,
        )


def _tenant(found: Mapping[str, str]) -> str | None:
    return found.get(TENANT, "")[:MAX_SESSION_CHARACTERS] or None
