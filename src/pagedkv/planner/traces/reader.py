"""TraceReader: a trace file as a stream of requests.

It combines :mod:`~pagedkv.planner.traces.lines`, which reads files, and :mod:`~pagedkv.planner.traces.formats`, which
reads rows; the first line determines the format. Only the row being read is in memory. Lines that cannot be read are
skipped, up to a limit that the user sets, and counted by kind.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any, Final, Self

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.clocks import ArrivalOrder, GeneratedArrivals, require_time_unit
from pagedkv.planner.traces.formats.agent_sessions import ClaudeCodeRows, CodexRows, TraceLabRows
from pagedkv.planner.traces.formats.calls import LogRows
from pagedkv.planner.traces.formats.csv_rows import (
    LENGTH_COLUMNS,
    CsvRows,
    by_option,
    csv_rows,
    known_header,
    unit_of,
    unknown_header,
)
from pagedkv.planner.traces.formats.engine_logs import EngineLogRows, is_engine_log
from pagedkv.planner.traces.formats.id_traces import (
    CONVERSATION_KEYS,
    BailianRows,
    ConversationRows,
    HashIdRows,
    HashRunRows,
    PagedkvRows,
    SessionRows,
    TenantRows,
    WekaRows,
)
from pagedkv.planner.traces.formats.parsing import FORMAT_NAME, Reading, RowFormat, decoded
from pagedkv.planner.traces.formats.service_logs import (
    BedrockRows,
    BenchRows,
    ChatRows,
    FieldRows,
    HeliconeRows,
    LangfuseRows,
    LiteLlmRows,
    WildChatRows,
)
from pagedkv.planner.traces.formats.spans import LangSmithRows, SpanRows
from pagedkv.planner.traces.lines import FolderReader, Line, opened
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import CharacterTokens, TextTokens

with needing("cli", "reading traces"):
    import msgspec


class TraceReader:
    """Reads one trace, in any known format; iterate over it once, inside a ``with`` block.

    Args:
        path: the file, plain, gzip, zst or Parquet; its content determines which, and the format. Or a folder, whose
            files are of one format; their requests are not in order of arrival.
        block_size: tokens per id; replaces the trace's own or the inferred value.
        time_unit: unit of the arrivals; replaces the format's own, or the one that its numbers determine.
        columns: columns of a CSV or Parquet file, or fields of JSON lines, by role: arrival, input, output, session,
            user, prompt, answer, status; dots lead into objects.
        texts: how texts become tokens; 4 characters a token by default.
        keep_failed: whether failed requests are read too; by default they are left out and counted.
        arrivals: times that replace the file's, which may have none.
        skip_bad: most bad lines to skip; skipped lines are counted.
        tenant_by: the column or field with the tenant.
        is_spread: whether the caller spreads requests of one stamp.
        any_order: whether unsorted requests are accepted. By default arrivals must not decrease; in a trace of
            sessions, within each session. A line that has a whole session is always sorted by arrival.

    Raises:
        ConfigurationError: ``block_size`` is not positive, or the unit of time is unknown.
        TraceError: the file cannot be opened; while iterating, also every fault of its content.
    """

    def __init__(  # noqa: PLR0913 - one file and all options of its reading, by keywords
        self,
        path: str | os.PathLike[str],
        block_size: int | None = None,
        *,
        any_order: bool = False,
        time_unit: str | None = None,
        columns: Mapping[str, str] | None = None,
        texts: TextTokens | None = None,
        keep_failed: bool = False,
        arrivals: GeneratedArrivals | None = None,
        skip_bad: int = 0,
        tenant_by: str | None = None,
        is_spread: bool = False,
    ) -> None:
        require_time_unit(time_unit)
        if block_size is not None and block_size < 1:
            raise ConfigurationError(f"the trace's block size must be at least 1 token, got {block_size}")
        any_order = any_order or Path(path).is_dir()
        self._any_order = any_order
        self._arrivals = arrivals
        self._bad_lines = BadLines(skip_bad)
        self._reading = Reading(
            block_size,
            any_order,
            time_unit,
            columns,
            texts or CharacterTokens(),
            keep_failed,
            has_generated_arrivals=arrivals is not None,
            tenant_by=tenant_by,
            is_spread=is_spread,
        )
        self._lines = opened(path)
        self.is_folder = isinstance(self._lines, FolderReader)
        """Whether the path is a folder, whose files follow each other in order of their names, not of time."""
        self._num_skipped = 0

    @property
    def num_bytes(self) -> int | None:
        """Size of the file as stored, or None for a pipe."""
        return self._lines.num_bytes

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes read so far, as a measure of progress."""
        return self._lines.num_bytes_read

    @property
    def recognised(self) -> str:
        """The recognised format, times and texts, as text for users; complete when all has been read.

        Raises:
            TraceError: as :attr:`session_per_row`.
        """
        recognised = self._format.recognised
        return recognised if self._arrivals is None else f"{recognised}, {self._arrivals.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about figures, one sentence each; complete when all has been read.

        Raises:
            TraceError: as :attr:`session_per_row`.
        """
        generated = [] if self._arrivals is None else [self._arrivals.note]
        skipped = f"rows of another kind before the first request, skipped: {self._num_skipped:,}"
        return [*generated, *self._format.notes, *self._bad_lines.notes, *([skipped] if self._num_skipped else [])]

    def __enter__(self) -> Self:
        """Hold the file open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self._lines.__exit__(kind, error, traceback)

    @property
    def session_per_row(self) -> bool:
        """Whether each line is a session with a clock of its own; reads the first line.

        Raises:
            TraceError: the file is empty, of no known format, or cannot be read.
        """
        return self._format.session_per_row

    @property
    def is_of_agents(self) -> bool:
        """Whether turns wait for the answers before them, which a replay keeps. Raises TraceError as above."""
        return self._format.is_of_agents

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in file order, those of a trace of sessions session by session."""
        if self._arrivals is None:
            return self._in_file_order()
        if self.session_per_row:
            reason = "the requests of a session have a clock of their own"
            raise TraceError(self._lines.path, None, reason, "State when sessions begin (`session_interval_s`)")
        return self._arrivals.applied_to(self._in_file_order())

    def _in_file_order(self) -> Iterator[Request]:
        check_order = not (self._any_order or self.session_per_row or self._arrivals is not None)
        order = ArrivalOrder()
        for line, requests in self._rows():
            for request in requests:
                if check_order:
                    order.follow(line, request.arrival_s)
                yield request

    def sessions(self) -> Iterator[Iterator[Request]]:
        """Yield the sessions of a trace with a session a line, each as its requests, on its own clock.

        A session may be iterated at any time, even after later ones were read. A session without requests is yielded
        too.

        Raises:
            TraceError: the trace is not one of sessions, or a line is wrong.
        """
        if not self.session_per_row:
            raise TraceError(
                self._lines.path, None, "the requests have one common clock already", "Leave the session interval out"
            )
        for _, requests in self._rows():
            yield requests

    def _rows(self) -> Iterator[tuple[Line, Iterator[Request]]]:
        """Yield every line with its requests; raise an error for a trace without any request."""
        row_format, has_requests = self._format, False
        last = self._first
        for line in self._remaining if row_format.starts_with_header else chain([self._first], self._remaining):
            requests = self._bad_lines.requests(row_format, line)
            last = line
            if not has_requests:
                begin = next(requests, None)
                has_requests = begin is not None
                requests = chain([begin], requests) if begin is not None else requests
            yield line, requests
        held_back = list(row_format.finish())
        if held_back:
            yield last, iter(held_back)
        elif not has_requests:
            raise self._first.fault("no request follows", "Name a trace with at least one request")

    @cached_property
    def _format(self) -> RowFormat:
        return detect_format(self._first, self._reading)

    @cached_property
    def _first(self) -> Line:
        """The first line of a known format: the first that is not blank, unless it is a row of another kind."""
        first = next(self._remaining, None)
        if first is None:
            raise TraceError(self._lines.path, None, "the file is empty", "Name a trace with at least one request")
        if is_known(first, self._reading):
            return first
        for num, line in enumerate(islice(self._remaining, MOST_TRIED), 1):
            if is_known(line, self._reading):
                self._num_skipped = num
                return line
        return first

    @cached_property
    def _remaining(self) -> Iterator[Line]:
        return self._lines.rows()


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


KNOWN_FORMATS: Final = (
    f'A trace has JSON lines, the first with "format": "{FORMAT_NAME}", or each with hash_ids, hash_runs or requests; '
    "or it is a request log with messages or usage and times, a log of vLLM, SGLang, Bedrock or Vertex AI, an export "
    "of LiteLLM, Langfuse, Helicone or LangSmith, spans of OpenTelemetry or OpenInference, sessions of Claude Code, "
    "Codex or Weka, conversations of ShareGPT or WildChat, or CSV with the header "
    f"{','.join(LENGTH_COLUMNS)}, Azure's or BurstGPT's, or any by `columns`; other JSON lines by `fields`"
)
LOGS: Final = (
    LiteLlmRows,
    LangfuseRows,
    HeliconeRows,
    BedrockRows,
    LangSmithRows,
    SpanRows,
    WildChatRows,
    BenchRows,
    CodexRows,
    TraceLabRows,
    ClaudeCodeRows,
)
"""Logs of objects that are told apart by the keys of their first row."""


def detect_format(first: Line, reading: Reading) -> RowFormat:
    """Choose the format by the first line of a trace.

    Args:
        first: the first line that is not blank.
        reading: the user's statements about the file.

    Raises:
        TraceError: the line fits no format, or is a header with an impossible value.
    """
    row_format = _detected(first, reading)
    if reading.tenant_by is None or isinstance(row_format, LogRows | CsvRows):
        return row_format
    if isinstance(row_format, EngineLogRows):
        remedy = "Name several logs, each of a tenant, or a log of the gateway before the engine"
        raise first.fault("an engine's log has no tenants (`tenant_by`)", remedy)
    return TenantRows(row_format, reading.tenant_by)


MOST_TRIED: Final = 1000
"""Rows of another kind before the first request of a log."""


def is_known(line: Line, reading: Reading) -> bool:
    """Return whether a line determines the format of its file; one that is not JSON does, or is refused."""
    if not line.text.startswith("{") or reading.columns is not None:
        return True
    return _of_objects(line, decoded(line, dict[str, msgspec.Raw]), reading) is not None


def _detected(first: Line, reading: Reading) -> RowFormat:
    if not first.text.startswith("{"):
        return _of_text(first, reading)
    keys = decoded(first, dict[str, msgspec.Raw])
    if reading.columns is not None:
        return FieldRows(
            "JSON lines by `fields`", reading.columns, reading, unit_of(reading.columns.get("arrival", ""))
        )
    row_format = _of_objects(first, keys, reading)
    if row_format is None:
        names = shorten(", ".join(sorted(keys)) or "(none)", 200)
        raise first.fault(
            f"no known trace format has the keys {names}",
            f"Name the fields: {by_option('fields', keys)}. {KNOWN_FORMATS}",
        )
    return row_format


def _of_text(first: Line, reading: Reading) -> RowFormat:
    if reading.columns is None and is_engine_log(first, {}):
        return EngineLogRows(reading)
    rows = csv_rows(first, reading)
    if rows is not None:
        return rows
    if "," in first.text or ";" in first.text or "\t" in first.text:
        raise unknown_header(first)
    raise first.fault(f"neither a JSON object nor a known CSV header: {first.text[:60]!r}", KNOWN_FORMATS)


def _of_objects(first: Line, keys: dict[str, Any], reading: Reading) -> RowFormat | None:
    if "format" in keys:
        return PagedkvRows(first, reading.block_size)
    if WekaRows.matches(keys):
        return WekaRows(reading.block_size)
    if "requests" in keys:
        return SessionRows(reading.block_size, any_order=reading.any_order)
    if "hash_runs" in keys or "hash_ids" in keys:
        return _of_ids(keys, reading)
    return _of_logs(first, keys, reading)


def _of_logs(first: Line, keys: dict[str, Any], reading: Reading) -> RowFormat | None:
    if is_engine_log(first, keys):
        return EngineLogRows(reading)
    log = next((log for log in LOGS if log.matches(keys)), None)
    if log is not None:
        return log(reading)
    if keys.keys() & set(CONVERSATION_KEYS):
        return ConversationRows(reading)
    header = known_header(keys.keys())
    if header is not None:
        return FieldRows(header.origin.replace("CSV", "table"), header.columns, reading, header.unit)
    return ChatRows(reading) if ChatRows.matches(keys) else None


def _of_ids(keys: dict[str, Any], reading: Reading) -> RowFormat:
    if "hash_runs" in keys:
        return HashRunRows(reading)
    return BailianRows(reading) if "chat_id" in keys else HashIdRows(reading)
