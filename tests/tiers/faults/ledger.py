"""The count of faults: how often each happened, and what became of it. Every fault has one fate."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from pagedkv.tiers.words import Answer, Loaded, LoadEnd, StoreOutcome

UNNOTICED: Final = "no request waited for it"
HARMLESS: Final = {StoreOutcome.STORED, StoreOutcome.PRESENT, StoreOutcome.NOT_ADMITTED, StoreOutcome.BUSY}


@dataclass(slots=True)
class Ledger:
    """Faults by kind, and fates by kind and fate."""

    injected: Counter[str] = field(default_factory=Counter)
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    _resting: dict[bytes, list[str]] = field(default_factory=dict)
    _passing: list[str] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """Faults so far."""
        return sum(self.injected.values())

    def rest(self, kind: str, key: bytes) -> None:
        """Count a fault of what is stored under a key. Its fate comes when that is read, deleted or lost."""
        self.injected[kind] += 1
        self._resting.setdefault(key, []).append(kind)

    def settle(self, key: bytes, fate: str) -> None:
        """Give the faults of what was stored under a key their fate."""
        for kind in self._resting.pop(key, ()):
            self.fates[kind, fate] += 1

    def settle_all(self, fate: str) -> None:
        """Give all faults of what is stored their fate."""
        for key in list(self._resting):
            self.settle(key, fate)

    def keys(self) -> set[bytes]:
        """Return the keys whose content has a fault without a fate."""
        return set(self._resting)

    def happen(self, kind: str, fate: str = "") -> None:
        """Count a fault whose fate is known at once, or by the answers that it causes."""
        self.injected[kind] += 1
        if fate:
            self.fates[kind, fate] += 1
        else:
            self._passing.append(kind)

    def judge_answers(self, answers: list[Answer]) -> None:
        """Give the faults of this moment their fate by the answers that followed."""
        if not self._passing:
            return
        fate = UNNOTICED
        for answer in answers:
            if isinstance(answer, Loaded):
                if answer.cause not in {LoadEnd.NONE, LoadEnd.ABSENT}:
                    fate = f"loads ended early: {answer.cause}"
                    break
            elif answer.outcome not in HARMLESS:
                fate = f"content was not stored: {answer.outcome}"
        for kind in self._passing:
            self.fates[kind, fate] += 1
        self._passing.clear()

    def check(self) -> None:
        """Check that every fault has a fate. Raises AssertionError."""
        assert not self._resting, f"{len(self._resting)} damaged entries have no fate"
        assert not self._passing
        settled = Counter[str]()
        for (kind, _), count in self.fates.items():
            settled[kind] += count
        assert settled == self.injected, f"faults without a fate: {self.injected - settled}"

    def add(self, other: "Ledger") -> None:
        """Add the counts of another machine."""
        self.injected += other.injected
        self.fates += other.fates

    def lines(self) -> list[str]:
        """Return a table: each fault, and below it what became of it."""
        found = []
        for kind, count in sorted(self.injected.items()):
            found.append(f"{count:>10,}  {kind}")
            fates = {fate: many for (each, fate), many in self.fates.items() if each == kind}
            found += [f"{'':>12}{many:>10,}  {fate}" for fate, many in sorted(fates.items())]
        return found
