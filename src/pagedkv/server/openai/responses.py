"""``POST /v1/responses``: answers to items, whole or streamed. A request can continue a stored response by its id."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.server.access import Caller
from pagedkv.server.errors import ApiError
from pagedkv.server.event_stream import event
from pagedkv.server.exchange import Exchange
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest
from pagedkv.server.json_response import json_response
from pagedkv.server.openai.answers import as_prompt_details
from pagedkv.server.openai.breakpoints import DEFAULT_TTL
from pagedkv.server.openai.chat import as_generation_request
from pagedkv.server.openai.requests import ChatRequest, ResponsesRequest
from pagedkv.server.openai.response_items import Messages, StoredResponses, as_chat_tools, messages_of
from pagedkv.server.openai.response_output import ResponseOutput
from pagedkv.server.service import Service, new_id

__all__ = ["Responses"]


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
        chat = _as_chat_request(body, messages)
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


def _as_chat_request(body: ResponsesRequest, messages: Messages) -> ChatRequest:
    """Return the equivalent request for chat completions."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return ChatRequest.model_validate(
        {
            "messages": [*system, *messages],
            "tools": as_chat_tools(body.tools or []) or None,
            "tool_choice": body.tool_choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
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
    if body.cache_salt is not None:
        raise ApiError(
            400, "cache_salt is not taken from a request: the salt is that of the API key's tenant", param="cache_salt"
        )
    if not isinstance((body.text or {}).get("format"), dict | None):
        raise ApiError(400, "text.format must be an object with a type", param="text")


def _status(answer: AnswerEvent) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
