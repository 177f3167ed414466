"""Bodies for tests of engines with tiers: one that a test holds up and damages, call by call."""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pagedkv.tiers import BodyTier, HostBody
from pagedkv.tiers.body import Stored, Usage
from pagedkv.tiers.frame import Buffer

__all__ = ["FAULTS", "TestBody", "tier_over"]

FAULTS: Final = ("fail", "flip", "cut", "gone", "other", "raise", "stall", "timeout")
LONGEST_STALL_S: Final = 30.0


class TestBody:
    """Entries in memory that are verified like those of a disk.

    Attributes:
        faults: what goes wrong with the next calls, by kind of call ("read", "write", "delete"); None: nothing.
        calls: how many calls of each kind came.
        may_go_on: cleared by a test to hold up every read and write, until it is set.
        has_come: set when a call is held up.
    """

    __test__ = False
    medium = "test"
    is_trusted = False
    is_immediate = False

    def __init__(self) -> None:
        self._kept = HostBody()
        self.faults: dict[str, deque[str | None]] = {kind: deque() for kind in ("read", "write", "delete")}
        self.calls: Counter[str] = Counter()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_come = threading.Event()

    def scan(self) -> Iterator[Stored]:
        """List the entries."""
        return self._kept.scan()

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Read an entry, or what a fault makes of it."""
        fault = self._begin("read")
        frame = self._kept.read(key, nbytes, timeout_s)
        if frame is None or fault is None:
            return frame
        damaged = bytearray(frame)
        if fault == "flip":
            damaged[len(damaged) // 2] ^= 4
        elif fault == "cut":
            del damaged[-64:]
        elif fault == "other":
            others = [each.key for each in self._kept.scan() if each.key != key]
            return self._kept.read(others[0], nbytes, timeout_s) if others else None
        elif fault == "gone":
            return None
        return memoryview(damaged)

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Write an entry; one that is damaged has a flipped bit, or is cut."""
        fault = self._begin("write")
        frame = bytearray(b"".join(pieces))
        if fault == "flip":
            frame[-1] ^= 1
        elif fault == "cut":
            del frame[len(frame) // 2 :]
        elif fault in {"gone", "other"}:
            return
        self._kept.write(key, [frame], timeout_s)

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete an entry."""
        self._begin("delete")
        return self._kept.delete(key, timeout_s)

    def usage(self) -> Usage:
        """Measure what is occupied."""
        return self._kept.usage()

    def close(self) -> None:
        """Let the calls that are held up continue."""
        self.may_go_on.set()

    def _begin(self, kind: str) -> str | None:
        self.calls[kind] += 1
        fault = self.faults[kind].popleft() if self.faults[kind] else None
        if fault == "stall":
            self.may_go_on.clear()
        if not self.may_go_on.is_set():
            self.has_come.set()
            assert self.may_go_on.wait(LONGEST_STALL_S), "a test held a call up and did not let it continue"
        if fault == "fail":
            raise OSError("a fault of the test")
        if fault == "timeout":
            raise TimeoutError("a fault of the test")
        if fault == "raise":
            raise RuntimeError("a fault of the test")
        return fault


def tier_over(body: TestBody, settings: Mapping[str, object] = MappingProxyType({}), **more: Any) -> BodyTier:  # noqa: ANN401
    """Make a tier over a body that loads whatever is there, however long a busy machine takes."""
    patient = {"read_timeout_s": LONGEST_STALL_S, **settings}
    given = {"loads": "always", "deadline_s": LONGEST_STALL_S, "settings": patient, **more}
    return BodyTier(lambda _: body, "64MiB", "test", **given)
