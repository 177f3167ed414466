"""Follows one publisher until it is stopped: its messages and gaps, the content of blocks, the blocks of each medium.

A message is the next one, or messages before it were missed. Missed messages are requested again if the publisher can
replay. If it has dropped them, a snapshot of its cache is requested, with which a recording of pagedkv's own publishers
begins as well. Otherwise they are a :class:`Gap`, and which blocks are stored is then unknown. A message that is not a
batch of events is a gap as well. If the first message is not one, the endpoint is not a publisher of KV events.

A message's number and time determine its place. A publisher numbers its messages from 0, and again from 0 after a
restart. Where messages have the name of their process (a lifetime), it distinguishes two processes. Else only times do:
a message that is sent again has its old time; a message of a new process has a later one.

The content of each stored block is known together with everything before it, as far as events show it. An event names
the block before its first one. If the content of that block is known, so is that of the blocks that follow. If it was
stored before the recording began, or within a gap, their content stays unknown. Each distinct block takes a digest of
32 bytes, whatever its size.

The stored blocks of each medium are followed event by event: their number, and how long they stay. The figures are
exact only in stretches that begin with an empty cache, after the first message of a process or after a clear, or with a
list of all blocks. A clear empties the device's cache, and with it SGLang's host cache, but no other medium. After a
gap, or if the recording began in the middle, unknown blocks may be stored and known blocks may be gone. Then counting
restarts with the blocks stored from there on, and is not exact.

Two blocks may have the same content: for equal prompts that end with a block, vLLM computes the last block each time.
Both are stored and both are removed, so the content is available until the last of them is removed.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isfinite, isnan
from typing import Final, Protocol, assert_never

from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.planner.traces.token_blocks import chain_digests
from pagedkv.wire import DEVICE, BlockHash, BlocksRemoved, BlocksStored, Cleared, EventBatch, Message, decode_batch

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


class Place(Enum):
    """The place of a message relative to earlier ones."""

    NEXT = auto()
    SEEN = auto()
    """Received before, and requested again."""
    BEHIND_GAP = auto()
    RESTARTED = auto()
    """A lower number with a later time: a new process, whose cache was empty at first."""


class MessageNumbers:
    """Follows the numbers of one publisher."""

    def __init__(self) -> None:
        self.expected = 0
        """Number of the next message."""
        self._latest_s = float("-inf")
        self.lifetime: str | None = None
        """Name of the followed process; None before the first message, and where messages have none."""

    @property
    def has_begun(self) -> bool:
        """Whether any message was taken."""
        return self._latest_s > float("-inf")

    def place(self, number: int, sent_s: float, lifetime: str | None = None) -> Place:
        """Return the place of a message. Changes nothing."""
        is_another = lifetime is not None and self.lifetime not in {None, lifetime}
        if is_another and sent_s >= self._latest_s:
            return Place.RESTARTED
        if number >= self.expected and not is_another:
            return Place.NEXT if number == self.expected else Place.BEHIND_GAP
        return Place.SEEN if lifetime is not None or sent_s <= self._latest_s else Place.RESTARTED

    def is_past(self, sent_s: float) -> bool:
        """Return whether a time is before that of the last message taken. Changes nothing."""
        return sent_s < self._latest_s

    def take(self, number: int, sent_s: float, lifetime: str | None = None) -> None:
        """Continue after a message."""
        self.expected = number + 1
        self._latest_s = sent_s
        self.lifetime = lifetime

    def begin_anew(self) -> None:
        """Follow a new process."""
        self.lifetime = None
        self.expected = 0


class Contents:
    """The contents of all blocks that were ever stored while this process of the engine was followed."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, BlockHash], bytes] = {}
        self._seen: dict[int, set[bytes]] = {}
        self.num_unknown = 0
        """Blocks whose content is not in the events."""
        self.num_with_keys = 0
        """Blocks whose content depends on more than tokens."""
        self.num_with_lookahead = 0
        """Blocks whose content depends on the tokens after them as well."""
        self.num_by_block_size: Counter[int] = Counter()
        """Number of blocks by block size."""

    def store(self, stored: BlocksStored) -> None:
        """Record stored blocks. O(tokens)."""
        num_blocks, size = len(stored.block_hashes), stored.block_size
        is_entry = stored.medium != DEVICE and stored.token_ids is None  # of a tier; its size is no block's
        if size and num_blocks and not is_entry:
            self.num_by_block_size[size] += num_blocks
        self.num_with_keys += num_blocks if stored.has_keys else 0
        self.num_with_lookahead += num_blocks if stored.has_lookahead else 0
        parent = b"" if stored.parent_hash is None else self._digests.get((size, stored.parent_hash))
        if parent is None or stored.token_ids is None:
            self.num_unknown += num_blocks
            return
        seen = self._seen.setdefault(size, set())
        for block_hash, digest in zip(stored.block_hashes, chain_digests(stored.token_ids, size, parent), strict=True):
            self._digests[size, block_hash] = digest
            seen.add(digest)

    def has_content(self, stored: BlocksStored) -> bool:
        """Return whether the content of all these blocks is known already."""
        return all((stored.block_size, each) in self._digests for each in stored.block_hashes)

    def forget_hashes(self) -> None:
        """Forget the hashes of an ended process; its contents still count as stored."""
        self._digests.clear()

    def was_stored(self, digest: bytes, block_size: int) -> bool:
        """Return whether an event stored a block of this content and prefix."""
        return digest in self._seen.get(block_size, ())

    @property
    def block_size(self) -> int | None:
        """The most frequent block size; None before the first block."""
        return max(self.num_by_block_size, key=lambda size: (self.num_by_block_size[size], -size), default=None)


LIFETIME_EDGES_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
"""Upper edges of the histogram of lifetimes; the last bucket is open."""
MOST_POINTS: Final = 1024
UNSEEN_S: Final = float("nan")
"""The time at which a block was stored, where only a list of all blocks shows the block."""
CLEARED_AT_ONCE: Final = (DEVICE, "CPU_PINNED")
"""Media that a clear empties. Only SGLang uses the second name for its host memory; vLLM's name is CPU."""


@dataclass(slots=True)
class MediumRecord:
    """Figures of one medium.

    Args:
        num_blocks: blocks stored now, as far as events show.
        num_stored: blocks that were stored.
        num_copies: blocks stored while their content was stored already; counted nowhere else.
        num_removed: removed blocks that an event or a list had shown.
        num_removed_unseen: removed blocks that no event had stored.
        peak: most blocks at once, in exact stretches.
        seconds: seconds of exact stretches.
        block_seconds: blocks times seconds, in these.
        lifetimes: blocks by the bucket of their lifetime, of those that an event stored.
        timeline: pairs of seconds since 1970 and the blocks from then on (None: unknown), at most 1,024.
    """

    num_blocks: int = 0
    num_stored: int = 0
    num_copies: int = 0
    num_removed: int = 0
    num_removed_unseen: int = 0
    peak: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0
    lifetimes: list[int] = field(default_factory=lambda: [0] * (len(LIFETIME_EDGES_S) + 1))
    timeline: list[tuple[float, int | None]] = field(default_factory=list)
    _least_gap_s: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean number of blocks over exact stretches, or None without any."""
        return self.block_seconds / self.seconds if self.seconds else None

    def note(self, at_s: float, num_blocks: int | None) -> None:
        """Add a point to the timeline, which is thinned when it is full."""
        if self.timeline and num_blocks is not None and at_s - self.timeline[-1][0] < self._least_gap_s:
            return
        self.timeline.append((at_s, num_blocks))
        if len(self.timeline) > MOST_POINTS:
            del self.timeline[1:-1:2]
            self._least_gap_s = (at_s - self.timeline[0][0]) / MOST_POINTS


class Residency:
    """Follows the blocks of one engine."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int, BlockHash], float] = {}
        self._copies: dict[tuple[str, int, BlockHash], int] = {}
        self.media: dict[str, MediumRecord] = {}
        """Figures by medium."""
        self.is_exact = False
        """Whether every block of the device is known now."""
        self._are_others_exact = False
        self.was_exact = False
        """Whether ``is_exact`` was ever true."""
        self.num_clears = 0
        """Number of clears of the device's cache."""
        self.num_censored = 0
        """Blocks whose removal was not observed because of a gap, a restart, or the end of the recording."""
        self._now_s: float | None = None

    def store(self, stored: BlocksStored) -> None:
        """Record stored blocks, at the time of the last `advance`; blocks already stored count as copies."""
        medium = self._medium(stored.medium)
        for block_hash in stored.block_hashes:
            key = (stored.medium, stored.group, block_hash)
            if key in self._since_s:
                self._copies[key] = self._copies.get(key, 0) + 1
                medium.num_copies += 1
            else:
                self._since_s[key] = self._at_s
                medium.num_stored += 1
                medium.num_blocks += 1
        self._note(stored.medium)

    def remove(self, removed: BlocksRemoved) -> None:
        """Remove blocks; of several copies, only one."""
        medium = self._medium(removed.medium)
        for block_hash in removed.block_hashes:
            key = (removed.medium, removed.group, block_hash)
            if key in self._copies:
                self._remove_copy(key)
                continue
            since_s = self._since_s.pop(key, None)
            if since_s is None:
                medium.num_removed_unseen += 1
            else:
                self._end(medium, since_s)
        self._note(removed.medium)

    def clear(self) -> None:
        """Remove all blocks of the media that a clear empties; these media are exact from here on."""
        self.num_clears += 1
        for key in [key for key in self._since_s if key[0] in CLEARED_AT_ONCE]:
            self._end(self._medium(key[0]), self._since_s.pop(key))
            self._copies.pop(key, None)
        self._begin_exact()

    def begin_empty(self) -> None:
        """Follow a new process, whose cache is empty; the old blocks were removed at an unknown time."""
        self._censor()
        self._are_others_exact = True
        self._begin_exact()

    def begin_listed(self, at_s: float, listed: Iterable[BlocksStored]) -> None:
        """Continue with a list of all blocks of the device, from a time on.

        Changes since the last event are unknown. Lifetimes of blocks that no event stored are not counted.
        """
        self.is_exact = False
        self.advance(at_s)
        before = {key: since_s for key, since_s in self._since_s.items() if key[0] == DEVICE}
        for key in before:
            self._since_s.pop(key)
            self._copies.pop(key, None)
        num_known = 0
        medium = self._medium(DEVICE)
        medium.num_blocks = 0
        for stored in listed:
            for block_hash in stored.block_hashes:
                key = (stored.medium, stored.group, block_hash)
                num_known += key in before
                self._since_s[key] = before.get(key, UNSEEN_S)
                medium.num_blocks += 1
        self.num_censored += len(before) - num_known
        self._begin_exact()

    def lose_track(self) -> None:
        """Record that events were missed: which blocks are stored is unknown from here on."""
        self._censor()
        self.is_exact = self._are_others_exact = False
        for medium in self.media.values():
            medium.note(self._at_s, None)

    def advance(self, at_s: float) -> None:
        """Advance the time to ``at_s``, in seconds since 1970; a clock that goes back counts as stopped."""
        if self._now_s is None:
            self._now_s = at_s
        passed_s = max(0.0, at_s - self._now_s)
        self._now_s += passed_s
        for name, medium in self.media.items():
            if self._is_exact(name):
                medium.seconds += passed_s
                medium.block_seconds += passed_s * medium.num_blocks

    @property
    def num_open(self) -> int:
        """Number of blocks stored now, as far as events show."""
        return len(self._since_s)

    @property
    def _at_s(self) -> float:
        assert self._now_s is not None
        return self._now_s

    def _is_exact(self, name: str) -> bool:
        return self.is_exact if name in CLEARED_AT_ONCE else self._are_others_exact

    def _medium(self, name: str) -> MediumRecord:
        return self.media.setdefault(name, MediumRecord())

    def _end(self, medium: MediumRecord, since_s: float) -> None:
        medium.num_removed += 1
        medium.num_blocks -= 1
        if not isnan(since_s):
            medium.lifetimes[bisect_left(LIFETIME_EDGES_S, self._at_s - since_s)] += 1

    def _remove_copy(self, key: tuple[str, int, BlockHash]) -> None:
        self._copies[key] -= 1
        if not self._copies[key]:
            del self._copies[key]

    def _censor(self) -> None:
        self.num_censored += len(self._since_s)
        for name, count in Counter(name for name, _, _ in self._since_s).items():
            self.media[name].num_blocks -= count
        self._since_s.clear()
        self._copies.clear()

    def _begin_exact(self) -> None:
        self.is_exact = self.was_exact = True
        self._medium(DEVICE)
        for name in self.media:
            self._note(name)

    def _note(self, name: str) -> None:
        medium = self.media[name]
        if self._is_exact(name):
            medium.peak = max(medium.peak, medium.num_blocks)
            medium.note(self._at_s, medium.num_blocks)
