"""Which format a trace has, told by its first line."""

from textwrap import shorten
from typing import Final

import msgspec

from pagedkv.traces.formats.hash_ids import HashIdRows
from pagedkv.traces.formats.hash_runs import HashRunRows
from pagedkv.traces.formats.lengths import LENGTH_COLUMNS, LengthRows, is_length_header
from pagedkv.traces.formats.pagedkv_trace import FORMAT_NAME, PagedkvRows
from pagedkv.traces.formats.parsing import decoded
from pagedkv.traces.formats.row_format import RowFormat
from pagedkv.traces.formats.sessions import SessionRows
from pagedkv.traces.lines import Line

__all__ = ["detect_format"]

KNOWN_FORMATS: Final = (
    f'A trace has JSON lines, the first with "format": "{FORMAT_NAME}", or each with hash_ids, hash_runs or requests; '
    f"or it is CSV with the header {','.join(LENGTH_COLUMNS)}"
)


def detect_format(first: Line, block_size: int | None, *, any_order: bool = False) -> RowFormat:
    """Choose the format by the first line of a trace.

    Args:
        first: its first line that is not blank.
        block_size: tokens an id stands for, or None to go by the trace. Traces without ids have no use for it.
        any_order: put the requests of a session's line in order of arrival, instead of refusing them unsorted.

    Raises:
        TraceError: the line fits no format, or is a header that says something impossible.
    """
    if not first.text.startswith("{"):
        if is_length_header(first):
            return LengthRows(first)
        raise first.fault(f"neither a JSON object nor a known CSV header: {shorten(first.text, 60)!r}", KNOWN_FORMATS)
    keys = decoded(first, dict[str, msgspec.Raw])
    if "format" in keys:
        return PagedkvRows(first, block_size)
    if "requests" in keys:
        return SessionRows(block_size, any_order=any_order)
    if "hash_runs" in keys:
        return HashRunRows(block_size)
    if "hash_ids" in keys:
        return HashIdRows(block_size)
    names = shorten(", ".join(sorted(keys)) or "(none)", 200)
    raise first.fault(f"no known trace format has the keys {names}", KNOWN_FORMATS)
