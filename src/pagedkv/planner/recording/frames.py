"""The frames of messages: the frames of a socket as a message, and the request for missed messages.

===============================  =========================================================
published                        topic, number, payload
requested                        an empty frame, number of the first
sent again                       an empty frame, topic, number, payload
the end of what is sent again    an empty frame, no topic, the number -1, an empty payload
===============================  =========================================================

This is the protocol of vLLM (0.33) and SGLang (0.5.23). A message that is sent again may lack the topic, as from older
versions of vLLM, or the empty frame, which only a REQ socket needs. Number and payload are always the last two frames.
A number has 8 bytes, most significant first.

It opens no sockets and does not decode payloads.
"""

from collections.abc import Sequence
from typing import Final

from pagedkv.memory.contract.errors import RecordingError
from pagedkv.planner.recording.numbering import Message

__all__ = ["WHAT_TO_NAME", "answered", "published", "question"]

NUMBER_NBYTES: Final = 8
END_NUMBER: Final = -1
NUM_PUBLISHED: Final = 3
NUM_ANSWERED: Final = (2, 3, 4)
MOST_NAMED: Final = 10
WHAT_TO_NAME: Final = "Name the endpoint of KV events, as in tcp://127.0.0.1:5557"
WHAT_TO_NAME_AGAIN: Final = "Name the engine's replay_endpoint: `replay=tcp://127.0.0.1:5558`"


def published(frames: Sequence[bytes], source: str) -> Message:
    """Read a message as it is published.

    Args:
        frames: frames of the message.
        source: the endpoint, for errors.

    Raises:
        RecordingError: the frames are not those of KV events.
    """
    if len(frames) != NUM_PUBLISHED or len(frames[1]) != NUMBER_NBYTES:
        raise _other_frames("a message", frames, source, WHAT_TO_NAME)
    return _message(frames)


def answered(frames: Sequence[bytes], source: str) -> Message | None:
    """Read a message that is sent again; None: the end.

    Args:
        frames: frames of the answer.
        source: the endpoint, for errors.

    Raises:
        RecordingError: the frames are not those of an answer.
    """
    if len(frames) not in NUM_ANSWERED or len(frames[-2]) != NUMBER_NBYTES:
        raise _other_frames("an answer", frames, source, WHAT_TO_NAME_AGAIN)
    message = _message(frames)
    return None if message.number == END_NUMBER else message


def question(first: int) -> list[bytes]:
    """Build the request for all messages from a number on."""
    return [b"", first.to_bytes(NUMBER_NBYTES, "big")]


def _message(frames: Sequence[bytes]) -> Message:
    topic = frames[-3] if len(frames) >= NUM_PUBLISHED else b""
    return Message(int.from_bytes(frames[-2], "big", signed=True), frames[-1], topic)


def _other_frames(what: str, frames: Sequence[bytes], source: str, remedy: str) -> RecordingError:
    sizes = ", ".join(str(len(frame)) for frame in frames[:MOST_NAMED])
    reason = f"{what} has frames of {sizes} bytes, not a topic, a number of {NUMBER_NBYTES} and a payload"
    return RecordingError(source, reason, remedy)
