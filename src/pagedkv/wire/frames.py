"""The frames of messages at sockets: of published messages, of requests and of answers, built and read.

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

SentBatches keeps the latest messages of a publisher, to be sent again. This module opens no sockets and does not decode
payloads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from pagedkv.errors import RecordingError

__all__ = [
    "ENDPOINT_ADVICE",
    "SNAPSHOT_REQUEST",
    "Message",
    "Request",
    "SentBatches",
    "answer",
    "answered",
    "broadcast",
    "end_of_answer",
    "published",
    "request_frames",
    "requested",
]

NUMBER_NBYTES: Final = 8
END_NUMBER: Final = -1
NUM_PUBLISHED: Final = 3
NUM_ANSWERED: Final = (2, 3, 4)
MOST_NAMED: Final = 10
ENDPOINT_ADVICE: Final = "Name the endpoint of KV events, as in tcp://127.0.0.1:5557"
SNAPSHOT: Final = b"snapshot"
SNAPSHOT_REQUEST: Final = [b"", SNAPSHOT]
NUM_REQUESTED: Final = 3
REPLAY_ENDPOINT_ADVICE: Final = "Name the engine's replay_endpoint: `replay=tcp://127.0.0.1:5558`"


@dataclass(frozen=True, slots=True)
class Message:
    """One message with an undecoded payload."""

    number: int
    payload: bytes
    topic: bytes = field(default=b"", compare=False)
    """Excluded from equality: a message that is sent again may lack it."""


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
