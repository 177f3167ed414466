"""Replays of windows: what they compute, judged layer by layer, and what the sequences that had one may rely on.

Written from promise 22 and its rule alone. A slot of a window group stands for the keys of all its layers, so what a
replay writes has a *depth*: of how many layers, one behind the other, the keys are right. Those of the first layer
always are; those of the next one are where all keys of the layer before are right that its queries see. So the depth
of a position is one more than the least in the window before it; what is gone has none. A replay may claim to be exact
where the depth is that of the model.

Whatever is not claimed to be exact is written as a number of its own, so that whoever else reads it is found out. The
same holds of all that a sequence computes behind a replay that is only approximate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pagedkv import BlockSpace, PrefixHit, SlidingWindow
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.record import EVICTED, NAME, REF_COUNT
from tests.space.sequence_model import GroupRule, ModelSequence, Prefixes, Replayed

__all__ = ["MOST_REPLAYED", "ReplayedRange", "check_replay", "evict_windows", "require_exact", "with_replay"]

MOST_REPLAYED: Final = 12


def with_replay(
    sequence: ModelSequence, groups: list[GroupRule], hit: PrefixHit, numbers: Prefixes, ident: int
) -> None:
    """Note of a sequence with all its tokens what its replay leaves inexact."""
    if not hit.num_replayed:
        return
    start, end = hit.num_tokens - hit.num_replayed, hit.num_tokens
    sure = {group.index: group.kept_blocks(end) * group.block_size for group in groups if group.replays}
    inexact = {index: range(start, first if hit.is_exact else end) for index, first in sure.items()}
    sequence.replay = Replayed(ident, start, inexact, sure)
    sequence.planned_replayed = sequence.sure_replayed = start
    if not hit.is_exact:
        other = numbers.follow(sequence.prefixes[end - 1], ("approximate", ident))
        sequence.prefixes[end:] = numbers.extend(other, sequence.keys, end, sequence.tokens[end:])


def check_replay(groups: list[GroupRule], hit: PrefixHit, plain: PrefixHit, most: int) -> None:
    """A replay is no longer than allowed, begins behind what hits without it, and in whole blocks of all windows."""
    assert (hit.num_replayed > 0) == (hit.num_tokens > plain.num_tokens)
    assert hit.num_replayed <= most
    start = hit.num_tokens - hit.num_replayed
    assert plain.num_tokens < start or not hit.num_replayed
    assert hit.is_exact or hit.num_replayed
    for group, blocks in zip(groups, hit.block_ids, strict=True):
        if not group.replays or not hit.num_replayed:
            continue
        assert group.replay is not None
        assert start % group.block_size == 0
        assert len(blocks) == start // group.block_size
        assert not any(blocks[-(-group.num_sink_tokens // group.block_size) :])
        assert hit.num_replayed >= min(group.replay.num_tokens, start)
    spans = [group.first_kept_span for group in groups if group.replays]
    needed = max((group.replay.num_layers for group in groups if group.replay), default=0) * max(spans, default=0)
    asked = max((group.replay.num_tokens for group in groups if group.replay), default=0)
    assert hit.is_exact or asked < needed, "what would be exact is called approximate"


def evict_windows(space: BlockSpace) -> None:
    """Remove the names of all unreferenced windows, as evicting them would."""
    state = space._state
    for group in state.groups:
        if not isinstance(group.spec, SlidingWindow):
            continue
        records = group.pool.arrays.records
        is_named = records[:, NAME] == group.index + 1
        for block in np.flatnonzero(is_named & (records[:, REF_COUNT] == 0)).tolist():
            drop_name(group.pool.arrays, block, EVICTED)
    state.version += 1


@dataclass(frozen=True, slots=True)
class ReplayedRange:
    """What a step computes again of a row, in window groups alone.

    Args:
        sequence: the sequence; tables: its block ids, one list a group.
        starts: where each window group begins; end: where all groups compute from.
    """

    sequence: ModelSequence
    tables: list[list[int]]
    starts: Mapping[int, int]
    end: int
    _depths: dict[tuple[int, int], int] = field(default_factory=dict)

    def compute(self, groups: Iterable[GroupRule]) -> None:
        """Find the depth of all that is computed again."""
        windows = [group for group in groups if group.replays]
        most = self.num_layers(windows)
        for position in range(min(self.starts.values()), self.end):
            seen = [self._depth(group, other, most) for group in windows for other in group.kept(position)]
            for group in windows:
                if position >= self.starts[group.index]:
                    self._depths[group.index, position] = min([most, *(1 + depth for depth in seen)])

    @staticmethod
    def num_layers(windows: Iterable[GroupRule]) -> int:
        """Layers of windows behind one another."""
        return max(group.replay.num_layers for group in windows if group.replay)

    def _depth(self, group: GroupRule, position: int, most: int) -> int:
        replay = self.sequence.replay
        if (group.index, position) in self._depths:
            return self._depths[group.index, position]
        is_inexact = replay is not None and position in replay.inexact[group.index]
        return most if self.tables[group.index][position // group.block_size] and not is_inexact else 0

    def depth(self, group: GroupRule, position: int) -> int:
        """Of how many layers the keys of a position are right."""
        return self._depths[group.index, position]


def require_exact(groups: list[GroupRule], computed: ReplayedRange) -> None:
    """Assert that a replay computes exactly whatever it does not leave inexact."""
    computed.compute(groups)
    windows = [group for group in groups if group.replays]
    for group in windows:
        for position in range(computed.starts[group.index], computed.end):
            is_claimed = not computed.sequence.is_inexact(group, position)
            assert not is_claimed or computed.depth(group, position) == computed.num_layers(windows), (
                f"group {group.index}: position {position} is computed again from too little: "
                f"{computed.depth(group, position)} layers are right"
            )
