"""Follows one publisher until it is stopped, and keeps the results.

A message is the next one, or messages before it were missed. Missed messages are requested again if the publisher can
replay. If it has dropped them, a snapshot of its cache is requested, with which a recording of pagedkv's own publishers
begins as well. Otherwise they are a :class:`Gap`, and which blocks are stored is then unknown. A message that is not a
batch of events is a gap as well. If the first message is not one, the endpoint is not a publisher of KV events.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Final, Protocol, assert_never

from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.planner.recording.contents import Contents, MessageNumbers, Place
from pagedkv.planner.recording.residency import Residency
from pagedkv.wire import DEVICE, BlocksRemoved, BlocksStored, Cleared, EventBatch, Message, decode_batch

__all__ = ["Bounds", "Ending", "Gap", "MessageSource", "Recorder"]

TICK_S: Final = 0.2
FIRST_PATIENCE_S: Final = 5.0
"""Least patience for the first connection, even if the user sets a shorter one."""
BEYOND_ALL: Final = 2**63
"""No message has this number."""
MOST_GAPS: Final = 1000
"""Most gaps that are listed singly; all are counted."""


class Ending(Enum):
    """Why a recording ended. Recordings' documents have the names in lower case (``ended_by``)."""

    DURATION = "the duration is over"
    LIMIT = "the requested number of messages was taken"
    ASKED = "interrupted"
    GONE = "the publisher disconnected"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a recording.

    Args:
        duration_s: seconds since the recording began, or None.
        max_messages: messages taken, or None.
        patience_s: seconds to wait without a publisher.

    Raises:
        ConfigurationError: a bound is not positive.
    """

    duration_s: float | None = None
    max_messages: int | None = None
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        if self.duration_s is not None and not (isfinite(self.duration_s) and self.duration_s > 0):
            raise ConfigurationError(f"`duration_s` must be a number of seconds above 0, got {self.duration_s}")
        if self.max_messages is not None and self.max_messages < 1:
            raise ConfigurationError(f"`max_messages` must be at least 1 message, got {self.max_messages}")
        if not (isfinite(self.patience_s) and self.patience_s >= 0):
            raise ConfigurationError(f"`patience_s` must be at least 0 seconds, got {self.patience_s}")


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that were missed and could not be replayed.

    Args:
        first: number of the first message.
        last: number of the last message; None: unknown.
        reason: the reason, in words.
    """

    first: int
    last: int | None
    reason: str


class MessageSource(Protocol):
    """A source of messages; :class:`~pagedkv.events.Subscription` documents the methods."""

    @property
    def source(self) -> str: ...  # noqa: D102 - see above

    @property
    def can_replay(self) -> bool: ...  # noqa: D102

    @property
    def is_connected(self) -> bool: ...  # noqa: D102

    @property
    def num_breaks(self) -> int: ...  # noqa: D102

    @property
    def silence(self) -> str | None: ...  # noqa: D102

    def receive(self, timeout_s: float) -> Message | None: ...  # noqa: D102

    def replayed(self, first: int) -> Iterator[Message]: ...  # noqa: D102

    def snapshot(self) -> list[Message]: ...  # noqa: D102


class Recorder:
    """Follows one publisher.

    Args:
        subscription: an open subscription to the publisher.
        clock: returns seconds since 1970.
    """

    def __init__(self, subscription: MessageSource, clock: Callable[[], float]) -> None:
        self._subscription = subscription
        self._clock = clock
        self._numbers = MessageNumbers()
        self._num_breaks = 0
        self._last: Message | None = None
        self._topic: bytes | None = None
        self._has_lifetimes = False
        self.rank: int | None = None
        """The rank of this data-parallel engine, if its messages have one."""
        self.began_s = clock()
        """Begin of the recording; earlier if earlier messages were replayed."""
        self.ended_s = self.began_s
        """End of the recording."""
        self.residency = Residency()
        """Stored blocks, by medium."""
        self.contents = Contents()
        """Their contents."""
        self.num_messages = 0
        """Messages taken, including those requested again."""
        self.num_requested_again = 0
        """Messages that were requested again."""
        self.num_restarts = 0
        """Detected restarts of the publisher's process."""
        self.num_snapshots = 0
        """Snapshots that were taken instead of messages."""
        self.gaps: list[Gap] = []
        """The first thousand gaps."""
        self.num_gaps = 0
        """Number of all gaps."""
        self.unknown_kinds: Counter[str] = Counter()
        """Events of unknown kinds, by name."""

    def run(
        self,
        bounds: Bounds,
        *,
        is_over: Callable[[], bool] = lambda: False,
        each_tick: Callable[[float], None] = lambda _now_s: None,
    ) -> Ending:
        """Take messages until a bound is reached.

        Args:
            bounds: limits of the recording.
            is_over: called several times a second; returns whether the recording is to end.
            each_tick: called equally often, with the time.

        Raises:
            RecordingError: no publisher answers there, or its messages are no KV events. Results so far stay.
        """
        started_s = disconnected_since_s = self.began_s = self._clock()
        was_connected = False
        try:
            ending = None
            while ending is None:
                message = self._subscription.receive(TICK_S)
                now_s = self._clock()
                each_tick(now_s)
                if message is not None:
                    self._take(message)
                if message is not None or self._subscription.is_connected:
                    disconnected_since_s, was_connected = now_s, True
                disconnected_s = now_s - disconnected_since_s if message is None else 0.0
                patience_s = bounds.patience_s if was_connected else max(bounds.patience_s, FIRST_PATIENCE_S)
                if bounds.max_messages is not None and self.num_messages >= bounds.max_messages:
                    ending = Ending.LIMIT
                elif bounds.duration_s is not None and now_s - started_s >= bounds.duration_s:
                    ending = Ending.DURATION
                elif is_over():
                    ending = Ending.ASKED
                elif message is None and not self._subscription.is_connected and disconnected_s >= patience_s:
                    ending = Ending.GONE
            self._take_the_rest(is_due=was_connected and ending in {Ending.DURATION, Ending.ASKED})
        finally:
            self.ended_s = max(self.began_s, self._clock())
            if self._numbers.has_begun:
                self.residency.advance(self.ended_s)
        if not was_connected:
            reason = f"no publisher sent messages there within {self.ended_s - started_s:.1f} s"
            remedy = "Start the engine with KV events (publisher zmq), or wait longer: `patience_s`"
            raise RecordingError(self._subscription.source, reason, remedy)
        return ending

    # The place of a message

    def _take(self, message: Message) -> None:
        self._require_topic(message)
        batch = self._decoded(message)
        if batch is None:
            return
        has_broken = self._subscription.num_breaks > self._num_breaks
        self._num_breaks = self._subscription.num_breaks
        place = self._numbers.place(message.number, batch.sent_s, batch.lifetime)
        if place is Place.RESTARTED:
            self._restart()
            place = self._numbers.place(message.number, batch.sent_s, batch.lifetime)
            has_broken = False
        has_broken = has_broken and batch.lifetime is None
        if place is Place.SEEN:
            return
        num_restarts = self.num_restarts
        self._has_lifetimes = batch.lifetime is not None
        if not self._numbers.has_begun and message.number and self._restored():
            pass  # all blocks before this message, and perhaps its own, are known
        elif not self._numbers.has_begun or place is Place.BEHIND_GAP:
            self._catch_up(message.number)
        elif has_broken:
            self._prove_continuity(message.number)
        if self.num_restarts > num_restarts and self._numbers.is_past(batch.sent_s):
            return  # it was sent by the process before
        if self._numbers.expected < message.number:
            self._miss(message.number)
        if message.number >= self._numbers.expected:
            self._apply(message, batch)

    def _require_topic(self, message: Message) -> None:
        """Refuse messages of several engines, since each numbers its own."""
        if self._topic is not None and message.topic != self._topic:
            reason = (
                f"message {message.number} has the topic {_shown(message.topic)}, those before {_shown(self._topic)}"
            )
            remedy = "Several engines publish there: select one by its topic (`topic`)"
            raise RecordingError(self._subscription.source, reason, remedy)
        self._topic = message.topic

    def _catch_up(self, number: int) -> None:
        """Replay the messages missing before this one, as far as the publisher kept them."""
        if number > self._numbers.expected and self._subscription.can_replay:
            while self._take_again(number):
                pass

    def _miss(self, number: int) -> None:
        """Continue at a number, or with a snapshot; the messages before it are missed."""
        if self._restored():
            return
        what = "were not received" if self._numbers.has_begun else "were sent before the recording began"
        self._add_gap(Gap(self._numbers.expected, number - 1, self._with_silence(what)))
        self._numbers.expected = number

    def _take_again(self, number: int) -> bool:
        """Take one answer, up to a number; return whether another request may bring more.

        The answer begins with the last message taken, which must be equal. If it differs, a new process sent it, which
        is followed from its first message on. Messages that the publisher dropped because of a full queue are requested
        once more.
        """
        first, is_proven = self._numbers.expected, self._last is None
        for message in self._subscription.replayed(first if self._last is None else self._last.number):
            if self._last is not None and message.number == self._last.number:
                if message != self._last:
                    self._restart()
                    return True
                is_proven = True
            if not is_proven:
                return False
            if message.number > self._numbers.expected:
                if self._numbers.expected > first:
                    return True
                self._miss(min(message.number, number))
            if self._numbers.expected <= message.number < number:
                batch = self._decoded(message)
                if batch is not None:
                    self.num_requested_again += 1
                    self._apply(message, batch)
            if self._numbers.expected >= number:
                return False
        is_whole = number == BEYOND_ALL and self._subscription.silence is None  # a busy engine never ends
        return first < self._numbers.expected < number and not is_whole

    def _restored(self) -> bool:
        """Continue with a snapshot of the publisher's cache; return whether there is one."""
        if not (self._has_lifetimes and self._subscription.can_replay):
            return False
        source = f"{self._subscription.source}, a snapshot"
        parts = self._subscription.snapshot()
        batches = [decode_batch(part.payload, source) for part in parts]
        stored = [event for batch in batches for event in batch.events if isinstance(event, BlocksStored)]
        if not batches or sum(len(event.block_hashes) for event in stored) != batches[0].num_blocks:
            return False
        first, next_number = batches[0], parts[0].number
        if self._numbers.lifetime not in {None, first.lifetime}:
            self._restart()
        elif next_number < self._numbers.expected:
            return False
        self.residency.begin_listed(first.sent_s, [event for event in stored if event.medium == DEVICE])
        for event in stored:
            if not self.contents.has_content(event):
                self.contents.store(event)
        self.rank = first.rank
        self._numbers.take(next_number - 1, first.sent_s, first.lifetime)
        self._last = None
        self.num_snapshots += 1
        return True

    def _take_the_rest(self, *, is_due: bool) -> None:
        """Replay missed messages that no later message shows as missing: the last ones, or all of an idle engine."""
        if is_due:
            self._catch_up(BEYOND_ALL)

    def _prove_continuity(self, number: int) -> None:
        """Check, after a broken connection, that the expected number was not sent by another process."""
        assert self._last is not None
        if self._subscription.can_replay:
            again = next(iter(self._subscription.replayed(self._last.number)), None)
            if again == self._last:
                return
            if again is not None and again.number == self._last.number:
                self._restart()
                self._catch_up(number)
                return
        reason = "the connection broke, and nothing proves that the process is the same"
        self._add_gap(Gap(number, None, self._with_silence(reason)))

    def _with_silence(self, reason: str) -> str:
        """Add to a reason that the publisher did not answer a request, if so."""
        return reason if self._subscription.silence is None else f"{reason}, and {self._subscription.silence}"

    def _restart(self) -> None:
        self.num_restarts += 1
        if self._has_lifetimes:  # the new process may give other blocks the same names
            self.residency.lose_track()
        self._numbers.begin_anew()
        self._last = None
        self.contents.forget_hashes()

    def _add_gap(self, gap: Gap) -> None:
        self.num_gaps += 1
        if len(self.gaps) < MOST_GAPS:
            self.gaps.append(gap)
        self._last = None if gap.last is None else self._last
        if self._numbers.has_begun:
            self.residency.lose_track()

    # Content of a message

    def _decoded(self, message: Message) -> EventBatch | None:
        source = f"{self._subscription.source}, message {message.number}"
        try:
            batch = decode_batch(message.payload, source)
        except RecordingError as error:
            if not self._numbers.has_begun:
                raise
            if message.number >= self._numbers.expected:
                self._add_gap(Gap(self._numbers.expected, message.number, error.reason))
                self._numbers.expected = message.number + 1
            return None
        if self.rank is not None and batch.rank != self.rank:
            reason = f"sent by rank {batch.rank}, those before by rank {self.rank}"
            raise RecordingError(source, reason, "Record each rank separately: each publishes at port + rank")
        return batch

    def _apply(self, message: Message, batch: EventBatch) -> None:
        """Take the events of the next message."""
        self.residency.advance(batch.sent_s)
        if message.number == 0:
            self.residency.begin_empty()
        self.began_s = min(self.began_s, batch.sent_s) if self.num_messages == 0 else self.began_s
        self.rank = batch.rank
        self._numbers.take(message.number, batch.sent_s, batch.lifetime)
        self._last = message
        self.num_messages += 1
        self.unknown_kinds.update(batch.unknown_kinds)
        for event in batch.events:
            match event:
                case BlocksStored():
                    self.residency.store(event)
                    self.contents.store(event)
                case BlocksRemoved():
                    self.residency.remove(event)
                case Cleared():
                    self.residency.clear()
                case _:
                    assert_never(event)


def _shown(topic: bytes) -> str:
    return repr(topic.decode(errors="replace"))
