"""New tokens of a request, and its answers as a stream in an event loop.

The engine's thread refers to a stream's StreamState and never to the AnswerStream. So an AnswerStream without
references is garbage-collected, and that ends its request::

    caller -- AnswerStream -- StreamState -- engine's thread
                 |  __del__ / aclose: an End command to the thread
                 `- awaits messages                              (by the state's outlet, into the caller's loop)

A StreamState is one kind of :class:`Recipient`; another has an outlet to another process.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias, final

from pagedkv.engine.outputs import FinishReason, RequestOutput
from pagedkv.engine.request import EngineRequest
from pagedkv.engine.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New tokens of one answer, while it is under way.

    Args:
        prompt: index of the prompt among those given; index: of the answer among the prompt's.
        token_ids: the new tokens.
        finish_reason: why the answer ended, in its last update; else None.
        logprobs: of each new token; None if they were not requested.
        stop: the token id or the text that ended the answer; None if it has not ended, or ended otherwise.
    """

    prompt: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop: int | str | None = None


@final
class NewTokens:
    """Follows one request, and returns each new token once.

    An answer that starts again after a preemption has no new tokens until it is longer than before.

    Args:
        request: the request.
        prompt: its index among the prompts given.
    """

    def __init__(self, request: EngineRequest, prompt: int = 0) -> None:
        self._request = request
        self._prompt = prompt
        self._num_given = [sample.num_continued for sample in request.samples]
        self._is_over = [False] * len(request.samples)

    def take(self) -> tuple[TokenUpdate, ...]:
        """Return an update for each answer with new tokens or a new end. O(new tokens + answers)."""
        updates: tuple[TokenUpdate, ...] = ()
        for place, sample in enumerate(self._request.samples):
            is_over, first = sample.finish_reason is not None, self._num_given[place]
            token_ids = tuple(sample.token_ids[first:])
            if token_ids or is_over > self._is_over[place]:
                self._num_given[place] += len(token_ids)
                self._is_over[place] = is_over
                logprobs = sample.logprobs_from(first)
                updates += (
                    TokenUpdate(self._prompt, sample.index, token_ids, sample.finish_reason, logprobs, sample.stop),
                )
        return updates

    def take_one(self) -> int | None:
        """Return the new token if it is all the news of a request with one answer, which goes on; else None.

        With None nothing is taken; neither is a token with log-probabilities. O(1).
        """
        if len(self._is_over) > 1 or self._request.is_finished:
            return None
        sample, first = self._request.samples[0], self._num_given[0]
        token_ids = sample.token_ids
        if len(token_ids) != first + 1 or sample.has_logprobs:
            return None
        self._num_given[0] = first + 1
        return token_ids[first]


class OutletClosedError(Exception):
    """Messages cannot be sent: all recipients of an outlet are gone."""


class Outlet(Protocol):
    """Sends the messages of many recipients to one place. Hashable; outlets of one place are equal."""

    def send(self, messages: "Sequence[StreamMessage]", grown: "Sequence[Grown]" = ()) -> None:
        """Send messages, in order, and tokens; called by the engine's thread. Raises OutletClosedError.

        Args:
            messages: at most one of a recipient with a token.
            grown: further tokens of requests that go on.
        """
        ...


class Recipient(Protocol):
    """Receives the messages of one request, and identifies it. Hashable by identity."""

    @property
    def outlet(self) -> Outlet:
        """The outlet for its messages."""
        ...


@final
@dataclass(frozen=True, slots=True)
class _LoopOutlet:
    """Delivers messages in an event loop."""

    loop: asyncio.AbstractEventLoop

    def send(self, messages: "Sequence[StreamMessage]", grown: "Sequence[Grown]" = ()) -> None:
        """Deliver messages and tokens soon. Raises OutletClosedError if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(deliver, messages, grown)
        except RuntimeError:
            raise OutletClosedError from None


@final
class StreamState:
    """What has arrived in an event loop for one request. Changed in that loop alone, by :meth:`add`.

    Args:
        loop: the loop of the request's caller, to which its messages are sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outlet: Outlet = _LoopOutlet(loop)
        self.updates: deque[TokenUpdate] = deque()
        self.is_accepted = False
        self.num_cached_tokens: int | None = None
        self.output: RequestOutput | None = None
        self.problem: Exception | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the output or the error of the request has arrived."""
        return self.output is not None or self.problem is not None

    def add(
        self,
        updates: Iterable[TokenUpdate],
        output: RequestOutput | None = None,
        problem: Exception | None = None,
        num_cached_tokens: int | None = None,
    ) -> None:
        """Add the contents of a message, and wake the tasks that wait for it."""
        self.is_accepted |= problem is None
        self.updates.extend(updates)
        if num_cached_tokens is not None:
            self.num_cached_tokens = num_cached_tokens
        self.output = self.output or output
        self.problem = self.problem or problem
        self.changed.set()
        if self.is_over:
            self.ended.set()

    def grow(self, token_id: int) -> None:
        """Add one more token of the only answer, which goes on, and wake the tasks that wait for it."""
        self.updates.append(TokenUpdate(0, 0, (token_id,), None))
        self.changed.set()


@dataclass(frozen=True, slots=True, eq=False)
class StreamMessage:
    """News of one request, from the engine's thread to its recipient. Empty: the engine has accepted it.

    Args:
        recipient: the request's recipient.
        updates: new tokens.
        output: all answers, in the last message of a request that was served.
        problem: the error of a request that was not served.
        num_cached_tokens: tokens of its prompt that were hit, once it was admitted.
    """

    recipient: Recipient
    updates: tuple[TokenUpdate, ...] = ()
    output: RequestOutput | None = None
    problem: Exception | None = None
    num_cached_tokens: int | None = None


Grown: TypeAlias = tuple[Recipient, int]
"""A request whose only answer has one more token, and that token: what most requests have to tell after a step."""


def deliver(messages: Iterable[StreamMessage], grown: Iterable[Grown] = ()) -> None:
    """Add messages and tokens to the states of their streams; called in the loop of these states. O(updates)."""
    for recipient, token_id in grown:
        assert isinstance(recipient, StreamState), "a token for another kind of recipient"
        recipient.grow(token_id)
    for message in messages:
        assert isinstance(message.recipient, StreamState), "a message for another kind of recipient"
        message.recipient.add(message.updates, message.output, message.problem, message.num_cached_tokens)


@final
class AnswerStream:
    """The answers to one prompt: new tokens by ``async for``, complete answers by :meth:`output`.

    A request ends early, and its blocks are freed, when a task that awaits it is cancelled, by :meth:`aclose`, and when
    its stream is garbage-collected.

    Args:
        state: what has arrived for the request.
        end: ends the request in the engine; called at any time, in any thread.
    """

    def __init__(self, state: StreamState, end: Callable[[StreamState], None]) -> None:
        self._state = state
        self._end = end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenUpdate:
        """Wait for new tokens of any of the answers. Raises as :meth:`output`, after all tokens that arrived."""
        state = self._state
        await self._wait_for_updates()
        if state.updates:
            return state.updates.popleft()
        self._raise_problem()
        raise StopAsyncIteration

    async def take(self) -> tuple[TokenUpdate, ...]:
        """Wait for new tokens, and return all that have arrived; empty at the end. Raises as :meth:`output`, then.

        A slow reader so gets all tokens since its last call at once.
        """
        await self._wait_for_updates()
        taken = self.taken()
        if not taken:
            self._raise_problem()
        return taken

    def taken(self) -> tuple[TokenUpdate, ...]:
        """Return the tokens that have arrived and were not read, without waiting. O(updates)."""
        updates = self._state.updates
        taken = tuple(updates)
        updates.clear()
        return taken

    @property
    def result(self) -> RequestOutput | None:
        """All answers once they have ended; None before, and if the request was not served."""
        return self._state.output

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were hit; None before the first tokens of an answer."""
        return self._state.num_cached_tokens

    @property
    def is_over(self) -> bool:
        """Whether all answers have ended, or the request has failed."""
        return self._state.is_over

    @property
    def num_unread(self) -> int:
        """Tokens that have arrived and were not read, of the answer with most of them. O(updates)."""
        by_answer: dict[int, int] = {}
        for each in self._state.updates:
            by_answer[each.index] = by_answer.get(each.index, 0) + len(each.token_ids)
        return max(by_answer.values(), default=0)

    async def accepted(self) -> None:
        """Wait until the request is in the engine's queue.

        A caller that awaits this before its next request submits no faster than requests are served.

        Raises:
            RequestError: the request cannot be served.
            QueueFullError: ``max_waiting`` requests wait, and ``when_full`` is "refuse".
            EngineError: the engine has failed, or was closed.
        """
        state = self._state
        while not state.is_accepted and not state.is_over:
            await self._wait(state.changed)
        self._raise_problem()

    async def output(self) -> RequestOutput:
        """Wait for the end of all answers; updates need not be read. Raises as :meth:`accepted`.

        The waiting task wakes once, at the end, and not for each new token.
        """
        if not self._state.is_over:
            await self._wait(self._state.ended)
        self._raise_problem()
        assert self._state.output is not None, "a stream is over without an output"
        return self._state.output

    async def aclose(self) -> None:
        """End the request now; :meth:`output` then returns its tokens so far. Without effect where it is over."""
        self._close()

    async def _wait_for_updates(self) -> None:
        """Wait for new tokens, or for the end of the request."""
        state = self._state
        while not state.updates and not state.is_over:
            await self._wait(state.changed)

    async def _wait(self, event: asyncio.Event) -> None:
        """Wait for an event of the state; a task that is cancelled meanwhile ends the request."""
        event.clear()
        try:
            await event.wait()
        except asyncio.CancelledError:
            self._close()
            raise

    def _raise_problem(self) -> None:
        if self._state.problem is not None:
            raise self._state.problem

    def _close(self) -> None:
        if not self._state.is_over:
            self._end(self._state)

    def __del__(self) -> None:
        self._close()
