"""Faults on real media: a store on threads over a folder, a disk that gets full, and a Redis server.

Another process, which is a second body here, stores entries at the same place, and scans find them.

What threads do beside each other is not repeated by a seed. So answers are judged as they come, and the rest at quiet
moments: without an outage and with nothing in flight, all entries are served whose content no fault touched.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from typing import Final

from pagedkv.tiers.codecs import NO_CODEC, Codec
from pagedkv.tiers.frame import write_frame
from pagedkv.tiers.shared_store import SharedStore
from pagedkv.tiers.store import Load, LoadedRuns
from pagedkv.tiers.words import LoadEnd, StoreConfig, StoreOutcome
from tests.tiers.faults.contents import IDENTITY, SECRET, Content, make_chains
from tests.tiers.faults.disk import AT_REST, UNREADABLE, damaged
from tests.tiers.faults.faulty_body import FaultyBody
from tests.tiers.faults.judge import MOST_FAILURES
from tests.tiers.faults.ledger import Ledger
from tests.tiers.faults.media import FolderMedium, Medium, RedisMedium

MEDIA: Final = ("folder", "full disk", "redis")
CAP: Final = 2**20
DISK: Final = 700 * 2**10
NUM_CHAINS: Final = 12
LARGE_CHAINS: Final = 2
LARGE: Final = 4200
"""Times the bytes of a small entry: above what a folder reads past the page cache."""
LONGEST_CHAIN: Final = 6
SECONDS: Final = 60.0
STORED: Final = 1
REMOVED: Final = 2
RATE: Final = 0.1
LONGEST_OUTAGE: Final = 12
"""Operations."""


class RealMachine:
    """One store over a real medium, which is damaged, fails, and is restarted.

    Args:
        medium: one of ``MEDIA``.
        folder: an empty one.
        seed: of the choices.
        codec: of the store, an exact one.
    """

    def __init__(self, medium: str, folder: Path, seed: int = 0, codec: Codec = NO_CODEC) -> None:
        self._codec = codec
        self.ledger = Ledger()
        self.seen: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._chains = make_chains(NUM_CHAINS, self._rng, SECRET, [LARGE] * LARGE_CHAINS)
        self._contents = {each.run.key: each for chain in self._chains for each in chain}
        self._medium = self._made(medium, folder)
        self._jump_s = 0.0
        self._lock = Lock()
        self._operation = 0
        self._touched: dict[bytes, int] = {}
        self._is_there: set[bytes] = set()
        self._loads: list[tuple[list[Content], Load]] = []
        self._outage, self._outage_left = "", 0
        self._spoiled = b""
        self._open()

    def _made(self, medium: str, folder: Path) -> Medium:
        if medium == "redis":
            return RedisMedium(folder)
        return FolderMedium(folder, CAP, DISK if medium == "full disk" else 0)

    def _open(self) -> None:
        config = StoreConfig(
            CAP,
            200,
            admission="always",
            breaker_failures=3,
            breaker_pause_s=0.01,
            breaker_longest_pause_s=0.05,
            full_pause_s=0.01,
            read_timeout_s=0.5,
            write_timeout_s=0.5,
            max_events=100_000,
        )
        self._body = FaultyBody(self._medium.open(), self._contents, self._happen, self._rng.randrange(2**32))
        self._is_there.clear()
        self._store = SharedStore(self._body, IDENTITY, config, secret=SECRET, codec=self._codec, clock=self._clock)

    def _clock(self) -> float:
        return time.monotonic() + self._jump_s

    def _happen(self, kind: str, key: bytes) -> None:
        """Count a fault of a call, from any thread. Answers that are not the entry's touch it."""
        with self._lock:
            is_answer = kind.startswith(("server", "file"))
            self.ledger.happen(kind, "another answer was refused" if is_answer else "the call failed")
            if is_answer or kind.startswith("write"):
                self._touched[key] = self._operation

    def run(self, num_operations: int) -> None:
        """Run so many operations. Raises AssertionError at a breach."""
        operations: list[tuple[Callable[[], None], float]] = [
            (self._offer, 30),
            (self._load, 40),
            (self._damage, 20),
            (self._share, 3),
            (self._rescan, 3),
            (self._begin_outage, 3),
            (self._jump, 2),
            (self._restart, 0.5),
            (self._judge_quiet, 1.5),
        ]
        names, weights = zip(*operations, strict=True)
        for operation in self._rng.choices(names, weights, k=num_operations):
            with self._lock:
                self._operation += 1
            self._body.rate = RATE
            self._outage_left -= 1
            if not self._outage_left:
                self._end_outage()
            operation()
            self.seen[operation.__name__.strip("_")] += 1

    def finish(self) -> None:
        """Judge all at the end, and close."""
        self._restart()
        with self._lock:
            self.ledger.settle_all("not in the index, or deleted")
            self.ledger.check()
        self._store.close()
        self._medium.close()

    def _some_chain(self) -> list[Content]:
        return self._rng.choice(self._chains)[: self._rng.randint(1, LONGEST_CHAIN)]

    def _offer(self) -> None:
        chain, operation = self._some_chain(), self._operation

        def answered(place: int, outcome: StoreOutcome) -> None:
            key = chain[place].run.key
            with self._lock:
                self.seen[f"offer: {outcome}"] += 1
                if outcome is StoreOutcome.STORED and self._touched.get(key, operation) < operation:
                    del self._touched[key]
                    self.ledger.settle(key, "written over, unread")

        self._store.offer([each.run for each in chain], [each.parts for each in chain], answered)

    def _load(self) -> None:
        chain = self._some_chain()
        load = self._store.load([each.run for each in chain], self._rng.choice([0.001, 0.02, 0.2]))
        self._loads.append((chain, load))
        if len(self._loads) > self._rng.randrange(4):
            self._judge(*self._loads.pop(0))

    def _judge(self, chain: list[Content], load: Load) -> LoadedRuns:
        """Judge an answer: it comes, and what it brings is right."""
        result = load.wait(SECONDS)
        for content, parts in zip(chain, result.parts, strict=False):
            assert tuple(map(bytes, parts)) == content.parts, "a wrong answer"
        self.seen[f"load: {result.cause}"] += 1
        self.seen["entries served"] += result.num_runs
        return result

    def _damage(self) -> None:
        """Change an entry at rest, behind the store's back."""
        if self._outage:
            return
        sizes = self._medium.files()
        if not sizes:
            return
        key = self._rng.choice(sorted(sizes))
        if not self._spoiled and not self._rng.randrange(10):
            self._spoil(key)
            return
        alike = [name for name in sizes if sizes[name] == sizes[key]]
        files = {name: self._medium.get(name) or b"" for name in {key, self._rng.choice(alike)}}
        kind = self._rng.choice(AT_REST)
        for each, frame in damaged(kind, key, files, self._contents[key], self._rng).items():
            with self._lock:
                self._touched[each] = self._operation
            if self._medium.put(each, frame):
                with self._lock:
                    self.ledger.rest(kind, each)

    def _spoil(self, key: bytes) -> None:
        """Make an entry unreadable, behind the store's back."""
        self._spoiled = key
        with self._lock:
            self._touched[key] = self._operation
            self.ledger.rest(UNREADABLE, key)
        self._medium.spoil(key)

    def _share(self) -> None:
        """Let another process store an entry, if there is room, at a moment at which the store writes nothing."""
        if self._outage:
            return
        self._body.rate = 0.0
        assert self._store.wait_until_quiet(SECONDS)
        content = self._rng.choice(list(self._contents.values()))
        sizes = self._medium.files()
        frame = write_frame(self._codec.identity_of(IDENTITY), content.run, content.parts, SECRET)
        sealed = b"".join(self._codec.seal([frame], content.run.key))
        if content.run.key in sizes or sum(sizes.values()) + len(sealed) > CAP:
            return
        with contextlib.closing(self._medium.open()) as other, contextlib.suppress(OSError):  # the disk may be full
            other.write(content.run.key, [sealed], SECONDS)
            with self._lock:
                self._touched.pop(content.run.key, None)
                self.ledger.settle(content.run.key, "written over, unread")
            self.seen["stored by another process"] += 1

    def _rescan(self) -> None:
        """Scan for what another process has stored; scans fail by chance."""
        if not self._outage:
            with contextlib.suppress(OSError):
                self.seen["found by a scan"] += self._store.rescan()

    def _rescan_whole(self) -> None:
        """Scan until a scan succeeds: on a machine with other work a server may be late without a fault of ours."""
        until = time.monotonic() + SECONDS
        while True:
            try:
                self.seen["found by a scan"] += self._store.rescan()
            except OSError:
                assert time.monotonic() < until, "no scan succeeds"
                continue
            return

    def _begin_outage(self) -> None:
        """Begin an outage of some operations, unless there is one."""
        if not self._outage:
            self._outage = self._rng.choice(self._medium.outages)
            self._outage_left = self._rng.randint(1, LONGEST_OUTAGE)
            self._medium.begin(self._outage, self._body)

    def _end_outage(self) -> None:
        outage, self._outage = self._outage, ""
        if not outage:
            return
        is_lost = self._medium.end(outage, self._body)
        has_opened = self._store.statistics().times_opened
        with self._lock:
            self.ledger.happen(outage, "all content is lost" if is_lost else "content is kept")
            if is_lost:
                self.ledger.settle_all("lost with the server")
                self._touched |= dict.fromkeys(self._contents, self._operation)
        self.seen["breaker opened"] = max(self.seen["breaker opened"], has_opened)

    def _jump(self) -> None:
        seconds = self._rng.choice([-1000.0, -0.3, 0.3, 1000.0])
        self._jump_s += seconds
        with self._lock:
            self.ledger.happen("clock jumps forward" if seconds > 0 else "clock jumps back", "no answer was lost")

    def _restart(self) -> None:
        """End the store, and open another over what is there."""
        self._judge_quiet()
        self._store.close()
        self._open()
        self._judge_quiet()

    def _judge_quiet(self) -> None:
        """End the outage, wait until nothing is in flight, and judge all that is there."""
        self._end_outage()
        while self._loads:
            self._judge(*self._loads.pop(0))
        self._body.rate = 0.0
        assert self._store.wait_until_quiet(SECONDS), f"the store is not quiet: {self._store.statistics()}"
        self._wait_for_service()
        self._rescan_whole()
        assert self._store.wait_until_quiet(SECONDS)
        self._follow_events()
        self._judge_bytes()
        self._judge_storing()
        self._follow_events()
        for key in sorted(self._is_there, key=lambda each: (each == self._spoiled, each)):
            self._judge_entry(key)
        self._spoiled = b""
        self._follow_events()
        assert self._store.wait_until_quiet(SECONDS)
        self._judge_bytes()
        self._store._core.check()

    def _wait_for_service(self) -> None:
        """Wait until the breaker is closed: after its pause, the next call that succeeds closes it."""
        absent = [self._contents[next(iter(self._contents))]]
        until = time.monotonic() + SECONDS
        while str(self._store.statistics().breaker) == "open":
            assert time.monotonic() < until, "the tier does not come back"
            Event().wait(0.005)
            self._judge(absent, self._store.load([each.run for each in absent], 1.0))

    def _judge_storing(self) -> None:
        """What is not there can be stored."""
        absent = next((each for key, each in self._contents.items() if key not in self._is_there), None)
        if absent is None:
            return
        outcomes: list[StoreOutcome] = []
        self._store.offer([absent.run], [absent.parts], lambda _, outcome: outcomes.append(outcome))
        assert self._store.wait_until_quiet(SECONDS)
        assert StoreOutcome.FAILED not in outcomes, f"nothing is stored any more: {self._store.last_problem}"

    def _judge_entry(self, key: bytes) -> None:
        """An entry that no fault touched is served; one that was touched may be refused."""
        content = self._contents[key]
        for _ in range(1 + MOST_FAILURES * (key == self._spoiled)):  # what cannot be read is removed then
            result = self._judge([content], self._store.load([content.run], SECONDS))
        until = time.monotonic() + SECONDS
        while result.cause is LoadEnd.LATE and time.monotonic() < until:  # on a machine with other work
            result = self._judge([content], self._store.load([content.run], SECONDS))
        with self._lock:
            is_touched = key in self._touched
            assert result.num_runs == 1 or is_touched, f"an untouched entry is not served: {result.cause}"
            if result.num_runs:
                self._touched.pop(key, None)
                self.ledger.settle(key, "undone by another one, or by a write")
            else:
                assert result.cause in {LoadEnd.CORRUPT, LoadEnd.GONE, LoadEnd.ABSENT}, result.cause
                self.ledger.settle(key, f"found when it was read: {result.cause}")
            self.seen["judged at quiet moments"] += 1

    def _follow_events(self) -> None:
        events = self._store.drain_events()
        for kind, row in zip(events.kinds.tolist(), events.keys, strict=True):
            key = row.tobytes()
            if kind == STORED:
                self._is_there.add(key)
            elif kind == REMOVED:
                self._is_there.discard(key)

    def _judge_bytes(self) -> None:
        nbytes = sum(self._medium.files().values())
        assert nbytes <= CAP, f"{nbytes} bytes at a cap of {CAP}"
