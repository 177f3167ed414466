"""The disk of the fault machine: changes are not synchronised, so a crash loses, tears and reorders the latest."""

import random
from dataclasses import dataclass, field
from typing import Final

from tests.tiers.faults.contents import Content

MOST_PENDING: Final = 40
AT_REST: Final = (
    "bit flipped",
    "cut short",
    "two files swapped",
    "file deleted",
    "another salt",
    "other weights",
    "old layout",
    "half a set",
    "emptied",
    "forged with a valid check",
)
UNREADABLE: Final = "read error"
"""The same, but only where a machine can make a file unreadable."""


@dataclass(slots=True)
class SimulatedDisk:
    """Files by key. ``pending`` are the changes since the last crash, oldest first; None deletes.

    ``unreadable`` are files whose reads fail until they are written or deleted.
    """

    files: dict[bytes, bytes] = field(default_factory=dict)
    durable: dict[bytes, bytes] = field(default_factory=dict)
    pending: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    nbytes: int = 0
    unreadable: set[bytes] = field(default_factory=set)

    def change(self, key: bytes, content: bytes | None) -> None:
        """Write or delete a file, unsynchronised. After many changes the oldest become durable."""
        self.nbytes += len(content or b"") - len(self.files.get(key, b""))
        _apply(self.files, key, content)
        self.unreadable.discard(key)
        self.pending.append((key, content))
        if len(self.pending) > MOST_PENDING:
            for old in self.pending[: MOST_PENDING // 2]:
                _apply(self.durable, *old)
            del self.pending[: MOST_PENDING // 2]

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
        self.unreadable &= self.files.keys()
        self.nbytes = sum(map(len, self.files.values()))


def _apply(files: dict[bytes, bytes], key: bytes, content: bytes | None) -> None:
    if content is None:
        files.pop(key, None)
    else:
        files[key] = content


def damaged(
    kind: str, key: bytes, files: dict[bytes, bytes], content: Content, rng: random.Random
) -> dict[bytes, bytes | None]:
    """Return what a fault at rest makes of a file: new content by key; None deletes. Empty where it changes nothing.

    No file becomes larger, or the disk had bytes that no store could count.
    """
    frame = files[key]
    changed: bytes | None = frame
    if kind == "bit flipped" and frame:
        flipped = bytearray(frame)
        flipped[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        changed = bytes(flipped)
    elif kind == "cut short" and frame:
        changed = frame[: rng.randrange(len(frame))]
    elif kind == "file deleted":
        changed = None
    elif kind == "two files swapped":
        other = rng.choice([name for name, theirs in files.items() if len(theirs) == len(frame)])
        return {key: files[other], other: frame} if files[other] != frame else {}
    elif kind in content.others:
        foreign = rng.choice(content.others[kind])
        changed = foreign if len(foreign) <= len(frame) else frame
    return {key: changed} if changed != frame else {}


def misread(frame: bytes, content: Content, others: list[bytes], rng: random.Random) -> tuple[str, bytes | None]:
    """Return another answer of a server for an entry, and its kind."""
    cut = rng.randrange(len(frame)) if frame else 0
    answers: dict[str, bytes | None] = {
        "server answers another entry": rng.choice(others),
        "server answers an older entry": content.others["old layout"][1],
        "server answers a truncated entry": frame[:cut],
        "server answers that there is none": None,
        "file read while it is written": frame[:cut] + bytes(len(frame) - cut),
    }
    kind = rng.choice(list(answers))
    return kind, answers[kind]
