"""The fault machine, a short run of it; `python -m tests.tiers.faults --operations 1000000` is the whole one."""

import pytest

from pagedkv.memory.compilation.compiled import is_compiling_at_all
from pagedkv.memory.tiers.actions import Fault
from pagedkv.memory.tiers.deletes import Deletes
from pagedkv.memory.tiers.frame import OpenFrame
from pagedkv.memory.tiers.reads import Ticket
from tests.tiers import faults
from tests.tiers.faults import FaultMachine

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("eviction", "fault_rate", "num_operations"),
    [("lru", 0.0, 500), ("lru", 0.4, 800), ("adaptive", 0.15, 600), ("fifo", 0.15, 600), ("hazard", 0.15, 100)],
)
def test_no_fault_causes_a_wrong_answer_a_stuck_request_or_a_byte_too_many(
    eviction: str, fault_rate: float, num_operations: int
) -> None:
    if eviction != "lru" and is_compiling_at_all():
        pytest.skip("the loops of each policy take 20 s to compile; the interpreted run has them all")
    machine = FaultMachine(len(eviction), eviction, fault_rate=fault_rate)
    machine.run(num_operations, checks_every=10)
    assert machine.seen["accepted"] >= num_operations / 50


def test_the_machine_notices_frames_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFrame, "compare", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong answer"):
        FaultMachine(1, fault_rate=0.4).run(5000)


def test_the_machine_notices_a_store_that_forgets_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Deletes.end

    def forgets(deletes: Deletes, action: int, fault: Fault | None) -> None:
        del fault  # as if every delete that failed had been done
        end(deletes, action, None)

    monkeypatch.setattr(Deletes, "end", forgets)
    with pytest.raises(AssertionError, match="bytes"):
        FaultMachine(2, fault_rate=0.4).run(5000)


def test_the_machine_notices_deadlines_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "cut", lambda *_: None)
    with pytest.raises(AssertionError, match=r"stuck|all that can come|waits for no read"):
        FaultMachine(3, fault_rate=0.4).run(5000)


def test_chains_share_their_beginnings() -> None:
    machine = FaultMachine(0)
    first_keys = [chain[0].run.key for chain in machine.chains]
    assert len(set(first_keys)) < len(first_keys)
    assert sum(len(each.frame) for each in machine.contents.values()) > faults.CAP, "the disk is too large to evict"
