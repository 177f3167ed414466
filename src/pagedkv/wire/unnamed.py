"""UnnamedFollowing: the batches of an engine that names no lifetime, as vLLM's and SGLang's do, in order.

A batch has a number and a time, and nothing says which process has sent it. So an index that follows such an engine is
DEGRADED at best: a lost last batch, or a restart, is noticed only when something else is heard. What is done instead::

    received                                result
    the next number                         applied
    a number after a gap                    held; the missing ones are requested from the last applied number on
      the last one comes back the same      the missing ones are applied, then the held ones
      it comes back another, or nothing     another process: its batches are requested from 0
      the publisher does not answer         the held ones are applied after the gap
    a number before, with a later time      another process: its cache begins empty
    nothing for ``prove_s``                 the last number is requested, to hear of a lost batch or another process
    AllBlocksCleared                        the device is empty, whatever was lost before

Without a place to request from, only numbers that go back, and ``begin_anew`` by a caller who knows that the process
has gone, show a restart. Blocks whose beginning was lost are not placed, and cost hits.
"""

from typing import Final, final

from pagedkv.wire.decoding import EventBatch, decode_batch
from pagedkv.wire.following import (
    DEFAULT_RULES,
    Alive,
    Applied,
    FollowedMessage,
    FollowingRules,
    Message,
    OutgoingRequest,
)
from pagedkv.wire.learning import LearntNames

PROVE_S: Final = 2.0
MOST_KINDS: Final = 20


@final
class UnnamedFollowing:
    """Follows one publisher.

    Args:
        can_request: whether the publisher sends batches again.
        rules: timeouts and limits.
        source: the publisher's endpoint, for errors.
        prove_s: seconds of silence after which the last batch is requested.

    Attributes:
        names: the engine's blocks.
        num_restarts: processes after the first one.
        unknown_kinds: events that are not understood, by name, and how many came.
    """

    def __init__(
        self,
        *,
        can_request: bool = True,
        rules: FollowingRules = DEFAULT_RULES,
        source: str = "the publisher",
        prove_s: float = PROVE_S,
    ) -> None:
        self._can_request = can_request
        self._rules = rules
        self._source = source
        self._prove_s = prove_s
        self.names = LearntNames()
        self.num_restarts = 0
        self.unknown_kinds: dict[str, int] = {}
        self._expected = 0
        self._last: tuple[bytes, float] | None = None  # payload and time of the last applied batch
        self._held: dict[int, tuple[Message, EventBatch]] = {}
        self._awaits = False
        self._is_proven = False  # the open answer is of the followed process: the last applied batch has come back
        self._fails_at_s = 0.0
        self._ask_at_s = float("-inf")
        self._failed_at: int | None = None
        self._out: list[FollowedMessage] = []
        self._request: OutgoingRequest | None = None
        self._num_requests = 0

    @property
    def lifetime(self) -> str:
        """The name that the followed process is given."""
        return f"process {self.num_restarts + 1}"

    @property
    def has_begun(self) -> bool:
        """Whether a batch of the followed process was applied."""
        return self._last is not None

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
        """Take a published message. Raises RecordingError if it is no batch of events; then it counts as lost."""
        batch = self._decoded(message)
        if message.number < self._expected and self._last is not None and batch.sent_s > self._last[1]:
            self.begin_anew()
        if message.number >= self._expected:
            self._held[message.number] = message, batch
            if self._awaits and len(self._held) > self._rules.most_held:
                self._fail(now_s)
        self.advance(now_s)

    def answered(self, number: int, message: Message | None, now_s: float) -> None:
        """Take a part of an answer, or its end; arguments and errors as of ``Following.answered``."""
        if number != self._num_requests or not self._awaits:
            return
        self._fails_at_s = now_s + self._rules.patience_s
        if message is None:
            self._end_answer(now_s)
        elif message.number == self._expected - 1 and not self._is_proven:
            if self._last is not None and message.payload == self._last[0]:
                self._is_proven = True
            else:
                self._restart(now_s)
        elif message.number >= self._expected:
            self._held.setdefault(message.number, (message, self._decoded(message)))
            if self._is_proven:
                self._apply_held()
        self.advance(now_s)

    def advance(self, now_s: float) -> None:
        """Let the time advance: requests fail at their timeouts, and due requests are made."""
        if self._awaits and now_s >= self._fails_at_s:
            self._fail(now_s)
        if self._awaits:
            return
        before = self._expected
        self._apply_held()
        if self._expected != before:
            self._ask_at_s = now_s + self._prove_s
        if self._held and (not self._can_request or self._failed_at == self._expected):
            self._skip_gap()
        elif self._can_request and (self._held or now_s >= self._ask_at_s):
            self._ask(now_s)

    def begin_anew(self) -> None:
        """Follow another process from its first batch on: the one before has gone. Its cache begins empty."""
        self.num_restarts += 1
        self.names.begin_empty()
        self._expected, self._last, self._failed_at = 0, None, None
        self._held.clear()
        self._awaits, self._request = False, None
        self._ask_at_s = float("-inf")
        self._out.append(Alive(self.lifetime, 0, is_proven=False))

    # Inside

    def _decoded(self, message: Message) -> EventBatch:
        return decode_batch(message.payload, f"{self._source}, message {message.number}")

    def _ask(self, now_s: float) -> None:
        self._awaits, self._is_proven = True, self._last is None
        self._fails_at_s = now_s + self._rules.patience_s
        self._ask_at_s = now_s + self._prove_s
        self._num_requests += 1
        self._request = OutgoingRequest(self._num_requests, max(0, self._expected - 1))

    def _end_answer(self, now_s: float) -> None:
        self._awaits = False
        if not self._is_proven and not self._held:
            self._restart(now_s)  # the publisher keeps its last batches, and has not this one: it is another process
        elif self._held and self._expected not in self._held:
            self._failed_at = self._expected  # it does not keep the missing ones any more

    def _restart(self, now_s: float) -> None:
        self.begin_anew()
        self._ask(now_s)

    def _fail(self, now_s: float) -> None:
        self._awaits, self._request = False, None
        if self._held:
            self._failed_at = self._expected
        self._ask_at_s = now_s + self._rules.retry_s

    def _skip_gap(self) -> None:
        for number in sorted(self._held):
            self._apply(*self._held.pop(number))

    def _apply_held(self) -> None:
        while self._expected in self._held:
            self._apply(*self._held.pop(self._expected))

    def _apply(self, message: Message, batch: EventBatch) -> None:
        self._expected = message.number + 1
        self._last = message.payload, batch.sent_s
        for kind in batch.unknown_kinds:
            if kind in self.unknown_kinds or len(self.unknown_kinds) < MOST_KINDS:
                self.unknown_kinds[kind[:40]] = self.unknown_kinds.get(kind[:40], 0) + 1
        self._out.append(Applied(self.lifetime, message.number, self.names.events(batch), is_proven=False))
