"""Logs of services, gateways and tracers, as JSON objects: their layouts.

Request logs of services in the style of OpenAI and Anthropic have bodies, usage and times, and their layout may vary.
Each item is looked for in its common places: the body with ``messages``, ``prompt`` or ``input`` at the top, or in
``request``, ``body``, ``input``, ``params`` or ``kwargs``; the answer with ``usage`` at the top, or in ``response``,
``output``, ``result`` (or a ``body`` in these); a time at the top or in these; a failure as a status or an error.
OpenAI's batch files are read too; their input has no times. A row without a body and with counts of tokens at the top,
as in a table of usage, is a usage itself.

Objects of any shape are read by fields that the user names, or by the known columns of a table. A field may lie within
objects and lists: ``request.messages``, ``choices.0.text``. A prompt is a text, a list of messages or of tokens, or an
object that has one; an answer likewise. Numbers may be written as texts, also with commas between thousands.

WildChat has a conversation in each row, with times of all turns or of the last one alone. Each answer is a request
whose prompt is everything before it in the conversation. It arrives at the time of the question; without that, at the
time when the answer began (``created``), or else when it was complete, which is later. If no turn has a time, the row's
time is that of the last turn, and earlier turns precede it at a stated interval. Rows are conversations and overlap, so
such a file must be sorted by arrival first.

A result of ``vllm bench serve --save-result --save-detailed`` is one object with all requests, as lists.

LiteLLM's records of calls are the payload that its callbacks log, and the rows of its spend table. Both have
``startTime``, ``endTime``, ``call_type``, counts of tokens, ``status``, ``messages`` and ``response``. The table has
texts only if this is configured, some of them in ``proxy_server_request``. Answers from LiteLLM's own cache did not use
a model: they are left out like failed calls. Calls that generate no text are skipped.

Langfuse exports observations, in camel case from its pages and its API, in snake case to a bucket. Generations are
calls; spans, events and other observations are skipped. Their usage is counted by kind, with every token in one kind:
``total`` is the sum of all, and all kinds except output are input.

Helicone exports requests with counts of tokens, and with bodies of request and answer if these are exported too.

Bedrock's logs of invocations have the body in ``input.inputBodyJson``, the answer in ``output.outputBodyJson`` (of a
stream: its events), and counts of tokens beside them, those of a cache apart. Bodies over 100 kB are in files of their
own: then the row has lengths alone.

Vertex AI's tables of requests and its batch predictions are request logs whose bodies are Gemini's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.planner.traces.formats.calls import (
    OTHER_CACHE,
    PROMPT_COUNTS,
    Call,
    LogRows,
    Usage,
    count_of,
    failure_of,
    first_named,
    found_under,
    has_answer,
    num_samples_of,
    parts_of_answer,
    usage_of,
)
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, MAX_SESSION_CHARACTERS, Reading, without_thousands
from pagedkv.planner.traces.formats.parts import (
    ANSWERER,
    SHOWN,
    JsonObject,
    Part,
    answer_parts,
    as_list,
    as_object,
    prompt_parts,
    unknown_part,
)
from pagedkv.planner.traces.lines import Line

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
    "logging_time",
    "processed_time",
)
REQUESTS: Final = ("request", "body", "input", "params", "kwargs", "full_request", "request_payload")
ANSWERS: Final = ("response", "output", "result", "completion", "full_response", "response_payload")
USAGE_KEYS: Final = ("usage", "usageMetadata")
SESSIONS: Final = ("session_id", "conversation_id", "thread_id", "session", "prompt_cache_key", "user_id", "user")
PROMPT_COUNTS_SET: Final = frozenset(PROMPT_COUNTS)
BODY: Final = frozenset({"messages", "prompt", "input", "contents", "chat_history"})
OF_REQUESTS: Final = BODY | PROMPT_COUNTS_SET | {*REQUESTS, *ANSWERS, *USAGE_KEYS, "choices", "custom_id"}
"""Keys that only rows of requests have."""
MOST: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST_REMEMBERED: Final = 2**12
"""Number of remembered responses that a later one may continue."""


class ChatRows(LogRows):
    """One request in each row, laid out as described above."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._style = "an OpenAI style request log"
        self._responses: dict[str, Sequence[Part]] = {}

    @classmethod
    def matches(cls, keys: Mapping[str, object]) -> bool:
        """Return whether a file may be such a log, by the keys of its first row."""
        if keys.keys() & PROMPT_COUNTS_SET and keys.keys() & set(TIMES):
            return True
        has_body = bool(keys.keys() & {"messages", "prompt", "usage", *REQUESTS})
        return "custom_id" in keys or (has_body and bool(keys.keys() & {*TIMES, "messages", *REQUESTS, *ANSWERS}))

    @property
    def title(self) -> str:
        """Name of the log."""
        return self._titled(self._style)

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's one call, if it has a part of one."""
        if row.keys().isdisjoint(OF_REQUESTS):
            self._num_others += 1
            return
        body, answer = _inner(row, REQUESTS, BODY), _inner(row, ANSWERS)
        usages = (each[key] for each in (answer, row) for key in USAGE_KEYS if isinstance(each.get(key), dict))
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
        elif "contents" in body:
            self._style = "a log of Gemini's requests"
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


FIELDS_SHOWN: Final = 12


class FieldRows(LogRows):
    """Rows with the named fields.

    Args:
        origin: the recognised format.
        fields: the name of the field for each role of :data:`~pagedkv.planner.traces.formats.csv_rows.CSV_ROLES`.
        reading: how texts become tokens.
        unit: unit of the times.
    """

    def __init__(self, origin: str, fields: Mapping[str, str], reading: Reading, unit: str) -> None:
        super().__init__(reading, unit, "fields")
        self._origin = origin
        self._fields = fields

    @property
    def title(self) -> str:
        """Name of the log."""
        return self._titled(self._origin)

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's one call."""
        found = {role: found_under(row, name) for role, name in self._fields.items()}
        if all(value is None for value in found.values()):
            self._num_others += 1
            return
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
        parts = prompt_parts(line, value if isinstance(value, dict) else {"prompt": value}, self._reading.texts)
        if parts is None and value is not None:
            return [unknown_part(f"{self._fields['prompt']:.60} is no text, messages or tokens, but {value!r:.60}")]
        return parts

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
        names = ", ".join(f"{name:.40}" for name in sorted(row)[:FIELDS_SHOWN])
        return line.fault(f"has nothing for {role} under {self._fields[role]!r:.60}", f"It has {names}")


NAMES: Final = ("conversation_hash", "conversation_id")
TURN_S: Final = 30.0


class WildChatRows(LogRows):
    """A conversation in each row."""

    KEYS = (frozenset({"conversation", "timestamp"}),)

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._num_turns = self._num_assumed = 0

    @property
    def title(self) -> str:
        """Name of the log."""
        if not self._num_assumed:
            return "WildChat's conversations by the times of their turns"
        share = f"for {self._num_assumed:,} of {self._num_turns:,} turns {TURN_S:g} s between two are assumed"
        return f"WildChat's conversations by the time of the last turn ({share})"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the conversation's answers as calls."""
        turns = [turn for turn in row["conversation"] or () if isinstance(turn, dict)]
        places = [place for place, turn in enumerate(turns) if turn.get("role") == ANSWERER]
        for number, place in enumerate(places):
            messages = turns[: place + 1]
            stated = usage_of(line, as_object(turns[place].get("usage")))
            yield Call(
                line,
                self._arrival_s(line, row, turns[max(0, place - 1) : place + 1], len(places) - 1 - number),
                prompt_parts(line, {"messages": messages[:-1]}, self._texts),
                answer_parts(messages[-1], self._texts),
                stated.num_prompt or None,
                stated.num_answer or None,
                stated.num_thoughts,
                session=first_named(NAMES, row),
            )

    def _arrival_s(self, line: Line, row: JsonObject, turns: Sequence[JsonObject], num_behind: int) -> float:
        """Return the arrival of a question: its own time, its answer's, or one before the end of the conversation."""
        self._num_turns += 1
        question, reply = (turns[0] if len(turns) > 1 else {}), turns[-1]
        for value in (question.get("timestamp"), reply.get("created"), reply.get("timestamp")):
            if value is not None:
                return self._calls.arrival_s(line, value)
        if row["timestamp"] is None:
            raise line.fault("neither its turns nor the conversation have a time", FIX_THE_ROW)
        self._num_assumed += 1
        return self._calls.arrival_s(line, row["timestamp"]) - TURN_S * num_behind


FAILED: Final = "error"


class BenchRows(LogRows):
    """One run in each row. Its clock has no fixed origin, so the first request arrives at 0."""

    KEYS = (frozenset({"start_times", "input_lens", "output_lens"}),)
    TITLE = "a result of vllm bench serve"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the requests of a run, in order of arrival."""
        columns = [row[name] for name in ("start_times", "input_lens", "output_lens")]
        if len({len(column) if isinstance(column, list) else -1 for column in columns}) > 1 or not columns[0]:
            raise line.fault("its lists of requests differ in length, or are empty", FIX_THE_ROW)
        errors = row.get("errors")
        failures = errors if isinstance(errors, list) and len(errors) == len(columns[0]) else [""] * len(columns[0])
        rows = list(zip(*columns, failures, strict=True))
        for start_s, num_prompt, num_output, _ in rows:
            numbers = isinstance(start_s, int | float) and type(num_prompt) is int and type(num_output) is int
            if not numbers:
                raise line.fault("a request has no numbers for its start and lengths", FIX_THE_ROW)
        origin_s = min(start_s for start_s, *_ in rows)
        for start_s, num_prompt, num_output, error in sorted(rows, key=lambda one: one[0]):
            yield Call(
                line,
                self._calls.arrival_s(line, start_s - origin_s),
                num_prompt=num_prompt,
                num_answer=num_output,
                failure=FAILED if error else None,
            )


LITELLM_SESSIONS: Final = ("session_id", "end_user", "user")
OTHER_CALLS: Final = ("embed", "image", "transcription", "speech", "moderation", "rerank", "ocr", "vector")
REDACTED: Final = "redacted-by-litellm"


class LiteLlmRows(LogRows):
    """One call in each row."""

    KEYS = (frozenset({"startTime", "endTime", "call_type"}),)
    TITLE = "LiteLLM's log of calls"
    OTHERS = "calls that generate no text, skipped"

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
            session=first_named(LITELLM_SESSIONS, row),
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


GENERATION: Final = "GENERATION"
LANGFUSE_SESSIONS: Final = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")
USAGES: Final = ("usageDetails", "usage_details", "usage")
TOTAL: Final = "total"
OUTPUT: Final = "output"
REASONING: Final = "reasoning"
LONGEST: Final = 40


class LangfuseRows(LogRows):
    """One observation in each row."""

    KEYS = (frozenset({"traceId", "type", "startTime"}), frozenset({"trace_id", "type", "start_time"}))
    TITLE = "Langfuse's generations"
    OTHERS = "other observations skipped"

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
            session=first_named(LANGFUSE_SESSIONS, row),
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


CREATED: Final = "request_created_at"
HELICONE_SESSIONS: Final = ("Helicone-Session-Id",)
USERS: Final = ("request_user_id", "helicone_user")


class HeliconeRows(LogRows):
    """One request in each row."""

    KEYS = (frozenset({CREATED}),)
    TITLE = "Helicone's requests"

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
            session=first_named(HELICONE_SESSIONS, properties) or first_named(USERS, row),
            num_samples=num_samples_of(line, body),
            failure=failure_of({"status": row.get("response_status")}, {"error": answer.get("error")}),
            is_answered=bool(answer) or stated.num_answer is not None,
        )


BEDROCK_COUNTS: Final = ("inputTokenCount", "cacheReadInputTokenCount", "cacheWriteInputTokenCount")
APART: Final = ("inputBodyS3Path", "inputBodyS3Uri")
"""Where the body of a request is that is too large for the log."""


class BedrockRows(LogRows):
    """One invocation in each row."""

    KEYS = (frozenset({"schemaType", "modelId", "input"}),)
    TITLE = "Bedrock's log of invocations"
    OTHERS = "calls that generate no text, skipped"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the row's call, if it generates text."""
        asked, said = as_object(row["input"]), as_object(row.get("output"))
        if any(name in str(row["modelId"]).lower() for name in OTHER_CALLS):
            self._num_others += 1
            return
        body = as_object(asked.get("inputBodyJson"))
        answer = said.get("outputBodyJson")
        counts = [count_of(line, asked, (name,)) for name in BEDROCK_COUNTS]
        num_prompt = None if counts[0] is None else sum(count or 0 for count in counts)
        num_answer = count_of(line, said, ("outputTokenCount",))
        prompt = prompt_parts(line, body, self._texts)
        yield Call(
            line,
            self._calls.arrival_s(line, row.get("timestamp")),
            prompt,
            self._answer(answer),
            num_prompt,
            num_answer,
            session=first_named(SESSIONS, as_object(row.get("requestMetadata")), as_object(body.get("metadata"))),
            failure=failure_of({"error": row.get("errorCode")}),
            is_answered=bool(answer) or num_answer is not None,
            is_cut=prompt is None and any(name in asked for name in APART),
        )

    def _answer(self, answer: object) -> Sequence[Part] | None:
        if isinstance(answer, list):  # the events of a stream
            pieces = [_piece(as_object(event)) for event in answer]
            return answer_parts("".join(pieces), self._texts) if any(pieces) else None
        body = as_object(answer)
        return parts_of_answer(as_object(body.get("output")) or body, self._texts) if body else None


def _piece(event: JsonObject) -> str:
    """Return the text of an event of a stream: Anthropic's, Converse's, or that of other models."""
    inner = as_object(event.get("contentBlockDelta")) or event
    delta = as_object(inner.get("delta"))
    found = (delta.get("text"), delta.get("partial_json"), event.get("outputText"), event.get("generation"))
    return next((text for text in found if isinstance(text, str)), "")
