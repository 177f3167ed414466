"""Service: the engine, its tokenizer, and what every protocol of the server shares."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeVar, final

from pagedkv.engine import Intent, RequestOutput, StepRecord
from pagedkv.engine.llm import plain_encoding
from pagedkv.errors import EngineError, QueueFullError
from pagedkv.server.access import Access
from pagedkv.server.answer_formats import Formats
from pagedkv.server.chat_prompts import ChatPrompts, KeptAnswers, longest_token, require_short
from pagedkv.server.config import ServerConfig, SlowCause
from pagedkv.server.engines import Route, ServedEngine
from pagedkv.server.errors import ApiError, as_api_error
from pagedkv.server.generation import Generation, GenerationRequest, PreparedPrompt
from pagedkv.server.parsing import AnswerParser, end_of_open_reasoning, parser_for
from pagedkv.server.usage import Usage, usage_of

__all__ = ["Served", "Service", "new_id"]

T = TypeVar("T")

LOG: Final = logging.getLogger("pagedkv.server")

LONGEST_RETRY_S: Final = 60
FIRST_SERVER_ERROR: Final = 500
MOST_KEPT_ANSWERS: Final = 4
LONG_NBYTES: Final = 16 * 2**10
"""Bodies of at least this size are tokenised outside the event loop, since that takes 10 ms or more."""
TOKENS_OF_BEGINNING: Final = 32
"""Tokens at a prompt's end from which the beginning of its answer is determined."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A request that has ended, for metrics and logs.

    Args:
        request: the request.
        arrived_s: time of arrival, in seconds of the Unix epoch.
        total_s: seconds from arrival to end.
        outputs: outputs of its prompts; empty where the engine did not accept the request.
        problem: why it failed; None if it was answered, or its client disconnected.
        has_left: whether its client disconnected before the end.
        routes: the replicas that served its prompts; empty where there are no replicas.
    """

    request: GenerationRequest
    arrived_s: float
    total_s: float
    outputs: Sequence[RequestOutput]
    problem: ApiError | None
    has_left: bool = False
    routes: Sequence[Route] = ()


@final
class Service:
    """Serves requests of all protocols with one engine.

    Args:
        engine: serves token ids.
        config: name, limits and parsers.
        access: identifies callers.
        tokenizer: for prompts and answers; None: prompts and answers are token ids alone.
        wall_clock: returns seconds of the Unix epoch.

    Attributes:
        is_draining: whether new requests are refused because the server is stopping.
        on_arrived: callbacks, called with each request that arrives.
        on_served: callbacks, called with each request that has ended.
        on_step: callbacks, called with the record of each step, in the engine's thread.
        on_slow: callbacks, called with the cause when a connection is ended because its client was too slow.
        on_refused: callbacks, called with the error of each refused request.
        under_way: requests accepted by the engine and not yet reported as ended, with their answers so far.
    """

    def __init__(
        self,
        engine: ServedEngine,
        config: ServerConfig,
        access: Access,
        *,
        tokenizer: Any = None,  # noqa: ANN401 - of transformers, or like it
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.config = config
        self.access = access
        self.tokenizer = tokenizer
        self.wall_clock = wall_clock
        self.is_draining = False
        self.on_arrived: list[Callable[[GenerationRequest], None]] = []
        self.on_served: list[Callable[[Served], None]] = []
        self.on_step: list[Callable[[StepRecord], None]] = []
        self.on_slow: list[Callable[[SlowCause], None]] = []
        self.created_s = int(wall_clock())
        self.on_refused: list[Callable[[ApiError], None]] = []
        self.under_way: dict[GenerationRequest, Generation] = {}
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="pagedkv texts")
        self._notes: set[asyncio.Task[None]] = set()
        self._queue_s = 1.0
        self.longest = engine.facts.max_tokens
        self.longest_text = self.longest * longest_token(tokenizer)
        self.chats = ChatPrompts(tokenizer, KeptAnswers(config.kept_tokens), self.longest_text)

    # Life

    def start(self) -> None:
        """Start the engine. Raises EngineError where it cannot serve."""
        self.engine.start(self.config.max_waiting, self._note_step)

    def _note_step(self, record: StepRecord) -> None:
        for callback in self.on_step:
            callback(record)

    async def stop(self) -> None:
        """End the engine, and all requests under way."""
        await self.engine.stop()
        await asyncio.gather(*self._notes)
        self._preparing.shutdown(wait=False, cancel_futures=True)

    # Requests

    def require_model(self, name: object) -> None:
        """Refuse a request for another model. Raises ApiError."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404,
                f"there is no model {str(name)[:100]!r} here: this server has {self.config.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str) -> list[int]:
        """Turn a text into token ids, with the special tokens that the tokenizer adds. Raises ApiError."""
        self.require_tokenizer()
        require_short(text, self.longest_text)
        return list(self.tokenizer.encode(text))

    def encode_plain(self, text: str) -> list[int]:
        """Turn a text into token ids without adding any. Raises ApiError."""
        self.require_tokenizer()
        require_short(text, self.longest_text)
        return list(plain_encoding(self.tokenizer)(text))

    def decode(self, token_ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Turn token ids into text. Without a tokenizer, the text is the ids, separated by blanks."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in token_ids)
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not keeps_special))

    def decoding(self, *, keeps_special: bool) -> Callable[[Sequence[int]], str]:
        """Return a function that decodes token ids, with or without special tokens. Markers of calls may be special."""
        return partial(self.decode, keeps_special=keeps_special)

    def parsers(self, tools: Sequence[Mapping[str, Any]], prompt: PreparedPrompt) -> Callable[[], AnswerParser]:
        """Return a function that makes the parser of one answer: of its reasoning, and of calls if tools are offered.

        Args:
            tools: offered tools.
            prompt: the prompt of the answer; its end shows whether reasoning has begun.
        """
        return partial(
            parser_for,
            self.config.tool_parser if tools else "none",
            self.tokenizer,
            tools=tools,
            reasoning=self.config.reasoning_parser,
            id_source=new_id,
            prompt=self._beginning(prompt),
        )

    def end_of_reasoning(self, prompt: PreparedPrompt) -> str | None:
        """Return the marker that ends an answer's reasoning; None without reasoning. Formats apply after the marker."""
        is_read = self.config.reasoning_parser != "none"
        return end_of_open_reasoning(self._beginning(prompt)) if is_read else None

    def _beginning(self, prompt: PreparedPrompt) -> str:
        return self.decode(prompt.token_ids[-TOKENS_OF_BEGINNING:], keeps_special=True)

    @cached_property
    def formats(self) -> Formats:
        """Makes token matchers for the formats and forced calls of requests."""
        return self.engine.formats(self.tokenizer, self.config.tool_parser)

    @property
    def uses_predictions(self) -> bool:
        """Whether the engine drafts tokens from a request's prediction."""
        return self.engine.facts.uses_predictions

    @property
    def vocabulary_size(self) -> int:
        """Columns of the model's logits."""
        return self.engine.facts.vocabulary_size

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve."""
        return self.engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted, and would be served now."""
        return self.engine.is_ready and not self.is_draining

    def require_tokenizer(self) -> None:
        """Refuse a request that needs a tokenizer where there is none. Raises ApiError."""
        if self.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: give prompts as token ids to /v1/completions")

    async def run_text_work(self, nbytes: int, make: Callable[[], T]) -> T:
        """Run ``make`` and return its value; for a long body in a thread, so that the event loop is not blocked.

        The thread runs one body at a time.

        Args:
            nbytes: size of the body.
            make: renders templates and tokenises texts, in some microseconds per character.
        """
        if nbytes < LONG_NBYTES:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._preparing, make)

    def require_place(self) -> None:
        """Refuse a request before anything of it is read, if the queue is full. Raises ApiError."""
        if self.engine.is_full:
            raise self.as_api_error(QueueFullError(f"{self.config.max_waiting} requests wait, and no more may"))

    async def begin(self, request: GenerationRequest) -> Generation:
        """Submit a request to the engine; return its answers under way once the engine has accepted it.

        Raises:
            ApiError: the request cannot be served, or not now.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=1)
        for prompt in request.prompts:
            self._require_room(len(prompt.token_ids))
        num_answers = len(request.prompts) * request.params.n
        if num_answers > self.config.max_answers:
            raise ApiError(
                400, f"{num_answers} answers are requested, and at most {self.config.max_answers} are allowed"
            )
        intent = self._intent(request)
        streams = [
            self.engine.generate(prompt.token_ids, request.params, intent=intent, deadline_s=self._deadline_s(request))
            for prompt in request.prompts
        ]
        generation = Generation(request, streams)
        try:
            for stream in streams:
                await stream.accepted()
        except BaseException:
            await generation.aclose()
            raise
        return generation

    def keep_answer(self, generation: Generation, index: int, message: Mapping[str, Any]) -> None:
        """Keep an answer's tokens for the next turn of its conversation.

        An answer that a stop text ended is not kept, since its tokens include the stop text and the client's text does
        not. Of many answers to a prompt only the first :data:`MOST_KEPT_ANSWERS` are kept.

        Args:
            generation: under way or ended.
            index: index of the answer.
            message: the message that the client got.
        """
        writer = generation.writers[index]
        if not writer.is_cut and index < MOST_KEPT_ANSWERS:
            tenant = generation.request.caller.tenant
            self.chats.keep(generation.request.prompts[0], message, writer.token_ids, tenant)

    def note_arrived(self, request: GenerationRequest) -> None:
        """Report to logs a request that has arrived."""
        for callback in self.on_arrived:
            callback(request)

    def routes(self, generation: Generation) -> list[Route]:
        """Return the replicas that serve a request's prompts; empty where there are no replicas."""
        found = [self.engine.route_of(stream) for stream in generation.streams]
        return [route for route in found if route is not None]

    def note_served(  # noqa: PLR0913 - the fields of Served, by keywords
        self,
        request: GenerationRequest,
        arrived_s: float,
        outputs: Sequence[RequestOutput],
        *,
        problem: ApiError | None,
        has_left: bool = False,
        routes: Sequence[Route] = (),
    ) -> None:
        """Report to metrics and logs a request that has ended."""
        self.under_way.pop(request, None)
        for output in outputs:
            if output.queue_seconds is not None:
                self._queue_s += 0.1 * (output.queue_seconds - self._queue_s)
        served = Served(request, arrived_s, self.wall_clock() - arrived_s, outputs, problem, has_left, routes)
        for callback in self.on_served:
            try:
                callback(served)
            except OSError as failure:  # a full disk must not fail a computed answer
                LOG.error("a request was not logged: %s", failure)  # noqa: TRY400 - the message has the cause

    def num_so_far(self, request: GenerationRequest) -> int:
        """Return the number of tokens of a request's longest answer while it is under way; else 0."""
        return self.under_way[request].num_generated if request in self.under_way else 0

    def note_later(self, note: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that reports a request whose end is under way; :meth:`stop` waits for it."""
        task = asyncio.ensure_future(note)
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    def note_refused(self, problem: ApiError) -> None:
        """Report to metrics a request that was refused before the engine computed anything for it."""
        for callback in self.on_refused:
            callback(problem)

    def note_slow(self, cause: SlowCause) -> None:
        """Report to metrics a connection that was ended because its client was too slow."""
        for callback in self.on_slow:
            callback(cause)

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Count the tokens of a request that has ended."""
        return usage_of(outputs, self.engine.facts)

    def as_api_error(self, problem: Exception) -> ApiError:
        """Translate an error. For a full queue, the client may retry after about the time that requests wait."""
        error = as_api_error(problem, retry_after_s=min(LONGEST_RETRY_S, max(1, math.ceil(self._queue_s))))
        if error.status >= FIRST_SERVER_ERROR and error is not problem:
            says_all = isinstance(problem, EngineError) and problem.__cause__ is None  # of another process
            LOG.error("a request failed: %s", problem, exc_info=None if says_all else problem)
        return error

    def _intent(self, request: GenerationRequest) -> Intent:
        """Return the intent of a request; its tenant and salt come from the caller alone."""
        tenant = request.caller.tenant if request.caller.tenant in self.engine.facts.tenants else None
        return Intent(
            tenant=tenant,
            salt=request.caller.salt,
            priority=request.priority,
            breakpoints=request.breakpoints,
            prediction=request.prediction,
        )

    def _deadline_s(self, request: GenerationRequest) -> float | None:
        limits = [limit for limit in (request.deadline_s, self.config.deadline_s) if limit is not None]
        return min(limits) if limits else None

    def _require_room(self, num_tokens: int) -> None:
        if num_tokens >= self.longest:
            raise ApiError(
                400,
                f"the prompt has {num_tokens:,} tokens, and the longest sequence {self.longest:,}, answer included",
                param="messages",
                code="context_length_exceeded",
            )


def new_id(prefix: str) -> str:
    """Make a unique identity."""
    return f"{prefix}{uuid.uuid4().hex}"
