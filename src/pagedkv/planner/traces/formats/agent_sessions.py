"""Sessions of coding agents: Claude Code's and Codex's files, and TraceLab's rounds.

A session file is a conversation as the agent keeps it, a row for each message or event. Claude Code writes a row for
each block of an answer, with the usage of the whole; ``parentUuid`` links a row to the one before, also to an earlier
one, where the user went back. Subagents are conversations of their own (``isSidechain``), in the same file or in files
of their own. After a compaction the conversation begins anew. Codex writes each item of its requests and answers, and
after each answer a count of tokens; what was compacted is replaced.

A call is made of each answer: its prompt is the conversation before it. It arrives with the last message or result that
it answers, since rows have the time at which they were complete. Calls of a file are put in order of arrival.

The system prompt, the definitions of tools, and reminders are in no row. They are the difference between the stated
length of a conversation's first prompt and its texts, and stand at the beginning of all its prompts. What they share
with other sessions is unknown, and counted as nothing. Thoughts are in the stated lengths of answers, and in no later
prompt.

TraceLab's rounds are such sessions without their texts: lengths of each prompt, and how much of it the provider's cache
had. As much is taken to be equal to the beginning of what the session had before; a cache that keeps more would hit
more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final

import numpy as np

from pagedkv.planner.traces.formats.calls import Call, LogRows, count_of, usage_of
from pagedkv.planner.traces.formats.parsing import (
    FIX_THE_ROW,
    MAX_LENGTH,
    MAX_SESSION_CHARACTERS,
    Reading,
    check_range,
    decoded,
)
from pagedkv.planner.traces.formats.parts import (
    ANSWERER,
    BYTES_PER_TOKEN,
    JsonObject,
    Part,
    as_object,
    ids_part,
    role_part,
    turn_parts,
)
from pagedkv.planner.traces.formats.reconciling import LEAST_SHARE
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import marked_tokens

NO_CALL: Final = "<synthetic>"
"""The model of answers that Claude Code wrote itself."""
THOUGHTS: Final = frozenset({"thinking", "redacted_thinking"})
INPUT_ITEMS: Final = ("_output", "_approval_response")
"""Ends of the types of items that answer a call of a tool."""


class SessionFileRows(LogRows):
    """Rows of session files, of one file or several: the calls of each file in order of arrival."""

    OTHERS = "rows of other kinds, skipped"

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._path: str | None = None
        self._ended: list[Call] = []
        self._hidden: dict[str, Part] = {}
        self._num_hidden = self._num_sessions = 0

    @property
    def notes(self) -> list[str]:
        """List warnings about the file: also what its sessions leave out."""
        if not self._num_hidden:
            return super().notes
        mean = self._num_hidden / max(1, self._num_sessions)
        note = (
            f"system prompts and tools are not in session files: {mean:,.0f} tokens a conversation, which are counted "
            "as shared within it, and with no other one"
        )
        return [*super().notes, note]

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests of a file that ended before this line."""
        if line.path != self._path:
            yield from self._end_file()
            self._path = line.path
        for call in self.calls(line, decoded(line, dict[str, Any])):
            self._ended.append(call)

    def finish(self) -> Iterator[Request]:
        """Yield the requests of the last file."""
        yield from self._end_file()
        yield from super().finish()

    def _end_file(self) -> Iterator[Request]:
        self._ended += self._last_calls()
        ended, self._ended = sorted(self._ended, key=attrgetter("arrival_s")), []
        for call in ended:
            if self._reading.tenant_by is not None and call.tenant is None:
                call.tenant = call.session
            yield from self._calls.requests(call)

    def _last_calls(self) -> Iterator[Call]:
        """Yield the calls that the end of a file completes."""
        raise NotImplementedError

    def _with_hidden(self, name: str, parts: Sequence[Part], stated: int | None) -> list[Part]:
        """Put what a conversation's prompts have and its file has not before the parts of one of them."""
        hidden = self._hidden.get(name)
        if hidden is None:
            num = 0 if stated is None else max(0, stated - sum(len(part.pieces) for part in parts))
            tokens = marked_tokens(sha256(b"hidden" + name.encode()).digest(), min(num, MAX_LENGTH))
            hidden = self._hidden[name] = Part(tokens, BYTES_PER_TOKEN * len(tokens), is_mark=True)
            self._num_hidden += len(tokens)
            self._num_sessions += 1
        return [hidden, *parts]


@dataclass(slots=True, eq=False)
class _Thread:
    """One conversation of Claude Code: the parts of its rows in order, and the answer that is being written."""

    name: str
    entries: list[list[Part]] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    last_answer: int = 0
    asked_at: str | None = None
    open_id: str | None = None
    open_row: tuple[Line, dict[str, Any]] | None = None
    prompt: list[Part] = field(default_factory=list)
    answer: list[Part] = field(default_factory=list)
    arrival: str = ""
    has_thoughts: bool = False


class ClaudeCodeRows(SessionFileRows):
    """One message, block of an answer or event in each row."""

    KEYS = (
        frozenset({"type", "sessionId"}),
        frozenset({"type", "summary", "leafUuid"}),
        frozenset({"type", "messageId", "snapshot"}),
    )
    TITLE = "Claude Code's sessions"

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._threads: dict[str, _Thread] = {}
        self._all: list[_Thread] = []

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the call that ends before this row, if one does."""
        name = row.get("uuid")
        if not isinstance(name, str):
            self._num_others += 1
            return
        thread = self._thread(row, name)
        message = as_object(row.get("message"))
        if row.get("type") == "user" and message:
            yield from self._close(thread)
            self._ask(thread, row, message)
        elif row.get("type") == "assistant" and message and message.get("model") != NO_CALL:
            yield from self._say(line, thread, row, message)
        else:
            self._num_others += 1
        thread.places[name] = len(thread.entries)

    def _thread(self, row: JsonObject, name: str) -> _Thread:
        parent = row.get("parentUuid")
        thread = self._threads.get(parent) if isinstance(parent, str) else None
        if thread is None:
            session = str(row.get("sessionId") or self._path)[:MAX_SESSION_CHARACTERS]
            agent = str(row.get("agentId") or name)[: MAX_SESSION_CHARACTERS // 2]
            thread = _Thread(f"{session} {agent}" if row.get("isSidechain") else session)
            self._all.append(thread)
        self._threads[name] = thread
        return thread

    def _ask(self, thread: _Thread, row: JsonObject, message: JsonObject) -> None:
        """Add a user's message, which takes the place of rows behind the one that it follows; or a tool's result."""
        place = thread.places.get(str(row.get("parentUuid")), len(thread.entries))
        if place < thread.last_answer and not _is_result(message):
            del thread.entries[place:]
        thread.entries.append(turn_parts(message, self._texts))
        if isinstance(row.get("timestamp"), str):
            thread.asked_at = max(thread.asked_at or "", row["timestamp"])

    def _say(self, line: Line, thread: _Thread, row: dict[str, Any], message: JsonObject) -> Iterator[Call]:
        """Add a block of an answer."""
        if thread.open_id is None or thread.open_id != message.get("id"):
            yield from self._close(thread)
            thread.prompt = [part for entry in thread.entries for part in entry]
            thread.arrival = thread.asked_at or str(row.get("timestamp"))
            thread.answer, thread.asked_at, thread.has_thoughts = [], None, False
            thread.entries.append([role_part(ANSWERER, self._texts)])
        thread.open_id = str(message.get("id"))
        thread.open_row = line, row
        content = message.get("content")
        blocks = content if isinstance(content, list) else [content]
        spoken = [block for block in blocks if as_object(block).get("type") not in THOUGHTS]
        thread.has_thoughts = thread.has_thoughts or len(spoken) < len(blocks)
        parts = turn_parts({"role": ANSWERER, "content": spoken}, self._texts)[1:]
        thread.answer += parts
        thread.entries[-1] += parts
        thread.last_answer = len(thread.entries)

    def _close(self, thread: _Thread) -> Iterator[Call]:
        if thread.open_row is None:
            return
        (line, row), thread.open_row, thread.open_id = thread.open_row, None, None
        stated = usage_of(line, as_object(as_object(row["message"]).get("usage")))
        prompt = [*thread.prompt, role_part(ANSWERER, self._texts)]
        num_visible = sum(len(part.pieces) for part in thread.answer)
        num_answer = stated.num_answer
        if num_answer is not None and num_answer < LEAST_SHARE * num_visible:
            num_answer = None  # a count from the beginning of the answer, which some versions write
        yield Call(
            line,
            self._calls.arrival_s(line, thread.arrival),
            self._with_hidden(thread.name, prompt, stated.num_prompt or None),
            thread.answer,
            stated.num_prompt or None,
            num_answer,
            max(0, num_answer - num_visible) if thread.has_thoughts and num_answer is not None else 0,
            session=thread.name,
        )

    def _last_calls(self) -> Iterator[Call]:
        for thread in self._all:
            yield from self._close(thread)
        self._threads, self._all = {}, []


def _is_result(message: JsonObject) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(as_object(part).get("type") == "tool_result" for part in content)


class CodexRows(SessionFileRows):
    """One item of a request or an answer, or an event, in each row."""

    KEYS = (frozenset({"timestamp", "type", "payload"}),)
    TITLE = "Codex's sessions"

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._begin()

    def _begin(self) -> None:
        self._session = ""
        self._past: list[Part] = []
        self._asked: list[Part] = []
        self._answer: list[Part] = []
        self._later: list[Part] = []
        self._asked_at: str | None = None
        self._later_at: str | None = None
        self._said_at = ""
        self._total: object = None

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the call whose tokens this row counts, if it counts any."""
        payload, kind, time = as_object(row.get("payload")), row.get("type"), str(row.get("timestamp"))
        if kind == "session_meta":
            self._session = str(payload.get("id") or self._path)[:MAX_SESSION_CHARACTERS]
            text = as_object(payload.get("base_instructions")).get("text") or payload.get("instructions")
            if isinstance(text, str):
                self._past += turn_parts({"role": "system", "content": text}, self._texts)
        elif kind == "response_item":
            self._take(payload, time)
        elif kind == "compacted":
            self._compact(payload)
        elif kind == "event_msg" and payload.get("type") == "token_count" and payload.get("info"):
            yield from self._counted(line, as_object(payload["info"]))
        else:
            self._num_others += 1

    def _take(self, item: JsonObject, time: str) -> None:
        kind = str(item.get("type"))
        if kind == "reasoning":
            return
        parts = turn_parts(item, self._texts)
        is_input = kind.endswith(INPUT_ITEMS) or (kind == "message" and item.get("role") != ANSWERER)
        if not is_input:
            self._answer += parts
            self._said_at = time
        elif self._answer:
            self._later += parts
            self._later_at = time
        else:
            self._asked += parts
            self._asked_at = time

    def _compact(self, payload: JsonObject) -> None:
        history = payload.get("replacement_history")
        turns = history if isinstance(history, list) else [{"role": "user", "content": payload.get("message") or ""}]
        session = self._session
        self._begin()
        self._session = session
        self._past = [part for turn in turns for part in turn_parts(turn, self._texts)]

    def _counted(self, line: Line, info: JsonObject) -> Iterator[Call]:
        total, self._total = self._total, info.get("total_token_usage")
        if not self._answer or (total is not None and total == self._total):
            return
        usage = as_object(info.get("last_token_usage"))
        num_prompt, num_answer = count_of(line, usage, ("input_tokens",)), count_of(line, usage, ("output_tokens",))
        prompt = [*self._past, *self._asked]
        num_thoughts = count_of(line, usage, ("reasoning_output_tokens",)) or 0
        yield Call(
            line,
            self._calls.arrival_s(line, self._asked_at or self._said_at),
            self._with_hidden(self._session, prompt, num_prompt),
            self._answer,
            num_prompt,
            num_answer,
            num_thoughts,
            session=self._session,
        )
        self._past = [*prompt, *self._answer]
        self._asked, self._answer, self._later = self._later, [], []
        self._asked_at, self._later_at = self._later_at, None

    def _last_calls(self) -> Iterator[Call]:
        self._begin()
        return iter(())


class TraceLabRows(LogRows):
    """One round, a call of a session, in each row."""

    KEYS = (frozenset({"session_id", "round_index", "input_tokens_total", "prefix_tokens"}),)
    TITLE = "TraceLab's rounds, which share what the provider's cache had"

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._contents: dict[str, list[tuple[bytes, int]]] = {}

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's call."""
        session = str(row["session_id"])[:MAX_SESSION_CHARACTERS]
        num_prompt = count_of(line, row, ("input_tokens_total",)) or 0
        num_output, num_prefix = (count_of(line, row, (key,)) or 0 for key in ("output_tokens", "prefix_tokens"))
        check_range(line, "input_tokens_total", num_prompt, 1, MAX_LENGTH)
        check_range(line, "output_tokens", num_output, 0, MAX_LENGTH)
        check_range(line, "prefix_tokens", num_prefix, 0, num_prompt)
        name = sha256(f"{session}\0{row.get('round_id')}\0{row['round_index']}".encode()).digest()
        prompt = _cut([*self._contents.get(session, ()), (b"before" + name, num_prefix)], num_prefix)
        prompt.append((name, num_prompt - num_prefix))
        self._contents[session] = [*prompt, (b"answer" + name, num_output)]
        yield Call(
            line,
            self._calls.arrival_s(line, _ready(line, row)),
            [ids_part(np.concatenate([marked_tokens(sha256(mark).digest(), num) for mark, num in prompt]))],
            [ids_part(marked_tokens(sha256(b"answer" + name).digest(), num_output))],
            num_prompt,
            num_output,
            session=session,
        )


def _cut(pieces: Sequence[tuple[bytes, int]], num: int) -> list[tuple[bytes, int]]:
    """Return the leading pieces of that many tokens."""
    kept: list[tuple[bytes, int]] = []
    for name, length in pieces:
        if num <= 0:
            break
        kept.append((name, min(length, num)))
        num -= length
    return kept


def _ready(line: Line, row: Mapping[str, Any]) -> object:
    """Return when a round's input was complete: the last message or result before its first output."""
    events = [as_object(each) for each in row.get("timing_events") or ()]
    inputs = [each.get("timestamp") for each in events if each.get("event_type") in {"user_message", "tool_result"}]
    times = [time for time in inputs or [each.get("timestamp") for each in events] if isinstance(time, str)]
    if not times:
        raise line.fault("a round has no time among its timing_events", FIX_THE_ROW)
    return max(times) if inputs else min(times)
