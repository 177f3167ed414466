"""``POST /v1/responses``: answers to items, whole or streamed. A request can continue a stored response by its id.

Items become messages of chat completions, and a ResponseOutput turns an answer's parts into items, and into the events
that build them::

    message                 -> a message; an assistant's continues the assistant's message before it
    function_call           -> a call of the assistant's message before it, or of a new one
    function_call_output    -> a tool's message
    reasoning               -> left out
"""

import json
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.server.config import Caller
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.openai.answers import as_prompt_details
from pagedkv.server.openai.completions import DEFAULT_TTL, as_generation_request
from pagedkv.server.openai.requests import ChatRequest, DrawingFields, ResponsesRequest
from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd, Part, ReasoningPart, TextPart
from pagedkv.server.service import Exchange, Service, event, new_id

Messages: TypeAlias = list[dict[str, Any]]
ROLES: Final = ("assistant", "developer", "system", "user")
MEDIA: Final = {"input_image": "images", "input_file": "files", "input_audio": "sound"}
DEFAULT_NBYTES: Final = 64 * 2**20

Event: TypeAlias = dict[str, Any]


@final
class StoredResponses:
    """Conversations, by the response that ended them; the oldest are dropped first.

    Args:
        max_nbytes: most bytes of all conversations, as JSON.
    """

    def __init__(self, max_nbytes: int = DEFAULT_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._by_response: OrderedDict[tuple[str | None, str], tuple[Messages, int]] = OrderedDict()

    def keep(self, caller: Caller, response_id: str, messages: Messages) -> None:
        """Keep a conversation. O(its text)."""
        nbytes = len(json.dumps(messages))
        self._by_response[caller.tenant, response_id] = messages, nbytes
        self._nbytes += nbytes
        while self._nbytes > self._max_nbytes:
            _, (_, dropped) = self._by_response.popitem(last=False)
            self._nbytes -= dropped

    def find(self, caller: Caller, response_id: str) -> Messages:
        """Return the conversation that one of the caller's responses ended. Raises ApiError."""
        found = self._by_response.get((caller.tenant, response_id))
        if found is None:
            raise ApiError(
                404,
                f"there is no response {response_id!r} here: it was not stored, or has been dropped since. "
                "Send its conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[0]


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> Messages:
    """Turn items into messages of chat completions. Raises ApiError for items that are not served."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: Messages = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        match item.get("type", "message"):
            case "message":
                if item.get("role") not in ROLES:
                    raise ApiError(400, f"the role of {where} must be one of {', '.join(ROLES)}", param=where)
                _add_message(messages, item, f"{where}.content")
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                content = _text(item.get("output"), f"{where}.output")
                call_id = _required(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                pass
            case other:
                raise ApiError(
                    400,
                    f"{where} is of type {str(other)[:50]!r}; this server takes message, function_call, "
                    "function_call_output and reasoning",
                    param=where,
                )
    return messages


def as_chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn tools into the form of chat completions. Raises ApiError for a tool that is not a function."""
    for place, tool in enumerate(tools):
        if (
            tool.get("type") != "function"
            or not isinstance(tool.get("name"), str)
            or not isinstance(tool.get("parameters"), dict | None)
        ):
            raise ApiError(
                400,
                f"tools[{place}] must be a function with a name, its parameters a schema: "
                "this server does not run tools itself",
                param=f"tools[{place}]",
            )
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {},
            },
        }
        for tool in tools
    ]


def _add_message(messages: Messages, item: Mapping[str, Any], where: str) -> None:
    """Add a message. Items of one answer become one message, as a template writes it."""
    role, parts = item["role"], item.get("content")
    content = _text(parts, where)
    if role == "assistant" and messages and messages[-1]["role"] == "assistant":
        before = messages[-1]
        messages[-1] = {**before, "content": "\n".join(filter(None, (before["content"], content)))}
    elif role != "assistant" and isinstance(parts, list) and any("prompt_cache_breakpoint" in part for part in parts):
        messages.append({"role": role, "content": [{**part, "type": "text"} for part in parts]})
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: Messages, item: Mapping[str, Any], where: str) -> None:
    function = {"name": _required(item, "name", where), "arguments": _required(item, "arguments", where)}
    call = {"id": _required(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    before = messages[-1]
    messages[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), call]}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or parts", param=where)
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA:
            raise ApiError(400, f"{where}[{place}] has {MEDIA[kind]}, and this server takes text alone", param=where)
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError(400, f"{where}[{place}] must be a part of type input_text, with its text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _required(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name} must be a text", param=where)
    return value


@final
class ResponseOutput:
    """Builds the output of one answer. Its events have no sequence number yet.

    Attributes:
        items: the items so far; an item is complete once it has ended.
        reasoning: the text of all reasoning.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._is_open = False
        self._pieces: list[str] = []

    def add(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Add parts; yield the events that report them."""
        for part in parts:
            match part:
                case TextPart():
                    if not self._has_open("message"):
                        yield from self.finish()
                        yield from self._begin_content(
                            {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
                        )
                    yield self._delta("response.output_text.delta", part.text, content_index=0, logprobs=[])
                case ReasoningPart():
                    if not self._has_open("reasoning"):
                        yield from self.finish()
                        yield from self._begin_content(
                            {"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": []}
                        )
                    self.reasoning += part.text
                    yield self._delta("response.reasoning_text.delta", part.text, content_index=0)
                case CallBegin():
                    yield from self.finish()
                    item = {"id": new_id("fc_"), "type": "function_call", "call_id": part.call_id, "name": part.name}
                    yield self._begin({**item, "arguments": ""})
                case CallArguments():
                    yield self._delta("response.function_call_arguments.delta", part.text)
                case CallEnd():
                    yield from self.finish()

    def finish(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one; yield the events that report its end.

        Args:
            status: the item's status: ``completed`` or ``incomplete``.
        """
        if not self._is_open:
            return
        item = self.items[-1]
        text = "".join(self._pieces)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = _content(item["type"], text)
            item["content"] = [part]
            if item["type"] == "message":
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        self._is_open = False
        self._pieces.clear()
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Event:
        self._is_open = True
        self.items.append({**item, "status": "in_progress"})
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _begin_content(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._begin(item)
        yield self._event("response.content_part.added", content_index=0, part=_content(item["type"], ""))

    def _delta(self, kind: str, text: str, **more: object) -> Event:
        self._pieces.append(text)
        return self._event(kind, delta=text, **more)

    def _event(self, kind: str, **more: object) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


@final
class Responses:
    """Serves the path.

    Args:
        service: the engine and what all protocols share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stored = StoredResponses()

    async def create(self, body: ResponsesRequest, caller: Caller, receive: Receive) -> Response:
        """Answer a request.

        Raises:
            ApiError: the items cannot be served.
            ClientGoneError: the client has disconnected.
        """
        service = self._service
        service.require_model(body.model)
        _refuse_unserved(body)
        before = [] if body.previous_response_id is None else self._stored.find(caller, body.previous_response_id)
        messages = [*before, *messages_of(body.input)]
        if not messages:
            raise ApiError(400, "input is empty: give a text or items", param="input")
        chat = as_chat_request(body, messages)
        for_chat = await service.run_text_work(body.nbytes, partial(as_generation_request, service, chat, caller))
        request = replace(for_chat, endpoint="/v1/responses", request_id=new_id("resp_"))
        exchange = Exchange(service, request, receive)
        answer = ResponseAnswer(service, body, request, messages, self._stored)
        if body.stream:
            return await exchange.streamed(answer.chunks, answer.failed)
        return json_response(await exchange.whole(answer.whole), headers=exchange.headers)


@final
class ResponseAnswer:
    """Writes the answer to one request.

    Args:
        service: has the model's name and counts usage.
        body: the client's request.
        request: the engine's request.
        messages: the conversation, without instructions.
        stored: keeps the conversation.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        request: GenerationRequest,
        messages: Messages,
        stored: StoredResponses,
    ) -> None:
        self._service = service
        self._body = body
        self._request = request
        self._messages = messages
        self._stored = stored
        self._output = ResponseOutput()
        self._created_s = int(service.wall_clock())
        self._num_events = 0

    def whole(self, generation: Generation, answers: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Write the response."""
        (answer,) = answers
        deque(self._output.add(answer.parts), maxlen=0)
        deque(self._output.finish(_status(answer)), maxlen=0)
        return self._ended(generation, answer)

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Write the events of a stream."""
        begun = self._response("in_progress")
        yield self._encoded({"type": "response.created", "response": begun})
        yield self._encoded({"type": "response.in_progress", "response": begun})
        last: AnswerEvent | None = None
        async for last in generation.events():
            for each in self._output.add(last.parts):
                yield self._encoded(each)
        assert last is not None, "an answer without an end"
        for each in self._output.finish(_status(last)):
            yield self._encoded(each)
        yield self._encoded({"type": f"response.{_status(last)}", "response": self._ended(generation, last)})

    def failed(self, problem: ApiError) -> bytes:
        """Write the event of a stream that failed in the middle."""
        error = {"code": "server_error", "message": problem.message}
        return self._encoded({"type": "response.failed", "response": {**self._response("failed"), "error": error}})

    def _ended(self, generation: Generation, answer: AnswerEvent) -> dict[str, Any]:
        """Write the response of an answer that has ended, and store the conversation for later requests."""
        (message,) = messages_of(self._output.items) or [{"role": "assistant", "content": ""}]
        self._service.keep_answer(generation, 0, message)
        if self._body.store is not False:
            self._stored.keep(self._request.caller, self._request.request_id, [*self._messages, message])
        status = _status(answer)
        response = {**self._response(status), "usage": self._usage(generation), **generation.leases_refused}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        options = body.prompt_cache_options
        cache: dict[str, Any] = {} if body.prompt_cache_key is None else {"prompt_cache_key": body.prompt_cache_key}
        if options is not None:
            effective = {"mode": options.mode or "implicit", "ttl": options.ttl or DEFAULT_TTL}
            cache["prompt_cache_options"] = effective
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.config.model_name,
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            **cache,
        }

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage = self._service.usage(generation.outputs)
        reasoning = self._output.reasoning
        num_reasoning = len(self._service.encode_plain(reasoning)) if reasoning else 0
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": as_prompt_details(usage),
            "output_tokens": usage.num_generated,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, usage.num_generated)},
            "total_tokens": usage.num_total,
        }

    def _encoded(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._num_events}
        self._num_events += 1
        return event(msgspec.json.encode(numbered), content["type"])


def as_chat_request(body: ResponsesRequest, messages: Messages) -> ChatRequest:
    """Return the equivalent request for chat completions."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return ChatRequest.model_validate(
        {
            **{name: getattr(body, name) for name in DrawingFields.model_fields},
            "messages": [*system, *messages],
            "tools": as_chat_tools(body.tools or []) or None,
            "tool_choice": body.tool_choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_completion_tokens": body.max_output_tokens,
            "reasoning_effort": body.reasoning and body.reasoning.effort,
            "chat_template_kwargs": body.chat_template_kwargs,
            "response_format": (body.text or {}).get("format"),
            "prompt_cache_options": body.prompt_cache_options,
        }
    )


def _refuse_unserved(body: ResponsesRequest) -> None:
    """Refuse known fields that would change the answer and are not served. Raises ApiError."""
    if body.background:
        raise ApiError(
            400, "this server does not answer requests in the background: leave background out", param="background"
        )
    if body.conversation is not None:
        raise ApiError(
            400,
            "this server does not keep conversations: give previous_response_id, or all items",
            param="conversation",
        )
    if body.prompt is not None:
        raise ApiError(400, "this server does not keep prompts: give instructions and input", param="prompt")
    if body.top_logprobs:
        raise ApiError(
            400, "log-probabilities are served by /v1/chat/completions: leave top_logprobs out", param="top_logprobs"
        )
    if any("logprobs" in each for each in body.include or ()):
        raise ApiError(400, "log-probabilities are served by /v1/chat/completions: leave include out", param="include")
    if not isinstance((body.text or {}).get("format"), dict | None):
        raise ApiError(400, "text.format must be an object with a type", param="text")


def _status(answer: AnswerEvent) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
