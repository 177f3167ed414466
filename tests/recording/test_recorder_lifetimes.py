"""Recordings of our own publisher: they begin with a snapshot, have no gaps, and know processes by their lifetimes."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from pagedkv import FullAttention
from pagedkv.events import Endpoints, EventPublisher, Subscription
from pagedkv.planner.recording.recorder import Bounds, Ending, MessageNumbers, Place, Recorder, Residency
from pagedkv.wire import BlocksStored, CacheSnapshot, Message
from tests.recording.publisher import doing
from tests.space.spaces import cache, new_space, tokens

GROUPS: Final = (FullAttention(4),)
PATIENCE_S: Final = 120.0


class Served:
    """A block space and the publisher of its events."""

    def __init__(self, folder: Path, buffer_batches: int = 10_000) -> None:
        self.space = new_space(*GROUPS, num_blocks=30, max_tokens=90, events=True)
        self.endpoints = Endpoints(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self.publisher = EventPublisher(
            f"ipc://{folder}/events",
            f"ipc://{folder}/replay",
            groups=GROUPS,
            heartbeat_s=0.02,
            buffer_batches=buffer_batches,
        )
        self.lock = threading.Lock()
        self.publisher.serve_snapshots(self._take)

    def _take(self) -> CacheSnapshot:
        with self.lock:
            return self.publisher.snapshot(self.space)

    def serve(self, first: int, num_tokens: int = 40) -> None:
        """Cache a prompt, and publish what changed."""
        with self.lock:
            cache(self.space, tokens(num_tokens, first=first))
            self.publisher.publish(self.space.drain_events(), self.space)

    def names(self) -> set[bytes]:
        """Give what is cached."""
        return set(map(bytes, self.space.stored_blocks().digests))


def there(recorder: Recorder) -> set[object]:
    """Give what a recording says is there."""
    found = {block_hash for _, _, block_hash in recorder.residency._since_s}
    assert len(found) == recorder.residency.media["GPU"].num_blocks
    return set(found)


class Lossy(Subscription):
    """Loses messages on the way: five in a row of every twenty."""

    def receive(self, timeout_s: float) -> Message | None:
        """Receive a message, if it is not lost."""
        message = super().receive(timeout_s)
        return None if message is not None and message.number % 20 >= 15 else message


def recorded(
    subscription: Subscription, is_enough: Callable[[Recorder], bool], work: Callable[[Recorder], None]
) -> Recorder:
    """Record until it is enough, while work is done from the first message on."""
    recorder = Recorder(subscription, time.time)
    is_done = threading.Event()

    def run() -> None:
        until = time.monotonic() + PATIENCE_S
        while not (recorder.num_messages or recorder.num_snapshots) and time.monotonic() < until:
            is_done.wait(0.005)
        work(recorder)
        is_done.set()

    with doing(run):
        ending = recorder.run(Bounds(duration_s=PATIENCE_S), is_over=lambda: is_done.is_set() and is_enough(recorder))
    assert ending is Ending.ASKED
    return recorder


@pytest.mark.parametrize("buffer_batches", [10_000, 2], ids=["sent-again", "snapshots"])
def test_a_recording_has_no_gap(tmp_path: Path, *, buffer_batches: int) -> None:
    served = Served(tmp_path, buffer_batches)
    for first in (0, 100, 200):
        served.serve(first)

    def work(_recorder: Recorder) -> None:
        for first in range(300, 3000, 100):
            served.serve(first)
        served.serve(0)

    with served.publisher, Lossy(served.endpoints) as subscription:
        recorder = recorded(subscription, lambda recorder: there(recorder) == served.names(), work)
    assert (recorder.gaps, recorder.num_restarts, recorder.residency.is_exact) == ([], 0, True)
    assert (recorder.num_snapshots > 1) == (buffer_batches == 2)
    assert recorder.contents.block_size == 4
    gpu = recorder.residency.media["GPU"]
    if buffer_batches > 2:
        assert recorder.num_requested_again > 0
        assert gpu.num_removed > 100
        num_unseen = gpu.num_removed - sum(gpu.lifetimes)
        num_listed = 29 if recorder.num_snapshots else 0  # a late snapshot: all messages are sent again
        assert num_unseen == num_listed, "blocks whose stores were not seen"
        assert recorder.contents.num_unknown == 0


def test_a_process_that_is_started_again_is_another_lifetime(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = Served(tmp_path)
        first.serve(0)
        second: list[Served] = []

        def work(_recorder: Recorder) -> None:
            first.serve(100)
            first.publisher.close()
            second.append(Served(tmp_path))
            stack.callback(second[0].publisher.close)
            for each in range(200, 600, 100):
                second[0].serve(each)
            second[0].serve(0, 20)

        with Subscription(first.endpoints) as subscription:
            recorder = recorded(
                subscription,
                lambda recorder: bool(recorder.num_restarts) and there(recorder) == second[0].names(),
                work,
            )
    assert (recorder.gaps, recorder.num_restarts, recorder.residency.is_exact) == ([], 1, True)


def test_lifetimes_and_not_times_tell_processes_apart() -> None:
    numbers = MessageNumbers()
    numbers.take(7, 100.0, "a")
    assert numbers.place(8, 99.0, "a") is Place.NEXT
    assert numbers.place(3, 101.0, "a") is Place.SEEN
    assert numbers.place(9, 101.0, "a") is Place.BEHIND_GAP
    assert numbers.place(8, 101.0, "b") is Place.RESTARTED
    assert numbers.place(8, 99.0, "b") is Place.SEEN, "of a process before"
    numbers.begin_anew()
    assert numbers.place(2, 101.0, "b") is Place.BEHIND_GAP


def test_a_list_of_blocks_keeps_the_beginnings_that_are_known() -> None:
    residency = Residency()
    residency.advance(10.0)
    residency.begin_empty()
    residency.store(BlocksStored((b"a", b"b"), None, None, 4))
    residency.begin_listed(14.0, [BlocksStored((b"b", b"c"), None, None, 4)])
    assert (residency.num_censored, residency.media["GPU"].num_blocks, residency.is_exact) == (1, 2, True)
    assert residency.media["GPU"].seconds == 0, "what was there before the list is not known"
    residency.advance(15.0)
    residency.clear()
    gpu = residency.media["GPU"]
    assert (gpu.num_removed, sum(gpu.lifetimes), gpu.seconds, gpu.block_seconds) == (2, 1, 1.0, 2.0)
