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

from pagedkv.serving.engine import LLM, AsyncLLM, Intent, RequestOutput, StepRecord
from pagedkv.serving.engine.llm import plain_encoding
from pagedkv.serving.server.access import Access
from pagedkv.serving.server.answer_formats import AnswerFormats
from pagedkv.serving.server.chat_prompts import ChatPrompts, longest_token, require_short
from pagedkv.serving.server.config import ServerConfig, SlowCause
from pagedkv.serving.server.errors import ApiError, as_api_error
from pagedkv.serving.server.generation import Ask, Generation, Prepared
from pagedkv.serving.server.kept_answers import KeptAnswers
from pagedkv.serving.server.parsing import AnswerParser, end_of_open_reasoning, parser_for
from pagedkv.serving.server.usage import Usage, usage_of

__all__ = ["Served", "Service", "new_id"]

T = TypeVar("T")

LOG: Final = logging.getLogger("pagedkv.server")

LONGEST_RETRY_S: Final = 60
SERVERS_FAULT: Final = 500
MOST_KEPT_ANSWERS: Final = 4
TIERS_S: Final = 10.0
"""How long tiers may still store when the server stops."""
LONG_NBYTES: Final = 16 * 2**10
"""Bytes of a body from which on it is tokenised beside the event loop: some 10 ms."""
TOKENS_OF_BEGINNING: Final = 32
"""Tokens at a prompt's end that say how an answer begins."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A request that has ended, for metrics and logs.

    Args:
        ask: what was asked.
        arrived_s: when it came, in seconds of the Unix epoch; total_s: seconds to its end.
        outputs: of its prompts; empty where the engine did not take it.
        problem: why it failed; None where it was answered, or its client has left.
        has_left: whether its client left before the end.
    """

    ask: Ask
    arrived_s: float
    total_s: float
    outputs: Sequence[RequestOutput]
    problem: ApiError | None
    has_left: bool = False


@final
class Service:
    """Serves requests of all protocols with one engine.

    Args:
        llm: the engine, with its tokenizer.
        config: name, limits and habits.
        access: tells callers apart.
        tokenizer: for prompts and answers; None: token ids alone.
        wall_clock: gives seconds of the Unix epoch.

    Attributes:
        engine: the engine for event loops, once :meth:`start` was called.
        is_draining: whether new requests are refused, since the server is about to end.
        on_arrived: what is called with each request that has come; on_served: with each that has ended; on_step: with
            the record of each step, by the engine's thread; on_slow: with the cause, for each connection that was ended
            since its client did not send or read in time; on_refused: with the error of each request that was refused.
        under_way: requests that the engine has taken and that were not noted as ended, with their answers so far.
    """

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        access: Access,
        *,
        tokenizer: Any = None,  # noqa: ANN401 - of transformers, or like it
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.llm = llm
        self.config = config
        self.access = access
        self.tokenizer = tokenizer
        self.wall_clock = wall_clock
        self.is_draining = False
        self.on_arrived: list[Callable[[Ask], None]] = []
        self.on_served: list[Callable[[Served], None]] = []
        self.on_step: list[Callable[[StepRecord], None]] = []
        self.on_slow: list[Callable[[SlowCause], None]] = []
        self.created_s = int(wall_clock())
        self.on_refused: list[Callable[[ApiError], None]] = []
        self.under_way: dict[Ask, Generation] = {}
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="pagedkv texts")
        self._notes: set[asyncio.Task[None]] = set()
        self._engine: AsyncLLM | None = None
        self._queue_s = 1.0
        space = llm.core.space.config
        self.longest = space.max_tokens
        self.longest_text = self.longest * longest_token(tokenizer)
        self.chats = ChatPrompts(tokenizer, KeptAnswers(config.kept_tokens), self.longest_text)
        self._tenants = frozenset(space.tenants or ())
        self.block_size = math.lcm(*(group.block_size for group in space.groups))
        self._is_caching = space.prefix_caching

    # Life

    def start(self) -> None:
        """Let the engine's thread begin. Raises EngineError where another thread has it."""
        self._engine = AsyncLLM(
            self.llm, max_waiting=self.config.max_waiting, when_full="refuse", on_step=self._note_step
        )

    def _note_step(self, record: StepRecord) -> None:
        for tell in self.on_step:
            tell(record)

    async def stop(self) -> None:
        """End the engine's thread, and what is still under way."""
        if self._engine is not None:
            await self._engine.aclose()
            await asyncio.to_thread(self.llm.flush_tiers, TIERS_S)
        await asyncio.gather(*self._notes)
        self._preparing.shutdown(wait=False, cancel_futures=True)

    @property
    def engine(self) -> AsyncLLM:
        """The engine for event loops."""
        assert self._engine is not None, "a service that was not started"
        return self._engine

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
        """Turn a plain text into token ids, special tokens of the tokenizer added. Raises ApiError."""
        self.require_tokenizer()
        require_short(text, self.longest_text)
        return list(self.tokenizer.encode(text))

    def encode_plain(self, text: str) -> list[int]:
        """Turn a text into token ids, nothing added. Raises ApiError."""
        self.require_tokenizer()
        require_short(text, self.longest_text)
        return list(plain_encoding(self.tokenizer)(text))

    def decode(self, token_ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Turn token ids into text. Without a tokenizer: the ids, with blanks between them."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in token_ids)
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not keeps_special))

    def decoding(self, *, keeps_special: bool) -> Callable[[Sequence[int]], str]:
        """Return what gives the text of token ids, with or without special tokens, which markers of calls may be."""
        return partial(self.decode, keeps_special=keeps_special)

    def parsers(self, tools: Sequence[Mapping[str, Any]], prompt: Prepared) -> Callable[[], AnswerParser]:
        """Return what makes a parser of one answer: of its reasoning, and of its calls where tools are offered.

        Args:
            tools: that are offered.
            prompt: what the answer continues; its end says whether reasoning has begun.
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

    def end_of_reasoning(self, prompt: Prepared) -> str | None:
        """Return the marker up to which an answer reasons, and no format holds it; None where it does not begin so."""
        is_read = self.config.reasoning_parser != "none"
        return end_of_open_reasoning(self._beginning(prompt)) if is_read else None

    def _beginning(self, prompt: Prepared) -> str:
        return self.decode(prompt.token_ids[-TOKENS_OF_BEGINNING:], keeps_special=True)

    @cached_property
    def formats(self) -> AnswerFormats:
        """What holds answers to formats and calls."""
        return AnswerFormats(self.tokenizer, self.vocabulary_size, self.llm.core.model_end_ids, self.config.tool_parser)

    @property
    def uses_predictions(self) -> bool:
        """Whether the engine guesses tokens from what a request predicts."""
        return self.llm.core.config.predicted_tokens > 0

    @property
    def vocabulary_size(self) -> int:
        """Columns of the model's logits."""
        return self.llm.core.vocabulary_size

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve."""
        return self._engine is not None and not self._engine.has_ended

    def require_tokenizer(self) -> None:
        """Refuse a request that needs text. Raises ApiError."""
        if self.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: give prompts as token ids to /v1/completions")

    async def prepared(self, nbytes: int, make: Callable[[], T]) -> T:
        """Make something of a body; of a long one in a thread, one at a time, so that other requests go on.

        Args:
            nbytes: of the body.
            make: renders templates and tokenises texts, some microseconds a character.
        """
        if nbytes < LONG_NBYTES:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._preparing, make)

    async def begin(self, ask: Ask) -> Generation:
        """Give a request to the engine; return its answers under way, once the engine has taken it.

        Raises:
            ApiError: it cannot be served, or not now.
        """
        if self.is_draining:
            raise ApiError(503, "the server is about to end", code="draining", retry_after_s=1)
        for prompt in ask.prompts:
            self._require_room(len(prompt.token_ids))
        num_answers = len(ask.prompts) * ask.params.n
        if num_answers > self.config.max_answers:
            raise ApiError(400, f"{num_answers} answers are asked for, and at most {self.config.max_answers} are given")
        intent = self._intent(ask)
        streams = [
            self.engine.generate(prompt.token_ids, ask.params, intent=intent, deadline_s=self._deadline_s(ask))
            for prompt in ask.prompts
        ]
        generation = Generation(ask, streams)
        try:
            for stream in streams:
                await stream.accepted()
        except BaseException:
            await generation.aclose()
            raise
        return generation

    def keep_answer(self, generation: Generation, index: int, message: Mapping[str, Any]) -> None:
        """Keep an answer's tokens for the next turn of its conversation.

        Not one that a stop text ended, since its tokens go on behind the text that its client got, and of many answers
        to a prompt only the first ones.

        Args:
            generation: under way or ended; index: of the answer.
            message: what the client got.
        """
        writer = generation.writers[index]
        if not writer.is_cut and index < MOST_KEPT_ANSWERS:
            tenant = generation.ask.caller.tenant
            self.chats.keep(generation.ask.prompts[0], message, writer.token_ids, tenant)

    def note_arrived(self, ask: Ask) -> None:
        """Tell metrics and logs of a request that has come."""
        for tell in self.on_arrived:
            tell(ask)

    def note_served(
        self,
        ask: Ask,
        arrived_s: float,
        outputs: Sequence[RequestOutput],
        *,
        problem: ApiError | None,
        has_left: bool = False,
    ) -> None:
        """Tell metrics and logs of a request that has ended."""
        self.under_way.pop(ask, None)
        for output in outputs:
            if output.queue_seconds is not None:
                self._queue_s += 0.1 * (output.queue_seconds - self._queue_s)
        served = Served(ask, arrived_s, self.wall_clock() - arrived_s, outputs, problem, has_left)
        for tell in self.on_served:
            try:
                tell(served)
            except OSError as failure:  # a full disk is no fault of an answer that was computed
                LOG.error("a request was not logged: %s", failure)  # noqa: TRY400 - its sentence says it

    def num_so_far(self, ask: Ask) -> int:
        """Return the tokens that the longest answer to a request has, while it is under way; else 0."""
        return self.under_way[ask].num_generated if ask in self.under_way else 0

    def note_later(self, note: Coroutine[Any, Any, None]) -> None:
        """Run what notes a request whose end is under way; :meth:`stop` waits for it."""
        task = asyncio.ensure_future(note)
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    def note_refused(self, problem: ApiError) -> None:
        """Tell metrics of a request that was refused before the engine computed anything for it."""
        for tell in self.on_refused:
            tell(problem)

    def note_slow(self, cause: SlowCause) -> None:
        """Tell metrics of a connection that was ended since its client was too slow."""
        for tell in self.on_slow:
            tell(cause)

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Count the tokens of a request that has ended."""
        return usage_of(outputs, self.block_size, is_caching=self._is_caching)

    def as_api_error(self, problem: Exception) -> ApiError:
        """Translate an error; a client whose request finds the queue full comes back after about a queue's time."""
        error = as_api_error(problem, retry_after_s=min(LONGEST_RETRY_S, max(1, math.ceil(self._queue_s))))
        if error.status >= SERVERS_FAULT and error is not problem:
            LOG.error("a request failed", exc_info=problem)
        return error

    def _intent(self, ask: Ask) -> Intent:
        """Return what the space is to know of a request: whose it is, by its caller alone, and what it keeps."""
        tenant = ask.caller.tenant if ask.caller.tenant in self._tenants else None
        return Intent(
            tenant=tenant,
            salt=ask.caller.salt,
            priority=ask.priority,
            breakpoints=ask.breakpoints,
            prediction=ask.prediction,
        )

    def _deadline_s(self, ask: Ask) -> float | None:
        limits = [limit for limit in (ask.deadline_s, self.config.deadline_s) if limit is not None]
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
    """Make an identity that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"
