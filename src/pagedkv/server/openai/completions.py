"""``/v1/chat/completions``, whole or streamed, or of several conversations; ``/tokenize`` and its kin, list of models.

Breakpoints are parts with ``prompt_cache_breakpoint``, and ``prompt_cache_options``, in all of OpenAI's protocols. With
options of the mode ``implicit``, the default, the whole prompt and the last three breakpoints are leased; with the mode
``explicit``, only the last four breakpoints. Without options and breakpoints no part of the prompt is leased: its
blocks stay cached until they are evicted. Tokens and models
are told in vLLM's form.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.engine import Breakpoint, Chat, RequestOutput
from pagedkv.engine.sampling import LogitsProcessor, TokenMatcher, bad_words_as_ids
from pagedkv.scheduling.config import MOST_BREAKPOINTS
from pagedkv.server.answer_formats import AllowedTokens
from pagedkv.server.chat_prompts import ChatPrompts, breakpoints_at
from pagedkv.server.config import Caller
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest, PreparedPrompt, as_explanation
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.openai.answers import (
    as_delta,
    as_finish_reason,
    as_logprobs,
    as_message,
    as_prompt_logprobs,
    as_stop_reason,
    as_usage,
    as_usage_so_far,
)
from pagedkv.server.openai.requests import (
    CacheBreakpoint,
    ChatBatchRequest,
    ChatRequest,
    DetokenizeRequest,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    answer_format,
    as_chat,
    as_params,
    as_text,
    hints_of,
    least_tokens,
    offered_tools,
    predicted_text,
    refuse_unserved_in_batch,
    require_consistent,
    require_few,
    truncated,
)
from pagedkv.server.openai.token_texts import TokenTexts
from pagedkv.server.parsing import Part, PlainParser, ReasoningPart, TextPart
from pagedkv.server.service import DONE, Exchange, Service, event, new_id

DEFAULT_TTL: Final = "30m"
SECONDS: Final = {"30m": 1800.0, "12h": 43_200.0}


def breakpoints_of(
    body: ChatRequest, chat: Chat, prepared: PreparedPrompt, chats: ChatPrompts, caller: Caller
) -> tuple[Breakpoint, ...]:
    """Find the breakpoints of a request, in their order. O(text) for each.

    Args:
        body: the request.
        chat: its conversation.
        prepared: its prompt.
        chats: makes prompts.
        caller: the sender of the request.

    Raises:
        ApiError: a breakpoint is invalid.
    """
    options = body.prompt_cache_options
    ttl = (options.ttl if options else None) or DEFAULT_TTL
    last = list(_marked(body))[-MOST_BREAKPOINTS:]
    marked = [(as_chat(_beginning(body, *place)), SECONDS[each.ttl or ttl]) for place, each in last]
    if options is not None and options.mode != "explicit":
        marked = [*marked[1 - MOST_BREAKPOINTS :], (chat, SECONDS[ttl])]
    return breakpoints_at(marked[-MOST_BREAKPOINTS:], chat, prepared, chats, caller) if marked else ()


def _marked(body: ChatRequest) -> Iterator[tuple[tuple[int, int], CacheBreakpoint]]:
    """Yield the places of marked parts: index of the message and of the part."""
    for number, message in enumerate(body.messages):
        if not isinstance(message.content, list):
            continue
        for place, part in enumerate(message.content):
            given = part.get("prompt_cache_breakpoint")
            if given is None:
                continue
            where = f"messages[{number}].content[{place}].prompt_cache_breakpoint"
            try:
                each = CacheBreakpoint.model_validate(given)
            except ValueError as problem:
                refusal = f'{where} must have mode "explicit" and may have ttl "30m" or "12h"'
                raise ApiError(400, refusal, param=where) from problem
            yield (number, place), each


def _beginning(body: ChatRequest, number: int, place: int) -> ChatRequest:
    """Return the request with its messages cut after one part."""
    message = body.messages[number]
    assert isinstance(message.content, list), "a part of a message that has none"
    last = message.model_copy(update={"content": message.content[: place + 1]})
    return body.model_copy(update={"messages": [*body.messages[:number], last]})


async def complete_chat(service: Service, body: ChatRequest, caller: Caller, receive: Receive) -> Response:
    """Answer a conversation.

    Raises:
        ApiError: the conversation cannot be served.
        ClientGoneError: the client has disconnected.
    """
    service.require_model(body.model)
    require_consistent(body)
    request = await service.run_text_work(body.nbytes, partial(as_generation_request, service, body, caller))
    exchange = Exchange(service, request, receive, body.headers)
    answer = ChatCompletion(service, body, request)
    if body.stream:
        return await exchange.streamed(answer.chunks, lambda problem: event(msgspec.json.encode(problem.as_openai())))
    return json_response(await exchange.whole(answer.whole), headers=exchange.headers)


async def complete_chats(service: Service, body: ChatBatchRequest, caller: Caller, receive: Receive) -> Response:
    """Answer several conversations, each as a request of its own; if one fails, all do.

    Raises:
        ApiError: a conversation cannot be served.
        ClientGoneError: the client has disconnected.
    """
    service.require_model(body.model)
    refuse_unserved_in_batch(body)
    require_consistent(body)
    require_few(body.messages, service.config.max_prompts, "messages", "conversations")
    bodies = body.requests()
    requests = await service.run_text_work(
        body.nbytes, lambda: [as_generation_request(service, each, caller) for each in bodies]
    )
    outputs: list[RequestOutput] = []

    async def answer(each: ChatRequest, request: GenerationRequest) -> dict[str, Any]:
        def whole(generation: Generation, answers: Sequence[AnswerEvent]) -> dict[str, Any]:
            outputs.extend(generation.outputs)
            return ChatCompletion(service, each, request).whole(generation, answers)

        return await Exchange(service, request, receive).whole(whole)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(*each)) for each in zip(bodies, requests, strict=True)]
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    answers = [task.result() for task in tasks]
    thoughts = [each["usage"].get("completion_tokens_details", {}).get("reasoning_tokens", 0) for each in answers]
    joined = {
        **answers[0],
        "choices": [{**each["choices"][0], "index": place} for place, each in enumerate(answers)],
        "usage": as_usage(service.usage(outputs), num_reasoning=sum(thoughts)),
        "prompt_token_ids": None,
    }
    return json_response(joined, headers=body.headers)


def as_generation_request(service: Service, body: ChatRequest, caller: Caller) -> GenerationRequest:
    """Turn a client's request into one for the engine. Raises ApiError."""
    chat = as_chat(body)
    prompt = service.chats.prepare(chat, caller)
    if body.truncate_prompt_tokens is not None:
        prompt = PreparedPrompt(truncated(prompt.token_ids, body, service.longest))
    tools = offered_tools(body)
    require_few_logprobs([prompt], body.prompt_logprobs)
    may_call = bool(tools) and body.tool_choice != "none"
    new_parser = service.parsers(tools if may_call else [], prompt)
    several = body.parallel_tool_calls is not False
    after = service.end_of_reasoning(prompt)
    forced = service.formats.matcher(
        answer_format(body), tools, body.tool_choice, several=several, after=after, least=least_tokens(body)
    )
    hints = hints_of(body, caller, [prompt], breakpoints_of(body, chat, prompt, service.chats, caller))
    processors, bad_words = limits_of(service, body, forced)
    return GenerationRequest(
        "/v1/chat/completions",
        new_id("chatcmpl-"),
        caller,
        [prompt],
        as_params(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            processors=processors,
            bad_words=bad_words,
        ),
        partial(
            service.decode,
            keeps_special=body.skip_special_tokens is False or not isinstance(new_parser(), PlainParser),
        ),
        new_parser,
        body.deadline_s,
        hints,
        _prediction(service, body),
        keeps_stop=bool(body.include_stop_str_in_output),
        session=body.session_id,
        adapter=service.adapter_named(body.model),
    )


def limits_of(
    service: Service, body: SamplingFields, held: TokenMatcher | None
) -> tuple[list[LogitsProcessor | TokenMatcher], tuple[tuple[int, ...], ...]]:
    """Return what limits the tokens of an answer: processors of logits, and bad words as token ids. Raises ApiError.

    Args:
        service: has the tokenizer.
        body: the request.
        held: the matcher of its format; None: it has none.
    """
    processors: list[LogitsProcessor | TokenMatcher] = [] if held is None else [held]
    if body.allowed_token_ids is not None:
        service.require_tokens(body.allowed_token_ids, "allowed_token_ids")
        processors.append(AllowedTokens(tuple(body.allowed_token_ids)))
    words = [word for word in body.bad_words or () if word.strip()]
    return processors, bad_words_as_ids(words, service.encode_plain) if words else ()


def stream_options_of(service: Service, body: SamplingFields) -> StreamOptions:
    """Return the options of a stream; a server that tells usage in any case sets its own."""
    if service.config.tells_usage:
        return StreamOptions(include_usage=True, continuous_usage_stats=True)
    return body.stream_options or StreamOptions()


@final
class UsageSoFar:
    """The usage that each chunk of a stream tells, with vLLM's option ``continuous_usage_stats``.

    Args:
        options: of the stream.
        request: the engine's request.

    Attributes:
        num_generated: tokens of all answers so far.
    """

    def __init__(self, options: StreamOptions, request: GenerationRequest) -> None:
        self._is_told = bool(options.include_usage and options.continuous_usage_stats)
        self._num_prompt = sum(len(prompt.token_ids) for prompt in request.prompts)
        self.num_generated = 0

    def told(self) -> dict[str, Any]:
        """Return the field of a chunk; empty if the client did not ask for it."""
        return {"usage": as_usage_so_far(self._num_prompt, self.num_generated)} if self._is_told else {}


MOST_PROMPT_LOGPROBS: Final = 2**18


def require_few_logprobs(prompts: Sequence[PreparedPrompt], count: int | None) -> None:
    """Refuse log-probabilities of prompts that would be too many to write. Raises ApiError.

    Args:
        prompts: the prompts.
        count: most likely tokens at each position; None: none are asked for.
    """
    num_told = 0 if count is None else sum(len(prompt.token_ids) for prompt in prompts) * (count + 1)
    if num_told > MOST_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"{num_told:,} log-probabilities of prompt tokens are asked for, and at most {MOST_PROMPT_LOGPROBS:,} are "
            "told in one answer: ask for fewer at each token, or give fewer prompts",
            param="prompt_logprobs",
        )


def _prediction(service: Service, body: ChatRequest) -> tuple[int, ...]:
    """Return the tokens of a prediction; empty if the engine does not use predictions. Raises ApiError."""
    text = predicted_text(body)
    return tuple(service.encode_plain(text)) if text and service.engine.facts.uses_predictions else ()


@final
@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """Writes the answers to one request.

    Args:
        service: has the model's name and counts usage.
        body: the client's request.
        request: the engine's request.
    """

    service: Service
    body: ChatRequest
    request: GenerationRequest

    def whole(self, generation: Generation, answers: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Write a response with all answers."""
        choices = [self._choice(generation, answer) for answer in answers]
        return {
            "id": self.request.request_id,
            "object": "chat.completion",
            "created": int(self.service.wall_clock()),
            "model": self.request.adapter or self.service.config.model_name,
            "choices": choices,
            "usage": self._usage(generation, [answer.parts for answer in answers]),
            **generation.leases_refused,
            **generation.hints_told,
            **self._explained(generation),
            "prompt_logprobs": self._prompt_logprobs(generation.outputs[0]),
            "prompt_token_ids": self.request.prompts[0].token_ids if self.body.return_token_ids else None,
        }

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Write events: one that begins each answer, those of new content, and one with usage if requested."""
        write = self._writer()
        options = stream_options_of(self.service, self.body)
        so_far = UsageSoFar(options, self.request)
        for index in range(len(generation.writers)):
            begun = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield write(begun, **so_far.told(), **(self._prompt_ids() if index == 0 else {}))
            if self._echoed:
                begun = {"index": index, "delta": {"content": self._echoed}, "finish_reason": None}
                yield write(begun, **so_far.told())
        gathered: list[list[Part]] = [[] for _ in generation.writers]
        async for each in generation.events():
            gathered[each.index] += each.parts
            so_far.num_generated += len(each.token_ids)
            choice = self._chunk_choice(generation, each)
            if choice is not None:
                yield write(choice, **so_far.told())
        for index, parts in enumerate(gathered):
            self._keep(generation, index, parts)
        more = {**generation.hints_told, **self._explained(generation)}
        if options.include_usage:
            more = {"usage": self._usage(generation, gathered), **generation.leases_refused, **more}
        if more:
            yield write(None, **more)
        yield DONE

    def _choice(self, generation: Generation, answer: AnswerEvent) -> dict[str, Any]:
        writer = generation.writers[answer.index]
        self._keep(generation, answer.index, answer.parts)
        echoed = [TextPart(self._echoed)] if self._echoed else []
        return {
            "index": answer.index,
            "message": as_message([*echoed, *self._shown(answer.parts)]),
            "logprobs": self._logprobs(answer),
            "finish_reason": as_finish_reason(answer.finish_reason, has_calls=writer.has_calls),
            "stop_reason": as_stop_reason(answer.stop, self.body),
            "token_ids": answer.token_ids if self.body.return_token_ids else None,
        }

    def _keep(self, generation: Generation, index: int, parts: Sequence[Part]) -> None:
        self.service.keep_answer(generation, index, as_message(parts))

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the parts that the client wants: without thoughts if it asked for that."""
        if self.body.include_reasoning is not False:
            return parts
        return [part for part in parts if not isinstance(part, ReasoningPart)]

    @property
    def _echoed(self) -> str:
        """The text before the answer: with ``echo`` that of a last message of the assistant."""
        last = self.body.messages[-1]
        return as_text(last.content, "messages") if self.body.echo and last.role == "assistant" else ""

    def _logprobs(self, each: AnswerEvent) -> dict[str, Any] | None:
        if each.logprobs is None:
            return None
        return as_logprobs(each.logprobs, self._texts, has_own=bool(self.body.logprob_token_ids))

    def _chunk_choice(self, generation: Generation, each: AnswerEvent) -> dict[str, Any] | None:
        delta = as_delta(self._shown(each.parts))
        if not delta and each.finish_reason is None and not each.logprobs and not self.body.return_token_ids:
            return None
        has_calls = generation.writers[each.index].has_calls
        choice: dict[str, Any] = {
            "index": each.index,
            "delta": delta,
            "finish_reason": as_finish_reason(each.finish_reason, has_calls=has_calls),
            **self._ids(each),
        }
        if each.logprobs is not None:
            choice["logprobs"] = self._logprobs(each)
        if each.stop is not None:
            choice["stop_reason"] = as_stop_reason(each.stop, self.body)
        return choice

    @property
    def _texts(self) -> TokenTexts:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return TokenTexts(self.service.tokenizer, self.request.decode, as_ids=as_ids)

    def _ids(self, each: AnswerEvent) -> dict[str, Any]:
        return {"token_ids": each.token_ids} if self.body.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.request.prompts[0].token_ids} if self.body.return_token_ids else {}

    def _usage(self, generation: Generation, answers: Sequence[Sequence[Part]]) -> dict[str, Any]:
        thoughts = ["".join(part.text for part in parts if isinstance(part, ReasoningPart)) for parts in answers]
        num_reasoning = sum(len(self.service.encode_plain(text)) for text in thoughts if text)
        usage = self.service.usage(generation.outputs)
        return as_usage(usage, is_predicted=bool(self.request.prediction), num_reasoning=num_reasoning)

    def _explained(self, generation: Generation) -> dict[str, Any]:
        if not self.body.explain:
            return {}
        return {"cache_explanation": as_explanation(generation.outputs[0].explanation, self.request.caller)}

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, Any] | None] | None:
        count = self.body.prompt_logprobs
        if count is None or output.prompt_logprobs is None:
            return None
        return as_prompt_logprobs(output.prompt_logprobs, count, self._texts)

    def _writer(self) -> Callable[..., bytes]:
        head = {
            "id": self.request.request_id,
            "object": "chat.completion.chunk",
            "created": int(self.service.wall_clock()),
            "model": self.request.adapter or self.service.config.model_name,
        }
        encode = msgspec.json.encode
        start = encode(head)[:-1] + b',"choices":['

        def write(choice: dict[str, Any] | None, **more: object) -> bytes:
            choices = b"" if choice is None else encode(choice)
            rest = encode(more)[1:-1]
            return event(start + choices + b"]" + (b"," + rest if rest else b"") + b"}")

        return write


def tokenize(service: Service, body: TokenizeRequest, caller: Caller) -> dict[str, Any]:
    """Tokenise a text or a conversation exactly as a completion request would. Raises ApiError."""
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt, a text, or messages, a conversation: one of them")
    if body.messages is not None:
        if body.add_special_tokens and service.encode(""):  # a tokenizer that adds none is asked for nothing
            raise ApiError(
                400, "add_special_tokens is for prompt: the chat template writes all", param="add_special_tokens"
            )
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        token_ids = list(service.chats.prepare(as_chat(chat), caller).token_ids)
    else:
        assert body.prompt is not None
        with_special = body.add_special_tokens is None or body.add_special_tokens
        token_ids = service.encode(body.prompt) if with_special else service.encode_plain(body.prompt)
    pieces = service.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": service.longest,
        "tokens": token_ids,
        "token_strs": None if pieces is None else list(map(str, pieces)),
    }


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """Turn token ids into text. Raises ApiError."""
    service.require_model(body.model)
    service.require_tokenizer()
    service.require_tokens(body.tokens, "tokens")
    return {"prompt": service.decode(body.tokens, keeps_special=True)}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Tell what clients need who render conversations themselves. Raises ApiError."""
    if not service.config.tells_tokenizer:
        raise ApiError(404, "this server does not tell its tokenizer: start it with tells_tokenizer", code="not_told")
    service.require_tokenizer()
    tokenizer = service.tokenizer
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **special,
        "model_max_length": service.longest,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }


def model_card(service: Service, name: str) -> dict[str, Any]:
    """Describe the model under one of its names, or an adapter of it."""
    folder = service.engine.facts.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "pagedkv",
        "max_model_len": service.longest,
        "root": service.config.model_name if folder is None else folder,
        "parent": None if folder is None else service.config.model_name,
    }


def models(service: Service) -> dict[str, Any]:
    """List the model that is served, under each of its names, and its adapters."""
    names = (*service.names, *service.engine.facts.adapters)
    return {"object": "list", "data": [model_card(service, name) for name in names]}
