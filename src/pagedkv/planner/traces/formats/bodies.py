"""Reads bodies of requests, answers and usages, in the shapes of OpenAI's and Anthropic's interfaces.

A body has ``messages`` or ``prompt``, or, in the Responses API, ``input``; an answer has ``choices``, ``content`` or
``output``; a usage counts tokens under the names of either interface. The layout of each log determines which of a
row's objects is the body, the answer or the usage.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pagedkv.planner.traces.formats.calls import NO_ANSWER
from pagedkv.planner.traces.formats.messages import Part, answer_parts
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, MAX_SESSION_CHARACTERS, check_range
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.texts import TextTokens

__all__ = [
    "ANSWER_COUNTS",
    "OUTSIDE_INPUT",
    "PROMPT_COUNTS",
    "STATUSES",
    "JsonObject",
    "Usage",
    "as_list",
    "as_object",
    "failure_of",
    "first_named",
    "found_under",
    "has_answer",
    "name_under",
    "num_samples_of",
    "parts_of_answer",
    "usage_of",
]

JsonObject = Mapping[str, Any]

PROMPT_COUNTS: Final = ("prompt_tokens", "input_tokens", "promptTokens", "inputTokens")
OUTSIDE_INPUT: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Anthropic counts these apart from input_tokens; OpenAI's cached tokens are part of prompt_tokens."""
ANSWER_COUNTS: Final = ("completion_tokens", "output_tokens", "completionTokens", "outputTokens")
THOUGHTS: Final = ("completion_tokens_details", "output_tokens_details")
STATUSES: Final = ("status_code", "statusCode", "http_status", "response_status", "status")
FAILED_WORDS: Final = frozenset(
    {"failure", "failed", "error", "cancelled", "canceled", "timeout", "rate_limited", "aborted", "expired"}
)
FIRST_FAILED_CODE: Final = 400
LAST_FAILED_CODE: Final = 599
MOST_SAMPLES: Final = 2**16
LONGEST_NAME: Final = 40


class Usage(msgspec.Struct, frozen=True):
    """Stated lengths: of the prompt, of the answer, and of the part of the answer that is not in its texts."""

    num_prompt: int | None = None
    num_answer: int | None = None
    num_thoughts: int = 0


def usage_of(line: Line, usage: JsonObject) -> Usage:
    """Read a usage; an empty one states nothing. Raises TraceError."""
    num_prompt, num_answer = _count(line, usage, PROMPT_COUNTS), _count(line, usage, ANSWER_COUNTS)
    if num_prompt is not None:
        num_prompt += sum(_count(line, usage, (key,)) or 0 for key in OUTSIDE_INPUT)
    details: JsonObject = next((usage[key] for key in THOUGHTS if isinstance(usage.get(key), dict)), {})
    return Usage(num_prompt, num_answer, _count(line, details, ("reasoning_tokens",)) or 0)


def parts_of_answer(answer: JsonObject, texts: TextTokens) -> Sequence[Part] | None:
    """Return the parts of an answer: OpenAI's first choice, Anthropic's content, the output of the Responses API."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return answer_parts(choices[0].get("message") or choices[0].get("text"), texts)
    output = answer.get("output")
    if isinstance(output, list):
        items = [item for item in output if isinstance(item, dict) and item.get("type") != "reasoning"]
        taken = [answer_parts(item if "role" in item else [item], texts) or [] for item in items]
        return [part for parts in taken for part in parts]
    if "role" in answer:
        return answer_parts(answer, texts)
    return answer_parts(answer.get("content") or answer.get("text"), texts)


def has_answer(answer: JsonObject) -> bool:
    """Return whether an object is an answer, with or without a text."""
    return bool(answer.keys() & {"choices", "content", "text", "output", "usage", "role"})


def failure_of(*objects: JsonObject) -> str | None:
    """Describe how a request failed, by the first object that states it as an HTTP status, a word or an error."""
    for each in objects:
        for key in STATUSES:
            value = each.get(key)
            code = int(value) if isinstance(value, str) and value.isdecimal() else value
            if type(code) is int and (FIRST_FAILED_CODE <= code <= LAST_FAILED_CODE or code < 0):
                return str(code) if code > 0 else NO_ANSWER
            if isinstance(value, str) and value.lower() in FAILED_WORDS:
                return _code(each.get("error")) or _code(each.get("error_information")) or value.lower()
        if each.get("error"):
            return _code(each["error"]) or "error"
    return None


def num_samples_of(line: Line, body: JsonObject) -> int:
    """Read the number of requested answers. Raises TraceError."""
    num_samples = body.get("n") or 1
    if type(num_samples) is not int:
        raise line.fault(f"n is {num_samples!r:.40}, no whole number", FIX_THE_ROW)
    check_range(line, "n", num_samples, 1, MOST_SAMPLES)
    return num_samples


def first_named(keys: Sequence[str], *objects: JsonObject) -> str | None:
    """Return the first text or number under one of these keys, as a name; None if there is none."""
    for each in objects:
        for key in keys:
            value = each.get(key)
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)[:MAX_SESSION_CHARACTERS]
    return None


def as_object(value: object) -> JsonObject:
    """Return an object, parsed if it is written as a text; an empty object for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> object:
    """Return a value; a list that is written as a text is parsed."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def found_under(row: object, path: str) -> object:
    """Follow a path into objects and lists; None where the path does not exist."""
    if isinstance(row, dict) and path in row:
        return row[path]
    for name in path.split("."):
        row = as_list(row)
        if isinstance(row, list) and name.isdecimal() and int(name) < len(row):
            row = row[int(name)]
        elif isinstance(row, dict):
            row = row.get(name)
        else:
            return None
    return row


def name_under(row: object, path: str) -> str | None:
    """Return the text or number under a path as a name; None if there is none."""
    value = found_under(row, path)
    is_name = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value)[:MAX_SESSION_CHARACTERS] if is_name else None


def _code(error: object) -> str | None:
    """Return the code of an error."""
    if isinstance(error, dict):
        names = (error.get(key) for key in ("status_code", "error_code", "code", "type", "error_class"))
        error = next((name for name in names if isinstance(name, str | int) and name), None)
    return str(error)[:LONGEST_NAME] if isinstance(error, str | int) and not isinstance(error, bool) else None


def _count(line: Line, usage: JsonObject, names: Sequence[str]) -> int | None:
    for name in names:
        value = usage.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise line.fault(f"usage.{name} is {value!r:.40}, no number of tokens", FIX_THE_ROW)
            return value
    return None
