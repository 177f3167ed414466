"""The compiled loops that a space runs every step, specialized to the types of its arrays.

The loops are documented in :mod:`pagedkv.blocks` and :mod:`pagedkv.tables`. Specialized, they save the cost
of finding the types of a dozen arrays on every call (see :func:`~pagedkv.compilation.compiled.specialize`).
"""

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from pagedkv.blocks.blocks import PoolArrays
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.life_cycle import reuse_all, settle
from pagedkv.compilation.compiled import is_compiling_at_all, specialize
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tables.batches import first_unfit_row
from pagedkv.tables.digesting import digest_new_blocks
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
from pagedkv.tables.first_allocation import allocate_row
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
from pagedkv.tables.row_record import clear_rows
from pagedkv.tables.rows import GroupArrays
from pagedkv.tables.truncating import accept, first_unfit_length, shrink

__all__ = ["Loops", "SpaceLoops"]

P = ParamSpec("P")
R = TypeVar("R")


class Loops:
    """Specialized loops, as attributes with the loops' names."""

    def _ready(self, loop: Callable[P, R], *examples: P.args, **named: P.kwargs) -> Callable[P, R]:
        """Return a stand-in that compiles a loop, or loads it from disk, at its first call, and then replaces itself.

        So a space compiles only the loops that it uses.
        """
        if not is_compiling_at_all():
            return specialize(loop, *examples, **named)
        owner = weakref.ref(self)  # a space that is dropped frees its arrays at once

        def first_call(*args: P.args, **kwargs: P.kwargs) -> R:
            entry = specialize(loop, *examples, **named)
            setattr(owner(), cast("Any", loop).__name__, entry)
            return entry(*args, **kwargs)

        return first_call


class SpaceLoops(Loops):
    """The loops of every space. Callers pass contiguous arrays of the given dtypes."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, rows: Int32Array, extra_keys: ExtraKeyArrays) -> None:
        """Set the types of their arguments. O(1)."""
        ids = np.zeros(0, np.int32)
        longs = np.zeros(0, np.int64)
        pairs = np.zeros((0, 2), np.int32)
        words: Uint32Array = np.zeros((0, 8), np.uint32)
        self.find_samplers = self._ready(find_samplers, ids, ids, ids, ids, ids, ids, 0, ids, ids)
        self.is_any_unlimited = self._ready(is_any_unlimited, ids, ids, ids)
        self.first_unfilled = self._ready(first_unfilled, rows, ids, ids)
        self.first_unfit_fill = self._ready(first_unfit_fill, rows, ids, ids, ids, ids, ids, 0, 0)
        self.write_known = self._ready(write_known, pool, group, ids, ids, ids, ids)
        self.advance = self._ready(advance, pool, rows, ids, ids, ids, ids, ids, ids)
        self.count_unfilled = self._ready(count_unfilled, rows, ids, ids, ids, ids, ids)
        self.accept_computed = self._ready(accept_computed, rows, ids, ids, ids, ids, ids, pairs, ids)
        self.note_accepted = self._ready(note_accepted, rows, ids, ids, ids)
        self.begin_unknown = self._ready(begin_unknown, rows, ids, ids, ids, ids)
        self.collect_unknown = self._ready(collect_unknown, rows, ids, ids, ids, 0, 0, 0, 0, 0)
        self.match_chain = self._ready(match_chain, pool, group, ids, ids, extra_keys, words, ids)
        self.longest_servable = self._ready(longest_servable, pool, group, ids, ids, words, 0, ids)
        self.missing_block = self._ready(missing_block, pool, group, ids, ids, words, 0, 0)
        self.collect_servable = self._ready(collect_servable, pool, group, ids, ids, words, 0, 0, ids, ids)
        self.count_free = self._ready(count_free, pool.records, ids)
        self.first_other_block = self._ready(first_other_block, pool, group, ids, ids)
        self.reuse_all = self._ready(reuse_all, pool, ids)
        self.last_pending_step = self._ready(last_pending_step, pool.records, pool.counts, ids)
        self.allocate_row = self._ready(allocate_row, pool, group, rows, 0, ids, ids, 0)
        self.digest_new_blocks = self._ready(digest_new_blocks, pool, group, rows, ids, words, extra_keys)
        self.count_unpublished = self._ready(count_unpublished, group, rows, ids)
        self.publish_new_blocks = self._ready(publish_new_blocks, pool, group, rows, ids, pairs)
        self.first_unfit_row = self._ready(first_unfit_row, rows, ids, 0, 0)
        self.fork_row = self._ready(fork_row, pool, group, rows, 0, ids)
        self.inherit = self._ready(inherit, rows, ids, ids, ids, 0, ids)
        self.first_unfit_growth = self._ready(first_unfit_growth, rows, ids, ids, 0, 0, 0, ids)
        self.count_growth = self._ready(count_growth, pool.records, group, rows, ids, ids, 0, ids, longs)
        self.grow = self._ready(grow, pool, group, rows, ids, ids, ids, ids, 0, pairs, 0)
        self.first_unfit_length = self._ready(first_unfit_length, pool, group, rows, ids, longs)
        self.shrink = self._ready(shrink, pool, group, rows, ids, longs, ids)
        self.accept = self._ready(accept, rows, ids, longs)
        self.release_rows = self._ready(release_rows, pool, group, rows, ids, ids)
        self.count_leaving = self._ready(count_leaving, rows, ids, ids)
        self.clear_rows = self._ready(clear_rows, rows, ids, ids, ids, ids, 0)
        self.merge_duplicates = self._ready(merge_duplicates, pool, group, rows, pairs, ids, ids, ids, 0)
        self.settle = self._ready(settle, pool, 0)
        self.collect_touched = self._ready(collect_touched, rows, ids, pairs)
        self.collect_writes = self._ready(collect_writes, group, rows, ids, ids, 0, 0, 0)
        self.collect_ranges = self._ready(collect_ranges, rows, ids, ids, 0, 0, 0, ids)
        self.collect_new = self._ready(collect_new, pool.records, pool.counts, ids, 0, 0)
        self.collect_firsts = self._ready(collect_firsts, rows, ids, 0, 0, 0)
