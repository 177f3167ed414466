"""Frames arrive whole and in order, however the bytes between two processes are cut."""

import asyncio
import itertools
import select
import socket
import threading
from typing import Any

from hypothesis import given, strategies as st

from pagedkv.server.engine_process.messages import BlockingFrames, LoopFrames, frame_of

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


def test_values_of_one_turn_of_the_loop_are_written_together() -> None:
    """Each writing would wake the engine's process by itself."""
    ours, others = socket.socketpair()
    others.settimeout(0)

    async def main() -> bytes:
        frames = LoopFrames(ours, lambda _: None, lambda: None)
        for value in range(3):
            frames.send(value)
        assert select.select([others], [], [], 0)[0] == []
        await asyncio.sleep(0)
        data = others.recv(2**16)
        frames.send("dropped")
        frames.close()
        return data

    with others:
        assert asyncio.run(main()) == b"".join(map(frame_of, range(3)))


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


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is what a test makes it."""

    now_s = 0.0

    def time(self) -> float:
        """Return the time, in seconds."""
        return self.now_s


def received_after(busy_s: float, passes_s: float) -> list[str]:
    """Send one value, whose task takes some time, then two more; return what has arrived some time later."""
    loop = SteppedLoop()
    ours, others = socket.socketpair()
    received: list[str] = []

    def take(value: str) -> None:
        received.append(value)
        if value == "first":
            loop.call_soon(work)

    def work() -> None:
        loop.now_s += busy_s
        others.sendall(frame_of("second") + frame_of("third"))

    async def main() -> None:
        frames = LoopFrames(ours, take, lambda: None)
        others.sendall(frame_of("first"))
        for _ in range(20):
            await asyncio.sleep(0)
        loop.now_s += passes_s
        for _ in range(20):
            await asyncio.sleep(0)
        frames.close()

    with others:
        loop.run_until_complete(main())
    loop.close()
    return received


def test_a_loop_that_is_behind_reads_again_after_three_times_as_long_as_it_took() -> None:
    assert received_after(busy_s=0.001, passes_s=0.0) == ["first", "second", "third"]
    assert received_after(busy_s=0.02, passes_s=0.0) == ["first"]
    assert received_after(busy_s=0.02, passes_s=0.05) == ["first"]
    assert received_after(busy_s=0.02, passes_s=0.07) == ["first", "second", "third"]
    assert received_after(busy_s=60.0, passes_s=0.2) == ["first", "second", "third"]


def test_frames_that_are_closed_while_they_pause_read_no_more() -> None:
    """A reader of a closed socket would be an error in the loop."""
    loop = SteppedLoop()
    problems: list[object] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    ours, others = socket.socketpair()

    def take(value: str) -> None:  # noqa: ARG001 - as LoopFrames calls it
        loop.call_soon(setattr, loop, "now_s", 0.05)

    async def main() -> None:
        frames = LoopFrames(ours, take, lambda: None)
        others.sendall(frame_of("first"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert loop.now_s == 0.05
        frames.close()
        loop.now_s = 1.0
        for _ in range(20):
            await asyncio.sleep(0)

    with others:
        loop.run_until_complete(main())
    loop.close()
    assert not problems
