"""The passes of a draft model through a step whose drafts are not known: which tokens each pass computes.

The first pass computes all known tokens: chunks of prompts, the token that each row decodes, and drafts from other
sources. Pass ``n`` computes the ``n``-th draft of each row that has so many. The last draft of a row is computed as
well, though no draft follows it. So the draft model's keys and values are written for every position of the plan, and a
prefix that another request hits has no gaps::

    row, its range       0: [ t ? ? ? )        1: [ p p p p )       2: [ t ? )
    pass 0, its tokens        t                      p p p p              t        then a draft after each t
    pass 1                      ?                                           ?      then a draft in row 0
    pass 2                        ?                                                then a draft in row 0
    pass 3                          ?                                              then no draft
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pagedkv.attention import GroupMetadata, KnownRanges, StepMetadata
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.engine.flat_batch import FlatBatch
from pagedkv.engine.sampling.sending import sent
from pagedkv.scheduling import UNKNOWN_TOKEN, Batch

__all__ = ["DraftPass", "OpenDrafts"]


@dataclass(frozen=True, slots=True, eq=False)
class DraftPass:
    """Tokens that go through the draft model together.

    Args:
        tokens: int64 ``[n]``, their places in the flat row of the step, ascending.
        positions: int64 ``[n]``, their positions in their sequences.
        places: int64 ``[p]``, places of the rows in the plan, ascending; starts, ends: int64 ``[p]``, their positions.
        drafting: int64 ``[n]``, the row of each token, as a place in :class:`OpenDrafts`; empty in the first pass.
        wanted: int64 ``[w]``, the tokens that a draft is sampled after, as places in ``tokens``.
        asking: int64 ``[w]``, the row of each wanted token, as a place in :class:`OpenDrafts`.
    """

    tokens: Int64Array
    positions: Int64Array
    places: Int64Array
    starts: Int64Array
    ends: Int64Array
    drafting: Int64Array
    wanted: Int64Array
    asking: Int64Array

    def part_of(self, step: StepMetadata, first_group: int) -> StepMetadata:
        """Cut a step's metadata down to this pass, in the groups from ``first_group`` on.

        The other groups stay as they are; the draft model does not read them. The numbers of the pass go to the device
        in one copy, which the host does not wait for.
        """
        offsets = np.append(0, np.cumsum(self.ends - self.starts))
        columns = (self.places, self.tokens, self.starts, self.ends, offsets)
        there = sent(torch.from_numpy(np.concatenate(columns)), step.groups[0].starts.device)
        places, tokens, *ranges = torch.split(there, [len(column) for column in columns])
        starts, ends, before = (each.int() for each in ranges)
        known = KnownRanges(self.starts.astype(np.int32), self.ends.astype(np.int32))
        parts = [
            GroupMetadata(group.block_tables[places], starts, ends, before, group.slot_mapping[tokens], known=known)
            for group in step.groups[first_group:]
        ]
        return StepMetadata((*step.groups[:first_group], *parts), len(self.places), len(self.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class OpenDrafts:
    """The drafts of a batch whose ids are not known, by row; rows in the order of the plan.

    Args:
        sequences: int64 ``[rows]``, places among the sequences that decode.
        places: int64 ``[rows]``, places among the plan's rows, ascending.
        counts: int64 ``[rows]``, number of drafts of each.
        at: int64 ``[rows]``, place in the flat row of the token before each row's drafts.
        among: int64 ``[rows]``, place of each row's first draft among all drafts of the batch.
    """

    sequences: Int64Array
    places: Int64Array
    counts: Int64Array
    at: Int64Array
    among: Int64Array

    @classmethod
    def of(cls, batch: Batch, flat: FlatBatch) -> "OpenDrafts":
        """Find the open drafts of a batch. O(rows)."""
        if batch.drafts is None:
            return cls(*np.zeros((5, 0), np.int64))
        counts = batch.drafts.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        some = np.flatnonzero(counts)
        some = some[batch.drafts.token_ids[firsts[some]] == UNKNOWN_TOKEN]
        some = some[np.argsort(flat.decoding[some])]
        places = flat.decoding[some]
        at = batch.plan.compute.offsets()[places].astype(np.int64)
        return cls(some, places, counts[some], at, firsts[some])

    @property
    def most(self) -> int:
        """The largest number of drafts of one row."""
        return int(self.counts.max(initial=0))

    def where(self, starts: Int64Array) -> Int64Array:
        """Return the places of all drafts, int64 ``[drafts]``, in an array where each row's begin at ``starts``."""
        within = np.arange(self.counts.sum()) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        listed: Int64Array = np.repeat(starts, self.counts) + within
        return listed

    def passes(self, batch: Batch, token_ids: Int32Array) -> Iterator[DraftPass]:
        """Yield the passes of a step; ``token_ids`` are those of its flat row. O(tokens)."""
        compute = batch.plan.compute
        starts, ends = compute.starts.astype(np.int64), compute.ends.astype(np.int64)
        positions = compute.positions().astype(np.int64)
        known = np.flatnonzero(token_ids != UNKNOWN_TOKEN).astype(np.int64)
        ends[self.places] -= self.counts
        wanted, asking = np.searchsorted(known, self.at).astype(np.int64), np.arange(len(self.places))
        yield DraftPass(known, positions[known], np.arange(len(starts)), starts, ends, asking[:0], wanted, asking)
        for number in range(1, self.most + 1):
            mine = np.flatnonzero(self.counts >= number)
            tokens = self.at[mine] + number
            first = positions[tokens]
            wanted = np.flatnonzero(self.counts[mine] > number)
            yield DraftPass(tokens, first, self.places[mine], first, first + 1, mine, wanted, mine[wanted])
