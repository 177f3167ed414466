"""ReplicatedEngine: all replicas of a cluster as one engine of a service.

A request is sent to one replica. If that replica dies, its engine fails, or it is silent before it has accepted the
request, another replica continues the request after the tokens that were already sent. After too many lost replicas, or
if no replica accepts it in time, the request ends with an error.

A single answer is continued: another replica computes the prompt and the sent tokens, and generates the next tokens
with the same noise, since noise depends on positions (``Intent.answered``). Several answers, and beams, are generated
again from the beginning; the tokens that were already sent are compared and skipped. If they differ, the answer cannot
be continued, and the request ends with an error: no client gets tokens of two different answers.
"""

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import numpy as np

from pagedkv.cluster.messages import (
    HEARTBEAT_S,
    ReplicaAnswer,
    ReplicaCall,
    ReplicaFacts,
    ReplicaMessage,
    RoutedRequest,
)
from pagedkv.cluster.placements import Placements, ReplicaChange
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.extras import needing
from pagedkv.engine import (
    AnswerStream,
    Completion,
    Intent,
    RequestOutput,
    SamplingParams,
    StepRecord,
    TierStatistics,
    TokenLogprobs,
    TokenUpdate,
)
from pagedkv.engine.answer_stream import StreamMessage, StreamState, deliver
from pagedkv.engine.outputs import FinishReason
from pagedkv.errors import EngineError
from pagedkv.server import ApiError, EngineFacts, Route
from pagedkv.server.answer_formats import AnswerFormats, Formats, RemoteFormats
from pagedkv.server.engines import EngineNumbers
from pagedkv.server.http import as_sendable
from pagedkv.tiers import BreakerState

with needing("cluster", "replicas"):
    from ray.exceptions import RayActorError, RayError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
    from ray.serve.handle import DeploymentHandle
LOG: Final = logging.getLogger("pagedkv.server")
MOST_ATTEMPTS: Final = 4
"""Most replicas to which one request is sent, one after the loss of the other."""
ANSWER_S: Final = 10.0
"""Most seconds that a page waits for a replica."""
RETRY_S: Final = 10
"""Seconds after which a client may retry where no replica can serve."""
ACCEPT_S: Final = 120.0
"""Most seconds until a replica accepts a request; long, since the first replica may still be starting."""
SEED_BITS: Final = 62
NO_NUMBERS: Final = EngineNumbers(0, 0, 0, 1, 0, 0, ())


def sums_by_tier(tiers: Iterable[TierStatistics]) -> tuple[TierStatistics, ...]:
    """Return one value for each name: entries, bytes, loads and tokens are added up.

    The breaker is open if that of some replica is. Other numbers of the store are those of the first replica.
    """
    sums: dict[str, TierStatistics] = {}
    for tier in tiers:
        before = sums.get(tier.name)
        sums[tier.name] = tier if before is None else _sum(before, tier)
    return tuple(sums.values())


def _sum(one: TierStatistics, other: TierStatistics) -> TierStatistics:
    is_open = BreakerState.OPEN in {one.store.breaker, other.store.breaker}
    causes = one.not_loaded.keys() | other.not_loaded.keys()
    return replace(
        one,
        num_loads=one.num_loads + other.num_loads,
        num_loaded_tokens=one.num_loaded_tokens + other.num_loaded_tokens,
        num_hit_tokens=one.num_hit_tokens + other.num_hit_tokens,
        not_loaded={cause: one.not_loaded.get(cause, 0) + other.not_loaded.get(cause, 0) for cause in causes},
        num_offered_runs=one.num_offered_runs + other.num_offered_runs,
        store=replace(
            one.store,
            num_entries=one.store.num_entries + other.store.num_entries,
            nbytes=one.store.nbytes + other.store.nbytes,
            breaker=BreakerState.OPEN if is_open else one.store.breaker,
        ),
    )


@final
class _LostReplicaError(Exception):
    """A replica was lost while it served a request."""


@final
class _RouterLink:
    """Connects a front to its router, which Serve makes: requests carry this object to the router.

    Args:
        on_replicas: called with each change of the router's replicas, in Serve's thread.

    Attributes:
        placements: of the router; None before the first call of a replica.
    """

    def __init__(self, on_replicas: Callable[[ReplicaChange], None]) -> None:
        self._on_replicas = on_replicas
        self.placements: Placements | None = None

    def take(self, placements: Placements) -> None:
        """Record the placements. Called by the router in Serve's thread."""
        placements.on_replicas = self._on_replicas
        self.placements = placements

    def placed(self, request: RoutedRequest, placements: Placements) -> None:
        """Record the placements, and log a request's choice. Called as :meth:`take`."""
        self.take(placements)
        assert request.choice is not None
        LOG.info("request %d: %s", request.number, request.choice.explain())


@final
class AnswerSoFar:
    """The answers to one prompt, across all attempts to serve it.

    Args:
        prompt_token_ids: the prompt.
        params: its sampling parameters.

    Attributes:
        num_attempts: replicas that have served the request so far.
    """

    def __init__(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._params = params
        self._is_single = params.n == 1 and params.num_beams == 1
        self._sent: list[list[int]] = [[] for _ in range(params.n)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(params.n)]
        self._reasons: list[FinishReason | None] = [None] * params.n
        self._num_skipped = [0] * params.n
        self._num_continued = 0
        self._num_cached: int | None = None
        self._cached_at = 0  # the attempt with these hits
        self.num_attempts = 1

    @property
    def num_sent(self) -> int:
        """Number of sent tokens of the longest answer."""
        return max(map(len, self._sent))

    def begin_again(self, intent: Intent) -> Intent:
        """Begin the next attempt after the loss of a replica; return the intent of the request to send."""
        self.num_attempts += 1
        if self._is_single:
            self._num_continued = len(self._sent[0])
            return replace(intent, answered=tuple(self._sent[0]))
        self._num_skipped = [0] * self._params.n
        return intent

    def note_cached(self, num_cached_tokens: int | None) -> None:
        """Record the hit tokens of the prompt, from the first attempt alone: later ones also hit what it computed."""
        if self._num_cached is None:
            self._num_cached, self._cached_at = num_cached_tokens, self.num_attempts

    def take(self, updates: Sequence[TokenUpdate]) -> tuple[TokenUpdate, ...]:
        """Return the updates without tokens that were already sent. Raises EngineError: an answer differs from them."""
        return tuple(new for each in updates if (new := self._new(each)) is not None)

    def _new(self, update: TokenUpdate) -> TokenUpdate | None:
        place, tokens, scores = update.index, update.token_ids, update.logprobs
        sent = self._sent[place]
        if not self._is_single and self._num_skipped[place] < len(sent):
            at = self._num_skipped[place]
            known = min(len(tokens), len(sent) - at)
            if tuple(sent[at : at + known]) != tokens[:known]:
                raise EngineError(
                    f"a replica failed after {len(sent)} tokens of answer {place}, and another replica's answer "
                    f"differs from token {at} on: the answer cannot be continued"
                )
            self._num_skipped[place] += known
            tokens, scores = tokens[known:], None if scores is None else scores[known:]
            if not tokens and (update.finish_reason is None or self._reasons[place] is not None):
                return None
        sent += tokens
        self._num_skipped[place] += len(tokens)
        self._logprobs[place] += scores or ()
        self._reasons[place] = update.finish_reason
        return replace(update, token_ids=tokens, logprobs=scores)

    def complete(self, output: RequestOutput) -> RequestOutput:
        """Return the last attempt's output with the log-probabilities and the hits of earlier attempts.

        The hits are those of the first attempt that had any token. If that was another one, the loads and the
        explanation of the last attempt do not belong to them, and are left out.
        """
        completions = output.completions
        if self._num_continued and self._params.logprobs is not None:
            completions = tuple(
                replace(each, logprobs=tuple(self._logprobs[each.index][: self._num_continued]) + (each.logprobs or ()))
                for each in completions
            )
        output = replace(output, completions=completions)
        if self._num_cached is None or self._cached_at == self.num_attempts:
            return output
        return replace(output, num_cached_tokens=self._num_cached, num_loaded_tokens={}, explanation=None)

    def last_updates(self, reason: FinishReason) -> tuple[TokenUpdate, ...]:
        """Return an update that ends each unfinished answer, for a request that ends without a replica's output."""
        return tuple(TokenUpdate(0, place, (), reason) for place, ended in enumerate(self._reasons) if ended is None)

    def ended(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """Return an output with the sent tokens, for a request that ended without a replica's output."""
        completions = tuple(
            Completion(place, tuple(sent), self._reasons[place] or reason) for place, sent in enumerate(self._sent)
        )
        return RequestOutput(
            0, self._prompt_token_ids, completions, self._num_cached or 0, 0, 0, None, None, error=error
        )


@final
class ReplicatedEngine:
    """The replicas behind a handle of Ray Serve, as a :class:`~pagedkv.server.ServedEngine`.

    Args:
        handle: handle of the deployment of :class:`~pagedkv.cluster.replica.EngineReplica`.
        facts: facts of one of its replicas; all replicas have the same model and configuration.
        clock: returns monotonic seconds.

    Attributes:
        has_inspector: whether the replicas have data for the inspector.
    """

    def __init__(
        self, handle: DeploymentHandle[Any], facts: ReplicaFacts, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.facts: EngineFacts = facts.engine
        self.last_numbers = NO_NUMBERS
        self.has_inspector = facts.is_inspected
        self._handle: Any = handle.options(stream=True, method_name="generate")
        self._inspecting: Any = handle.options(method_name="inspect")
        self._watching: Any = handle.options(stream=True, method_name="inspect_events")
        self._clock = clock
        self._link = _RouterLink(self._replicas_changed)
        self._numbers = itertools.count()
        self._routes: WeakKeyDictionary[AnswerStream, RoutedRequest] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = False
        self._is_over = False

    # The interface of ServedEngine

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served. Stays true when a replica dies, since Serve replaces it."""
        return self._is_started and not self._is_over

    @property
    def is_ready(self) -> bool:
        """Whether there is a replica that can serve; without one, requests wait (``ACCEPT_S``)."""
        return self.is_alive and (self.placements is None or self.placements.num_replicas > 0)

    @property
    def is_full(self) -> bool:
        """Return False: the queues of replicas are not known here."""
        return False

    def start(self, max_waiting: int, on_step: Callable[[StepRecord], None]) -> None:  # noqa: ARG002 - as of ServedEngine
        """Begin to serve the running event loop, and connect to the router.

        The arguments are ignored: replicas have their own limits, and their steps are not here.
        """
        self._is_started = True
        self._run(asyncio.get_running_loop(), self._connect_early())

    def formats(self, tokenizer: Any, tool_parser: str) -> Formats:  # noqa: ANN401 - of transformers, or like it
        """Return an object that checks formats here; their matchers are built by replicas."""
        own = AnswerFormats(tokenizer, self.facts.vocabulary_size, self.facts.end_ids, tool_parser)
        return RemoteFormats(own)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, intent: Intent, deadline_s: float | None
    ) -> AnswerStream:
        """Submit a request from an event loop; returns at once. Raises EngineError if the engine was stopped."""
        if not self.is_alive:
            raise EngineError("the cluster is closed")
        loop = asyncio.get_running_loop()
        seeded = params if params.seed is not None else replace(params, seed=secrets.randbits(SEED_BITS))
        request = RoutedRequest(
            next(self._numbers), np.array(prompt, np.int32), seeded, intent, deadline_s, link=self._link
        )
        state = StreamState(loop)
        task = self._run(loop, self._serve(request, state))
        stream = AnswerStream(state, lambda _: _cancel(loop, task))
        self._routes[stream] = request
        return stream

    def route_of(self, stream: AnswerStream) -> Route | None:
        """Return the replica that serves a request, and the reason; None before a replica is chosen."""
        request = self._routes.get(stream)
        choice = None if request is None else request.choice
        return None if choice is None else Route(choice.replica, str(choice.reason), choice.explain())

    async def numbers(self) -> EngineNumbers:
        """Return the sums of the replicas' last reported numbers, which are at most some seconds old.

        An entry of a shared tier counts for each replica whose store lists it.
        """
        reported = [] if self.placements is None else self.placements.numbers()
        names = ("num_running", "num_waiting", "num_live", "num_blocks", "num_leased", "num_evictions")
        sums = {name: sum(int(each.get(name, 0)) for each in reported) for name in names}
        tiers = sums_by_tier([tier for each in reported for tier in each.get("tiers", ())])
        self.last_numbers = EngineNumbers(**{**sums, "num_blocks": max(1, sums["num_blocks"])}, tiers=tiers)
        return self.last_numbers

    async def reset_prefix_cache(self) -> None:
        """Refuse: each replica has a cache of its own. Raises ApiError."""
        raise ApiError(501, "replicas have caches of their own: weights that change begin a new epoch, or restart them")

    async def forget_branches(self, prompts: Sequence[Int32Array], salt: bytes) -> int:  # noqa: ARG002 - as of ServedEngine
        """Refuse: each replica has a cache of its own. Raises ApiError."""
        raise ApiError(501, "replicas have caches of their own: what a session holds is evicted by age")

    async def sleep(self) -> int:
        """Refuse: replicas have processes of their own. Raises ApiError."""
        raise ApiError(501, "replicas do not sleep: stop some of them")

    async def wake(self) -> None:
        """Refuse, as :meth:`sleep`. Raises ApiError."""
        raise ApiError(501, "replicas do not sleep: stop some of them")

    async def stop(self) -> None:
        """End all requests. The replicas run until their application is deleted."""
        self._is_over = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def placements(self) -> Placements | None:
        """Replicas and choices of the router; None before the first call of a replica."""
        return self._link.placements

    def _run(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until it or the engine ends."""
        task = loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect_early(self) -> None:
        """Connect to the router before the first request, so that lost replicas are noticed while there are none."""
        with suppress(ApiError):  # a later request connects
            await self.connect()

    def _replicas_changed(self, change: ReplicaChange) -> None:
        """Log a change of the replicas while requests are served."""
        if not self.is_alive:
            return
        for what, replicas in (("is gone", change.removed), ("has joined", change.added)):
            for name, facts in replicas.items():
                place = facts.process, facts.node
                LOG.warning("replica %s %s (process %d on %s); %d can serve", name, what, *place, change.num_replicas)

    # The front's pages

    async def connect(self) -> None:
        """Let the router report its placements, which it does otherwise with the first request. Raises ApiError."""
        if self.placements is None:
            await self.ask_replica(ReplicaCall(None, "hello"))

    async def ask_replica(self, call: ReplicaCall) -> ReplicaAnswer:
        """Send a question to the replica that it names. Raises ApiError: no replica answers in time."""
        call.link = self._link
        try:
            answer = await asyncio.wait_for(self._inspecting.remote(call), ANSWER_S)
        except (RayError, RayServeException, TimeoutError) as problem:
            raise ApiError(503, f"the replica does not answer ({type(problem).__name__})") from problem
        assert isinstance(answer, ReplicaAnswer)
        return answer

    async def watch_replica(self, call: ReplicaCall) -> AsyncGenerator[bytes, None]:
        """Yield the inspector's events of the replica that a call names, until it ends or this is closed."""
        call.link = self._link
        response = self._watching.remote(call)
        is_over = False
        try:
            async for each in response:
                yield each
            is_over = True
        except (RayError, RayServeException):
            is_over = True
        finally:
            if not is_over:
                response.cancel()

    # One request

    async def _serve(self, request: RoutedRequest, state: StreamState) -> None:
        """Serve a request, with further attempts after the loss of a replica."""
        so_far = AnswerSoFar(request.prompt_token_ids.tolist(), request.params)
        deadline = None if request.deadline_s is None else self._clock() + request.deadline_s
        try:
            while True:
                try:
                    await self._serve_by_one_replica(request, so_far, state)
                    break
                except _LostReplicaError as lost:
                    self._prepare_next_attempt(request, so_far, deadline, lost)
        except asyncio.CancelledError:
            deliver([StreamMessage(state, so_far.last_updates("aborted"), so_far.ended("aborted"))])
        except TimeoutError:
            deliver([StreamMessage(state, so_far.last_updates("deadline"), so_far.ended("deadline"))])
        except ApiError as problem:
            deliver([StreamMessage(state, problem=problem)])
        except Exception as problem:  # noqa: BLE001 - any error must reach the caller, which waits for messages
            deliver([StreamMessage(state, problem=as_sendable(problem))])

    def _prepare_next_attempt(
        self, request: RoutedRequest, so_far: AnswerSoFar, deadline: float | None, lost: _LostReplicaError
    ) -> None:
        """Prepare a request for another replica. Raises EngineError: too many attempts; TimeoutError: its deadline."""
        if so_far.num_attempts >= MOST_ATTEMPTS:
            raise EngineError(
                f"{MOST_ATTEMPTS} replicas were lost while they served this request, the last one after "
                f"{so_far.num_sent} tokens: {lost}. Look at the replicas' logs, and send the request again"
            ) from lost
        request.intent = so_far.begin_again(request.intent)
        request.attempt = so_far.num_attempts
        if deadline is not None:
            request.deadline_s = deadline - self._clock()
            if request.deadline_s <= 0:
                raise TimeoutError
        if self.placements is not None:
            self.placements.note_moved()
        LOG.warning("request %d moves after %d tokens: %s", request.number, so_far.num_sent, lost)

    async def _serve_by_one_replica(self, request: RoutedRequest, so_far: AnswerSoFar, state: StreamState) -> None:
        """Make one attempt to serve a request. Raises _LostReplicaError."""
        has_tokens = False
        try:
            async for message in self._messages(request):
                if message.is_lost:
                    raise _LostReplicaError(str(message.problem))
                if message.updates and not has_tokens:
                    has_tokens = True
                    self._note(lambda placements: placements.prefilled(request.number))
                so_far.note_cached(message.num_cached_tokens)
                updates = so_far.take(message.updates)
                output = None if message.output is None else so_far.complete(message.output)
                deliver([StreamMessage(state, updates, output, message.problem)])
                if message.is_over:
                    return
            raise _LostReplicaError("its stream ended without an output")
        finally:
            self._note(lambda placements: placements.ended(request.number))

    async def _messages(self, request: RoutedRequest) -> AsyncIterator[ReplicaMessage]:
        """Yield the messages of a replica.

        Raises:
            _LostReplicaError: the replica was lost.
            TimeoutError: no replica accepted the request before its deadline.
            ApiError: none accepted it within ``ACCEPT_S``, or Serve has given up starting replicas.
        """
        response = self._handle.remote(request)
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        is_over = False
        try:
            message = await self._first(request, response, min(ACCEPT_S, deadline_s))
            while True:
                is_over = message.is_over
                yield message
                message = await anext(response)
        except StopAsyncIteration:
            is_over = True
        except TimeoutError:
            if deadline_s <= ACCEPT_S:
                raise
            raise _no_replica(f"none accepted the request within {ACCEPT_S:g} s") from None
        except RayActorError as problem:
            is_over = True
            raise _LostReplicaError(f"its process ended ({type(problem).__name__})") from problem
        except (BackPressureError, DeploymentUnavailableError) as problem:
            is_over = True
            raise _no_replica(str(problem)) from problem
        except (RayError, RayServeException) as problem:
            is_over = True
            raise _LostReplicaError(f"{type(problem).__name__}: {problem}") from problem
        finally:
            if not is_over:
                response.cancel()

    async def _first(self, request: RoutedRequest, response: Any, most_s: float) -> ReplicaMessage:  # noqa: ANN401 - Serve's
        """Wait for the first message, by which a replica accepts a request.

        Serve itself waits without end for a replica that does not answer. Raises _LostReplicaError: the replica is
        silent, and another one is not; TimeoutError: no replica has accepted the request in so many seconds.
        """
        ends_s = self._clock() + most_s
        first = asyncio.ensure_future(anext(response))
        try:
            while (left_s := ends_s - self._clock()) > 0:
                await asyncio.wait({first}, timeout=min(left_s, HEARTBEAT_S))
                if first.done():
                    message = first.result()
                    assert isinstance(message, ReplicaMessage)
                    return message
                choice = request.choice
                if choice is not None and self.placements is not None and self.placements.should_leave(choice.replica):
                    raise _LostReplicaError(f"replica {choice.replica} is silent, and has not accepted it")
            raise TimeoutError
        finally:
            first.cancel()

    def _note(self, note: Callable[[Placements], None]) -> None:
        if self.placements is not None:
            note(self.placements)


def _no_replica(reason: str) -> ApiError:
    return ApiError(503, f"no replica can serve: {reason}", code="no_replica", retry_after_s=RETRY_S)


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """End a request, from any thread."""
    with suppress(RuntimeError):  # the loop was closed, and its tasks with it
        loop.call_soon_threadsafe(task.cancel)
