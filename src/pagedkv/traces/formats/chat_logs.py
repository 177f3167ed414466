"""Request logs of OpenAI and Anthropic style services: JSON lines with messages, usage and times, in many layouts.

What is looked for, wherever it is common: the body with ``messages`` or ``prompt`` at the top, or in ``request``,
``body``, ``input`` or ``params``; the answer with ``usage`` at the top, or in ``response``, ``output``, ``result`` (or
a ``body`` in these); a time at the top. Lengths are those of the tokens that texts become; where there are no texts,
those of the usage, which tells no content.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from pagedkv.arrays import Int32Array
from pagedkv.traces.clocks import ArrivalClock
from pagedkv.traces.formats.messages import answer_tokens, prompt_tokens
from pagedkv.traces.formats.parsing import (
    FIX_THE_ROW,
    MAX_SESSION_CHARACTERS,
    Lengths,
    check_range,
    check_row,
    decoded,
)
from pagedkv.traces.formats.row_format import Reading, RowFormat
from pagedkv.traces.lines import Line
from pagedkv.traces.request import Request

__all__ = ["ChatLogRows", "is_chat_log"]

TIMES: Final = (
    "arrival_time",
    "request_time",
    "start_time",
    "received_at",
    "timestamp",
    "@timestamp",
    "created_at",
    "created",
    "time",
    "ts",
    "date",
)
REQUESTS: Final = ("request", "body", "input", "params", "kwargs")
ANSWERS: Final = ("response", "output", "result", "completion")
SESSIONS: Final = ("session_id", "conversation_id", "thread_id", "session", "prompt_cache_key", "user_id", "user")
PROMPT_COUNTS: Final = ("prompt_tokens", "input_tokens")
OUTSIDE_INPUT: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""What Anthropic counts beside input_tokens; OpenAI's cached tokens are part of prompt_tokens."""
ANSWER_COUNTS: Final = ("completion_tokens", "output_tokens")
MOST_SAMPLES: Final = 2**16
SHOWN: Final = 8

_Object = Mapping[str, Any]


def is_chat_log(keys: Mapping[str, object]) -> bool:
    """Tell by the keys of the first line whether it may be such a log."""
    return bool(keys.keys() & {"messages", "prompt", "usage", *REQUESTS} and keys.keys() & set(TIMES)) or (
        "messages" in keys
    )


class ChatLogRows(RowFormat):
    """A request a line, as above.

    Args:
        reading: how texts become tokens, and what the user said of times.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._clock = ArrivalClock("s", reading.time_unit)
        self._num_told = self._num_made = 0
        self._num_without_output = 0
        self._style = "an OpenAI style"

    @property
    def recognised(self) -> str:
        """Say what the file was taken for, and how the tokens compare with the usage that it states."""
        usage = ""
        if self._num_made and self._num_told:
            usage = f" (its usage says {self._num_told / self._num_made:.2f} times as many)"
        missing = f", {self._num_without_output:,} without an answer" if self._num_without_output else ""
        told = self._reading.texts.told if self._num_made or not self._num_told else "lengths from its usage"
        return f"{self._style} request log, {self._clock.told}, {told}{usage}{missing}"

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded(line, dict[str, Any])
        body, answer = _inner(row, REQUESTS), _inner(row, ANSWERS)
        arrival_s = self._arrival_s(line, row, body, answer)
        usage: _Object = next((each["usage"] for each in (answer, row) if isinstance(each.get("usage"), dict)), {})
        if usage.keys() & {*OUTSIDE_INPUT, "input_tokens"}:
            self._style = "an Anthropic style"
        texts = self._reading.texts
        prompt = prompt_tokens(line, body, texts) if body is not row or "messages" in row or "prompt" in row else None
        output = answer_tokens(_answer(answer, row), texts)
        lengths = self._lengths(line, prompt, output, usage)
        check_row(line, lengths, arrival_s)
        num_samples = body.get("n") or 1
        if type(num_samples) is not int:
            raise line.fault(f"n is {num_samples!r:.40}, no whole number", FIX_THE_ROW)
        check_range(line, "n", num_samples, 1, MOST_SAMPLES)
        has_whole_output = output is not None and len(output) == lengths.output_length
        yield Request(
            arrival_s,
            lengths.input_length,
            lengths.output_length,
            session=_session(row, body),
            num_samples=num_samples,
            prompt_token_ids=prompt,
            output_token_ids=output if prompt is not None and has_whole_output else None,
        )

    def _arrival_s(self, line: Line, row: _Object, body: _Object, answer: _Object) -> float:
        for each in (row, body, answer):  # an answer's own time comes last: it is when the answer was begun
            for key in TIMES:
                value = each.get(key)
                if isinstance(value, int | float | str) and not isinstance(value, bool):
                    return self._clock.seconds(line, value, any_order=self._reading.any_order)
        names = ", ".join(sorted(row)[:SHOWN])
        raise line.fault(f"has no time among {names}", f"Name it one of {', '.join(TIMES)}")

    def _lengths(self, line: Line, prompt: Int32Array | None, output: Int32Array | None, usage: _Object) -> Lengths:
        told_input, told_output = _count(line, usage, PROMPT_COUNTS), _count(line, usage, ANSWER_COUNTS)
        if told_input is not None:
            told_input += sum(_count(line, usage, (key,)) or 0 for key in OUTSIDE_INPUT)
        if prompt is None and told_input is None:
            raise line.fault("has neither messages nor a prompt nor usage", "Log what was asked, or how long it was")
        if prompt is not None and told_input is not None:
            self._num_made += len(prompt)
        self._num_told += told_input or 0
        made_output = None if output is None else len(output)
        num_output = made_output if made_output is not None and prompt is not None else told_output
        if num_output is None:
            num_output = made_output
        self._num_without_output += num_output is None
        return Lengths(len(prompt) if prompt is not None else int(told_input or 0), num_output or 0)


def _inner(row: _Object, names: tuple[str, ...]) -> _Object:
    """Find the object that has the body or the answer: inside others, or the row itself."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.startswith("{"):
            value = _parsed(value)
        if isinstance(value, dict):
            inside = value.get("body")
            return inside if isinstance(inside, dict) else value
    return row


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _answer(answer: _Object, row: _Object) -> object:
    """Find what was answered: OpenAI's first choice, Anthropic's content, or a text."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0].get("message") or choices[0].get("text")
    if answer is not row:
        return answer.get("content") or answer.get("text")
    return next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)


def _session(row: _Object, body: _Object) -> str | None:
    metadata = body.get("metadata") or row.get("metadata")
    for each in (row, body, metadata if isinstance(metadata, dict) else {}):
        for key in SESSIONS:
            value = each.get(key)
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)[:MAX_SESSION_CHARACTERS]
    return None


def _count(line: Line, usage: _Object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = usage.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise line.fault(f"usage.{name} is {value!r:.40}, no number of tokens", FIX_THE_ROW)
            return value
    return None
