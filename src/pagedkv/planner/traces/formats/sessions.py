"""One session in each line: its requests, on its own clock, with block ids of its own.

The file does not record when a session began, nor whether two sessions share a prompt. So arrivals stay on the
session's clock, and each session's ids are moved above those of all earlier sessions.
:mod:`~pagedkv.planner.traces.interleaving` gives sessions a common clock.
"""

from collections.abc import Iterator
from operator import attrgetter

import msgspec

from pagedkv.planner.traces.arrival_order import ArrivalOrder
from pagedkv.planner.traces.block_runs import count_ids, expand_runs, wrong_number_of_ids
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, Lengths, SessionName, check_row, decoded
from pagedkv.planner.traces.formats.row_format import RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["SessionRows"]


class _SessionRequest(Lengths):
    t: float
    hash_runs: list[tuple[int, int]]


class _SessionRow(msgspec.Struct):
    session: SessionName
    block_size: int
    requests: list[_SessionRequest]


class SessionRows(RowFormat):
    """Reads ``session``, ``block_size``, ``requests`` with ``t`` (s), lengths, ``hash_runs`` of full blocks.

    The names and lines of all sessions are remembered, since names must be unique.

    Args:
        block_size: tokens per id; None: each row's own.
        any_order: whether the requests of a session are sorted by arrival; else unsorted ones are refused.
    """

    starts_with_header = False
    session_per_row = True

    def __init__(self, block_size: int | None, *, any_order: bool = False) -> None:
        self._given_block_size = block_size
        self._any_order = any_order
        self._id_offset = 0
        self._lines_by_session: dict[str, int] = {}

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return "a session a line, times in s of each session's own clock"

    def requests(self, line: Line) -> Iterator[Request]:
        """Check the line's session as a whole, then make its requests one at a time.

        Between two requests the session stays in memory as it was read, with its ids in runs, so that many sessions
        can be under way.
        """
        row = decoded(line, _SessionRow)
        self._remember(line, row.session)
        block_size = self._given_block_size or row.block_size
        if block_size < 1:
            raise line.fault(f"block_size is {block_size}, but must be at least 1", FIX_THE_ROW)
        self._check_requests(line, row, block_size)
        offset = self._id_offset
        self._id_offset += 1 + max(
            (first + count - 1 for request in row.requests for first, count in request.hash_runs), default=-1
        )
        if self._any_order:
            row.requests.sort(key=attrgetter("t"))
        return (_request(request, row.session, block_size, offset) for request in row.requests)

    def _remember(self, line: Line, session: str) -> None:
        first = self._lines_by_session.setdefault(session, line.number)
        if first != line.number:
            raise line.fault(
                f"session {session!r} was on line {first} already", "Give a session all its requests on one line"
            )

    def _check_requests(self, line: Line, row: _SessionRow, block_size: int) -> None:
        order = ArrivalOrder()
        for number, request in enumerate(row.requests, 1):
            where = f"request {number}: "
            check_row(line, request, request.t, where)
            num_ids = count_ids(line, request.hash_runs, self._id_offset)
            if num_ids != request.input_length // block_size:
                raise wrong_number_of_ids(line, request.input_length, num_ids, block_size, where)
            if not self._any_order:
                order.follow(line, request.t, where)


def _request(request: _SessionRequest, session: str, block_size: int, offset: int) -> Request:
    return Request(
        arrival_s=request.t,
        input_length=request.input_length,
        output_length=request.output_length,
        block_ids=expand_runs(request.hash_runs) + offset,
        block_size=block_size,
        session=session,
    )
