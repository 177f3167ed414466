"""Request logs of vLLM and SGLang, among lines of other kinds.

Requests are yielded in order of arrival, so a call is held until all earlier ones are answered. The number of held
calls is bounded; beyond the bound, the oldest call is yielded without an answer.

vLLM writes these lines about requests:

=============================================================  ========================================================
line                                                           what is taken from it
=============================================================  ========================================================
``Received request ID: prompt: ..., params: ...``              arrival, ``max_tokens``, ``n``; prompt or tokens (old)
``Request ID details: prompt: ...``                            at DEBUG: the prompt or its tokens
``Generated response ID details: output_token_ids: ...``       at DEBUG: tokens of the answer, or of a piece of it
``Generated response ID: output: ..., finish_reason: ...``     with outputs logged: the answer, and that it exists
``Request ID aborted.``, ``Request ID failed ...``             its failure
=============================================================  ========================================================

Tokens take precedence over texts. vLLM's ``--max-log-len`` cuts both without a mark.

SGLang writes a line on arrival, and a line after the answer, as text or as JSON:

=====================================================  ================================================================
line                                                   what is taken from it
=====================================================  ================================================================
``Receive: obj=...(rid=...``, ``Finish: obj=...``      arrival; prompt, answer and counts
``{"event": "request.received", ...}``, ``finished``   the same; a time in brackets may stand before it
=====================================================  ================================================================

At level 2, texts and lists of tokens longer than 2,048 are cut in the middle: the content of such a prompt is unknown.
Its length is known, since ``meta_info`` counts tokens at every level.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from pagedkv.planner.traces.formats.calls import ABANDONED, Call, Calls
from pagedkv.planner.traces.formats.parsing import (
    FIX_THE_ROW,
    MAX_SESSION_CHARACTERS,
    Reading,
    RowFormat,
    checked_tokens,
)
from pagedkv.planner.traces.formats.parts import Part, as_object, ids_part, text_part
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import TextTokens

MOST_WAITING: Final = 1024


class WaitingCalls:
    """Waiting calls, by their names in the log.

    Args:
        calls: turns the calls into requests, in order of arrival.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._waiting: dict[str, Call] = {}

    def arrived(self, line: Line, name: str, arrival: Callable[[], float | str]) -> Call:
        """Return the call of that name; an unknown name gets a new call with its time of arrival. Raises TraceError."""
        if name not in self._waiting:
            arrival_s = self._calls.arrival_s(line, arrival())
            self._waiting[name] = Call(line, arrival_s, is_answered=False)
        return self._waiting[name]

    def get(self, name: str) -> Call | None:
        """Return the call of that name, if it waits."""
        return self._waiting.get(name)

    def due(self) -> Iterator[Request]:
        """Yield the requests that are complete and in order. Raises TraceError."""
        while self._waiting:
            name, first = next(iter(self._waiting.items()))
            is_over = first.is_answered or first.failure is not None
            if not is_over and len(self._waiting) <= MOST_WAITING:
                return
            del self._waiting[name]
            yield from self._calls.requests(first)

    def finish(self) -> Iterator[Request]:
        """Yield the rest. Raises TraceError."""
        for name in list(self._waiting):
            yield from self._calls.requests(self._waiting.pop(name))
        yield from self._calls.finish()


TEXT: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
IDS: Final = r"[\[(][0-9, ]*[\])]"
LOG_LINE: Final = re.compile(r"^(?:\([^)]*\) )?(?:INFO|DEBUG|WARNING|ERROR)\b")
TIME: Final = re.compile(r"\b(?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d(?:[.,]\d+)?)")
EVENT: Final = re.compile(
    r"(?P<event>Received request|Request|Generated response) (?P<id>\S+?)(?P<delta> \(streaming delta\))?"
    r"(?: \(streaming complete\))?(?: details)?: (?P<rest>(?:prompt|params|output|output_token_ids): .*)"
)
FAILURE: Final = re.compile(
    r"\bRequest (?P<id>\S+) (?:(?P<aborted>aborted)\.|failed(?: \((?P<why>[a-z ]+)\)| due to|\.))"
)
FAILED_REASON: Final = re.compile(r"finish_reason: (?P<reason>abort|error)$")
LEAP_YEAR: Final = 2000
HALF_A_YEAR_S: Final = 182 * 86_400
YEAR_S: Final = 366 * 86_400
FORMAT_REMEDY: Final = "Keep vLLM's own format of log lines: INFO 05-01 12:30:00 ..."


def is_vllm_line(first: Line) -> bool:
    """Return whether vLLM wrote a file, by its first line."""
    return bool(LOG_LINE.match(first.text) or EVENT.search(first.text))


def written_ids(line: Line, text: str) -> list[int]:
    """Read a list or a tuple of numbers in Python's notation. Raises TraceError."""
    try:
        return [int(number) for number in text.strip("[]()").split(",") if number.strip()]
    except ValueError as error:
        raise line.fault(f"not a list of tokens: {text!r:.60}", FIX_THE_ROW) from error


def written_text(line: Line, text: str) -> str:
    """Read a text in Python's notation. Raises TraceError."""
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError) as error:
        raise line.fault(f"not a whole text: {text!r:.60}", FIX_THE_ROW) from error


@dataclass(slots=True)
class VllmLines:
    """Adds vLLM's lines to the waiting calls.

    Args:
        waiting: the calls.
        texts: how texts become tokens.
    """

    waiting: WaitingCalls
    texts: TextTokens
    _year_s: float = 0.0
    _latest_s: float = 0.0
    _streamed: dict[str, list[int]] = field(default_factory=dict)

    def take(self, line: Line) -> bool:
        """Read a line, if it is about a request; return whether it is. Raises TraceError."""
        event = EVENT.search(line.text)
        if event is None:
            return self._take_failure(line)
        if event["event"] == "Generated response":
            self._take_answer(line, event)
        else:
            self._take_arrival(line, event)
        return True

    def _take_arrival(self, line: Line, event: re.Match[str]) -> None:
        call = self.waiting.arrived(line, event["id"], lambda: self._time_s(line))
        rest = event["rest"]
        prompt = self._part(line, rest, "prompt", "prompt_token_ids")
        call.prompt = call.prompt if prompt is None else [prompt]
        _, is_there, parameters = rest.rpartition("params: ")
        for name in ("max_tokens", "n") if is_there else ():
            found = re.search(rf"\b{name}=(\d+)", parameters)
            if found is not None and name == "n":
                call.num_samples = max(1, int(found[1]))
            elif found is not None:
                call.num_most = int(found[1])

    def _take_answer(self, line: Line, event: re.Match[str]) -> None:
        call = self.waiting.get(event["id"])
        if call is None:
            return
        rest = event["rest"]
        if rest.startswith("output_token_ids"):
            self._take_output_ids(line, event["id"], rest)
        elif not event["delta"]:
            self._finish(line, call, event["id"], rest)

    def _take_output_ids(self, line: Line, name: str, rest: str) -> None:
        found = re.search(IDS, rest)
        if found is not None:  # concatenate the pieces of a stream
            self._streamed.setdefault(name, []).extend(written_ids(line, found.group()))

    def _finish(self, line: Line, call: Call, name: str, rest: str) -> None:
        ids = self._streamed.pop(name, [])
        part = ids_part(checked_tokens(line, ids)) if ids else self._part(line, rest, "output", "output_token_ids")
        call.answer = None if part is None else [part]
        call.is_answered = True
        failed = FAILED_REASON.search(rest)
        if failed is not None:
            call.failure = ABANDONED if failed["reason"] == "abort" else "error"

    def _take_failure(self, line: Line) -> bool:
        failed = FAILURE.search(line.text)
        call = None if failed is None else self.waiting.get(failed["id"])
        if failed is None or call is None or call.is_answered:
            return False
        self._streamed.pop(failed["id"], None)
        call.failure = ABANDONED if failed["aborted"] else failed["why"] or "error"
        return True

    def _part(self, line: Line, text: str, text_key: str, ids_key: str) -> Part | None:
        """Read the ids in the log, else the text; None if it has neither."""
        quoted = re.search(rf"\b{text_key}: (?P<text>{TEXT})", text)
        behind = text if quoted is None else text[quoted.end() :]  # since a text may contain anything
        ids = re.search(rf"\b{ids_key}: (?P<ids>{IDS})", behind)
        if ids is not None and any(mark.isdigit() for mark in ids["ids"]):
            return ids_part(checked_tokens(line, written_ids(line, ids["ids"])))
        return None if quoted is None else text_part(written_text(line, quoted["text"]), self.texts)

    def _time_s(self, line: Line) -> float:
        """Read a time without a year; a time earlier by half a year belongs to the next year."""
        stamp = TIME.search(line.text)
        if stamp is None:
            raise line.fault("a request has no time", FORMAT_REMEDY)
        text = f"{LEAP_YEAR}-{stamp['month']}-{stamp['day']}T{stamp['time'].replace(',', '.')}"
        try:
            time_s = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        except ValueError as error:
            raise line.fault(f"{stamp.group()!r} is no time", FORMAT_REMEDY) from error
        if self._latest_s and time_s + self._year_s < self._latest_s - HALF_A_YEAR_S:
            self._year_s += YEAR_S
        self._latest_s = time_s + self._year_s
        return self._latest_s


SGLANG_LOG_LINE: Final = re.compile(r"^\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)[^\]]*\]")
JSON_LINE: Final = re.compile(r"^(?:\[\d{4}-[^\]]*\] )?(?P<row>\{.*\})$")
SGLANG_EVENT: Final = re.compile(r"\] (?P<event>Receive|Finish): obj=\w+\(rid='(?P<id>[^']*)'")
ABORT: Final = re.compile(r"'finish_reason': \{'type': 'abort'(?:.*?'status_code': (?P<code>\d+))?")
SESSION: Final = re.compile(r"\bsession_id='(?P<id>[^']+)'")
EVENT_KEYS: Final = frozenset({"event", "timestamp"})
RECEIVED: Final = "request.received"
FINISHED: Final = "request.finished"
CUT_LENGTH: Final = 2048
"""Characters of a text, or entries of a list, that remain at level 2: half of them from each end."""
CUT: Final = "..."


def is_sglang_line(first: Line, keys: Mapping[str, object]) -> bool:
    """Return whether SGLang wrote a file, by its first line; ``keys`` are those of a JSON object."""
    if keys:
        event = as_object(first.text).get("event") if keys.keys() >= EVENT_KEYS else None
        return isinstance(event, str) and ("rid" in keys or event.startswith("request."))
    return bool(SGLANG_LOG_LINE.match(first.text))


@dataclass(slots=True)
class SglangLines:
    """Adds SGLang's lines to the waiting calls.

    Args:
        waiting: the calls.
        texts: how texts become tokens.
    """

    waiting: WaitingCalls
    texts: TextTokens

    def take(self, line: Line) -> bool:
        """Read a line, if it is about a request; return whether it is. Raises TraceError."""
        written = JSON_LINE.match(line.text)
        if written is not None:
            return self._take_json(line, written["row"])
        event = SGLANG_EVENT.search(line.text)
        if event is None:
            return False
        self._take_text(line, event)
        return True

    # As text

    def _take_text(self, line: Line, event: re.Match[str]) -> None:
        head = SGLANG_LOG_LINE.match(line.text)
        if head is None:
            raise line.fault(
                "a request has no time", "Keep SGLang's own format of log lines: [2025-05-01 12:30:00] ..."
            )
        when = head["time"]
        call = self.waiting.arrived(line, event["id"], lambda: when)
        obj, _, out = line.text.partition(", out=")
        self._set_prompt(call, *self._part(line, obj, "=", ("input_ids", "text")))
        most = re.search(r"'max_new_tokens': (\d+)", obj)
        call.num_most = call.num_most if most is None else int(most[1])
        session = SESSION.search(obj)
        call.session = call.session if session is None else session["id"][:MAX_SESSION_CHARACTERS]
        if event["event"] == "Finish":
            part, _ = self._part(line, out, "': ", ("output_ids", "text"))
            counts = {
                name: int(count[1])
                for name in ("prompt_tokens", "completion_tokens")
                if (count := re.search(rf"'{name}': (\d+)", out)) is not None
            }
            aborted = ABORT.search(out)
            self._finish(call, part, counts, None if aborted is None else aborted["code"] or ABANDONED)

    def _part(self, line: Line, text: str, between: str, keys: tuple[str, str]) -> tuple[Part | None, bool]:
        """Read the ids of a line, else its text; return the part, and whether it was cut."""
        quoted = re.search(rf"\b{keys[1]}{between}(?P<text>{TEXT})(?P<cut> \.\.\. )?", text)
        behind = text if quoted is None else text[quoted.end() :]  # since a text may contain anything
        ids = re.search(rf"\b{keys[0]}{between}(?P<ids>{IDS})(?P<cut> \.\.\. )?", behind)
        if ids is not None and not ids["cut"] and any(mark.isdigit() for mark in ids["ids"]):
            return ids_part(checked_tokens(line, written_ids(line, ids["ids"]))), False
        if quoted is None or quoted["cut"]:  # the content of a cut text is unknown
            return None, quoted is not None or (ids is not None and bool(ids["cut"]))
        return text_part(written_text(line, quoted["text"]), self.texts), False

    # As JSON

    def _take_json(self, line: Line, written: str) -> bool:
        try:
            row = msgspec.json.decode(written, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise line.fault(f"not a whole JSON object: {error}", FIX_THE_ROW) from error
        if row.get("event") not in {RECEIVED, FINISHED}:
            return False
        when = next((row[key] for key in ("timestamp", "time", "ts") if key in row), None)
        if not isinstance(when, str | int | float):
            raise line.fault("a request has no timestamp", "Keep SGLang's own JSON lines")
        names, obj = row.get("rid"), as_object(row.get("obj"))
        if isinstance(names, str):
            self._take_object(line, names, when, obj, row)
            return True
        for place, name in enumerate(names if isinstance(names, list) else ()):  # the requests of a batch
            if isinstance(name, str):
                self._take_object(line, name, when, _one_of(obj, place), row)
        return True

    def _take_object(
        self, line: Line, name: str, when: str | float, obj: Mapping[str, Any], row: Mapping[str, Any]
    ) -> None:
        call = self.waiting.arrived(line, name, lambda: when)
        self._set_prompt(call, *self._json_part(line, obj, "input_ids", "text"))
        parameters = as_object(obj.get("sampling_params"))
        most, num_samples = parameters.get("max_new_tokens"), parameters.get("n")
        call.num_most = most if type(most) is int else call.num_most
        call.num_samples = num_samples if type(num_samples) is int and num_samples > 0 else call.num_samples
        session = obj.get("session_id") or as_object(obj.get("session_params")).get("id")
        call.session = session[:MAX_SESSION_CHARACTERS] if isinstance(session, str) else call.session
        if row["event"] == FINISHED:
            out = as_object(row.get("out"))
            meta = as_object(out.get("meta_info"))
            reason = as_object(meta.get("finish_reason"))
            failure = str(reason.get("status_code") or ABANDONED) if reason.get("type") == "abort" else None
            self._finish(call, self._json_part(line, out, "output_ids", "text")[0], meta, failure)

    def _json_part(self, line: Line, obj: Mapping[str, Any], ids_key: str, text_key: str) -> tuple[Part | None, bool]:
        ids, text = obj.get(ids_key), obj.get(text_key)
        if isinstance(ids, list) and ids and CUT not in ids:
            return ids_part(checked_tokens(line, ids)), False
        if isinstance(text, str) and text and not _is_cut(text):
            return text_part(text, self.texts), False
        return None, bool(ids) or bool(text)

    # Both

    def _set_prompt(self, call: Call, part: Part | None, is_cut: bool) -> None:  # noqa: FBT001 - as _part returns
        if part is not None:
            call.prompt = [part]
        call.is_cut = call.prompt is None and (call.is_cut or is_cut)

    def _finish(self, call: Call, part: Part | None, counts: Mapping[str, Any], failure: str | None) -> None:
        call.answer = None if part is None else [part]
        for name in ("prompt_tokens", "completion_tokens"):
            count = counts.get(name)
            if type(count) is int and name == "prompt_tokens":
                call.num_prompt = count
            elif type(count) is int:
                call.num_answer = count * call.num_samples  # counted for each sequence
        call.failure = failure
        call.is_answered = True


def _is_cut(text: str) -> bool:
    half = CUT_LENGTH // 2
    return len(text) == CUT_LENGTH + len(CUT) and text[half : half + len(CUT)] == CUT


def _one_of(obj: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """Return one request of a batch, in which each list has one entry a request."""

    def entry(value: Sequence[Any]) -> object:
        return value[place] if isinstance(value, list) and place < len(value) else None

    batched = {key: entry(obj[key]) for key in ("text", "input_ids") if isinstance(obj.get(key), list)}
    return {**obj, **batched}


META_DATA: Final = "meta data"


def is_engine_log(first: Line, keys: Mapping[str, object]) -> bool:
    """Return whether an engine wrote a file, by its first line; ``keys`` are those of a JSON object."""
    return is_sglang_line(first, keys) or (not keys and is_vllm_line(first))


class EngineLogRows(RowFormat):
    """Reads the lines of an engine's log; lines that are not about a request are skipped.

    Args:
        reading: how texts become tokens.
    """

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
