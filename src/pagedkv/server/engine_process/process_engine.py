"""ProcessEngine: the engine of another process, as a service needs it."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, Self, assert_never, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine import AnswerStream, Intent, SamplingParams, StepRecord
from pagedkv.engine.answer_stream import StreamState
from pagedkv.errors import EngineError
from pagedkv.server.answer_formats import AnswerFormats, Formats, RemoteFormats
from pagedkv.server.engine_process.inspection import inspector_link
from pagedkv.server.engine_process.messages import (
    Answered,
    Begin,
    BlockingFrames,
    Built,
    Command,
    EndRequest,
    ForgetBranches,
    LoopFrames,
    NewNumbers,
    News,
    NotBuilt,
    ProcessSpec,
    ReadNumbers,
    ResetPrefixCache,
    Sleep,
    SubmitRequest,
    Wake,
    unpacked,
)
from pagedkv.server.engines import EngineNumbers, Route

STOP_S: Final = 30.0
"""Seconds for which the engine's process may go on: requests end, and tiers store."""
MODULE: Final = "pagedkv.server.engine_process"


@final
class ProcessEngine:
    """An engine in a process of its own, as a :class:`~pagedkv.server.ServedEngine`.

    The process is started, and its engine built, before the constructor returns. It ends with :meth:`stop` or
    :meth:`close`, and with this process, whatever ends that one. If it ends by itself, requests under way end with
    EngineError.

    Args:
        spec: model and settings.

    Attributes:
        inspected: the data of the inspector, if the spec asks for one.

    Raises:
        ConfigurationError, UnsupportedModelError: the model cannot be loaded or served, or an endpoint of KV events
            cannot be bound.
        EngineError: the process ended while it built the engine.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        ours, others = socket.socketpair()
        self._place = ours
        self.inspected, inspector_place = inspector_link(spec)
        with others, inspector_place or nullcontext():
            self._process = _started(others, inspector_place)
        try:
            self.built = self._wait_for_engine(spec)
        except BaseException:
            self.close()
            raise
        self.facts = self.built.facts
        self.last_numbers = self.built.numbers
        self._frames: LoopFrames | None = None
        self._num_sent = self._num_submitted = self._num_waiting = self._max_waiting = 0
        self._states: dict[int, StreamState] = {}
        self._readers: list[asyncio.Future[EngineNumbers]] = []
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._on_step: Callable[[StepRecord], None] = _ignore
        self._has_ended = False
        self._ended = asyncio.Event()

    def _wait_for_engine(self, spec: ProcessSpec) -> Built:
        frames = BlockingFrames(self._place)
        try:
            frames.send(spec)
            first = frames.receive()
        except OSError:  # it has ended
            first = None
        match first:
            case Built():
                return first
            case NotBuilt():
                raise first.problem
            case _:
                raise EngineError(f"the engine's process ended before it was ready, {self._exit()}")

    # The interface of ServedEngine

    @property
    def process_id(self) -> int:
        """Id of the engine's process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve."""
        return self._frames is not None and not self._has_ended

    @property
    def is_ready(self) -> bool:
        """Whether the engine can serve."""
        return self.is_alive

    @property
    def is_full(self) -> bool:
        """Whether the queue is full, with the requests that have not reached the engine yet."""
        return self.is_alive and self._num_waiting + self._num_sent - self._num_submitted >= self._max_waiting

    def start(self, max_waiting: int, on_step: Callable[[StepRecord], None]) -> None:
        """Begin to serve the running event loop; ``on_step`` is called in it. Raises EngineError.

        Args:
            max_waiting: most requests that wait; further ones are refused.
            on_step: called with the record of each step.
        """
        if self._frames is not None:
            raise EngineError("the engine was started before: it serves one event loop")
        self._max_waiting = max_waiting
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._frames = LoopFrames(self._place, self._received, self._lost)
        self._frames.send(Begin(max_waiting))
        if self.inspected is not None:
            self.inspected.start()

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, intent: Intent, deadline_s: float | None
    ) -> AnswerStream:
        """Submit a request from the event loop; returns at once. Raises EngineError if the engine has ended."""
        if not self.is_alive:
            raise EngineError("the engine's process has not been started, or has ended")
        number = self._num_sent
        self._num_sent += 1
        state = self._states[number] = StreamState(self._loop)
        self._send(SubmitRequest(number, np.array(prompt, np.int32), params, intent, deadline_s))
        return AnswerStream(state, lambda _: self._end_soon(number))

    def route_of(self, stream: AnswerStream) -> Route | None:  # noqa: ARG002 - as of ServedEngine
        """Return None: there are no replicas."""
        return None

    def formats(self, tokenizer: Any, tool_parser: str) -> Formats:  # noqa: ANN401 - of transformers, or like it
        """Return an object that checks formats here; their matchers are built in the engine's process."""
        return RemoteFormats(AnswerFormats(tokenizer, self.facts.vocabulary_size, self.facts.end_ids, tool_parser))

    async def numbers(self) -> EngineNumbers:
        """Read the engine's numbers between two steps; after it has ended, return the last ones."""
        if self.is_alive:
            reader = self._loop.create_future()
            self._readers.append(reader)
            self._send(ReadNumbers())
            await reader
        return self.last_numbers

    async def reset_prefix_cache(self) -> None:
        """Drop every cached block between two steps. Raises EngineError if the engine has ended."""
        if self.is_alive:
            self._send(ResetPrefixCache())
            await self.numbers()  # read behind the reset
        if not self.is_alive:
            raise EngineError("the engine's process has not been started, or has ended")

    async def forget_branches(self, prompts: Sequence[Int32Array], salt: bytes) -> int:
        """Drop the end of each prompt that nothing else shares, between two steps. Raises EngineError."""
        return int(await self._ask(ForgetBranches(prompts, salt)))

    async def sleep(self) -> int:
        """Give the memory of blocks back. Raises as :meth:`EngineCore.sleep`."""
        return int(await self._ask(Sleep()))

    async def wake(self) -> None:
        """Take the memory of blocks again. Raises as :meth:`EngineCore.wake`."""
        await self._ask(Wake())

    async def stop(self) -> None:
        """End all requests, the engine and its process."""
        if self._frames is not None and not self._has_ended:
            self._frames.end_sending()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), STOP_S)
        if self.inspected is not None:
            self.inspected.end()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the process at once. May be called again."""
        if self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0 if self.__dict__.get("_has_ended") else 0.0)
            self._process.kill()
            self._process.wait()
        self._place.close()
        if self.inspected is not None:
            self.inspected.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, if it still runs."""
        self.close()

    # In the event loop

    def _send(self, command: Command) -> None:
        assert self._frames is not None, "an engine that was not started"
        self._frames.send(command)

    async def _ask(self, command: Command) -> Any:  # noqa: ANN401 - what the command answers
        """Send a command, and wait for its answer. Raises EngineError if the engine has ended, and its problem."""
        if not self.is_alive:
            raise EngineError("the engine's process has not been started, or has ended")
        asked = self._loop.create_future()
        self._asked.append(asked)
        self._send(command)
        return await asked

    def _end_soon(self, number: int) -> None:
        """End a request, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and its requests have ended
            self._loop.call_soon_threadsafe(self._end, number)

    def _end(self, number: int) -> None:
        if self.is_alive and number in self._states:
            self._send(EndRequest(number))

    def _received(self, message: News | NewNumbers | Answered) -> None:
        match message:
            case News():
                for record in message.records:
                    self._on_step(record)
                self._num_waiting, self._num_submitted = message.num_waiting, message.num_submitted
                for number, token_id in zip(message.grown, message.token_ids, strict=True):
                    self._states[number].grow(token_id)
                for number, updates, output, problem, num_cached in message.items:
                    state = self._states[number]
                    state.add(unpacked(updates), output, problem, num_cached)
                    if state.is_over:
                        del self._states[number]
            case NewNumbers():
                self.last_numbers = message.numbers
                self._wake_readers()
            case Answered(value, problem):
                asked = self._asked.popleft()
                if asked.done():  # its task was cancelled
                    return
                if problem is None:
                    asked.set_result(value)
                else:
                    asked.set_exception(problem)
            case _:
                assert_never(message)

    def _wake_readers(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():  # its task was cancelled
                reader.set_result(self.last_numbers)

    def _lost(self) -> None:
        """End the requests under way: there will be no more news."""
        self._has_ended = True
        assert self._frames is not None, "an engine that was not started"
        self._frames.close()
        self._ended.set()
        self._wake_readers()
        if self.inspected is not None:
            self.inspected.end()
        states, self._states = self._states, {}
        asked, self._asked = [each for each in self._asked if not each.done()], deque()
        if states or asked:
            problem = EngineError(f"the engine's process has ended, {self._exit()}")
            for state in states.values():
                state.add((), problem=problem)
            for each in asked:
                each.set_exception(problem)

    def _exit(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return f"with exit code {self._process.wait(1.0)}"
        return "and has not exited"


def _started(place: socket.socket, inspector_place: socket.socket | None) -> subprocess.Popen[bytes]:
    """Start the engine's process, which inherits its ends of the socket pairs."""
    paths = os.pathsep.join(os.path.abspath(each) for each in sys.path)  # noqa: PTH100 - "" is this folder
    inherited = [each.fileno() for each in (place, inspector_place) if each is not None]
    command = [sys.executable, "-P", "-m", MODULE, *map(str, inherited)]
    return subprocess.Popen(  # noqa: S603 - this interpreter
        command, pass_fds=inherited, env={**os.environ, "PYTHONPATH": paths}
    )


def _ignore(record: StepRecord) -> None:
    """Do nothing."""
