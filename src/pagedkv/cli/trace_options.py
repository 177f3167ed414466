"""Which requests of a trace, and in which order: the options of the commands that run or measure one."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from pagedkv.cli import options as opt
from pagedkv.cli.source_options import SourceOptions
from pagedkv.errors import ConfigurationError
from pagedkv.traces.clocks import rebased
from pagedkv.traces.interleaving import interleave_sessions
from pagedkv.traces.reader import TraceReader
from pagedkv.traces.request import Request

__all__ = ["TimedTraceOptions", "TraceOptions", "require_limit"]

SESSION_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace.

    Args:
        session_interval_s: seconds between the starts of sessions, in a trace with a session a line, whose clocks start
            anew with each; None: one session after the other, in file order.
        max_gap_s: longest gap within a session; longer ones are cut to it.
        trace_block_size: tokens a block id stands for, if not as the trace tells.
        limit: requests to stop after.
        source: what the file does not tell by itself.

    Raises:
        ConfigurationError: a time is negative or not finite, or the limit is out of range.
    """

    session_interval_s: opt.SessionIntervalOrNone = None
    max_gap_s: opt.MaxGap = None
    trace_block_size: opt.TraceBlockSize = None
    limit: opt.Limit = None
    source: SourceOptions = SourceOptions()  # noqa: RUF009 - a value: frozen

    def __post_init__(self) -> None:
        """Refuse what cannot be used, whatever the trace."""
        require_limit(self.limit)
        if self.max_gap_s is not None and self.session_interval_s is None:
            raise ConfigurationError("--max-gap cuts the gaps within sessions: give --session-interval, too")
        interleave_sessions((), self.session_interval_s or 0.0, self.max_gap_s)

    def open(self, path: str) -> TraceReader:
        """Open a trace. Raises ConfigurationError and TraceError as TraceReader does."""
        return self.source.open(path, self.trace_block_size)

    def requests(self, trace: TraceReader) -> Iterator[Request]:
        """Give the requests of an open trace, on a clock that begins no more than an hour before the first.

        The first is read at once, so that a file without any is refused before anything is compiled or loaded.

        Raises:
            TraceError: at once or while iterating, what is wrong with the trace.
        """
        requests = islice(rebased(self.source.in_time(self._in_order(trace))), self.limit)
        return chain(list(islice(requests, 1)), requests)

    def _in_order(self, trace: TraceReader) -> Iterator[Request]:
        if self.session_interval_s is not None and trace.session_per_row:
            yield from interleave_sessions(trace.sessions(), self.session_interval_s, self.max_gap_s)
        else:
            yield from trace


@dataclass(frozen=True, slots=True)
class TimedTraceOptions(TraceOptions):
    """How to read a trace for a replay, whose sessions overlap: one begins every minute, unless told otherwise."""

    session_interval_s: opt.SessionInterval = SESSION_INTERVAL_S


def require_limit(limit: int | None) -> None:
    """Check the number of requests to stop after. Raises ConfigurationError."""
    if limit is not None and not 1 <= limit <= sys.maxsize:
        raise ConfigurationError(f"--limit must be from 1 to {sys.maxsize} requests, got {limit}")
