"""The model of every byte: what a store may answer, given the faults that were caused.

- *Wrong answers.* What is accepted has the parts of its key, and each loaded key was read since it was asked for.
- *Stuck requests.* Every ask and every key of an offer has one answer, an ask by its deadline.
- *Bytes.* The disk has at most the cap, beyond what a crash brought back and the store has begun to delete.
- *Served.* An entry is absent, failed, gone, corrupt, late, out of service or withdrawn only where that happened to
  it since it was asked for. An entry leaves the index only by a fault of its own, a withdrawal, or for room.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from pagedkv.tiers.actions import Action, Fault, Loaded, LoadEnd, Offered, Read, StoreOutcome
from pagedkv.tiers.breaker import BreakerState
from pagedkv.tiers.core import StoreCore
from tests.tiers.faults.contents import Content, keys_of_names
from tests.tiers.faults.disk import SimulatedDisk
from tests.tiers.faults.ledger import Ledger

ALL: Final = b""
STORED: Final = 1
REMOVED: Final = 2


@dataclass(slots=True)
class Ask:
    """An ask that waits: its chain, which of its keys are to be found, when it began, and when it is due."""

    chain: list[Content]
    expected: set[bytes]
    begun: int
    due_s: float


@dataclass(slots=True)
class Judge:
    """What is known of a store and its disk.

    ``expected`` can be loaded and no fault touched it; ``touched`` has other bytes on the disk than it should.
    ``failing`` had a call that failed. ``others`` was stored by another process, ``missing`` was not listed by the
    latest scan, nor written since, and ``old`` was there at a reset, and not written since. ``last`` is the
    operation at which something happened to a key, or to all.
    """

    contents: dict[bytes, Content]
    disk: SimulatedDisk
    cap_nbytes: int
    max_entries: int
    breaker_failures: int
    largest: int
    now_s: float = 0.0
    operation: int = 0
    expected: set[bytes] = field(default_factory=set)
    touched: set[bytes] = field(default_factory=set)
    failing: set[bytes] = field(default_factory=set)
    others: set[bytes] = field(default_factory=set)
    missing: set[bytes] = field(default_factory=set)
    old: set[bytes] = field(default_factory=set)
    salt_of: dict[bytes, bytes] = field(default_factory=dict)
    share_nbytes: int = 0
    are_owners_known: bool = True
    tombstones: set[bytes] = field(default_factory=set)
    asks: dict[int, Ask] = field(default_factory=dict)
    offers: dict[int, tuple[list[Content], set[int]]] = field(default_factory=dict)
    last: dict[tuple[str, bytes], int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    seen: Counter[str] = field(default_factory=Counter)
    stale: set[int] = field(default_factory=set)
    failures_in_a_row: int = 0
    breaker: BreakerState = BreakerState.CLOSED
    excess: int = 0

    def restart(self) -> None:
        """Forget what a process had; what it leaves is named by the events of the next one."""
        self.asks.clear()
        self.offers.clear()
        self.expected.clear()
        self.tombstones.clear()
        self.old.clear()
        self.are_owners_known = False
        self.stale.clear()
        self.failures_in_a_row, self.breaker = 0, BreakerState.CLOSED
        self.excess = max(0, self.disk.nbytes - self.cap_nbytes)

    def note(self, what: str, key: bytes = ALL) -> None:
        """Note that something happens to a key now."""
        self.last[what, key] = self.operation

    def touch(self, key: bytes) -> None:
        """Note that the bytes of a key are, or seem to the store to be, others than they should."""
        self.touched.add(key)
        self.expected.discard(key)

    def begin_ask(self, ticket: int, ask: Ask, in_flight: list[Action]) -> None:
        """Note an ask. Keys are late for it whose reads in flight are overdue, or of an entry before a withdrawal."""
        self.asks[ticket] = ask
        for action in in_flight:
            if isinstance(action, Read) and (action.deadline_s <= self.now_s or action.action in self.stale):
                self.note("overdue", action.key)

    def withdraw(self, in_flight: list[Action]) -> None:
        """Note a withdrawal or reset, about to be made: reads in flight may be of entries that it removes."""
        self.note("withdrawn")
        self.stale |= {action.action for action in in_flight if isinstance(action, Read)}

    def advance(self, now_s: float, in_flight: list[Action]) -> None:
        """Note the steady time, which is about to be set: actions become overdue by it."""
        for action in in_flight:
            if self.now_s < action.deadline_s <= now_s:
                self.failures_in_a_row += 1
                self.note("overdue", action.key)
        self.now_s = now_s

    def end_action(self, action: Action, fault: Fault | None) -> None:
        """Note the end of an action, about to be reported."""
        is_failure = fault in {Fault.TIMEOUT, Fault.IO}
        if is_failure and isinstance(action, Read):
            self.note("failed", action.key)
        if not is_failure:
            self.failures_in_a_row = 0
        elif self.now_s < action.deadline_s:
            self.failures_in_a_row += 1
        if action.deadline_s <= self.now_s:
            self.note("overdue", action.key)

    def judge(self, core: StoreCore) -> None:
        """Take events and answers, and judge them."""
        answers = core.take_answers()
        if core.breaker is not self.breaker or core.breaker is BreakerState.OPEN:
            self._judge_breaker(core)
        for answer in answers:
            if isinstance(answer, Offered):
                self._judge_offer(answer)
        self._judge_events(core)
        for answer in answers:
            if isinstance(answer, Loaded):
                self._judge_ask(answer)
        self.ledger.judge_answers(answers)
        beyond = max(0, self.disk.nbytes - self.cap_nbytes)
        assert beyond <= self.excess, f"{self.disk.nbytes} bytes on a disk of {self.cap_nbytes}"
        self.excess = beyond

    def judge_all(self, core: StoreCore) -> None:
        """Check the invariants of the store, and that nothing waits beyond its time."""
        core.check()
        assert core.statistics().num_waiting == len(self.asks), "an ask is stuck or was answered twice"
        self._judge_shares(core)
        late = [ticket for ticket, ask in self.asks.items() if ask.due_s <= self.now_s]
        assert not late, f"asks {late} are stuck beyond their deadlines"

    def _judge_shares(self, core: StoreCore) -> None:
        """A salt has at most its share, but for what scans found, whose owner is not known before it is offered."""
        if not self.share_nbytes or not self.are_owners_known:
            return
        names = sorted(self.contents)
        sizes = Counter[bytes]()
        for key, nbytes in zip(names, core.sizes_of(keys_of_names(names)), strict=True):
            sizes[self.salt_of[key]] += nbytes
        beyond = {nbytes for nbytes in sizes.values() if nbytes > self.share_nbytes}
        assert not beyond, f"{beyond} bytes of a salt whose share is {self.share_nbytes}"

    def _judge_breaker(self, core: StoreCore) -> None:
        """The breaker opens by failures in a row, or by a failed probe, and by nothing else."""
        if core.breaker is BreakerState.OPEN:
            self.note("open")
            if self.breaker is BreakerState.CLOSED:
                self.seen["breaker opened"] += 1
                assert self.failures_in_a_row >= self.breaker_failures, "the breaker opened without failures"
        self.breaker = core.breaker

    def _judge_offer(self, answer: Offered) -> None:
        chain, answered = self.offers[answer.offer]
        assert answer.place not in answered, "a key of an offer was answered twice"
        answered.add(answer.place)
        self.seen[f"offer: {answer.outcome}"] += 1
        content = chain[answer.place]
        if answer.outcome is StoreOutcome.STORED and content.run.key not in self.touched:
            assert self.disk.files.get(content.run.key) == content.frame, "content is told to be stored and is not"
        if len(answered) == len(chain):
            del self.offers[answer.offer]

    def _judge_events(self, core: StoreCore) -> None:
        events = core.drain_events()
        if not len(events):
            return
        kinds = events.kinds.tolist()
        names = [row.tobytes() for row in events.keys]
        owed = self.expected - self.missing
        removed = [key for kind, key in zip(kinds, names, strict=True) if kind == REMOVED and key in owed]
        if removed and self.last.get(("withdrawn", ALL)) != self.operation:
            self._judge_evictions(core, kinds.count(REMOVED), {self.salt_of.get(key, b"") for key in removed})
        for kind, key in zip(kinds, names, strict=True):
            if kind == STORED and key not in self.touched:
                self.expected.add(key)
            elif kind == REMOVED:
                self.expected.discard(key)

    def _judge_evictions(self, core: StoreCore, num_removed: int, salts: set[bytes]) -> None:
        """Entries that no fault touched are removed only where there is no room for another, in all or of a salt."""
        now = core.statistics()
        self.seen["evictions"] += num_removed
        is_short = now.nbytes + self.largest > self.cap_nbytes
        is_crowded = now.num_entries + num_removed + now.num_writes >= self.max_entries
        was_full = self.last.get(("full", ALL)) == self.operation
        of_salts = core._entries.owners.nbytes_of
        is_own = self.share_nbytes and any(of_salts(salt) + self.largest > self.share_nbytes for salt in salts)
        self.seen["evictions of a salt's own"] += bool(is_own)
        assert is_short or is_crowded or was_full or is_own, f"an entry was removed though there is room: {now}"

    def _judge_ask(self, answer: Loaded) -> None:
        ask = self.asks.pop(answer.ticket)
        self.seen[f"ask: {answer.cause}"] += 1
        self.seen["entries served"] += answer.num_entries
        chain = ask.chain
        assert (answer.num_entries == len(chain)) == (answer.cause is LoadEnd.NONE)
        for content in chain[: answer.num_entries]:
            key = content.run.key
            assert self.last.get(("accepted", key), -1) >= ask.begun, "an entry was served that was not read"
            assert key not in self.tombstones, "withdrawn content was served"
            assert key not in self.old, "content from before a reset was served"
        if answer.cause is LoadEnd.NONE:
            return
        key = chain[answer.num_entries].run.key
        if answer.cause is LoadEnd.ABSENT:
            assert key not in ask.expected, "an entry that should be found is absent"
            return
        assert self._is_explained(answer.cause, key, ask), f"{answer.cause} without a cause"

    def _is_explained(self, cause: LoadEnd, key: bytes, ask: Ask) -> bool:
        """Whether that which withheld an entry has happened since it was asked for."""

        def happened(what: str, key: bytes) -> bool:
            return self.last.get((what, key), -1) >= ask.begun

        if cause is LoadEnd.LATE:
            return ask.due_s <= self.now_s or happened("overdue", key)
        if cause is LoadEnd.OUT_OF_SERVICE:
            return happened("open", ALL)
        if cause is LoadEnd.WITHDRAWN:
            return happened("withdrawn", ALL)
        return happened(str(cause), key)
