"""Determines the format of a trace by its first line."""

from collections.abc import Callable, Mapping
from functools import partial
from textwrap import shorten
from typing import Any, Final

import msgspec

from pagedkv.planner.traces.formats.calls import Calls, Layout, ObjectLogRows
from pagedkv.planner.traces.formats.chat_logs import (
    BenchLayout,
    ChatLayout,
    FieldLayout,
    WildChatLayout,
    is_bench_result,
    is_chat_log,
    is_wildchat,
)
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
from pagedkv.planner.traces.formats.gateway_logs import (
    HeliconeLayout,
    LangfuseLayout,
    LiteLlmLayout,
    SpanLayout,
    is_helicone,
    is_langfuse,
    is_litellm,
    is_span,
)
from pagedkv.planner.traces.formats.id_traces import (
    CONVERSATION_KEYS,
    FORMAT_NAME,
    BailianRows,
    ConversationRows,
    HashIdRows,
    HashRunRows,
    PagedkvRows,
    SessionRows,
    TenantRows,
)
from pagedkv.planner.traces.formats.parsing import Reading, RowFormat, decoded
from pagedkv.planner.traces.lines import Line

__all__ = ["detect_format"]

KNOWN_FORMATS: Final = (
    f'A trace has JSON lines, the first with "format": "{FORMAT_NAME}", or each with hash_ids, hash_runs or requests; '
    "or it is a request log with messages or usage and times, a log of vLLM or SGLang, an export of LiteLLM, Langfuse "
    "or Helicone, spans of OpenTelemetry, conversations of ShareGPT or WildChat, or CSV with the header "
    f"{','.join(LENGTH_COLUMNS)}, Azure's or BurstGPT's, or any by `columns`; other JSON lines by `fields`"
)
LAYOUTS: Final[tuple[tuple[Callable[[Mapping[str, object]], bool], Callable[[Reading, Calls], Layout]], ...]] = (
    (is_litellm, LiteLlmLayout),
    (is_langfuse, LangfuseLayout),
    (is_helicone, HeliconeLayout),
    (is_span, SpanLayout),
    (is_wildchat, WildChatLayout),
    (is_bench_result, BenchLayout),
)


def detect_format(first: Line, reading: Reading) -> RowFormat:
    """Choose the format by the first line of a trace.

    Args:
        first: the first line that is not blank.
        reading: the user's statements about the file.

    Raises:
        TraceError: the line fits no format, or is a header with an impossible value.
    """
    row_format = _detected(first, reading)
    if reading.tenant_by is None or isinstance(row_format, ObjectLogRows | CsvRows):
        return row_format
    if isinstance(row_format, EngineLogRows):
        remedy = "Name several logs, each of a tenant, or a log of the gateway before the engine"
        raise first.fault("an engine's log has no tenants (`tenant_by`)", remedy)
    return TenantRows(row_format, reading.tenant_by)


def _detected(first: Line, reading: Reading) -> RowFormat:
    if not first.text.startswith("{"):
        return _of_text(first, reading)
    keys = decoded(first, dict[str, msgspec.Raw])
    if reading.columns is not None:
        return _of_fields(
            "JSON lines by `fields`", reading.columns, unit_of(reading.columns.get("arrival", "")), reading
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
    if "requests" in keys:
        return SessionRows(reading.block_size, any_order=reading.any_order)
    if "hash_runs" in keys or "hash_ids" in keys:
        return _of_ids(keys, reading)
    return _of_logs(first, keys, reading)


def _of_logs(first: Line, keys: dict[str, Any], reading: Reading) -> RowFormat | None:
    if is_engine_log(first, keys):
        return EngineLogRows(reading)
    layout = next((layout for matches, layout in LAYOUTS if matches(keys)), None)
    if layout is not None:
        return ObjectLogRows(layout, reading)
    if keys.keys() & set(CONVERSATION_KEYS):
        return ConversationRows(reading)
    header = known_header(keys.keys())
    if header is not None:
        return _of_fields(header.origin.replace("CSV", "table"), header.columns, header.unit, reading)
    return ObjectLogRows(ChatLayout, reading) if is_chat_log(keys) else None


def _of_fields(origin: str, fields: Mapping[str, str], unit: str, reading: Reading) -> RowFormat:
    return ObjectLogRows(partial(FieldLayout, origin, fields), reading, unit, "fields")


def _of_ids(keys: dict[str, Any], reading: Reading) -> RowFormat:
    if "hash_runs" in keys:
        return HashRunRows(reading)
    return BailianRows(reading) if "chat_id" in keys else HashIdRows(reading)
