"""Requests that Helicone exports: counts of tokens, and bodies of request and answer if they were exported."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagedkv.planner.traces.formats.bodies import (
    Usage,
    as_object,
    failure_of,
    first_named,
    num_samples_of,
    parts_of_answer,
    usage_of,
)
from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.messages import prompt_parts
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["HeliconeLayout", "is_helicone"]

CREATED: Final = "request_created_at"
SESSIONS: Final = ("Helicone-Session-Id",)
USERS: Final = ("request_user_id", "helicone_user")


def is_helicone(keys: Mapping[str, object]) -> bool:
    """Return whether Helicone wrote a file, by the keys of its first line."""
    return CREATED in keys


class HeliconeLayout:
    """One request in each row.

    Args:
        reading: how texts become tokens.
        calls: reads the times.
    """

    def __init__(self, reading: Reading, calls: Calls) -> None:
        self._texts = reading.texts
        self._calls = calls

    @property
    def title(self) -> str:
        """Name of the log."""
        return "Helicone's requests"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's one call."""
        body, answer = as_object(row.get("request_body")), as_object(row.get("response_body"))
        stated = usage_of(line, as_object(answer.get("usage")))
        if stated.num_prompt is None:
            outer = usage_of(line, row)
            stated = Usage(outer.num_prompt or None, outer.num_answer, stated.num_thoughts)
        properties = as_object(row.get("request_properties"))
        yield Call(
            line,
            self._calls.arrival_s(line, row[CREATED]),
            prompt_parts(line, body, self._texts),
            parts_of_answer(answer, self._texts) if answer else None,
            stated.num_prompt,
            stated.num_answer,
            stated.num_thoughts,
            session=first_named(SESSIONS, properties) or first_named(USERS, row),
            num_samples=num_samples_of(line, body),
            failure=failure_of({"status": row.get("response_status")}, {"error": answer.get("error")}),
            is_answered=bool(answer) or stated.num_answer is not None,
        )
