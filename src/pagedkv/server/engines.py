"""ServedEngine: the interface of an engine that a service needs; LocalEngine: an engine in this process.

The interface has neither steps nor blocks, so that replicas in other processes can implement it too
(:mod:`pagedkv.cluster`).

:func:`build_engine` loads a model and its tokenizer, and sets the options that a server's clients need. EventsOut
passes the KV events of an engine in this process to a publisher after each step: the engine's thread only copies the
events, the publisher's thread encodes and sends them. An engine without a publisher records no events. Events that
arise without a step, such as those of a cache reset, are passed on before the next heartbeat.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar, final

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import TenantLimits
from pagedkv.contract.spec import keeps_state
from pagedkv.engine import LLM, AnswerStream, AsyncLLM, EngineConfig, Intent, SamplingParams, StepRecord, TierStatistics
from pagedkv.engine.demo.babbling import babbling_tokenizer, load_babbling
from pagedkv.engine.demo.trained import FOLDER, load_demo
from pagedkv.engine.loading import load, load_tokenizer
from pagedkv.errors import ConfigurationError, EngineError
from pagedkv.model_folder import CHAT_DEMO
from pagedkv.probe import compat
from pagedkv.scheduling import longest_alone
from pagedkv.server.answer_formats import AnswerFormats, Formats

if TYPE_CHECKING:
    from pagedkv.events import CacheSnapshot, EventPublisher  # an extra of its own

T = TypeVar("T")
TIERS_S: Final = 10.0
"""Seconds for which tiers may go on storing when the server stops."""
PREDICTED_TOKENS: Final = 8
"""Most tokens that a step drafts from a request's prediction."""
STEP_S: Final = 30.0
"""Most seconds that a request for a snapshot waits for the end of a step."""


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """Numbers of an engine between two steps.

    Args:
        num_running: running requests.
        num_waiting: waiting requests.
        num_live: blocks that running sequences use.
        num_blocks: all blocks except the null blocks.
        num_leased: free blocks that leases keep cached.
        num_evictions: cached blocks evicted since the engine was built.
        tiers: statistics of each tier below the device.
    """

    num_running: int
    num_waiting: int
    num_live: int
    num_blocks: int
    num_leased: int
    num_evictions: int
    tiers: tuple[TierStatistics, ...]

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Read the numbers from an engine. O(rows + blocks in tables)."""
        core = llm.core
        pools = core.space.config.blocks_by_pool()
        statistics = core.space.statistics()
        return cls(
            len(core.scheduler.running),
            core.scheduler.num_waiting,
            core.space.num_live_blocks(),
            sum(pools.values()) - len(pools),
            sum(pool.num_leased for pool in statistics.pools),
            sum(pool.num_evictions for pool in statistics.pools),
            llm.tier_statistics(),
        )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties of an engine that do not change while it serves.

    Args:
        max_tokens: tokens of the longest sequence that the pools hold, answer included.
        context: tokens of the longest sequence by the model's config or the engine's.
        block_size: least common multiple of the groups' block sizes, in tokens.
        alignment: the same of the groups but recurrent states, which are kept at the ends of prompts as well.
        tenants: names of the configured tenants.
        is_caching: whether prefixes are cached.
        uses_predictions: whether the engine drafts tokens from a request's prediction.
        vocabulary_size: columns of the model's logits.
        end_ids: the model's own end tokens.
        choices: a sentence that tells whether the model is compiled and steps overlap (``EngineCore.choices``).
        adapters: folders of the adapters that requests may choose, by name.
    """

    max_tokens: int
    context: int
    block_size: int
    alignment: int
    tenants: frozenset[str]
    is_caching: bool
    uses_predictions: bool
    vocabulary_size: int
    end_ids: frozenset[int]
    choices: str
    adapters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Read the properties of an engine."""
        core, space = llm.core, llm.core.space.config
        return cls(
            longest_alone(core.space),
            space.max_tokens,
            math.lcm(*(group.block_size for group in space.groups)),
            math.lcm(*(group.block_size for group in space.groups if not keeps_state(group))),
            frozenset(space.tenants or ()),
            space.prefix_caching,
            core.config.predicted_tokens > 0,
            core.vocabulary_size,
            frozenset(core.model_end_ids),
            core.choices,
            dict(core.config.adapters or {}),
        )


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that serves a request, and the reason of the choice.

    Args:
        replica: the replica's name.
        reason: the reason in a few words.
        explanation: the reason in full, with a line for each replica that was considered.
    """

    replica: str
    reason: str
    explanation: str


class ServedEngine(Protocol):
    """Serves requests of token ids."""

    @property
    def facts(self) -> EngineFacts:
        """Properties that do not change while the engine serves."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served now, instead of waiting for a replica."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the queue is known to be full, so that a request would be refused; False if that is not known."""
        ...

    @property
    def last_numbers(self) -> EngineNumbers:
        """The result of the last :meth:`numbers`."""
        ...

    def start(self, max_waiting: int, on_step: Callable[[StepRecord], None]) -> None:
        """Begin to serve. Raises EngineError.

        Args:
            max_waiting: most requests that wait; further ones are refused.
            on_step: called with the record of each step: in the engine's thread, or in the event loop where the engine
                has a process of its own. Never called for replicas.
        """
        ...

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, intent: Intent, deadline_s: float | None
    ) -> AnswerStream:
        """Submit a request from an event loop; returns at once. Raises as :meth:`AsyncLLM.generate`."""
        ...

    def route_of(self, stream: AnswerStream) -> Route | None:
        """Return the replica that serves an accepted request; None for an engine without replicas."""
        ...

    def formats(self, tokenizer: Any, tool_parser: str) -> Formats:  # noqa: ANN401 - of transformers, or like it
        """Return an object that makes token matchers for the formats and forced calls of requests."""
        ...

    async def numbers(self) -> EngineNumbers:
        """Read the engine's current numbers; after the engine has ended, return the last ones."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop every cached block between two steps. Raises EngineError; ApiError: this engine cannot."""
        ...

    async def forget_branches(self, prompts: Sequence[Int32Array], salt: bytes) -> int:
        """Drop the end of each prompt that nothing else shares, between two steps; return the number of blocks.

        Arguments as of :meth:`EngineCore.forget_branches`. Raises EngineError; ApiError: this engine cannot.
        """
        ...

    async def sleep(self) -> int:
        """Give the memory of blocks back, once no request is under way; return its bytes: :meth:`EngineCore.sleep`.

        Raises EngineError, StorageError; ApiError: this engine cannot.
        """
        ...

    async def wake(self) -> None:
        """Take the memory of blocks again. Raises ConfigurationError: there is not enough; EngineError, ApiError."""
        ...

    async def stop(self) -> None:
        """End all requests, and the engine."""
        ...


@final
class LocalEngine:
    """An engine in this process, driven by a thread of its own.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.facts = EngineFacts.of(llm)
        self.last_numbers = EngineNumbers.of(llm)
        self._running: AsyncLLM | None = None
        self._max_waiting = 0

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve."""
        return self._running is not None and not self._running.has_ended

    @property
    def is_ready(self) -> bool:
        """Whether the engine can serve."""
        return self.is_alive

    @property
    def is_full(self) -> bool:
        """Whether the queue is full."""
        return self._running is not None and self._running.num_waiting >= self._max_waiting

    def start(self, max_waiting: int, on_step: Callable[[StepRecord], None]) -> None:
        """Start the engine's thread. Raises EngineError where another thread already runs the engine."""
        self._max_waiting = max_waiting
        self._running = AsyncLLM(self.llm, max_waiting=max_waiting, when_full="refuse", on_step=on_step)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, intent: Intent, deadline_s: float | None
    ) -> AnswerStream:
        """Submit a request from an event loop. Raises as :meth:`AsyncLLM.generate`."""
        return self.running.generate(prompt, params, intent=intent, deadline_s=deadline_s)

    def route_of(self, stream: AnswerStream) -> Route | None:  # noqa: ARG002 - as of ServedEngine
        """Return None: a local engine has no replicas."""
        return None

    def formats(self, tokenizer: Any, tool_parser: str) -> Formats:  # noqa: ANN401 - of transformers, or like it
        """Return an object that makes token matchers for the formats and forced calls of requests."""
        return AnswerFormats(tokenizer, self.facts.vocabulary_size, self.facts.end_ids, tool_parser)

    def call_soon(self, work: Callable[[LLM], T]) -> Future[T]:
        """Run ``work`` in the engine's thread; any thread may call this. Raises as :meth:`AsyncLLM.call_soon`."""
        return self.running.call_soon(work)

    async def between_steps(self, work: Callable[[LLM], T]) -> T:
        """Run ``work`` in the engine's thread. Raises as :meth:`AsyncLLM.between_steps`."""
        return await self.running.between_steps(work)

    async def numbers(self) -> EngineNumbers:
        """Read the engine's numbers between two steps, in its thread; after it has ended, return the last ones."""
        with suppress(EngineError):
            self.last_numbers = await self.between_steps(EngineNumbers.of)
        return self.last_numbers

    async def reset_prefix_cache(self) -> None:
        """Drop every cached block between two steps. Raises EngineError."""
        await self.running.reset_prefix_cache()

    async def forget_branches(self, prompts: Sequence[Int32Array], salt: bytes) -> int:
        """Drop the end of each prompt that nothing else shares, between two steps. Raises EngineError."""
        return await self.between_steps(lambda llm: llm.core.forget_branches(prompts, salt=salt))

    async def sleep(self) -> int:
        """Give the memory of blocks back. Raises as :meth:`EngineCore.sleep`."""
        return await self.between_steps(lambda llm: llm.core.sleep())

    async def wake(self) -> None:
        """Take the memory of blocks again. Raises as :meth:`EngineCore.wake`."""
        await self.between_steps(lambda llm: llm.core.wake())

    async def stop(self) -> None:
        """End the engine's thread, and all requests under way."""
        if self._running is not None:
            await self._running.aclose()
            await asyncio.to_thread(self.llm.flush_tiers, TIERS_S)

    @property
    def running(self) -> AsyncLLM:
        """The engine's thread. Raises EngineError if it has not been started."""
        if self._running is None:
            raise EngineError("the engine has not been started")
        return self._running


def tokenizer_of(model: str | None) -> Any:  # noqa: ANN401 - of transformers, or like it
    """Load a model's tokenizer alone. Raises ConfigurationError where there is none.

    Args:
        model: a folder or a name; None: the model of the demonstration; :data:`~pagedkv.model_folder.CHAT_DEMO`:
            the one for benchmarks.
    """
    if model == CHAT_DEMO:
        return babbling_tokenizer()
    return _required(load_tokenizer(str(FOLDER) if model is None else model), model)


def build_engine(  # noqa: PLR0913 - a model's settings, the rare ones by keywords
    model: str | None,
    dtype: str,
    engine: EngineConfig,
    tenants: Mapping[str, TenantLimits] | None,
    *,
    draft_model: str | None = None,
    device: str = "auto",
) -> tuple[LLM, Any]:
    """Load a model, and build an engine for a server; return the engine and the model's tokenizer.

    Args:
        model: a folder or a name; None: the model of the demonstration; :data:`~pagedkv.model_folder.CHAT_DEMO`:
            the one for benchmarks.
        dtype: type of its weights.
        engine: memory and limits; answers end at the longest sequence, as clients expect.
        tenants: limits of tenants, by name; None: tenants are not distinguished.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        device: for the models' weights and blocks, as of :func:`~pagedkv.engine.loading.usable_device`; with
            ``auto`` the model of the demonstration is on the CPU, which is fast enough for it.

    Raises:
        ConfigurationError, UnsupportedModelError: the model cannot be loaded or served.
    """
    loaded, tokenizer = _load(model, dtype, device)
    engine = replace(engine, beyond_context="clip", leases=True, tenants=tenants, predicted_tokens=PREDICTED_TOKENS)
    drafting = None if draft_model is None else load(draft_model, dtype, device)[0]
    return LLM(loaded, engine, tokenizer=_required(tokenizer, model), draft_model=drafting), tokenizer


def _load(model: str | None, dtype: str, device: str) -> tuple[compat.Model, Any]:
    if model is None:
        return load_demo(device)
    return load_babbling(device) if model == CHAT_DEMO else load(model, dtype, device)


def _required(tokenizer: Any, model: str | None) -> Any:  # noqa: ANN401 - as above
    if tokenizer is None:
        raise ConfigurationError(f"no tokenizer can be loaded for {model}, and a server needs one")
    return tokenizer


@final
class EventsOut:
    """Passes events on. Add :meth:`stepped` to the callbacks of steps.

    Args:
        engine: the engine; its configuration has ``events=True``.
        publisher: publishes the events, and requests snapshots from this object.
    """

    def __init__(self, engine: LocalEngine, publisher: "EventPublisher") -> None:
        self._engine = engine
        self._publisher = publisher
        self._core = engine.llm.core
        self._space = engine.llm.core.space
        publisher.serve_snapshots(self._take_snapshot, before_beat=self._request_publishing)

    def stepped(self, record: StepRecord) -> None:  # noqa: ARG002 - as it is called
        """Pass on the events of a step. Called by the engine's thread."""
        self._publish()

    def _publish(self) -> None:
        tiers = self._core.drain_tier_events()
        if self._space.has_events or tiers:
            self._publisher.publish(self._space.drain_events(), self._space, tiers)

    # Called by the publisher's thread

    def _take_snapshot(self) -> "CacheSnapshot":
        """Take a snapshot in the engine's thread, and wait for it. Raises EngineError, TimeoutError."""

        def take(llm: LLM) -> "CacheSnapshot":
            self._publish()
            return self._publisher.snapshot(self._space, llm.core.tier_entries())

        return self._engine.call_soon(take).result(STEP_S)

    def _request_publishing(self) -> None:
        """Schedule the publishing of waiting events in the engine's thread; do not wait for it."""

        def publish(llm: LLM) -> None:  # noqa: ARG001 - as it is called
            self._publish()

        with suppress(EngineError):  # the engine has not started yet, or has ended
            self._engine.call_soon(publish)
