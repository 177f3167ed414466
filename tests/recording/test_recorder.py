"""A recorder on real sockets: messages, gaps, messages asked for again, processes that die and come back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.events import Endpoints, Subscription
from pagedkv.planner.recording.recorder import Bounds, Ending, Recorder
from tests.recording.events import as_arrays, as_maps, cleared, removed, stored
from tests.recording.publisher import Publisher, doing

FIRST = as_maps(100.0, stored([1, 2], [1, 2, 3, 4]))
SECOND = as_maps(101.0, stored([3], [5, 6], parent=2), removed([2]))
THIRD = as_maps(103.0, removed([1]))


@contextmanager
def recorder_of(endpoint: str, replay: str | None = None, **options: object) -> Iterator[Recorder]:
    with Subscription(Endpoints(endpoint, replay, **options)) as subscription:  # type: ignore[arg-type]
        yield Recorder(subscription, time.time)


def recorded(publisher: Publisher, work: Callable[[], None], num_messages: int, *, replay: bool = False) -> Recorder:
    """Record what a publisher does once somebody subscribed."""

    def do() -> None:
        publisher.await_subscriber()
        work()

    with doing(do), recorder_of(publisher.endpoint, publisher.replay if replay else None) as recorder:
        assert recorder.run(Bounds(max_messages=num_messages)) is Ending.LIMIT
    return recorder


@pytest.mark.parametrize("encode", [as_maps, as_arrays])
def test_a_process_followed_from_its_first_message(encode: Callable[..., bytes]) -> None:
    with Publisher() as publisher:

        def work() -> None:
            publisher.send(encode(100.0, stored([1, 2], [1, 2, 3, 4])))
            publisher.send(encode(101.0, stored([3], [5, 6], parent=2), removed([2])))

        recorder = recorded(publisher, work, 2)
    assert (recorder.num_messages, recorder.gaps, recorder.num_restarts) == (2, [], 0)
    assert recorder.residency.is_exact
    gpu = recorder.residency.media["GPU"]
    assert (gpu.num_stored, gpu.num_removed, gpu.num_blocks) == (3, 1, 2)
    assert recorder.began_s == 100.0 < recorder.ended_s
    assert recorder.contents.num_unknown == 0
    assert recorder.contents.block_size == 2


def test_messages_before_the_recording_are_asked_for() -> None:
    with Publisher(kept=[(0, FIRST), (1, SECOND), (2, THIRD)]) as publisher:

        def work() -> None:
            publisher.send(THIRD, number=2)
            publisher.answer_replay()

        recorder = recorded(publisher, work, 3, replay=True)
        assert publisher.asked_from == [0]
    assert (recorder.num_requested_again, recorder.gaps) == (2, [])
    assert recorder.residency.is_exact


def test_without_them_the_beginning_is_unknown() -> None:
    with Publisher() as publisher:
        recorder = recorded(publisher, lambda: publisher.send(SECOND, number=7), 1)
    (gap,) = recorder.gaps
    assert (gap.first, gap.last, gap.reason) == (0, 6, "were sent before the recording began")
    assert not recorder.residency.was_exact
    assert recorder.contents.num_unknown == 1  # what it continues was never seen


def test_what_the_publisher_no_longer_has_is_a_gap() -> None:
    with Publisher(kept=[(1, SECOND), (2, THIRD)]) as publisher:

        def work() -> None:
            publisher.send(THIRD, number=2)
            publisher.answer_replay()

        recorder = recorded(publisher, work, 2, replay=True)
    assert [(gap.first, gap.last) for gap in recorder.gaps] == [(0, 0)]
    assert recorder.num_requested_again == 1


def test_a_gap_is_told_and_what_was_known_is_not_held_to_be_there() -> None:
    with Publisher() as publisher:

        def work() -> None:
            publisher.send(FIRST)
            publisher.send(THIRD, number=5)
            publisher.send(as_maps(104.0, cleared(), stored([9], [7, 7])))

        recorder = recorded(publisher, work, 3)
    assert [(gap.first, gap.last, gap.reason) for gap in recorder.gaps] == [(1, 4, "were not received")]
    gpu = recorder.residency.media["GPU"]
    assert (recorder.residency.num_censored, gpu.num_removed_unseen, gpu.num_blocks) == (2, 1, 1)
    assert recorder.residency.is_exact  # again, since the cache was cleared


def test_a_gap_is_filled_from_the_same_process() -> None:
    with Publisher(kept=[(0, FIRST), (1, SECOND), (2, THIRD)]) as publisher:

        def work() -> None:
            publisher.send(FIRST)
            publisher.send(THIRD, number=2)
            publisher.answer_replay()

        recorder = recorded(publisher, work, 3, replay=True)
        assert publisher.asked_from == [0]  # the last one seen, as a proof
    assert (recorder.gaps, recorder.num_requested_again) == ([], 1)
    assert recorder.residency.is_exact


def test_the_answer_of_another_process_fills_no_gap_and_is_followed_from_its_beginning() -> None:
    with Publisher(kept=[(0, THIRD), (1, SECOND)]) as publisher:

        def work() -> None:
            publisher.send(FIRST)
            publisher.send(THIRD, number=2)
            publisher.answer_replay()
            publisher.answer_replay()

        recorder = recorded(publisher, work, 4, replay=True)
        assert publisher.asked_from == [0, 0]
    assert (recorder.gaps, recorder.num_restarts, recorder.num_requested_again) == ([], 1, 2)
    gpu = recorder.residency.media["GPU"]
    assert (gpu.num_stored, gpu.num_blocks, recorder.residency.num_censored) == (3, 1, 2)


def test_a_message_of_the_old_process_is_none_of_the_new_one() -> None:
    again = as_maps(200.0, stored([7], [1, 2]))
    with Publisher(kept=[(0, again)]) as publisher:

        def work() -> None:
            publisher.send(FIRST)
            publisher.send(THIRD, number=5)  # it still came, and what is asked is answered by the new process
            publisher.answer_replay()
            publisher.answer_replay()
            publisher.answer_replay()  # whether there are more by now
            publisher.send(as_maps(201.0, stored([8], [3, 4], parent=7)), number=1)

        recorder = recorded(publisher, work, 3, replay=True)
    assert (recorder.gaps, recorder.num_restarts) == ([], 1)
    assert recorder.residency.media["GPU"].num_blocks == 2
    assert recorder.residency.is_exact


def test_an_answer_that_breaks_off_is_asked_on_and_one_without_an_end_is_enough() -> None:
    """A publisher of SGLang drops what its queue cannot hold: messages in the middle, and the end."""
    kept = [(number, as_maps(100.0 + number, stored([number], [number, 0]))) for number in range(10)]
    with Publisher(kept=kept) as publisher:

        def work() -> None:
            publisher.send(kept[9][1], number=9)
            publisher.answer_replay(at_most=4, ends=True)
            publisher.answer_replay(at_most=6, ends=False)  # the last one that was had, and the other five

        recorder = recorded(publisher, work, 10, replay=True)
        assert publisher.asked_from == [0, 3]
    assert (recorder.gaps, recorder.num_requested_again) == ([], 9)
    assert recorder.residency.media["GPU"].num_blocks == 10


def test_a_hole_in_an_answer_is_asked_for() -> None:
    kept = [(number, as_maps(100.0 + number, stored([number], [number, 0]))) for number in range(6)]
    with Publisher(kept=kept) as publisher:

        def work() -> None:
            publisher.send(kept[0][1], number=0)
            publisher.send(kept[5][1], number=5)
            publisher.answer_replay(at_most=2)
            publisher.answer_replay()

        recorder = recorded(publisher, work, 6, replay=True)
        assert publisher.asked_from == [0, 1]
    assert (recorder.gaps, recorder.num_requested_again) == ([], 4)


def test_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.events.follower.REPLAY_PATIENCE_MS", 1)
    with Publisher() as publisher:
        recorder = recorded(publisher, lambda: publisher.send(SECOND, number=7), 1, replay=True)
    (gap,) = recorder.gaps
    assert gap.reason == (
        f"were sent before the recording began, and {publisher.replay} sent no further part of its answer for 0.001 s"
    )


@pytest.mark.parametrize("ending", [Ending.ASKED, Ending.DURATION])
def test_what_nobody_received_is_asked_for_at_the_end(ending: Ending) -> None:
    """An idle engine shows no gap: what it holds was sent before the recording, and nothing comes behind it."""
    with Publisher(kept=[(0, FIRST), (1, SECOND)]) as publisher:

        def work() -> None:
            publisher.await_subscriber()
            publisher.answer_replay()  # once: an engine that goes on would have more each time

        with doing(work), recorder_of(publisher.endpoint, publisher.replay) as recorder:
            times_s = iter([0.0, *([1.0] * 1000)])

            def is_there() -> bool:
                return recorder._subscription.is_connected

            if ending is Ending.ASKED:
                assert recorder.run(Bounds(), is_over=is_there) is ending
            else:
                recorder._clock = lambda: 1e4 if is_there() else next(times_s)
                assert recorder.run(Bounds(duration_s=1e3)) is ending
    assert (recorder.num_messages, recorder.num_requested_again, recorder.gaps) == (2, 2, [])
    assert recorder.residency.media["GPU"].num_blocks == 2


def test_messages_that_come_twice_count_once() -> None:
    with Publisher() as publisher:

        def work() -> None:
            for payload, number in ((FIRST, 0), (SECOND, 1), (FIRST, 0), (SECOND, 1), (THIRD, 2)):
                publisher.send(payload, number=number)

        recorder = recorded(publisher, work, 3)
    assert (recorder.num_messages, recorder.num_restarts, recorder.gaps) == (3, 0, [])


def test_a_new_process_begins_with_an_empty_cache() -> None:
    again = as_maps(200.0, stored([1], [1, 2]))
    with Publisher() as publisher:

        def work() -> None:
            publisher.send(FIRST)
            publisher.send(SECOND)
            publisher.send(again, number=0)

        recorder = recorded(publisher, work, 3)
    assert (recorder.num_restarts, recorder.gaps) == (1, [])
    assert (recorder.residency.num_censored, recorder.residency.media["GPU"].num_blocks) == (2, 1)


def test_a_publisher_that_dies_and_comes_back() -> None:
    first = Publisher()

    def live() -> None:
        with first:
            first.await_subscriber()
            first.send(FIRST)
            first.send(SECOND)
        with Publisher(first.endpoint) as second:
            second.await_subscriber()
            second.send(as_maps(200.0, stored([1], [1, 2])))
            second.await_departure()

    with doing(live), recorder_of(first.endpoint) as recorder:
        assert recorder.run(Bounds(max_messages=3)) is Ending.LIMIT
    assert (recorder.num_messages, recorder.num_restarts, recorder.gaps) == (3, 1, [])


def test_after_a_break_an_expected_number_proves_nothing(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    first = Publisher(endpoint)

    def live() -> None:
        with first:
            first.await_subscriber()
            first.send(FIRST)
        with Publisher(endpoint) as second:
            second.await_subscriber()
            second.send(SECOND, number=1)
            second.await_departure()

    with doing(live), recorder_of(endpoint) as recorder:
        recorder.run(Bounds(max_messages=2))
    (gap,) = recorder.gaps
    assert (gap.first, gap.last) == (1, None)
    assert "nothing proves that the process is the same" in gap.reason
    assert not recorder.residency.is_exact


def test_after_a_break_another_process_is_known_by_what_it_sends_again(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    new = as_maps(200.0, stored([9], [7, 7]))
    with Publisher(kept=[(0, new), (1, SECOND)]) as answering:
        first = Publisher(endpoint)

        def live() -> None:
            with first:
                first.await_subscriber()
                first.send(FIRST)
            with Publisher(endpoint) as second:
                second.await_subscriber()
                second.send(as_maps(201.0, stored([8], [6, 6])), number=1)
                answering.answer_replay()
                answering.answer_replay()
                second.await_departure()

        with doing(live), recorder_of(endpoint, answering.replay) as recorder:
            recorder.run(Bounds(max_messages=3))
    assert (recorder.gaps, recorder.num_restarts, recorder.num_requested_again) == ([], 1, 1)
    assert recorder.residency.media["GPU"].num_blocks == 2
    assert recorder.residency.is_exact


def test_a_publisher_that_dies_for_good_ends_the_recording() -> None:
    publisher = Publisher()

    def live() -> None:
        with publisher:
            publisher.await_subscriber()
            publisher.send(FIRST)

    with doing(live), recorder_of(publisher.endpoint) as recorder:
        assert recorder.run(Bounds(patience_s=0.0)) is Ending.GONE
    assert recorder.num_messages == 1


def test_a_message_right_before_the_break_is_returned_with_it() -> None:
    publisher = Publisher()
    with Subscription(Endpoints(publisher.endpoint)) as subscription:
        with publisher:
            publisher.await_subscriber()
            assert subscription.receive(60.0) is None
            assert subscription.is_connected
            publisher.send(FIRST)
        subscription._poller.unregister(subscription._socket)
        message = subscription.receive(60.0)
        assert not subscription.is_connected
    assert message is not None
    assert message.payload == FIRST


def test_nobody_there_is_an_error() -> None:
    with Publisher() as publisher:
        pass
    no_publisher = pytest.raises(RecordingError, match="no publisher sent messages there")
    with recorder_of(publisher.endpoint) as recorder, no_publisher:
        recorder.run(Bounds(duration_s=0.01))


def test_the_publisher_may_be_the_one_who_connects(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    with recorder_of(endpoint, bind=True) as recorder:
        socket.connect(endpoint)

        def live() -> None:
            assert socket.recv() == b"\x01"
            socket.send_multipart([b"", bytes(8), FIRST])

        with doing(live):
            recorder.run(Bounds(max_messages=1))
    context.destroy(linger=0)
    assert recorder.num_messages == 1


def test_topics_are_asked_for() -> None:
    with Publisher() as publisher:

        def work() -> None:
            assert publisher.await_subscriber() == "kv-events"
            publisher.send(SECOND, number=4, topic=b"other")
            publisher.send(FIRST, number=0, topic=b"kv-events")

        with doing(work), recorder_of(publisher.endpoint, topic="kv-events") as recorder:
            recorder.run(Bounds(max_messages=1))
    assert recorder.gaps == []


def test_engines_of_several_topics_at_one_endpoint_are_refused() -> None:
    """As when many engines connect to one subscriber: their numbers run side by side, and look like restarts."""
    with Publisher() as publisher:

        def work() -> None:
            publisher.await_subscriber()
            publisher.send(FIRST, topic=b"kv@10.0.0.1@m")
            publisher.send(FIRST, number=0, topic=b"kv@10.0.0.2@m")

        with (
            doing(work),
            recorder_of(publisher.endpoint, topic="kv@") as recorder,
            pytest.raises(RecordingError, match=r"topic 'kv@10.0.0.2@m', those before 'kv@10.0.0.1@m'.*`topic`"),
        ):
            recorder.run(Bounds())
    assert recorder.num_messages == 1


def test_something_else_than_events_is_an_error_at_first_and_a_gap_later() -> None:
    with Publisher() as publisher:

        def wrong() -> None:
            publisher.await_subscriber()
            publisher.send(b"hello")

        with (
            doing(wrong),
            recorder_of(publisher.endpoint) as recorder,
            pytest.raises(RecordingError, match="message 0: not a batch of KV events"),
        ):
            recorder.run(Bounds())
    with Publisher() as publisher:

        def work() -> None:
            publisher.send(FIRST)
            publisher.send(b"\xc1")
            publisher.send(THIRD)

        recorder = recorded(publisher, work, 2)
    (gap,) = recorder.gaps
    assert (gap.first, gap.last) == (1, 1)
    assert "not a batch of KV events" in gap.reason


@pytest.mark.parametrize("frames", [(b"alone",), (b"", b"short", FIRST), (b"", bytes(8), FIRST, b"more")])
def test_messages_of_other_frames_are_refused(frames: tuple[bytes, ...]) -> None:
    with Publisher() as publisher:

        def work() -> None:
            publisher.await_subscriber()
            publisher.send_frames(*frames)

        with (
            doing(work),
            recorder_of(publisher.endpoint) as recorder,
            pytest.raises(RecordingError, match="a message has frames of"),
        ):
            recorder.run(Bounds())


def test_two_ranks_at_one_endpoint_are_refused_and_what_came_stays() -> None:
    with Publisher() as publisher:

        def work() -> None:
            publisher.await_subscriber()
            publisher.send(FIRST)
            publisher.send(as_maps(101.0, rank=1))

        with (
            doing(work),
            recorder_of(publisher.endpoint) as recorder,
            pytest.raises(RecordingError, match="message 1: sent by rank 1, those before by rank 0"),
        ):
            recorder.run(Bounds())
    assert recorder.num_messages == 1


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("127.0.0.1:5557", "is not an endpoint"),
        ("http://127.0.0.1:5557", "is not an endpoint"),
        ("tcp://", "is not an endpoint"),
        ("tcp://*:5557", "means all addresses"),
    ],
)
def test_endpoints_that_are_none(endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Endpoints(endpoint)
    with pytest.raises(ConfigurationError, match=reason):
        Endpoints("tcp://127.0.0.1:1", endpoint)


def test_an_endpoint_that_the_system_refuses() -> None:
    with pytest.raises(ConfigurationError, match=r"tcp://127\.0\.0\.1:port cannot be used: Invalid argument"):
        Subscription(Endpoints("tcp://127.0.0.1:port"))


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"duration_s": 0.0}, "`duration_s` must be"),
        ({"duration_s": float("nan")}, "`duration_s` must be"),
        ({"duration_s": float("inf")}, "`duration_s` must be"),
        ({"max_messages": 0}, "`max_messages` must be"),
        ({"patience_s": -1.0}, "`patience_s` must be"),
        ({"patience_s": float("inf")}, "`patience_s` must be"),
    ],
)
def test_bounds_that_make_no_sense(bounds: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Bounds(**bounds)  # type: ignore[arg-type]
