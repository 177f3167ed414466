"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: answers to a conversation, whole or streamed.

Usage has plain, read and created tokens, which add up to the prompt exactly. Without breakpoints, the tokens that a
request writes to the cache are reported as plain input. With breakpoints, the tokens that it computed up to the last
one, in whole blocks, are reported as created, by the requested lifetime.

Diagnostics tell why a prompt hit fewer tokens than the prompt of an earlier message had cached. For each message the
server keeps digests of the parts of its prompt. The first part that differs, in the order in which templates write the
parts, is the reason; the engine's explanation gives the tokens and the position. No text is kept, and only the tenant
that sent a message can refer to it. Where no part differs and the prompt still hits fewer tokens, the content was
evicted: the reason is ``unavailable``, with the engine's cause beside it.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.contract.answers import Explanation
from pagedkv.engine import Breakpoint
from pagedkv.server.anthropic.bodies import CountRequest, MessagesRequest
from pagedkv.server.anthropic.conversations import (
    HOUR_S,
    IGNORED_KINDS,
    Blocks,
    ContentBlocks,
    Conversation,
    answer_message,
    breakpoints_of,
    conversation_of,
)
from pagedkv.server.cache_hints import CacheHints
from pagedkv.server.config import Caller
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest, Usage, as_explanation
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.openai.requests import SamplingFields, as_params
from pagedkv.server.parsing import PlainParser
from pagedkv.server.service import Exchange, Service, event, new_id


def as_usage(usage: Usage, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Return the numbers of tokens of a request that has ended.

    Args:
        usage: tokens of the request.
        breakpoints: breakpoints of its prompt that became leases.
    """
    created = {False: 0, True: 0}
    begin, end = usage.num_read, usage.num_read + usage.num_written
    for each in sorted(breakpoints, key=lambda place: place.num_tokens):
        place = min(each.num_tokens, end)
        created[each.keep_for_s >= HOUR_S] += max(0, place - begin)
        begin = max(begin, place)
    num_created = sum(created.values())
    return {
        "input_tokens": usage.num_prompt - usage.num_read - num_created,
        "cache_read_input_tokens": usage.num_read,
        "cache_creation_input_tokens": num_created,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created[False],
            "ephemeral_1h_input_tokens": created[True],
        },
        "output_tokens": usage.num_generated,
    }


@final
class Messages:
    """Serves both paths.

    Args:
        service: the engine and what all protocols share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._memory = MessageMemory()

    async def create(self, body: MessagesRequest, caller: Caller, receive: Receive) -> Response:
        """Answer a conversation.

        Raises:
            ApiError: the conversation cannot be served.
            ClientGoneError: the client has disconnected.
        """
        service = self._service
        service.require_model(body.model)
        conversation = conversation_of(body)
        request = await service.run_text_work(
            body.nbytes, partial(as_generation_request, service, body, conversation, caller)
        )
        exchange = Exchange(service, request, receive, body.headers)
        answer = MessageAnswer(service, body, request, self._memory, fingerprint_of(body, conversation))
        if body.stream:
            return await exchange.streamed(answer.chunks, lambda problem: _encoded(problem.as_anthropic()))
        return json_response(await exchange.whole(answer.whole), headers=exchange.headers)

    def count(self, body: CountRequest, caller: Caller) -> dict[str, Any]:
        """Count the tokens of a conversation's prompt. Raises ApiError."""
        self._service.require_model(body.model)
        prepared = self._service.chats.prepare(conversation_of(body).chat(), caller)
        return {"input_tokens": len(prepared.token_ids)}


def as_generation_request(
    service: Service, body: MessagesRequest, conversation: Conversation, caller: Caller
) -> GenerationRequest:
    """Turn a client's request into one for the engine. Raises ApiError."""
    prompt = service.chats.prepare(conversation.chat(), caller)
    tools = conversation.functions()
    choice = _tool_choice(body)
    may_call = bool(tools) and choice != "none"
    several = not (body.tool_choice and body.tool_choice.disable_parallel_tool_use)
    new_parser = service.parsers(tools if may_call else [], prompt)
    after = service.end_of_reasoning(prompt)
    forced = service.formats.matcher(_answer_format(body), tools, choice, several=several, after=after)
    fields = SamplingFields(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k or None, stop=body.stop_sequences
    )
    service.fill_in(fields)
    return GenerationRequest(
        "/v1/messages",
        new_id("msg_"),
        caller,
        [prompt],
        as_params(fields, max_tokens=body.max_tokens, logprobs=None, processors=() if forced is None else (forced,)),
        partial(service.decode, keeps_special=not isinstance(new_parser(), PlainParser)),
        new_parser,
        hints=CacheHints(breakpoints_of(conversation, body.cache_control, prompt, service.chats, caller)),
        adapter=service.adapter_named(body.model),
    )


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of the parts of a prompt.

    Args:
        model, system, tools: digests of these parts.
        beginnings: 16 bytes for each message: the digest of all messages up to it.
        num_reusable: leading tokens of the prompt that later prompts can hit; 0 until they are computed.
    """

    model: bytes
    system: bytes
    tools: bytes
    beginnings: bytes
    num_reusable: int = 0

    @property
    def nbytes(self) -> int:
        """Approximate size in memory, in bytes."""
        return BASE_NBYTES + len(self.beginnings)

    def continues(self, before: "Fingerprint") -> bool:
        """Return whether the messages of one prompt begin with those of the other."""
        length = min(len(self.beginnings), len(before.beginnings))
        return self.beginnings[:length] == before.beginnings[:length]


DEFAULT_NBYTES: Final = 16 * 2**20


@final
class MessageMemory:
    """Fingerprints by message; the oldest are dropped first.

    Args:
        max_nbytes: most bytes of all fingerprints.
    """

    def __init__(self, max_nbytes: int = DEFAULT_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._by_message: OrderedDict[tuple[str | None, str], Fingerprint] = OrderedDict()

    def keep(self, caller: Caller, message_id: str, fingerprint: Fingerprint) -> None:
        """Keep the fingerprint of a message that was answered."""
        self._by_message[caller.tenant, message_id] = fingerprint
        self._nbytes += fingerprint.nbytes
        while self._nbytes > self._max_nbytes:
            _, dropped = self._by_message.popitem(last=False)
            self._nbytes -= dropped.nbytes

    def find(self, caller: Caller, message_id: str) -> Fingerprint | None:
        """Return the fingerprint of one of the caller's messages; None where it is not kept."""
        return self._by_message.get((caller.tenant, message_id))


@final
@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """Writes the answer to one request.

    Args:
        service: has the model's name and counts usage.
        body: the client's request.
        request: the engine's request.
        memory: fingerprints of earlier messages.
        fingerprint: that of this message.
    """

    service: Service
    body: MessagesRequest
    request: GenerationRequest
    memory: MessageMemory
    fingerprint: Fingerprint

    def whole(self, generation: Generation, answers: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Write the response."""
        (answer,) = answers
        content = ContentBlocks()
        deque(content.add(answer.parts), maxlen=0)
        deque(content.finish(), maxlen=0)
        self._keep_answer(generation, content)
        return {
            **self._head(),
            "content": content.blocks,
            **self._end(generation, answer),
            "usage": as_usage(self.service.usage(generation.outputs), generation.leased),
            "diagnostics": self._diagnosed(generation),
            **generation.leases_refused,
        }

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Write the events of a stream.

        When a stream begins, the number of cached tokens is not known yet: the first usage counts the whole prompt as
        input, and the last usage has the true parts.
        """
        usage = {"input_tokens": len(self.request.prompts[0].token_ids), "output_tokens": 0}
        head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _encoded({"type": "message_start", "message": {**head, "diagnostics": self._pending()}})
        yield _encoded({"type": "ping"})
        content = ContentBlocks()
        last: AnswerEvent | None = None
        async for last in generation.events():
            for each in content.add(last.parts):
                yield _encoded(each)
        assert last is not None, "an answer without an end"
        for each in content.finish():
            yield _encoded(each)
        self._keep_answer(generation, content)
        final_usage = as_usage(self.service.usage(generation.outputs), generation.leased)
        end: dict[str, Any] = {"type": "message_delta", "delta": self._end(generation, last), "usage": final_usage}
        end.update(generation.leases_refused)
        diagnosed = self._diagnosed(generation)
        if self.body.diagnostics is not None:
            end["diagnostics"] = diagnosed
        yield _encoded(end)
        yield _encoded({"type": "message_stop"})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.request.adapter or self.service.config.model_name,
        }

    def _end(self, generation: Generation, answer: AnswerEvent) -> dict[str, Any]:
        """Return why an answer ended."""
        reason = "end_turn"
        if answer.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(answer.stop, str):
            reason = "stop_sequence"
        elif generation.writers[0].has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": answer.stop if isinstance(answer.stop, str) else None}

    def _keep_answer(self, generation: Generation, content: ContentBlocks) -> None:
        message = answer_message(content.blocks)
        self.service.keep_answer(generation, 0, message)

    def _pending(self) -> dict[str, Any] | None:
        """Return the diagnosis for a stream's first event, where null means that it is still to come."""
        options = self.body.diagnostics
        if options is None or options.previous_message_id is None:
            return None
        if self.memory.find(self.request.caller, options.previous_message_id) is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        return {"cache_miss_reason": None}

    def _diagnosed(self, generation: Generation) -> dict[str, Any] | None:
        """Compare the request with the earlier message that it names, and keep its fingerprint for later requests."""
        options = self.body.diagnostics
        if options is None:
            return None
        (output,) = generation.outputs
        usage = self.service.usage(generation.outputs)
        now = replace(self.fingerprint, num_reusable=usage.num_read + usage.num_written)
        caller = self.request.caller
        reason = None
        if options.previous_message_id is not None:
            before = self.memory.find(caller, options.previous_message_id)
            reason = cache_miss_reason(before, now, usage.num_read, output.explanation, caller)
        self.memory.keep(caller, self.request.request_id, now)
        return None if reason is None else {"cache_miss_reason": reason}


def _tool_choice(body: MessagesRequest) -> object:
    """Return the choice in OpenAI's form. Raises ApiError."""
    if body.tool_choice is None:
        return None
    match body.tool_choice.type:
        case "any":
            return "required"
        case "tool":
            if body.tool_choice.name is None:
                raise ApiError(400, "tool_choice of type tool needs the name of a tool", param="tool_choice")
            return {"type": "function", "function": {"name": body.tool_choice.name}}
        case other:
            return other


def _answer_format(body: MessagesRequest) -> dict[str, Any] | None:
    """Return the format in OpenAI's form. Raises ApiError."""
    answer_format = None if body.output_config is None else body.output_config.format
    if answer_format is None:
        return None
    if answer_format.get("type") != "json_schema":
        raise ApiError(400, "the type of output_config.format must be json_schema", param="output_config")
    return {"type": "json_schema", "json_schema": {"schema": answer_format.get("schema"), "strict": True}}


def _encoded(content: dict[str, Any]) -> bytes:
    return event(msgspec.json.encode(content), content["type"])


NUM_DIGEST_BYTES: Final = 16
BASE_NBYTES: Final = 512
"""Approximate size of a fingerprint without the digests of its messages, in bytes."""


def fingerprint_of(body: MessagesRequest, conversation: Conversation) -> Fingerprint:
    """Compute the digests of a request. O(text)."""
    beginnings: list[bytes] = []
    digest = b""
    for role, blocks in conversation.turns:
        digest = _digest([digest.hex(), role, _plain(blocks)])
        beginnings.append(digest)
    return Fingerprint(
        _digest(body.model),
        _digest([_plain(conversation.system), dict(conversation.options)]),
        _digest(_plain(conversation.tools)),
        b"".join(beginnings),
    )


def cache_miss_reason(
    before: Fingerprint | None, now: Fingerprint, num_hit: int, explanation: Explanation | None, caller: Caller
) -> dict[str, Any] | None:
    """Return why a prompt hit fewer tokens than the earlier one had cached.

    None if it hit as many and no part of the prompt differs.

    Args:
        before: fingerprint of the earlier message; None: it is not kept.
        now: fingerprint of this message, with ``num_reusable``.
        num_hit: cached tokens of this message's prompt.
        explanation: the engine's explanation of where the hit ended.
        caller: the sender of the request.

    Returns:
        Anthropic's ``cache_miss_reason``, with our ``cause`` and ``position`` (of the first token that missed).
    """
    if before is None:
        return {"type": "previous_message_not_found"}
    num_missed = max(0, before.num_reusable - num_hit)
    kind = _difference(before, now)
    if kind is None:
        num_missed = max(0, min(before.num_reusable, now.num_reusable) - num_hit)
        if not num_missed:
            return None
        kind = "unavailable"
    fields = as_explanation(explanation, caller) or {}
    place: dict[str, Any] = {name: fields[name] for name in ("cause", "position") if name in fields}
    return {"type": kind, "cache_missed_input_tokens": num_missed, **place}


def _difference(before: Fingerprint, now: Fingerprint) -> str | None:
    if before.model != now.model:
        return "model_changed"
    if before.system != now.system:
        return "system_changed"
    if before.tools != now.tools:
        return "tools_changed"
    if not now.continues(before):
        return "messages_changed"
    return None


def _plain(blocks: Blocks) -> list[dict[str, Any]]:
    """Return blocks without the fields that do not change the prompt."""
    return [
        {
            name: _plain(value) if _is_result(block) and name == "content" and isinstance(value, list) else value
            for name, value in block.items()
            if name != "cache_control"
        }
        for block in blocks
        if not _is_ignored(block)
    ]


def _is_ignored(block: Mapping[str, Any]) -> bool:
    kind = block.get("type")
    return isinstance(kind, str) and kind in IGNORED_KINDS


def _is_result(block: Mapping[str, Any]) -> bool:
    """Return whether a block's content is a list of blocks, each checked."""
    return block.get("type") == "tool_result"


def _digest(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:NUM_DIGEST_BYTES]
