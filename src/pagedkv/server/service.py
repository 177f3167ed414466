"""Service: the engine, its tokenizer, what all protocols share; Exchange: one request from arrival to its answer's end.

Metrics and logs count each request once. A request whose client has disconnected ends within a step. An
EventStream sends server-sent events to one client as they are made. A slow client delays only its own events: its
stream waits until it reads, and the tokens that arrive meanwhile are sent together.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final, TypeVar, final

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedkv.connections import SlowCause
from pagedkv.engine import Intent, RequestOutput, StepRecord
from pagedkv.engine.llm import plain_encoding
from pagedkv.errors import ConfigurationError, EngineError, QueueFullError
from pagedkv.probe import compat
from pagedkv.server.answer_formats import Formats
from pagedkv.server.chat_prompts import ChatPrompts, KeptAnswers, Sessions, longest_token, require_short
from pagedkv.server.config import Access, Caller, ServerConfig
from pagedkv.server.engines import Route, ServedEngine
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest, PreparedPrompt, Usage, usage_of
from pagedkv.server.http import ApiError, Body, ClientGoneError, as_api_error
from pagedkv.server.parsing import AnswerParser, end_of_open_reasoning, parser_for

T = TypeVar("T")
LOG: Final = logging.getLogger("pagedkv.server")
LONGEST_RETRY_S: Final = 60
MOST_TOLD_FIELDS: Final = 256
"""Names of unknown fields that are logged."""
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

    Raises:
        ConfigurationError: an adapter has a name of the model.

    Attributes:
        is_draining: whether new requests are refused because the server is stopping.
        is_asleep: whether they are refused because the engine sleeps, or is about to.
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
        self._decode = None if tokenizer is None else (compat.rust_tokenizer(tokenizer) or tokenizer).decode
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
        self._told_fields: set[str] = set()
        self.is_asleep = False
        self._sleeping = asyncio.Lock()
        self._submitted: list[Generation] = []
        twice = engine.facts.adapters.keys() & {*self.names}
        if twice:
            raise ConfigurationError(
                f"{min(twice)!r} is a name of the model and of an adapter: requests choose by names"
            )
        as_ids = {"return_tokens_as_token_ids": True} if config.tokens_as_ids else {}
        self._defaults: dict[str, float] = {**config.sampling_defaults, **as_ids}
        self.longest = engine.facts.max_tokens
        self.longest_text = self.longest * longest_token(tokenizer)
        self.sessions = Sessions(config.kept_tokens)
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

    async def sleep(self, *, waits: bool, gives_memory_back: bool) -> int:
        """Refuse further requests, end those under way, and give the engine's memory of blocks back; return its bytes.

        Args:
            waits: whether requests under way are waited for; else they are aborted.
            gives_memory_back: whether the engine sleeps; else its cache stays.

        Raises:
            EngineError, StorageError, ApiError: the engine cannot sleep, and goes on.
        """
        async with self._sleeping:
            self.is_asleep = True
            try:
                for generation in [*self._submitted, *self.under_way.values()]:
                    if not waits:
                        await generation.aclose()
                    await generation.over()
                return await self.engine.sleep() if gives_memory_back else 0
            except BaseException:
                self.is_asleep = False
                raise

    async def wake(self) -> None:
        """Wake the engine, and take requests again. Raises ApiError: there is not enough memory; EngineError."""
        async with self._sleeping:
            try:
                await self.engine.wake()
            except ConfigurationError as problem:
                raise ApiError(503, f"the server stays asleep: {problem}", code="sleeping") from problem
            self.is_asleep = False

    # Requests

    def fill_in(self, fields: BaseModel) -> None:
        """Set fields that a request leaves open to the defaults of the model and of the server."""
        for name, value in self._defaults.items():
            if name in type(fields).model_fields and getattr(fields, name) is None:
                setattr(fields, name, value)

    def note_unknown_fields(self, body: Body) -> None:
        """Log each unknown field when it is first sent; raise ApiError instead where the server is strict."""
        if self.config.strict_fields:
            body.require_known()
        for name in body.unknown_fields:
            if name not in self._told_fields and len(self._told_fields) < MOST_TOLD_FIELDS:
                self._told_fields.add(name)
                LOG.warning("requests have an unknown field, %s: it is ignored; a strict server refuses it", name)

    def require_model(self, name: object) -> None:
        """Refuse a request for another model. Raises ApiError."""
        if name is not None and name not in {*self.names, *self.engine.facts.adapters}:
            there = ", ".join(map(repr, (*self.names, *self.engine.facts.adapters)))
            raise ApiError(
                404,
                f"there is no model {str(name)[:100]!r} here: this server has {there}",
                param="model",
                code="model_not_found",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names for clients."""
        return (self.config.model_name, *self.config.aliases)

    def adapter_named(self, name: str | None) -> str | None:
        """Return the adapter that a request chooses by its ``model``; None: it is one of the model's own names."""
        return name if name in self.engine.facts.adapters else None

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
        if self._decode is None:
            return "".join(f"{token} " for token in token_ids)
        return str(self._decode(list(token_ids), skip_special_tokens=not keeps_special))

    def parsers(self, tools: Sequence[Mapping[str, Any]], prompt: PreparedPrompt) -> Callable[[], AnswerParser]:
        """Return a function that makes the parser of one answer: of its reasoning, and of calls if tools are offered.

        Args:
            tools: offered tools.
            prompt: the prompt of the answer; its end shows whether reasoning has begun.
        """
        return partial(
            parser_for,
            self.config.tool_parser,
            self.tokenizer,
            tools=tools,
            reasoning=self.config.reasoning_parser,
            id_source=new_id,
            prompt=self._beginning(prompt),
        )

    def end_of_reasoning(self, prompt: PreparedPrompt) -> str | None:
        """Return the marker that ends an answer's reasoning; None without reasoning. Formats apply after the marker."""
        config = self.config
        beginning = self._beginning(prompt)
        return end_of_open_reasoning(config.tool_parser, config.reasoning_parser, self.tokenizer, beginning)

    def _beginning(self, prompt: PreparedPrompt) -> str:
        return self.decode(prompt.token_ids[-TOKENS_OF_BEGINNING:], keeps_special=True)

    @cached_property
    def formats(self) -> Formats:
        """Makes token matchers for the formats and forced calls of requests."""
        return self.engine.formats(self.tokenizer, self.config.tool_parser)

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve."""
        return self.engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted, and would be served now."""
        return self.engine.is_ready and not self.is_draining and not self.is_asleep

    def require_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse token ids, none below 0, that the vocabulary has not. Raises ApiError; ``param``: their field."""
        vocabulary_size = self.engine.facts.vocabulary_size
        largest = max(token_ids, default=0)
        if largest >= vocabulary_size:
            raise ApiError(
                400,
                f"token {largest} is out of vocabulary, which has 0 to {vocabulary_size - 1}: is this the model's own "
                "tokenizer?",
                param=param,
            )

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
        if self.is_asleep:
            raise ApiError(503, "the server sleeps until POST /wake_up", code="sleeping", retry_after_s=1)
        for prompt in request.prompts:
            if len(prompt.token_ids) >= self.longest:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt.token_ids):,} tokens, and the longest sequence {self.longest:,}, "
                    "answer included",
                    param="messages",
                    code="context_length_exceeded",
                )
        num_answers = len(request.prompts) * request.params.n
        if num_answers > self.config.max_answers:
            raise ApiError(
                400, f"{num_answers} answers are requested, and at most {self.config.max_answers} are allowed"
            )
        caller = request.caller
        intent = Intent(
            tenant=caller.tenant if caller.tenant in self.engine.facts.tenants else None,
            salt=caller.salt,  # as the tenant, of the caller alone
            adapter=request.adapter,
            priority=request.hints.priority,
            keep_for_s=request.hints.keep_for_s,
            retention=request.hints.retention,
            breakpoints=request.hints.breakpoints,
            prediction=request.prediction,
        )
        deadlines_s = [limit for limit in (request.deadline_s, self.config.deadline_s) if limit is not None]
        deadline_s = min(deadlines_s, default=None)
        streams = [
            self.engine.generate(prompt.token_ids, request.params, intent=intent, deadline_s=deadline_s)
            for prompt in request.prompts
        ]
        generation = Generation(request, streams)
        self._submitted.append(generation)
        try:
            for stream in streams:
                await stream.accepted()
        except BaseException:
            await generation.aclose()
            raise
        finally:
            self._submitted.remove(generation)
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

    async def close_session(self, name: str, caller: Caller) -> tuple[int, int]:
        """Give back the cached blocks that only a session of the caller uses; return its branches and these blocks.

        Raises:
            ApiError: no such session is known, or the engine cannot.
            EngineError: the engine has ended.
        """
        branches = self.sessions.close(name, caller.tenant)
        if not branches:
            raise ApiError(
                404, "no session of this name is known: it had no answer yet, or is closed", param="session_id"
            )
        return len(branches), await self.engine.forget_branches(branches, caller.salt)

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
        if request.session is not None:
            for prompt, output in zip(request.prompts, outputs, strict=False):
                for each in output.completions:
                    self.sessions.note(request.session, [*prompt.token_ids, *each.token_ids], request.caller.tenant)
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


def new_id(prefix: str) -> str:
    """Make a unique identity."""
    return f"{prefix}{uuid.uuid4().hex}"


DONE: Final = b"data: [DONE]\n\n"
"""Last event of the streams of OpenAI's chat and text completions."""
REPLICA: Final = "x-pagedkv-replica"
REASON: Final = "x-pagedkv-routing"


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run some work; cancel it when the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected; the work has been cancelled, and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def event(data: bytes, name: str | None = None) -> bytes:
    """Write one event.

    Args:
        data: JSON in one line.
        name: name of the event, in protocols whose events have names.
    """
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@final
class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: yields whole events; closed when the client disconnects.
        end: called once nothing more is sent, even if no event was sent.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], Coroutine[Any, Any, None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as Response has it
        """Send all events; a disconnect ends it without an error."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            await asyncio.shield(self._close())

    async def _close(self) -> None:
        await self._events.aclose()
        await self._end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@final
class Exchange:
    """Serves one request.

    Args:
        service: the engine and what all protocols share.
        request: the request for the engine.
        receive: ``receive`` of the connection, after the body was read.
        headers: of the response, beside those of the engine.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        receive: Receive,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._service = service
        self._request = request
        self._receive = receive
        self._arrived_s = service.wall_clock()
        self._is_noted = False
        self.headers = dict(headers)
        """Headers of the response, once the engine has accepted the request."""

    async def whole(self, answer: Callable[[Generation, Sequence[AnswerEvent]], T]) -> T:
        """Wait for all answers, and make the response from them.

        Args:
            answer: makes the response from the ended generation and one event for each answer.

        Raises:
            ApiError: the request cannot be served, or its answer ended before it was complete.
            ClientGoneError: the client has disconnected.
        """
        for callback in self._service.on_arrived:
            callback(self._request)
        return await while_connected(self._receive, self._whole(answer))

    async def _whole(self, answer: Callable[[Generation, Sequence[AnswerEvent]], T]) -> T:
        generation: Generation | None = None
        try:
            generation = await self._begin()
            response = answer(generation, await generation.finished())
        except asyncio.CancelledError:
            self._note(generation, None)
            raise
        except Exception as problem:
            error = self._service.as_api_error(problem)
            self._note(generation, error)
            raise error from problem
        self._note(generation, None)
        return response

    async def streamed(
        self,
        chunks: Callable[[Generation], AsyncGenerator[bytes, None]],
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """Answer with events.

        Args:
            chunks: yields the events of a generation under way.
            failed: writes the event that reports a failure in the middle of a stream.

        Raises:
            ApiError: the request cannot be served.
            ClientGoneError: the client has disconnected.
        """
        for callback in self._service.on_arrived:
            callback(self._request)
        try:
            generation = await while_connected(self._receive, self._begin())
        except (ClientGoneError, asyncio.CancelledError):
            self._note(None, None)
            raise
        except Exception as problem:
            error = self._service.as_api_error(problem)
            self._note(None, error)
            raise error from problem

        async def end() -> None:  # also called for a stream that ended before its first event
            await generation.aclose()
            self._note(generation, None)

        return EventStream(self._guarded(generation, chunks, failed), end, self.headers)

    async def _guarded(
        self,
        generation: Generation,
        chunks: Callable[[Generation], AsyncGenerator[bytes, None]],
        failed: Callable[[ApiError], bytes],
    ) -> AsyncGenerator[bytes, None]:
        problem: ApiError | None = None
        events = chunks(generation)
        try:
            async for each in events:
                yield each
        except Exception as error:  # noqa: BLE001 - the stream has begun, so any error is reported in it
            problem = self._service.as_api_error(error)
            yield failed(problem)
        finally:
            await events.aclose()
            self._note(generation, problem)

    async def _begin(self) -> Generation:
        generation = await self._service.begin(self._request)
        self._service.under_way[self._request] = generation
        routes = self._service.routes(generation)
        if routes:
            self.headers[REPLICA] = ", ".join(dict.fromkeys(route.replica for route in routes))
            self.headers[REASON] = "; ".join(dict.fromkeys(route.reason for route in routes))
        return generation

    def _note(self, generation: Generation | None, problem: ApiError | None) -> None:
        """Report the request to metrics and logs, once. An aborted one is reported when the engine has ended it."""
        if self._is_noted:
            return
        self._is_noted = True
        has_left = problem is None and (generation is None or not generation.outputs)
        routes = [] if generation is None else self._service.routes(generation)
        end = partial(
            self._service.note_served, self._request, self._arrived_s, problem=problem, has_left=has_left, routes=routes
        )
        if generation is None:
            end(())
        elif generation.is_over:
            end(generation.results)
        else:
            self._service.note_later(self._note_when_over(generation, end))

    @staticmethod
    async def _note_when_over(generation: Generation, end: Callable[[Sequence[RequestOutput]], None]) -> None:
        await generation.over()
        end(generation.results)
