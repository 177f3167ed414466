"""Processes that write to one folder, and are killed: ``python -m tests.tiers.folder_writers --kills 1000``."""

import argparse
import hashlib
import multiprocessing
import random
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

from pagedkv.tiers.folder_body import FolderBody

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pagedkv.tiers.folder_body"])
FINGERPRINT: Final = bytes(range(32))
CAP: Final = 100_000


def key(number: int) -> bytes:
    """Make a key."""
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def body(root: Path, cap_nbytes: int = 2**40, fingerprint: bytes = FINGERPRINT) -> FolderBody:
    """Open a root."""
    return FolderBody(root, fingerprint, cap_nbytes)


def frames_nbytes(root: Path) -> int:
    """Count the bytes of all frames, without the body."""
    return sum(path.stat().st_size for path in root.rglob("*.frame"))


def write_and_delete(root: Path, seed: int, begun: Event) -> None:
    """Write and delete at a shared root, as one of several processes."""
    own = body(root, 50_000)
    begun.set()
    for turn in range(60):
        number = (seed * 7 + turn * 13) % 40
        own.write(key(number), [bytes([seed]) * (500 + 100 * (number % 20))], 1.0)
        found = own.read(key((number * 3) % 40), 1, 1.0)
        assert found is None or len(set(bytes(found))) == 1, "torn"
        if turn % 5 == 0:
            own.delete(key(number), 1.0)


def open_often(root: Path, begun: Event) -> None:
    """Open a root again and again, beside other processes that do."""
    begun.set()
    own = [body(root, CAP) for _ in range(60)]
    assert len({each._direct for each in own}) == 1, "whether it has direct I/O was told wrong"


def hold_the_lock(root: Path, begun: Event) -> None:
    """Hold a root's lock until killed."""
    with body(root)._locked(20.0):
        begun.set()
        threading.Event().wait()


def write_for_ever(root: Path, begun: Event) -> None:
    """Write until killed."""
    own = body(root, CAP)
    begun.set()
    number = 0
    while True:
        own.write(key(number % 60), [bytes([number % 60]) * (3000 + number % 60)], 1.0)
        number += 1


def started(function: Callable[..., None], *given: Any) -> tuple[BaseProcess, Event]:  # noqa: ANN401
    """Start a process, and wait until it has begun. The event is to be kept as long as the process."""
    begun = FORKS.Event()
    process = FORKS.Process(target=function, args=(*given, begun), daemon=True)
    process.start()
    assert begun.wait(60), "the process does not begin"
    return process, begun


def kill_and_check(root: Path, rng: random.Random) -> None:
    """Kill a writer at any moment, and check that only whole frames are left, within the cap."""
    process, _begun = started(write_for_ever, root)
    threading.Event().wait(rng.random() * 0.02)
    process.kill()
    process.join()
    own = body(root, CAP)
    assert list((root / FINGERPRINT.hex()[:32] / "writing").iterdir()) == [], "a write of a dead process is left"
    for each in own.scan():
        content = own.read(each.key, each.nbytes, 1.0)
        assert content is not None
        assert len(content) == 3000 + content[0], "a frame is cut short"
        assert set(bytes(content)) == {content[0]}, "a frame is torn"
    with own._locked(20.0) as counter:
        counted = counter.get()
    assert counted is None or counted >= frames_nbytes(root), "the counter counts too little"
    assert frames_nbytes(root) <= CAP, "bytes beyond the cap"


def main() -> None:
    """Kill as many writers as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    given = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.kills):
            kill_and_check(Path(folder) / "root", rng)
        print(f"{given.kills} writers killed, no torn frame, no byte beyond the cap")  # noqa: T201


if __name__ == "__main__":
    main()
