"""The loops of one space that run every step, specialized to the types of its arrays.

What they do is said where they are written, in :mod:`pagedkv.pool` and :mod:`pagedkv.tables`; here they only lose the
cost of finding out the types of a dozen arrays on every call (see :func:`~pagedkv.compilation.compiled.specialize`).
"""

import numpy as np

from pagedkv.arrays import Int32Array, Uint32Array
from pagedkv.compilation.compiled import specialize
from pagedkv.pool.block_pool import reuse_all, settle
from pagedkv.pool.blocks import PoolArrays
from pagedkv.pool.extra_keys import ExtraKeyArrays
from pagedkv.tables.digesting import digest_new_blocks
from pagedkv.tables.drafting import count_slots, give_slots_back, make_current, take_slots
from pagedkv.tables.explaining import BookArrays, record_miss
from pagedkv.tables.filling import (
    accept_computed,
    advance,
    begin_unknown,
    count_unfilled,
    find_samplers,
    first_unfilled,
    first_unfit_fill,
    is_any_unlimited,
    note_accepted,
    write_known,
)
from pagedkv.tables.forking import fork_row, inherit
from pagedkv.tables.growing import count_growth, first_unfit_growth, grow
from pagedkv.tables.matching import (
    collect_servable,
    count_free,
    first_other_block,
    longest_servable,
    match_chain,
    missing_block,
)
from pagedkv.tables.merging import merge_duplicates
from pagedkv.tables.pending import last_pending_step
from pagedkv.tables.planning import (
    collect_firsts,
    collect_new,
    collect_ranges,
    collect_touched,
    collect_unknown,
    collect_writes,
)
from pagedkv.tables.publishing import count_unpublished, publish_new_blocks
from pagedkv.tables.releasing import count_leaving, release_rows
from pagedkv.tables.rows import GroupArrays, clear_rows, first_unfit_row
from pagedkv.tables.seating import seat
from pagedkv.tables.truncating import accept, first_unfit_length, shrink

__all__ = ["DraftLoops", "SpaceLoops"]


class SpaceLoops:
    """Machine code for arrays of the types that a space has. Callers pass contiguous arrays of the given dtypes."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, rows: Int32Array, extra_keys: ExtraKeyArrays) -> None:
        """Compile the loops, or load them from disk."""
        ids = np.zeros(0, np.int32)
        longs = np.zeros(0, np.int64)
        records = np.zeros((0, 0), np.int64)
        book = BookArrays(records, records, longs)
        pairs = np.zeros((0, 2), np.int32)
        words: Uint32Array = np.zeros((0, 8), np.uint32)
        self.find_samplers = specialize(find_samplers, ids, ids, ids, ids, ids, ids, 0, ids, ids)
        self.is_any_unlimited = specialize(is_any_unlimited, ids, ids, ids)
        self.first_unfilled = specialize(first_unfilled, rows, ids, ids)
        self.first_unfit_fill = specialize(first_unfit_fill, rows, ids, ids, ids, ids, ids, 0, 0)
        self.write_known = specialize(write_known, pool, group, ids, ids, ids, ids)
        self.advance = specialize(advance, pool, rows, ids, ids, ids, ids, ids, ids)
        self.count_unfilled = specialize(count_unfilled, rows, ids, ids, ids, ids, ids)
        self.accept_computed = specialize(accept_computed, rows, ids, ids, ids, ids, ids, pairs, ids)
        self.note_accepted = specialize(note_accepted, rows, ids, ids, ids)
        self.begin_unknown = specialize(begin_unknown, rows, ids, ids, ids, ids)
        self.collect_unknown = specialize(collect_unknown, rows, ids, ids, ids, 0, 0, 0, 0, 0)
        self.match_chain = specialize(match_chain, pool, group, ids, ids, extra_keys, words, ids)
        self.longest_servable = specialize(longest_servable, pool, group, ids, ids, words, 0)
        self.missing_block = specialize(missing_block, pool, group, ids, ids, words, 0, 0)
        self.collect_servable = specialize(collect_servable, pool, group, ids, ids, words, 0, 0, ids)
        self.count_free = specialize(count_free, pool.records, ids)
        self.first_other_block = specialize(first_other_block, pool, group, ids, ids)
        self.reuse_all = specialize(reuse_all, pool, ids)
        self.last_pending_step = specialize(last_pending_step, pool.records, pool.counts, ids)
        self.seat = specialize(seat, pool, group, rows, 0, ids, ids, 0)
        self.digest_new_blocks = specialize(digest_new_blocks, pool, group, rows, ids, words, extra_keys)
        self.count_unpublished = specialize(count_unpublished, group, rows, ids)
        self.publish_new_blocks = specialize(publish_new_blocks, pool, group, rows, ids, pairs, ids, words)
        self.first_unfit_row = specialize(first_unfit_row, rows, ids, 0, 0)
        self.fork_row = specialize(fork_row, pool, group, rows, 0, ids)
        self.inherit = specialize(inherit, rows, ids, ids, ids, 0, ids)
        self.first_unfit_growth = specialize(first_unfit_growth, rows, ids, ids, 0, 0, 0, ids)
        self.count_growth = specialize(count_growth, pool.records, group, rows, ids, ids, 0, ids)
        self.grow = specialize(grow, pool, group, rows, ids, ids, ids, ids, 0, pairs, 0)
        self.first_unfit_length = specialize(first_unfit_length, pool, group, rows, ids, longs)
        self.shrink = specialize(shrink, pool, group, rows, ids, longs, ids)
        self.accept = specialize(accept, rows, ids, longs)
        self.release_rows = specialize(release_rows, pool, group, rows, ids, ids)
        self.count_leaving = specialize(count_leaving, rows, ids, ids)
        self.clear_rows = specialize(clear_rows, rows, ids, ids, ids, ids, 0)
        self.merge_duplicates = specialize(merge_duplicates, pool, group, rows, pairs, ids, 0)
        self.settle = specialize(settle, pool, 0)
        self.record_miss = specialize(record_miss, pool, group, extra_keys, ids, ids, 0, 0, ids, book)
        self.collect_touched = specialize(collect_touched, rows, ids, pairs)
        self.collect_writes = specialize(collect_writes, group, rows, ids, ids, 0, 0, 0)
        self.collect_ranges = specialize(collect_ranges, rows, ids, ids, 0, 0, 0, ids)
        self.collect_new = specialize(collect_new, pool.records, pool.counts, ids, 0, 0)


class DraftLoops:
    """The same of loops over draft states, for spaces that keep any."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, rows: Int32Array) -> None:
        """Compile the loops, or load them from disk."""
        ids = np.zeros(0, np.int32)
        is_so = False
        self.count_slots = specialize(count_slots, pool, group, group, rows, ids, ids, 0, is_so)
        self.take_slots = specialize(take_slots, pool, group, rows, ids, ids, 0, is_so)
        self.make_current = specialize(make_current, pool, group, group, rows, ids, ids, ids)
        self.give_slots_back = specialize(give_slots_back, pool, group, rows, ids, is_so)
        self.collect_firsts = specialize(collect_firsts, rows, ids, 0, 0, 0)
