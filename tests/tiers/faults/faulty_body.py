"""A body around a real one, whose calls fail, hang, and bring other answers, as a test sets it."""

import errno
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from pagedkv.tiers.body import Body, Stored, Usage
from pagedkv.tiers.frame import Buffer
from tests.tiers.faults.contents import Content
from tests.tiers.faults.disk import misread

HANG_S: Final = 0.02
LONGEST_HANG_S: Final = 30.0


class FaultyBody:
    """Faults by chance, and outages until they are ended.

    Args:
        body: the real one.
        contents: what is stored under each key.
        happen: called with each fault and its key, before the call goes on: "read fails", ...
        seed: of the chances.

    Attributes:
        rate: of calls that fail or bring another answer.
        is_dead: every call fails.
        is_slow: clear while every call waits.
    """

    is_trusted = False
    is_immediate = False

    def __init__(
        self, body: Body, contents: dict[bytes, Content], happen: Callable[[str, bytes], None], seed: int
    ) -> None:
        self.body = body
        self.medium = body.medium
        self.rate = 0.0
        self.is_dead = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.num_refused = 0
        self._contents = contents
        self._happen = happen
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def scan(self) -> Iterator[Stored]:
        """List the entries of the inner body, or fail."""
        self._suffer("scan", b"")
        return self.body.scan()

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Read, or fail, or bring another answer."""
        self._suffer("read", key)
        frame = self.body.read(key, nbytes, timeout_s)
        with self._lock:
            if frame is None or self._rng.random() >= self.rate:
                return frame
            others = [self._contents[name].frame for name in self._rng.sample(list(self._contents), 3)]
            kind, answer = misread(bytes(frame), self._contents[key], others, self._rng)
        self._happen(kind, key)
        return answer

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Write, or fail before or after."""
        self._suffer("write", key)
        if self._chance(self.rate):
            self._happen("write finds a full disk", key)
            raise OSError(errno.ENOSPC, "a fault of the test")
        self.body.write(key, pieces, timeout_s)
        if self._chance(self.rate):
            self._happen("write fails after it is done", key)
            raise TimeoutError("a fault of the test")

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete, or fail."""
        self._suffer("delete", key)
        return self.body.delete(key, timeout_s)

    def usage(self) -> Usage:
        """Measure the inner body."""
        return self.body.usage()

    def close(self) -> None:
        """Close the inner body."""
        self.may_go_on.set()
        self.body.close()

    def _chance(self, rate: float) -> bool:
        with self._lock:
            return self._rng.random() < rate

    def _suffer(self, verb: str, key: bytes) -> None:
        assert self.may_go_on.wait(LONGEST_HANG_S), "an outage was not ended"
        if self.is_dead:
            raise ConnectionError("a fault of the test: dead")
        if self._chance(self.rate):
            kind = "times out" if self._chance(0.3) else "fails"
            self._happen(f"{verb} {kind}", key)
            if kind == "times out":
                threading.Event().wait(HANG_S)
                raise TimeoutError("a fault of the test")
            raise OSError("a fault of the test")
