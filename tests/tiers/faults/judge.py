"""The model of every byte: what a store may answer, given the faults that were caused.

- *Wrong answers.* What is accepted has the parts of its key, and each loaded key was read since it was asked for.
- *Stuck requests.* Every ask and every key of an offer has one answer, an ask by its deadline.
- *Bytes.* The disk has at most the cap, beyond what a crash brought back and the store has begun to delete.
- *Served.* An entry is absent, failed, gone, corrupt, late, out of service or withdrawn only where that happened to
  it since it was asked for. An entry leaves the index only by a fault of its own, a withdrawal, or for room. A medium
  that stays full costs no more than one write needs.
- *The breaker* opens by keys that fail in a row, by the time that reads lost, or by a failed probe, and by nothing
  else; and by these it does open.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from pagedkv.tiers.core import StoreCore
from pagedkv.tiers.timing import BreakerState
from pagedkv.tiers.words import Action, Delete, Fault, Loaded, LoadEnd, Offered, Read, StoreOutcome
from tests.tiers.faults.contents import Content, keys_of_names
from tests.tiers.faults.disk import SimulatedDisk
from tests.tiers.faults.ledger import Ledger

ALL: Final = b""
KEEPS: Final = 0.99
MOST_FAILURES: Final = 3
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
    operation at which something happened to a key, or to all. ``failed`` has failed since the last success, ``reads``
    are the seconds of all reads and whether they were lost, and ``num_failed`` counts the failed reads of a key since
    the last that succeeded. ``is_due`` is the breaker. ``given_up_nbytes`` is what a full medium has cost since the
    last write that succeeded.
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
    read_timeout_s: float = 1.0
    failed: set[tuple[str, bytes]] = field(default_factory=set)
    reads: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=2000))
    num_failed: Counter[bytes] = field(default_factory=Counter)
    is_due: bool = False
    times_opened: int = 0
    given_up_nbytes: int = 0
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
        self.failed.clear()
        self.reads.clear()
        self.num_failed.clear()
        self.is_due, self.times_opened, self.breaker = False, 0, BreakerState.CLOSED
        self.given_up_nbytes = 0
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
                self._note_failure(action, now_s, hangs=True)
                self.note("overdue", action.key)
        self.now_s = now_s

    def end_action(self, action: Action, fault: Fault | None) -> None:
        """Note the end of an action, about to be reported."""
        is_failure = fault in {Fault.TIMEOUT, Fault.IO}
        if is_failure and isinstance(action, Read):
            self.note("failed", action.key)
        if action.deadline_s <= self.now_s:
            self.note("overdue", action.key)
        elif is_failure:
            self._note_failure(action, self.now_s, hangs=fault is Fault.TIMEOUT)
        elif not isinstance(action, Delete):
            self.failed.clear()
            if isinstance(action, Read):
                self.num_failed[action.key] = 0
                self.reads.append((self._seconds(action, self.now_s), False))
        if not is_failure and not isinstance(action, Read | Delete) and fault is None:
            self.given_up_nbytes = 0

    def _seconds(self, read: Action, now_s: float) -> float:
        return now_s - (read.deadline_s - self.read_timeout_s)

    def _note_failure(self, action: Action, now_s: float, *, hangs: bool) -> None:
        """Note an action that failed or is overdue. Deletes decide nothing while the breaker probes."""
        if isinstance(action, Read):
            self.reads.extend([(self._seconds(action, now_s), True)] * hangs)
            self.num_failed[action.key] += 1
        elif isinstance(action, Delete) and self.breaker is not BreakerState.CLOSED:
            return
        self.failed.add((type(action).__name__, action.key))
        if self.breaker is BreakerState.CLOSED and (
            len(self.failed) >= self.breaker_failures or (hangs and isinstance(action, Read) and self._loses_time())
        ):
            self.is_due = True

    def _loses_time(self) -> bool:
        """Whether reads that failed have had more than half of the time of the latest reads."""
        weights = [(KEEPS**age, seconds, is_lost) for age, (seconds, is_lost) in enumerate(reversed(self.reads))]
        num_lost = sum(weight for weight, _, is_lost in weights if is_lost)
        lost_s = sum(weight * seconds for weight, seconds, is_lost in weights if is_lost)
        return (
            num_lost >= self.breaker_failures and lost_s > sum(weight * seconds for weight, seconds, _ in weights) / 2
        )

    def judge(self, core: StoreCore) -> None:
        """Take events and answers, and judge them."""
        answers = core.take_answers()
        if core.breaker is not self.breaker or core.breaker is BreakerState.OPEN or self.is_due:
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
        """The breaker opens by failures, or by a failed probe, and by nothing else; and by these it does."""
        times_opened = core.statistics().times_opened
        if core.breaker is BreakerState.OPEN:
            self.note("open")
        if times_opened > self.times_opened:
            self.note("open")
            if self.breaker is BreakerState.CLOSED:
                self.seen["breaker opened"] += 1
                assert self.is_due, "the breaker opened without failures"
        else:
            assert not self.is_due, "the breaker is closed though all fails, or reads lose their time"
        self.breaker, self.times_opened, self.is_due = core.breaker, times_opened, False

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
        owed = {key for key in owed if self.num_failed[key] < MOST_FAILURES}
        removed = [key for kind, key in zip(kinds, names, strict=True) if kind == REMOVED and key in owed]
        if removed and self.last.get(("withdrawn", ALL)) != self.operation:
            self._judge_evictions(core, removed, kinds.count(REMOVED))
        for kind, key in zip(kinds, names, strict=True):
            if kind == STORED and key not in self.touched:
                self.expected.add(key)
            elif kind == REMOVED:
                self.expected.discard(key)

    def _judge_evictions(self, core: StoreCore, removed: list[bytes], num_removed: int) -> None:
        """Entries that no fault touched are removed only where there is no room for another, in all or of a salt."""
        now = core.statistics()
        salts = {self.salt_of.get(key, b"") for key in removed}
        self.seen["evictions"] += num_removed
        is_short = now.nbytes + self.largest > self.cap_nbytes
        is_crowded = now.num_entries + num_removed + now.num_writes >= self.max_entries
        was_full = self.last.get(("full", ALL)) == self.operation
        of_salts = core._entries.owners.nbytes_of
        is_own = self.share_nbytes and any(of_salts(salt) + self.largest > self.share_nbytes for salt in salts)
        self.seen["evictions of a salt's own"] += bool(is_own)
        assert is_short or is_crowded or was_full or is_own, f"an entry was removed though there is room: {now}"
        if was_full:  # then no write has begun, so nothing else was evicted
            self.given_up_nbytes += sum(len(self.contents[key].frame) for key in removed)
            assert self.given_up_nbytes < 2 * self.largest, "a medium that stays full empties the store"

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
