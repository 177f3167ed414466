"""``POST /v1/completions``: continuations of texts or token ids, whole or streamed."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.engine import RequestOutput, TokenLogprobs
from pagedkv.server.access import Caller
from pagedkv.server.errors import ApiError, json_response
from pagedkv.server.exchange import DONE, Exchange, event
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest, PreparedPrompt
from pagedkv.server.openai.answers import as_usage
from pagedkv.server.openai.requests import CompletionRequest, as_params, as_priority, refuse_unserved
from pagedkv.server.parsing import PlainParser, TextPart
from pagedkv.server.service import Service, new_id
from pagedkv.server.usage import as_explanation

__all__ = ["TextCompletion", "complete_text"]

LEAST_LOGPROB: Final = -9999.0
"""Written for a token of probability 0, since JSON has no infinity."""
DEFAULT_MAX_TOKENS: Final = 16
"""Most tokens of an answer where a request sets none: OpenAI's default for this path."""


async def complete_text(service: Service, body: CompletionRequest, caller: Caller, receive: Receive) -> Response:
    """Continue texts or token ids.

    Raises:
        ApiError: the prompts cannot be continued.
        ClientGoneError: the client has disconnected.
    """
    service.require_model(body.model)
    refuse_unserved(body)
    _refuse_unserved(body)
    prompts = await service.run_text_work(body.nbytes, partial(_prompts, service, body))
    request = GenerationRequest(
        "/v1/completions",
        new_id("cmpl-"),
        caller,
        prompts,
        as_params(body, max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS, logprobs=body.logprobs),
        service.decoding(keeps_special=False),
        PlainParser,
        body.deadline_s,
        as_priority(body, caller),
    )
    exchange = Exchange(service, request, receive)
    answer = TextCompletion(service, body, request)
    if body.stream:
        return await exchange.streamed(answer.chunks, lambda problem: event(msgspec.json.encode(problem.as_openai())))
    return json_response(await exchange.whole(answer.whole), headers=exchange.headers)


@final
@dataclass(frozen=True, slots=True)
class TextCompletion:
    """Writes the answers to one request.

    Args:
        service: has the model's name and counts usage.
        body: the client's request.
        request: the engine's request.
    """

    service: Service
    body: CompletionRequest
    request: GenerationRequest

    def whole(self, generation: Generation, answers: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Write a response with all answers."""
        return {
            **self._head(),
            "choices": [self._choice(each, self._echo(each.index), _TextOffset()) for each in answers],
            "usage": as_usage(self.service.usage(generation.outputs)),
            **self._explained(generation.outputs),
        }

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Write events of new content, and one with usage if requested."""
        write = self._writer()
        offsets = [_TextOffset() for _ in generation.writers]
        echoes = {index: self._echo(index) for index in range(len(generation.writers))} if self.body.echo else {}
        async for each in generation.events():
            choice = self._choice(each, echoes.pop(each.index, ""), offsets[each.index])
            if choice["text"] or each.finish_reason is not None or each.logprobs:
                yield write([choice])
        more = self._explained(generation.outputs)
        options = self.body.stream_options
        if options is not None and options.include_usage:
            more = {"usage": as_usage(self.service.usage(generation.outputs)), **more}
        if more:
            yield write([], **more)
        yield DONE

    def _choice(self, each: AnswerEvent, echo: str, offset: "_TextOffset") -> dict[str, Any]:
        text = echo + "".join(part.text for part in each.parts if isinstance(part, TextPart))
        logprobs = None if each.logprobs is None else offset.logprobs(each.logprobs, self.request.decode)
        return {"index": each.index, "text": text, "logprobs": logprobs, "finish_reason": each.finish_reason}

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        return self.service.decode(self.request.prompts[index // self.request.params.n].token_ids)

    def _explained(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        if not self.body.explain:
            return {}
        return {"cache_explanations": [as_explanation(output.explanation, self.request.caller) for output in outputs]}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.request.request_id,
            "object": "text_completion",
            "created": int(self.service.wall_clock()),
            "model": self.service.config.model_name,
        }

    def _writer(self) -> Callable[..., bytes]:
        head = self._head()

        def write(choices: list[dict[str, Any]], **more: object) -> bytes:
            return event(msgspec.json.encode({**head, "choices": choices, **more}))

        return write


@final
class _TextOffset:
    """Counts the characters of the answer's tokens so far."""

    def __init__(self) -> None:
        self._num_characters = 0

    def logprobs(self, logprobs: Sequence[TokenLogprobs], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return log-probabilities in the form of text completions."""
        tokens = [decode([each.token_id]) for each in logprobs]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._num_characters)
            self._num_characters += len(token)
        top = [{decode([token]): max(logprob, LEAST_LOGPROB) for token, logprob in each.top} for each in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST_LOGPROB) for each in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _prompts(service: Service, body: CompletionRequest) -> list[PreparedPrompt]:
    given = body.prompt
    if isinstance(given, str):
        return [PreparedPrompt(service.encode(given))]
    if not given:
        raise ApiError(400, "prompt is empty: give a text, token ids, or lists of them", param="prompt")
    if isinstance(given[0], int):
        return [PreparedPrompt(given)]
    if len(given) > service.config.max_prompts:
        raise ApiError(
            400,
            f"prompt has {len(given)} prompts, and at most {service.config.max_prompts} are allowed in one request",
            param="prompt",
        )
    prompts = [PreparedPrompt(service.encode(each) if isinstance(each, str) else each) for each in given]
    if not all(len(each.token_ids) for each in prompts):
        raise ApiError(400, "prompt has an empty list of token ids", param="prompt")
    return prompts


def _refuse_unserved(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "this server does not insert text before a suffix: leave suffix out", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of must equal n: this server does not rank answers", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo and logprobs are not served together: leave one out", param="echo")
