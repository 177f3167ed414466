"""JSON lines of any shape, read by fields that the user names, or by the known columns of a table.

A field may lie within objects and lists: ``request.messages``, ``choices.0.text``. A prompt is a text, a list of
messages or of tokens, or an object that has one; an answer likewise. Numbers may be written as texts, also with commas
between thousands.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.planner.traces.formats.bodies import as_list, failure_of, found_under, parts_of_answer
from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.messages import Part, answer_parts, prompt_parts
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, MAX_SESSION_CHARACTERS, without_thousands
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["FieldLayout"]

SHOWN: Final = 12


class FieldLayout:
    """Rows with the named fields.

    Args:
        origin: the recognised format.
        fields: the name of the field for each role of :data:`~pagedkv.planner.traces.formats.csv_rows.CSV_ROLES`.
        reading: how texts become tokens.
        calls: reads the times.
    """

    def __init__(self, origin: str, fields: Mapping[str, str], reading: Reading, calls: Calls) -> None:
        self._origin = origin
        self._fields = fields
        self._reading = reading
        self._calls = calls

    @property
    def title(self) -> str:
        """Name of the log."""
        return self._origin

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's one call."""
        found = {role: found_under(row, name) for role, name in self._fields.items()}
        prompt, answer = self._prompt(line, found.get("prompt")), self._answer(found.get("answer"))
        session = found.get("session") or found.get("user")
        num_prompt, num_answer = self._count(line, found, "input"), self._count(line, found, "output")
        if prompt is None and num_prompt is None:
            raise self._fault(line, row, "input" if "input" in self._fields else "prompt")
        yield Call(
            line,
            self._arrival_s(line, row, found.get("arrival")),
            prompt,
            answer,
            num_prompt,
            num_answer,
            session=str(session)[:MAX_SESSION_CHARACTERS] if isinstance(session, str | int) else None,
            failure=failure_of({"status": found["status"]}) if "status" in found else None,
            is_answered=bool(answer) or num_answer is not None,
        )

    def _arrival_s(self, line: Line, row: Mapping[str, Any], value: object) -> float:
        if self._reading.has_generated_arrivals:
            return 0.0
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise self._fault(line, row, "arrival")
        return self._calls.arrival_s(line, value)

    def _prompt(self, line: Line, value: object) -> Sequence[Part] | None:
        value = as_list(value)
        if isinstance(value, dict):
            return prompt_parts(line, value, self._reading.texts)
        is_turns = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        return prompt_parts(line, {"messages" if is_turns else "prompt": value}, self._reading.texts)

    def _answer(self, value: object) -> Sequence[Part] | None:
        value = as_list(value)
        if isinstance(value, dict):
            return parts_of_answer(value, self._reading.texts)
        return answer_parts(value, self._reading.texts)

    def _count(self, line: Line, found: Mapping[str, Any], role: str) -> int | None:
        value = found.get(role)
        if isinstance(value, str):
            value = without_thousands(value.strip())
            value = int(value) if value.isdecimal() and value.isascii() else value or None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and value >= 0):
            return value
        raise line.fault(f"{self._fields[role]} is {value!r:.40}, no number of tokens", FIX_THE_ROW)

    def _fault(self, line: Line, row: Mapping[str, Any], role: str) -> Exception:
        names = ", ".join(f"{name:.40}" for name in sorted(row)[:SHOWN])
        return line.fault(f"has nothing for {role} under {self._fields[role]!r:.60}", f"It has {names}")
