"""Request logs of vLLM and SGLang, among lines of other kinds.

:mod:`~pagedkv.planner.traces.formats.vllm_lines` and :mod:`~pagedkv.planner.traces.formats.sglang_lines` list the lines
that are read.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from pagedkv.planner.traces.formats.calls import Calls
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat
from pagedkv.planner.traces.formats.sglang_lines import SglangLines, is_sglang_line
from pagedkv.planner.traces.formats.vllm_lines import VllmLines, is_vllm_line
from pagedkv.planner.traces.formats.waiting import WaitingCalls
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["EngineLogRows", "is_engine_log"]

META_DATA: Final = "meta data"


def is_engine_log(first: Line, keys: Mapping[str, object]) -> bool:
    """Return whether an engine wrote a file, by its first line; ``keys`` are those of a JSON object."""
    return is_sglang_line(first, keys) or (not keys and is_vllm_line(first))


class EngineLogRows(RowFormat):
    """Reads the lines of an engine's log; lines that are not about a request are skipped.

    Args:
        reading: how texts become tokens.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, reading: Reading) -> None:
        self._calls = Calls(reading, usage=META_DATA)
        self._waiting = WaitingCalls(self._calls)
        self._vllm = VllmLines(self._waiting, reading.texts)
        self._sglang = SglangLines(self._waiting, reading.texts)
        self._engine = "an engine's"

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"{self._engine} request log, {self._calls.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the file."""
        return self._calls.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests that are complete and in order after this line."""
        if self._sglang.take(line):
            self._engine = "SGLang's"
        elif not line.text.startswith("{") and self._vllm.take(line):
            self._engine = "vLLM's"
        return iter([*self._waiting.due()])

    def finish(self) -> Iterator[Request]:
        """Yield the requests that were never answered."""
        return self._waiting.finish()
