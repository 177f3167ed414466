"""The fault machine: a store core over a simulated disk that crashes between any two calls, and a judge of its answers.

At rest, bits flip, files are cut, swapped, deleted, cannot be read any more, or are replaced by frames of another salt,
model, layout or version, by half a set, or by a forged one. Calls fail, hang, end after their deadlines, or bring
another answer. Servers are dead, slow or full for a while, or a third of the reads hang, and the clock jumps. A crash
loses, tears and reorders what is not synchronised. Where the disk is shared, another process stores and deletes
entries, which scans find (``others``).
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pagedkv.tiers.core import StoreCore
from pagedkv.tiers.frame import OpenFrame, open_frame
from pagedkv.tiers.words import Action, Delete, Fault, Loaded, Read, StoreConfig, Write
from tests.tiers.faults.contents import IDENTITY, LONGEST_CHAIN, SECRET, Content, keys_of, keys_of_names, make_chains
from tests.tiers.faults.disk import AT_REST, UNREADABLE, SimulatedDisk, damaged, misread
from tests.tiers.faults.judge import MOST_FAILURES, Ask, Judge
from tests.tiers.faults.ledger import Ledger
from tests.tiers.faults.others import Others

CAP: Final = 24 * 640
MAX_ENTRIES: Final = 30
BREAKER_FAILURES: Final = 3
NUM_CHAINS: Final = 12
NEVER: Final = float("inf")
LONGEST_OUTAGE: Final = 100
"""Operations."""


@dataclass(slots=True)
class FaultMachine:
    """One run of the machine.

    With ``is_keyed`` frames have keyed checks, and some are forged. With ``is_shared`` there is another process. With a
    ``salt_share`` below 1 each tree of chains is of a tenant of its own, who has at most that share.
    """

    seed: int
    eviction: str = "lru"
    fault_rate: float = 0.15
    is_keyed: bool = False
    is_shared: bool = False
    salt_share: float = 1.0
    others: Others = field(init=False)
    rng: random.Random = field(init=False)
    core: StoreCore = field(init=False)
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    judge: Judge = field(init=False)
    caller_s: float = 1000.0
    in_flight: list[Action] = field(default_factory=list)
    chains: list[list[Content]] = field(init=False)
    contents: dict[bytes, Content] = field(init=False)
    outage: str = ""
    outage_ends: int = 0
    times_opened: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.chains = make_chains(NUM_CHAINS, self.rng, SECRET if self.is_keyed else None)
        self.contents = {each.run.key: each for chain in self.chains for each in chain}
        largest = max(len(each.frame) for each in self.contents.values())
        self.judge = Judge(self.contents, self.disk, CAP, MAX_ENTRIES, BREAKER_FAILURES, largest)
        if self.salt_share < 1:
            self.judge.share_nbytes = int(CAP * self.salt_share)
            self.judge.salt_of = {each.run.key: chain[0].run.key for chain in self.chains for each in chain}
        self.others = Others(self.rng, self.contents, self.judge, self.fault_rate)
        self._begin()

    @property
    def ledger(self) -> Ledger:
        """The faults so far, and what became of them."""
        return self.judge.ledger

    @property
    def seen(self) -> Counter[str]:
        """How often other things happened."""
        return self.judge.seen

    def _begin(self) -> None:
        """Begin with an empty store, as a new process."""
        self.core = StoreCore(
            StoreConfig(
                cap_nbytes=CAP,
                max_entries=MAX_ENTRIES,
                eviction=self.eviction,
                admission=self.rng.choice(["always", "second-offer"]),
                max_reads=3,
                max_writes=2,
                max_deletes=3,
                max_queued_nbytes=8 * 640,
                read_timeout_s=1.0,
                write_timeout_s=2.0,
                breaker_failures=BREAKER_FAILURES,
                breaker_pause_s=0.5,
                breaker_longest_pause_s=4.0,
                full_pause_s=0.3,
                salt_share=self.salt_share,
                max_events=100_000,
            ),
            self.caller_s,
        )
        self.judge.now_s = self.core.now_s

    def run(self, num_operations: int, checks_every: int = 1) -> None:
        """Run so many operations. Raises AssertionError at the first fault of the store."""
        is_at_fault = 1 if self.fault_rate else 0
        operations: list[tuple[Callable[[], None], float]] = [
            (self._offer, 12),
            (self._ask, 14),
            (self._carry_out, 50),
            (self._advance, 14),
            (self._withdraw, 0.2 * is_at_fault),
            (self._damage, 15 * self.fault_rate),
            (self._crash, 2 * self.fault_rate),
            (self._jump, 2 * self.fault_rate),
            (self._begin_outage, self.fault_rate),
            (self._reset, 0.1 * self.fault_rate),
            (self._measure, 0.5),
        ]
        if self.is_shared:
            operations += [(self.others.store, 3), (self.others.delete, 1), (self._scan, 12)]
            operations += [(self._withdraw, 0.5), (self._reset, 0.1)]
        names, weights = zip(*operations, strict=True)
        for number, operation in enumerate(self.rng.choices(names, weights, k=num_operations)):
            self.judge.operation += 1
            if self.outage and self.judge.operation >= self.outage_ends:
                self._end_outage()
            operation()
            self._take()
            if number % checks_every == 0:
                self.judge.judge_all(self.core)
        self._finish()

    def _some_chain(self) -> list[Content]:
        chain = self.rng.choice(self.chains)
        return chain[: self.rng.randint(1, LONGEST_CHAIN)]

    def _take(self) -> None:
        """Take the actions of the store, and have its answers judged."""
        self.in_flight += self.core.take_actions()
        self.judge.judge(self.core)

    def _offer(self) -> None:
        chain = self._some_chain()
        salt = self.judge.salt_of.get(chain[0].run.key, b"")
        offer = self.core.offer(keys_of(chain), [len(each.frame) for each in chain], self.caller_s, salt=salt)
        self.judge.offers[offer] = (chain, set())

    def _ask(self) -> None:
        self._ask_for(self._some_chain(), self.rng.choice([0.05, 0.5, 3.0]))

    def _ask_for(self, chain: list[Content], seconds: float) -> None:
        expected = self.judge.expected & {each.run.key for each in chain}
        ticket = self.core.load(keys_of(chain), self.caller_s, seconds)
        ask = Ask(chain, expected, self.judge.operation, self.core.now_s + seconds)
        self.judge.begin_ask(ticket, ask, self.in_flight)

    def _carry_out(self) -> None:
        if not self.in_flight or self.outage == "slow server":
            return
        place = self.rng.randrange(len(self.in_flight))
        action = self.in_flight[place]
        is_hanging = self.outage == "reads hang" and isinstance(action, Read) and action.action % 3 == 0
        if is_hanging and action.deadline_s > self.core.now_s:
            return
        del self.in_flight[place]
        fault = Fault.IO if self.outage == "dead server" else None
        if self.outage == "full disk" and isinstance(action, Write):
            fault = Fault.FULL
        if isinstance(action, Read) and action.key in self.disk.unreadable:
            fault = Fault.IO
        if fault is None and self.rng.random() < self.fault_rate:
            kinds = [Fault.TIMEOUT, Fault.IO, *([Fault.FULL] if isinstance(action, Write) else [])]
            fault = self.rng.choice(kinds)
            if isinstance(action, Read) and self.rng.random() < 1 / 3:
                self._read(action, None, is_misread=True)
                return
            named = {Fault.TIMEOUT: "times out", Fault.IO: "fails", Fault.FULL: "finds a full disk"}[fault]
            self.ledger.happen(f"{type(action).__name__.lower()} {named}")
        if isinstance(action, Read):
            self._read(action, fault)
        elif isinstance(action, Write):
            self._write(action, fault)
        else:
            self._delete(action, fault)

    def _report(self, action: Action, fault: Fault | None, nbytes: int | None = None) -> None:
        self.judge.end_action(action, fault)
        if fault is None:
            self.core.completed(action.action, self.caller_s, nbytes)
        else:
            self.core.failed(action.action, fault, self.caller_s)

    def _read(self, action: Read, fault: Fault | None, *, is_misread: bool = False) -> None:
        key, content = action.key, self.contents[action.key]
        if fault is not None:
            self.judge.failing.add(key)
            self._report(action, fault)
            return
        found = self.disk.files.get(key)
        if is_misread and found is not None:
            kind, found = misread(found, content, list(self.disk.files.values()), self.rng)
            if found != content.frame:
                self.ledger.rest(kind, key)
                self.judge.touch(key)
        if found is None:
            self._refuse(action, Fault.GONE, "a miss")
            return
        opened = open_frame(found, SECRET if self.is_keyed else None)
        refusal = opened.compare(IDENTITY, content.run) if isinstance(opened, OpenFrame) else opened
        if refusal is not None:
            self._refuse(action, Fault.CORRUPT, f"refused: {refusal.reason}")
        elif len(found) != action.nbytes and action.action not in self.judge.stale:
            self._refuse(action, Fault.CORRUPT, "refused: another size than is counted")
        elif isinstance(opened, OpenFrame):
            assert tuple(map(bytes, opened.parts)) == content.parts, "a wrong answer was accepted"
            self.judge.note("accepted" if len(found) == action.nbytes else str(Fault.CORRUPT), key)
            self.ledger.settle(key, "undone by another one")
            self.seen["frames accepted"] += 1
            self._report(action, None, len(found))

    def _refuse(self, action: Read, fault: Fault, fate: str) -> None:
        """Report an entry that is gone or corrupt; no fault is to be without a cause."""
        key = action.key
        assert key in self.judge.touched or key not in self.judge.expected, f"an untouched entry is {fault}: {fate}"
        self.ledger.settle(key, fate)
        self.judge.expected.discard(key)
        self.judge.note(str(fault), key)
        self._report(action, fault)

    def _write(self, action: Write, fault: Fault | None) -> None:
        key, frame = action.key, self.contents[action.key].frame
        assert len(frame) == action.nbytes
        room = CAP - self.disk.nbytes + len(self.disk.files.get(key, b""))
        if self.is_shared and len(frame) > room and fault is None:
            fault = Fault.FULL  # a shared folder counts what all processes have stored
        is_known = key in self.judge.touched | self.judge.failing | self.judge.others
        assert key not in self.disk.files or is_known, "written over"
        if fault is None:
            self.disk.change(key, frame)
            self.judge.touched.discard(key)
            self.judge.missing.discard(key)
            self.judge.old.discard(key)
            self.ledger.settle(key, "written over, unread")
        else:
            if self.rng.random() < 0.5:  # it failed after it had taken effect, wholly or in part
                self.disk.change(key, frame[: self.rng.randint(0, min(len(frame), max(0, room)))])
                self.judge.touch(key)
            self.judge.failing.add(key)
            if fault is Fault.FULL:
                self.judge.note("full")
        self._report(action, fault)

    def _delete(self, action: Delete, fault: Fault | None) -> None:
        if fault is None or self.rng.random() < 0.5:
            self.disk.change(action.key, None)
            self.ledger.settle(action.key, "deleted by the store, unread")
        self._report(action, fault)

    def _advance(self) -> None:
        self._set_time(self.caller_s + self.rng.choice([0.0, 0.01, 0.1, 0.6]))

    def _jump(self) -> None:
        seconds = self.rng.choice([-1e6, -3.0, 5.0, 1e6])
        self.ledger.happen("clock jumps forward" if seconds > 0 else "clock jumps back")
        self._set_time(self.caller_s + seconds)

    def _set_time(self, caller_s: float) -> None:
        steady_s = self.judge.now_s + max(0.0, caller_s - self.caller_s)
        self.caller_s = caller_s
        self.judge.advance(steady_s, self.in_flight)
        self.core.tick(caller_s)
        assert self.core.now_s == steady_s, "the steady clock went wrong"

    def _withdraw(self) -> None:
        content = self.rng.choice(self._some_chain())
        if self.rng.random() < 0.2:  # tombstones last: few keys, or no content is left to be stored
            self.judge.withdraw(self.in_flight)
            self.judge.tombstones.add(content.run.key)
            self.core.withdraw(keys_of([content]), self.caller_s)
            self.seen["withdrawn"] += 1

    def _reset(self) -> None:
        self.judge.withdraw(self.in_flight)
        self.core.reset(self.caller_s)
        self.judge.expected.clear()
        self.judge.old |= self.disk.files.keys()

    def _begin_outage(self) -> None:
        """Let the server be dead, or slow, for some operations."""
        if not self.outage:
            self.outage = self.rng.choice(["dead server", "slow server", "full disk", "reads hang"])
            self.outage_ends = self.judge.operation + self.rng.randint(2, LONGEST_OUTAGE)
            self.times_opened = self.core.statistics().times_opened

    def _end_outage(self) -> None:
        if self.outage:
            has_opened = self.core.statistics().times_opened > self.times_opened
            self.ledger.happen(self.outage, "the breaker opened" if has_opened else "over before the breaker opened")
        self.outage = ""

    def _damage(self) -> None:
        """Change files at rest."""
        if not self.disk.files:
            return
        key = self.rng.choice(list(self.disk.files))
        kind = self.rng.choice([*AT_REST, UNREADABLE])
        if kind == UNREADABLE and key not in self.disk.unreadable:
            self.disk.unreadable.add(key)
            self.ledger.rest(kind, key)
            self.judge.touch(key)
            return
        for each, content in damaged(kind, key, self.disk.files, self.contents[key], self.rng).items():
            self.disk.change(each, content)
            self.ledger.rest(kind, each)
            self.judge.touch(each)

    def _crash(self) -> None:
        """Lose the process and what the disk has not synchronised; begin anew from a scan."""
        before = dict(self.disk.files)
        self._end_outage()
        self.disk.crash(self.rng)
        self.in_flight.clear()
        for key in before.keys() | self.disk.files.keys():
            now = self.disk.files.get(key)
            if before.get(key) != now:
                self.ledger.settle(key, "lost in a crash")
                self.judge.touched.add(key)
            if now == self.contents[key].frame:
                self.ledger.settle(key, "lost in a crash")
                self.judge.touched.discard(key)
        self.judge.restart()
        self.others.restart()
        self._begin()
        names = list(self.disk.files)
        self.rng.shuffle(names)
        self.core.restore(keys_of_names(names), [len(self.disk.files[key]) for key in names], self.caller_s)
        num_entries = self.core.statistics().num_entries
        if not self.judge.excess and len(names) <= MAX_ENTRIES:
            assert num_entries == len(names)
        self.ledger.happen("crash", "began anew from a scan" if num_entries else "began anew, empty")

    def _measure(self) -> None:
        self.core.measured(self.disk.nbytes, 10**9, self.caller_s)

    def _scan(self) -> None:
        if not self.outage:
            self.others.scan(self.core, self.caller_s)

    def _scan_all(self) -> None:
        """Find all that another process has left: the first whole scan after a reset deletes what it finds."""
        for _ in range(3 * self.is_shared):
            while not self.others.scan(self.core, self.caller_s):
                self._take()
            while self.in_flight:
                self._carry_out()
                self._take()
            self._measure()
            self._take()
        listed = [key for key in self.contents if self.is_shared and self.core.sizes_of(keys_of_names([key]))[0]]
        assert self.disk.files.keys() >= set(listed), "an entry is listed that vanished"

    def _finish(self) -> None:
        """Without further faults all that waits ends, and what is expected is served."""
        self._end_outage()
        self.fault_rate = self.others.fault_rate = 0.0
        for _ in range(400):
            while self.in_flight:
                self.judge.operation += 1
                self._carry_out()
                self._take()
            self._set_time(self.caller_s + 0.5)
            self._take()
        self._ask_for_unreadable()
        self._scan_all()
        self.judge.judge_all(self.core)
        assert not self.judge.asks, "an ask is stuck"
        assert not self.judge.offers, "an offer is stuck"
        statistics = self.core.statistics()
        assert statistics.num_reads + statistics.num_writes + statistics.num_deletes + statistics.num_queued == 0
        assert self.disk.nbytes <= CAP, "bytes beyond the cap are left"
        self._read_all()
        self.ledger.check()

    def _ask_for_unreadable(self) -> None:
        """Ask some times for what cannot be read: it is deleted then, so that it can be stored anew.

        Something else is asked for between, which shows that it is not the disk that fails.
        """
        sound = sorted(self.judge.expected)
        for key in sorted(self.disk.unreadable) if sound else ():
            for asked in [sound[0], key] * MOST_FAILURES:
                self._set_time(self.caller_s + 5.0)
                self._ask_for([self.contents[asked]], 3.0)
                self._take()
                while self.in_flight:
                    self.judge.operation += 1
                    self._carry_out()
                    self._take()
            assert not self.core.sizes_of(keys_of_names([key]))[0], "an entry that cannot be read stays listed"

    def _read_all(self) -> None:
        """Ask for all that is there: what no fault touched is served, and the rest refused."""
        served = set()
        not_listed = self._not_listed()
        for key in sorted(self.disk.files.keys() | self.judge.expected | self.ledger.keys()):
            self.judge.operation += 1
            is_expected = key in self.judge.expected
            ticket = self.core.load(keys_of_names([key]), self.caller_s, NEVER)
            for action in self.core.take_actions():
                assert isinstance(action, Read)
                self._read(action, None)
            (answer,) = self.core.take_answers()
            assert isinstance(answer, Loaded)
            assert answer.ticket == ticket
            assert not is_expected or answer.num_entries == 1, f"an untouched entry is not served: {answer}"
            may_be_absent = self.judge.touched | not_listed
            assert answer.num_entries or key in may_be_absent, f"a file without a fault is not served: {answer}"
            self.seen["served at the end"] += answer.num_entries
            served |= {key} if answer.num_entries else set()
            self.in_flight += self.core.take_actions()
            while self.in_flight:
                self._carry_out()
                self.in_flight += self.core.take_actions()
            self.ledger.settle(key, "not in the index")
        assert self.disk.files.keys() - not_listed == served, "files are left that no entry counts"

    def _not_listed(self) -> set[bytes]:
        """Files of another process that no entry has: they were withdrawn here, or there is no room in the index."""
        if not self.is_shared:
            return set()
        now = self.core.statistics()
        room = 0 if now.num_entries == MAX_ENTRIES else CAP - (now.nbytes - now.foreign_nbytes)
        unlisted = {key for key in self.disk.files if not self.core.sizes_of(keys_of_names([key]))[0]}
        is_withdrawn = self.core._entries.is_forbidden
        return {key for key in unlisted if len(self.disk.files[key]) > room or is_withdrawn(key)}
