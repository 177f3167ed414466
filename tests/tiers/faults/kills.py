"""Processes with stores at one root, killed by SIGKILL at any moment.

After each kill: the root has at most its cap, writes under way included, also where two processes share it. Every frame
is whole and the right one, the next store serves all of them, and no half-done write outlives its start. Where nothing
had to be evicted, it serves whatever a killed process had reported as stored.
"""

import contextlib
import multiprocessing
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.store import TierStore
from pagedkv.tiers.words import StoreConfig, StoreOutcome
from tests.tiers.faults.contents import IDENTITY, Content, make_chains
from tests.tiers.faults.ledger import Ledger

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.tiers.faults.compiled"])
SUBTREE: Final = IDENTITY.fingerprint.hex()[:32]
NUM_CHAINS: Final = 40
LARGE: Final = 4200
SMALL_CAP: Final = 2**20
LARGE_CAP: Final = 2**30
LONGEST_LIFE_S: Final = 0.03
KEY_NBYTES: Final = 32
SECONDS: Final = 60.0


def chains_of(seed: int) -> list[list[Content]]:
    """Make the chains that all processes of one root store."""
    return make_chains(NUM_CHAINS, random.Random(seed), None, [LARGE] * 2)


def open_store(root: Path, cap_nbytes: int) -> TierStore:
    """Open a store at a root."""
    body = FolderBody(root, IDENTITY.fingerprint, cap_nbytes)
    return TierStore(body, IDENTITY, StoreConfig(cap_nbytes, 1000, admission="always"))


def store_for_ever(root: Path, cap_nbytes: int, seed: int, number: int, reports: Connection) -> None:
    """Store and load until killed; report the key of each entry when it is stored."""
    store, rng, chains = open_store(root, cap_nbytes), random.Random(number), chains_of(seed)
    lock = threading.Lock()
    reports.send_bytes(bytes(KEY_NBYTES))
    while True:
        chain = rng.choice(chains)

        def answered(place: int, outcome: StoreOutcome, chain: list[Content] = chain) -> None:
            if outcome is StoreOutcome.STORED:
                with lock:
                    reports.send_bytes(chain[place].run.key)

        store.offer([each.run for each in chain], [each.parts for each in chain], answered)
        result = store.load([each.run for each in chain], 1.0).wait(SECONDS)
        for content, parts in zip(chain, result.parts, strict=False):
            assert tuple(map(bytes, parts)) == content.parts, "a wrong answer"


class KilledStores:
    """A root, and what was stored there."""

    def __init__(self, root: Path, cap_nbytes: int, seed: int) -> None:
        self.root = root
        self.cap_nbytes = cap_nbytes
        self.seed = seed
        self.chains = chains_of(seed)
        self.reported: set[bytes] = set()
        self.ledger = Ledger()
        self.seen: Counter[str] = Counter()

    def kill(self, num_processes: int, number: int, rng: random.Random) -> None:
        """Kill so many processes at once, and judge what they leave."""
        living = [self._started(number + each) for each in range(num_processes)]
        for _, reports in living:
            assert reports.poll(SECONDS), "the process does not begin"
            assert reports.recv_bytes() == bytes(KEY_NBYTES)
        threading.Event().wait(rng.random() * LONGEST_LIFE_S)
        for process, _ in living:
            process.kill()
        for process, reports in living:
            process.join()
            assert process.exitcode == -9, f"a process ended by itself: {process.exitcode}"
            self._read_reports(reports)
        self._judge_bytes()
        num_entries = self._judge_entries()
        fate = "all of its entries are served" if num_entries else "nothing was stored yet"
        for _ in living:
            self.ledger.happen(f"kill of one of {num_processes} processes", fate)

    def _started(self, number: int) -> tuple[BaseProcess, Connection]:
        """Start a process, which reports when it has a store. Several open the root at once."""
        reads, writes = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=store_for_ever, args=(self.root, self.cap_nbytes, self.seed, number, writes), daemon=True
        )
        process.start()
        writes.close()
        return process, reads

    def _read_reports(self, reports: Connection) -> None:
        with reports, contextlib.suppress(EOFError, OSError):  # the last report may be cut short
            while True:
                self.reported.add(reports.recv_bytes())

    def _judge_bytes(self) -> None:
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != "usage"]
        nbytes = sum(path.stat().st_size for path in files)
        assert nbytes <= self.cap_nbytes, f"{nbytes} bytes of frames and writes at a cap of {self.cap_nbytes}"
        self.seen["writes killed"] += sum(path.parent.name == "writing" for path in files)

    def _judge_entries(self) -> int:
        """The next store finds whole and right entries only, and serves all of them."""
        with open_store(self.root, self.cap_nbytes) as store:
            assert not list((self.root / SUBTREE / "writing").iterdir()), "a write of a dead process is left"
            there = {bytes.fromhex(path.stem) for path in self.root.rglob("*.frame")}
            for content in {each.run.key: each for chain in self.chains for each in chain}.values():
                result = store.load([content.run], SECONDS).wait(SECONDS)
                assert result.num_runs == (content.run.key in there), f"not served: {result.cause}"
                assert not result.num_runs or tuple(map(bytes, result.parts[0])) == content.parts, "a wrong answer"
                self.seen["entries served"] += result.num_runs
            assert store.refusals == {}, f"frames are torn: {store.refusals}"
            if self.cap_nbytes == LARGE_CAP:
                lost = self.reported - there
                assert not lost, f"{len(lost)} entries that were stored are lost"
        return len(there)


def kill_stores(num_kills: int, seed: int, told: Callable[[str], None]) -> tuple[Ledger, Counter[str]]:
    """Kill so many processes, with and without evictions, alone and two at a time, each time at new roots."""
    ledger, seen, rng = Ledger(), Counter[str](), random.Random(seed)
    while ledger.num_faults < num_kills:
        with tempfile.TemporaryDirectory() as folder:
            cap_nbytes = rng.choice([SMALL_CAP, LARGE_CAP])
            killed = KilledStores(Path(folder) / "root", cap_nbytes, seed)
            for _ in range(10):
                if ledger.num_faults + killed.ledger.num_faults < num_kills:
                    killed.kill(rng.choice([1, 1, 2]), rng.randrange(2**32), rng)
        killed.seen[f"roots with {'evictions' if cap_nbytes == SMALL_CAP else 'room for all'}"] += 1
        ledger.add(killed.ledger)
        seen += killed.seen
        seed += 1
        told(f"kills: {ledger.num_faults:,}")
    return ledger, seen
