"""All machines with so many faults: ``python -m tests.tiers.faults --faults 1000000 --seed 0``.

It prints how often each fault happened and what became of it, and fails at the first breach, with the seed that
repeats it. A run with one seed and one number of faults is the same each time, but for media on threads and kills.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.tiers.faults.kills import kill_stores
from tests.tiers.faults.ledger import Ledger
from tests.tiers.faults.machine import FaultMachine
from tests.tiers.faults.real_media import MEDIA, RealMachine

EACH: Final = 20_000
"""Operations of one machine over a simulated disk."""
POLICIES: Final = ("lru", "adaptive", "fifo", "lru", "adaptive", "fifo", "lru", "hazard")
"""The learning policy takes three times as long as the others."""
RATES: Final = (0.3, 0.2, 0.4, 0.1)
CHECKS_EVERY: Final = 40
"""Operations between two checks of all invariants; answers, events and bytes are judged at each."""
FAULTLESS_EVERY: Final = 16
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - looked at, not written
PARTS: Final = ("simulated", *MEDIA, "kills")


def run_simulated(num_faults: int, seed: int, told: Callable[[str], None]) -> tuple[Ledger, Counter[str]]:
    """Run machines over simulated disks until so many faults have happened."""
    ledger, seen = Ledger(), Counter[str]()
    while ledger.num_faults < num_faults:
        rate = RATES[seed // len(POLICIES) % len(RATES)] if seed % FAULTLESS_EVERY else 0.0
        policy = POLICIES[seed % len(POLICIES)]
        share = 0.4 if seed % 5 == 0 else 1.0
        machine = FaultMachine(seed, policy, rate, is_keyed=seed % 3 == 0, is_shared=seed % 2 == 1, salt_share=share)
        try:
            machine.run(EACH, CHECKS_EVERY)
        except AssertionError:
            print(f"seed {seed} found a breach at operation {machine.judge.operation}")  # noqa: T201
            raise
        ledger.add(machine.ledger)
        seen += machine.seen
        seen["machines"] += 1
        seen["operations"] += EACH
        seed += 1
        told(f"simulated: {ledger.num_faults:,} faults")
    return ledger, seen


def run_real(medium: str, num_faults: int, seed: int, told: Callable[[str], None]) -> tuple[Ledger, Counter[str]]:
    """Run a machine over a real medium until so many faults have happened."""
    with tempfile.TemporaryDirectory() as folder:
        machine = RealMachine(medium, Path(folder), seed)
        while machine.ledger.num_faults < num_faults:
            machine.run(500)
            told(f"{medium}: {machine.ledger.num_faults:,} faults")
        machine.finish()
        return machine.ledger, machine.seen


def report(part: str, ledger: Ledger, seen: Counter[str], seconds: float) -> None:
    """Print what happened, and what became of it."""
    print(f"\n{part}: {ledger.num_faults:,} faults in {seconds:,.0f} s, no breach")  # noqa: T201
    print("\n".join(ledger.lines()))  # noqa: T201
    print("  besides: " + ", ".join(f"{name} {count:,}" for name, count in sorted(seen.items())), flush=True)  # noqa: T201


def left_in_shared_memory() -> set[str]:
    """Return the files in shared memory that no living process has mapped."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {path.name for path in SHARED_MEMORY.iterdir() if str(path) not in mapped}


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", type=int, default=1_000_000, help="over simulated disks; a hundredth on each medium"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, action="append", help="some of the parts")
    parser.add_argument("--progress", action="store_true", help="tell how far it is, also into a file")
    given = parser.parse_args()
    before = left_in_shared_memory()

    def told(line: str) -> None:
        if sys.stderr.isatty() or given.progress:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    for part in given.only or PARTS:
        begun = time.monotonic()
        if part == "simulated":
            ledger, seen = run_simulated(given.faults, given.seed, told)
        elif part == "kills":
            ledger, seen = kill_stores(-(-given.faults // 1000), given.seed, told)
        else:
            ledger, seen = run_real(part, -(-given.faults // 100), given.seed, told)
        report(part, ledger, seen, time.monotonic() - begun)
    left = left_in_shared_memory() - before
    assert not left, f"left in shared memory: {sorted(left)}"
    print("\nno wrong answer, none stuck, no byte beyond the cap, nothing left in shared memory")  # noqa: T201


if __name__ == "__main__":
    main()
