"""Which blocks are where, followed event by event: how many there are, and how long they stay.

Exact only in stretches that begin with an empty cache: a process whose first message was seen, or, for some media, a
cache that was cleared: the device's, and the host's of SGLang, which empties both at once; others stay as they are.
After a gap, or where the recording began in the middle, blocks that nobody saw stored may be there, and those that
were seen may be gone: counting begins anew, with what is seen stored from then on, and is not called exact.

Two blocks may hold the same content: of equal prompts that end with a block, vLLM computes the last block each time.
Both are stored and both are removed, so the content is there until the last of them goes.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from pagedkv.planner.recording.wire import DEVICE, BlockHash, BlocksRemoved, BlocksStored

__all__ = ["LIFETIME_EDGES_S", "MediumRecord", "Residency"]

LIFETIME_EDGES_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
"""Upper edges of the histogram of lifetimes; the last bucket has none."""
MOST_POINTS: Final = 1024
CLEARED_AT_ONCE: Final = (DEVICE, "CPU_PINNED")
"""What a clear empties. The second is SGLang's name for its host memory, and nobody else's; vLLM's is CPU."""


@dataclass(slots=True)
class MediumRecord:
    """What happened in one medium.

    Args:
        num_blocks: there now, as far as seen.
        num_stored: blocks that came.
        num_copies: blocks that came while their content was there; they count nowhere else.
        num_removed: blocks that went, and were seen to come.
        num_removed_unseen: blocks that went and were never seen to come.
        peak: most at once, in exact stretches.
        seconds: of exact stretches.
        block_seconds: blocks times seconds, in these.
        lifetimes: blocks by the bucket of the time that they stayed.
        timeline: seconds since 1970, and the blocks from then on (None: unknown), at most 1,024 of these.
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
        """Blocks on average over exact stretches, or None without any."""
        return self.block_seconds / self.seconds if self.seconds else None

    def note(self, at_s: float, num_blocks: int | None) -> None:
        """Put a point on the timeline, which is thinned when it is full."""
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
        """What happened, by medium."""
        self.is_exact = False
        """Whether every block of the device is known now."""
        self._are_others_exact = False
        self.was_exact = False
        """Whether that was so at any time."""
        self.num_clears = 0
        """Times that the device's cache was cleared."""
        self.num_censored = 0
        """Blocks whose end was not seen: a gap, a restart, or the end of the recording came first."""
        self._now_s: float | None = None

    def store(self, stored: BlocksStored) -> None:
        """Take blocks, those that are there already as copies. At the time of the last `advance`."""
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
        """Take blocks away, of copies one."""
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
        """Take every block of the media away that are cleared at once; what is there is known from here on."""
        self.num_clears += 1
        for key in [key for key in self._since_s if key[0] in CLEARED_AT_ONCE]:
            self._end(self._medium(key[0]), self._since_s.pop(key))
            self._copies.pop(key, None)
        self._begin_exact()

    def begin_empty(self) -> None:
        """Follow a new process, whose cache is empty; what was there is gone, nobody saw when."""
        self._censor()
        self._are_others_exact = True
        self._begin_exact()

    def lose_track(self) -> None:
        """Something went unseen: what is there is unknown from here on."""
        self._censor()
        self.is_exact = self._are_others_exact = False
        for medium in self.media.values():
            medium.note(self._at_s, None)

    def advance(self, at_s: float) -> None:
        """Let time pass until ``at_s``, in seconds since 1970; a clock that goes back counts as one that stands."""
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
        """Blocks that are there now, as far as seen."""
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
