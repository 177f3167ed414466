"""Observations that Langfuse exports: in camel case from its pages and its API, in snake case to a bucket.

Generations are calls; spans, events and other observations are skipped. Their usage is counted by kind, with every
token in one kind: ``total`` is the sum of all, and all kinds except output are input.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagedkv.planner.traces.formats.bodies import JsonObject, as_list, as_object, first_named, parts_of_answer
from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.messages import answer_parts, prompt_parts
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["LangfuseLayout", "is_langfuse"]

CAMEL: Final = frozenset({"traceId", "type", "startTime"})
SNAKE: Final = frozenset({"trace_id", "type", "start_time"})
GENERATION: Final = "GENERATION"
SESSIONS: Final = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")
USAGES: Final = ("usageDetails", "usage_details", "usage")
TOTAL: Final = "total"
OUTPUT: Final = "output"
REASONING: Final = "reasoning"
LONGEST: Final = 40


def is_langfuse(keys: Mapping[str, object]) -> bool:
    """Return whether a first line is an observation, by its keys."""
    return keys.keys() >= CAMEL or keys.keys() >= SNAKE


class LangfuseLayout:
    """One observation in each row.

    Args:
        reading: how texts become tokens.
        calls: reads the times.
    """

    def __init__(self, reading: Reading, calls: Calls) -> None:
        self._texts = reading.texts
        self._calls = calls
        self._num_others = 0

    @property
    def title(self) -> str:
        """Name of the log."""
        others = f" (other observations skipped: {self._num_others:,})" if self._num_others else ""
        return f"Langfuse's generations{others}"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's call, if it is a generation."""
        if row.get("type") != GENERATION:
            self._num_others += 1
            return
        question, reply = as_list(row.get("input")), as_list(row.get("output"))
        body = question if isinstance(question, dict) else {"messages": question}
        if isinstance(question, str):
            body = {"prompt": question}
        usage: JsonObject = next((found for key in USAGES if (found := as_object(row.get(key)))), {})
        num_prompt, num_answer, num_thoughts = _counts(line, usage)
        is_failed = str(row.get("level")).upper() == "ERROR"
        message = row.get("statusMessage") or row.get("status_message")
        yield Call(
            line,
            self._calls.arrival_s(line, row.get("startTime", row.get("start_time", ""))),
            prompt_parts(line, body, self._texts),
            parts_of_answer(reply, self._texts) if isinstance(reply, dict) else answer_parts(reply, self._texts),
            num_prompt,
            num_answer,
            num_thoughts,
            session=first_named(SESSIONS, row),
            failure=str(message or "ERROR")[:LONGEST] if is_failed else None,
            is_answered=reply is not None or bool(num_answer),
        )


def _counts(line: Line, usage: JsonObject) -> tuple[int | None, int | None, int]:
    """Read input, output and thoughts of a usage; None where it does not count tokens."""
    counts = {}
    for kind, value in usage.items():
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if type(number) is int and number >= 0:
            counts[kind] = number
        elif isinstance(number, int | float) and not isinstance(number, bool):
            raise line.fault(f"usage of {kind:.40} is {value!r:.40}, no number of tokens", FIX_THE_ROW)
    if not counts:
        return None, None, 0
    outputs = {kind: number for kind, number in counts.items() if OUTPUT in kind.lower()}
    num_output = sum(outputs.values())
    total = counts.pop(TOTAL, None)
    num_input = (sum(counts.values()) if total is None else total) - num_output
    return max(0, num_input) or None, num_output, sum(outputs[kind] for kind in outputs if REASONING in kind)
