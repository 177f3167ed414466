"""Spans of calls: OpenTelemetry's conventions for generative AI, OpenInference's, and LangChain's runs.

Spans are OTLP in JSON, or one flat span in each line. A line of a collector's file has the spans of many requests;
those that call a model are read. A flat span has its attributes in an object, in OTLP's list, or each as a column of
its own, as tables of spans do. Lengths are ``gen_ai.usage.*``, as in vLLM's own spans, or OpenInference's
``llm.token_count.*``. Content exists if its recording was configured: ``gen_ai.input.messages`` and
``gen_ai.output.messages``, OpenLLMetry's numbered attributes, or OpenInference's ``llm.input_messages``, flattened to
an attribute for each leaf (``llm.input_messages.0.message.content``), nested, or a list.

LangSmith exports runs of LangChain, nested as chains call models: those of ``run_type`` "llm" are calls. Their inputs
are messages as LangChain writes them, their outputs generations; counts of tokens are at the top, or with the answer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.planner.traces.formats.calls import (
    LONGEST_NAME,
    Call,
    LogRows,
    Usage,
    failure_of,
    first_named,
    found_under,
    name_under,
    parts_of_answer,
    usage_of,
)
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, MAX_SESSION_CHARACTERS
from pagedkv.planner.traces.formats.parts import JsonObject, Part, answer_parts, as_list, as_object, prompt_parts
from pagedkv.planner.traces.lines import Line

OTLP: Final = "resourceSpans"
STARTS: Final = ("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")
TABLE_STARTS: Final = ("Timestamp", "timestamp", "time")
ATTRIBUTES: Final = ("attributes", "SpanAttributes")
COLUMN: Final = re.compile(
    r"(?:(?:attributes|SpanAttributes)\.)?(?P<name>(?:gen_ai|llm|openinference|session|user|error)\..+)"
)
"""An attribute as a column of a table of spans."""
GENERATES: Final = frozenset({"chat", "text_completion", "generate_content", "completion"})
INPUT_COUNTS: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
OUTPUT_COUNTS: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
SAMPLES: Final = ("gen_ai.request.choice.count", "gen_ai.request.n")
SPAN_SESSIONS: Final = ("gen_ai.conversation.id", "session.id", "user.id")
CODES: Final = ("code", "status_code")
SPAN_CODES: Final = ("StatusCode", "status.code", "status_code")
ERROR_CODE: Final = 2
"""STATUS_CODE_ERROR of a span's status."""
OPEN_INFERENCE: Final = "openinference.span.kind"
NUMBERED: Final = re.compile(r"gen_ai\.(?P<side>prompt|completion)\.(?P<place>\d+)\.(?P<what>role|content)")


class SpanRows(LogRows):
    """One span in each row, or many."""

    TITLE = "OpenTelemetry's spans of generative AI"
    OTHERS = "other spans skipped"

    @classmethod
    def matches(cls, keys: Mapping[str, object]) -> bool:
        """Return whether a file has spans, by the keys of its first line."""
        if OTLP in keys or ("attributes" in keys and any(name in keys for name in STARTS)):
            return True
        has_columns = any(("gen_ai." in name or "llm." in name) and COLUMN.fullmatch(name) for name in keys)
        return (has_columns or "SpanAttributes" in keys) and any(name in keys for name in (*STARTS, *TABLE_STARTS))

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the calls of the row's spans that call a model."""
        for resource, span in _spans(row) if OTLP in row else [({}, row)]:
            attributes = _all_attributes(span)
            for event in span.get("events") or ():  # an event may have the contents
                attributes = {**_attributes(as_object(event).get("attributes")), **attributes}
            if _is_call(attributes):
                call = self._call(line, span, attributes)
                if self._reading.tenant_by is not None:
                    call.tenant = name_under({**resource, **attributes}, self._reading.tenant_by)
                yield call
            else:
                self._num_others += 1

    def _call(self, line: Line, span: JsonObject, attributes: JsonObject) -> Call:
        num_samples = _count(line, attributes, SAMPLES) or 1
        num_answer = _count(line, attributes, OUTPUT_COUNTS)
        answer = self._answer(attributes)
        status = as_object(span.get("status"))
        code = next(
            (found for found in (*map(status.get, CODES), *map(span.get, SPAN_CODES)) if found is not None), None
        )
        failure = attributes.get("error.type")
        if failure is None and code in {ERROR_CODE, "STATUS_CODE_ERROR", "ERROR", "Error"}:
            failure = status.get("message") or "error"
        session = next((name for key in SPAN_SESSIONS if isinstance(name := _gathered(attributes, key), str)), None)
        return Call(
            line,
            self._calls.arrival_s(line, next((span[name] for name in (*STARTS, *TABLE_STARTS) if name in span), "")),
            self._prompt(line, attributes),
            answer,
            _count(line, attributes, INPUT_COUNTS),
            num_answer,
            session=session[:MAX_SESSION_CHARACTERS] if session else None,
            num_samples=num_samples,
            failure=None if failure is None else str(failure)[:LONGEST_NAME],
            is_answered=answer is not None or num_answer is not None,
        )

    def _prompt(self, line: Line, attributes: JsonObject) -> Sequence[Part] | None:
        messages = as_list(attributes.get("gen_ai.input.messages", attributes.get("gen_ai.prompt")))
        messages = _numbered(attributes, "prompt") if messages is None else messages
        messages = _gathered(attributes, "llm.input_messages") if messages is None else messages
        body = {
            "prompt" if isinstance(messages, str) else "messages": messages,
            "system": as_list(attributes.get("gen_ai.system_instructions")),
            "tools": as_list(attributes.get("gen_ai.tool.definitions")) or _gathered(attributes, "llm.tools"),
        }
        return prompt_parts(line, body, self._texts)

    def _answer(self, attributes: JsonObject) -> Sequence[Part] | None:
        reply = as_list(attributes.get("gen_ai.output.messages", attributes.get("gen_ai.completion")))
        reply = _numbered(attributes, "completion") if reply is None else reply
        reply = _gathered(attributes, "llm.output_messages") if reply is None else reply
        return answer_parts(reply[0] if isinstance(reply, list) and reply else reply or None, self._texts)


def _spans(row: JsonObject) -> Iterator[tuple[JsonObject, JsonObject]]:
    """Yield the spans of a row, each with the attributes of its resource."""
    for resource in map(as_object, row[OTLP] or ()):
        of_resource = _attributes(as_object(resource.get("resource")).get("attributes"))
        for scope in resource.get("scopeSpans") or ():
            for span in as_object(scope).get("spans") or ():
                yield of_resource, as_object(span)


def _is_call(attributes: JsonObject) -> bool:
    kind = _gathered(attributes, OPEN_INFERENCE)
    if kind is not None:
        return kind == "LLM"
    operation = attributes.get("gen_ai.operation.name")
    return operation in GENERATES if operation is not None else any(key in attributes for key in OUTPUT_COUNTS)


def _attributes(written: object) -> dict[str, Any]:
    """Read attributes: OTLP's list of keys and values, or an object."""
    if isinstance(written, dict):
        return written
    pairs = (as_object(each) for each in (written if isinstance(written, list) else ()))
    return {str(pair.get("key")): _value(as_object(pair.get("value"))) for pair in pairs}


def _all_attributes(span: JsonObject) -> dict[str, Any]:
    """Read the attributes of a span: in an object or a list, and as columns of their own."""
    gathered: dict[str, Any] = {}
    for name in ATTRIBUTES:
        gathered |= _attributes(span.get(name))
    for name, value in span.items():
        found = COLUMN.fullmatch(name)
        if found is not None and value is not None:
            gathered[found["name"]] = value
    return gathered


def _value(value: JsonObject) -> object:
    """Read an OTLP value: its key is its type."""
    if "arrayValue" in value:
        return [_value(as_object(each)) for each in as_object(value["arrayValue"]).get("values") or ()]
    if "kvlistValue" in value:
        return _attributes(as_object(value["kvlistValue"]).get("values"))
    if "intValue" in value:
        number = value["intValue"]  # a text in JSON
        return int(number) if isinstance(number, str) and number.isdecimal() else number
    return next(iter(value.values()), None)


def _numbered(attributes: JsonObject, side: str) -> list[dict[str, Any]] | None:
    """Gather messages whose parts are separate attributes."""
    messages: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        found = NUMBERED.fullmatch(key)
        if found is not None and found["side"] == side:
            messages.setdefault(int(found["place"]), {})[found["what"]] = value
    return [messages[place] for place in sorted(messages)] or None


def _count(line: Line, attributes: JsonObject, names: Sequence[str]) -> int | None:
    for name in names:
        value = _gathered(attributes, name)
        if value is not None:
            value = int(value) if isinstance(value, str) and value.isdecimal() else value  # tables may hold texts
            if type(value) is not int or value < 0:
                raise line.fault(f"{name} is {value!r:.40}, no number of tokens", FIX_THE_ROW)
            return value
    return None


def _gathered(attributes: JsonObject, name: str) -> object:
    """Return the value under a name: as it is, within the objects that its dots lead into, or gathered of leaves."""
    whole = attributes.get(name)
    if whole is not None:
        return as_list(whole)
    leaves = {key[len(name) + 1 :]: value for key, value in attributes.items() if key.startswith(f"{name}.")}
    if not leaves:
        return found_under(attributes, name)
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *steps, last = path.split(".")
        inside = tree
        for step in steps:
            found = inside.setdefault(step, {})
            inside = found if isinstance(found, dict) else {}
        inside[last] = value
    return _with_lists(tree)


def _with_lists(tree: object) -> object:
    """Turn objects whose keys are all numbers into lists."""
    if not isinstance(tree, dict):
        return tree
    inside = {key: _with_lists(value) for key, value in tree.items()}
    if inside and all(key.isdecimal() for key in inside):
        return [inside[key] for key in sorted(inside, key=int)]
    return inside


class LangSmithRows(LogRows):
    """One run of LangChain in each row."""

    KEYS = (frozenset({"run_type", "inputs", "start_time"}),)
    TITLE = "LangSmith's runs"
    OTHERS = "other runs skipped"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's call, if it is one of a model, and those of the runs within it."""
        for run in (row, *(as_object(each) for each in row.get("child_runs") or ())):
            if run is not row:
                yield from self.calls(line, dict(run))
            elif run.get("run_type") == "llm":
                yield self._call(line, run)
            else:
                self._num_others += 1

    def _call(self, line: Line, run: JsonObject) -> Call:
        asked, said = as_object(run.get("inputs")), as_object(run.get("outputs"))
        generation = _first(said.get("generations"))
        answer = as_object(generation.get("message")) if generation else said
        usage = self._usage(line, run, said, answer)
        prompts = asked.get("prompts")
        body = {"prompt": prompts[0]} if isinstance(prompts, list) and len(prompts) == 1 else asked
        reply = answer_parts(answer, self._texts) if generation and answer else parts_of_answer(said, self._texts)
        if not answer and generation:
            reply = answer_parts(generation.get("text"), self._texts)
        metadata = as_object(as_object(run.get("extra")).get("metadata"))
        return Call(
            line,
            self._calls.arrival_s(line, run.get("start_time")),
            prompt_parts(line, body, self._texts),
            reply if said else None,
            usage.num_prompt,
            usage.num_answer,
            usage.num_thoughts,
            session=first_named(("session_id", "thread_id", "conversation_id"), metadata)
            or first_named(("trace_id",), run),
            failure=failure_of({"error": run.get("error"), "status": run.get("status")}),
            is_answered=bool(said) or usage.num_answer is not None,
        )

    @staticmethod
    def _usage(line: Line, run: JsonObject, said: JsonObject, answer: JsonObject) -> Usage:
        """Return the first usage: of the run, of the message, or of the model's own output."""
        inner = as_object(answer.get("kwargs")) or answer
        places = (run, *(as_object(each.get("usage_metadata")) for each in (said, inner)))
        usages = [usage_of(line, each) for each in places]
        usages.append(usage_of(line, as_object(as_object(said.get("llm_output")).get("token_usage"))))
        return next((usage for usage in usages if usage.num_prompt), Usage())


def _first(value: object) -> JsonObject:
    """Return the first object of a list, or of a list of lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return as_object(value)
