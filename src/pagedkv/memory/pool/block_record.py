"""Where a block is, what holds it, and which steps touch it: the columns that change most often, and nothing else.

Owns ``QUEUE`` (the place), ``REF_COUNT``, ``HOLD_STEP``, ``PENDING_STEP`` and ``LIFE``, with the counts that follow
from places. Each function is one change of one block and decides nothing: when a block changes is decided by its life
cycle (:mod:`~pagedkv.memory.pool.life_cycle`), by what orders free blocks, and by operations on rows where steps write
blocks.

::

    NEW --content is on its way--> IN_USE ----------> FREE             a place; FREE and a name: the block is cached
     ^                               ^  '--> DEFERRED --'
     '------------ begin ------------+----------------'                a reference to a free block leads back
"""

import numpy as np
import numpy.typing as npt

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.contract.arrays import Int32Array, Int64Array
from pagedkv.memory.pool.blocks import (
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
    """Begin with all blocks free but the null block, which is none."""
    records[1:num_blocks, QUEUE] = FREE
    counts[NUM_FREE] = num_blocks - 1


@inlined
def begin_life(records: Int32Array, block: int) -> None:
    """Let a block that was taken out of the free ones begin another life, with one reference and no content."""
    records[block, REF_COUNT] = 1
    records[block, LIFE] += 1
    records[block, HOLD_STEP] = 0
    records[block, PENDING_STEP] = 0
    records[block, QUEUE] = NEW


@inlined
def end_life(records: Int32Array, block: int) -> None:
    """Give the content of a block up: links to it die."""
    records[block, LIFE] += 1


@inlined
def note_content(records: Int32Array, block: int) -> None:
    """Note that a new block has content, or that a move brings it: no plan has it cleared."""
    records[block, QUEUE] = IN_USE


@inlined
def note_no_content(records: Int32Array, block: int) -> None:
    """Note that a block in use has no content: the next plan may have it cleared."""
    records[block, QUEUE] = NEW


@inlined
def enter_free(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Count a block among the free ones, and among the cached ones if it has a name."""
    records[block, QUEUE] = FREE
    counts[NUM_FREE] += 1
    if records[block, NAME]:
        counts[NUM_CACHED] += 1


@inlined
def leave_free(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Count a block among the free ones no longer."""
    records[block, QUEUE] = IN_USE
    counts[NUM_FREE] -= 1
    if records[block, NAME]:
        counts[NUM_CACHED] -= 1


@inlined
def count_taken(counts: Int64Array, num_blocks: int) -> None:
    """Count so many blocks without a name among the free ones no longer; :func:`begin_life` of each sets its place."""
    counts[NUM_FREE] -= num_blocks


@inlined
def enter_deferred(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Let an unreferenced block wait for a step."""
    records[block, QUEUE] = DEFERRED
    counts[NUM_DEFERRED] += 1


@inlined
def leave_deferred(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Let a block wait for a step no longer."""
    records[block, QUEUE] = IN_USE
    counts[NUM_DEFERRED] -= 1


@inlined
def stand_aside(records: Int32Array, block: int) -> None:
    """Mark a free block that is out of every order for a while. It counts as free, and :func:`stand_again` follows."""
    records[block, QUEUE] = IN_USE


@inlined
def stand_again(records: Int32Array, block: int) -> None:
    """Undo :func:`stand_aside`."""
    records[block, QUEUE] = FREE


# References


@inlined
def add_references(records: Int32Array, block: int, num_references: int) -> None:
    """Count more references to a block."""
    records[block, REF_COUNT] += num_references


@inlined
def drop_reference(records: Int32Array, block: int) -> None:
    """Count one reference to a block less."""
    records[block, REF_COUNT] -= 1


# Steps


@inlined
def hold_until(records: Int32Array, block: int, step: int) -> None:
    """Note that ``step`` is the last that a block waits for."""
    records[block, HOLD_STEP] = step


@inlined
def become_copy(source: Int32Array, block: int, destination: Int32Array, place: int, step: int) -> None:
    """Note that a plan copies a block to a place, here or on the other side: both wait for that step."""
    destination[place, PENDING_STEP] = source[block, PENDING_STEP]
    destination[place, QUEUE] = IN_USE
    source[block, HOLD_STEP] = step
    destination[place, HOLD_STEP] = step


@inlined
def raise_hold(records: Int32Array, block: int, step: int) -> None:
    """Note that a block waits for ``step`` at least."""
    records[block, HOLD_STEP] = max(records[block, HOLD_STEP], step)


@inlined
def stamp_release(records: Int32Array, block: int, number: int) -> None:
    """Number the release of a free leased block, which no step holds; 0 takes the number away."""
    records[block, RELEASED] = number


@inlined
def set_pending(records: Int32Array, block: int, step: int) -> None:
    """Note that ``step`` is the last that writes a block."""
    records[block, PENDING_STEP] = step


@inlined
def raise_pending(records: Int32Array, block: int, step: int) -> None:
    """Note that ``step`` writes a block."""
    records[block, PENDING_STEP] = max(records[block, PENDING_STEP], step)


def lower_steps(records: Int32Array, num_before: int, is_held: npt.NDArray[np.bool_]) -> None:
    """Take so many from all steps that blocks note. ``is_held``: of each record whether it notes one as its hold."""
    records[:, PENDING_STEP] = np.maximum(records[:, PENDING_STEP] - num_before, 0)
    records[is_held, HOLD_STEP] = np.maximum(records[is_held, HOLD_STEP] - num_before, 0)


def set_pending_of(records: Int32Array, block: int, step: int) -> None:
    """Do what :func:`set_pending` does, from Python."""
    records[block, PENDING_STEP] = step
