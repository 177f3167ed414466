"""``/v1/completions``: continues texts or token ids, whole or streamed; with ``echo``, behind their prompts.

Log-probabilities are those of answers, and with ``echo`` or ``prompt_logprobs`` those of prompts. For these the engine
computes the whole prompt, cached or not.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from pagedkv.engine import RequestOutput, TokenLogprobs
from pagedkv.server.config import Caller
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest, PreparedPrompt, as_explanation
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.openai.answers import as_prompt_logprobs, as_stop_reason, as_usage
from pagedkv.server.openai.completions import UsageSoFar, limits_of, require_few_logprobs, stream_options_of
from pagedkv.server.openai.requests import (
    CompletionRequest,
    PromptFields,
    PromptInput,
    answer_format,
    as_params,
    hints_of,
    least_tokens,
    require_consistent,
    require_few,
    truncated,
)
from pagedkv.server.openai.token_texts import LEAST_LOGPROB, TokenTexts
from pagedkv.server.parsing import PlainParser, TextPart
from pagedkv.server.service import DONE, Exchange, Service, event, new_id

Columns: TypeAlias = dict[str, list[Any]]
"""Log-probabilities in the form of text completions, by column."""
NOT_ASKED: Final = MappingProxyType({"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None})
"""Fields of whole answers that vLLM has in any case."""
DEFAULT_MAX_TOKENS: Final = 16
"""Most tokens of an answer where a request sets none: OpenAI's default for this path."""


async def complete_text(service: Service, body: CompletionRequest, caller: Caller, receive: Receive) -> Response:
    """Continue texts or token ids.

    Raises:
        ApiError: the prompts cannot be continued.
        ClientGoneError: the client has disconnected.
    """
    service.require_model(body.model)
    require_consistent(body)
    _refuse_unserved(body)
    read = partial(prompts_of, service, body.prompt, body, most=service.config.max_prompts)
    prompts = await service.run_text_work(body.nbytes, read)
    of_prompts = _num_prompt_logprobs(body)
    require_few_logprobs(prompts, of_prompts)
    held = service.formats.matcher(answer_format(body), least=least_tokens(body))
    processors, bad_words = limits_of(service, body, held)
    request = GenerationRequest(
        "/v1/completions",
        new_id("cmpl-"),
        caller,
        prompts,
        as_params(
            body,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=of_prompts,
            processors=processors,
            bad_words=bad_words,
        ),
        partial(service.decode, keeps_special=body.skip_special_tokens is False),
        PlainParser,
        body.deadline_s,
        hints_of(body, caller, prompts),
        keeps_stop=bool(body.include_stop_str_in_output),
        session=body.session_id,
        adapter=service.adapter_named(body.model),
    )
    exchange = Exchange(service, request, receive, body.headers)
    answer = TextCompletion(service, body, request)
    if body.stream:
        return await exchange.streamed(answer.chunks, lambda problem: event(msgspec.json.encode(problem.as_openai())))
    return json_response(await exchange.whole(answer.whole), headers=exchange.headers)


@final
@dataclass(frozen=True, slots=True)
class TextCompletion:
    """Writes the answers to one request.

    With ``max_tokens`` 0 the engine computes one token, since a prompt is only computed for a token that follows it;
    that token is left out of the answer. Log-probabilities of prompts are known once their answers have ended, so a
    stream that repeats them begins then.

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
        texts = self._texts
        return {
            **self._head(),
            "choices": [
                {
                    **NOT_ASKED,
                    **self._choice(each, _Written(texts), self._output(generation, each)),
                    **self._prompt_logprobs(generation, each),
                }
                for each in answers
            ],
            "usage": self._usage(generation),
            **generation.hints_told,
            **self._explained(generation.outputs),
        }

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Write events of new content, and one with usage if requested."""
        write, texts = self._writer(), self._texts
        options = stream_options_of(self.service, self.body)
        so_far = UsageSoFar(options, self.request)
        written = [_Written(texts) for _ in generation.writers]
        async for each in self._events(generation):
            so_far.num_generated += len(each.token_ids) if self.body.max_tokens != 0 else 0
            choice = self._choice(each, written[each.index], self._output(generation, each))
            if choice["text"] or each.finish_reason is not None or each.logprobs or self.body.return_token_ids:
                yield write([choice], **so_far.told())
        more = {**generation.hints_told, **self._explained(generation.outputs)}
        if options.include_usage:
            more = {"usage": self._usage(generation), **more}
        if more:
            yield write([], **more)
        yield DONE

    async def _events(self, generation: Generation) -> AsyncGenerator[AnswerEvent, None]:
        if self.request.params.prompt_logprobs is not None:
            for each in await generation.finished():
                yield each
            return
        async for each in generation.events():
            yield each

    def _choice(self, each: AnswerEvent, written: "_Written", output: RequestOutput | None) -> dict[str, Any]:
        """Write new content of an answer; with ``echo``, behind its prompt if nothing of it is written yet."""
        text, count, ids = "", self.body.logprobs, self._ids(each, is_first=not written.has_begun)
        told: Columns | None = None if count is None else written.answer((), count)
        if self.body.echo and not written.has_begun:
            token_ids = self.request.prompts[each.index // self.request.params.n].token_ids
            text = self.service.decode(token_ids)
            if count is not None and output is not None and output.prompt_logprobs is not None:
                told = written.prompt(text, token_ids, output.prompt_logprobs, count)
        written.has_begun = True
        if self.body.max_tokens != 0:
            text += "".join(part.text for part in each.parts if isinstance(part, TextPart))
            if count is not None and told is not None:
                answer = written.answer(each.logprobs or (), max(count, len(self.body.logprob_token_ids or ())))
                told = {name: values + answer[name] for name, values in told.items()}
        return {
            "index": each.index,
            "text": text,
            "logprobs": told,
            "finish_reason": each.finish_reason if self.body.max_tokens != 0 else "length",
            "stop_reason": as_stop_reason(each.stop, self.body) if self.body.max_tokens != 0 else None,
            **ids,
        }

    def _ids(self, each: AnswerEvent, *, is_first: bool) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        prompt = self.request.prompts[each.index // self.request.params.n]
        told = {"prompt_token_ids": list(prompt.token_ids)} if is_first else {}
        return {**told, "token_ids": each.token_ids if self.body.max_tokens != 0 else ()}

    def _output(self, generation: Generation, each: AnswerEvent) -> RequestOutput | None:
        """Return the output of an answer's prompt; None while it is under way."""
        return generation.outputs[each.index // self.request.params.n] if generation.outputs else None

    def _prompt_logprobs(self, generation: Generation, each: AnswerEvent) -> dict[str, Any]:
        output, count = self._output(generation, each), self.body.prompt_logprobs
        if count is None or output is None or output.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": as_prompt_logprobs(output.prompt_logprobs, count, self._texts)}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage = self.service.usage(generation.outputs)
        return as_usage(replace(usage, num_generated=0) if self.body.max_tokens == 0 else usage)

    @property
    def _texts(self) -> TokenTexts:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return TokenTexts(self.service.tokenizer, self.request.decode, as_ids=as_ids)

    def _explained(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        if not self.body.explain:
            return {}
        return {"cache_explanations": [as_explanation(output.explanation, self.request.caller) for output in outputs]}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.request.request_id,
            "object": "text_completion",
            "created": int(self.service.wall_clock()),
            "model": self.request.adapter or self.service.config.model_name,
        }

    def _writer(self) -> Callable[..., bytes]:
        head = self._head()

        def write(choices: list[dict[str, Any]], **more: object) -> bytes:
            return event(msgspec.json.encode({**head, "choices": choices, **more}))

        return write


@final
class _Written:
    """What is written of one answer: the characters of its tokens so far; a token that completes none begins there.

    Args:
        texts: of tokens.

    Attributes:
        has_begun: whether anything is written.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._text = texts.new_text()
        self._num_characters = 0
        self.has_begun = False

    def prompt(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int
    ) -> Columns:
        """Return log-probabilities of a prompt's tokens, with ``count`` likeliest tokens each; an answer follows."""
        columns = self._columns(token_ids, logprobs, count)
        self._text, self._num_characters = self._texts.new_text(), len(text)
        return columns

    def answer(self, logprobs: Sequence[TokenLogprobs], count: int) -> Columns:
        """Return log-probabilities of an answer's tokens, with ``count`` further tokens each."""
        return self._columns([each.token_id for each in logprobs], logprobs, count)

    def _columns(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int) -> Columns:
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._text.append(token_id))
        return {
            "tokens": list(map(self._texts.text_of, token_ids)),
            "token_logprobs": [None if each is None else max(each.logprob, LEAST_LOGPROB) for each in logprobs],
            "top_logprobs": [None if each is None else self._texts.by_text(each, count) for each in logprobs],
            "text_offset": offsets,
        }


def prompts_of(
    service: Service, given: PromptInput, fields: PromptFields, *, most: int, param: str = "prompt"
) -> list[PreparedPrompt]:
    """Return the prompts of a request as token ids, shortened if it asks for that.

    Args:
        service: has the tokenizer.
        given: a text, token ids, or several of either.
        fields: how they are read.
        most: prompts of one request.
        param: the field that has them.

    Raises:
        ApiError: there is none, an empty one, or there are too many.
    """
    encode = service.encode_plain if fields.add_special_tokens is False else service.encode
    if not given and not isinstance(given, str):
        raise ApiError(400, f"{param} is empty: give a text, token ids, or lists of them", param=param)
    if isinstance(given, str):
        several: Sequence[str | Sequence[int]] = [given]
    elif isinstance(given[0], int):
        several = [given]
    else:
        several = cast("list[str | list[int]]", given)
    require_few(several, most, param, "prompts")
    prompts = [encode(each) if isinstance(each, str) else each for each in several]
    if not isinstance(given, str) and not all(len(each) for each in prompts):
        raise ApiError(400, f"{param} has an empty list of token ids", param=param)
    for each in prompts:
        service.require_tokens(each, param)
    return [PreparedPrompt(truncated(each, fields, service.longest)) for each in prompts]


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many likeliest tokens are told of each token of a prompt; None: nothing is told."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in asked if count is not None), default=None)


def _refuse_unserved(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "this server does not insert text before a suffix: leave suffix out", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of must equal n: this server does not rank answers", param="best_of")
    if body.max_tokens == 0 and body.logprob_token_ids:
        raise ApiError(400, "logprob_token_ids are told of answers, and max_tokens is 0", param="logprob_token_ids")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(
            400, "max_tokens is 0, which needs echo or prompt_logprobs: else there is no answer", param="max_tokens"
        )
