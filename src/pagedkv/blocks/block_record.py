"""The columns of a block's record that change most often: its place, its references, and the steps that use it.

Only this module writes ``QUEUE`` (the place), ``REF_COUNT``, ``HOLD_STEP``, ``PENDING_STEP`` and ``LIFE``, and the
counts that follow from places. Each function makes one change to one block. The decisions are made by the block's life
cycle (:mod:`~pagedkv.blocks.life_cycle`), by the modules that order free blocks, and by operations on rows where
steps write blocks.

::

    NEW --content is on its way--> IN_USE ----------> FREE             places; a block that is FREE and named is cached
     ^                               ^  '--> DEFERRED --'
     '---------- begin_life ---------+----------------'                a reference to a free block leads back
"""

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.blocks import (
    DEFERRED,
    FREE,
    HOLD_STEP,
    IN_USE,
    LIFE,
    NAME,
    NEW,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_FREE,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    RELEASED,
)
from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = [
    "add_references",
    "all_free",
    "become_copy",
    "begin_life",
    "count_taken",
    "drop_reference",
    "end_life",
    "enter_deferred",
    "enter_free",
    "hold_until",
    "leave_deferred",
    "leave_free",
    "lower_steps",
    "note_content",
    "note_no_content",
    "raise_hold",
    "raise_pending",
    "set_pending",
    "set_pending_of",
    "stamp_release",
    "stand_again",
    "stand_aside",
]

# Places


def all_free(records: Int32Array, counts: Int64Array, num_blocks: int) -> None:
    """Mark all blocks except the null block as free."""
    records[1:num_blocks, QUEUE] = FREE
    counts[NUM_FREE] = num_blocks - 1


@inlined
def begin_life(records: Int32Array, block: int) -> None:
    """Start a new life of a block that was taken from the free ones, with one reference and no content."""
    records[block, REF_COUNT] = 1
    records[block, LIFE] += 1
    records[block, HOLD_STEP] = 0
    records[block, PENDING_STEP] = 0
    records[block, QUEUE] = NEW


@inlined
def end_life(records: Int32Array, block: int) -> None:
    """Mark the content of a block as lost, so that links to it become invalid."""
    records[block, LIFE] += 1


@inlined
def note_content(records: Int32Array, block: int) -> None:
    """Mark a new block as having content, present or brought by a move: it is not listed to be cleared."""
    records[block, QUEUE] = IN_USE


@inlined
def note_no_content(records: Int32Array, block: int) -> None:
    """Mark a block in use as having no content: the next plan may list it to be cleared."""
    records[block, QUEUE] = NEW


@inlined
def enter_free(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Mark a block as free, and count it; a named one also as cached."""
    records[block, QUEUE] = FREE
    counts[NUM_FREE] += 1
    if records[block, NAME]:
        counts[NUM_CACHED] += 1


@inlined
def leave_free(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Mark a block as no longer free, and no longer count it as free or cached."""
    records[block, QUEUE] = IN_USE
    counts[NUM_FREE] -= 1
    if records[block, NAME]:
        counts[NUM_CACHED] -= 1


@inlined
def count_taken(counts: Int64Array, num_blocks: int) -> None:
    """Subtract a number of unnamed blocks from the free ones; :func:`begin_life` of each sets its place."""
    counts[NUM_FREE] -= num_blocks


@inlined
def enter_deferred(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Mark an unreferenced block as deferred, and count it."""
    records[block, QUEUE] = DEFERRED
    counts[NUM_DEFERRED] += 1


@inlined
def leave_deferred(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Mark a block as no longer deferred, and no longer count it."""
    records[block, QUEUE] = IN_USE
    counts[NUM_DEFERRED] -= 1


@inlined
def stand_aside(records: Int32Array, block: int) -> None:
    """Mark a free block that is temporarily in no list. It still counts as free; :func:`stand_again` must follow."""
    records[block, QUEUE] = IN_USE


@inlined
def stand_again(records: Int32Array, block: int) -> None:
    """Undo :func:`stand_aside`."""
    records[block, QUEUE] = FREE


# References


@inlined
def add_references(records: Int32Array, block: int, num_references: int) -> None:
    """Add references to a block."""
    records[block, REF_COUNT] += num_references


@inlined
def drop_reference(records: Int32Array, block: int) -> None:
    """Subtract one reference from a block."""
    records[block, REF_COUNT] -= 1


# Steps


@inlined
def hold_until(records: Int32Array, block: int, step: int) -> None:
    """Set the last step that a block waits for."""
    records[block, HOLD_STEP] = step


@inlined
def become_copy(source: Int32Array, block: int, destination: Int32Array, place: int, step: int) -> None:
    """Record that a plan copies a block to another, here or on the other side (host or device): both wait for it."""
    destination[place, PENDING_STEP] = source[block, PENDING_STEP]
    destination[place, QUEUE] = IN_USE
    source[block, HOLD_STEP] = step
    destination[place, HOLD_STEP] = step


@inlined
def raise_hold(records: Int32Array, block: int, step: int) -> None:
    """Make a block wait at least until ``step``."""
    records[block, HOLD_STEP] = max(records[block, HOLD_STEP], step)


@inlined
def stamp_release(records: Int32Array, block: int, number: int) -> None:
    """Set the release number of a free leased block, which no step holds; 0 removes it."""
    records[block, RELEASED] = number


@inlined
def set_pending(records: Int32Array, block: int, step: int) -> None:
    """Set the last step that writes a block."""
    records[block, PENDING_STEP] = step


@inlined
def raise_pending(records: Int32Array, block: int, step: int) -> None:
    """Record that ``step`` writes a block."""
    records[block, PENDING_STEP] = max(records[block, PENDING_STEP], step)


def lower_steps(records: Int32Array, num_before: int, is_held: npt.NDArray[np.bool_]) -> None:
    """Lower all step numbers in the records by ``num_before``. ``is_held``: whether a record has a HOLD_STEP."""
    records[:, PENDING_STEP] = np.maximum(records[:, PENDING_STEP] - num_before, 0)
    records[is_held, HOLD_STEP] = np.maximum(records[is_held, HOLD_STEP] - num_before, 0)


def set_pending_of(records: Int32Array, block: int, step: int) -> None:
    """Do what :func:`set_pending` does, from Python."""
    records[block, PENDING_STEP] = step
