"""Frames arrive whole and in order, however the bytes between two processes are cut."""

import asyncio
import itertools
import socket
import threading
from typing import Any

from hypothesis import given, strategies as st

from pagedkv.serving.server.engine_process.frames import BlockingFrames, LoopFrames, frame_of

VALUES = st.lists(st.none() | st.binary(max_size=40) | st.lists(st.integers()), max_size=6)


@given(VALUES, st.data())
def test_values_arrive_however_their_bytes_are_cut(values: list[Any], data: st.DataObject) -> None:
    stream = b"".join(frame_of((each,)) for each in values)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)) | {0, len(stream)})
    ours, others = socket.socketpair()
    with ours, others:
        received: list[Any] = []
        frames = BlockingFrames(others)
        for begin, end in itertools.pairwise(cuts):
            ours.sendall(stream[begin:end])
        ours.shutdown(socket.SHUT_WR)
        while (value := frames.receive()) is not None:
            received.append(value)
    assert received == [(each,) for each in values]


def test_large_values_cross_in_both_directions_at_once() -> None:
    """Each is larger than what the kernel holds, so both ends write while neither has read."""
    ours, others = socket.socketpair()
    large = b"x" * 20_000_000
    answers: list[int] = []

    def echo() -> None:
        frames = BlockingFrames(others)
        while (value := frames.receive()) is not None:
            frames.send(value)
        others.close()

    async def main() -> None:
        ended = asyncio.Event()
        frames = LoopFrames(ours, lambda value: answers.append(len(value)), ended.set)
        for _ in range(3):
            frames.send(large)
        frames.end_sending()
        await asyncio.wait_for(ended.wait(), 60)
        frames.close()

    thread = threading.Thread(target=echo)
    thread.start()
    asyncio.run(main())
    thread.join()
    assert answers == [len(large)] * 3


def test_a_receiver_can_be_woken_without_a_value() -> None:
    ours, others = socket.socketpair()
    with ours, others:
        frames = BlockingFrames(others)
        received: list[object] = ["never"]
        thread = threading.Thread(target=lambda: received.append(frames.receive()))
        thread.start()
        frames.end_receiving()
        thread.join(60)
        assert received == ["never", None]
