"""Turns the received batches of one publisher into messages for an index, in order and with repaired gaps.

No socket, no thread, no clock: the caller passes messages and times, and takes and sends the requests. So the same code
runs over sockets (:mod:`pagedkv.events`) and in simulations::

    received                                result
    the next batch                          Applied
    a batch after a gap                     held, and the missing batches are requested again
      these arrive                          Applied, in order
      the publisher no longer has them      Alive with the number of the first held batch, which degrades an index;
                                            then a snapshot is requested
    a batch of another lifetime             held batches are dropped; numbers begin at 0
    a snapshot                              Snapshot, then the held batches that it does not contain
    no answer in time                       Applied after the gap; the snapshot is requested again later

A follower that joins late begins with a snapshot. Batches of earlier lifetimes are always ignored.

At sockets, published messages, requests and answers have these frames:

===============================  =========================================================
published                        topic, number, payload
requested                        an empty frame, number of the first
sent again                       an empty frame, topic, number, payload
the end of what is sent again    an empty frame, no topic, the number -1, an empty payload
a snapshot requested             an empty frame, ``snapshot``
a part of the snapshot           an empty frame, topic, number of the next batch, payload
===============================  =========================================================

The first four lines are the protocol of vLLM (0.33) and SGLang (0.5.23). The last two are an addition; a snapshot ends
as an answer does. A publisher without the addition reads ``snapshot`` as a number above 2^62 and answers with the end
alone. A message that is sent again may lack the topic, as from older versions of vLLM, or the empty frame, which only a
REQ socket needs. Number and payload are always the last two frames. A number has 8 bytes, most significant first.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol, TypeAlias, assert_never, final

from pagedkv.contract.answers import CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.spec import GroupSpec
from pagedkv.errors import RecordingError
from pagedkv.wire.decoding import CacheEventReader, EventBatch, decode_batch

__all__ = [
    "ENDPOINT_ADVICE",
    "SNAPSHOT_REQUEST",
    "Alive",
    "Applied",
    "FollowedMessage",
    "Following",
    "FollowingRules",
    "Message",
    "OutgoingRequest",
    "Request",
    "SentBatches",
    "Snapshot",
    "answer",
    "answered",
    "broadcast",
    "end_of_answer",
    "follow",
    "published",
    "request_frames",
    "requested",
]
REMEDY: Final = (
    "Name the endpoint of pagedkv's KV events; UnnamedFollowing follows engines whose batches have no lifetime"
)
MOST_PAST: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The events of a batch. A skipped number means that batches were lost.

    Args:
        lifetime: name of the publisher's process.
        batch: number of the batch in this lifetime.
        events: events of each pool and each further medium, oldest first. Ids of blocks are not sent and are 0.
        is_proven: whether the publisher names its lifetimes, so that the index may be exact.
    """

    lifetime: str
    batch: int
    events: tuple[CacheEvents | TierEvents, ...]
    is_proven: bool = True


@dataclass(frozen=True, slots=True)
class Alive:
    """A heartbeat with the number of the next batch. Earlier batches that were not applied are lost."""

    lifetime: str
    next_batch: int
    is_proven: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All cached blocks between two batches.

    Args:
        lifetime: name of the publisher's process.
        next_batch: number of the first batch whose events the snapshot does not contain.
        blocks: blocks of each pool, each after its parent, and the entries of each further medium. Ids of blocks are
            not sent and are 0.
    """

    lifetime: str
    next_batch: int
    blocks: tuple[StoredBlocks | TierEvents, ...]


FollowedMessage: TypeAlias = Applied | Alive | Snapshot


class Index(Protocol):
    """The methods of :class:`~pagedkv.routing.ReplicaIndex` that apply messages; documented there."""

    def apply(  # noqa: PLR0913 - a batch, and what it proves
        self,
        name: str,
        lifetime: str,
        batch: int,
        events: Collection[CacheEvents | TierEvents],
        now_s: float,
        *,
        is_proven: bool = True,
    ) -> bool: ...

    def note_alive(
        self, name: str, lifetime: str, next_batch: int, now_s: float, *, is_proven: bool = True
    ) -> bool: ...

    def restore(
        self, name: str, lifetime: str, next_batch: int, blocks: Collection[StoredBlocks | TierEvents], now_s: float
    ) -> None: ...


def follow(index: Index, replica: str, message: FollowedMessage, now_s: float) -> None:
    """Apply one message of a replica to an index.

    Args:
        index: a :class:`~pagedkv.routing.ReplicaIndex`; or a :class:`~pagedkv.routing.Router`, to end promises too.
        replica: the replica's name in the index.
        message: the message.
        now_s: the caller's time.

    Raises:
        ConfigurationError: the index has no such replica.
    """
    match message:
        case Applied():
            given = (replica, message.lifetime, message.batch, message.events, now_s)
            index.apply(*given, is_proven=message.is_proven)
        case Alive():
            index.note_alive(replica, message.lifetime, message.next_batch, now_s, is_proven=message.is_proven)
        case Snapshot():
            index.restore(replica, message.lifetime, message.next_batch, message.blocks, now_s)
        case _:
            assert_never(message)


@dataclass(frozen=True, slots=True)
class FollowingRules:
    """Timeouts and limits of a follower.

    Args:
        patience_s: seconds without a part of an answer after which a request for batches has failed.
        snapshot_patience_s: the same for a snapshot. Its first part is sent after the engine's step and after all
            blocks are sorted, which takes seconds for a million blocks.
        retry_s: seconds after a failed request for a snapshot until the next one.
        most_held: most batches that are held while a request is open; with more, the request has failed.
        most_replayed: most missing batches that are requested by a follower that joined a process late; for more, it
            requests a snapshot.
    """

    patience_s: float = 5.0
    snapshot_patience_s: float = 30.0
    retry_s: float = 5.0
    most_held: int = 10_000
    most_replayed: int = 1000


DEFAULT_RULES: Final = FollowingRules()


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request to be sent.

    Args:
        number: number of the request, which the caller passes back with its answers.
        first: number of the first requested message; None: a snapshot.
    """

    number: int
    first: int | None


SNAPSHOT: Final = b"snapshot"


class _Awaited(Enum):
    NOTHING = auto()
    BATCHES = auto()
    SNAPSHOT = auto()


@dataclass(frozen=True, slots=True)
class Message:
    """One message with an undecoded payload."""

    number: int
    payload: bytes
    topic: bytes = field(default=b"", compare=False)
    """Excluded from equality: a message that is sent again may lack it."""


@final
class Following:
    """Follows one publisher.

    Args:
        groups: the model's KV-cache groups.
        can_request: whether the publisher answers requests.
        rules: timeouts and limits.
        source: the publisher's endpoint, for errors.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        can_request: bool = True,
        rules: FollowingRules = DEFAULT_RULES,
        source: str = "the publisher",
    ) -> None:
        self._reader = CacheEventReader(groups)
        self._can_request = can_request
        self._rules = rules
        self._source = source
        self._lifetime: str | None = None
        self._past: deque[str] = deque(maxlen=MOST_PAST)
        self._expected = 0
        self._is_whole = False  # every event of the lifetime was applied, or a snapshot and all events since
        self._held: dict[int, EventBatch] = {}
        self._awaited = _Awaited.NOTHING
        self._fails_at_s = 0.0
        self._next_snapshot_s = float("-inf")
        self._replay_failed_at: int | None = None
        self._parts: list[EventBatch] = []
        self._next_batch = 0
        self._out: list[FollowedMessage] = []
        self._request: OutgoingRequest | None = None
        self._num_requests = 0

    @property
    def is_whole(self) -> bool:
        """Whether the messages so far are complete up to the last batch."""
        return self._is_whole

    @property
    def lifetime(self) -> str | None:
        """Name of the followed process; None before its first message."""
        return self._lifetime

    def take_messages(self) -> list[FollowedMessage]:
        """Return the messages since the last call."""
        messages, self._out = self._out, []
        return messages

    def take_request(self) -> OutgoingRequest | None:
        """Return the request to be sent now, or None. It replaces an earlier request."""
        request, self._request = self._request, None
        return request

    # Events of the transport

    def published(self, message: Message, now_s: float) -> None:
        """Take a published message. Raises RecordingError if it is not a batch of pagedkv's events for these groups."""
        batch, lifetime = self._decoded(message)
        if lifetime in self._past:
            return
        if lifetime != self._lifetime:
            self._begin(lifetime)
        if message.number >= self._expected:
            self._held[message.number] = batch
            if self._awaited is not _Awaited.NOTHING and len(self._held) > self._rules.most_held:
                self._fail(now_s)
        self.advance(now_s)

    def answered(self, number: int, message: Message | None, now_s: float) -> None:
        """Take a part of an answer.

        Args:
            number: number of the request; answers to earlier requests are ignored.
            message: the part; None: the answer's end.
            now_s: the time.

        Raises:
            RecordingError: as :meth:`published`.
        """
        if number != self._num_requests or self._awaited is _Awaited.NOTHING:
            return
        self._fails_at_s = now_s + self._patience_s
        if self._awaited is _Awaited.BATCHES:
            self._take_replayed(message, now_s)
        elif message is None:
            self._end_snapshot(now_s)
        else:
            self._parts.append(self._decoded(message)[0])
            self._next_batch = message.number
        self.advance(now_s)

    def advance(self, now_s: float) -> None:
        """Let the time advance: requests fail at their timeouts, and due requests are made."""
        if self._awaited is not _Awaited.NOTHING and now_s >= self._fails_at_s:
            self._fail(now_s)
        if self._awaited is _Awaited.NOTHING:
            self._apply_held()
            if self._held or not self._is_whole:
                self._repair(now_s)

    # Inside

    @property
    def _patience_s(self) -> float:
        is_snapshot = self._awaited is _Awaited.SNAPSHOT
        return self._rules.snapshot_patience_s if is_snapshot else self._rules.patience_s

    def _decoded(self, message: Message) -> tuple[EventBatch, str]:
        source = f"{self._source}, message {message.number}"
        batch = decode_batch(message.payload, source, has_tokens=False)
        if batch.lifetime is None:
            raise RecordingError(source, "the batch has no lifetime", REMEDY)
        return batch, batch.lifetime

    def _begin(self, lifetime: str) -> None:
        """Begin to follow another process. A request that was made before the first process was known stays open."""
        before, self._lifetime = self._lifetime, lifetime
        if before is None:
            return
        self._past.append(before)
        self._expected = 0
        self._is_whole = False
        self._held.clear()
        self._awaited = _Awaited.NOTHING
        self._request = None
        self._next_snapshot_s = float("-inf")
        self._replay_failed_at = None

    def _apply_held(self) -> None:
        """Apply the held batches up to the first gap."""
        while self._expected in self._held:
            self._apply(self._expected, self._held.pop(self._expected))

    def _apply(self, number: int, batch: EventBatch) -> None:
        assert self._lifetime is not None
        self._is_whole = number == self._expected and (self._is_whole or number == 0)
        self._expected = number + 1
        events = self._reader.events(batch, f"{self._source}, message {number}")
        self._out.append(Applied(self._lifetime, number, events))
        if not batch.events:
            self._out.append(Alive(self._lifetime, self._expected))

    def _repair(self, now_s: float) -> None:
        """Request missing batches or a snapshot; if neither is possible now, apply the held batches after the gap."""
        if not self._can_request:
            self._skip_gap()
        elif self._held and self._may_replay():
            self._begin_request(_Awaited.BATCHES, self._expected, now_s)
        elif now_s >= self._next_snapshot_s:
            self._begin_request(_Awaited.SNAPSHOT, None, now_s)
        else:
            self._skip_gap()

    def _may_replay(self) -> bool:
        is_short = self._expected == 0 and min(self._held) <= self._rules.most_replayed
        return (self._is_whole or is_short) and self._replay_failed_at != self._expected

    def _skip_gap(self) -> None:
        for number in sorted(self._held):
            self._apply(number, self._held.pop(number))

    def _begin_request(self, awaited: _Awaited, first: int | None, now_s: float) -> None:
        self._awaited = awaited
        self._fails_at_s = now_s + self._patience_s
        self._parts = []
        self._num_requests += 1
        self._request = OutgoingRequest(self._num_requests, first)

    def _take_replayed(self, message: Message | None, now_s: float) -> None:
        if message is None:
            if self._expected not in self._held:
                self._fail(now_s)
            self._awaited = _Awaited.NOTHING
            return
        batch, lifetime = self._decoded(message)
        if lifetime != self._lifetime:
            if lifetime not in self._past:  # its process has begun since; its batches will be requested again
                self._begin(lifetime)
            return
        if message.number >= self._expected:
            self._held.setdefault(message.number, batch)
            self._apply_held()
        if not self._held:
            self._awaited = _Awaited.NOTHING  # the rest of the answer is not needed

    def _end_snapshot(self, now_s: float) -> None:
        """Use the snapshot whose answer has ended, if all its parts have arrived."""
        self._awaited = _Awaited.NOTHING
        lifetimes = {part.lifetime for part in self._parts}
        num_blocks = sum(len(event.block_hashes) for part in self._parts for event in self._reader.stored(part))
        lifetime = self._parts[0].lifetime if self._parts else None
        is_complete = len(lifetimes) == 1 and num_blocks == self._parts[0].num_blocks and lifetime not in self._past
        if not is_complete or lifetime is None:
            self._awaited = _Awaited.SNAPSHOT
            self._fail(now_s)
            return
        if lifetime != self._lifetime:
            self._begin(lifetime)
        if self._next_batch < self._expected:  # older than the applied batches
            self._next_snapshot_s = now_s + self._rules.retry_s
            return
        blocks = self._reader.blocks(self._parts, f"{self._source}, a snapshot")
        self._out.append(Snapshot(lifetime, self._next_batch, blocks))
        self._expected = self._next_batch
        self._is_whole = True
        self._held = {number: batch for number, batch in self._held.items() if number >= self._expected}

    def _fail(self, now_s: float) -> None:
        """End a failed request: the publisher no longer has the batches, or does not answer."""
        if self._awaited is _Awaited.BATCHES:
            self._replay_failed_at = self._expected
            if self._held and self._lifetime is not None:
                self._is_whole = False
                self._out.append(Alive(self._lifetime, min(self._held)))
        else:
            self._next_snapshot_s = now_s + self._rules.retry_s
        self._awaited = _Awaited.NOTHING
        self._request = None


NUMBER_NBYTES: Final = 8
END_NUMBER: Final = -1
NUM_PUBLISHED: Final = 3
NUM_ANSWERED: Final = (2, 3, 4)
MOST_NAMED: Final = 10
ENDPOINT_ADVICE: Final = "Name the endpoint of KV events, as in tcp://127.0.0.1:5557"
SNAPSHOT_REQUEST: Final = [b"", SNAPSHOT]
NUM_REQUESTED: Final = 3
REPLAY_ENDPOINT_ADVICE: Final = "Name the engine's replay_endpoint: `replay=tcp://127.0.0.1:5558`"


@dataclass(frozen=True, slots=True)
class Request:
    """A request at the publisher's replay socket.

    Args:
        client: the frame that addresses the answer.
        first: number of the first requested message; None: a snapshot.
    """

    client: bytes
    first: int | None


def published(frames: Sequence[bytes], source: str) -> Message:
    """Read the frames of a published message.

    Args:
        frames: frames of the message.
        source: the endpoint, for errors.

    Raises:
        RecordingError: the frames are not those of KV events.
    """
    if len(frames) != NUM_PUBLISHED or len(frames[1]) != NUMBER_NBYTES:
        raise _other_frames("a message", frames, source, ENDPOINT_ADVICE)
    return _message(frames)


def answered(frames: Sequence[bytes], source: str) -> Message | None:
    """Read a part of an answer; None: the answer's end.

    Args:
        frames: frames of the answer.
        source: the endpoint, for errors.

    Raises:
        RecordingError: the frames are not those of an answer.
    """
    if len(frames) not in NUM_ANSWERED or len(frames[-2]) != NUMBER_NBYTES:
        raise _other_frames("an answer", frames, source, REPLAY_ENDPOINT_ADVICE)
    message = _message(frames)
    return None if message.number == END_NUMBER else message


def request_frames(first: int) -> list[bytes]:
    """Build the request for all messages from a number on."""
    return [b"", _number(first)]


def broadcast(message: Message) -> list[bytes]:
    """Build the frames of a published message."""
    return [message.topic, _number(message.number), message.payload]


def requested(frames: Sequence[bytes]) -> Request | None:
    """Read a request from a publisher's ROUTER socket; None: the frames are not a request."""
    if len(frames) != NUM_REQUESTED:
        return None
    client, _, wanted = frames
    return Request(client, None if wanted == SNAPSHOT else int.from_bytes(wanted, "big"))


def answer(client: bytes, message: Message) -> list[bytes]:
    """Build the frames of a message that is sent again to one client, or of a part of a snapshot."""
    return [client, b"", message.topic, _number(message.number), message.payload]


def end_of_answer(client: bytes) -> list[bytes]:
    """Build the frames that end an answer."""
    return [client, b"", b"", _number(END_NUMBER), b""]


def _number(number: int) -> bytes:
    return number.to_bytes(NUMBER_NBYTES, "big", signed=number < 0)


def _message(frames: Sequence[bytes]) -> Message:
    topic = frames[-3] if len(frames) >= NUM_PUBLISHED else b""
    return Message(int.from_bytes(frames[-2], "big", signed=True), frames[-1], topic)


def _other_frames(what: str, frames: Sequence[bytes], source: str, remedy: str) -> RecordingError:
    sizes = ", ".join(str(len(frame)) for frame in frames[:MOST_NAMED])
    reason = f"{what} has frames of {sizes} bytes, not a topic, a number of {NUMBER_NBYTES} and a payload"
    return RecordingError(source, reason, remedy)


@final
class SentBatches:
    """A ring of batches.

    Args:
        most: most batches that are kept; older ones are dropped.
    """

    def __init__(self, most: int) -> None:
        self._messages: deque[Message] = deque(maxlen=most)

    def append(self, message: Message) -> None:
        """Keep a batch. Its number must be above those before."""
        self._messages.append(message)

    def since(self, first: int) -> list[Message]:
        """Return the kept batches from a number on. O(kept batches)."""
        return [message for message in self._messages if message.number >= first]
