"""Short runs of the fault machines; `make faults` is the whole one. And that they notice a store that is broken."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagedkv.compilation.compiled import is_compiling_at_all
from pagedkv.tiers.codecs import NO_CODEC, AesGcm, Codec, Zstd
from pagedkv.tiers.core import Dispatch
from pagedkv.tiers.entries import Deletes, Entries, OpenScan
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import OpenFrame
from pagedkv.tiers.index import StoreIndex
from pagedkv.tiers.reads import Reads, Ticket
from pagedkv.tiers.timing import CircuitBreaker
from pagedkv.tiers.words import Fault
from pagedkv.tiers.writes import Writes
from tests.tiers.faults.disk import AT_REST, UNREADABLE
from tests.tiers.faults.kills import kill_stores
from tests.tiers.faults.ledger import Ledger
from tests.tiers.faults.machine import CAP, FaultMachine
from tests.tiers.faults.real_media import MEDIA, RealMachine

interpreted = pytest.mark.interpreted


@interpreted
@pytest.mark.parametrize(
    ("eviction", "fault_rate", "num_operations"),
    [("lru", 0.0, 500), ("lru", 0.2, 800), ("adaptive", 0.15, 600), ("fifo", 0.15, 600), ("hazard", 0.15, 100)],
)
def test_no_fault_causes_a_wrong_answer_a_stuck_request_or_a_byte_too_many(
    eviction: str, fault_rate: float, num_operations: int
) -> None:
    if eviction != "lru" and is_compiling_at_all():
        pytest.skip("the loops of each policy take 20 s to compile; the interpreted run has them all")
    machine = FaultMachine(len(eviction), eviction, fault_rate=fault_rate)
    machine.run(num_operations, checks_every=10)
    assert machine.seen["frames accepted"] >= num_operations / 50


@interpreted
def test_every_kind_of_fault_happens_and_has_a_fate() -> None:
    ledger = Ledger()
    for seed in range(3):
        machine = FaultMachine(seed, fault_rate=0.3, is_keyed=True)
        machine.run(2500, checks_every=50)
        ledger.add(machine.ledger)
    ledger.check()
    calls = {f"{verb} {end}" for verb in ("read", "write", "delete") for end in ("fails", "times out")}
    answers = {f"server answers {what}" for what in ("another entry", "an older entry", "a truncated entry")}
    others = {
        "write finds a full disk",
        "clock jumps back",
        "clock jumps forward",
        "crash",
        "dead server",
        "slow server",
        "full disk",
        "reads hang",
    }
    unreliable = {"server answers that there is none", "file read while it is written"}
    assert set(ledger.injected) == calls | answers | others | unreliable | {*AT_REST, UNREADABLE}
    assert ledger.fates["forged with a valid check", "refused: damaged"] > 0
    assert "\n".join(ledger.lines()).count("crash") >= 2


@interpreted
@pytest.mark.parametrize(("seed", "fault_rate"), [(0, 0.0), (1, 0.15), (2, 0.3)])
def test_what_another_process_stores_is_found_while_the_store_runs(seed: int, fault_rate: float) -> None:
    machine = FaultMachine(seed, fault_rate=fault_rate, is_keyed=seed == 1, is_shared=True)
    machine.run(2000, checks_every=10)
    assert machine.seen["found by a scan"] > 10
    assert machine.seen["deleted by another process"] > 10


@interpreted
@pytest.mark.parametrize(
    ("seed", "eviction", "fault_rate"), [(0, "lru", 0.0), (1, "lru", 0.15), (2, "adaptive", 0.1), (3, "fifo", 0.1)]
)
def test_a_salt_has_at_most_its_share(seed: int, eviction: str, fault_rate: float) -> None:
    if eviction != "lru" and is_compiling_at_all():
        pytest.skip("the loops of each policy take 20 s to compile; the interpreted run has them all")
    machine = FaultMachine(seed, eviction, fault_rate, is_shared=seed == 1, salt_share=0.15)
    machine.run(2000, checks_every=5)
    assert machine.seen["evictions of a salt's own"] > 5


@interpreted
def test_the_machine_notices_a_salt_beyond_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entries, "evict_own", lambda *_: True)
    with pytest.raises(AssertionError, match="bytes of a salt whose share is"):
        FaultMachine(0, fault_rate=0.0, salt_share=0.3).run(2000, checks_every=5)


@interpreted
def test_the_machine_notices_scans_that_list_what_was_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenScan, "has_departed", lambda *_: False)
    with pytest.raises(AssertionError, match=r"written over|deleted twice|is gone"):
        FaultMachine(0, fault_rate=0.05, is_shared=True).run(6000, checks_every=10)


@interpreted
def test_the_machine_notices_scans_that_remove_what_was_written_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Entries.publish

    def unseen(entries: Entries, entry: int, parent: int) -> None:
        scan, entries._scan = entries._scan, None
        publish(entries, entry, parent)
        entries._scan = scan

    monkeypatch.setattr(Entries, "publish", unseen)
    with pytest.raises(AssertionError, match="removed though there is room"):
        FaultMachine(0, fault_rate=0.05, is_shared=True).run(6000, checks_every=10)


@interpreted
def test_the_machine_notices_entries_that_stay_listed_though_they_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entries, "lose_vanished", lambda *_: False)
    with pytest.raises(AssertionError, match="is listed that vanished"):
        FaultMachine(3, fault_rate=0.05, is_shared=True).run(6000, checks_every=10)


@interpreted
def test_the_machine_notices_scans_that_list_what_is_older_than_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entries, "forget_scans", lambda *_: None)
    with pytest.raises(AssertionError, match="from before a reset was served"):
        FaultMachine(1, fault_rate=0.05, is_keyed=True, is_shared=True).run(6000, checks_every=10)


@interpreted
def test_the_machine_notices_scans_that_list_withdrawn_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entries, "forbid", lambda *_: None)
    with pytest.raises(AssertionError, match="withdrawn content was served"):
        FaultMachine(0, fault_rate=0.05, is_shared=True).run(6000, checks_every=10)


@interpreted
def test_the_machine_notices_frames_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFrame, "compare", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong answer"):
        FaultMachine(1, fault_rate=0.4).run(5000)


@interpreted
def test_the_machine_notices_a_store_that_forgets_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Deletes.end

    def forgets(deletes: Deletes, action: int, fault: Fault | None) -> None:
        del fault  # as if every delete that failed had been done
        end(deletes, action, None)

    monkeypatch.setattr(Deletes, "end", forgets)
    with pytest.raises(AssertionError, match=r"bytes|no entry counts|written over"):
        FaultMachine(2, fault_rate=0.4).run(5000)


@interpreted
def test_the_machine_notices_a_store_that_believes_a_server_that_denies_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did: the entry was counted no longer, and its bytes were beyond the cap."""
    end = Reads.end

    def believes(reads: Reads, action: int, fault: Fault | None) -> None:
        key = reads._in_flight[action]
        end(reads, action, fault)
        if fault is Fault.GONE and key in reads._entries.deletes:
            nbytes = reads._entries.deletes._doomed.pop(key).nbytes
            reads._entries.deletes.nbytes -= nbytes
            reads._entries.room.release(nbytes)

    monkeypatch.setattr(Reads, "end", believes)
    with pytest.raises(AssertionError, match=f"bytes on a disk of {CAP}"):
        FaultMachine(0, fault_rate=0.3).run(20_000, checks_every=10)


@interpreted
def test_the_machine_notices_deadlines_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "cut", lambda *_: None)
    with pytest.raises(AssertionError, match=r"stuck|all keys that can be read|waits for no read"):
        FaultMachine(3, fault_rate=0.4).run(5000)


@interpreted
def test_the_machine_notices_requests_that_are_given_up_without_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_queue = Reads.drop_queue

    def gives_up(reads: Reads, action: int) -> Any:  # noqa: ANN401 - an action
        begun = begin(reads, action)
        if action % 50 == 0:
            drop_queue(reads)
        return begun

    begin = Reads.begin
    monkeypatch.setattr(Reads, "begin", gives_up)
    with pytest.raises(AssertionError, match="out of service without a cause"):
        FaultMachine(4, fault_rate=0.05).run(5000)


@interpreted
def test_the_machine_notices_a_breaker_that_opens_early(monkeypatch: pytest.MonkeyPatch) -> None:
    note_failure = CircuitBreaker.note_failure

    def is_nervous(breaker: CircuitBreaker, what: tuple[str, bytes], now_s: float, read_s: float | None) -> bool:
        breaker.failed.add(("nothing", b""))
        return note_failure(breaker, what, now_s, read_s)

    monkeypatch.setattr(CircuitBreaker, "note_failure", is_nervous)
    with pytest.raises(AssertionError, match="opened without failures"):
        FaultMachine(5, fault_rate=0.2).run(5000)


@interpreted
def test_the_machine_notices_a_breaker_that_ignores_lost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CircuitBreaker, "loses_time", False)
    with pytest.raises(AssertionError, match="closed though all fails, or reads lose their time"):
        FaultMachine(0, fault_rate=0.05).run(6000)


@interpreted
def test_the_machine_notices_a_breaker_that_is_closed_by_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    note_success = Dispatch._note_success

    def is_calmed_by_deletes(dispatch: Dispatch, action: int) -> None:
        if dispatch._owner_of(action) is dispatch._deletes:
            dispatch._breaker.note_success()
        note_success(dispatch, action)

    monkeypatch.setattr(Dispatch, "_note_success", is_calmed_by_deletes)
    with pytest.raises(AssertionError, match="closed though all fails, or reads lose their time"):
        FaultMachine(0, fault_rate=0.2).run(6000)


@interpreted
def test_the_machine_notices_entries_that_stay_listed_though_they_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Reads, "_fails_often", lambda *_: False)
    with pytest.raises(AssertionError, match="an entry that cannot be read stays listed"):
        FaultMachine(1, fault_rate=0.2).run(500)


@interpreted
def test_the_machine_notices_a_medium_that_stays_full_and_empties_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_all(writes: Writes, nbytes: int) -> None:
        writes._paused_until_s = writes._clock.now_s + writes._config.full_pause_s
        writes._entries.evict(nbytes)

    monkeypatch.setattr(Writes, "_give_way", gives_all)
    with pytest.raises(AssertionError, match="a medium that stays full empties the store"):
        FaultMachine(3, fault_rate=0.3).run(4000)


@interpreted
def test_the_machine_notices_entries_that_are_evicted_though_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Entries.publish

    def evicts_at_will(entries: Entries, entry: int, parent: int) -> None:
        publish(entries, entry, parent)
        if len(entries.index) == 5:
            entries.evict(1)

    monkeypatch.setattr(Entries, "publish", evicts_at_will)
    with pytest.raises(AssertionError, match="removed though there is room"):
        FaultMachine(6, fault_rate=0.05).run(5000)


@interpreted
def test_the_machine_notices_an_index_that_loses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = StoreIndex.look_up
    calls = Counter[str]()

    def loses(index: StoreIndex, keys: Any) -> Any:  # noqa: ANN401 - arrays
        calls["look up"] += 1
        entries, num_leading = look_up(index, keys)
        return (entries, 0) if calls["look up"] % 100 == 0 else (entries, num_leading)

    monkeypatch.setattr(StoreIndex, "look_up", loses)
    with pytest.raises(AssertionError, match="should be found is absent"):
        FaultMachine(7, fault_rate=0.05).run(5000)


@interpreted
def test_chains_share_their_beginnings() -> None:
    machine = FaultMachine(0)
    first_keys = [chain[0].run.key for chain in machine.chains]
    assert len(set(first_keys)) < len(first_keys)
    assert sum(len(each.frame) for each in machine.contents.values()) > CAP, "the disk is too large to evict"


@pytest.mark.parametrize(
    ("medium", "codec"),
    [*((medium, NO_CODEC) for medium in MEDIA), ("folder", Zstd()), ("folder", AesGcm(bytes(32)))],
    ids=str,
)
def test_faults_of_real_media_are_misses_in_time(medium: str, codec: Codec, tmp_path: Path) -> None:
    try:
        machine = RealMachine(medium, tmp_path, codec=codec)
    except PermissionError as problem:
        pytest.skip(str(problem))
    machine.run(300)
    machine.finish()
    assert machine.ledger.num_faults > 30
    assert machine.seen["entries served"] > 0
    assert machine.seen["judged at quiet moments"] > 0
    assert machine.seen["found by a scan"] > 0


def test_the_machine_of_real_media_notices_frames_that_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenFrame, "compare", lambda *_: None)
    machine = RealMachine("folder", tmp_path)
    with pytest.raises(AssertionError, match="wrong answer"):
        machine.run(5000)


def test_the_machine_of_real_media_notices_a_root_that_is_not_written_to_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = RealMachine("folder", tmp_path)
    monkeypatch.setattr(FolderBody, "_make_folders", lambda *_: None)
    with pytest.raises(AssertionError, match="nothing is stored any more"):
        machine.run(5000)


def test_killed_stores_leave_whole_entries_that_the_next_one_serves() -> None:
    ledger, seen = kill_stores(6, 0, lambda _: None)
    assert ledger.num_faults >= 6
    assert seen["entries served"] > 0
