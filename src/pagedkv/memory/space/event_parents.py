"""Parents in events of blocks that are published late, when their parent may have left the window.

A duplicate is published when its carrier is gone (:mod:`~pagedkv.memory.space.merging`). Its event names its parent,
whose digest is in the row's table only until the window moves on. So the digest is kept from when the duplicate is
found::

    tables      [ P ][ D ]        D has the content of a cached block: its parent's digest is kept
    later       [   ][ D ]        the window has left P, and the cached block is gone: STORED D, parent P
"""

from typing import final

from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.contract.events import STORED
from pagedkv.memory.pool.blocks import DIGEST_WORDS, LIFE, NAME, NULL_BLOCK, NUM_EVENTS
from pagedkv.memory.pool.event_log import complete_event
from pagedkv.memory.space.feature import Publication, SpaceFeature
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.tables.publishing import BLOCK, BLOCK_LIFE, INDEX

__all__ = ["EventParentFeature"]


@final
class EventParentFeature(SpaceFeature):
    """Keeps the parents of duplicates in groups that drop blocks, and completes the events that lack them."""

    def __init__(self, state: SpaceState) -> None:
        """Begin without any duplicate. O(1)."""
        self._state = state
        self._parents: dict[tuple[int, int, int], Uint32Array] = {}

    def published(self, group: Group, batch: Int32Array, publication: Publication) -> None:
        """Complete the events of duplicates found before, then keep the parents of new ones."""
        if group.keeps_whole_prefix:
            return
        if self._parents:
            self._complete(group, publication.first_event)
            self._drop_resolved()
        for duplicate in publication.duplicates:
            parent = _parent_of(duplicate, group, batch, publication)
            if parent is not None:
                self._parents[group.index, int(duplicate[BLOCK]), int(duplicate[BLOCK_LIFE])] = parent.copy()

    def _complete(self, group: Group, first_event: int) -> None:
        pool = group.pool.arrays
        stop, size = int(pool.counts[NUM_EVENTS]), len(pool.event_log)
        for number in range(max(first_event, stop - size), stop):
            event = pool.event_log[number % size]
            if event[0] != STORED or event[-DIGEST_WORDS:].any():
                continue
            block = int(event[2])
            parent = self._parents.get((group.index, block, int(pool.records[block, LIFE])))
            if parent is not None:
                complete_event(pool, number, parent)

    def _drop_resolved(self) -> None:
        """Drop the parents of blocks that have a name by now, or other content."""
        groups = self._state.groups
        self._parents = {
            (index, block, life): parent
            for (index, block, life), parent in self._parents.items()
            if not (records := groups[index].pool.arrays.records)[block, NAME] and records[block, LIFE] == life
        }


def _parent_of(duplicate: Int32Array, group: Group, batch: Int32Array, publication: Publication) -> Uint32Array | None:
    """Return the digest of the block before a duplicate; None: it is the first, or the window has left that block."""
    index, table = duplicate[INDEX], group.arrays.table
    row = batch[table[batch, index] == duplicate[BLOCK]][0]
    parent: Uint32Array | None = None
    if index > 0 and table[row, index - 1] != NULL_BLOCK:
        parent = group.pool.arrays.digests[table[row, index - 1]]
    elif 0 < index == publication.num_digested[row]:
        parent = publication.chains[row]
    return parent
