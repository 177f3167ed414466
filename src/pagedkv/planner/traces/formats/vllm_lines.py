"""vLLM's log lines about requests.

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
"""

import ast
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from pagedkv.planner.traces.formats.calls import ABANDONED, Call
from pagedkv.planner.traces.formats.messages import Part, ids_part, text_part
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, checked_tokens
from pagedkv.planner.traces.formats.waiting import WaitingCalls
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.texts import TextTokens

__all__ = ["VllmLines", "is_vllm_line", "written_ids", "written_text"]

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
