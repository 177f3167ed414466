"""EngineThread: the one thread that drives an engine. Other threads send it commands, and receive messages.

::

    callers  -- Submit, End, Close -->  queue  --> | backlog | waiting, max_waiting at most | running |  the engine's
             <---- messages, by outlet ----------- `--------------- after every step ----------------'

Between two steps the thread carries out commands, ends requests past their deadlines, and submits requests of the
backlog to the engine while its queue has room. When the thread ends, each request under way gets a message with the
reason.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never, final

from pagedkv.engine.answer_stream import NewTokens, Outlet, OutletClosedError, Recipient, StreamMessage
from pagedkv.engine.llm import LLM, Prompt
from pagedkv.engine.outputs import FinishReason, StepRecord
from pagedkv.engine.request import PLAIN, EngineRequest, Intent
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import EngineError, QueueFullError

__all__ = ["Call", "Close", "End", "EngineThread", "Submit"]

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
    """

    submitted: Submit
    request: EngineRequest
    new_tokens: NewTokens

    @property
    def is_waiting(self) -> bool:
        """Whether the request was never admitted, and has not ended."""
        return self.request.num_cached_tokens is None and not self.request.is_finished


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
                self._count_waiting()
                self._collect_updates()
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

    def _count_waiting(self) -> None:
        """Forget the requests that wait no more. O(waiting)."""
        if self._waiting:
            self._waiting = [each for each in self._waiting if each.is_waiting]

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

    def _collect_updates(self) -> None:
        for recipient, under_way in list(self._under_way.items()):
            self._add_message(recipient, under_way)

    def _send_messages(self) -> None:
        messages, self._messages = self._messages, []
        by_outlet: defaultdict[Outlet, list[StreamMessage]] = defaultdict(list)
        for message in messages:
            by_outlet[message.recipient.outlet].append(message)
        for outlet, of_outlet in by_outlet.items():
            try:
                outlet.send(of_outlet)
            except OutletClosedError:  # such as a closed loop, and with it all callers in it
                self._end_all_of(outlet)

    def _add_message(self, recipient: Recipient, under_way: _UnderWay) -> None:
        """Add a message if a request has news; a request that has ended is no longer under way."""
        updates = tuple(under_way.new_tokens.take())
        if not under_way.request.is_finished:
            if updates:
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
