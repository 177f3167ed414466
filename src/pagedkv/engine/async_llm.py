"""AsyncLLM: an engine for event loops. One thread drives the engine, and serves callers of any number of loops.

>>> async def main() -> None:  # doctest: +SKIP
...     async with AsyncLLM(LLM(model)) as engine:
...         async for update in engine.generate([1, 2, 3], SamplingParams(max_tokens=8), deadline_s=2.0):
...             print(update.token_ids)
"""

import asyncio
import atexit
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypeVar, final

from pagedkv.contract.arguments import as_count
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine.answer_stream import AnswerStream, Recipient, StreamState
from pagedkv.engine.engine_thread import Call, Close, End, EngineThread, Submit
from pagedkv.engine.llm import LLM, Prompt
from pagedkv.engine.outputs import StepRecord
from pagedkv.engine.request import PLAIN, Intent
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import ConfigurationError, RequestError

__all__ = ["AsyncLLM"]

WhenFull: TypeAlias = Literal["wait", "refuse"]

T = TypeVar("T")


def _pass_on(result: Future[T], done: Future[None]) -> None:
    """Fail a result with the error of a call, if the call failed."""
    problem = done.exception()
    if problem is not None:
        result.set_exception(problem)


def _ignore(record: StepRecord) -> None:
    """Do nothing: the default of ``on_step``."""


@final
class AsyncLLM:
    """Serves event loops with one engine. Until this is closed, other uses of the engine raise EngineError.

    Requests are ended, and their tokens sent, between steps: a deadline is exceeded by at most one step. The error of a
    request reaches its caller alone. A step that fails twice ends requests of it. A failure of the engine ends all
    requests (EngineError), and a new engine must be built.

    Args:
        llm: the engine.
        max_waiting: most requests in the engine's queue; running requests are bounded by the engine's config.
        when_full: a request that finds the queue full may "wait" for a place, first come, first served, or the engine
            may "refuse" it (QueueFullError). :meth:`AnswerStream.accepted` waits for that place.
        clock: returns seconds, never backwards; deadlines are in its time.
        on_step: called with each step's record in the engine's thread, which waits for it; an error of it ends the
            engine.

    Raises:
        ConfigurationError: ``max_waiting`` is below 1, or ``when_full`` is neither.
        EngineError: another thread drives the engine, as that of another AsyncLLM.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = 1024,
        when_full: WhenFull = "wait",
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepRecord], None] = _ignore,
    ) -> None:
        as_count(max_waiting, "max_waiting", least=1)
        if when_full not in {"wait", "refuse"}:
            raise ConfigurationError(f"when_full must be 'wait' or 'refuse', got {when_full!r}")
        self._clock = clock
        self._thread = EngineThread(llm, max_waiting, refuses=when_full == "refuse", clock=clock, on_step=on_step)
        atexit.register(self.close)  # a thread in the middle of a step would keep the interpreter from exiting

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        intent: Intent | None = None,
        deadline_s: float | None = None,
    ) -> AnswerStream:
        """Submit a prompt, from within an event loop. Returns at once.

        Args:
            prompt: a text, token ids, or messages, as :meth:`LLM.generate` takes them.
            params: sampling, lengths and stops; None: 16 tokens, the most likely ones.
            intent: hints about caching and scheduling; None: none.
            deadline_s: seconds from now after which the request ends with its tokens so far, and finish reason
                "deadline"; None: no deadline.

        Returns:
            the stream of the answers. It raises the errors of the request, too.

        Raises:
            RequestError: the deadline is not a number of seconds.
            EngineError: the engine has failed, or was closed.
        """
        state = StreamState(asyncio.get_running_loop())
        self.submit(state, prompt, params, intent=intent, deadline_s=deadline_s)
        thread = self._thread
        return AnswerStream(state, lambda state: thread.send_if_running(End(state)))

    def submit(
        self,
        recipient: Recipient,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        intent: Intent | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Submit a prompt whose messages another object than a stream receives. Any thread may call this.

        Args:
            recipient: receives the messages, by its outlet, in the engine's thread; :meth:`end` ends its request.
            prompt, params, intent, deadline_s: as of :meth:`generate`.

        Raises:
            RequestError, EngineError: as :meth:`generate`.
        """
        if deadline_s is not None and not 0 <= deadline_s < inf:
            raise RequestError(f"deadline_s must be seconds from now, got {deadline_s}")
        deadline = None if deadline_s is None else self._clock() + deadline_s
        params = SamplingParams() if params is None else params
        self._thread.send(Submit(recipient, prompt, params, deadline, PLAIN if intent is None else intent))

    def end(self, recipient: Recipient) -> None:
        """End the request of a recipient, "aborted". Without effect where it, or the engine, has ended."""
        self._thread.send_if_running(End(recipient))

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine's queue, as of the last step or submission; any thread may read it."""
        return self._thread.num_waiting

    @property
    def has_ended(self) -> bool:
        """Whether the engine was closed or has failed, and so serves no requests."""
        return self._thread.has_ended

    async def reset_prefix_cache(self) -> None:
        """Drop every cached block, so that later requests hit none: :meth:`EngineCore.reset_prefix_cache`.

        Done by the engine's thread between two steps, before this returns. Raises EngineError.
        """
        await self._call(LLM.reset_prefix_cache)

    async def set_weights_epoch(self, weights_epoch: str | int, *, change: Callable[[], object] | None = None) -> None:
        """Begin a new epoch of weights with the next step: :meth:`EngineCore.set_weights_epoch`.

        Done by the engine's thread between two steps, before this returns. Weights that are changed in place while
        requests run must be changed in ``change``. Raises as there, and EngineError where the engine was closed.
        """
        await self._call(partial(LLM.set_weights_epoch, weights_epoch=weights_epoch, change=change))

    async def forget(self, prompt: Prompt, *, salt: bytes = b"", start: int = 0) -> None:
        """Drop a prompt, and all that continues it, from the cache and from every tier: :meth:`EngineCore.forget`.

        Done by the engine's thread between two steps, before this returns. Raises EngineError.
        """
        await self.between_steps(partial(LLM.forget, prompt=prompt, salt=salt, start=start))

    async def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant, or change the limits of one, between two steps: :meth:`EngineCore.set_tenant`.

        Done before this returns. Raises as there, and EngineError where the engine was closed.
        """
        await self._call(partial(LLM.set_tenant, name=name, limits=limits))

    async def remove_tenant(self, name: str) -> None:
        """Remove a tenant without requests, between two steps: :meth:`EngineCore.remove_tenant`.

        Done before this returns. Raises as there, and EngineError where the engine was closed.
        """
        await self._call(partial(LLM.remove_tenant, name=name))

    def call_soon(self, work: Callable[[LLM], T]) -> Future[T]:
        """Call a function in the engine's thread, between two steps. May be called by any thread. Returns at once.

        Args:
            work: called with the engine, which waits for it. An error of it is the result's exception.

        Raises:
            EngineError: the engine was closed, or has failed. Where that happens before the call, it is the result's
                exception.
        """
        result: Future[T] = Future()
        call = Call(lambda llm: result.set_result(work(llm)))
        call.done.add_done_callback(partial(_pass_on, result))
        self._thread.send(call)
        return result

    async def between_steps(self, work: Callable[[LLM], T]) -> T:
        """Call a function in the engine's thread, between two steps, and return its result.

        Args:
            work: called with the engine, which waits for it. An error of it is raised here.

        Raises:
            EngineError: the engine was closed, or has failed.
        """
        answers: list[T] = []
        await self._call(lambda llm: answers.append(work(llm)))
        return answers[0]

    async def _call(self, work: Callable[[LLM], None]) -> None:
        """Call a function in the engine's thread, between two steps, and wait for its end."""
        call = Call(work)
        self._thread.send(call)
        await asyncio.wrap_future(call.done)

    def join(self) -> None:
        """Wait until the engine's thread has ended, because it was closed or has failed."""
        self._thread.join()

    def close(self, *, drain: bool = False) -> None:
        """Refuse further requests, end the thread, and wait for that. May be called again.

        Args:
            drain: serve all requests to their ends; else they end now, "aborted", with their tokens so far.
        """
        self._thread.send_if_running(Close(drain))
        self._thread.join()
        atexit.unregister(self.close)

    async def aclose(self, *, drain: bool = False) -> None:
        """Close as :meth:`close` does, without blocking the loop."""
        await asyncio.to_thread(self.close, drain=drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; requests under way end, "aborted"."""
        await self.aclose()
