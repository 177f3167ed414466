"""What vLLM and SGLang log of requests: a line when one comes, a line when it is answered, among lines of other kinds.

=====================================================  ================================================================
line                                                   what is taken from it
=====================================================  ================================================================
``Received request ID: prompt: ..., params: ...``      vLLM: arrival, prompt or its tokens, ``max_tokens``, ``n``
``Request ID details: prompt: ...``                    vLLM at DEBUG: the prompt or its tokens
``Generated response ID: output: ...``                 vLLM with outputs logged: the answer or its tokens
``Receive: obj=...(rid=...``, ``Finish: obj=...``      SGLang: arrival; prompt, answer and counts
``{"event": "request.received", ...}``, ``finished``   SGLang as JSON: the same
=====================================================  ================================================================

Requests are given in order of arrival, so one is held back until those before it are answered; but no more than a
bounded number, after which an answer that never came counts as one of the most tokens that were allowed.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from pagedkv.arrays import Int32Array
from pagedkv.traces.clocks import ArrivalClock
from pagedkv.traces.formats.parsing import Lengths, check_row, checked_tokens
from pagedkv.traces.formats.row_format import Reading, RowFormat
from pagedkv.traces.lines import Line
from pagedkv.traces.request import Request

__all__ = ["EngineLogRows", "is_engine_log"]

TEXT: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
IDS: Final = r"[\[(][0-9, ]*[\])]"
VLLM_LINE: Final = re.compile(r"^(?:\([^)]*\) )?(?:INFO|DEBUG|WARNING|ERROR)\b")
VLLM_TIME: Final = re.compile(r"\b(?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d(?:[.,]\d+)?)")
VLLM_EVENT: Final = re.compile(
    r"(?P<event>Received request|Request|Generated response) (?P<id>\S+?)(?P<delta> \(streaming delta\))?"
    r"(?: \(streaming complete\))?(?: details)?: (?P<rest>(?:prompt|params|output): .*)"
)
SGLANG_LINE: Final = re.compile(r"^\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)[^\]]*\]")
SGLANG_EVENT: Final = re.compile(r"\] (?P<event>Receive|Finish): obj=\w+\(rid='(?P<id>[^']*)'")
EVENT_KEYS: Final = frozenset({"event", "rid"})
RECEIVED: Final = "request.received"
FINISHED: Final = "request.finished"
MOST_WAITING: Final = 1024
LEAP_YEAR: Final = 2000
HALF_A_YEAR_S: Final = 182 * 86_400
YEAR_S: Final = 366 * 86_400
MORE_LOGGING: Final = (
    "Let the engine log prompts: vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, SGLang with "
    "--log-requests --log-requests-level 3"
)


def is_engine_log(first: Line, keys: Mapping[str, object]) -> bool:
    """Tell by the first line of a file whether an engine wrote it; ``keys`` are those of a JSON object."""
    if keys:
        return keys.keys() >= EVENT_KEYS
    return bool(VLLM_LINE.match(first.text) or SGLANG_LINE.match(first.text) or VLLM_EVENT.search(first.text))


@dataclass(slots=True)
class _Waiting:
    """A request that has come, with what is known of it so far; counts where the log has no texts."""

    line: Line
    arrival_s: float
    prompt: Int32Array | None = None
    output: Int32Array | None = None
    num_prompt: int | None = None
    num_output: int | None = None
    most_output: int | None = None
    num_samples: int = 1
    is_answered: bool = False


class EngineLogRows(RowFormat):
    """Lines of an engine's log; those that are about no request are passed over.

    Args:
        reading: how texts become tokens.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._clock = ArrivalClock("s", reading.time_unit)
        self._waiting: dict[str, _Waiting] = {}
        self._engine = "an engine's"
        self._year_s = 0.0
        self._latest_s = 0.0
        self._num_unanswered = 0

    @property
    def recognised(self) -> str:
        """Say what the file was taken for."""
        missing = f", {self._num_unanswered:,} without an answer in it" if self._num_unanswered else ""
        return f"{self._engine} request log, {self._reading.texts.told}{missing}"

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests whose turn has come, now that this line is read."""
        if line.text.startswith("{"):
            self._take_json(line)
        elif (event := VLLM_EVENT.search(line.text)) is not None:
            self._take_vllm(line, event)
        elif (event := SGLANG_EVENT.search(line.text)) is not None:
            self._take_sglang(line, event)
        return iter([*self._due()])

    def finish(self) -> Iterator[Request]:
        """Yield the requests that were never answered."""
        return iter([self._request(self._waiting.pop(name)) for name in list(self._waiting)])

    def _due(self) -> Iterator[Request]:
        while self._waiting:
            name, first = next(iter(self._waiting.items()))
            if not first.is_answered and len(self._waiting) <= MOST_WAITING:
                return
            yield self._request(self._waiting.pop(name))

    def _arrived(self, line: Line, name: str, arrival_s: Callable[[], float]) -> _Waiting:
        if name not in self._waiting:
            self._waiting[name] = _Waiting(line, arrival_s())
        return self._waiting[name]

    # vLLM

    def _take_vllm(self, line: Line, event: re.Match[str]) -> None:
        self._engine = "vLLM's"
        rest = event["rest"]
        if event["event"] == "Generated response":
            waiting = self._waiting.get(event["id"])
            if waiting is not None and not event["delta"]:
                waiting.output = self._tokens(line, rest, "output", "output_token_ids")
                waiting.is_answered = True
            return
        waiting = self._arrived(line, event["id"], lambda: self._vllm_time_s(line))
        prompt = self._tokens(line, rest, "prompt", "prompt_token_ids")
        waiting.prompt = waiting.prompt if prompt is None else prompt
        for name in ("max_tokens", "n"):
            found = re.search(rf"\b{name}=(\d+)", rest)
            if found is not None and name == "n":
                waiting.num_samples = max(1, int(found[1]))
            elif found is not None:
                waiting.most_output = int(found[1])

    def _vllm_time_s(self, line: Line) -> float:
        """Read a time without a year; one that falls by half a year is of the next."""
        told = VLLM_TIME.search(line.text)
        if told is None:
            raise line.fault("a request has no time", "Keep vLLM's own format of log lines: INFO 05-01 12:30:00 ...")
        text = f"{LEAP_YEAR}-{told['month']}-{told['day']}T{told['time'].replace(',', '.')}"
        try:
            time_s = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        except ValueError as error:
            raise line.fault(f"{told.group()!r} is no time", "Keep vLLM's own format of log lines") from error
        if self._latest_s and time_s + self._year_s < self._latest_s - HALF_A_YEAR_S:
            self._year_s += YEAR_S
        self._latest_s = time_s + self._year_s
        return self._latest_s

    def _tokens(self, line: Line, text: str, text_key: str, ids_key: str) -> Int32Array | None:
        """Take the ids that the log has, else make them of the text; None if it has neither."""
        ids = re.search(rf"\b{ids_key}: (?P<ids>{IDS})", text)
        if ids is not None and any(mark.isdigit() for mark in ids["ids"]):
            return checked_tokens(line, _ids(line, ids["ids"]))
        told = re.search(rf"\b{text_key}: (?P<text>{TEXT})", text)
        return None if told is None else self._reading.texts.token_ids(_literal(line, told["text"]))

    # SGLang

    def _take_sglang(self, line: Line, event: re.Match[str]) -> None:
        self._engine = "SGLang's"
        told = SGLANG_LINE.match(line.text)
        if told is None:
            raise line.fault(
                "a request has no time", "Keep SGLang's own format of log lines: [2025-05-01 12:30:00] ..."
            )
        when = told["time"]
        waiting = self._arrived(line, event["id"], lambda: self._clock.seconds(line, when))
        obj, _, out = line.text.partition(", out=")
        prompt = self._sglang_tokens(line, obj, "=", ("input_ids", "text"))
        waiting.prompt = waiting.prompt if prompt is None else prompt
        most = re.search(r"'max_new_tokens': (\d+)", obj)
        waiting.most_output = waiting.most_output if most is None else int(most[1])
        if event["event"] == "Finish":
            waiting.output = self._sglang_tokens(line, out, "': ", ("output_ids", "text"))
            for name in ("prompt_tokens", "completion_tokens"):
                count = re.search(rf"'{name}': (\d+)", out)
                if count is not None:
                    self._note_count(waiting, name, int(count[1]))
            waiting.is_answered = True

    def _sglang_tokens(self, line: Line, text: str, between: str, keys: tuple[str, str]) -> Int32Array | None:
        ids = re.search(rf"\b{keys[0]}{between}(?P<ids>{IDS})(?P<cut> \.\.\. )?", text)
        if ids is not None and not ids["cut"] and any(mark.isdigit() for mark in ids["ids"]):
            return checked_tokens(line, _ids(line, ids["ids"]))
        told = re.search(rf"\b{keys[1]}{between}(?P<text>{TEXT})(?P<cut> \.\.\. )?", text)
        if told is None or told["cut"]:  # what is cut in the middle tells no content
            return None
        return self._reading.texts.token_ids(_literal(line, told["text"]))

    def _take_json(self, line: Line) -> None:
        try:
            row = msgspec.json.decode(line.text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise line.fault(f"not a whole JSON object: {error}", "Repair or remove the row") from error
        if row.get("event") not in {RECEIVED, FINISHED} or not isinstance(row.get("rid"), str):
            return
        self._engine = "SGLang's"
        when = next((row[key] for key in ("timestamp", "time", "ts") if key in row), None)
        if not isinstance(when, str | int | float):
            raise line.fault("a request has no timestamp", "Keep SGLang's own JSON lines")
        waiting = self._arrived(line, row["rid"], lambda: self._clock.seconds(line, when))
        obj, out = _object(row, "obj"), _object(row, "out")
        prompt = self._json_tokens(line, obj, "input_ids", "text")
        waiting.prompt = waiting.prompt if prompt is None else prompt
        most = _object(obj, "sampling_params").get("max_new_tokens")
        waiting.most_output = most if type(most) is int else waiting.most_output
        if row["event"] == FINISHED:
            waiting.output = self._json_tokens(line, out, "output_ids", "text")
            for name in ("prompt_tokens", "completion_tokens"):
                count = _object(out, "meta_info").get(name)
                if type(count) is int:
                    self._note_count(waiting, name, count)
            waiting.is_answered = True

    def _json_tokens(self, line: Line, obj: Mapping[str, Any], ids_key: str, text_key: str) -> Int32Array | None:
        ids, text = obj.get(ids_key), obj.get(text_key)
        if isinstance(ids, list) and ids and "..." not in ids:  # which stands for what was cut out
            return checked_tokens(line, ids)
        return self._reading.texts.token_ids(text) if isinstance(text, str) and text else None

    def _note_count(self, waiting: _Waiting, name: str, count: int) -> None:
        if name == "prompt_tokens":
            waiting.num_prompt = count
        else:
            waiting.num_output = count

    # All

    def _request(self, waiting: _Waiting) -> Request:
        prompt, output = waiting.prompt, waiting.output
        num_prompt = waiting.num_prompt if prompt is None else len(prompt)
        if num_prompt is None:
            raise waiting.line.fault("neither the prompt of this request nor its length is in the log", MORE_LOGGING)
        num_output = waiting.num_output if output is None else len(output)
        if num_output is None:
            self._num_unanswered += 1
            num_output = waiting.most_output or 0
        check_row(waiting.line, Lengths(num_prompt, num_output), max(0.0, waiting.arrival_s))
        return Request(
            waiting.arrival_s,
            num_prompt,
            num_output,
            num_samples=waiting.num_samples,
            prompt_token_ids=prompt,
            output_token_ids=output if prompt is not None else None,
        )


def _ids(line: Line, text: str) -> list[int]:
    """Read a list or a tuple of numbers, as Python writes it."""
    try:
        return [int(number) for number in text.strip("[]()").split(",") if number.strip()]
    except ValueError as error:
        raise line.fault(f"not a list of tokens: {text!r:.60}", "Repair or remove the row") from error


def _literal(line: Line, text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError) as error:
        raise line.fault(f"not a whole text: {text!r:.60}", "Repair or remove the row") from error


def _object(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}
