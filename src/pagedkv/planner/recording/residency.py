"""The stored blocks of each medium, event by event: their number, and how long they stay.

The figures are exact only in stretches that begin with an empty cache, after the first message of a process or after
a clear, or with a list of all blocks. A clear empties the device's cache, and with it SGLang's host cache, but no other
medium. After a gap, or if the recording began in the middle, unknown blocks may be stored and known blocks may be gone.
Then counting restarts with the blocks stored from there on, and is not exact.

Two blocks may have the same content: for equal prompts that end with a block, vLLM computes the last block each time.
Both are stored and both are removed, so the content is available until the last of them is removed.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan
from typing import Final

from pagedkv.wire import DEVICE, BlockHash, BlocksRemoved, BlocksStored

__all__ = ["LIFETIME_EDGES_S", "MediumRecord", "Residency"]

LIFETIME_EDGES_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
"""Upper edges of the histogram of lifetimes; the last bucket is open."""
MOST_POINTS: Final = 1024
UNSEEN_S: Final = float("nan")
"""The time at which a block was stored, where only a list of all blocks shows the block."""
CLEARED_AT_ONCE: Final = (DEVICE, "CPU_PINNED")
"""Media that a clear empties. Only SGLang uses the second name for its host memory; vLLM's name is CPU."""


@dataclass(slots=True)
class MediumRecord:
    """Figures of one medium.

    Args:
        num_blocks: blocks stored now, as far as events show.
        num_stored: blocks that were stored.
        num_copies: blocks stored while their content was stored already; counted nowhere else.
        num_removed: removed blocks that an event or a list had shown.
        num_removed_unseen: removed blocks that no event had stored.
        peak: most blocks at once, in exact stretches.
        seconds: seconds of exact stretches.
        block_seconds: blocks times seconds, in these.
        lifetimes: blocks by the bucket of their lifetime, of those that an event stored.
        timeline: pairs of seconds since 1970 and the blocks from then on (None: unknown), at most 1,024.
    """

    num_blocks: int = 0
    num_stored: int = 0
    num_copies: int = 0
    num_removed: int = 0
    num_removed_unseen: int = 0
    peak: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0
    lifetimes: list[int] = field(default_factory=lambda: [0] * (len(LIFETIME_EDGES_S) + 1))
    timeline: list[tuple[float, int | None]] = field(default_factory=list)
    _least_gap_s: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean number of blocks over exact stretches, or None without any."""
        return self.block_seconds / self.seconds if self.seconds else None

    def note(self, at_s: float, num_blocks: int | None) -> None:
        """Add a point to the timeline, which is thinned when it is full."""
        if self.timeline and num_blocks is not None and at_s - self.timeline[-1][0] < self._least_gap_s:
            return
        self.timeline.append((at_s, num_blocks))
        if len(self.timeline) > MOST_POINTS:
            del self.timeline[1:-1:2]
            self._least_gap_s = (at_s - self.timeline[0][0]) / MOST_POINTS


class Residency:
    """Follows the blocks of one engine."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int, BlockHash], float] = {}
        self._copies: dict[tuple[str, int, BlockHash], int] = {}
        self.media: dict[str, MediumRecord] = {}
        """Figures by medium."""
        self.is_exact = False
        """Whether every block of the device is known now."""
        self._are_others_exact = False
        self.was_exact = False
        """Whether ``is_exact`` was ever true."""
        self.num_clears = 0
        """Number of clears of the device's cache."""
        self.num_censored = 0
        """Blocks whose removal was not observed because of a gap, a restart, or the end of the recording."""
        self._now_s: float | None = None

    def store(self, stored: BlocksStored) -> None:
        """Record stored blocks, at the time of the last `advance`; blocks already stored count as copies."""
        medium = self._medium(stored.medium)
        for block_hash in stored.block_hashes:
            key = (stored.medium, stored.group, block_hash)
            if key in self._since_s:
                self._copies[key] = self._copies.get(key, 0) + 1
                medium.num_copies += 1
            else:
                self._since_s[key] = self._at_s
                medium.num_stored += 1
                medium.num_blocks += 1
        self._note(stored.medium)

    def remove(self, removed: BlocksRemoved) -> None:
        """Remove blocks; of several copies, only one."""
        medium = self._medium(removed.medium)
        for block_hash in removed.block_hashes:
            key = (removed.medium, removed.group, block_hash)
            if key in self._copies:
                self._remove_copy(key)
                continue
            since_s = self._since_s.pop(key, None)
            if since_s is None:
                medium.num_removed_unseen += 1
            else:
                self._end(medium, since_s)
        self._note(removed.medium)

    def clear(self) -> None:
        """Remove all blocks of the media that a clear empties; these media are exact from here on."""
        self.num_clears += 1
        for key in [key for key in self._since_s if key[0] in CLEARED_AT_ONCE]:
            self._end(self._medium(key[0]), self._since_s.pop(key))
            self._copies.pop(key, None)
        self._begin_exact()

    def begin_empty(self) -> None:
        """Follow a new process, whose cache is empty; the old blocks were removed at an unknown time."""
        self._censor()
        self._are_others_exact = True
        self._begin_exact()

    def begin_listed(self, at_s: float, listed: Iterable[BlocksStored]) -> None:
        """Continue with a list of all blocks of the device, from a time on.

        Changes since the last event are unknown. Lifetimes of blocks that no event stored are not counted.
        """
        self.is_exact = False
        self.advance(at_s)
        before = {key: since_s for key, since_s in self._since_s.items() if key[0] == DEVICE}
        for key in before:
            self._since_s.pop(key)
            self._copies.pop(key, None)
        num_known = 0
        medium = self._medium(DEVICE)
        medium.num_blocks = 0
        for stored in listed:
            for block_hash in stored.block_hashes:
                key = (stored.medium, stored.group, block_hash)
                num_known += key in before
                self._since_s[key] = before.get(key, UNSEEN_S)
                medium.num_blocks += 1
        self.num_censored += len(before) - num_known
        self._begin_exact()

    def lose_track(self) -> None:
        """Record that events were missed: which blocks are stored is unknown from here on."""
        self._censor()
        self.is_exact = self._are_others_exact = False
        for medium in self.media.values():
            medium.note(self._at_s, None)

    def advance(self, at_s: float) -> None:
        """Advance the time to ``at_s``, in seconds since 1970; a clock that goes back counts as stopped."""
        if self._now_s is None:
            self._now_s = at_s
        passed_s = max(0.0, at_s - self._now_s)
        self._now_s += passed_s
        for name, medium in self.media.items():
            if self._is_exact(name):
                medium.seconds += passed_s
                medium.block_seconds += passed_s * medium.num_blocks

    @property
    def num_open(self) -> int:
        """Number of blocks stored now, as far as events show."""
        return len(self._since_s)

    @property
    def _at_s(self) -> float:
        assert self._now_s is not None
        return self._now_s

    def _is_exact(self, name: str) -> bool:
        return self.is_exact if name in CLEARED_AT_ONCE else self._are_others_exact

    def _medium(self, name: str) -> MediumRecord:
        return self.media.setdefault(name, MediumRecord())

    def _end(self, medium: MediumRecord, since_s: float) -> None:
        medium.num_removed += 1
        medium.num_blocks -= 1
        if not isnan(since_s):
            medium.lifetimes[bisect_left(LIFETIME_EDGES_S, self._at_s - since_s)] += 1

    def _remove_copy(self, key: tuple[str, int, BlockHash]) -> None:
        self._copies[key] -= 1
        if not self._copies[key]:
            del self._copies[key]

    def _censor(self) -> None:
        self.num_censored += len(self._since_s)
        for name, count in Counter(name for name, _, _ in self._since_s).items():
            self.media[name].num_blocks -= count
        self._since_s.clear()
        self._copies.clear()

    def _begin_exact(self) -> None:
        self.is_exact = self.was_exact = True
        self._medium(DEVICE)
        for name in self.media:
            self._note(name)

    def _note(self, name: str) -> None:
        medium = self.media[name]
        if self._is_exact(name):
            medium.peak = max(medium.peak, medium.num_blocks)
            medium.note(self._at_s, medium.num_blocks)
