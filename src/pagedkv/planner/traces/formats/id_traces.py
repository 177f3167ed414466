"""Traces with ids of blocks, sessions and conversations: our own format, and those of releases.

This project's own format, described in docs/trace-format.md, has a header, then one request in each line. A row is
checked here. An unknown key is refused, since a mistyped key would silently leave its default in force; keys that begin
with ``x_`` are free for other uses.

A file with one session in each line has the session's requests, on its own clock, with block ids of its own. It does
not record when a session began, nor whether two sessions share a prompt. So arrivals stay on the session's clock, and
each session's ids are moved above those of all earlier sessions. :mod:`~pagedkv.planner.traces.merging` gives sessions
a common clock.

Each object of a ShareGPT file is a conversation, whose turns are texts and have no times. Each answer is a request
whose prompt is everything before it in the conversation. The turns of a conversation arrive at a stated interval on its
own clock; :mod:`~pagedkv.planner.traces.merging` determines when conversations begin.

Formats without tenants read them from a field of each line (:class:`TenantRows`), if their lines are JSON objects and
yield all their requests at once; logs and CSV read the field with the row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

from pagedkv.planner.traces.clocks import ArrivalClock, ArrivalOrder
from pagedkv.planner.traces.formats.agent_waits import AgentCall, Wait, waits_of
from pagedkv.planner.traces.formats.calls import name_under
from pagedkv.planner.traces.formats.parsing import (
    FIX_THE_ROW,
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_ARRIVAL_S,
    MAX_LENGTH,
    Lengths,
    Reading,
    RowFormat,
    SessionName,
    TraceHeader,
    TraceRow,
    check_range,
    check_row,
    decoded,
    decoded_strictly,
    request_of,
)
from pagedkv.planner.traces.formats.parts import ROLES, answer_parts, joined_parts, prompt_parts
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import (
    MAX_BLOCK_ID,
    InferredBlockSize,
    Request,
    count_ids,
    expand_runs,
    wrong_number_of_ids,
)

MOONCAKE_BLOCK_SIZE: Final = 512
BAILIAN_BLOCK_SIZE: Final = 16
NO_PARENT: Final = -1
MOST_CHATS: Final = 2**18
"""Number of chats whose session is remembered; a turn comes soon after the previous one."""
_BlockIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]


class _HashRunRow(Lengths):
    timestamp: float | str
    hash_runs: list[tuple[int, int]]
    session: SessionName | None = None


class _HashIdRow(Lengths):
    timestamp: float | str
    hash_ids: _BlockIds


class _BailianRow(_HashIdRow):
    chat_id: int
    parent_chat_id: int = NO_PARENT


class HashRunRows(RowFormat):
    """Reads ``timestamp`` (ms), ``session``, lengths, ``hash_runs`` of global ids; full blocks only.

    Args:
        reading: has the block size, or None for the release's, or to infer it.
    """

    UNIT: ClassVar[str] = "ms"
    BLOCK_SIZE: ClassVar[int] = 0
    TITLE: ClassVar[str] = "hash_runs"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._block_size = reading.block_size or self.BLOCK_SIZE
        self._inferred = InferredBlockSize(reading.block_size)
        self._clock = ArrivalClock(self.UNIT, reading.time_unit)

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"{self.TITLE.format(self._block_size)}, {self._clock.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the times."""
        return self._reading.notes_of(self._clock)

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request; the first request with ids determines the block size."""
        row = decoded(line, _HashRunRow)
        arrival_s = self._arrival_s(line, row, row.timestamp)
        block_size = self._inferred.learn(line, row.input_length, count_ids(line, row.hash_runs))
        yield _request_of(arrival_s, row, expand_runs(row.hash_runs), block_size, row.session)

    def _arrival_s(self, line: Line, row: Lengths, timestamp: float | str) -> float:
        arrival_s = self._clock.seconds(line, timestamp, any_order=self._reading.any_order)
        check_row(line, row, arrival_s)
        return arrival_s


def _request_of(
    arrival_s: float, row: Lengths, ids: npt.NDArray[np.int64], block_size: int, session: str | None = None
) -> Request:
    return Request(
        arrival_s, row.input_length, row.output_length, block_ids=ids, block_size=block_size, session=session
    )


class HashIdRows(HashRunRows):
    """Reads ``timestamp`` (ms), lengths, ``hash_ids`` of 512 tokens; a partly filled last block has an id too."""

    BLOCK_SIZE = MOONCAKE_BLOCK_SIZE
    TITLE = "Mooncake's hash_ids of {} tokens"

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded(line, _HashIdRow)
        arrival_s = self._arrival_s(line, row, row.timestamp)
        yield _request_of(arrival_s, row, self._ids(line, row, is_last_named=True), self._block_size)

    def _ids(self, line: Line, row: _HashIdRow, *, is_last_named: bool) -> npt.NDArray[np.int64]:
        """Check the number of ids: of all blocks, or, unless the last one is always named, of the full ones."""
        num_full, num_all = row.input_length // self._block_size, -(-row.input_length // self._block_size)
        if len(row.hash_ids) not in {num_all, num_all if is_last_named else num_full}:
            raise wrong_number_of_ids(line, row.input_length, len(row.hash_ids), self._block_size)
        return np.array(row.hash_ids, dtype=np.int64)


class BailianRows(HashIdRows):
    """The Qwen-Bailian traces: as above, but ``timestamp`` is in seconds, blocks have 16 tokens, and chats form chains.

    The last, partly filled block may have an id or none. A session has the name of its first chat.
    """

    UNIT = "s"
    BLOCK_SIZE = BAILIAN_BLOCK_SIZE
    TITLE = "Qwen-Bailian's hash_ids of {} tokens"

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._first_chats: dict[int, int] = {}

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded(line, _BailianRow)
        arrival_s = self._arrival_s(line, row, row.timestamp)
        ids = self._ids(line, row, is_last_named=False)
        yield _request_of(arrival_s, row, ids, self._block_size, str(self._first_chat(row)))

    def _first_chat(self, row: _BailianRow) -> int:
        first = self._first_chats.get(row.parent_chat_id, row.chat_id)
        self._first_chats[row.chat_id] = first
        if len(self._first_chats) > MOST_CHATS:
            del self._first_chats[next(iter(self._first_chats))]
        return first


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
        check_range(line, "pause_s", row.pause_s or 0.0, 0, MAX_ARRIVAL_S)
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


class _SessionRequest(Lengths):
    t: float
    hash_runs: list[tuple[int, int]]
    agent: int = 0
    api_time: float | None = None


class _SessionRow(msgspec.Struct):
    session: SessionName
    block_size: int
    requests: list[_SessionRequest]


class SessionRows(RowFormat):
    """Reads ``session``, ``block_size``, ``requests`` with ``t`` (s), lengths, ``hash_runs`` of full blocks.

    Requests may have ``api_time``, the seconds of their answers, and an ``agent``: 0, or the number of a subagent.

    The names and lines of all sessions are remembered, since names must be unique.

    Args:
        block_size: tokens per id; None: each row's own.
        any_order: whether the requests of a session are sorted by arrival; else unsorted ones are refused.
    """

    session_per_row = True
    is_of_agents = True

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
        calls = [
            AgentCall(_agent_name(row.session, each.agent), row.session if each.agent else None, each.t, each.api_time)
            for each in row.requests
        ]
        return (
            _request(request, call.agent, block_size, offset, wait)
            for request, call, wait in zip(row.requests, calls, waits_of(calls), strict=True)
        )

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
            check_range(line, f"{where}api_time", request.api_time or 0.0, 0, MAX_ARRIVAL_S)
            num_ids = count_ids(line, request.hash_runs, self._id_offset)
            if num_ids != request.input_length // block_size:
                raise wrong_number_of_ids(line, request.input_length, num_ids, block_size, where)
            if not self._any_order:
                order.follow(line, request.t, where)


def _request(request: _SessionRequest, session: str, block_size: int, offset: int, wait: Wait) -> Request:
    made = _request_of(request.t, request, expand_runs(request.hash_runs) + offset, block_size, session)
    return replace(made, waits_for=wait.agents, pause_s=wait.pause_s)


def _agent_name(session: str, agent: int) -> str:
    return f"{session} agent {agent}" if agent else session


class _WekaRequest(msgspec.Struct, rename={"num_prompt": "in", "num_output": "out"}):
    """A request of an agent, or all requests of a subagent, on a clock that begins with it."""

    t: float
    num_prompt: int = 0
    num_output: int = 0
    hash_ids: _BlockIds = []
    api_time: float | None = None
    requests: "list[_WekaRequest] | None" = None


class _WekaRow(msgspec.Struct):
    id: SessionName
    block_size: int
    requests: list[_WekaRequest]
    hash_id_scope: str = "local"


class WekaRows(SessionRows):
    """Reads ``id``, ``block_size``, ``requests`` with ``t`` (s), ``in``, ``out``, ``hash_ids`` of full blocks.

    A request of type "subagent" has ``requests`` of its own. Their times begin with it, or are on the clock on which it
    begins: then the first is no earlier than that, and AIPerf 0.13 reads both too (``dataset/loader/weka_trace.py``).
    Ids are the session's own, and those of its subagents are of the same numbering, unless ``hash_id_scope`` is
    "per_context".
    """

    @staticmethod
    def matches(keys: Mapping[str, object]) -> bool:
        """Return whether a file is such a trace, by the keys of its first row."""
        return keys.keys() >= {"id", "block_size", "requests"} and "session" not in keys

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return "Weka's sessions of agents, times in s of each session's own clock"

    def requests(self, line: Line) -> Iterator[Request]:
        """Check the line's session as a whole; its requests come in order of arrival."""
        row = decoded(line, _WekaRow)
        self._remember(line, row.id)
        block_size = self._given_block_size or row.block_size
        check_range(line, "block_size", block_size, 1, MAX_LENGTH)
        made: list[tuple[AgentCall, Request]] = []
        offset = behind = self._id_offset
        for number, (agent, begin_s, requests) in enumerate(_agents(row.requests, 0.0, "")):
            if number and row.hash_id_scope == PER_CONTEXT:
                offset = behind
            session, parent = _weka_names(row.id, agent)
            for place, request in enumerate(requests, 1):
                where = f"{agent} request {place}: ".lstrip()
                lengths = Lengths(request.num_prompt, request.num_output)
                check_row(line, lengths, begin_s + request.t, where)
                check_range(line, f"{where}api_time", request.api_time or 0.0, 0, MAX_ARRIVAL_S)
                num_ids, num_full = len(request.hash_ids), request.num_prompt // block_size
                if num_ids not in {num_full, -(-request.num_prompt // block_size)}:
                    raise wrong_number_of_ids(line, request.num_prompt, num_ids, block_size, where)
                ids = np.array(request.hash_ids, np.int64)
                behind = max(behind, offset + 1 + int(ids.max(initial=-1)))
                call = AgentCall(session, parent, begin_s + request.t, request.api_time)
                made.append((call, _request_of(call.begin_s, lengths, ids + offset, block_size, session)))
        self._id_offset = behind
        made.sort(key=lambda pair: pair[0].begin_s)
        waits = waits_of([call for call, _ in made])
        return (
            replace(request, waits_for=wait.agents, pause_s=wait.pause_s)
            for (_, request), wait in zip(made, waits, strict=True)
        )


PER_CONTEXT: Final = "per_context"


def _weka_names(session: str, agent: str) -> tuple[str, str | None]:
    """Return the names of an agent and of its parent; those of subagents are "agent 1", "agent 1.2"."""
    if not agent:
        return session, None
    parent = agent.rpartition(".")[0]
    return f"{session} {agent}", f"{session} {parent}".strip()


def _agents(requests: list[_WekaRequest], begin_s: float, name: str) -> Iterator[tuple[str, float, list[_WekaRequest]]]:
    """Yield an agent and all agents within: its name, the time at which its clock begins, its own requests."""
    yield name, begin_s, [request for request in requests if request.requests is None]
    inner = [request for request in requests if request.requests is not None]
    for number, agent in enumerate(inner, 1):
        within = f"{name}.{number}" if name else f"agent {number}"
        requests = agent.requests or []
        has_own_clock = not requests or requests[0].t < agent.t
        yield from _agents(requests, begin_s + agent.t * has_own_clock, within)


TURN_S: Final = 30.0
CONVERSATION_KEYS: Final = ("conversations", "conversation", "items")


class _Row(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(max_length=1000)] | int | None = None
    conversations: list[dict[str, Any]] | None = None
    conversation: list[dict[str, Any]] | None = None
    items: list[dict[str, Any]] | None = None


class ConversationRows(RowFormat):
    """Reads ``conversations`` of ``from`` and ``value`` (or ``role`` and ``content``), and an ``id``.

    Args:
        reading: how texts become tokens.
    """

    session_per_row = True

    def __init__(self, reading: Reading) -> None:
        self._texts = reading.texts
        self._number = 0

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return (
            f"ShareGPT conversations without times (one turn every {TURN_S:g} s is assumed), {self._texts.description}"
        )

    @property
    def notes(self) -> list[str]:
        """Warn that the times are assumed."""
        assumed = f"{TURN_S:g} s between two turns are assumed"
        return [f"the file has no times of turns: {assumed}, and every figure of recorded traffic rests on that"]

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the answers of one conversation as requests."""
        row = decoded(line, _Row)
        turns = next((turns for turns in (row.conversations, row.conversation, row.items) if turns is not None), None)
        if turns is None:
            raise line.fault(f"has none of {', '.join(CONVERSATION_KEYS)}", FIX_THE_ROW)
        messages = [_message(line, turn) for turn in turns]
        self._number += 1
        return self._answers(line, messages, f"{row.id if row.id is not None else 'conversation'} {self._number}")

    def _answers(self, line: Line, messages: list[dict[str, str]], session: str) -> Iterator[Request]:
        num_answers = 0
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = joined_parts(prompt_parts(line, {"messages": messages[:position]}, self._texts) or ())
            output = joined_parts(answer_parts(message, self._texts) or ())
            check_range(line, "the length of a prompt", len(prompt), 1, MAX_LENGTH)
            yield Request(
                TURN_S * num_answers,
                len(prompt),
                len(output),
                session=session,
                prompt_token_ids=prompt,
                output_token_ids=output,
            )
            num_answers += 1


def _message(line: Line, turn: Mapping[str, Any]) -> dict[str, str]:
    role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise line.fault("a turn has no from and value that are texts", FIX_THE_ROW)
    return {"role": ROLES.get(role.lower(), role), "content": text}


class TenantRows(RowFormat):
    """Rows of another format, each with the tenant from a field of its line.

    Args:
        rows: the other format.
        field: name of the field; dots lead into objects.
    """

    def __init__(self, rows: RowFormat, field: str) -> None:
        self._rows = rows
        self._field = field
        self.starts_with_header = rows.starts_with_header
        self.session_per_row = rows.session_per_row
        self.is_of_agents = rows.is_of_agents

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return self._rows.recognised

    @property
    def notes(self) -> list[str]:
        """List warnings about the file."""
        return self._rows.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Read one line at once, and yield its requests with their tenant lazily. Raises TraceError."""
        tenant = name_under(decoded(line, dict[str, Any]), self._field)
        return (replace(request, tenant=tenant) for request in self._rows.requests(line))

    def finish(self) -> Iterator[Request]:
        """Yield the held requests: the wrapped formats have none."""
        return self._rows.finish()
