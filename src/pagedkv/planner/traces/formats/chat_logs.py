"""Request logs of services in the style of OpenAI and Anthropic: JSON lines with bodies, usage and times.

The layout may vary. Each item is looked for in its common places: the body with ``messages``, ``prompt`` or ``input``
at the top, or in ``request``, ``body``, ``input``, ``params`` or ``kwargs``; the answer with ``usage`` at the top, or
in ``response``, ``output``, ``result`` (or a ``body`` in these); a time at the top or in these; a failure as a status
or an error. OpenAI's batch files are read too; their input has no times. A row without a body and with counts of tokens
at the top, as in a table of usage, is a usage itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.planner.traces.formats.bodies import (
    PROMPT_COUNTS,
    JsonObject,
    as_object,
    failure_of,
    first_named,
    has_answer,
    num_samples_of,
    parts_of_answer,
    usage_of,
)
from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.messages import Part, answer_parts, prompt_parts
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["SESSIONS", "TIMES", "ChatLayout", "is_chat_log"]

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
PROMPT_COUNTS_SET: Final = frozenset(PROMPT_COUNTS)
BODY: Final = frozenset({"messages", "prompt", "input"})
MOST: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SHOWN: Final = 8
MOST_REMEMBERED: Final = 2**12
"""Number of remembered responses that a later one may continue."""


def is_chat_log(keys: Mapping[str, object]) -> bool:
    """Return whether a file may be such a log, by the keys of its first line."""
    if keys.keys() & PROMPT_COUNTS_SET and keys.keys() & set(TIMES):
        return True
    has_body = bool(keys.keys() & {"messages", "prompt", "usage", *REQUESTS})
    return "custom_id" in keys or (has_body and bool(keys.keys() & {*TIMES, "messages", *REQUESTS, *ANSWERS}))


class ChatLayout:
    """One request in each row, laid out as described above.

    Args:
        reading: how texts become tokens.
        calls: reads the times.
    """

    def __init__(self, reading: Reading, calls: Calls) -> None:
        self._reading = reading
        self._calls = calls
        self._style = "an OpenAI style request log"
        self._responses: dict[str, Sequence[Part]] = {}

    @property
    def title(self) -> str:
        """Name of the log."""
        return self._style

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's one call."""
        body, answer = _inner(row, REQUESTS, BODY), _inner(row, ANSWERS)
        usages = (each["usage"] for each in (answer, row) if isinstance(each.get("usage"), dict))
        usage: JsonObject = next(usages, row if PROMPT_COUNTS_SET & row.keys() else {})
        self._learn_style(row, body, answer, usage)
        stated = usage_of(line, usage)
        text = self._reading.texts
        prompt: Sequence[Part] | None = prompt_parts(line, body, text) if body is not row or BODY & row.keys() else None
        reply = _answer(row, answer, text)
        continued_id = (body.get("previous_response_id") or body.get("conversation")) if "input" in body else None
        if continued_id is not None:
            prompt = self._continued(continued_id, prompt)
        self._remember(answer, prompt, reply)
        outer = row.get("response")
        metadata = as_object(body.get("metadata") or row.get("metadata"))
        failure = failure_of(row, *([outer] if isinstance(outer, dict) else []), answer)
        yield Call(
            line,
            self._arrival_s(line, row, body, answer, is_needed=failure is None or self._reading.keep_failed),
            prompt,
            reply,
            stated.num_prompt,
            stated.num_answer,
            stated.num_thoughts,
            next((body[key] for key in MOST if type(body.get(key)) is int), None),
            session=first_named(SESSIONS, row, body, metadata),
            num_samples=num_samples_of(line, body),
            failure=failure,
            is_answered=reply is not None or stated.num_answer is not None,
            is_cut=continued_id is not None and prompt is None,
        )

    def _learn_style(self, row: JsonObject, body: JsonObject, answer: JsonObject, usage: JsonObject) -> None:
        if "custom_id" in row:
            self._style = "an OpenAI batch file"
        elif usage is row and body is row:
            self._style = "a table of usage"
        elif answer.get("object") == "response" or "input_tokens_details" in usage:
            self._style = "a log of OpenAI's Responses API"
        elif usage.keys() & {"cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens"}:
            self._style = "an Anthropic style request log"
        elif "instructions" in body:
            self._style = "a log of OpenAI's Responses API"

    def _arrival_s(self, line: Line, *objects: JsonObject, is_needed: bool) -> float:
        if self._reading.has_generated_arrivals:
            return 0.0
        for each in objects:  # an answer's own time is tried last: it is the time when the answer began
            for key in TIMES:
                value = each.get(key)
                if isinstance(value, int | float | str) and not isinstance(value, bool):
                    return self._calls.arrival_s(line, value)
        if not is_needed:
            return 0.0
        names = ", ".join(sorted(objects[0])[:SHOWN])
        raise line.fault(
            f"has no time among {names}",
            f"Name it one of {', '.join(TIMES)}, or generate random arrivals (`arrivals=poisson:RATE`)",
        )

    # Responses that continue others

    def _continued(self, continued_id: object, prompt: Sequence[Part] | None) -> Sequence[Part] | None:
        """Prepend the conversation of the continued response to the new prompt; None if it is not known."""
        before = self._responses.get(str(continued_id))
        return None if before is None or prompt is None else [*before, *prompt]

    def _remember(self, answer: JsonObject, prompt: Sequence[Part] | None, reply: Sequence[Part] | None) -> None:
        name = answer.get("id")
        if answer.get("object") == "response" and isinstance(name, str) and prompt is not None:
            self._responses[name] = [*prompt, *(reply or ())]
            if len(self._responses) > MOST_REMEMBERED:
                del self._responses[next(iter(self._responses))]


def _inner(row: JsonObject, names: Sequence[str], wanted: frozenset[str] = frozenset()) -> JsonObject:
    """Find the object that has the body or the answer: within other objects, or the row itself."""
    if wanted and wanted & row.keys() and not any(isinstance(row.get(key), dict) for key in ("request", "body")):
        return row if not isinstance(row.get("input"), dict) else row["input"]
    for name in names:
        value = as_object(row.get(name))
        if value:
            inside = value.get("body")
            return inside if isinstance(inside, dict) else value
    return row


def _answer(row: JsonObject, answer: JsonObject, texts: Any) -> Sequence[Part] | None:  # noqa: ANN401 - see below
    """Find the answer: in its object, or as a text of the row."""
    if answer is not row or has_answer({key: answer[key] for key in ("choices",) if key in answer}):
        return parts_of_answer(answer, texts)
    reply = next((row[name] for name in ANSWERS if isinstance(row.get(name), str | list)), None)
    return answer_parts(reply, texts)
