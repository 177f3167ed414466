"""CachedRuns: what is cached on the device and not yet offered to tiers that store before eviction.

Such a tier gets a run when its last block is among the next to be evicted, since of a sequence the tail goes before the
head. Until then the run waits here, by the digest of that block, and takes no memory of the device::

    free blocks, the next to be allocated first    | empty | v1 v2 v3 v4 ......................... |
    looked at after a step                         |-- a 64th of the pool --|
    and before a request is admitted               |---------- as many blocks as it takes more --|

What is evicted out of this order is missed: by a tenant at its cap, by the policies "hazard" and "priority", and when
leases end for want of blocks. It is evicted without being stored, as is what a step has no time to copy.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.space import BlockSpace
from pagedkv.tiers.entry_blocks import EntryLayout
from pagedkv.tiers.identity import RunChain

AHEAD: Final = 64
"""The part of a pool that is looked at after each step."""
MOST_AHEAD: Final = 256
"""Most blocks of it: about what decoding takes in a step. A look takes some 60 us for so many."""


@dataclass(slots=True, eq=False)
class OfferedSequence:
    """A sequence of which a tier is to be offered what is cached.

    Args:
        token_ids: int32 ``[n]``; num_settled: leading tokens that are computed.
        keys: its extra keys; chain: its runs.
        next_run: number of the first run that was not offered yet.
        with_end: whether its end is to be offered as well, if the layout has ends.
    """

    token_ids: Int32Array
    num_settled: int
    keys: RequestKeys
    chain: RunChain
    next_run: int = 0
    with_end: bool = True


@final
class CachedRuns:
    """Runs that wait for their eviction.

    Args:
        space: evicts them.
        layout: the blocks of each run.
    """

    def __init__(self, space: BlockSpace, layout: EntryLayout) -> None:
        self._space = space
        self._layout = layout
        whole = [group for group, spec in enumerate(space.config.groups) if keeps_whole_prefix(spec)]
        self._whole = np.array(whole, np.int32)
        pools = [space.config.groups[group].pool for group in whole]
        self._num_groups = {pool: pools.count(pool) for pool in pools}
        self._num_blocks = {pool.name: pool.num_blocks for pool in space.statistics().pools}
        self._runs: OrderedDict[bytes, tuple[OfferedSequence, int]] = OrderedDict()

    def add(self, sequence: OfferedSequence) -> None:
        """Let the runs of a sequence wait. O(tokens), and about 3 us for each new block of its chain."""
        if self._layout.has_runs:
            sequence.chain.extend(sequence.token_ids[: sequence.num_settled])
            for number, run in enumerate(sequence.chain.runs):
                self._runs[run.key] = (sequence, number)
                self._runs.move_to_end(run.key)
            while len(self._runs) > sum(
                self._num_blocks.values()
            ):  # of content that was never cached, or is not any more
                self._runs.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._runs.clear()

    def take_next(self, num_tokens: int) -> list[OfferedSequence]:
        """Take the runs that are evicted next, or while a request with so many new tokens is admitted.

        O(blocks of the request).
        """
        if not self._runs:
            return []
        keys: list[bytes] = []
        for pool, num_groups in self._num_groups.items():
            num_needed = -(-num_tokens // self._layout.block_size) * num_groups
            num_ahead = min(MOST_AHEAD, 1 + self._num_blocks[pool] // AHEAD)
            victims = self._space.next_victims(num_needed + num_ahead, pool)
            keys += [digest.tobytes() for digest in victims.digests[np.isin(victims.groups, self._whole)]]
        return self._taken(keys)

    def take_some(self, most: int) -> list[OfferedSequence]:
        """Take the runs of some sequences, those that wait longest first, whether they are evicted or not."""
        sequences: dict[int, None] = {}
        keys = []
        for key, (sequence, _) in self._runs.items():
            sequences[id(sequence)] = None
            if len(sequences) > most:
                break
            keys.append(key)
        return self._taken(keys)

    def _taken(self, keys: Iterable[bytes]) -> list[OfferedSequence]:
        """Take runs, and return from the first to the last of each sequence."""
        taken: dict[int, tuple[OfferedSequence, list[int]]] = {}
        for key in keys:
            found = self._runs.pop(key, None)
            if found is not None:
                sequence, number = found
                taken.setdefault(id(sequence), (sequence, []))[1].append(number)
        size = self._layout.run_tokens
        return [
            replace(
                sequence,
                token_ids=sequence.token_ids[: (max(numbers) + 1) * size + 1],
                num_settled=(max(numbers) + 1) * size,
                next_run=min(numbers),
                with_end=False,
            )
            for sequence, numbers in taken.values()
        ]
