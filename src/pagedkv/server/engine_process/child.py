"""EngineChild: an engine, driven by the commands of the server's process."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, assert_never, final

import torch

from pagedkv.engine import LLM, StepRecord
from pagedkv.engine.answer_stream import Grown, OutletClosedError, StreamMessage
from pagedkv.errors import EngineError, PagedKVError
from pagedkv.probe import compat
from pagedkv.server.answer_formats import with_matchers
from pagedkv.server.engine_process.inspection import InspectionChild
from pagedkv.server.engine_process.messages import (
    Answered,
    Begin,
    BlockingFrames,
    Built,
    Command,
    EndRequest,
    EventEndpoints,
    ForgetBranches,
    Item,
    NewNumbers,
    News,
    NotBuilt,
    ProcessSpec,
    ReadNumbers,
    ResetPrefixCache,
    Sleep,
    SubmitRequest,
    Wake,
    packed,
)
from pagedkv.server.engines import EngineFacts, EngineNumbers, LocalEngine, build_engine
from pagedkv.server.http import as_sendable
from pagedkv.server.inspector.inspected import InspectedEngine
from pagedkv.server.running import settled

MOST_RECORDS: Final = 64
"""Records of steps without tokens that wait for the next news."""
SEND_NBYTES: Final = 4 * 2**20
"""Bytes that the kernel holds while the server's process does something else, so that the engine does not wait."""


def serve(place: socket.socket, inspector_place: socket.socket | None = None) -> None:
    """Build an engine, and serve until the server's process ends the commands, or is gone.

    Args:
        place: this process's end of the socket pair; the other end sends a ProcessSpec first.
        inspector_place: of the inspector's socket pair; None: there is no inspector.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the terminal sends Ctrl-C to both processes
    place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
    frames = BlockingFrames(place)
    spec: ProcessSpec | None = frames.receive()
    if spec is None:
        return
    threading.Thread(target=_end_with_server, args=(frames,), name="pagedkv server", daemon=True).start()
    with ExitStack() as stack:
        try:
            child = stack.enter_context(_built(spec, frames, inspector_place))
        except PagedKVError as problem:
            frames.send(NotBuilt(as_sendable(problem)))
            return
        for number in (signal.SIGINT, signal.SIGTERM):  # the server's process drains, and then ends the commands
            signal.signal(number, signal.SIG_IGN)
        frames.send(child.built)
        with settled():
            child.run()


def _end_with_server(frames: BlockingFrames) -> None:
    """End this process if the server's process is gone before the engine is built."""
    if not frames.wait_for_data():
        os._exit(1)


@contextmanager
def _built(spec: ProcessSpec, frames: BlockingFrames, inspector_place: socket.socket | None) -> Iterator["EngineChild"]:
    """Build the engine. Raises as :func:`build_engine`; ConfigurationError: an endpoint cannot be bound."""
    compat.be_silent()
    settings = replace(spec.engine, events=spec.events is not None)
    llm, tokenizer = build_engine(
        spec.model, spec.dtype, settings, spec.tenants, draft_model=spec.draft_model, device=spec.device
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one for the server's process
    child = EngineChild(LocalEngine(llm), tokenizer, spec, frames)
    if inspector_place is not None:
        child.inspect(inspector_place, _decoder(tokenizer) if spec.inspector == "texts" else None)
    if spec.events is None:
        yield child
        return
    from pagedkv.events import EventPublisher  # noqa: PLC0415 - an extra of its own
    from pagedkv.server.engines import EventsOut  # noqa: PLC0415 - as above

    events = spec.events
    groups = llm.core.space.config.groups
    with EventPublisher(events.endpoint, events.replay_endpoint, groups=groups, topic=events.topic) as publisher:
        bound = EventEndpoints(publisher.endpoint, publisher.replay_endpoint, events.topic)
        child.built = replace(child.built, lifetime=str(publisher.lifetime), events=bound)
        child.on_step.append(EventsOut(child.engine, publisher).stepped)
        yield child


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:  # noqa: ANN401 - of transformers, or like it
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


@final
class Recipient:
    """A request of the server's process.

    Args:
        number: identifies it; outlet: sends its messages.

    Attributes:
        has_sent: whether a message was sent: that it waits, or was refused.
    """

    def __init__(self, number: int, outlet: "EngineChild") -> None:
        self.number = number
        self.outlet = outlet
        self.has_sent = False


def _own(recipient: object) -> Recipient:
    assert isinstance(recipient, Recipient), "news for another kind of recipient"
    return recipient


def _asked(command: ForgetBranches | Sleep | Wake, llm: LLM) -> object:
    """Carry out a command between two steps; return its answer."""
    match command:
        case ForgetBranches(prompts, salt):
            return llm.core.forget_branches(prompts, salt=salt)
        case Sleep():
            return llm.core.sleep()
        case Wake():
            llm.core.wake()
            return None
        case _:
            assert_never(command)


@final
class EngineChild:
    """The engine's process: carries out commands, and sends news.

    Args:
        engine: the engine, not started.
        tokenizer: of its model, for formats.
        spec: the settings.
        frames: to and from the server's process.

    Attributes:
        built: the first message to the server's process.
        on_step: callbacks, called in the engine's thread with the record of each step.
    """

    def __init__(self, engine: LocalEngine, tokenizer: Any, spec: ProcessSpec, frames: BlockingFrames) -> None:  # noqa: ANN401 - of transformers, or like it
        self.engine = engine
        self.built = Built(EngineFacts.of(engine.llm), EngineNumbers.of(engine.llm))
        self.on_step: list[Any] = []
        self._inspection: InspectionChild | None = None
        self._frames = frames
        self._formats = engine.formats(tokenizer, spec.tool_parser)
        self._recipients: dict[int, Recipient] = {}
        self._records: list[StepRecord] = []
        self._num_submitted = 0

    def inspect(self, place: socket.socket, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Answer the inspector's questions too, at a socket, once the engine is started; before :meth:`run`."""
        inspected = InspectedEngine(self.engine, decode)
        self.on_step.append(inspected.stepped)
        self._inspection = InspectionChild(inspected, place)

    def run(self) -> None:
        """Serve until there are no more commands, or the engine has failed."""
        while (command := self._frames.receive()) is not None:
            self._carry_out(command)
        asyncio.run(self.engine.stop())
        if self._inspection is not None:
            self._inspection.close()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Begin():
                self.engine.start(command.max_waiting, self._stepped)
                if self._inspection is not None:
                    self._inspection.start()
                threading.Thread(target=self._end_with_engine, name="pagedkv end", daemon=True).start()
            case SubmitRequest():
                self._submit(command)
            case EndRequest():
                if command.number in self._recipients:
                    self.engine.running.end(self._recipients[command.number])
            case ReadNumbers():
                with suppress(EngineError):  # the engine has ended, and this process ends soon
                    self.engine.call_soon(EngineNumbers.of).add_done_callback(self._send_numbers)
            case ResetPrefixCache():
                with suppress(EngineError):
                    self.engine.call_soon(LLM.reset_prefix_cache)
            case ForgetBranches() | Sleep() | Wake():
                with suppress(EngineError):
                    self.engine.call_soon(partial(_asked, command)).add_done_callback(self._send_answer)
            case _:
                assert_never(command)

    def _submit(self, command: SubmitRequest) -> None:
        recipient = self._recipients[command.number] = Recipient(command.number, self)
        try:
            params = with_matchers(command.params, self._formats)
            prompt = command.prompt_token_ids.tolist()
            self.engine.running.submit(recipient, prompt, params, intent=command.intent, deadline_s=command.deadline_s)
        except Exception as problem:  # noqa: BLE001 - sent to the server's process, which raises it for this request
            self._send_items([StreamMessage(recipient, problem=problem)])

    def _send_numbers(self, numbers: Future[EngineNumbers]) -> None:
        if numbers.exception() is None:
            with suppress(OSError):
                self._frames.send(NewNumbers(numbers.result()))

    def _send_answer(self, done: Future[object]) -> None:
        problem = done.exception()
        failed = as_sendable(problem) if isinstance(problem, Exception) else None
        with suppress(OSError):
            self._frames.send(Answered(None if problem is not None else done.result(), failed))

    def _end_with_engine(self) -> None:
        self.engine.running.join()
        self._frames.end_receiving()

    # Called in the engine's thread

    def _stepped(self, record: StepRecord) -> None:
        for callback in self.on_step:
            callback(record)
        self._records.append(record)
        if len(self._records) >= MOST_RECORDS:
            with suppress(OutletClosedError):
                self.send(())

    def send(self, messages: Sequence[StreamMessage], grown: Sequence[Grown] = ()) -> None:
        """Send the records of steps, messages, tokens. Raises OutletClosedError: the server's process is gone."""
        records, self._records = self._records, []
        try:
            self._frames.send(self._news(records, messages, grown))
        except OSError:
            raise OutletClosedError from None

    def _send_items(self, messages: Sequence[StreamMessage]) -> None:
        """Send messages from another thread than the engine's."""
        with suppress(OSError):
            self._frames.send(self._news((), messages))

    def _news(
        self, records: Sequence[StepRecord], messages: Sequence[StreamMessage], grown: Sequence[Grown] = ()
    ) -> News:
        """Make news. A submitted request that has sent no message yet may be counted as not yet submitted."""
        items = [self._item(each) for each in messages]
        numbers = [_own(recipient).number for recipient, _ in grown]
        token_ids = [token_id for _, token_id in grown]
        return News(records, items, self.engine.running.num_waiting, self._num_submitted, numbers, token_ids)

    def _item(self, message: StreamMessage) -> Item:
        recipient = _own(message.recipient)
        number = recipient.number
        self._num_submitted += not recipient.has_sent
        recipient.has_sent = True
        problem = None if message.problem is None else as_sendable(message.problem)
        if message.output is not None or problem is not None:
            self._recipients.pop(number, None)
        return number, packed(message.updates), message.output, problem, message.num_cached_tokens
