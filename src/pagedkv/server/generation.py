"""The answers to one HTTP request of any protocol, while they are generated, and the tokens that they took.

A protocol makes a :class:`GenerationRequest` and reads all :class:`AnswerEvent` values. Then :attr:`Generation.outputs`
has the engine's outputs, with tokens and receipts. An :class:`AnswerWriter` turns the tokens of one answer into text,
reasoning and tool calls while they arrive::

    token ids -> AnswerText -> text -> StopCut -> AnswerParser -> parts
                 (whole characters)    (no stop texts)  (no markers)

Text that may begin a stop text is held back until it is certain, so that sent text is never taken back.

:class:`Usage` tells where the tokens of a request's prompts came from, counted once for all answers to a prompt:
``num_prompt = num_read + num_written + num_plain``, exactly, by what each prompt hit at its first admission. Tokens
that are recomputed after a preemption do not count as cached.

A client may also ask where its prompt's hit ended and why: it gets the explanation without other tenants' content.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, final

from pagedkv.contract.answers import Explanation, MissCause
from pagedkv.engine import AnswerStream, Breakpoint, RequestOutput, SamplingParams, TokenLogprobs, TokenUpdate
from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.sampling import AnswerText
from pagedkv.server.cache_hints import CacheHints
from pagedkv.server.config import Caller
from pagedkv.server.engines import EngineFacts
from pagedkv.server.http import ApiError
from pagedkv.server.parsing import AnswerParser, CallBegin, Part, TextPart


@final
class StopCut:
    """The text of one answer before its first stop text.

    Args:
        stops: texts that end the answer.
        keeps_stop: whether the answer includes the text that ends it.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> str:
        """Take more text; return the text that certainly belongs to the answer. O(text x stops)."""
        if not self._stops or self._is_over:
            return "" if self._is_over else text
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self._is_over = True
            place, stop = min(found)
            return self._release(place + len(stop) if self._keeps_stop else place)
        return self._release(len(self._held) - self._num_possible())

    def finish(self) -> str:
        """Return the text that is held back, now that no text follows."""
        return "" if self._is_over else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _num_possible(self) -> int:
        """Count the last characters that may begin a stop text."""
        longest = max(map(len, self._stops)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-count:]
            if any(stop.startswith(end) for stop in self._stops):
                return count
        return 0


@final
class AnswerWriter:
    """Writes one answer.

    Args:
        decode: turns token ids into text.
        stops: texts that end the answer and are not part of it.
        parser: finds reasoning and tool calls in the text.
        keeps_stop: whether the answer includes the text that ends it.

    Attributes:
        token_ids: the answer's tokens, without the token that ended it.
        has_calls: whether the answer calls a tool.
        is_cut: whether a stop text ended the answer; ``token_ids`` then includes the stop text's tokens.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        parser: AnswerParser,
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._text = AnswerText(decode)
        self._cut = StopCut(stops, keeps_stop=keeps_stop)
        self._parser = parser
        self.token_ids: list[int] = []
        self.has_calls = False
        self.is_cut = False

    def take(self, update: TokenUpdate) -> list[Part]:
        """Take new tokens; return the parts that are certain now. With the last tokens, return all remaining parts."""
        ended_by_token = isinstance(update.stop, int)
        self.is_cut = isinstance(update.stop, str)
        token_ids = update.token_ids[:-1] if ended_by_token else update.token_ids
        self.token_ids += token_ids
        text = self._text.extend(token_ids)
        if update.finish_reason is None:
            return self._noted(self._parser.feed(self._cut.feed(text)))
        text = self._cut.feed(text + self._text.finish()) + self._cut.finish()
        return self._noted([*self._parser.feed(text), *self._parser.finish()])

    def _noted(self, parts: list[Part]) -> list[Part]:
        self.has_calls |= any(isinstance(part, CallBegin) for part in parts)
        return [part for part in parts if not isinstance(part, TextPart) or part.text]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt in the form that the engine takes.

    Args:
        token_ids: tokens of the prompt.
        conversation: digest of the conversation (:mod:`.chat_prompts`); None: the prompt is not a conversation.
        num_kept_tokens: leading tokens that were taken from the kept tokens of the last answer.
    """

    token_ids: Sequence[int]
    conversation: bytes | None = None
    num_kept_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A client's request in the engine's terms: what a protocol gives to the service.

    Args:
        endpoint: the path of the HTTP request.
        request_id: identity of the response.
        caller: the sender of the request.
        prompts: the prompts, at least one.
        params: sampling parameters of every prompt.
        decode: turns token ids into text.
        new_parser: makes a parser that finds reasoning and tool calls in an answer.
        deadline_s: seconds from submission to the deadline; None: no deadline.
        hints: what the client says about the cache of its prompt and about its priority.
        prediction: the client's prediction of the answer, as token ids.
        keeps_stop: whether an answer includes the stop text that ends it.
        session: the client's name of the session that it belongs to; None: of none.
        adapter: the adapter that the answers are computed with; None: none.
    """

    endpoint: str
    request_id: str
    caller: Caller
    prompts: Sequence[PreparedPrompt]
    params: SamplingParams
    decode: Callable[[Sequence[int]], str]
    new_parser: Callable[[], AnswerParser]
    deadline_s: float | None = None
    hints: CacheHints = field(default_factory=CacheHints)
    prediction: tuple[int, ...] = ()
    keeps_stop: bool = False
    session: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """New content of one answer.

    Args:
        index: index of the answer; those of the first prompt come first.
        parts: new text, reasoning and calls that later tokens cannot change.
        token_ids: new tokens.
        logprobs: log-probabilities of each new token, if requested.
        finish_reason: why the answer ended; set in its last event.
        stop: the token id or text that ended it.
    """

    index: int
    parts: Sequence[Part]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop: int | str | None = None


@final
@dataclass(slots=True, eq=False)
class Generation:
    """Answers under way.

    Args:
        request: the request.
        streams: streams of the engine, one for each prompt.
        writers: a writer for each answer, those of the first prompt first.
        outputs: the engine's outputs, one for each prompt, once :meth:`events` or :meth:`finished` has ended.
    """

    request: GenerationRequest
    streams: Sequence[AnswerStream]
    writers: Sequence[AnswerWriter] = field(init=False)
    outputs: Sequence[RequestOutput] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Make a writer for each answer."""
        request = self.request
        self.writers = tuple(
            AnswerWriter(request.decode, request.params.stop, request.new_parser(), keeps_stop=request.keeps_stop)
            for _ in range(len(self.streams) * request.params.n)
        )

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield new content until all answers have ended. Closing the generator ends the requests.

        Raises:
            ApiError: an answer ended before it was complete, or the engine failed.
        """
        try:
            if len(self.streams) == 1:
                while updates := await self.streams[0].take():
                    for each in joined_updates(updates):
                        yield self._event(0, each)
            else:
                async for place, update in _merged(self.streams):
                    yield self._event(place, update)
            self.outputs = [await stream.output() for stream in self.streams]
        finally:
            await self.aclose()

    async def finished(self) -> list[AnswerEvent]:
        """Wait for all answers; return each as one event. Raises as :meth:`events`.

        Tokens are read once, at the end: waking a task for each token would cost 20 us per token.
        """
        try:
            if len(self.streams) == 1:
                self.outputs = [await _answered(self.streams[0])]
            else:
                self.outputs = await asyncio.gather(*map(_answered, self.streams))
        finally:
            await self.aclose()
        return [
            self._event(place, update)
            for place, stream in enumerate(self.streams)
            for update in sorted(joined_updates(stream.taken()), key=lambda update: update.index)
        ]

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended all answers."""
        return all(stream.is_over for stream in self.streams)

    @property
    def results(self) -> list[RequestOutput]:
        """Outputs of the prompts whose answers have ended, also those that were aborted."""
        return [stream.result for stream in self.streams if stream.result is not None]

    @property
    def num_generated(self) -> int:
        """Number of tokens of the longest answer so far. O(answers + unread updates)."""
        read = max((len(writer.token_ids) for writer in self.writers), default=0)
        return read + max((stream.num_unread for stream in self.streams), default=0)

    @property
    def leased(self) -> tuple[Breakpoint, ...]:
        """Breakpoints of an ended request that became leases; the others were refused."""
        taken = self.outputs[0].breakpoint_tokens if self.outputs else ()
        return tuple(
            each for each, num_tokens in zip(self.request.hints.breakpoints, taken, strict=False) if num_tokens
        )

    @property
    def leases_refused(self) -> dict[str, int]:
        """The response's field that counts the refused breakpoints; empty if all became leases."""
        num_refused = len(self.request.hints.breakpoints) - len(self.leased)
        return {"cache_leases_refused": num_refused} if num_refused else {}

    @property
    def hints_told(self) -> dict[str, Any]:
        """The response's field that tells what became of each hint; empty without hints."""
        return self.request.hints.told(self.outputs)

    async def over(self) -> None:
        """Wait until the engine has ended all answers, with or without errors."""
        for stream in self.streams:
            with suppress(Exception):
                await stream.output()

    async def aclose(self) -> None:
        """End the answers still under way; their blocks are free within a step."""
        for stream in self.streams:
            await stream.aclose()

    def _event(self, place: int, update: TokenUpdate) -> AnswerEvent:
        require_answered(update.finish_reason)
        index = place * self.request.params.n + update.index
        parts = self.writers[index].take(update)
        return AnswerEvent(index, parts, update.token_ids, update.logprobs, update.finish_reason, update.stop)


def require_answered(reason: FinishReason | None) -> None:
    """Raise an ApiError for an answer that ended before it was complete."""
    match reason:
        case "deadline":
            raise ApiError(504, "the deadline passed before the answer was complete", code="deadline")
        case "rejected":
            raise ApiError(400, "the request does not fit into the memory of the server, even alone", code="too_large")
        case "failed":
            raise ApiError(500, "the sampling of this request failed", code="sampling_failed")
        case "aborted":
            raise ApiError(503, "the server ended the request", code="aborted")
        case _:
            return


async def _merged(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, TokenUpdate], None]:
    """Yield the updates of several streams as they arrive."""
    waiting = {asyncio.ensure_future(stream.take()): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                place = waiting.pop(each)
                if updates := each.result():
                    waiting[asyncio.ensure_future(streams[place].take())] = place
                for update in joined_updates(updates):
                    yield place, update
    finally:
        for each in waiting:
            each.cancel()


async def _answered(stream: AnswerStream) -> RequestOutput:
    """Wait for the end of a prompt's answers. Raises ApiError if one ended before it was complete."""
    output = await stream.output()
    for completion in output.completions:
        require_answered(completion.finish_reason)
    return output


def joined_updates(updates: Sequence[TokenUpdate]) -> Sequence[TokenUpdate]:
    """Join the updates of each answer, so that a slow reader gets one piece of text. O(updates + tokens)."""
    if len(updates) == 1:
        return updates
    by_answer: dict[int, list[TokenUpdate]] = {}
    for each in updates:
        by_answer.setdefault(each.index, []).append(each)
    return [each[0] if len(each) == 1 else _joined(each) for each in by_answer.values()]


def _joined(updates: Sequence[TokenUpdate]) -> TokenUpdate:
    last = updates[-1]
    logprobs = [each.logprobs for each in updates if each.logprobs is not None]
    return TokenUpdate(
        last.prompt,
        last.index,
        tuple(token for each in updates for token in each.token_ids),
        last.finish_reason,
        tuple(one for each in logprobs for one in each) if logprobs else None,
        last.stop,
    )


REPORTED_AS_NEVER_STORED: Final = frozenset(
    {
        MissCause.OTHER_SALT,
        MissCause.CHANGED_TOKENS,
        MissCause.OTHER_ADAPTER,
        MissCause.OTHER_MEDIA,
        MissCause.NEVER_STORED,
        MissCause.UNKNOWN,
    }
)
"""Causes that may depend on other tenants' cached content, where no token of the prompt hits."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Args:
        num_prompt: tokens of its prompts.
        num_read: prompt tokens that were cached.
        num_written: prompt tokens that the request computed and later prompts can hit: those of whole blocks.
        num_generated: tokens of its answers, including those that ended them.
        num_drafted: draft tokens that were computed for its answers.
        num_accepted: draft tokens that were accepted.
        num_loaded: of ``num_read``, tokens that tiers brought, by medium; empty if none did.
    """

    num_prompt: int
    num_read: int
    num_written: int
    num_generated: int
    num_drafted: int = 0
    num_accepted: int = 0
    num_loaded: Mapping[str, int] = field(default_factory=dict)

    @property
    def read_by_medium(self) -> dict[str, int]:
        """The read tokens by medium, with the device; they add up to ``num_read``. Empty if no tier brought any."""
        return {"device": self.num_read - sum(self.num_loaded.values()), **self.num_loaded} if self.num_loaded else {}

    @property
    def num_plain(self) -> int:
        """Prompt tokens that were computed and that no later prompt can hit."""
        return self.num_prompt - self.num_read - self.num_written

    @property
    def num_total(self) -> int:
        """Tokens of prompts and answers."""
        return self.num_prompt + self.num_generated


def usage_of(outputs: Sequence[RequestOutput], facts: EngineFacts) -> Usage:
    """Count the tokens of a request that has ended.

    Args:
        outputs: outputs of its prompts.
        facts: of the engine.
    """
    num_prompt = num_read = num_written = num_generated = 0
    for output in outputs:
        length = len(output.prompt_token_ids)
        whole = _num_hittable(length, facts)
        num_prompt += length
        num_read += output.num_cached_tokens
        num_written += max(0, whole - output.num_cached_tokens)
        num_generated += sum(len(completion.token_ids) for completion in output.completions)
    num_loaded: Counter[str] = Counter()
    for output in outputs:
        num_loaded.update(output.num_loaded_tokens)
    num_drafted = sum(output.num_drafted_tokens for output in outputs)
    num_accepted = sum(output.num_accepted_tokens for output in outputs)
    return Usage(num_prompt, num_read, num_written, num_generated, num_drafted, num_accepted, dict(num_loaded))


def _num_hittable(length: int, facts: EngineFacts) -> int:
    """Return how many leading tokens of a computed prompt a longer one can hit.

    Recurrent states are kept at the ends of intervals, and before the last token of the prompt.
    """
    if not facts.is_caching:
        return 0
    at_end = (length - 1) // facts.alignment * facts.alignment
    return max(at_end, length // facts.block_size * facts.block_size)


def as_explanation(explanation: Explanation | None, caller: Caller) -> dict[str, Any] | None:
    """Return where a prompt's hit ended and why, without revealing other tenants' content.

    The answer never contains the cached token that differs from the prompt's. Where no token hits, all causes that
    compare the prompt with other content, and those of content without a record, are reported as "never stored" at
    position 0.
    """
    if explanation is None:
        return None
    cause = explanation.cause
    if not caller.has_no_tenant and explanation.num_hit_tokens == 0 and cause in REPORTED_AS_NEVER_STORED:
        return {
            "num_prompt_tokens": explanation.num_tokens,
            "num_hit_tokens": 0,
            "cause": MissCause.NEVER_STORED.value,
            "position": 0,
        }
    return {
        "num_prompt_tokens": explanation.num_tokens,
        "num_hit_tokens": explanation.num_hit_tokens,
        "cause": cause.value,
        "position": explanation.position,
    }
