"""AsyncLLM: an engine for event loops. One thread drives the engine, and serves callers of any number of loops.

>>> async def main() -> None:  # doctest: +SKIP
...     async with AsyncLLM(LLM(model)) as engine:
...         async for update in engine.generate([1, 2, 3], SamplingParams(max_tokens=8), deadline_s=2.0):
...             print(update.token_ids)

Callers send commands to the :class:`EngineThread`, and receive messages::

    callers  -- Submit, End, Close -->  queue  --> | backlog | waiting, max_waiting at most | running |  the engine's
             <---- messages, by outlet ----------- `--------------- after every step ----------------'

Between two steps the thread carries out commands, ends requests past their deadlines, and submits requests of the
backlog to the engine while its queue has room. When the thread ends, each request under way gets a message with the
reason.
"""

import asyncio
import atexit
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias, TypeVar, assert_never, final

from pagedkv.contract.arguments import as_count
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine.answer_stream import (
    AnswerStream,
    Grown,
    NewTokens,
    Outlet,
    OutletClosedError,
    Recipient,
    StreamMessage,
    StreamState,
)
from pagedkv.engine.llm import LLM
from pagedkv.engine.outputs import FinishReason, StepRecord
from pagedkv.engine.prompts import Prompt
from pagedkv.engine.request import PLAIN, EngineRequest, Intent
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import ConfigurationError, EngineError, QueueFullError, RequestError

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


CLOSED: Final = "the engine is closed"


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Serve a request.

    Args:
        recipient: identifies the request, and receives its messages.
        prompt, params, intent: the request.
        deadline: time of the clock at which the request ends; None: no deadline.
    """

    recipient: Recipient
    prompt: Prompt
    params: SamplingParams
    deadline: float | None
    intent: Intent = PLAIN


@dataclass(frozen=True, slots=True)
class End:
    """End a request, "aborted", wherever it is."""

    recipient: Recipient


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread: now, or with ``drain`` once all requests have been served."""

    drain: bool


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Call a function between two steps.

    Args:
        work: called with the engine.
        done: its result is set after the call, or its exception if the call failed or was refused.
    """

    work: Callable[[LLM], object]
    done: Future[None] = field(default_factory=Future)

    def carry_out(self, llm: LLM) -> None:
        """Call the function, unless ``done`` was cancelled. An error of it reaches ``done`` alone."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.work(llm)
            except Exception as problem:  # noqa: BLE001 - any error is the caller's, and is raised there
                self.done.set_exception(problem)
            else:
                self.done.set_result(None)

    def refuse(self, problem: EngineError) -> None:
        """Fail ``done`` without a call."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(problem)


Command: TypeAlias = Submit | End | Close | Call


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A request in the engine.

    Args:
        submitted: its command; request: the engine's record of it.
        new_tokens: its tokens since the last message.
        has_begun: whether a message with tokens, and with the hit of its prompt, was sent.
    """

    submitted: Submit
    request: EngineRequest
    new_tokens: NewTokens
    has_begun: bool = False


@final
class EngineThread:
    """Drives an engine, which no other thread can use meanwhile.

    Args:
        llm: the engine.
        max_waiting: most requests that wait in the engine's queue.
        refuses: whether a request that finds the queue full is refused; else it waits in the backlog, in order.
        clock: returns seconds, never backwards; deadlines are in its time.
        on_step: called with each step's record, in the engine's thread.

    Raises:
        EngineError: another thread drives the engine.
    """

    def __init__(
        self,
        llm: LLM,
        max_waiting: int,
        *,
        refuses: bool,
        clock: Callable[[], float],
        on_step: Callable[[StepRecord], None],
    ) -> None:
        self._on_step = on_step
        self._llm = llm
        self._max_waiting = max_waiting
        self._refuses = refuses
        self._clock = clock
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._backlog: dict[Recipient, Submit] = {}
        self._under_way: dict[Recipient, _UnderWay] = {}
        self._waiting: list[_UnderWay] = []
        self._messages: list[StreamMessage] = []
        self._grown: list[Grown] = []
        self._closing: Close | None = None
        self._lock = threading.RLock()  # reentrant: a stream may be garbage-collected at any point, and sends an End
        self._ended: str | None = None
        self._is_closed = False
        took_over: Future[None] = Future()
        self._thread = threading.Thread(target=self._drive, args=(took_over,), name="pagedkv engine", daemon=True)
        self._thread.start()
        took_over.result()

    # Called by other threads

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineError if the thread has ended, or was sent a Close."""
        with self._lock:
            if self._ended is not None:
                raise EngineError(self._ended)
            if self._is_closed:
                raise EngineError(CLOSED)
            self._commands.put(command)

    def send_if_running(self, command: Command) -> None:
        """Send a command, and drop it if the thread has ended."""
        with self._lock:
            self._is_closed |= isinstance(command, Close)
            if self._ended is None:
                self._commands.put(command)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine's queue, as of the last step or submission; any thread may read it."""
        return len(self._waiting)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, or is closing."""
        return self._ended is not None or self._is_closed

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # The thread

    def _drive(self, took_over: Future[None]) -> None:
        """Take the engine over, and drive it until the thread ends."""
        try:
            with self._llm.core.driver.driving():
                took_over.set_result(None)
                self._run()
        except EngineError as problem:  # another thread drives the engine: nothing has begun
            took_over.set_exception(problem)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._end_expired()
                self._submit_backlog()
                self._send_messages()  # the last message of an ended request does not wait for the next step
                if self._llm.core.has_work:
                    self._on_step(self._llm.step())
                self._waiting = [
                    each
                    for each in self._waiting
                    if each.request.num_cached_tokens is None and not each.request.is_finished
                ]
                for recipient, under_way in list(self._under_way.items()):
                    self._add_message(recipient, under_way)
                self._send_messages()
            self._end_all()
        except Exception as problem:  # noqa: BLE001 - after any error the waiting callers must be woken
            reason = str(problem) if isinstance(problem, EngineError) else f"{type(problem).__name__}: {problem}"
            self._stop(reason, problem)
        else:
            self._stop(CLOSED)

    def _take_commands(self) -> bool:
        """Carry out all commands sent; wait for one where there is no other work. Return whether to go on."""
        may_wait = self._closing is None and not self._backlog and not self._llm.core.has_work
        while True:
            try:
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                break
            may_wait = False
            self._carry_out(command)
        if self._closing is None:
            return True
        return self._closing.drain and bool(self._backlog or self._under_way)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Close():
                self._closing = command
            case Call():
                command.carry_out(self._llm)
            case End():
                self._end_on_command(command)
            case Submit():
                self._accept(command)
            case _:
                assert_never(command)

    def _end_on_command(self, command: End) -> None:
        if command.recipient in self._backlog:
            self._submit(command.recipient)  # so that it has an output, as every aborted request
        if command.recipient in self._under_way:
            self._end(command.recipient, "aborted")

    def _accept(self, command: Submit) -> None:
        if not self._refuses or self._has_room():
            self._backlog[command.recipient] = command
            self._submit_backlog()
        else:
            problem = QueueFullError(f"{self._max_waiting} requests wait, and no more may: ask again later")
            self._messages.append(StreamMessage(command.recipient, problem=problem))

    def _has_room(self) -> bool:
        return len(self._waiting) < self._max_waiting

    def _submit_backlog(self) -> None:
        while self._backlog and self._has_room():
            self._submit(next(iter(self._backlog)))

    def _submit(self, recipient: Recipient) -> None:
        submitted = self._backlog.pop(recipient)
        try:
            (request,) = self._llm.submit([submitted.prompt], submitted.params, [submitted.intent])
        except EngineError:
            self._backlog[recipient] = submitted
            raise
        except Exception as problem:  # noqa: BLE001 - of a tokenizer or template: it fails this request alone
            self._messages.append(StreamMessage(recipient, problem=problem))
            return
        under_way = self._under_way[recipient] = _UnderWay(submitted, request, NewTokens(request))
        self._waiting.append(under_way)
        self._messages.append(StreamMessage(recipient))

    def _end_expired(self) -> None:
        now = self._clock()
        for recipient, submitted in list(self._backlog.items()):
            if submitted.deadline is not None and submitted.deadline <= now:
                self._submit(recipient)  # so that it has an output
        for recipient, under_way in list(self._under_way.items()):
            deadline = under_way.submitted.deadline
            if deadline is not None and deadline <= now:
                self._end(recipient, "deadline")

    def _end(self, recipient: Recipient, reason: FinishReason) -> None:
        under_way = self._under_way[recipient]
        self._llm.core.abort(under_way.request, reason)
        self._add_message(recipient, under_way)

    # Messages

    def _send_messages(self) -> None:
        messages, self._messages = self._messages, []
        grown, self._grown = self._grown, []
        by_outlet: defaultdict[Outlet, tuple[list[StreamMessage], list[Grown]]] = defaultdict(lambda: ([], []))
        for message in messages:
            by_outlet[message.recipient.outlet][0].append(message)
        for each in grown:
            by_outlet[each[0].outlet][1].append(each)
        for outlet, of_outlet in by_outlet.items():
            try:
                outlet.send(*of_outlet)
            except OutletClosedError:  # such as a closed loop, and with it all callers in it
                self._end_all_of(outlet)

    def _add_message(self, recipient: Recipient, under_way: _UnderWay) -> None:
        """Add a message if a request has news; a request that has ended is no longer under way."""
        token_id = under_way.new_tokens.take_one() if under_way.has_begun else None
        if token_id is not None:
            self._grown.append((recipient, token_id))
            return
        updates = under_way.new_tokens.take()
        if not under_way.request.is_finished:
            if updates:
                under_way.has_begun = True
                num_cached = under_way.request.num_cached_tokens
                self._messages.append(StreamMessage(recipient, updates, num_cached_tokens=num_cached))
            return
        del self._under_way[recipient]
        try:
            output = self._llm.output(under_way.request)
        except Exception as problem:  # noqa: BLE001 - of a tokenizer that cannot decode these tokens
            self._messages.append(StreamMessage(recipient, updates, problem=problem))
        else:
            self._messages.append(StreamMessage(recipient, updates, output))

    def _end_all_of(self, outlet: Outlet) -> None:
        for recipient in [each for each in self._backlog if each.outlet == outlet]:
            del self._backlog[recipient]
        for recipient in [each for each in self._under_way if each.outlet == outlet]:
            self._llm.core.abort(self._under_way.pop(recipient).request)

    # The end

    def _end_all(self) -> None:
        """End the requests under way, with their tokens so far."""
        for recipient in list(self._under_way):
            self._end(recipient, "aborted")

    def _stop(self, reason: str, cause: Exception | None = None) -> None:
        """Refuse all further commands, and send the reason to each request that waits."""
        problem = EngineError(reason)
        problem.__cause__ = cause
        with self._lock:
            self._ended = reason
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                self._backlog[command.recipient] = command
            elif isinstance(command, Call):
                command.refuse(problem)
        for recipient, under_way in list(self._under_way.items()):
            if under_way.request.is_finished:  # the device is lost: the tokens so far are sent before the error
                self._add_message(recipient, under_way)
                self._messages.append(StreamMessage(recipient, problem=problem))
        self._messages += [
            StreamMessage(recipient, problem=problem) for recipient in (*self._under_way, *self._backlog)
        ]
        self._under_way.clear()
        self._backlog.clear()
        self._send_messages()
