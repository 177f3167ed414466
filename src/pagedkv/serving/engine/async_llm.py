"""AsyncLLM: an engine for event loops: many callers, one engine, one thread that drives it.

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

from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.contract.errors import ConfigurationError, RequestError
from pagedkv.memory.contract.space_config import TenantLimits
from pagedkv.serving.engine.answer_stream import AnswerStream, Mailbox
from pagedkv.serving.engine.engine_thread import Call, Close, End, EngineThread, Submit
from pagedkv.serving.engine.intent import PLAIN, Intent
from pagedkv.serving.engine.llm import LLM, Prompt
from pagedkv.serving.engine.records import StepRecord
from pagedkv.serving.engine.sampling import SamplingParams

__all__ = ["AsyncLLM"]

WhenFull: TypeAlias = Literal["wait", "refuse"]

T = TypeVar("T")


def _pass_on(result: Future[T], done: Future[None]) -> None:
    """Give a result the problem of a call."""
    problem = done.exception()
    if problem is not None:
        result.set_exception(problem)


def _ignore(record: StepRecord) -> None:
    """Do nothing with a step's record."""


@final
class AsyncLLM:
    """Serves callers of event loops with one engine, which nobody else can use until this is closed (EngineError).

    Tokens, deadlines and ends are seen to between steps, so a deadline is kept to within a step. One request's fault
    is told to its caller alone. A step that fails twice ends requests of it; a failure of the engine is told to all
    (EngineError), and the engine must be built again.

    Args:
        llm: the engine.
        max_waiting: requests that wait to be admitted, at most; those that run are bounded by the engine's config.
        when_full: what becomes of more: they "wait" at the door in their order, or the engine is to "refuse" them
            (QueueFullError). Who awaits :meth:`AnswerStream.accepted` before the next goes on no faster than served.
        clock: gives seconds, never backwards; deadlines are by it.
        on_step: called with each step's record, by the engine's thread, which waits for it; what it raises ends the
            engine.

    Raises:
        ConfigurationError: ``max_waiting`` is not at least 1, or ``when_full`` is neither.
        EngineError: another thread drives the engine: it has an AsyncLLM already.
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
        atexit.register(self.close)  # a thread in the middle of a step would stop Python from ending

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        intent: Intent | None = None,
        deadline_s: float | None = None,
    ) -> AnswerStream:
        """Ask for answers to a prompt, from within an event loop. Returns at once.

        Args:
            prompt: a text, token ids, or messages, as :meth:`LLM.generate` takes them.
            params: what it asks for; None: 16 tokens, the most likely ones.
            intent: what its caller says beside that; None: nothing.
            deadline_s: seconds from now, after which it ends with what it has, and finish reason "deadline".

        Returns:
            the stream of its answers, which tells what is wrong with the request, too.

        Raises:
            RequestError: the deadline is no number of seconds.
            EngineError: the engine has failed, or was closed.
        """
        if deadline_s is not None and not 0 <= deadline_s < inf:
            raise RequestError(f"deadline_s must be seconds from now, got {deadline_s}")
        deadline = None if deadline_s is None else self._clock() + deadline_s
        mailbox = Mailbox(asyncio.get_running_loop())
        wished, said = SamplingParams() if params is None else params, PLAIN if intent is None else intent
        self._thread.send(Submit(mailbox, prompt, wished, deadline, said))
        thread = self._thread
        return AnswerStream(mailbox, lambda mailbox: thread.tell(End(mailbox)))

    @property
    def has_ended(self) -> bool:
        """Whether the engine serves nothing any more: it was closed, or it failed."""
        return self._thread.has_ended

    async def reset_prefix_cache(self) -> None:
        """Let later requests hit nothing of what was computed before: :meth:`EngineCore.reset_prefix_cache`.

        Between two steps, by the engine's thread; it has happened when this returns. Raises EngineError.
        """
        await self._call(LLM.reset_prefix_cache)

    async def set_weights_epoch(self, weights_epoch: str | int, *, change: Callable[[], object] | None = None) -> None:
        """Say that the model has other weights from the next step on: :meth:`EngineCore.set_weights_epoch`.

        Between two steps, by the engine's thread; it has happened when this returns. So whoever changes weights in
        place, while requests are under way, does it in ``change``. Raises as there, and where the engine was closed.
        """
        await self._call(partial(LLM.set_weights_epoch, weights_epoch=weights_epoch, change=change))

    async def forget(self, prompt: Prompt, *, salt: bytes = b"", start: int = 0) -> None:
        """Drop a prompt, and all that continues it, from the cache and from every tier: :meth:`EngineCore.forget`.

        Between two steps, by the engine's thread; it has happened when this returns. Raises EngineError.
        """
        await self.between_steps(partial(LLM.forget, prompt=prompt, salt=salt, start=start))

    async def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant, or change the limits of one, between two steps: :meth:`EngineCore.set_tenant`.

        It has happened when this returns. Raises as there, and where the engine was closed.
        """
        await self._call(partial(LLM.set_tenant, name=name, limits=limits))

    async def remove_tenant(self, name: str) -> None:
        """Remove a tenant without requests, between two steps: :meth:`EngineCore.remove_tenant`.

        It has happened when this returns. Raises as there, and where the engine was closed.
        """
        await self._call(partial(LLM.remove_tenant, name=name))

    def call_soon(self, work: Callable[[LLM], T]) -> Future[T]:
        """Let the engine's thread do something between two steps; any thread may call this, and wait for the result.

        Args:
            work: it gets the engine, and must not keep the engine waiting. What it raises is the result's exception.

        Raises:
            EngineError: the engine was closed, or has failed. If that happens later, it is the result's exception.
        """
        result: Future[T] = Future()
        call = Call(lambda llm: result.set_result(work(llm)))
        call.done.add_done_callback(partial(_pass_on, result))
        self._thread.send(call)
        return result

    async def between_steps(self, work: Callable[[LLM], T]) -> T:
        """Let the engine's thread do something between two steps, and return what it returns.

        Args:
            work: it gets the engine, and must not keep the engine waiting. What it raises is raised here.

        Raises:
            EngineError: the engine was closed, or has failed.
        """
        answers: list[T] = []
        await self._call(lambda llm: answers.append(work(llm)))
        return answers[0]

    async def _call(self, work: Callable[[LLM], None]) -> None:
        """Let the engine's thread do something between two steps, and wait for it."""
        call = Call(work)
        self._thread.send(call)
        await asyncio.wrap_future(call.done)

    def close(self, *, drain: bool = False) -> None:
        """Let nobody in any more, end the thread, and wait for that. May be called again.

        Args:
            drain: serve all who have come; else they end at once, "aborted" with what they have.
        """
        self._thread.tell(Close(drain))
        self._thread.join()
        atexit.unregister(self.close)

    async def aclose(self, *, drain: bool = False) -> None:
        """Do as :meth:`close`, while the loop goes on."""
        await asyncio.to_thread(self.close, drain=drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; what is under way ends."""
        await self.aclose()
