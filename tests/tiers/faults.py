"""The fault machine: a store core over a simulated disk that crashes between any two calls, and a model of every byte.

Writes, renames and deletes of the disk are not synchronised: a crash loses, tears and reorders the latest of them.
At rest, bits flip, files are truncated, swapped, deleted, or replaced by frames of another salt, model or version.
Actions fail, hang, or end after their deadlines, and the clock jumps. After each operation the model judges:

- wrong answers: a frame was accepted whose parts are not those of its key;
- stuck requests: an ask or a key of an offer has no answer after its deadline;
- bytes beyond the cap on the disk, beyond what a crash brought back and the store has begun to delete;
- entries that were stored, that no fault touched, no eviction and no withdrawal removed, and that were not served.

``python -m tests.tiers.faults --operations 1000000``
"""

import argparse
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from pagedkv.memory.contract.keys import RequestKeys
from pagedkv.memory.tiers.actions import Action, Delete, Fault, Loaded, LoadEnd, Offered, Read, StoreOutcome, Write
from pagedkv.memory.tiers.config import StoreConfig
from pagedkv.memory.tiers.core import StoreCore
from pagedkv.memory.tiers.frame import OpenFrame, open_frame, write_frame
from pagedkv.memory.tiers.identity import GroupLayout, Identity, ModelIdentity, Run, runs_of

BLOCK_SIZE: Final = 4
LONGEST_CHAIN: Final = 6
GROUPS: Final = (
    GroupLayout("full", BLOCK_SIZE, "uint8", "NC", (4, 16), (16, 1)),
    GroupLayout("window", BLOCK_SIZE, "uint8", "NC", (4, 3), (3, 1)),
)
IDENTITY: Final = Identity(GROUPS, ModelIdentity("toy", bytes(range(32))))
OTHER_WEIGHTS: Final = Identity(GROUPS, ModelIdentity("toy", bytes(32)))
OTHER_LAYOUT: Final = Identity((replace(GROUPS[0], letters="CN"), GROUPS[1]), ModelIdentity("toy", bytes(range(32))))
CAP: Final = 24 * 640
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Content:
    """One run, its frame, and frames that must be refused in its place."""

    run: Run
    parts: tuple[bytes, ...]
    frame: bytes
    others: tuple[bytes, ...]


def _content(run: Run, salted: Run) -> Content:
    seed = hashlib.sha512(run.key).digest()
    parts = (seed, (seed[:12] * (1 + seed[0] % 9)))
    frame = write_frame(IDENTITY, run, parts)
    older = frame[:8] + b"\0\0" + frame[10:]
    others = (
        write_frame(IDENTITY, salted, parts),
        write_frame(OTHER_WEIGHTS, run, parts),
        write_frame(OTHER_LAYOUT, run, parts),
        older,
        b"",
        frame + b"\0",
    )
    return Content(run, parts, frame, others)


def make_chains(num_chains: int, rng: random.Random) -> list[list[Content]]:
    """Make chains of runs, some of which share their beginnings."""
    chains: list[list[Content]] = []
    tokens: list[list[int]] = []
    for number in range(num_chains):
        begin = rng.choice(tokens)[: BLOCK_SIZE * rng.randrange(LONGEST_CHAIN)] if tokens and number % 2 else []
        rest = BLOCK_SIZE * LONGEST_CHAIN - len(begin)
        tokens.append(begin + [rng.randrange(1000) for _ in range(rest)])
        runs = runs_of(tokens[-1], BLOCK_SIZE, 1)
        salted = runs_of(tokens[-1], BLOCK_SIZE, 1, RequestKeys(salt=b"another"))
        chains.append([_content(run, other) for run, other in zip(runs, salted, strict=True)])
    return chains


@dataclass(slots=True)
class SimulatedDisk:
    """Files by key. ``pending`` are the changes since the last crash, oldest first; None deletes."""

    files: dict[bytes, bytes] = field(default_factory=dict)
    durable: dict[bytes, bytes] = field(default_factory=dict)
    pending: list[tuple[bytes, bytes | None]] = field(default_factory=list)

    def change(self, key: bytes, content: bytes | None) -> None:
        """Write or delete a file, unsynchronised. After many changes the oldest become durable."""
        _apply(self.files, key, content)
        self.pending.append((key, content))
        if len(self.pending) > 40:
            for old in self.pending[:20]:
                _apply(self.durable, *old)
            del self.pending[:20]

    def crash(self, rng: random.Random) -> None:
        """Lose, tear and reorder what is not durable."""
        survivors = [each for each in self.pending if rng.random() < 0.7]
        if rng.random() < 0.5:
            rng.shuffle(survivors)
        for key, content in survivors:
            torn = content
            if content and rng.random() < 0.2:
                cut = rng.randrange(len(content))
                torn = rng.choice([content[:cut], content[:cut] + bytes(len(content) - cut)])
            _apply(self.durable, key, torn)
        self.pending.clear()
        self.files = dict(self.durable)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))


def _apply(files: dict[bytes, bytes], key: bytes, content: bytes | None) -> None:
    if content is None:
        files.pop(key, None)
    else:
        files[key] = content


@dataclass(slots=True)
class FaultMachine:
    """One run of the machine."""

    seed: int
    eviction: str = "lru"
    fault_rate: float = 0.15
    rng: random.Random = field(init=False)
    core: StoreCore = field(init=False)
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    now_s: float = 1000.0
    in_flight: list[Action] = field(default_factory=list)
    asks: dict[int, tuple[list[Content], set[bytes]]] = field(default_factory=dict)
    offers: dict[int, tuple[list[Content], dict[int, StoreOutcome]]] = field(default_factory=dict)
    expected: set[bytes] = field(default_factory=set)
    touched: set[bytes] = field(default_factory=set)
    failing: set[bytes] = field(default_factory=set)
    chains: list[list[Content]] = field(init=False)
    contents: dict[bytes, Content] = field(init=False)
    is_faultless: bool = field(init=False)
    excess: int = 0
    jumped: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.is_faultless = not self.fault_rate
        self.chains = make_chains(12, self.rng)
        self.contents = {each.run.key: each for chain in self.chains for each in chain}
        self.core = self._new_core()

    def _new_core(self) -> StoreCore:
        return StoreCore(
            StoreConfig(
                cap_nbytes=CAP,
                max_entries=30,
                eviction=self.eviction,
                admission=self.rng.choice(["always", "second-offer"]),
                max_reads=3,
                max_writes=2,
                max_deletes=3,
                max_queued_nbytes=8 * 640,
                read_timeout_s=1.0,
                write_timeout_s=2.0,
                breaker_failures=3,
                breaker_pause_s=0.5,
                breaker_longest_pause_s=4.0,
                full_pause_s=0.3,
                max_events=100_000,
            ),
            self.now_s,
        )

    def run(self, num_operations: int, checks_every: int = 1) -> None:
        """Run so many operations. Raises AssertionError at the first fault of the store."""
        operations: list[tuple[Callable[[], None], float]] = [
            (self._offer, 12),
            (self._ask, 14),
            (self._carry_out, 50),
            (self._advance, 14),
            (self._withdraw, 0.2 if self.fault_rate else 0),
            (self._damage, 4 * self.fault_rate),
            (self._crash, 2 * self.fault_rate),
            (self._jump, 2 * self.fault_rate),
            (self._reset, 0.1 * self.fault_rate),
            (self._measure, 0.5),
        ]
        names, weights = zip(*operations, strict=True)
        for number, operation in enumerate(self.rng.choices(names, weights, k=num_operations)):
            operation()
            self.seen[operation.__name__] += 1
            self._take()
            if number % checks_every == 0:
                self.core.check()
        self._finish()

    def _some_chain(self) -> list[Content]:
        chain = self.rng.choice(self.chains)
        return chain[: self.rng.randint(1, LONGEST_CHAIN)]

    def _offer(self) -> None:
        chain = self._some_chain()
        offer = self.core.offer(keys_of(chain), [len(each.frame) for each in chain], self.now_s)
        self.offers[offer] = (chain, {})

    def _ask(self) -> None:
        chain = self._some_chain()
        seconds = self.rng.choice([0.05, 0.5, 3.0])
        self.core.tick(self.now_s)
        self._take()
        expected = self.expected & {each.run.key for each in chain}
        ticket = self.core.ask(keys_of(chain), self.now_s, seconds)
        self.asks[ticket] = (chain, expected)

    def _carry_out(self) -> None:
        if not self.in_flight:
            return
        action = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
        fault = None
        if self.rng.random() < self.fault_rate:
            fault = self.rng.choice([Fault.TIMEOUT, Fault.IO, Fault.FULL if isinstance(action, Write) else Fault.IO])
        if isinstance(action, Read):
            self._read(action, fault)
        elif isinstance(action, Write):
            self._write(action, fault)
        else:
            self._delete(action, fault)

    def _read(self, action: Read, fault: Fault | None) -> None:
        found = self.disk.files.get(action.key)
        content = self.contents[action.key]
        if fault is None and found is None:
            fault = Fault.GONE
        if fault is None and found is not None:
            opened = open_frame(found)
            if isinstance(opened, OpenFrame) and opened.compare(IDENTITY, content.run) is None:
                assert tuple(map(bytes, opened.parts)) == content.parts, "a wrong answer was accepted"
                self.seen["accepted"] += 1
            else:
                assert action.key in self.touched, "an untouched frame was refused"
                self.seen["refused"] += 1
                fault = Fault.CORRUPT
        if fault is None:
            assert found is not None
            self.core.completed(action.action, self.now_s, len(found))
            return
        if fault in {Fault.GONE, Fault.CORRUPT}:
            assert action.key in self.touched or action.key not in self.expected, f"an expected entry is {fault}"
            self.expected.discard(action.key)
        else:
            self.failing.add(action.key)
        self.core.failed(action.action, fault, self.now_s)

    def _write(self, action: Write, fault: Fault | None) -> None:
        frame = self.contents[action.key].frame
        assert len(frame) == action.nbytes
        assert action.key not in self.disk.files or action.key in self.touched | self.failing, "written over"
        if fault is None:
            self.disk.change(action.key, frame)
            self.touched.discard(action.key)
            self.core.completed(action.action, self.now_s)
            return
        if self.rng.random() < 0.5:  # it failed after it had taken effect, wholly or in part
            self.disk.change(action.key, frame[: self.rng.randint(0, len(frame))])
            self.touched.add(action.key)
            self.expected.discard(action.key)
        self.failing.add(action.key)
        self.core.failed(action.action, fault, self.now_s)

    def _delete(self, action: Delete, fault: Fault | None) -> None:
        if fault is None or self.rng.random() < 0.5:
            self.disk.change(action.key, None)
        if fault is None:
            self.core.completed(action.action, self.now_s)
        else:
            self.core.failed(action.action, fault, self.now_s)

    def _advance(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.01, 0.1, 0.6])
        self.core.tick(self.now_s)

    def _jump(self) -> None:
        self.now_s += self.rng.choice([-1e6, -3.0, 5.0, 1e6])
        self.core.tick(self.now_s)

    def _withdraw(self) -> None:
        content = self.rng.choice(self._some_chain())
        if self.rng.random() < 0.2:  # tombstones last: few keys, or no content is left to be stored
            self.core.withdraw(keys_of([content]), self.now_s)
            self.seen["withdrawn"] += 1

    def _reset(self) -> None:
        self.core.reset(self.now_s)
        self.expected.clear()

    def _damage(self) -> None:
        """Change files at rest."""
        if not self.disk.files:
            return
        key = self.rng.choice(list(self.disk.files))
        frame = self.disk.files[key]
        kind = self.rng.randrange(5)
        if kind == 0 and frame:
            changed = bytearray(frame)
            changed[self.rng.randrange(len(frame))] ^= 1 << self.rng.randrange(8)
            self._replace(key, bytes(changed))
        elif kind == 1 and frame:
            self._replace(key, frame[: self.rng.randrange(len(frame))])
        elif kind == 2:
            alike = [name for name, theirs in self.disk.files.items() if len(theirs) == len(frame)]
            other = self.rng.choice(alike)  # of one size, or the disk had other bytes than any store could count
            mine, theirs = frame, self.disk.files[other]
            if other != key:
                self._replace(key, theirs)
                self._replace(other, mine)
        elif kind == 3:
            self._replace(key, None)
        else:
            foreign = self.rng.choice(self.contents[key].others)
            if len(foreign) <= len(frame):
                self._replace(key, foreign)

    def _replace(self, key: bytes, content: bytes | None) -> None:
        self.disk.change(key, content)
        self.touched.add(key)
        self.expected.discard(key)

    def _crash(self) -> None:
        """Lose the process and what the disk has not synchronised; begin anew from a scan."""
        before = dict(self.disk.files)
        self.disk.crash(self.rng)
        self.in_flight.clear()
        self.asks.clear()
        self.offers.clear()
        changed = {key for key in before.keys() | self.disk.files.keys() if before.get(key) != self.disk.files.get(key)}
        self.touched |= changed
        for key in changed:
            if self.disk.files.get(key) == self.contents[key].frame:
                self.touched.discard(key)
        self.core = self._new_core()
        names = list(self.disk.files)
        self.rng.shuffle(names)
        self.expected.clear()  # the events of the restoration name what is kept
        self.excess = max(0, self.disk.nbytes - CAP)
        self.core.restore(keys_of_names(names), [len(self.disk.files[key]) for key in names], self.now_s)
        if not self.excess and len(names) <= 30:
            assert self.core.statistics().num_entries == len(names)

    def _measure(self) -> None:
        self.core.measured(self.disk.nbytes, 10**9, self.now_s)

    def _take(self) -> None:
        """Take actions, events and answers, and judge them."""
        self.in_flight += self.core.take_actions()
        events = self.core.drain_events()
        answers = self.core.take_answers()
        for answer in answers:
            if isinstance(answer, Offered):
                chain, outcomes = self.offers[answer.offer]
                assert answer.place not in outcomes, "a key of an offer was answered twice"
                outcomes[answer.place] = answer.outcome
                self.seen[str(answer.outcome)] += 1
                if len(outcomes) == len(chain):
                    del self.offers[answer.offer]
        for kind, row in zip(events.kinds.tolist(), events.keys, strict=True):
            key = row.tobytes()
            if kind == 1 and key not in self.touched:
                self.expected.add(key)
            elif kind == 2:
                self.expected.discard(key)
        for answer in answers:
            if isinstance(answer, Loaded):
                self._judge(answer)
        assert self.core.statistics().num_waiting == len(self.asks), "an ask is stuck or was answered twice"
        nbytes = self.disk.nbytes
        self.excess = min(self.excess, max(0, nbytes - CAP))
        assert nbytes <= CAP + self.excess, f"{nbytes} bytes on a disk of {CAP}"

    def _judge(self, answer: Loaded) -> None:
        chain, expected = self.asks.pop(answer.ticket)
        self.seen[f"ask: {answer.cause}"] += 1
        assert (answer.num_entries == len(chain)) == (answer.cause is LoadEnd.NONE)
        if answer.num_entries == len(chain):
            return
        key = chain[answer.num_entries].run.key
        if answer.cause is LoadEnd.ABSENT:
            assert key not in expected, "an entry that should be found is absent"
        elif answer.cause in {LoadEnd.GONE, LoadEnd.CORRUPT, LoadEnd.WITHDRAWN}:
            self.seen["ended early"] += 1  # judged when it was read; it may have been stored again since
        elif self.is_faultless:
            slow = {LoadEnd.LATE, LoadEnd.OUT_OF_SERVICE}  # actions wait longer than their deadlines here
            assert answer.cause in slow, f"{answer.cause} without a fault"

    def _finish(self) -> None:
        """Without further faults all that waits ends, and what is expected is served."""
        self.fault_rate = 0.0
        for _ in range(400):
            while self.in_flight:
                self._carry_out()
                self._take()
            self.now_s += 0.5
            self.core.tick(self.now_s)
            self._take()
        self.core.check()
        assert not self.asks, "an ask is stuck"
        assert not self.offers, "an offer is stuck"
        statistics = self.core.statistics()
        assert statistics.num_reads + statistics.num_writes + statistics.num_deletes + statistics.num_queued == 0
        assert self.disk.nbytes <= CAP, "bytes beyond the cap are left"
        for key in sorted(self.expected):
            ticket = self.core.ask(keys_of_names([key]), self.now_s, NEVER)
            self.in_flight += self.core.take_actions()
            for action in self.in_flight:
                assert isinstance(action, Read)
                self._read(action, None)
            self.in_flight.clear()
            (answer,) = self.core.take_answers()
            assert isinstance(answer, Loaded)
            assert (answer.ticket, answer.num_entries) == (ticket, 1), f"an untouched entry is not served: {answer}"
            self.seen["served at the end"] += 1


def keys_of(chain: list[Content]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Put the keys of a chain into an array."""
    return keys_of_names([each.run.key for each in chain])


def keys_of_names(names: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Put keys into an array."""
    return np.frombuffer(b"".join(names), np.uint8).reshape(len(names), 32)


def main() -> None:
    """Run machines until so many operations are done, and print what they met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=20_000, help="operations of one machine")
    parser.add_argument("--progress", action="store_true", help="tell how far it is, also into a file")
    given = parser.parse_args()
    seen: Counter[str] = Counter()
    num_done, seed = 0, given.seed
    policies = ("lru", "adaptive", "fifo", "hazard")
    while num_done < given.operations:
        machine = FaultMachine(seed, policies[seed % len(policies)], fault_rate=(0.15, 0.4, 0.02, 0.0)[seed // 4 % 4])
        try:
            machine.run(given.each, checks_every=10)
        except AssertionError:
            print(f"seed {seed} failed: {machine.eviction}")  # noqa: T201
            raise
        num_done += given.each
        if sys.stderr.isatty() or given.progress:
            print(f"{num_done} operations", file=sys.stderr, flush=True)  # noqa: T201
        seed += 1
        seen += machine.seen
    print(f"{num_done} operations, {seed - given.seed} machines, no fault of the store")  # noqa: T201
    for name, count in sorted(seen.items()):
        print(f"  {count:>9}  {name}")  # noqa: T201


if __name__ == "__main__":
    main()
