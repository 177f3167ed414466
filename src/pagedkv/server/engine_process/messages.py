"""Values sent between the server's process and the engine's process, and the frames that they are sent in.

The news of a step are sent together: of the many requests with one more token and no other news two lists of numbers,
and other updates as plain tuples, which take a tenth of the time of dataclasses. A frame on a socket pair is a length
of 8 bytes, then a pickled value; both ends are processes of one program.
"""

import asyncio
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final, get_args

from pagedkv.contract.arguments import as_choice
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine import EngineConfig, Intent, RequestOutput, SamplingParams, StepRecord, TokenUpdate
from pagedkv.errors import PagedKVError
from pagedkv.server.config import Inspector
from pagedkv.server.engines import EngineFacts, EngineNumbers

LENGTH: Final = struct.Struct("<Q")
READ_NBYTES: Final = 2**20
SHORT_S: Final = 0.003
"""What tasks may take for the values of one reading before :class:`LoopFrames` pauses."""
PAUSE: Final = 3
"""Pauses, in times of what the tasks took. So 256 streams of a small model get two or three tokens at a time."""
LONGEST_PAUSE_S: Final = 0.1

PackedUpdate: TypeAlias = tuple[object, ...]
"""The fields of a TokenUpdate, without its prompt."""
Item: TypeAlias = tuple[int, Sequence[PackedUpdate], RequestOutput | None, Exception | None, int | None]
"""News of one request: its number, then the fields of a StreamMessage."""


def frame_of(value: object) -> bytes:
    """Return the frame of a value."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


@final
class _Unframed:
    """Takes frames out of the bytes that have arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Add bytes."""
        self._buffer += data

    def values(self) -> Iterator[Any]:
        """Yield the values of whole frames, in order."""
        begin = 0
        try:
            while (value_begin := begin + LENGTH.size) <= len(self._buffer):
                end = value_begin + LENGTH.unpack_from(self._buffer, begin)[0]
                if end > len(self._buffer):
                    break
                begin = end
                yield pickle.loads(memoryview(self._buffer)[value_begin:end].tobytes())  # noqa: S301 - our own process
        finally:
            del self._buffer[:begin]


@final
class BlockingFrames:
    """Frames by blocking calls. Any thread may send; one thread receives.

    Args:
        place: the socket.
    """

    def __init__(self, place: socket.socket) -> None:
        self._place = place
        self._unframed = _Unframed()
        self._ready: Iterator[Any] = iter(())
        self._lock = threading.Lock()

    def send(self, value: object) -> None:
        """Send a value. Raises OSError: the other end is gone."""
        frame = frame_of(value)
        with self._lock:
            self._place.sendall(frame)

    def receive(self) -> Any:  # noqa: ANN401 - any value that is sent
        """Wait for a value; None: there are no more."""
        while True:
            for value in self._ready:
                return value
            try:
                data = self._place.recv(READ_NBYTES)
            except OSError:  # the other end was killed
                return None
            if not data:
                return None
            self._unframed.add(data)
            self._ready = self._unframed.values()

    def wait_for_data(self) -> bool:
        """Wait until there is something to receive, and leave it there; False: the other end is gone."""
        with suppress(OSError):
            return bool(self._place.recv(1, socket.MSG_PEEK))
        return False

    def end_receiving(self) -> None:
        """Let :meth:`receive` return None from now on; any thread may call this."""
        with suppress(OSError):
            self._place.shutdown(socket.SHUT_RD)


@final
class LoopFrames:
    """Frames in an event loop. All methods are called in the loop.

    A reading takes all that has arrived. If the tasks that it wakes take longer than :data:`SHORT_S`, reading pauses
    for :data:`PAUSE` times as long: values that arrive meanwhile are received together, which costs less per value, and
    most of a processor is left for the other end and for new requests.

    Args:
        place: the socket; it no longer blocks.
        received: called with each value.
        ended: called once there are no more values.
    """

    def __init__(self, place: socket.socket, received: Callable[[Any], None], ended: Callable[[], None]) -> None:
        place.setblocking(False)  # noqa: FBT003 - as socket has it
        self._place = place
        self._received = received
        self._ended = ended
        self._unframed = _Unframed()
        self._waiting = bytearray()
        self._is_ending = False
        self._loop = asyncio.get_running_loop()
        self._next_reading: asyncio.Handle | None = None
        self._next_writing: asyncio.Handle | None = None
        self._read_again()

    def send(self, value: object) -> None:
        """Send a value soon, with those of other tasks: each writing wakes the other end, which computes meanwhile.

        Values to a process that is gone are dropped.
        """
        self._waiting += frame_of(value)
        if self._next_writing is None:
            self._next_writing = self._loop.call_soon(self._write)

    def end_sending(self) -> None:
        """Send what waits, and then the end."""
        self._is_ending = True
        self._write()

    def close(self) -> None:
        """Stop reading and writing, and close the socket."""
        for handle in (self._next_reading, self._next_writing):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._place)
        self._loop.remove_writer(self._place)
        self._place.close()

    def _read(self) -> None:
        try:
            data = self._place.recv(READ_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the other end was killed
            data = b""
        if not data:
            self._loop.remove_reader(self._place)
            self._ended()
            return
        self._unframed.add(data)
        for value in self._unframed.values():
            self._received(value)
        self._loop.remove_reader(self._place)
        # behind the tasks that were woken; they write what they have before they wait again
        self._next_reading = self._loop.call_soon(self._pause, self._loop.time())

    def _pause(self, since_s: float) -> None:
        """Read again, after a pause if long has passed since a reading."""
        busy_s = self._loop.time() - since_s
        if busy_s <= SHORT_S:
            self._read_again()
        else:
            self._next_reading = self._loop.call_later(min(PAUSE * busy_s, LONGEST_PAUSE_S), self._read_again)

    def _read_again(self) -> None:
        self._next_reading = None
        self._loop.add_reader(self._place, self._read)

    def _write(self) -> None:
        if self._next_writing is not None:
            self._next_writing.cancel()
            self._next_writing = None
        try:
            while self._waiting:
                del self._waiting[: self._place.send(self._waiting)]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._place, self._write)
            return
        except OSError:  # the other end is gone, which reading reports
            self._waiting.clear()
        self._loop.remove_writer(self._place)
        if self._is_ending:
            with suppress(OSError):
                self._place.shutdown(socket.SHUT_WR)


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Endpoints at which KV events are published.

    Args:
        endpoint: of events; replay_endpoint: of requests for earlier events and snapshots; None: there is none.
        topic: first frame of all events.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Model and settings of an engine in a process of its own.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of its weights.
        engine: memory and limits.
        tenants: limits of tenants, by name; None: tenants are not distinguished.
        device: for the models' weights and blocks; auto: a GPU where there is one.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        tool_parser: name of the parser of calls.
        events: endpoints of KV events; None: they are not published.
        inspector: what :attr:`ProcessEngine.inspected` shows; ``texts``: blocks, and their texts.

    Raises:
        ConfigurationError: an unknown inspector.
    """

    model: str | None
    dtype: str
    engine: EngineConfig
    tenants: Mapping[str, TenantLimits] | None = None
    device: str = "auto"
    draft_model: str | None = None
    tool_parser: str = "auto"
    events: EventEndpoints | None = None
    inspector: Inspector = "off"

    def __post_init__(self) -> None:
        """Check the inspector's name."""
        as_choice(self.inspector, get_args(Inspector), "inspector")


@dataclass(frozen=True, slots=True)
class Built:
    """The engine is built.

    Args:
        facts, numbers: of the engine.
        lifetime: identity of the publisher of its KV events, and ``events`` the bound endpoints; None: no publisher.
    """

    facts: EngineFacts
    numbers: EngineNumbers
    lifetime: str | None = None
    events: EventEndpoints | None = None


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The engine cannot be built, because of ``problem``; the process ends."""

    problem: PagedKVError


# Commands to the engine's process. The end of the commands ends the engine.


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin to serve, with at most ``max_waiting`` requests in the queue."""

    max_waiting: int


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Serve a request.

    Args:
        number: identifies it, in both processes.
        prompt_token_ids: int32 ``[n]``.
        params, intent: of the request.
        deadline_s: seconds from now to its deadline; None: there is none.
    """

    number: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    intent: Intent
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End a request, "aborted"."""

    number: int


@dataclass(frozen=True, slots=True)
class ReadNumbers:
    """Send the engine's numbers, as :class:`NewNumbers`."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Drop every cached block, before numbers that are asked for later are read."""


@dataclass(frozen=True, slots=True)
class ForgetBranches:
    """Drop the end of each prompt that nothing else shares, and send :class:`Answered`.

    Args:
        prompts: int32 ``[n]`` each; salt: of the requests that computed them.
    """

    prompts: Sequence[Int32Array]
    salt: bytes


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give the memory of blocks back, and send :class:`Answered` with its bytes."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the memory of blocks again, and send :class:`Answered`."""


Command: TypeAlias = Begin | SubmitRequest | EndRequest | ReadNumbers | ResetPrefixCache | ForgetBranches | Sleep | Wake
# News from the engine's process


@dataclass(frozen=True, slots=True)
class News:
    """What has happened since the last news.

    Args:
        records: of steps; items: news of requests; both in order.
        num_waiting: requests in the engine's queue.
        num_submitted: requests that have reached the engine, since it began.
        grown: numbers of requests without an item whose first answer has one more token and goes on.
        token_ids: the token of each of these.
    """

    records: Sequence[StepRecord]
    items: Sequence[Item]
    num_waiting: int
    num_submitted: int
    grown: Sequence[int] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class NewNumbers:
    """The engine's numbers between two steps."""

    numbers: EngineNumbers


@dataclass(frozen=True, slots=True)
class Answered:
    """What a command that asks for an answer has done; in the order of such commands.

    Args:
        value: of the call.
        problem: why it failed; None: it did not.
    """

    value: Any
    problem: PagedKVError | None = None


def packed(updates: Iterable[TokenUpdate]) -> list[PackedUpdate]:
    """Return updates as tuples."""
    return [(each.index, each.token_ids, each.finish_reason, each.logprobs, each.stop) for each in updates]


def unpacked(updates: Iterable[PackedUpdate]) -> list[TokenUpdate]:
    """Return the updates that were packed."""
    return [TokenUpdate(0, *fields) for fields in updates]  # type: ignore[arg-type]
