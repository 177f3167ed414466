"""LiteLLM's records of calls: the payload that its callbacks log, and the rows of its spend table.

Both have ``startTime``, ``endTime``, ``call_type``, counts of tokens, ``status``, ``messages`` and ``response``. The
table has texts only if this is configured, some of them in ``proxy_server_request``. Answers from LiteLLM's own cache
did not use a model: they are left out like failed calls. Calls that generate no text are skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.planner.traces.formats.bodies import (
    JsonObject,
    as_list,
    as_object,
    failure_of,
    first_named,
    num_samples_of,
    parts_of_answer,
    usage_of,
)
from pagedkv.planner.traces.formats.calls import OTHER_CACHE, Call, Calls
from pagedkv.planner.traces.formats.messages import Part, prompt_parts
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["LiteLlmLayout", "is_litellm"]

KEYS: Final = frozenset({"startTime", "endTime", "call_type"})
SESSIONS: Final = ("session_id", "end_user", "user")
OTHER_CALLS: Final = ("embedding", "image", "transcription", "speech", "moderation", "rerank", "ocr", "vector")
REDACTED: Final = "redacted-by-litellm"


def is_litellm(keys: Mapping[str, object]) -> bool:
    """Return whether LiteLLM wrote a file, by the keys of its first line."""
    return keys.keys() >= KEYS


class LiteLlmLayout:
    """One call in each row.

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
        others = f" (calls that generate no text, skipped: {self._num_others:,})" if self._num_others else ""
        return f"LiteLLM's log of calls{others}"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's call, if it generates text."""
        if any(name in str(row["call_type"]) for name in OTHER_CALLS):
            self._num_others += 1
            return
        stated = usage_of(line, row)
        answer = as_object(row.get("response"))
        if answer.get("text") == REDACTED:
            answer = {}
        detailed = usage_of(line, as_object(answer.get("usage")))
        metadata = as_object(row.get("metadata"))
        parameters = as_object(row.get("model_parameters"))
        failure = failure_of(row) if row.get("status") != "failure" else _failure(row, metadata)
        if failure is None and str(row.get("cache_hit")).lower() == "true":
            failure = OTHER_CACHE
        yield Call(
            line,
            self._calls.arrival_s(line, row["startTime"]),
            self._prompt(line, row),
            parts_of_answer(answer, self._texts) if answer else None,
            stated.num_prompt or None,
            stated.num_answer,
            detailed.num_thoughts,
            session=first_named(SESSIONS, row),
            num_samples=num_samples_of(line, parameters),
            failure=failure,
        )

    def _prompt(self, line: Line, row: JsonObject) -> Sequence[Part] | None:
        body = as_object(row.get("proxy_server_request"))
        messages = as_list(row.get("messages"))
        if isinstance(messages, str) and messages not in {REDACTED, "", "{}"}:
            return prompt_parts(line, {"prompt": messages}, self._texts)
        if isinstance(messages, dict) and messages:
            return prompt_parts(line, messages, self._texts)
        if isinstance(messages, list) and messages:
            tools = as_object(row.get("model_parameters")).get("tools") or body.get("tools")
            is_ids = type(messages[0]) is int
            return prompt_parts(line, {"prompt" if is_ids else "messages": messages, "tools": tools}, self._texts)
        return prompt_parts(line, body, self._texts) if body else None


def _failure(row: JsonObject, metadata: JsonObject) -> str:
    for each in (row, metadata):
        code = failure_of({"error": as_object(each.get("error_information"))})
        if code is not None:
            return code
    return "failure"
