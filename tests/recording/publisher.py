"""A publisher of KV events over real sockets, in the frames of real ones; what it does is told step by step.

tests/wire/golden_frames.py has those frames as they came from vLLM and SGLang.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

import zmq

__all__ = ["Publisher", "doing"]

PATIENCE_MS: Final = 60_000
NUMBER_NBYTES: Final = 8


class Publisher:
    """A bound XPUB socket, which sees who subscribes, and a ROUTER that sends messages again.

    Args:
        endpoint: to bind to; a free port unless told.
        kept: what it sends again: (number, payload); None for no such socket.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", kept: Sequence[tuple[int, bytes]] | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.endpoint = _bound(self._socket, endpoint)
        self.number = 0
        self.kept = kept
        self.asked_from: list[int] = []
        self.topic = b""
        self._router = self._context.socket(zmq.ROUTER)
        self.replay = _bound(self._router, "tcp://127.0.0.1:*")

    def __enter__(self) -> Self:
        """Hold the sockets."""
        return self

    def __exit__(self, *_: object) -> None:
        """Die, once what was published is on its way."""
        self._socket.close(linger=PATIENCE_MS)
        self._router.close(linger=PATIENCE_MS)
        self._context.term()

    def await_subscriber(self) -> str:
        """Wait until somebody subscribes; tells the topic."""
        assert self._socket.poll(PATIENCE_MS), "nobody subscribed"
        frame = self._socket.recv()
        assert frame[:1] == b"\x01"
        return frame[1:].decode()

    def await_departure(self) -> None:
        """Wait until there is no subscriber."""
        assert self._socket.poll(PATIENCE_MS), "the subscriber stayed"
        assert self._socket.recv()[:1] == b"\x00"

    def send(self, payload: bytes, number: int | None = None, topic: bytes = b"") -> None:
        """Publish a message under the next number, or another one."""
        self.number = self.number if number is None else number
        self._socket.send_multipart([topic, self.number.to_bytes(NUMBER_NBYTES, "big"), payload])
        self.number += 1

    def send_frames(self, *frames: bytes) -> None:
        """Publish anything."""
        self._socket.send_multipart(frames)

    def answer_replay(self, *, after: int | None = None, at_most: int | None = None, ends: bool = True) -> None:
        """Answer one question for messages that were missed.

        Args:
            after: the messages up to this number are lost on the way.
            at_most: so many messages are sent, the others lost.
            ends: whether the end is sent, or lost as well.
        """
        assert self._router.poll(PATIENCE_MS), "nobody asked again"
        client, empty, asked = self._router.recv_multipart()
        assert empty == b""
        first = int.from_bytes(asked, "big")
        self.asked_from.append(first)
        found = [(number, payload) for number, payload in self.kept or () if number >= first]
        for number, payload in [each for each in found if after is None or each[0] > after][:at_most]:
            self._answer(client, self.topic, number.to_bytes(NUMBER_NBYTES, "big"), payload)
        if ends:
            self._answer(client, b"", (-1).to_bytes(NUMBER_NBYTES, "big", signed=True), b"")

    def _answer(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        self._router.send_multipart([client, b"", topic, number, payload])


def _bound(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind a socket; tells where it is, with its port."""
    socket.bind(endpoint)
    where = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(where, bytes)
    return where.rstrip(b"\0").decode()


@contextmanager
def doing(work: Callable[[], None]) -> Iterator[None]:
    """Do the publisher's part in a thread of its own; what fails there fails here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_MS / 1000)
    assert not failures, failures
