"""The time of each block's last release, and whether it was hit again: ages of hits and of evictions.

Events of the block space report which content is stored and removed. The time of the last release is found by reading
the reference counts after each operation that may have lowered them. Only the rules of retention of the core are used
here.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.events import REMOVED, CacheEvents
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.spec import GroupSpec, keeps_whole_prefix
from pagedkv.simulation.meters.ages import AgeHistogram
from pagedkv.space import ObservedSpace, Tail
from pagedkv.tables import first_needed_token, rule_of

__all__ = ["BlockHistory", "PoolHistory"]

NOT_RELEASED: Final = -1.0


class PoolHistory:
    """One pool's blocks.

    Attributes:
        hits_by_age: seconds from release to hit of each hit block; 0 if it was in use.
        evictions_by_age: the same for evicted blocks.
        num_evictions: evicted blocks.
        num_never_reused: evicted blocks without any hit.
    """

    def __init__(self, num_blocks: int) -> None:
        self._released_s = np.full(num_blocks, NOT_RELEASED)
        self._was_hit = np.zeros(num_blocks, np.bool_)
        self.hits_by_age = AgeHistogram()
        self.evictions_by_age = AgeHistogram()
        self.num_evictions = 0
        self.num_never_reused = 0

    def hit(self, block_ids: Int32Array, ref_counts: Int32Array, now_s: float) -> None:
        """Record that a new sequence shares some blocks; their reference counts include it."""
        self.hits_by_age.add(np.where(ref_counts > 1, 0.0, now_s - self._released_s[block_ids]))
        self._released_s[block_ids] = NOT_RELEASED
        self._was_hit[block_ids] = True

    def released(self, block_ids: Int32Array, now_s: float) -> None:
        """Record that some blocks are no longer referenced."""
        self._released_s[block_ids] = now_s

    def note(self, events: CacheEvents, ref_counts: Int32Array, now_s: float) -> None:
        """Record removed and stored blocks; a block's removal comes before its storing.

        Removed blocks that were free and are in use now were evicted. The others lost a name that could not be hit.
        """
        is_removal = events.kinds == REMOVED
        if not is_removal.any():
            self._forget(events.block_ids)
            return
        removed = events.block_ids[is_removal]
        evicted = removed[(self._released_s[removed] != NOT_RELEASED) & (ref_counts[removed] > 0)]
        self.evictions_by_age.add(now_s - self._released_s[evicted])
        self.num_evictions += len(evicted)
        self.num_never_reused += int((~self._was_hit[evicted]).sum())
        self._forget(events.block_ids)

    def _forget(self, block_ids: Int32Array) -> None:
        """Record that some blocks have new content, or content that cannot be hit."""
        self._released_s[block_ids] = NOT_RELEASED
        self._was_hit[block_ids] = False


class BlockHistory:
    """The blocks of all pools of a space.

    Args:
        space: the space, with events on.
        group_specs: its groups.
    """

    def __init__(self, space: ObservedSpace, group_specs: Sequence[GroupSpec]) -> None:
        self._space = space
        self._groups = list(enumerate(group_specs))
        self._sliding = [(index, spec) for index, spec in self._groups if not keeps_whole_prefix(spec)]
        self._slid: dict[str, list[Int32Array]] = {}
        self.pools = {name: PoolHistory(count) for name, count in space.config.blocks_by_pool().items()}

    def note_events(self, now_s: float) -> None:
        """Record the events since the last call; called after every operation that stores or evicts."""
        if self._space.has_events:
            for events in self._space.drain_events():
                self.pools[events.pool].note(events, self._space.ref_counts(events.pool), now_s)

    def admitted(self, row: int, num_hit_tokens: int, tails: Sequence[Tail], now_s: float) -> None:
        """Record the hits of a sequence just allocated, and then the evictions for its new blocks.

        The sequence has copies of the kept states of its hit (``tails``).
        """
        for tail in tails:
            pool, blocks = self._groups[tail.group][1].pool, np.array([tail.block], np.int32)
            self.pools[pool].hit(blocks, self._space.ref_counts(pool)[blocks] + 1, now_s)
        for index, spec in self._groups:
            hits = self._space.block_table(index)[row, : num_hit_tokens // spec.block_size]
            hits = hits[hits > 0]
            self.pools[spec.pool].hit(hits, self._space.ref_counts(spec.pool)[hits], now_s)
        self.note_events(now_s)

    def released(self, held: dict[str, list[Int32Array]], now_s: float) -> None:
        """Record which of some blocks, by pool, are no longer referenced."""
        self.note_events(now_s)  # first: a block whose name is withdrawn is not evicted
        self._note_released(held, now_s)

    def blocks_of(self, rows: list[int]) -> dict[str, list[Int32Array]]:
        """Copy the block ids of some rows, by pool."""
        held: dict[str, list[Int32Array]] = {}
        for index, spec in self._groups:
            table = self._space.block_table(index)
            counts = self._space.num_blocks(rows, index).tolist()
            held.setdefault(spec.pool, []).extend(
                table[row, :count].copy() for row, count in zip(rows, counts, strict=True)
            )
        return held

    def blocks_of_load(self, hits: Sequence[Int32Array], new: Sequence[Int32Array]) -> dict[str, list[Int32Array]]:
        """Collect the block ids that a load holds, by pool: those of its hit, and those behind it, group by group."""
        held: dict[str, list[Int32Array]] = {}
        for (_, spec), found, taken in zip(self._groups, hits, new, strict=True):
            held.setdefault(spec.pool, []).extend((found, taken))
        return held

    def _note_released(self, held: dict[str, list[Int32Array]], now_s: float) -> None:
        for pool, block_ids in held.items():
            known = np.concatenate(block_ids)
            known = known[known > 0]
            self.pools[pool].released(known[self._space.ref_counts(pool)[known] == 0], now_s)

    # When a step is acknowledged, windows slide, and rows that continued a kept state have their copy of it

    def before_acknowledge(self, plan: StepPlan) -> None:
        """Remember the blocks that the acknowledgement of a plan may release."""
        if not self._sliding:
            return
        self._slid = {}
        for index, spec in self._sliding:
            table = self._space.block_table(index)
            for row, end in zip(plan.compute.rows.tolist(), plan.compute.ends.tolist(), strict=True):
                stop = first_needed_token(*rule_of(spec), end) // spec.block_size
                self._slid.setdefault(spec.pool, []).append(table[row, :stop].copy())
        for copies in plan.copies:
            self._slid.setdefault(copies.pool, []).append(copies.src_ids)

    def after_acknowledge(self, end_s: float) -> None:
        """Record which of them are no longer referenced."""
        self.note_events(end_s)
        self._note_released(self._slid, end_s)
