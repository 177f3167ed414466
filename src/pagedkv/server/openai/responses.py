"""``POST /v1/responses``: answers to items, whole or streamed. A request can continue a stored response by its id.

Items become messages of chat completions (:mod:`.response_items`), and a ResponseOutput turns an answer's parts into
items, and into the events that build them. Stored responses can be read and deleted by those who made them. None runs
in the background, so none can be cancelled.
"""

import json
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final, NoReturn, TypeAlias, final

import msgspec
from pydantic_core import from_json
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.engine import TokenLogprobs
from pagedkv.server.config import Caller
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.openai.answers import as_prompt_details
from pagedkv.server.openai.completions import DEFAULT_TTL, as_generation_request
from pagedkv.server.openai.requests import ChatRequest, DrawingFields, ResponsesRequest, as_chat
from pagedkv.server.openai.response_items import INPUT, Messages, ResponseTools, messages_of
from pagedkv.server.openai.token_texts import TokenTexts
from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd, Part, ReasoningPart, TextPart
from pagedkv.server.service import Exchange, Service, event, new_id

LOGPROBS: Final = "message.output_text.logprobs"
DEFAULT_NBYTES: Final = 64 * 2**20

Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that was stored.

    Args:
        messages: its conversation, with its answer; response: as it was sent.
        nbytes: of both, as JSON.
    """

    messages: Messages
    response: dict[str, Any]
    nbytes: int


@final
class StoredResponses:
    """Responses and their conversations; the oldest are dropped first.

    Args:
        max_nbytes: most bytes of all, as JSON.
    """

    def __init__(self, max_nbytes: int = DEFAULT_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._by_response: OrderedDict[tuple[str | None, str], Stored] = OrderedDict()

    def keep(self, caller: Caller, messages: Messages, response: dict[str, Any]) -> None:
        """Keep a response. O(its text)."""
        nbytes = len(json.dumps(messages)) + len(json.dumps(response))
        self._by_response[caller.tenant, response["id"]] = Stored(messages, response, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._max_nbytes:
            _, dropped = self._by_response.popitem(last=False)
            self._nbytes -= dropped.nbytes

    def find(self, caller: Caller, response_id: str, param: str = "response_id") -> Stored:
        """Return one of the caller's responses. Raises ApiError.

        Args:
            caller: who asks.
            response_id: identity of the response.
            param: the field that has it.
        """
        found = self._by_response.get((caller.tenant, response_id))
        if found is None:
            raise ApiError(
                404,
                f"there is no response {response_id[:100]!r} here: it was not stored, or has been dropped since. "
                "Send its conversation as input",
                param=param,
                code="previous_response_not_found" if param == "previous_response_id" else None,
            )
        return found

    def delete(self, caller: Caller, response_id: str) -> None:
        """Drop one of the caller's responses. Raises ApiError."""
        self._nbytes -= self.find(caller, response_id).nbytes
        del self._by_response[caller.tenant, response_id]


@final
class ResponseOutput:
    """Builds the output of one answer. Its events have no sequence number yet.

    Args:
        tools: of the request.
        texts: of tokens, for log-probabilities.

    Attributes:
        items: the items so far; an item is complete once it has ended.
        reasoning: the text of all reasoning.
    """

    def __init__(self, tools: ResponseTools, texts: TokenTexts) -> None:
        self._tools = tools
        self._texts = texts
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._untold: list[tuple[TokenLogprobs | None, str]] = []
        self._text = texts.new_text()
        self._told: list[dict[str, Any]] = []
        self._sent = ""
        self._is_open = False
        self._pieces: list[str] = []

    def take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the log-probabilities of new tokens, before the parts that these bring."""
        self._untold += [(each, self._text.append(each.token_id)) for each in logprobs]

    def add(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Add parts; yield the events that report them."""
        for part in parts:
            match part:
                case TextPart():
                    if not self._has_open("message"):
                        yield from self.finish()
                        self._told = []
                        yield from self._begin_content(
                            {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
                        )
                    told = [self._texts.position(each) for each in self._tokens_of(part.text)]
                    self._told += told
                    yield self._delta("response.output_text.delta", part.text, content_index=0, logprobs=told)
                case ReasoningPart():
                    if not self._has_open("reasoning"):
                        yield from self.finish()
                        yield from self._begin_content(
                            {"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": []}
                        )
                    self.reasoning += part.text
                    self._tokens_of(part.text)
                    yield self._delta("response.reasoning_text.delta", part.text, content_index=0)
                case CallBegin():
                    yield from self.finish()
                    yield self._begin(self._call(part))
                case CallArguments():
                    if self._has_open("custom_tool_call"):
                        yield from self._input(part.text)
                    else:
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
        elif item["type"] == "custom_tool_call":
            item["input"] = self._sent
            yield self._event("response.custom_tool_call_input.done", input=self._sent)
        else:
            part = _content(item["type"], text)
            item["content"] = [part]
            if item["type"] == "message":
                part["logprobs"] = self._told
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=self._told)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        self._is_open = False
        self._pieces.clear()
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def _call(self, part: CallBegin) -> dict[str, Any]:
        """Return the item of a call that begins, in the form of the client's tool."""
        name = self._tools.named(part.name)
        self._sent = ""
        if name.is_custom:
            kind = {"id": new_id("ctc_"), "type": "custom_tool_call", "call_id": part.call_id}
            return {**kind, "name": name.name, "input": ""}
        group = {} if name.namespace is None else {"namespace": name.namespace}
        kind = {"id": new_id("fc_"), "type": "function_call", "call_id": part.call_id}
        return {**kind, "name": name.name, **group, "arguments": ""}

    def _input(self, text: str) -> Iterator[Event]:
        """Add arguments of a custom tool's call; yield the event of the text that is certain now. O(arguments)."""
        self._pieces.append(text)
        try:
            so_far = from_json("".join(self._pieces), allow_partial="trailing-strings")
        except ValueError:
            return
        whole = so_far.get(INPUT) if isinstance(so_far, dict) else None
        if isinstance(whole, str) and len(whole) > len(self._sent) and whole.startswith(self._sent):
            more, self._sent = whole[len(self._sent) :], whole
            yield self._event("response.custom_tool_call_input.delta", delta=more)

    def _tokens_of(self, text: str) -> list[TokenLogprobs]:
        """Return the tokens of a delta's text, each once, and forget those before. O(tokens since the last delta).

        The text begins where a token does, in front of which there may be markers; else inside one.
        """
        joined = "".join(piece for _, piece in self._untold)
        starts = accumulate((len(piece) for _, piece in self._untold), initial=0)
        begin = next((start for start in starts if joined.startswith(text, start)), joined.find(text))
        if begin < 0:
            return []
        end, at = begin + len(text), 0
        found: list[TokenLogprobs] = []
        later: list[tuple[TokenLogprobs | None, str]] = []
        for each, piece in self._untold:
            if at >= end:
                later.append((each, piece))
            elif each is not None and at + max(1, len(piece)) > begin:
                found.append(each)
            if at < end < at + len(piece):  # the rest of its piece is held back
                later.append((None, joined[end : at + len(piece)]))
            at += len(piece)
        self._untold = later
        return found

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
        messages = self._messages(body, caller)
        chat = as_chat_request(body, messages)
        for_chat = await service.run_text_work(body.nbytes, partial(as_generation_request, service, chat, caller))
        adapter = service.adapter_named(body.model)
        request = replace(for_chat, endpoint="/v1/responses", request_id=new_id("resp_"), adapter=adapter)
        exchange = Exchange(service, request, receive, body.headers)
        answer = ResponseAnswer(service, body, request, messages, self._stored)
        if body.stream:
            return await exchange.streamed(answer.chunks, answer.failed)
        return json_response(await exchange.whole(answer.whole), headers=exchange.headers)

    def count(self, body: ResponsesRequest, caller: Caller) -> dict[str, Any]:
        """Count the tokens of a request's prompt. Raises ApiError."""
        self._service.require_model(body.model)
        chat = as_chat_request(body, self._messages(body, caller))
        prompt = self._service.chats.prepare(as_chat(chat), caller)
        return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}

    def read(self, response_id: str, caller: Caller) -> dict[str, Any]:
        """Return a stored response. Raises ApiError."""
        return self._stored.find(caller, response_id).response

    def delete(self, response_id: str, caller: Caller) -> dict[str, Any]:
        """Drop a stored response. Raises ApiError."""
        self._stored.delete(caller, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def cancel(self, response_id: str, caller: Caller) -> NoReturn:
        """Refuse: a stored response has ended. Raises ApiError."""
        self._stored.find(caller, response_id)
        raise ApiError(400, "the response has ended: only one that is made in the background can be cancelled")

    def _messages(self, body: ResponsesRequest, caller: Caller) -> Messages:
        """Return a request's conversation, without its instructions. Raises ApiError."""
        before: Messages = []
        if body.previous_response_id is not None:
            before = self._stored.find(caller, body.previous_response_id, "previous_response_id").messages
        messages = [*before, *messages_of(body.input)]
        if not messages:
            raise ApiError(400, "input is empty: give a text or items", param="input")
        return messages


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
        texts = TokenTexts(service.tokenizer, request.decode, as_ids=service.config.tokens_as_ids)
        self._output = ResponseOutput(ResponseTools(body.tools or []), texts)
        self._created_s = int(service.wall_clock())
        self._num_events = 0

    def whole(self, generation: Generation, answers: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Write the response."""
        (answer,) = answers
        self._output.take(answer.logprobs or ())
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
            self._output.take(last.logprobs or ())
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
        status = _status(answer)
        response = {**self._response(status), "usage": self._usage(generation), **generation.leases_refused}
        response |= generation.hints_told
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.store is not False:
            self._stored.keep(self._request.caller, [*self._messages, message], response)
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
            "model": self._request.adapter or self._service.config.model_name,
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
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
    """Return the equivalent request for chat completions. Raises ApiError."""
    tools = ResponseTools(body.tools or [])
    tells_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return ChatRequest.model_validate(
        {
            **{name: getattr(body, name) for name in DrawingFields.model_fields},
            "messages": [*system, *messages],
            "tools": tools.functions or None,
            "tool_choice": tools.choice(body.tool_choice),
            "logprobs": tells_logprobs,
            "top_logprobs": body.top_logprobs,
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
    if not isinstance((body.text or {}).get("format"), dict | None):
        raise ApiError(400, "text.format must be an object with a type", param="text")


def _status(answer: AnswerEvent) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
