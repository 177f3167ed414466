"""The arrays of the policy that learns: what stands where, and how much of it there is.

Bytes a block of a pool of C blocks, beside those of the pool::

    block 8 x 4 = 32 | runs 2 C to 4 C of 16 = 32..64 | ghosts 2.4 C rows of 64 = 154      = 218..250
    once: 746 classes of 276 float32 and two rows of ages = 0.8 MB; small pools have ghosts for 65,536 blocks

A *run* is a stretch of one sequence's blocks that were released together, are in one class, and were not asked for
since. Runs have serial numbers, which are stored in 31 bits: who stores one finds out by it whether the run is still
remembered. A block whose run has been *asked* for stores it negated, since the run is still what its class is known by.
"""

from typing import Final

import numpy as np

from pagedkv.memory.contract.arrays import Float64Array, Int32Array, Int64Array
from pagedkv.memory.pool.blocks import aligned_zeros
from pagedkv.memory.pool.eviction.policy import PolicyState, no_state

__all__ = ["new_arrays", "num_remembered"]

# Columns of a block's row.
RUN: Final = 0  # serial of its latest run; negated once it was asked for; 0: none
NUM_CHILDREN: Final = 1  # free cached blocks that continue it,
COUNTED_LIFE: Final = 2  # in this life of its own; in any other there are none
PLACE: Final = 3  # its place among the leaves, from 1 on; INNER or ABSENT
# Not the block's own: row p also holds place p of the dense array of leaves, a quarter of a cache line.
LEAF: Final = 4  # the leaf that has this place,
LEAF_TICKS: Final = 5  # and of its run what its worth follows from: TICKS,
LEAF_REFS: Final = 6  # REFS,
LEAF_CLASSES: Final = 7  # and CLASSES; NO_CLASSES
NUM_BLOCK_FIELDS: Final = 8

ABSENT: Final = 0  # in use, spare, deferred or without a name
INNER: Final = -1  # free and cached, and so is a block that continues it
NO_CLASSES: Final = -1  # it has no run that is remembered

# Columns of a run.
TICKS: Final = 0  # when it was released
REFS: Final = 1  # and how many blocks all requests before its own had
NUM_ALIVE: Final = 2  # blocks of it, cached or evicted, that were not asked for since, as far as they are remembered
CLASSES: Final = 3  # its classes, packed
NUM_RUN_FIELDS: Final = 4

# A row of ghosts: as many as a cache line holds.
FRAGMENT: Final = 0
GHOST_RUN: Final = 1
GHOST_FIELDS: Final = 2
GHOSTS_PER_ROW: Final = 8
GHOST_ROW_WORDS: Final = GHOST_FIELDS * GHOSTS_PER_ROW

# Counts.
NEXT_RUN: Final = 0  # serial of the next run, in 64 bits
OLDEST_RUN: Final = 1  # of the oldest that is remembered
SUM_ALIVE: Final = 2
NUM_LEAVES: Final = 3
RANDOM: Final = 4  # state of the generator
VICTIM: Final = 5  # the block that goes next, if it is a leaf,
VICTIM_RUN: Final = 6  # and of this run
VICTIM_LEFT: Final = 7  # how many more may go before victims are drawn again
NUM_REQUESTS: Final = 8
NUM_REFS: Final = 9  # blocks of all requests
TICK_OFFSET: Final = 10  # what ticks have beyond the caller's clock
IS_ON_CLOCK: Final = 11  # 1: ticks are the caller's; 0: blocks served
NEXT_REFRESH: Final = 12  # number of the request that begins the next sweep
SWEEP: Final = 13  # how many nodes the sweep has visited, both ways; NOT_SWEEPING
SWEPT_REQUESTS: Final = 14  # requests from the sweep before to this one
LAST_SWEEP: Final = 15  # request that began it
FIRST_BIN: Final = 16  # the bin whose runs are to be passed first
WORK: Final = 17  # pieces of work that no block pays for, since the pool was built: steps over runs and classes
ASKED_RUN: Final = 18  # the run whose blocks were asked for last,
ASKED_AT: Final = 19  # when that was,
NUM_ASKED: Final = 20  # and how many of them are not counted yet
FETCHED: Final = 21  # the block whose ghosts were fetched last: one further up than the next victim, or wherever
NUM_REUSED: Final = 22  # of those that are not counted yet: how many hit
HORIZON: Final = 23  # serial of the oldest run of which LRU would have a block,
SUM_WITHIN: Final = 24  # blocks alive of it and of later runs,
HORIZON_CUT: Final = 25  # and how many of that run LRU has evicted
NUM_GAINED: Final = 26  # hits that LRU would not have had
NUM_LOST: Final = 27  # hits that LRU would have had, and this policy had not
NUM_DEPARTED: Final = 28  # evictions of what LRU would have kept
PENDING: Final = 29  # those of them that LRU would still have, estimated, in units
NUM_RECOMPUTED: Final = 30  # of those asked and not counted yet: how many were cached, and could not be hit
NUM_DOUBTFUL: Final = 31  # such that LRU would have as well: lost, if their sequence has lost what it needs beside them
LOST_BEFORE: Final = 32  # NUM_LOST when a sequence ended last
LARGEST: Final = 33  # most blocks of a sequence
NUM_ASIDE: Final = 34  # blocks given back by themselves since a sequence ended last
NUM_PLAIN_COUNTS: Final = 35
NOT_SWEEPING: Final = -1
PENDING_UNIT: Final = 1024
MOST_DRAWN: Final = 64  # leaves to choose a victim from

# Trees of classes, level by level; leaves last.
OUTPUT_CLASSES: Final = 13
GAP_CLASSES: Final = 8
PREVIOUS_CLASSES: Final = 1 + OUTPUT_CLASSES
LENGTH_CLASSES: Final = 8
USE_CLASSES: Final = 4
FAN_OUTS: Final = (
    (2, 2, OUTPUT_CLASSES, GAP_CLASSES),  # last block of its sequence? used before? output, gap
    (OUTPUT_CLASSES, PREVIOUS_CLASSES),  # output, that of the request before
    (2, USE_CLASSES, LENGTH_CLASSES),  # last block? uses before, new blocks
)


def _num_nodes(fan_outs: tuple[int, ...]) -> int:
    sizes = np.cumprod((1, *fan_outs))
    return int(sizes.sum())


def _num_leaves(fan_outs: tuple[int, ...]) -> int:
    return int(np.prod(fan_outs))


ROOT_A: Final = 0
ROOT_B: Final = ROOT_A + _num_nodes(FAN_OUTS[0])
ROOT_F: Final = ROOT_B + _num_nodes(FAN_OUTS[1])
NUM_NODES: Final = ROOT_F + _num_nodes(FAN_OUTS[2])
LEAVES_A: Final = ROOT_B - _num_leaves(FAN_OUTS[0])
LEAVES_B: Final = ROOT_F - _num_leaves(FAN_OUTS[1])
LEAVES_F: Final = NUM_NODES - _num_leaves(FAN_OUTS[2])

# Bins of ages, and columns of a node's row.
NUM_SECOND_BINS: Final = 61
NUM_REF_BINS: Final = 69
MOST_BINS: Final = NUM_REF_BINS
HITS: Final = 0  # of each bin
RISK: Final = MOST_BINS  # age at risk in each bin
RATE: Final = 2 * MOST_BINS
VALUE: Final = 3 * MOST_BINS  # weighted logarithm of the index
NUM_NODE_FIELDS: Final = 4 * MOST_BINS

# Rows behind the nodes: the bins of each scale.
SECONDS: Final = NUM_NODES
REFERENCES: Final = NUM_NODES + 1
SCRATCH: Final = NUM_NODES + 2
NUM_RATE_ROWS: Final = NUM_NODES + 3
START: Final = HITS
WIDTH: Final = RISK
MIDDLE: Final = RATE

# Behind the plain counts: one number a node, and how far the ring was passed for each bin.
PARENTS: Final = NUM_PLAIN_COUNTS
CURVES: Final = PARENTS + NUM_NODES  # the node whose curve a node has: its own, or the nearest above with data
PASSED: Final = CURVES + NUM_NODES
NUM_BINS: Final = NUM_SECOND_BINS + NUM_REF_BINS
ENDS: Final = PASSED + NUM_BINS  # the age, in ticks or in blocks, at which a run leaves each bin
DRAWN: Final = ENDS + NUM_BINS  # places of leaves that were drawn
HAS_DATA: Final = DRAWN + MOST_DRAWN  # 1: something was counted of the node
NUM_COUNTS: Final = HAS_DATA + NUM_NODES

SERIAL_MASK: Final = 2**31 - 1
GHOSTS_PER_BLOCK: Final = 16
GHOSTS_PER_RUN: Final = 8
FEWEST_REMEMBERED: Final = 1 << 16
ROWS_PER_100_GHOSTS: Final = 15
FIRST_RANDOM: Final = 0x2545F491
FIRST_REFRESH: Final = 16

# Ages.
TICKS_PER_SECOND: Final = 1_000_000 / 2**14
FIRST_SECONDS: Final = 0.5
FIRST_REFERENCES: Final = 32
MIDDLE_SECONDS: Final = 1.0  # added to the middle of a bin, so that rates of young runs stay bounded
MIDDLE_REFERENCES: Final = 200.0


def num_remembered(num_blocks: int) -> int:
    """How many blocks and ghosts a pool of so many blocks remembers the runs of."""
    return max(GHOSTS_PER_BLOCK * num_blocks, FEWEST_REMEMBERED)


def new_arrays(num_blocks: int) -> PolicyState:
    """Make the state of an empty pool that has learnt nothing. O(blocks)."""
    num_runs = 1 << (num_remembered(num_blocks) // GHOSTS_PER_RUN - 1).bit_length()
    num_rows = num_remembered(num_blocks) * ROWS_PER_100_GHOSTS // 100
    rates = np.zeros((NUM_RATE_ROWS, NUM_NODE_FIELDS), np.float32)
    for row, num_bins, more in (
        (SECONDS, NUM_SECOND_BINS, MIDDLE_SECONDS),
        (REFERENCES, NUM_REF_BINS, MIDDLE_REFERENCES),
    ):
        edges = _edges(row, num_bins)
        rates[row, START : START + num_bins] = edges[:-1]
        rates[row, WIDTH : WIDTH + num_bins] = np.diff(edges)
        rates[row, MIDDLE : MIDDLE + num_bins] = (edges[:-1] + edges[1:]) / 2 + more
    return no_state(num_blocks)._replace(
        counts=_new_counts(),
        table=aligned_zeros(num_rows, GHOST_ROW_WORDS).view(np.uint32),
        blocks=aligned_zeros(num_blocks + 1, NUM_BLOCK_FIELDS),
        runs=aligned_zeros(num_runs, NUM_RUN_FIELDS),
        rates=rates,
    )


def _edges(row: int, num_bins: int) -> Float64Array:
    """Ages at which the bins of a scale begin, and the end of the last: float64 ``[num_bins + 1]``."""
    first = FIRST_SECONDS if row == SECONDS else FIRST_REFERENCES
    return np.append(0.0, first * 2 ** (np.arange(num_bins) / 4))


def _ends() -> Int64Array:
    """Ages at which runs leave the bins, in ticks and in blocks: int64 ``[NUM_BINS]``. Nobody leaves the last bins."""
    in_ticks = np.ceil(_edges(SECONDS, NUM_SECOND_BINS)[1:] * TICKS_PER_SECOND)
    in_blocks = np.ceil(_edges(REFERENCES, NUM_REF_BINS)[1:])
    in_ticks[-1] = in_blocks[-1] = SERIAL_MASK + 1
    return np.concatenate([in_ticks, in_blocks]).astype(np.int64)


def _new_counts() -> Int64Array:
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[[NEXT_RUN, OLDEST_RUN, HORIZON]] = 1
    counts[RANDOM] = FIRST_RANDOM
    counts[NEXT_REFRESH] = FIRST_REFRESH
    counts[SWEEP] = NOT_SWEEPING
    counts[PARENTS : PARENTS + NUM_NODES] = np.concatenate(
        [_parents(root, fan_outs) for root, fan_outs in zip((ROOT_A, ROOT_B, ROOT_F), FAN_OUTS, strict=True)]
    )
    counts[CURVES:PASSED] = np.repeat((ROOT_A, ROOT_B, ROOT_F), [_num_nodes(fan_outs) for fan_outs in FAN_OUTS])
    counts[PASSED:ENDS] = 1
    counts[ENDS:DRAWN] = _ends()
    return counts


def _parents(root: int, fan_outs: tuple[int, ...]) -> Int32Array:
    """Number the parents of a tree's nodes, level by level; a root is its own."""
    parents = [np.array([root])]
    level = parents[0]
    for fan_out in fan_outs:
        parents.append(np.repeat(level, fan_out))
        level = level[-1] + 1 + np.arange(len(parents[-1]))
    return np.concatenate(parents).astype(np.int32)
