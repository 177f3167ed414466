"""EngineThread: the one thread that drives an engine. Others send it commands, and get letters.

::

    callers  -- Submit, End, Close -->  queue  --> | at the door | waiting, at most so many | running |  the engine's
             <---- letters, by loop -------------- `---------------- after every step ---------------'

Between steps it takes commands, ends what is past its deadline, and lets in from the door as many as may wait. Whatever
ends the thread is told to everybody who waits.
"""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never, final

from pagedkv.memory.contract.errors import EngineError, QueueFullError
from pagedkv.serving.engine.answer_stream import Letter, Mailbox, deliver
from pagedkv.serving.engine.engine_request import EngineRequest
from pagedkv.serving.engine.intent import PLAIN, Intent
from pagedkv.serving.engine.llm import LLM, Prompt
from pagedkv.serving.engine.outputs import FinishReason
from pagedkv.serving.engine.records import StepRecord
from pagedkv.serving.engine.sampling import SamplingParams
from pagedkv.serving.engine.updates import NewTokens

__all__ = ["Call", "Close", "End", "EngineThread", "Submit"]

CLOSED: Final = "the engine is closed"


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A request that comes to the door.

    Args:
        mailbox: for its letters.
        prompt, params: what is asked for.
        deadline: when it is to be over, by the clock; None: whenever it is.
        intent: what its caller says beside that.
    """

    mailbox: Mailbox
    prompt: Prompt
    params: SamplingParams
    deadline: float | None
    intent: Intent = PLAIN


@dataclass(frozen=True, slots=True)
class End:
    """Nobody wants a request any more."""

    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Close:
    """The thread is to end: at once, or when everybody is served."""

    drain: bool


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Something that is to be done between two steps.

    Args:
        work: what; it gets the engine.
        done: tells when, or what went wrong, to whoever waits.
    """

    work: Callable[[LLM], object]
    done: Future[None] = field(default_factory=Future)

    def carry_out(self, llm: LLM) -> None:
        """Do it, unless nobody waits for it any more; what goes wrong is told there alone."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.work(llm)
            except Exception as problem:  # noqa: BLE001 - the caller's: it is told there
                self.done.set_exception(problem)
            else:
                self.done.set_result(None)

    def refuse(self, problem: EngineError) -> None:
        """Tell that it will not be done."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(problem)


Command: TypeAlias = Submit | End | Close | Call


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A request that the engine has.

    Args:
        wish: how it came; request: what the engine made of it.
        news: gives what is new of it.
    """

    wish: Submit
    request: EngineRequest
    news: NewTokens

    @property
    def is_waiting(self) -> bool:
        """Whether it has never been admitted."""
        return self.request.num_cached_tokens is None and not self.request.is_finished


@final
class EngineThread:
    """Drives an engine, which nobody else can use meanwhile.

    Args:
        llm: the engine.
        max_waiting: requests that wait in the engine at most.
        refuses: whether those who find the queue full are refused; else they wait at the door, in their order.
        clock: gives seconds, never backwards; deadlines are by it.
        on_step: called with each step's record, by the engine's thread.

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
        self._door: dict[Mailbox, Submit] = {}
        self._under_way: dict[Mailbox, _UnderWay] = {}
        self._waiting: list[_UnderWay] = []
        self._letters: list[Letter] = []
        self._closing: Close | None = None
        self._lock = threading.RLock()  # reentrant: streams are collected anywhere
        self._ended: str | None = None
        self._is_closed = False
        took_over: Future[None] = Future()
        self._thread = threading.Thread(target=self._drive, args=(took_over,), name="pagedkv engine", daemon=True)
        self._thread.start()
        took_over.result()

    # Called by others

    def send(self, command: Command) -> None:
        """Give a command. Raises EngineError where the thread has ended, or was told to."""
        with self._lock:
            if self._ended is not None:
                raise EngineError(self._ended)
            if self._is_closed:
                raise EngineError(CLOSED)
            self._commands.put(command)

    def tell(self, command: Command) -> None:
        """Give a command that means nothing to a thread that has ended."""
        with self._lock:
            self._is_closed |= isinstance(command, Close)
            if self._ended is None:
                self._commands.put(command)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, or is closing."""
        return self._ended is not None or self._is_closed

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # The thread

    def _drive(self, took_over: Future[None]) -> None:
        """Take the engine over, and drive it to the end."""
        try:
            with self._llm.core.driver.at_the_wheel():
                took_over.set_result(None)
                self._run()
        except EngineError as problem:  # of the wheel: nothing has begun
            took_over.set_exception(problem)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._end_expired()
                self._let_in()
                self._post()  # who has ended is not to wait for others' step
                if self._llm.core.has_work:
                    self._on_step(self._llm.step())
                self._note_news()
                self._post()
            self._end_all()
        except Exception as problem:  # noqa: BLE001 - whatever it is, nobody is to wait for ever
            reason = str(problem) if isinstance(problem, EngineError) else f"{type(problem).__name__}: {problem}"
            self._stop(reason, problem)
        else:
            self._stop(CLOSED)

    def _take_commands(self) -> bool:
        """Carry out what was asked for; wait where there is nothing else to do. Return whether to go on."""
        may_wait = self._closing is None and not self._door and not self._llm.core.has_work
        while True:
            try:
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                break
            may_wait = False
            self._carry_out(command)
        if self._closing is None:
            return True
        return self._closing.drain and bool(self._door or self._under_way)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Close():
                self._closing = command
            case Call():
                command.carry_out(self._llm)
            case End():
                self._end_at_request(command)
            case Submit():
                self._take_in(command)
            case _:
                assert_never(command)

    def _end_at_request(self, command: End) -> None:
        if command.mailbox in self._door:
            self._admit(command.mailbox)  # so that it has an output, as others have
        if command.mailbox in self._under_way:
            self._end(command.mailbox, "aborted")

    def _take_in(self, command: Submit) -> None:
        if not self._refuses or self._has_room():
            self._door[command.mailbox] = command
            self._let_in()
        else:
            problem = QueueFullError(f"{self._max_waiting} requests wait, and no more may: ask again later")
            self._letters.append(Letter(command.mailbox, problem=problem))

    def _has_room(self) -> bool:
        if len(self._waiting) >= self._max_waiting:  # some may have been admitted, or ended, since
            self._waiting = [each for each in self._waiting if each.is_waiting]
        return len(self._waiting) < self._max_waiting

    def _let_in(self) -> None:
        while self._door and self._has_room():
            self._admit(next(iter(self._door)))

    def _admit(self, mailbox: Mailbox) -> None:
        wish = self._door.pop(mailbox)
        try:
            (request,) = self._llm.submit([wish.prompt], wish.params, [wish.intent])
        except EngineError:
            self._door[mailbox] = wish
            raise
        except Exception as problem:  # noqa: BLE001 - a tokenizer's, a template's: it is this request's alone
            self._letters.append(Letter(mailbox, problem=problem))
            return
        under_way = self._under_way[mailbox] = _UnderWay(wish, request, NewTokens(request))
        self._waiting.append(under_way)
        self._letters.append(Letter(mailbox))

    def _end_expired(self) -> None:
        now = self._clock()
        for mailbox, wish in list(self._door.items()):
            if wish.deadline is not None and wish.deadline <= now:
                self._admit(mailbox)  # as above
        for mailbox, under_way in list(self._under_way.items()):
            deadline = under_way.wish.deadline
            if deadline is not None and deadline <= now:
                self._end(mailbox, "deadline")

    def _end(self, mailbox: Mailbox, reason: FinishReason) -> None:
        under_way = self._under_way[mailbox]
        self._llm.core.abort(under_way.request, reason)
        self._note(mailbox, under_way)

    # Letters

    def _note_news(self) -> None:
        for mailbox, under_way in list(self._under_way.items()):
            self._note(mailbox, under_way)

    def _post(self) -> None:
        letters, self._letters = self._letters, []
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Letter]] = defaultdict(list)
        for letter in letters:
            by_loop[letter.mailbox.loop].append(letter)
        for loop, mine in by_loop.items():
            try:
                loop.call_soon_threadsafe(deliver, mine)
            except RuntimeError:  # the loop was closed: nobody waits any more
                self._end_all_of(loop)

    def _note(self, mailbox: Mailbox, under_way: _UnderWay) -> None:
        """Write a letter where there is something new; who has ended is no longer under way."""
        updates = tuple(under_way.news.take())
        if not under_way.request.is_finished:
            if updates:
                num_cached = under_way.request.num_cached_tokens
                self._letters.append(Letter(mailbox, updates, num_cached_tokens=num_cached))
            return
        del self._under_way[mailbox]
        try:
            output = self._llm.output(under_way.request)
        except Exception as problem:  # noqa: BLE001 - a tokenizer's that cannot write these tokens
            self._letters.append(Letter(mailbox, updates, problem=problem))
        else:
            self._letters.append(Letter(mailbox, updates, output))

    def _end_all_of(self, loop: asyncio.AbstractEventLoop) -> None:
        for mailbox in [each for each in self._door if each.loop is loop]:
            del self._door[mailbox]
        for mailbox in [each for each in self._under_way if each.loop is loop]:
            self._llm.core.abort(self._under_way.pop(mailbox).request)

    # The end

    def _end_all(self) -> None:
        """End who is under way, with what they have."""
        for mailbox in list(self._under_way):
            self._end(mailbox, "aborted")

    def _stop(self, reason: str, cause: Exception | None = None) -> None:
        """Let nobody in any more, and tell everybody who still waits why."""
        problem = EngineError(reason)
        problem.__cause__ = cause
        with self._lock:
            self._ended = reason
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                self._door[command.mailbox] = command
            elif isinstance(command, Call):
                command.refuse(problem)
        for mailbox, under_way in list(self._under_way.items()):
            if under_way.request.is_finished:  # the device is lost: what is known of the answer comes before the error
                self._note(mailbox, under_way)
                self._letters.append(Letter(mailbox, problem=problem))
        self._letters += [Letter(mailbox, problem=problem) for mailbox in (*self._under_way, *self._door)]
        self._under_way.clear()
        self._door.clear()
        self._post()
